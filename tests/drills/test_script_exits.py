"""Exit codes and messages of scripts, which are those of the commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import BOUND, environment, status
from processes import codes, launching, quiet, show

from spmdtrain.testing import run_processes

pytestmark = pytest.mark.drill

SCRIPT = """
import sys
from functools import partial
import jax, numpy as np, optax
from spmdtrain import Loop, Trainer, UserError, initialize
from spmdtrain.models import MLP

initialize()
kind, workdir = sys.argv[1:]
x = np.ones((32, 4), np.float32)
y = x[:, 0] * (np.nan if kind == "nan" else 1)

def refuse(event):
    if jax.process_index() == jax.process_count() - 1:
        raise UserError("the moon is too far") if kind == "callback" else KeyError("mine")

def objective(model, batch):
    x, y = batch
    return {"loss": (model(x)[:, 0] - y) ** 2}

trainer = Trainer(
    model=partial(MLP, 4, (8,), 1), objective=objective, optimizer=optax.sgd(0.1), workdir=workdir,
    quiet=True, callbacks={"step": refuse} if kind in ("callback", "own") else {},
    **{"microbatches": 5} if kind == "option" else {},
)
trainer.fit((x, y), steps=4, global_batch_size=16)
"""
ENDS = {
    "option": (2, "error: .*microbatches"),
    "callback": (2, "error: the moon is too far"),
    "nan": (3, "stopped: step 1: loss and params not finite"),
    "own": (1, "KeyError: 'mine'"),
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def has_line(output: str, line: str) -> bool:
    return re.search(rf"^(\[\S+\] )?{line}", output, re.MULTILINE) is not None


@pytest.mark.parametrize("kind", ENDS)
def test_a_script_in_one_process(script: Path, tmp_path: Path, kind: str) -> None:
    code, line = ENDS[kind]
    words = [sys.executable, str(script), kind, str(tmp_path / "run")]
    ended = subprocess.run(words, env=environment(2), capture_output=True, text=True, timeout=BOUND)
    assert ended.returncode == code, ended.stderr
    assert has_line(ended.stderr, line), ended.stderr
    assert ("Traceback" in ended.stderr) == (code == 1)


@pytest.mark.parametrize("kind", ENDS)
def test_a_script_in_two_processes(script: Path, tmp_path: Path, kind: str) -> None:
    code, line = ENDS[kind]
    words = [sys.executable, str(script), kind, str(tmp_path / "run")]
    ended = run_processes(words, processes=2, timeout=BOUND, check=False, grace=60, env=quiet())
    assert codes(ended) == [code, code], show(ended)
    output = "\n".join(one.output for one in ended)  # the first that fails reports
    assert has_line(output, line) and ("Traceback" in output) == (code == 1), show(ended)
    if kind != "option":  # the run had begun
        assert status(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["option", "nan", "own"])
def test_the_launcher_restarts_no_script_that_would_fail_again(
    script: Path, tmp_path: Path, kind: str, processes: int
) -> None:
    words = [sys.executable, str(script), kind, str(tmp_path / "run")]
    with launching(words, "--max-restarts", 1, processes=processes) as (process, lines):
        code = process.wait(timeout=BOUND)
    output = "\n".join(text for _, text in lines)
    assert code == ENDS[kind][0], output
    assert ("restart 1 of 1" in output) == (kind == "own"), output


def test_the_switch_leaves_errors_to_python(script: Path, tmp_path: Path) -> None:
    words = [sys.executable, str(script), "callback", str(tmp_path / "run")]
    env = environment(1) | {"SPMDTRAIN_EXCEPTHOOK": "off"}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=BOUND)
    assert ended.returncode == 1 and "UserError: the moon is too far" in ended.stderr
    assert "train/trainer.py" in ended.stderr
    pair = run_processes(
        [*words[:-1], str(tmp_path / "pair")],
        processes=2,
        timeout=BOUND,
        check=False,
        grace=60,
        env=quiet() | {"SPMDTRAIN_EXCEPTHOOK": "off"},
    )
    assert codes(pair) == [1, 1], show(pair)
    assert "Traceback" in pair[0].output + pair[1].output, show(pair)
