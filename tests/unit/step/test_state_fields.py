"""The fields of the state as rows: a field with a row needs no edit elsewhere."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from spmdtrain import MeshSpec, Rule, RunConfig
from spmdtrain.checkpoints.manifest import ITEMS
from spmdtrain.config.options import ShardingOptions
from spmdtrain.sharding.layout import Layout, tabulate
from spmdtrain.sharding.placement import make_placement
from spmdtrain.step.state import TREES, TrainState
from spmdtrain.strategies import StateField


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WiderState(TrainState):
    """A state with a field more, which has the parameters' shapes."""

    outer: Any = field(default_factory=dict)

    FIELDS: ClassVar = {**TrainState.FIELDS, "outer": StateField(item="outer", like_params=True)}


def wider() -> WiderState:
    def init() -> WiderState:
        params = {"kernel": jnp.zeros((8, 16)), "bias": jnp.zeros(16)}
        opt_state = optax.adam(1e-3).init(params)
        return WiderState(
            jnp.int32(0), params, opt_state, {}, {}, jax.random.key(0), outer={"slow": params}
        )

    found: WiderState = jax.eval_shape(init)
    return found


@pytest.mark.parametrize(
    ("strategy", "spec"),
    [
        ("mirrored", PartitionSpec()),
        ("zero", PartitionSpec()),
        ("fully_sharded", PartitionSpec(None, "fsdp")),
        ("central_storage", PartitionSpec()),
    ],
)
def test_a_new_field_is_sharded_and_counted_by_its_row(strategy: str, spec: PartitionSpec) -> None:
    assert jax.device_count() > 1
    state, placement = wider(), make_placement(RunConfig(strategy=strategy, mesh=MeshSpec()))
    layout = Layout(state, placement, (), ShardingOptions(min_size=1))
    assert layout.on_device.outer["slow"]["kernel"].spec == spec
    assert layout.on_device.outer["slow"] == layout.on_device.params
    assert layout.shardings.outer["slow"] == layout.shardings.params
    rows = {row.name: row for row in tabulate(state, layout.shardings).rows}
    assert rows["kernel"].own.whole == 2 * 8 * 16 * 4  # the parameter and the new array
    assert rows["kernel"].optimizer.whole == 2 * 8 * 16 * 4  # Adam's two moments


def test_a_rule_of_a_parameter_holds_for_its_arrays_in_a_new_field() -> None:
    placement = make_placement(RunConfig(mesh=MeshSpec(data=4, tensor=2), strategy="mirrored"))
    rule = Rule("^params/kernel", PartitionSpec("tensor"))
    layout = Layout(wider(), placement, (rule,), ShardingOptions())
    assert layout.on_device.outer["slow"]["kernel"].spec == PartitionSpec("tensor")


def test_every_field_has_a_row() -> None:
    assert list(TrainState.FIELDS) == [each.name for each in dataclasses.fields(TrainState)]
    rows = TrainState.FIELDS.values()
    assert all(bool(row.title) == row.is_tree for row in rows)
    assert all(not row.replicated for row in rows if row.is_tree)
    assert TREES == ("params", "opt_state", "averaged", "model_state")


def test_the_items_of_a_checkpoint_have_the_layout_of_version_1() -> None:
    assert list(ITEMS.items()) == [
        ("params", ("params",)),
        ("averaged", ("averaged",)),
        ("averaging", ("averaged_before",)),
        ("extra", ("extra",)),
        ("model_state", ("model_state",)),
        ("training", ("step", "opt_state", "key")),
    ]
