"""The command `python -m spmdtrain.replay --explain`: faults of a model, its data and options."""

import re
import shlex
from pathlib import Path

import pytest
from helpers import GAN

from spmdtrain.replay.command import main as replay
from spmdtrain.run import main as train

EXPERIMENT = '''
"""Networks with a planted fault, which example 13 shows."""
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from spmdtrain import ArrayDataset, Experiment, LinenModel, RunConfig, Stream


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 6
    learning_rate: float | None = 0.01
    global_batch_size: int | None = 8
    log_every: int = 1
    shuffle: bool = False
    fault: str = ""
    if_finite: bool = False


@jax.custom_vjp
def halved(x):
    return x / 2


def backward(x, change):  # rule
    return (change * (x - x) / (x - x),)


halved.defvjp(lambda x: (x / 2, x), backward)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, fault, rngs):
        self.fault = fault
        self.blocks = nnx.List([Block(rngs) for _ in range(12 if fault == "log" else 2)])
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, is_bad):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.fault == "log" and number == 3:
                x = x + jnp.log(jnp.where(is_bad, 0 * x, 1))  # log
        if self.fault == "custom_vjp":
            x = halved(x)  # custom_vjp
        if self.fault == "bfloat16":
            wide = (x + jnp.where(is_bad, 1e38, 0)).astype(jnp.bfloat16)
            x = x + jnp.tanh(wide * 8 - wide * 8)  # bfloat16
        if self.fault == "attention":
            scores = x[:, :, None] * x[:, None, :]
            allowed = jnp.tri(4, dtype=bool) & ~is_bad[:, :, None]
            scores = jnp.where(allowed, scores, -jnp.inf)
            x = jnp.einsum("bqk,bk->bq", jax.nn.softmax(scores), x)  # attention
        if self.fault == "loops":
            def rooted(x):
                return jnp.sqrt(jnp.where(is_bad, -1.0, x * x + 1))  # loops

            def body(carry, number):
                return jax.lax.cond(number == 2, rooted, jnp.tanh, carry), None

            x = jax.lax.scan(body, x, jnp.arange(4))[0]
        if self.fault == "compiled":
            x = x + jnp.where(is_bad, x * 1e-38 * 1e30 * 1e30, 0)  # compiled
        if self.fault == "constant":
            return jnp.where(is_bad, jnp.inf, self.out(x))[:, 0]  # constant
        return self.out(x)[:, 0]


class Inner(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        return x + jnp.sqrt(x - 100)  # linen


class Outer(linen.Module):
    @linen.compact
    def __call__(self, x, is_bad):
        return linen.Dense(1)(Inner(name="inner")(x))[:, 0]


class Described(ArrayDataset):
    def describe(self, index):
        return f"record {index} of the archive"


def examples(fault):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    is_bad = np.arange(64) == 13
    if fault == "stream":
        x[13, 2] = np.nan
    return x, np.nan_to_num(x).sum(1), is_bad


class Reader:
    def __init__(self, index, count):
        self.number, self.count, self.arrays = index, count, examples("stream")

    def __iter__(self):
        return self

    def __next__(self):
        if self.number >= 64:
            raise StopIteration
        number, self.number = self.number, self.number + self.count
        return tuple(x[number] for x in self.arrays)

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


class Shard:
    def __init__(self, *place):
        self.place = place

    def __iter__(self):
        return Reader(*self.place)


def objective(model, batch):
    x, y, is_bad = batch
    return {"loss": (model(x, is_bad[:, None]) - y) ** 2}


def build(config):
    fault, inputs = config.fault, (jnp.zeros((1, 4)), jnp.zeros((1, 1), bool))
    rate = {"rate": 1e12, "update": 3e38}.get(fault, config.learning_rate)
    optimizer = optax.sgd(rate)
    return Experiment(
        model=LinenModel(Outer(), *inputs) if fault == "linen" else partial(Model, fault),
        objective=objective,
        optimizer=optax.apply_if_finite(optimizer, 5) if config.if_finite else optimizer,
        train=Stream(Shard) if fault == "stream" else Described(examples(fault)),
    )
'''


def line_of(text: str) -> int:
    """The number of the line of the experiment that has this comment."""
    return next(n for n, line in enumerate(EXPERIMENT.splitlines(), 1) if f"# {text}" in line)


def explained(
    folder: Path, capsys: pytest.CaptureFixture[str], fault: str, *options: object
) -> str:
    """What the command prints that the message of a run that failed names."""
    file = folder / "faults.py"
    file.write_text(EXPERIMENT)
    given = ("--config", file, "--workdir", folder / "run", "--fault", fault, *options)
    assert train([*map(str, given), "--trackers"]) == 3
    message = capsys.readouterr().err
    named = re.search(r"(python -m spmdtrain\.replay .*) names the operation and the", message)
    assert named is not None, message
    assert replay(shlex.split(named[1])[3:]) == 0
    return capsys.readouterr().out


ALONE = ("--strategy", "default")


@pytest.mark.parametrize(
    ("fault", "options", "expected", "has_example"),
    [
        pytest.param(
            *("log", ALONE),
            [
                "operation: log\n",
                "parameter: params/blocks/3/linear/bias\npart: forward pass\n",
                "operand: float32[8,4]: 0 to 1\nresult: float32[8,4]: 0, 4 of 32 -inf\n",
                "becomes NaN in: dot_general, forward pass (",
            ],
            True,
            id="log",
        ),
        pytest.param(
            *("custom_vjp", ALONE),
            [
                "operation: div\n",
                "part: backward pass\n",
                "operand 2: float32[8,4]: 0\nresult: float32[8,4]: 32 of 32 NaN\n",
                f"rule of a custom_vjp: backward at FILE:{line_of('rule')}\n",
                "reaches: params/blocks/0/linear/bias, ",
                "no example in particular",
            ],
            False,
            id="custom_vjp",
        ),
        pytest.param(
            *("bfloat16", ALONE),
            ["operation: mul\n", "operand 2: bfloat16[]: 8\n", "4 of 32 inf\nbecomes NaN in: sub"],
            True,
            id="bfloat16",
        ),
        pytest.param(
            *("attention", ALONE),
            ["operation: sub\n", "-inf\nresult: float32[8,4,4]: ", " 16 of 128 NaN"],
            True,
            id="attention",
        ),
        pytest.param(
            *("attention", ("--global-batch-size", 16, "--microbatches", 2)),
            [
                "within: shard_map, scan, iteration 2 of 2\n",
                "operation: sub\n",
                "float32[1,4,4] on each of 8 devices: ",
                "all on device 6\n",
            ],
            True,
            id="devices-and-microbatches",
        ),
        pytest.param(  # the last row of the batch, which padding repeats
            *("attention", ("--global-batch-size", 7, "--uneven-batch", "pad")),
            ["within: shard_map\n", "operation: sub\n", "1 of 7 examples reach it\n"],
            True,
            id="padding",
        ),
        pytest.param(
            *("loops", ALONE),
            [
                "operation: sqrt\n",
                "within: scan, iteration 3 of 4, cond, branch 1 of 2\n",
                "operand: float32[8,4]: -1 to 1",
            ],
            True,
            id="scan-cond",
        ),
        pytest.param(
            *("constant", ALONE),
            [
                "step 2: a constant that is not finite reaches the results\noperation: ",
                "operand: float32[]: inf\nresult: float32[]: inf\nreaches: loss\n",
            ],
            True,
            id="constant",
        ),
        pytest.param(
            *("linen", ALONE),
            [
                "operation: sqrt\n",
                "module: Outer/inner\nparameter: params/inner/Dense_0/bias\n",
                "no example in particular",
            ],
            False,
            id="linen",
        ),
    ],
)
def test_a_fault_in_the_model_has_its_operation_line_module_and_examples(
    fault: str,
    options: tuple[object, ...],
    expected: list[str],
    has_example: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = explained(tmp_path, capsys, fault, *options)
    file = str(tmp_path / "faults.py")
    assert f"line: {file}:{line_of(fault)} in " in shown
    for text in expected:
        assert text.replace("FILE", file) in shown
    one = re.search(r"1 of \d+ examples reach it\n", shown) is not None
    assert one == ("│ record 13 of the archive │" in shown) == has_example


@pytest.mark.parametrize(
    ("fault", "options", "expected"),
    [
        # The loss is finite, and the gradient is not.
        ("custom_vjp", ("--on-divergence", "skip"), ["operation: div\n", "part: backward pass\n"]),
        ("log", ("--if-finite",), ["operation: log\n", "│ record 13 of the archive │"]),
    ],
)
def test_a_step_whose_update_was_left_out_is_explained(
    fault: str,
    options: tuple[str, ...],
    expected: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, run = tmp_path / "faults.py", str(tmp_path / "run")
    file.write_text(EXPERIMENT)
    given = ["--config", str(file), "--workdir", run, "--fault", fault, *ALONE, *options]
    assert train([*given, "--trackers"]) == 0
    assert replay([run, "--step", "2", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "step 2: the first operation whose result is not finite\n" in shown
    for text in expected:
        assert text in shown


def test_a_nan_of_the_data_is_found_in_its_example_of_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = explained(tmp_path, capsys, "stream", *ALONE)
    assert "step 2: what the step was given is not finite\narray: batch/0\n" in shown
    assert ": 1 of 32 NaN\n" in re.sub(r"-\S+ to \S+, ", "", shown)
    assert "1 of 8 examples reach it\n" in shown
    # Each of the 8 shards has one example of a batch: 13 is the second one of shard 5.
    row = r"│ 5 +│ +│ shard 5 of the stream +│ 0 float32\[4\] from \S+ to \S+, 1 of 4 NaN"
    assert re.search(row, shown)


@pytest.mark.parametrize("fault", ["rate", "update"])
def test_too_large_a_learning_rate_names_the_parameter(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = explained(tmp_path, capsys, fault, *ALONE)
    if fault == "rate":  # finite at first, and the next losses are of larger and larger numbers
        assert re.search(r"operation: integer_pow\n.*\nsource: return {\"loss\": ", shown)
        assert re.search(r"grew most: params/out/bias: from 0 to \d\.\d+e\+\d\d \(a learn", shown)
        assert re.search(r"│ params/out +│ +0\.\d+ │ +\d\.\d+e\+\d\d │", shown)
    else:
        assert "part: update of the parameters\noperand 1: float32[]: -3e+38\n" in shown
        assert re.search(r"reaches: params/\S+", shown)


def test_what_only_the_compiled_program_computes_names_its_fusion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = explained(tmp_path, capsys, "compiled", *ALONE)
    assert "only the compiled program is not finite; operation by operation, all is" in shown
    assert "operation: mul\n" in shown
    assert f"line: {tmp_path / 'faults.py'}:{line_of('compiled')} in " in shown
    assert re.search(r"fusion: \S*fusion\S* \(fusion\)\n", shown)


def test_a_finite_step_is_said_to_be_and_has_its_magnitudes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "faults.py"
    file.write_text(EXPERIMENT)
    run = str(tmp_path / "run")
    given = ["--config", str(file), "--workdir", run, "--steps", "3", *ALONE, "--trackers"]
    assert train(given) == 0
    capsys.readouterr()
    assert replay([run, "--step", "3", "--explain"]) == 0
    shown = capsys.readouterr().out
    logged = (tmp_path / "run" / "metrics.jsonl").read_text()
    loss = re.findall(r'"step": 3, "split": "train", "loss": ([\d.]+)', logged)[0]
    found = re.search(r"step 3 is finite, compiled and operation by operation: loss (\S+)", shown)
    assert found is not None and float(found[1]) == pytest.approx(float(loss), rel=1e-5)
    layers = re.findall(r"│ (params/\S+) +│", shown)
    assert layers == ["params/blocks/0/linear", "params/blocks/1/linear", "params/out"]
    page = tmp_path / "why.html"
    assert replay([run, "--step", "3", "--explain", "--html", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    chart = re.findall(
        r'\{"layer": *"([^"]+)", *"kind": *"([^"]+)", *"size": *([^}]+)\}', page.read_text()
    )
    assert list(dict.fromkeys(layer for layer, *_ in chart)) == layers
    sizes = {(layer, kind): float(size) for layer, kind, size in chart}
    row = re.search(r"│ params/out +│ +(\S+) │ +(\S+) │ +(\S+) │ \w+ +│ +(\S+) │", shown)
    assert row is not None
    kinds = "initial parameters", "parameters", "forward", "backward"
    assert [sizes["params/out", kind] for kind in kinds] == [float(x) for x in row.groups()]
    assert replay([run, "--step", "3", "--html", str(page)]) == 2
    assert "--html is the page of an explanation: give --explain, too" in capsys.readouterr().err
    assert replay([run, "--step", "3", "--explain", "--per-layer"]) == 2
    assert "--explain compares nothing: leave out --per-layer" in capsys.readouterr().err


def test_what_cannot_be_explained_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = str(tmp_path / "loop")
    assert train(["--config", str(GAN), "--workdir", loop, "--steps", "2", "--trackers"]) == 0
    assert replay([loop, "--step", "2", "--explain"]) == 2
    message = capsys.readouterr().err
    assert "digits_gan.py has a loop of its own" in message
    assert "only the step of a Trainer can be explained" in message

    # The experiment has changed since, so that the replay fails before the step.
    file, run = tmp_path / "faults.py", str(tmp_path / "run")
    file.write_text(EXPERIMENT.replace("== 13", "== 999"))
    given = ["--config", str(file), "--workdir", run, "--steps", "3", "--fault", "attention"]
    assert train([*given, *ALONE, "--trackers"]) == 0
    file.write_text(EXPERIMENT)
    assert replay([run, "--step", "3", "--explain"]) == 2
    message = capsys.readouterr().err
    assert "before step 3, a step of the replay is not finite already" in message
    assert "explain that one, by --step 2" in message
