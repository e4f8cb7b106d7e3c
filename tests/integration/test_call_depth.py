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


def test_four_calls_lead_from_the_command_to_the_jitted_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[str] = []
    load = MeshExecutor.load

    def observed(self: MeshExecutor, *arguments: Any) -> Any:
        program, batch = load(self, *arguments)

        def step(*arrays: Any) -> Any:
            stack = [frame for frame in inspect.stack() if PACKAGE in Path(frame.filename).parents]
            # Errors become exit codes in `exit_code_of`, which calls `execute` by a lambda.
            names = [frame.function for frame in stack if frame.function != "<lambda>"]
            callers[:] = [name for name in reversed(names) if name != "exit_code_of"]
            return program(*arrays)

        assert type(program).__name__ == "PjitFunction"  # what follows the last call
        return step, batch

    monkeypatch.setattr(MeshExecutor, "load", observed)
    main(["--config", str(DIGITS), "--steps", "2", "--workdir", str(tmp_path)])
    assert callers == ["main", "execute", "fit", "_train"]
