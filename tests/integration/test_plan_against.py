"""`plan --against RUN` and `--calibrate RUN`: the trace of a run beside the plan of its step."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import BOUND, environment, run
from plan_helpers import plan

SLOW = """
import time
from dataclasses import dataclass
from functools import partial
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from spmdtrain import ArrayDataset, Experiment, RunConfig

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 12
    global_batch_size: int | None = 64
    cpu_devices: int | None = 2
    slow: str = "callback"

def wait(x):
    time.sleep(0.05)
    return np.asarray(x)

class Model(nnx.Module):
    def __init__(self, slow, *, rngs):
        self.first, self.last = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)
        self.slow = slow

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        if self.slow == "callback":
            one = jnp.float32(1)
            x = x * jax.pure_callback(wait, jax.ShapeDtypeStruct((), one.dtype), one)  # slow
        elif self.slow == "gather":
            wide = jax.lax.stop_gradient(x[:, :1]) * jnp.arange(400_000.0)
            order = jnp.argsort(jax.lax.stop_gradient(x[:, 0]))
            x = x + wide[order].mean(-1, keepdims=True) * 1e-9  # slow
        return self.last(x)

def objective(model, batch):
    loss = optax.softmax_cross_entropy_with_integer_labels
    return {"loss": loss(model(batch["x"]), batch["y"])}

def build(config):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(256, 64)).astype(np.float32), random.integers(0, 10, 256)
    train = ArrayDataset({"x": x, "y": y.astype(np.int32)})
    return Experiment(
        model=partial(Model, config.slow),
        objective=objective,
        optimizer=optax.adam(1e-3),
        train=train,
    )
"""
LINE = {
    name: 1 + next(n for n, line in enumerate(SLOW.splitlines()) if part in line)
    for name, part in (("callback", "one)  # slow"), ("gather", "1e-9  # slow"))
}
# Of two virtual devices, so that they need not be measured.
ELEMENTS = ("arithmetic", "divisions", "functions", "reductions", "transposes")
RATES = {
    "chip": "cpu-2",
    "source": "measured on 2026-12-01 by hand",
    "rates": {"flops": 3e10, "bandwidth": 1e10, "link": 3e10, "latency": 2e-5}
    | {"element_rates": dict.fromkeys(ELEMENTS, 2e9)},
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("experiment") / "slow.py"
    file.write_text(SLOW)
    return file


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rates") / "rates.json"
    file.write_text(json.dumps(RATES))
    return file


def profiled(experiment: Path, slow: str, workdir: Path) -> Path:
    options = ("--slow", slow, "--workdir", workdir, "--profile-steps", "5:10", "--quiet")
    ended = run(experiment, *options)
    assert ended.returncode == 0, ended.stderr
    return workdir


@pytest.fixture(scope="module")
def workdir(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profiled(experiment, "callback", tmp_path_factory.mktemp("run") / "callback")


def plan_of(*options: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spmdtrain.plan", *map(str, options)],
        env=environment() | env,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def found(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


@pytest.mark.parametrize("slow", ["callback", "gather"])
def test_a_slow_operation_comes_first(
    slow: str, experiment: Path, rates: Path, workdir: Path, tmp_path: Path
) -> None:
    if slow == "gather":
        workdir = profiled(experiment, slow, tmp_path / slow)
    compared = found(plan_of("--against", workdir, "--rates", rates, "--json"))["comparison"]
    first = compared["worst"][0]
    assert first["line"].startswith(f"{experiment}:{LINE[slow]} ")
    classes = {each["name"]: each for each in compared["classes"]}
    if slow == "callback":
        assert first["class"] == "callbacks to the host" and 0.05 <= first["measured"] < 5
        assert classes["callbacks to the host"]["predicted"] is None
    else:
        assert first["class"] == "exposed collectives" and first["shape"] == "f32[64,400000]"
    # The trace also has what the devices had still to do when it began.
    assert 4 <= compared["steps"] <= 7 and compared["devices"] == 2
    assert len(compared["worst"]) == 10
    assert {"products", "kernels", "vector", "exposed collectives", "host gaps"} <= classes.keys()
    times = [each["measured"] for each in classes.values()]
    assert sum(times) == pytest.approx(compared["measured"]) and min(times) >= 0
    for name in ("products", "vector", "exposed collectives"):
        assert 0 < classes[name]["predicted"] < math.inf and classes[name]["measured"] > 0
    assert "not in the plan" not in classes  # the same program is compiled again


def test_a_person_reads_tables(rates: Path, workdir: Path) -> None:
    ended = plan_of("--against", workdir, "--rates", rates)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].endswith("slow.py, as config.json of the run says")
    assert lines[1] == "cpu:2: mirrored, mesh data=2; compiled by the CPU's own compiler"
    (row,) = (line for line in lines if "callback" in line and "slow.py" in line)
    assert f"slow.py:{LINE['callback']} (Model.__call__)" in row
    words = [line.split() for line in lines]
    assert ["time", "of", "a", "step", "predicted", "measured", "ratio"] in [
        [word for word in line if word not in "┃│"] for line in words
    ]
    assert f"note: the rates of cpu were measured on 2026-12-01 by hand ({rates})" in ended.stdout


@pytest.mark.nightly
def test_later_plans_use_the_rates_of_a_run(
    experiment: Path, workdir: Path, tmp_path: Path
) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    calibration = found(plan_of("--calibrate", workdir, "--json", **cache))["calibration"]
    file = tmp_path / "spmdtrain" / "rates" / "cpu-2.json"
    assert calibration["file"] == str(file) and file.stat().st_mode & 0o077 in (0o044, 0o004, 0)
    stored = json.loads(file.read_text())
    assert stored["chip"] == "cpu-2" and str(workdir) in stored["source"]
    assert stored["rates"]["gap"] == calibration["after"]["gap"] > 0
    step = calibration["predicted"]
    before, after = (abs(math.log(step[x] / step["measured"])) for x in ("before", "after"))
    assert after < before
    options = ("--config", experiment, "--topology", "cpu:2", "--no-advice", "--json")
    used = found(plan_of(*options, **cache))
    assert used["time"]["estimate"] == pytest.approx(step["after"])
    assert used["time"]["sources"]["host"] == "measured rates"
    assert any(f"by {workdir} ({file}): --rates none" in note for note in used["notes"])
    assert found(plan_of(*options, "--rates", "none", **cache))["time"] is None


def test_what_cannot_be_compared_is_said_in_a_sentence(
    experiment: Path, rates: Path, workdir: Path, tmp_path: Path
) -> None:
    def refused(*options: object) -> str:
        ended = plan_of(*options)
        assert ended.returncode == 2, (ended.stdout, ended.stderr)
        (line,) = ended.stderr.splitlines()
        return line.removeprefix("error: ")

    assert refused("--against", tmp_path).startswith(f"{tmp_path} is not the workdir of a run")
    assert "has no use with --against: the trace has" in refused("--against", workdir, "--measure")
    said = refused("--calibrate", workdir, "--global-batch-size", 8)
    assert said == (
        "--global-batch-size has no use with --calibrate: the run has recorded its options; leave "
        "it out"
    )
    assert refused("--against", workdir, "--calibrate", workdir).startswith("--against and --cali")
    assert "made on 2 x cpu" in refused("--against", workdir, "--topology", "v5e:2x2")
    assert "give --rates a file" in refused("--calibrate", workdir, "--rates", "none")
    assert refused("--against").endswith("give the workdir of a run")

    other = tmp_path / "other"
    ended = run(experiment, "--slow", "none", "--workdir", other, "--steps", 2, "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert "has no profiler trace: train with --profile-steps" in refused("--against", other)
    # The trace of another run, of the same program's name and of other instructions.
    (trace,) = workdir.glob("plugins/profile/*/*.xplane.pb")
    copy = other / trace.relative_to(workdir)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(trace.read_bytes())
    said = refused("--against", other, "--rates", rates)
    assert f"{copy.parent} is the trace of another program" in said
    copy.write_bytes(trace.read_bytes()[:-1000])
    said = refused("--against", other, "--rates", rates)
    assert said.startswith(f"{copy} cannot be read") and "profile the run again" in said


def test_a_plan_without_a_run_is_as_before(experiment: Path) -> None:
    ended = plan(experiment, "--topology", "cpu:2", "--slow", "none", "--no-advice", "--json")
    assert ended.returncode == 0 and json.loads(ended.stdout)["measured"] is None
