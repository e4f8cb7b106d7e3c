"""Transforms of the step: programs by kind, fields of their own, and where a dispatch ends."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import metrics
from linear_model import trainer

from spmdtrain import MeshSpec, RunConfig, UserError
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import (
    Placement,
    constrain_sharding,
    current_mesh,
    make_placement,
    use_placement,
)
from spmdtrain.step import state as of_state
from spmdtrain.step.dispatch import Dispatch, Repeat
from spmdtrain.step.gradients import ByXla
from spmdtrain.step.program import StepOutput, plan_step
from spmdtrain.step.state import Step, StepTransform, TrainState
from spmdtrain.strategies import StateField
from spmdtrain.train.schedule import Schedule

X = np.random.default_rng(7).normal(size=(80, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)


class Counting(StepTransform):
    """Counts each third step, whose program is another one."""

    fields: ClassVar[Mapping[str, StateField]] = {"counted": StateField(item="extra")}

    def kind(self, step: int) -> str:
        return "other" if step % 3 else "third"

    def begin(self, init: Callable[..., TrainState]) -> Callable[..., TrainState]:
        return lambda *given: replace(init(*given), extra={"counted": jnp.int32(0)})

    def programs(self, step: Step) -> Mapping[str, Step]:
        def run(state: TrainState, batch: Any, is_last: Any = None, more: int = 0) -> Any:
            after, output = step(replace(state, extra={}), batch, is_last)
            return replace(after, extra={"counted": state.extra["counted"] + more}), output

        return {"other": run, "third": partial(run, more=1)}


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_the_programs_of_a_run_and_its_state_are_those_of_the_transform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_per_dispatch: int
) -> None:
    def fit(folder: str, steps: int) -> Any:
        options = {"log_every": 1, "steps_per_dispatch": steps_per_dispatch}
        fitted = trainer(workdir=str(tmp_path / folder), **options)
        fitted.fit((X, Y), steps=steps)
        return fitted

    fit("plain", 11)
    monkeypatch.setitem(of_state.TRANSFORMS, ("microbatches", 1), f"{__name__}:Counting")
    assert fit("counted", 7).state.extra["counted"] == 2
    assert (tmp_path / "counted" / "checkpoints" / "7" / "extra").is_dir()
    assert not (tmp_path / "plain" / "checkpoints" / "11" / "extra").exists()
    assert fit("counted", 11).state.extra["counted"] == 3  # continues from the checkpoint
    found = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("plain", "counted")]
    assert found[0] == found[1]


class Apart(StepTransform):
    def __init__(self, config: RunConfig, placement: Placement) -> None:
        super().__init__(config, replace(placement, apart=("data",)))


def test_no_rule_reduces_over_the_axes_of_steps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(of_state.TRANSFORMS, ("microbatches", 1), f"{__name__}:Apart")
    batch = (X[:16], Y[:16])
    plan = plan_step(trainer().functions, batch)
    assert isinstance(plan.rule, ByXla) and "apart along data" in plan.reasons[0]
    for requests in ({"collectives": CollectiveOptions(reduction="all_reduce")}, {"exact": 16}):
        with pytest.raises(UserError, match="apart along data"):
            plan_step(trainer(**requests).functions, batch)


def test_a_dispatch_ends_where_the_kind_of_step_changes() -> None:
    config = RunConfig(steps_per_dispatch=4)
    schedule = Schedule(
        *(config, 11, 80),
        evaluates=False,
        saves=False,
        clock=lambda: 0.0,
        kind=lambda step: "other" if step % 3 else "third",
    )
    schedule.set_dispatch(Dispatch(4, Repeat.COUNTED))
    found = [list(steps) for steps in schedule.dispatches(0)]
    assert found == [[1, 2], [3], [4, 5], [6], [7, 8], [9], [10, 11]]


def test_copies_of_a_field_are_split_over_the_axes_of_steps_apart() -> None:
    config = RunConfig(strategy="hybrid+fully_sharded", mesh=MeshSpec(replica=2, fsdp=4))
    placement = make_placement(config)
    params = {"kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(number, params, {"momentum": params}, {}, {}, number)
    layout = Layout(state, placement, (), ShardingOptions(min_size=1))
    copies = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), params)
    run = replace(state, extra={"own": {"momentum": copies}, "shared": params})
    fields = {
        "own": StateField(item="extra", like_params=True, copied=True),
        "shared": StateField(item="extra", like_params=True),
    }
    apart = replace(placement, apart=("replica",))
    found = layout.of_run(run, apart, fields)
    assert replace(found, extra={}) == layout.shardings
    assert found.extra["shared"] == layout.shardings.params
    spec = tuple(found.extra["own"]["momentum"]["kernel"].spec)
    assert spec == ("replica", *layout.shardings.params["kernel"].spec)


def test_within_a_step_apart_nothing_is_split_over_its_axis() -> None:
    whole = make_placement(RunConfig(strategy="hybrid", mesh=MeshSpec(replica=2, data=4)))
    placement = replace(whole, apart=("replica",))
    assert (whole.batch_shards, placement.batch_shards) == (8, 4)
    assert "replica" not in placement.batch_axes
    with use_placement(placement):
        mesh = current_mesh()
        assert mesh is not None
        assert "replica" not in mesh.free
        text = jax.jit(lambda x: constrain_sharding(x, "batch")).lower(jnp.ones(8)).as_text()
    assert "data" in text
    assert '"replica"}' not in text.replace("<", "{")


def test_outputs_of_copies_are_joined_by_their_weights() -> None:
    sums = np.array([[[1.0, 2.0], [6.0, 3.0]], [[3.0, 6.0], [4.0, 2.0]]], np.float32)
    found = StepOutput(
        {"accuracy": jnp.zeros(2), "loss": jnp.zeros(2)},
        jnp.array([[True, True, True, True], [True, False, True, True]]),
        sums=jnp.asarray(sums),
        copies=True,
    ).joined()
    assert {name: float(x) for name, x in found.metrics.items()} == {"accuracy": 0.5, "loss": 2.0}
    assert found.finite.tolist() == [True, False, True, True]
    assert not found.copies
