"""How much code a default run enters, and how far its parts are from each other.

The limits are today's values. They only go down: a change that makes one smaller lowers it here.
"""

import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import DIGITS

import spmdtrain
from spmdtrain.run import main
from spmdtrain.train.executor import MeshExecutor

PACKAGE = Path(spmdtrain.__file__).parent
# Turn exceptions into exit codes: `exit_code_of` calls the lambda of `main`.
NOT_COUNTED = {"errors.py:exit_code_of", "run.py:main.<locals>.<lambda>"}

FUNCTIONS, FILES = 1_047, 89
"""That two epochs of `digits_mlp` on 8 devices enter, with an empty cache of compiled programs.
Without comprehensions and lambdas."""
FRAMES_TO_OBJECTIVE = 9
"""From `train_step` to the objective, both included."""
CALLS_TO_JIT = 8
"""From `run.main` to `jax.jit` of the step; a thread continues the calls of who started it."""

ENTERED = """
import inspect, json, sys, threading

folder, entered = sys.argv[1], set()

def observe(frame, event, argument):
    if event == "call":
        entered.add(frame.f_code)

threading.setprofile(observe)
sys.setprofile(observe)
from spmdtrain.run import main
code = main(sys.argv[2:])
sys.setprofile(None)
functions = [
    (each.co_filename, each.co_qualname)
    for each in list(entered)
    if each.co_flags & inspect.CO_OPTIMIZED and not each.co_name.startswith("<")
]
print(json.dumps(sorted(name for name in functions if name[0].startswith(folder))))
sys.exit(code)
"""


def callers() -> list[str]:
    """Returns the functions of the package that are running in this thread, outermost first."""
    return [
        f"{path.relative_to(PACKAGE).as_posix()}:{frame.frame.f_code.co_qualname}"
        for frame in reversed(inspect.stack())
        if PACKAGE in (path := Path(frame.filename)).parents
    ]


def test_a_default_run_enters_few_functions_and_files(tmp_path: Path) -> None:
    arguments = ["--config", DIGITS, "--epochs", 2, "--workdir", tmp_path]
    ended = subprocess.run(
        [sys.executable, "-c", ENTERED, f"{PACKAGE}{os.sep}", *map(str, arguments)],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    entered = json.loads(ended.stdout.splitlines()[-1])
    names = {name for _, name in entered}
    assert {"main", "Trainer.fit"} < names
    assert any(name.endswith("train_step") for name in names)  # which a thread traces
    assert len(entered) <= FUNCTIONS
    assert len({file for file, _ in entered}) <= FILES


def test_few_frames_lead_from_the_step_to_the_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    config = tmp_path / "config.py"
    config.write_text(
        DIGITS.read_text().replace("def objective(", "def measured(")
        + "\n\ndef objective(model, batch):\n    SEEN()\n    return measured(model, batch)\n"
    )
    monkeypatch.setattr("builtins.SEEN", lambda: found.append(callers()), raising=False)
    main(["--config", str(config), "--steps", "2", "--workdir", str(tmp_path)])
    depths = [
        len(each) - number + 1
        for each in found
        for number, name in enumerate(each)
        if name.endswith("train_step")
    ]
    assert depths and max(depths) <= FRAMES_TO_OBJECTIVE


def test_few_calls_lead_from_the_command_to_jit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[threading.Thread, list[str]] = {}
    compiled: dict[str, list[str]] = {}
    start, jit = threading.Thread.start, jax.jit

    def calls() -> list[str]:
        return started.get(threading.current_thread(), []) + callers()

    def observed_start(self: threading.Thread) -> None:
        started[self] = calls()
        start(self)

    def observed_jit(function: Any, *arguments: Any, **options: Any) -> Any:
        compiled.setdefault(function.__name__, calls())
        return jit(function, *arguments, **options)

    monkeypatch.setattr(threading.Thread, "start", observed_start)
    monkeypatch.setattr(jax, "jit", observed_jit)
    main(["--config", str(DIGITS), "--steps", "2", "--workdir", str(tmp_path)])
    found = [name for name in compiled["train_step"] if name not in NOT_COUNTED]
    assert found[0] == "run.py:main"
    assert len(found) <= CALLS_TO_JIT, found


def test_four_calls_lead_from_the_command_to_the_jitted_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    load = MeshExecutor.load

    def observed(self: MeshExecutor, *arguments: Any) -> Any:
        program, batch = load(self, *arguments)

        def step(*arrays: Any) -> Any:
            found[:] = callers()
            return program(*arrays)

        assert type(program).__name__ == "PjitFunction"  # what follows the last call
        return step, batch

    monkeypatch.setattr(MeshExecutor, "load", observed)
    main(["--config", str(DIGITS), "--steps", "2", "--workdir", str(tmp_path)])
    assert set(found) > NOT_COUNTED
    assert [name for name in found if name not in NOT_COUNTED] == [
        "run.py:main",
        "train/command.py:execute",
        "train/trainer.py:Trainer.fit",
        "train/trainer.py:Trainer._train",
    ]
