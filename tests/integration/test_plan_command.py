"""The command `python -m spmdtrain.plan` and the processes it begins: how they end."""

import json
import re
import signal
import subprocess
import sys
import time
from html import unescape
from pathlib import Path

import pytest
from helpers import BOUND, DIGITS, GPT, assert_gone, environment, text_in
from plan_helpers import needs_libtpu, plan, planned

from spmdtrain.document.terminal import byte_size
from spmdtrain.plan.instruction_work import ElementKind

# Builds once, for the plan, and not a second time, when advice is tried.
FALLS = """
import os
import jax, jax.numpy as jnp, numpy as np, optax
from dataclasses import dataclass
from spmdtrain import ArrayDataset, Experiment, FunctionModel, RunConfig
WIDTH = 90_000
BUILT = []

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    global_batch_size: int | None = 8
    epochs: int | None = 1

def init(key):
    return {"w": jnp.zeros((WIDTH, WIDTH))}

def build(config):
    BUILT.append(config)
    if len(BUILT) > 1:
        print("falls", flush=True)
        os._exit(7)
    x = np.zeros((64, 8), np.float32)
    return Experiment(
        model=FunctionModel(init, lambda params, x: x.sum(-1) + params["w"][0, 0]),
        objective=lambda model, batch: {"loss": model(batch["x"])},
        optimizer=optax.adam(1e-3),
        train=ArrayDataset({"x": x}),
    )
"""
# Names that paths, markup and XLA's own text give a meaning of their own.
NAMES = ("[red]w", 'it\'s "q"', "a/b", "two\nlines", "ключ", "")
ODD = f"""
import jax, jax.numpy as jnp, numpy as np, optax
from dataclasses import dataclass
from spmdtrain import ArrayDataset, Experiment, FunctionModel, RunConfig
NAMES = {NAMES!r}

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    global_batch_size: int | None = 16
    epochs: int | None = 1

def init(key):
    return {{name: jax.random.normal(key, (8, 8 + n)) for n, name in enumerate(NAMES)}}

def apply(params, x):
    return sum((x @ w).sum(-1) for w in params.values())

def build(config):
    return Experiment(
        model=FunctionModel(init, apply),
        objective=lambda model, batch: {{"loss": model(batch["x"]) ** 2}},
        optimizer=optax.adam(1e-3),
        train=ArrayDataset({{"x": np.ones((64, 8), np.float32)}}),
    )
"""


@pytest.mark.drill
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_what_ends_it_ends_what_it_began(number: int, code: int, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "spmdtrain.plan", "--config", str(GPT)),
            *("--data-dir", str(text_in(tmp_path)), "--topology", "cpu:8", "--layers", "24"),
        ],
        env=environment() | {"TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        found: list[str] = []
        for _ in range(3600):
            if found := children.read_text().split():
                break
            time.sleep(0.05)
        (child,) = found
        time.sleep(2)  # it has imported JAX, and says what it does
        process.send_signal(number)
        _, errors = process.communicate(timeout=BOUND)
    finally:
        process.kill()
    assert process.returncode == code and errors.strip() == said
    # If its parent is killed, the child ends once it has imported JAX.
    assert_gone([int(child)])
    if number != signal.SIGKILL:
        assert list(folder.iterdir()) == []


@pytest.mark.nightly
def test_a_plan_is_kept_where_what_tries_its_advice_falls(tmp_path: Path) -> None:
    falls = tmp_path / "falls.py"
    falls.write_text(FALLS)
    ended = plan(falls, "--topology", "gpu:h100:1x8", "--strategy", "mirrored")
    assert ended.returncode == 1, ended.stderr
    assert "does not fit: 97.2 GB" in ended.stdout  # Adam, of 32.4 GB
    assert ended.stderr.startswith("falls\n")
    assert "error: planning for gpu:h100:1x8 ended with code 7, see above" in ended.stderr
    ended = plan(falls, "--topology", "gpu:h100:1x8", "--strategy", "mirrored", "--json")
    assert ended.returncode == 1, ended.stderr
    found = json.loads(ended.stdout)
    assert found["memory"]["params"] == 4 * 90_000**2 and found["failed"]
    assert found["error"] == "planning for gpu:h100:1x8 ended with code 7, see above"


@pytest.mark.nightly
def test_an_experiment_that_ends_the_process_is_reported(tmp_path: Path) -> None:
    ends = tmp_path / "ends.py"
    ends.write_text(FALLS.replace("BUILT.append(config)", "raise SystemExit(0)"))
    ended = plan(ends, "--topology", "cpu:8", "--json")
    assert ended.returncode == 2, ended.stderr
    assert f"{ends}: sys.exit(0) in build ({ends}:" in json.loads(ended.stdout)["error"]
    ends.write_text(FALLS.replace("BUILT.append(config)", "os._exit(0)"))
    ended = plan(ends, "--topology", "cpu:8", "--json")
    assert ended.returncode == 1, ended.stderr
    assert json.loads(ended.stdout)["error"] == "planning for cpu:8 ended without a plan"


@pytest.mark.nightly
def test_options_that_say_nothing_of_the_step_do_not_hinder(tmp_path: Path) -> None:
    options = ("--collectives.timeout", 60, "--resume", "must", "--profile-steps", "1:3")
    more = ("--best-metric", "accuracy", "--trackers", "wandb")
    ended = plan(DIGITS, *options, *more, "--topology", "cpu:2", "--measure", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["collectives"][0]["kind"] == "all-reduce" and found["measured"]["step"] > 0
    assert set(found["chip"]["element_rates"]) == set(ElementKind) and found["time"]["elements"] > 0


@pytest.mark.nightly
@needs_libtpu
def test_what_is_too_much_for_a_core_is_no_question_of_the_memory() -> None:
    option = "xla_tpu_scoped_vmem_limit_kib=16"
    ended = plan(DIGITS, "--topology", "v5e:1x1", "--compiler-options", option)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: the compiler: RESOURCE_EXHAUSTED") and "vmem" in line


@pytest.mark.nightly
@needs_libtpu
def test_two_devices_on_a_chip() -> None:
    ended = plan(DIGITS, "--topology", "tpu7x:2x2x1", "--strategy", "mirrored", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["chips"], found["devices"], found["flops"]["device"]) == (4, 8, 1_110_016)


@pytest.mark.nightly
def test_more_virtual_devices_than_there_can_be_are_refused() -> None:
    ended = plan(DIGITS, "--topology", "gpu:h100:2048x8")
    assert ended.returncode == 2, ended.stderr
    assert "16,384 devices; without the GPU compiler" in ended.stderr


def test_the_memory_that_jax_preallocates_on_a_gpu_is_reported(tmp_path: Path) -> None:
    nearly = tmp_path / "nearly.py"
    nearly.write_text(FALLS.replace("90_000", "55_000"))
    asked = ("--topology", "gpu:h100:1x8", "--strategy", "mirrored")
    (note,) = (x for x in planned(nearly, *asked)["notes"] if "three quarters" in x)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in note
    # In another file: Python may take the bytecode of one that is replaced within a second.
    fits = tmp_path / "fits.py"
    fits.write_text(FALLS.replace("90_000", "40_000"))
    assert not any("three quarters" in x for x in planned(fits, *asked)["notes"])


@pytest.mark.nightly
def test_a_failed_plan_is_reported_in_json_and_on_the_page_too(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = ("--global-batch-size", 20, "--topology", "cpu:8,cpu:2", "--json", "--html", page)
    ended = plan(DIGITS, *options, "--no-advice")
    assert ended.returncode == 2
    refused, made = json.loads(ended.stdout)["plans"]
    assert refused["topology"] == "cpu:8" and "20" in refused["error"]
    assert ended.stderr == f"error: {refused['error']}\n"
    assert made["topology"] == "cpu:2" and made["global_batch_size"] == 20
    html = page.read_text()
    assert f"Error: {refused['error']}" in unescape(html)
    assert f"<b>{byte_size(made['memory']['params'])}</b>" in html
    assert f">{byte_size(made['collectives'][0]['bytes'])}</td>" in html
    ended = plan(DIGITS, "--global-batch-size", 20, "--topology", "cpu:8", "--json")
    assert (ended.returncode, json.loads(ended.stdout)) == (2, refused)


@pytest.mark.nightly
def test_parameters_of_any_name_are_known(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text(ODD)
    found = planned(odd, "--strategy", "mirrored")
    names = {
        name for one in found["collectives"] for x in one["carries"] for name in x["parameters"]
    }
    assert names == {row["name"] for row in found["state"]} and len(names) == len(NAMES)
    by_size = {row["bytes"]: row["name"] for row in found["state"]}
    assert [by_size[4 * 8 * (8 + n)] for n in range(len(NAMES))] == list(NAMES)
    ended = plan(odd, "--strategy", "mirrored", "--topology", "cpu:8", "--no-advice")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"gradient of .* and 5 more", ended.stdout)


def test_a_model_without_products_has_a_plan_too(tmp_path: Path) -> None:
    """The compiler may make a product of a sum; of none in the model there is no share of it."""
    small = tmp_path / "small.py"
    small.write_text(FALLS.replace("90_000", "90"))
    found = planned(small, "--strategy", "mirrored")
    assert found["flops"]["step"] == 0
    assert not any("share" in note for note in found["notes"])
