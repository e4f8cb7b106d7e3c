"""Uncaught errors: exit codes of scripts, and tracebacks without frames of libraries."""

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from helpers import BOUND
from linear_model import trainer
from nbclient import NotebookClient

from spmdtrain import Loop, UserError
from spmdtrain.errors import exit_code_of, option

ATTEMPT = "from spmdtrain import UserError, NonFiniteError\n"
HOOK = "import sys\nsys.excepthook = lambda kind, error, trace: print('own:', error)\n"
EXITS = "import atexit\natexit.register(lambda: print('cleaned'))\n"


@pytest.mark.parametrize(
    ("code", "flags", "status", "out", "err"),
    [
        (EXITS + "raise UserError('too far')", "", 2, "cleaned", "error: too far"),
        # An error that no function of the package has raised, before anything was called.
        ("raise KeyError('x')", "", 1, "", None),
        (HOOK + "raise UserError('too far')", "", 2, "own: too far", ""),
        # A hook that the script installs afterwards has the last word.
        ("error = UserError('too far')\n" + HOOK + "raise error", "", 1, "own: too far", ""),
        ("raise UserError('too far')", "-i", 0, "", "error: too far"),
    ],
)
def test_a_script(
    code: str, flags: str, status: int, out: str, err: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ATTEMPT + code)
    line = [sys.executable, *flags.split(), str(script)]
    ended = subprocess.run(line, input="", capture_output=True, text=True, timeout=BOUND)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.strip() == out
    if err is None:
        assert ended.stderr.startswith("Traceback")
    else:
        assert ended.stderr.replace(">>>", "").strip() == err


def test_importing_the_package_leaves_the_hook_alone() -> None:
    code = "import sys, spmdtrain, spmdtrain.errors; sys.exit(sys.excepthook is sys.__excepthook__)"
    assert subprocess.run([sys.executable, "-c", code], timeout=BOUND).returncode == 1


# -- what an uncaught error shows ------------------------------------------------------------------

X = np.ones((16, 4), np.float32)
FIELDS = {"image": X, "label": X[:, :1]}


def squared(model: Any, batch: Any) -> Any:
    return {"loss": (model(batch["image"]) - batch["label"]) ** 2}


def misspelled(model: Any, batch: Any) -> Any:
    return {"loss": model(batch["images"])}  # HERE


def mismatched(model: Any, batch: Any) -> Any:
    return {"loss": model(batch["image"].T)}  # HERE


def called_back(event: Any) -> None:
    raise RuntimeError("in a callback") from KeyError("the cause")  # HERE


def augment(example: Any, generator: Any) -> Any:
    return {"image": example["img"]}  # HERE


class Source:
    def __len__(self) -> int:
        return 16

    def rows(self, indices: Any) -> Any:
        raise LookupError("no rows")  # HERE


def loop_step(state: Any, batch: Any, key: Any) -> Any:
    return state, {"loss": batch["y"].sum()}  # HERE


def fit(data: Any = FIELDS, **options: Any) -> None:
    trainer(**{"objective": squared} | options).fit(data, steps=2)


def run_loop() -> None:
    with Loop(steps=2, global_batch_size=8, quiet=True) as loop:
        state = loop.start(lambda key: {"params": {"w": jnp.zeros(4)}}, train=FIELDS)
        step = loop.compile_step(loop_step)
        step(state, next(loop.batches()))


MISSING = "(the fields of the batch: 'image', 'label')"


@pytest.mark.parametrize(
    ("run", "last"),
    [
        (partial(fit, objective=misspelled), f"KeyError: 'images' {MISSING}"),
        (partial(fit, objective=misspelled, jit=False), f"KeyError: 'images' {MISSING}"),
        (partial(fit, objective=misspelled, remat="full"), f"KeyError: 'images' {MISSING}"),
        (partial(fit, objective=mismatched), "TypeError: dot_general requires contracting"),
        (partial(fit, callbacks={"step": called_back}), "RuntimeError: in a callback"),
        (
            partial(fit, augment=augment),
            "KeyError: 'img' (the fields of the example: 'image', 'label')",
        ),
        (partial(fit, Source()), "LookupError: no rows"),
        (run_loop, f"KeyError: 'y' {MISSING}"),
    ],
)
def test_a_traceback_ends_with_the_users_line_and_the_message(
    run: Callable[[], None],
    last: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(Exception) as caught:
        run()
    assert sys.excepthook is not sys.__excepthook__
    sys.excepthook(caught.type, caught.value, caught.tb)
    lines = [line for line in capsys.readouterr().err.splitlines() if "^^^" not in line]
    assert lines[-1].startswith(last) and lines[-2].endswith("# HERE"), lines
    assert len(lines) < 20
    assert not any(other in line for line in lines for other in ("site-packages", "spmdtrain/"))


def test_all_frames_are_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError) as caught:
        fit(objective=misspelled)
    # The option in the environment sets this value at the start.
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        sys.excepthook(caught.type, caught.value, caught.tb)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert "train/trainer.py" in capsys.readouterr().err


def test_a_fault_of_the_package_keeps_its_frames(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdtrain.train.trainer.first_state", None)
    with pytest.raises(TypeError) as caught:
        fit()
    sys.excepthook(caught.type, caught.value, caught.tb)
    lines = capsys.readouterr().err.splitlines()
    assert any("train/trainer.py" in line for line in lines) and lines[-1].startswith(
        "TypeError: 'NoneType'"
    ), lines


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ([squared, squared], "objective is a list: it must be a function of .model, batch.; one"),
        (lambda m, b: (m(b["image"]) - b["label"]) ** 2, r"returned an array of shape \(\d+, 1\):"),
        (lambda m, b: m(b["image"]).mean(), r"an array of shape \(\), the mean over the batch"),
        (lambda m, b: (squared(m, b), {}), "the objective returned a tuple"),
        (lambda m, b: None, "the objective returned nothing"),
        (lambda m, b: {"a": 1, "b": 2}, "the objective returned the values 'a', 'b'"),
    ],
)
def test_an_objective_of_another_form_is_refused_by_its_form(objective: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        fit(objective=objective)


@pytest.mark.slow
def test_a_cell_of_a_notebook_shows_its_lines_and_the_message() -> None:
    cells = [
        "import optax\nfrom flax import nnx\nfrom functools import partial\nimport numpy as np\n"
        "from spmdtrain import Trainer\n"
        "def bad(model, batch):\n    return {'loss': model(batch['x'])}\n"
        "def make(**own):\n    return Trainer(model=partial(nnx.Linear, 4, 1), objective=bad,"
        " optimizer=optax.sgd(0.1), **own)",
        "make().fit({'image': np.ones((8, 4))}, steps=1, global_batch_size=8)",
        "make(lr=1)",
        "import json\njson.loads('{')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=BOUND, allow_errors=True, kernel_name="python3").execute()
    shown = [
        re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output.traceback)).splitlines()
        for cell in notebook.cells
        for output in cell.outputs
        if output.output_type == "error"
    ]
    for lines, last in zip(
        shown, ("KeyError: 'x' (the fields of the batch: 'image')", "UserError: "), strict=False
    ):
        assert lines[-1].startswith(last) and len(lines) < 20, lines
        assert not any("site-packages" in line or "spmdtrain/" in line for line in lines), lines
    assert len(shown) == 3 and any("json/decoder.py" in line for line in shown[2])  # not ours


def test_an_option_is_named_as_the_user_gives_it() -> None:
    cases = (
        ("log_every", 3),
        ("mesh.data", 2),
        ("jit", False),
        ("exact", True),
        ("freeze", ["a b"]),
    )
    named = [option(*case) for case in cases]
    assert named == ["log_every=3", "mesh.data=2", "jit=False", "exact=True", "freeze=('a b',)"]
    found: list[str] = []

    def command() -> int:
        found.extend(option(*case) for case in cases)
        raise UserError(option("steps"))

    assert exit_code_of(command) == 2
    assert found == ["--log-every 3", "--mesh.data 2", "--no-jit", "--exact", "--freeze 'a b'"]
    assert option("steps") == "steps"


@pytest.mark.parametrize("what", ["thread", "process"])
def test_a_limit_of_threads_and_processes_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise error

    if what == "thread":
        error: Exception = RuntimeError("can't start new thread")
        monkeypatch.setattr("threading.Thread.start", refuse)
        start: Callable[[], Any] = threading.Thread().start
    else:
        error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        code = compile("raise error", "subprocess.py", "exec")
        where = {"__name__": "subprocess", "error": error}
        start = partial(exec, code, where)

    assert exit_code_of(start) == 1
    words = "failed: no further thread or process can be started"
    assert capsys.readouterr().err.startswith(words)


def test_a_busy_resource_of_the_user_s_is_no_limit_of_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with pytest.raises(BlockingIOError):
        exit_code_of(fail)


def test_what_python_cannot_write_at_the_end_of_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say() -> int:
        print("in the buffer")
        return 0

    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert exit_code_of(say) == 1
    monkeypatch.setattr(sys, "stdout", None)  # as after >&-
    assert exit_code_of(say) == 0
    monkeypatch.undo()
    why = "failed: standard output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == why
