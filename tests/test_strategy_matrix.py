"""Every cell of the support matrix: train, evaluate, resume, restore, under every strategy.

All of them train the digits, with dropout, and have the numbers of the `default` strategy, which
is a plain `jax.jit` on one device.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matrix
import numpy as np
import pytest
from helpers import DIGITS, metrics, saved_steps, small_experiment
from jax.sharding import NamedSharding, SingleDeviceSharding
from matrix import ROWS, Row, accepted
from processes import codes, job, show, sums

from spmdtrain import Event, Trainer, TrainState
from spmdtrain.placement import resolve_on_devices
from spmdtrain.run import main, parse
from spmdtrain.sharding import named_leaves
from spmdtrain.strategies import STRATEGIES
from spmdtrain.terminal import Terminal

STEPS, MIDDLE = 20, 10
# One kernel of four arrays is large enough to be split.
OPTIONS = (
    *("--config", str(DIGITS), "--hidden", "32", "--sharding.min-size", "512"),
    *("--steps", str(STEPS), "--checkpoint-every-steps", str(MIDDLE), "--keep-latest", "99"),
    *("--log-every", "1", "--eval-every-steps", "1000"),  # and at the end
    "--checkpoint-at-start",
)
# To compile the initialisation takes as long as to compile the step. So here few begin with one of
# their own, the others with the default's; by the command, in the drill, all do.
INITIALISED = ("default", "fully_sharded")

cell = functools.partial(pytest.mark.parametrize, "row", ids=lambda row: row.name)

# -- where the state has to be ---------------------------------------------------------------------

Places = dict[str, tuple[Any, ...]]
WIDE, BIAS, NARROW = "layers/0/kernel", "layers/0/bias", "layers/1/kernel"  # 64x32, 32, 32x10
REPLICATED: Places = {}
OVER_FSDP: Places = {WIDE: ("fsdp",)}
OVER_DATA: Places = {WIDE: ("data",)}
OVER_TENSOR: Places = {WIDE: (None, "tensor"), BIAS: ("tensor",), NARROW: ("tensor",)}
PLACES: dict[str, tuple[dict[str, int], Places, Places]] = {
    # the axes in use, and what is split of the parameters and of the optimizer's moments
    "default": ({}, REPLICATED, REPLICATED),
    "one_device --mesh.devices 3": ({}, REPLICATED, REPLICATED),
    "mirrored": ({"data": 8}, REPLICATED, REPLICATED),
    "zero": ({"data": 8}, REPLICATED, OVER_DATA),
    "fully_sharded": ({"fsdp": 8}, OVER_FSDP, OVER_FSDP),
    "tensor_parallel": ({"data": 4, "tensor": 2}, OVER_TENSOR, OVER_TENSOR),
    "central_storage": ({"data": 8}, REPLICATED, REPLICATED),
    "hybrid": ({"replica": 2, "data": 4}, REPLICATED, REPLICATED),
    "fully_sharded --mesh.tensor 2": (
        {"fsdp": 4, "tensor": 2},
        OVER_TENSOR | {WIDE: ("fsdp", "tensor")},
        OVER_TENSOR | {WIDE: ("fsdp", "tensor")},
    ),
    "hybrid+fully_sharded": ({"replica": 2, "fsdp": 4}, OVER_FSDP, OVER_FSDP),
    "hybrid+zero": ({"replica": 2, "data": 4}, REPLICATED, OVER_DATA),
    "central_storage+fully_sharded": ({"fsdp": 8}, OVER_FSDP, OVER_FSDP),
}
Where = dict[str, tuple[Any, ...]]


def where(state: TrainState) -> Where:
    """Of each leaf the devices, how it is split over them, and the kind of memory."""
    return {name: _where(leaf.sharding) for name, leaf in named_leaves(state).items()}


def _where(sharding: Any) -> tuple[Any, ...]:
    devices = sorted(device.id for device in sharding.device_set)
    if isinstance(sharding, SingleDeviceSharding):
        return devices, "no mesh", sharding.memory_kind
    assert isinstance(sharding, NamedSharding)
    sizes = sharding.mesh.shape
    split = [entry if entry and sizes[entry] > 1 else None for entry in sharding.spec]
    while split and split[-1] is None:
        split.pop()
    return devices, tuple(split), sharding.memory_kind


def expected_places(row: Row, state: TrainState) -> Where:
    """The same as the strategy's words say it."""
    _, params, moments = PLACES[row.name]
    on_device = jax.devices()[0].default_memory().kind
    devices = {"default": [0], "one_device": [3]}.get(row.strategy, list(range(8)))
    found: Where = {}
    for name, leaf in named_leaves(state).items():
        field, *_ = name.split("/")
        splits = {"params": params, "opt_state": moments}.get(field, REPLICATED)
        split: Any = next((s for tail, s in splits.items() if name.endswith(tail)), ())
        on_host = "central_storage" in row.strategy and field in ("params", "opt_state")
        kind = "pinned_host" if on_host and leaf.ndim else on_device
        found[name] = (devices, "no mesh" if row.strategy == "default" else split, kind)
    return found


# -- one trainer a row, which all its cells use ----------------------------------------------------


class Life:
    """A run of twenty steps, and what its trainer can do from there without compiling again."""

    def __init__(self, row: Row, folder: Path, begin: Path | None) -> None:
        self.row, self.workdir, self.source = row, folder / "run", folder / "saved"
        line = [*OPTIONS, *row.arguments, "--workdir", str(self.workdir)]
        command = parse(line)
        config = resolve_on_devices(command.config)
        self.experiment = command.experiment.build(config)
        self.seen: list[Where] = []
        self.trainer = Trainer.of(
            self.experiment,
            config,
            terminal=Terminal(quiet=True),
            callbacks={"fit_start": self._look, "step": self._look},
        )
        if begin is not None:
            shutil.copytree(begin, self.workdir / "checkpoints" / begin.name)
        self.trainer.fit(self.experiment.train, validation=self.experiment.validation)
        self.state = arrays(self.trainer.state)
        self.counted = self.trainer.evaluate(self.experiment.test)
        self.lines = metrics(self.workdir)
        self.places, self.seen = self.seen, []
        shutil.copytree(self.workdir / "checkpoints", self.source)

    def _look(self, event: Event) -> None:
        self.seen.append(where(event.trainer.state))

    @property
    def losses(self) -> list[float]:
        """Of every step."""
        return [line["loss"] for line in self.lines if line["split"] == "train"]

    def goes_on(self, checkpoint: Path, steps: int) -> dict[str, np.ndarray]:
        """The state that it restores from a checkpoint, of whomever, and trains up to `steps`."""
        shutil.rmtree(self.workdir)
        shutil.copytree(checkpoint, self.workdir / "checkpoints" / checkpoint.name)
        self.trainer.state = None  # as a new process has it, the compiled step apart
        self.seen = []
        experiment = self.experiment
        self.trainer.fit(experiment.train, validation=experiment.validation, steps=steps)
        return arrays(self.trainer.state)


def arrays(state: TrainState | None) -> dict[str, np.ndarray]:
    """Every leaf by its path; a key as the numbers it is made of."""
    assert state is not None
    return {
        name: np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        for name, leaf in named_leaves(state).items()
    }


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys() and len(expected) == 15
    for name, x in expected.items():
        y = found[name]
        assert (y.dtype, y.shape, y.tobytes()) == (x.dtype, x.shape, x.tobytes()), name


Lives = Callable[[Row], Life]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """The life of a row, lived when it is first asked for."""
    known: dict[str, Life] = {}

    def life(row: Row) -> Life:
        if row.name not in known:
            begin = None if row.name in INITIALISED else life(ROWS[0]).source / "0"
            known[row.name] = Life(row, tmp_path_factory.mktemp(row.strategy), begin)
        return known[row.name]

    yield life
    known.clear()


@pytest.fixture
def default(lives: Lives) -> Life:
    return lives(ROWS[0])


# -- the matrix ------------------------------------------------------------------------------------


def test_every_strategy_is_in_the_matrix_and_the_page_shows_it() -> None:
    assert [row.strategy for row in ROWS[: len(STRATEGIES)]] == list(STRATEGIES)
    assert {row.name for row in ROWS} == set(PLACES)
    expected = {("default", "processes"), ("one_device", "processes")}
    assert {(row.strategy, column) for row, column in matrix.refused()} == expected
    assert matrix.shown() == matrix.render(), "run python tests/matrix.py --write"


@cell(accepted("train"))
def test_train(row: Row, lives: Lives, default: Life) -> None:
    life = lives(row)
    assert len(life.losses) == STEPS and life.losses[-1] < 0.9 * life.losses[0]
    np.testing.assert_allclose(life.losses, default.losses, rtol=1e-3)
    axes, _, _ = PLACES[row.name]
    used = {} if life.trainer.mesh is None else dict(life.trainer.mesh.shape)
    assert {axis: size for axis, size in used.items() if size > 1} == axes
    # Before the first step and after each one.
    assert life.trainer.state is not None and len(life.places) == 1 + STEPS
    expected = expected_places(row, life.trainer.state)
    for number, found in enumerate(life.places):
        assert found == expected, f"after {number} steps"


@cell(accepted("train"))
def test_train_one_step_from_a_common_state(row: Row, lives: Lives, default: Life) -> None:
    before = {
        name.removeprefix("params/"): x
        for name, x in named_leaves(default.goes_on(default.source / "10", MIDDLE)).items()
    }
    expected = default.goes_on(default.source / "10", MIDDLE + 1)
    (other,) = metrics(default.workdir, "train")
    found = lives(row).goes_on(default.source / "10", MIDDLE + 1)
    (line,) = metrics(lives(row).workdir, "train")
    assert line["step"] == other["step"] == MIDDLE + 1
    assert other["loss"] == default.losses[MIDDLE]
    np.testing.assert_allclose(line["loss"], other["loss"], rtol=1e-5)
    for name, after in expected.items():
        if name.startswith("params/"):
            x = before[name.removeprefix("params/")].astype(np.float64)
            update, wanted = found[name] - x, after - x
            # A parameter is rounded to its own precision after the update.
            rounding = np.spacing(np.abs(after)).max()
            assert np.abs(wanted).max() > 1000 * rounding
            np.testing.assert_allclose(update, wanted, rtol=1e-5, atol=rounding, err_msg=name)


@cell(accepted("evaluate"))
def test_evaluate(row: Row, lives: Lives) -> None:
    life = lives(row)
    rows = life.experiment.test.rows(np.arange(300))  # 4 batches of 64, and 44
    x, w = rows["image"].reshape(300, 64).astype(np.float64), life.state
    x = np.maximum(x @ w[f"params/{WIDE}"] + w[f"params/{BIAS}"], 0)
    logits = x @ w[f"params/{NARROW}"] + w["params/layers/1/bias"]
    right = int((logits.argmax(-1) == rows["label"]).sum())
    assert life.counted["accuracy"] == right / 300
    terms = np.log(np.exp(logits).sum(-1)) - logits[np.arange(300), rows["label"]]
    np.testing.assert_allclose(life.counted["loss"], terms.mean(), rtol=1e-6)


@cell(accepted("resume"))
def test_resume(row: Row, lives: Lives) -> None:
    life = lives(row)
    assert_same_bits(life.goes_on(life.source / "10", STEPS), life.state)
    assert metrics(life.workdir) == [line for line in life.lines if line["step"] > MIDDLE]
    assert len(life.seen) == 1 + STEPS - MIDDLE
    assert all(found == life.places[0] for found in life.seen)


@cell(accepted("restore"))
def test_restore_from_another(row: Row, lives: Lives) -> None:
    """Each is the source of the next, and the last of the first."""
    life, source = lives(row), lives(ROWS[ROWS.index(row) - 1])
    assert_same_bits(life.goes_on(source.source / "20", STEPS), source.state)
    assert life.trainer.state is not None
    assert life.seen == [expected_places(row, life.trainer.state)]  # no step was made


# -- by the command --------------------------------------------------------------------------------


@pytest.mark.drill
@cell(accepted("train"))
def test_the_command_trains_goes_on_and_evaluates(
    row: Row, lives: Lives, default: Life, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each from its own initial state, in trainers of its own."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*OPTIONS, *row.arguments]
    assert main([*options, "--workdir", str(whole)]) == 0
    losses = [line["loss"] for line in metrics(whole, "train")]
    np.testing.assert_allclose(losses, default.losses, rtol=1e-3)
    assert sums(whole, 0) == sums(default.source.parent / "run", 0)  # the same bits to begin with
    assert main([*options, "--workdir", str(parts), "--steps", str(MIDDLE)]) == 0
    assert "resumed" not in capsys.readouterr().out
    assert main([*options, "--workdir", str(parts)]) == 0
    assert f"resumed from step {MIDDLE} of {parts}" in capsys.readouterr().out
    assert sums(parts, STEPS) == sums(whole, STEPS)
    assert [line["loss"] for line in metrics(parts, "train")] == losses
    assert main([*options, "--workdir", str(parts), "--mode", "evaluate"]) == 0
    told = evaluation_in(capsys.readouterr().out)
    assert told == {"step": STEPS, "split": "test"} | metrics_of(whole, "test")


def evaluation_in(output: str) -> dict[str, Any]:
    """What `--mode evaluate` tells."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


def metrics_of(workdir: Path, split: str) -> dict[str, float]:
    """The last line of a split, without its place."""
    *_, line = metrics(workdir, split)
    return {name: line[name] for name in ("loss", "accuracy")}


# -- many processes --------------------------------------------------------------------------------

HERE = "fully_sharded"  # the one of them that `make test` runs


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[] if row.name == HERE else pytest.mark.drill)
        for row in accepted("processes")
    ],
)
def test_two_processes_train(row: Row, default: Life, tmp_path: Path) -> None:
    options = [*OPTIONS[2:], *row.arguments, "--workdir", tmp_path / "run"]
    chief, _ = job(DIGITS, *options, processes=2, devices=4)
    assert f", {row.strategy}, mesh " in chief.output and "2 processes" in chief.output
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, default.losses, rtol=1e-3)
    found = metrics(tmp_path / "run", "eval")[-1]
    np.testing.assert_allclose(found["loss"], default.lines[-1]["loss"], rtol=1e-3)


@pytest.mark.drill
@cell(accepted("processes"))
def test_two_processes_go_on_as_if_nothing_had_been(
    row: Row, default: Life, tmp_path: Path
) -> None:
    """From a checkpoint of one process and another strategy, and from their own."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*OPTIONS[2:], *row.arguments]
    for workdir in (whole, parts):
        shutil.copytree(default.source / "10", workdir / "checkpoints" / "10")
    job(DIGITS, *options, "--workdir", whole, processes=2, devices=4)
    (first, *_) = metrics(whole, "train")
    assert first["step"] == MIDDLE + 1
    np.testing.assert_allclose(first["loss"], default.losses[MIDDLE], rtol=1e-5)
    job(DIGITS, *options, "--workdir", parts, "--steps", 15, processes=2, devices=4)
    chief, _ = job(DIGITS, *options, "--workdir", parts, processes=2, devices=4)
    assert f"resumed from step 15 of {parts}" in chief.output
    assert sums(parts, STEPS) == sums(whole, STEPS)
    job_options = [*options, "--workdir", parts, "--mode", "evaluate"]
    chief, _ = job(DIGITS, *job_options, processes=2, devices=4)
    told = evaluation_in(chief.output)
    assert told == {"step": STEPS, "split": "test"} | metrics_of(parts, "test")


@pytest.mark.drill
@pytest.mark.parametrize(
    ("row", "column"), matrix.refused(), ids=lambda x: x.name if isinstance(x, Row) else x
)
def test_a_cell_that_says_no_is_refused_in_words(row: Row, column: str, tmp_path: Path) -> None:
    assert column == "processes"  # all that is refused today
    options = [*OPTIONS[2:], "--strategy", row.strategy, "--workdir", tmp_path / "run"]
    ended = job(DIGITS, *options, processes=2, devices=4, check=False)
    assert codes(ended) == [2, 2], show(ended)
    said = [one.output.splitlines() for one in ended]
    # Each by itself, or because another has said it first.
    own = r"error|(chief|worker 0) ends, as (worker 0|chief) failed"
    for lines in said:
        assert len(lines) == 1 and re.fullmatch(f"({own}): {row.refused[column]}", lines[0]), said
    assert any(lines[0].startswith("error: ") for lines in said)
    assert not (tmp_path / "run").exists()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--strategy mirored", "there is no strategy 'mirored'. Did you mean 'mirrored'?"),
        ("--strategy hybrid+zeros", "there is no strategy 'zeros'. Did you mean 'zero'?"),
        (
            "--strategy one_device+zero",
            "strategy one_device+zero: one_device is for one device alone, and joins no other",
        ),
        (
            "--strategy default --mesh.data 8",
            "strategy default has no mesh, and one is given: one_device takes mesh.devices",
        ),
        (
            "--strategy one_device --mesh.devices 0 1",
            "strategy one_device takes one device, and mesh.devices names 2",
        ),
        (
            "--strategy fully_sharded --mesh.fsdp 1",
            "strategy fully_sharded uses the axis fsdp, and the mesh has fsdp=1: replica=1, "
            "data=8, fsdp=1, tensor=1 on 8 devices",
        ),
        (
            "--strategy hybrid --mesh.replica 3",
            "mesh: replica=3 * fsdp=1 * tensor=1 = 3 does not divide 8 devices, so data=-1 has no "
            "whole size",
        ),
        (
            "--strategy tensor_parallel --hidden 33",
            "params/layers/0/bias: dim 0 of shape (33,) does not divide over tensor=2 "
            "(33 = 16 * 2 + 1)",
        ),
        (
            "--strategy fully_sharded --hidden 1001 1001",
            "params/layers/1/kernel, shape (1001, 1001), would be whole on each device, 4.01 MB: "
            "strategy fully_sharded splits over fsdp=8, and no rule and no dim allows it "
            "(1001 = 125 * 8 + 1, 1001 = 125 * 8 + 1). Make a dim divide, or give a rule for it: "
            "PartitionSpec() says that it is meant to be replicated (or raise "
            "--sharding.replicated-limit)",
        ),
        (
            "--strategy zero --hidden 1001 1001",
            "opt_state/0/mu/layers/1/kernel, shape (1001, 1001), would be whole on each device",
        ),
        (
            "--sharding.offload state",
            "sharding.offload is for central_storage, and the strategy is mirrored",
        ),
        (
            "--strategy zero --sharding.max-shards 4",
            "sharding.max_shards is for fully_sharded, and the strategy is zero",
        ),
        (
            "--collectives.reduce-dtype bfloat16",
            "collectives.reduce_dtype is bfloat16: XLA on CPU turns such a reduction into one of "
            "float32",
        ),
        (
            "--collectives.bytes-per-pack 1000000",
            "collectives.bytes_per_pack: XLA has no threshold on CPU",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = ["--workdir", str(tmp_path / "run"), "--steps", "1"]
    assert main(["--config", str(DIGITS), *options.split(), *workdir]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x]
    assert line.startswith(f"error: {message}")
    assert saved_steps(tmp_path / "run") == []


def test_tensor_parallel_wants_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_experiment(tmp_path)
    options = ["--workdir", str(tmp_path / "run"), "--strategy", "tensor_parallel"]
    assert main(["--config", str(config), *options]) == 2
    assert capsys.readouterr().err == (
        "error: strategy tensor_parallel splits tensors by the experiment's rules, and none of "
        "its 0 names the axis tensor: give the Experiment rules\n"
    )
