"""How far the jitted step is from the command."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from helpers import DIGITS

import spmdtrain
from spmdtrain.run import main
from spmdtrain.train.executor import MeshExecutor

PACKAGE = Path(spmdtrain.__file__).parent
# Turn exceptions into exit codes: `exit_code_of` calls the lambda of `main`.
NOT_COUNTED = {"errors.py:exit_code_of", "run.py:main.<locals>.<lambda>"}


def test_four_calls_lead_from_the_command_to_the_jitted_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[str] = []
    load = MeshExecutor.load

    def observed(self: MeshExecutor, *arguments: Any) -> Any:
        program, batch = load(self, *arguments)

        def step(*arrays: Any) -> Any:
            callers.clear()
            for frame in reversed(inspect.stack()):
                if PACKAGE in (path := Path(frame.filename)).parents:
                    name = frame.frame.f_code.co_qualname
                    callers.append(f"{path.relative_to(PACKAGE).as_posix()}:{name}")
            return program(*arrays)

        assert type(program).__name__ == "PjitFunction"  # what follows the last call
        return step, batch

    monkeypatch.setattr(MeshExecutor, "load", observed)
    main(["--config", str(DIGITS), "--steps", "2", "--workdir", str(tmp_path)])
    assert set(callers) > NOT_COUNTED
    assert [name for name in callers if name not in NOT_COUNTED] == [
        "run.py:main",
        "train/command.py:execute",
        "train/trainer.py:Trainer.fit",
        "train/trainer.py:Trainer._train",
    ]
