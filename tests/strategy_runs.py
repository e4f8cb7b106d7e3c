"""A run under each strategy: what it computes, where its state is, and what it restores."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import metrics
from jax.sharding import NamedSharding, SingleDeviceSharding
from matrix import ROWS, Row

from spmdtrain import CallbackContext, Trainer, TrainState
from spmdtrain.config.command_line import parse_command_line
from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.placement import resolve_config
from spmdtrain.strategies import STRATEGIES
from spmdtrain.tree import named_leaves

STEPS, MIDDLE = 20, 10
CADENCE = (
    *("--steps", str(STEPS), "--checkpoint-every-steps", str(MIDDLE), "--keep-latest", "99"),
    *("--log-every", "1", "--eval-every-steps", "1000"),  # and at the end
    "--checkpoint-at-start",
)
# To compile the initialization takes as long as to compile the step. So here few begin with one of
# their own, the others with the default's.
INITIALIZED = ("default", "fully_sharded")


def cell(rows: Sequence[Row]) -> pytest.MarkDecorator:
    """A test for each row, the products of strategies among the slow ones."""
    few = [row for row in rows if row.strategy in STRATEGIES and "tensor 2" not in row.name]
    return pytest.mark.parametrize(
        "row",
        [
            pytest.param(row, id=row.name, marks=[] if row in few else pytest.mark.slow)
            for row in rows
        ],
    )


# -- where the state is ----------------------------------------------------------------------------

Places = dict[str, tuple[Any, ...]]
"""How leaves are split, by the end of their path; the first that fits counts."""
Expected = tuple[dict[str, int], Places, Places]
"""The axes in use, and what is split of the parameters and of the optimizer's state."""
Where = dict[str, tuple[Any, ...]]
REPLICATED: Places = {}


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


def expected_places(row: Row, state: TrainState, expected: Expected) -> Where:
    """The same as the strategy's words say it."""
    _, params, moments = expected
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


def assert_in_place(run: "StrategyRun", expected: Expected) -> None:
    """A run of all the steps had these axes, and its state where it belongs after each of them."""
    axes, _, _ = expected
    used = {} if run.trainer.mesh is None else dict(run.trainer.mesh.shape)
    assert {axis: size for axis, size in used.items() if size > 1} == axes
    # Before the first step and after each one.
    assert run.trainer.state is not None and len(run.places) == 1 + STEPS
    places = expected_places(run.row, run.trainer.state, expected)
    for number, found in enumerate(run.places):
        assert found == places, f"after {number} steps"


# -- one trainer a row, which all its cells use ----------------------------------------------------


class StrategyRun:
    """A run of twenty steps, and what its trainer can do from there without compiling again."""

    def __init__(self, row: Row, folder: Path, begin: Path | None, options: Sequence[str]) -> None:
        self.row, self.workdir, self.source = row, folder / "run", folder / "saved"
        line = [*options, *row.arguments, "--workdir", str(self.workdir)]
        command = parse_command_line(line)
        config = resolve_config(command.config)
        self.experiment = command.experiment.build(config)
        self.seen: list[Where] = []
        self.trainer = Trainer.from_experiment(
            self.experiment,
            config,
            terminal=Terminal(quiet=True),
            callbacks={"fit_start": self._look, "step": self._look},
        )
        if begin is not None:
            shutil.copytree(begin, self.workdir / "checkpoints" / begin.name)
        self.trainer.fit(self.experiment.train, validation=self.experiment.validation)
        self.state = arrays(self.trainer.state)
        test = self.experiment.test
        self.counted = {} if test is None else self.trainer.evaluate(test)
        self.lines = metrics(self.workdir)
        self.places, self.seen = self.seen, []
        shutil.copytree(self.workdir / "checkpoints", self.source)

    def _look(self, event: CallbackContext) -> None:
        self.seen.append(where(event.trainer.state))

    @property
    def losses(self) -> list[float]:
        """Of every step."""
        return [line["loss"] for line in self.lines if line["split"] == "train"]

    def resume(self, checkpoint: Path, steps: int) -> dict[str, np.ndarray]:
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


StrategyRuns = Callable[[Row], StrategyRun]


def strategy_runs(
    tmp_path_factory: pytest.TempPathFactory, options: Sequence[str]
) -> Iterator[StrategyRuns]:
    """Yields, for a fixture, a function that returns the run of a row, executed on first use."""
    known: dict[str, StrategyRun] = {}

    def run(row: Row) -> StrategyRun:
        if row.name not in known:
            begin = None if row.name in INITIALIZED else run(ROWS[0]).source / "0"
            folder = tmp_path_factory.mktemp(row.strategy)
            known[row.name] = StrategyRun(row, folder, begin, options)
        return known[row.name]

    yield run
    known.clear()


# -- from a common state ---------------------------------------------------------------------------


def assert_one_step_is_the_same(run: StrategyRun, default: StrategyRun) -> None:
    """From the default's state in the middle, the loss and the parameters' update."""
    found = run.resume(default.source / str(MIDDLE), MIDDLE + 1)
    (line,) = metrics(run.workdir, "train")
    assert line["step"] == MIDDLE + 1
    assert_same_step(line["loss"], found, default)


def assert_same_step(loss: float, found: dict[str, np.ndarray], default: StrategyRun) -> None:
    """The loss of the step after the middle, and the state it led to, are the default's."""
    before = default.resume(default.source / str(MIDDLE), MIDDLE)
    expected = default.resume(default.source / str(MIDDLE), MIDDLE + 1)
    (other,) = metrics(default.workdir, "train")
    assert other["step"] == MIDDLE + 1 and other["loss"] == default.losses[MIDDLE]
    np.testing.assert_allclose(loss, other["loss"], rtol=1e-5)
    for name, after in expected.items():
        if name.startswith("params/"):
            x = before[name].astype(np.float64)
            update, wanted = found[name] - x, after - x
            # A parameter is rounded to its own precision after the update.
            rounding = np.spacing(np.abs(after)).max()
            assert np.abs(wanted).max() > 1000 * rounding
            np.testing.assert_allclose(update, wanted, rtol=1e-5, atol=rounding, err_msg=name)
