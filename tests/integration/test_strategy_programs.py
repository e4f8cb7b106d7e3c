"""What the compiled train step of each strategy holds: which collectives, of how many bytes.

On CPU XLA has no reduce-scatter of its own: gradients that are reduced into parts are all-reduced
and sliced.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DIGITS
from jax.sharding import SingleDeviceSharding
from matrix import ROWS, Row

from spmdtrain import CallbackContext, FunctionModel, Trainer
from spmdtrain.config.command_line import parse_command_line
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP, mlp_rules
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step
from spmdtrain.tree import named_leaves

BATCH, INTO, HIDDEN, OUT, MIN_SIZE = 64, 64, 512, 16, 1024
KERNELS = 4 * (INTO * HIDDEN + HIDDEN * OUT)  # bytes; both are large enough to be split
PARAMETERS = KERNELS + 4 * (HIDDEN + OUT)
REDUCTIONS = ("all-reduce", "reduce-scatter")
SMALL = 64  # bytes of the output of a step: loss, weight, flags

BY_NAME = {row.name: row for row in ROWS}


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": ((model(x) - y) ** 2).sum(-1)}


def line(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    slope, offset = model["w"]
    return {"loss": (slope * x + offset - y) ** 2}


def trainer_of(row: Row, **options: Any) -> Trainer:
    """An MLP of two kernels and two biases, trained by SGD with momentum."""
    config = parse_command_line(["--config", str(DIGITS), *row.arguments]).config
    given: dict[str, Any] = {
        "model": partial(MLP, INTO, (HIDDEN,), OUT),
        "objective": squared_error,
        "optimizer": optax.sgd(1e-3, momentum=0.9),
        "rules": mlp_rules(2),
        "strategy": row.strategy,
        "mesh": config.mesh,
        "sharding": ShardingOptions(min_size=MIN_SIZE),
        "global_batch_size": BATCH,
        "collectives": CollectiveOptions(reduction="automatic"),  # of what XLA makes
    }
    return Trainer(**given | options, terminal=Terminal(quiet=True))


class Program(NamedTuple):
    """A strategy's trainer and its compiled step."""

    trainer: Trainer
    step: CompiledStep

    def bytes_of(self, *kinds: str) -> int:
        """What such collectives move, small ones left out."""
        found = [one.bytes for one in self.step.collectives if one.kind in kinds]
        return sum(size for size in found if size > SMALL)

    def arrays_of(self, *kinds: str) -> int:
        """How many arrays they move."""
        return sum(
            one.arrays for one in self.step.collectives if one.kind in kinds and one.bytes > SMALL
        )

    def large(self) -> dict[str, set[str]]:
        """The kinds of collectives that move more than a few numbers, by the axes they are over."""
        found: dict[str, set[str]] = {}
        for one in self.step.collectives:
            if one.bytes > SMALL:
                found.setdefault(" ".join(one.axes), set()).add(one.kind)
        return found

    def held(self, field: str) -> dict[str, float]:
        """Of each large array of the state the fraction that a device holds."""
        steps = self.trainer.functions
        shardings = named_leaves(getattr(steps.shardings, field))
        leaves = named_leaves(getattr(steps.abstract_state, field))
        return {
            name: math.prod(shardings[name].shard_shape(leaf.shape)) / leaf.size
            for name, leaf in leaves.items()
            if leaf.size >= MIN_SIZE
        }


@functools.cache
def program(name: str) -> Program:
    # The average is another reader of the updated parameters, which are gathered but once.
    trainer = trainer_of(BY_NAME[name], ema_decay=0.9 if "zero" in name else None)
    batch = (np.zeros((BATCH, INTO), np.float32), np.zeros((BATCH, OUT), np.float32))
    return Program(trainer, compiled_step(trainer, batch))


# -- the claims ------------------------------------------------------------------------------------


def one_reduction_over(of: Program, *axes: str) -> None:
    """Every gradient crosses once, all of them together, and nothing else does."""
    of.step.assert_count(1, "all-reduce", axes=axes)
    (only,) = of.step.collectives
    assert PARAMETERS < only.bytes <= PARAMETERS + SMALL  # and the loss and its weight
    assert {*of.held("params").values(), *of.held("opt_state").values()} == {1}


def gathered_once_over(of: Program, axis: str) -> None:
    """Each kernel is made whole once in a step, its gradient reduced once."""
    assert of.bytes_of("all-gather") == KERNELS and of.arrays_of("all-gather") == 2
    of.step.assert_count(0, "all-to-all")
    assert all(one.axes == (axis,) for one in of.step.collectives if one.kind == "all-gather")


def reduced_once(of: Program, gradients: int = PARAMETERS) -> None:
    assert gradients <= of.bytes_of(*REDUCTIONS) <= gradients + SMALL


def zero(of: Program) -> None:
    gathered_once_over(of, "data")
    reduced_once(of)
    assert set(of.large()) == {"data"}
    assert set(of.held("params").values()) == {1}
    assert list(of.held("opt_state").values()) == [1 / 8] * 2
    # What is gathered is the result: the updated parameters, not what the model begins with.
    assert not any("jvp" in one.op_name for one in of.step.collectives if one.kind == "all-gather")


def fully_sharded(of: Program) -> None:
    gathered_once_over(of, "fsdp")
    reduced_once(of)
    assert set(of.large()) == {"fsdp"}
    # Nothing of the state is whole on a device above the smallest size that is split.
    assert list(of.held("params").values()) == list(of.held("opt_state").values()) == [1 / 8] * 2


def tensor_parallel(of: Program) -> None:
    of.step.assert_no("all-gather")
    activations = 4 * (BATCH // 4) * OUT  # of the second layer, of a device's examples
    of.step.assert_count(1, "all-reduce", larger_than=SMALL, axes="tensor")
    of.step.assert_no("all-reduce", larger_than=activations, axes="tensor")
    of.step.assert_no("all-reduce", larger_than=SMALL, axes=("data", "tensor"))
    # Each device has half of everything but the last bias.
    gradients = (PARAMETERS - 4 * OUT) // 2 + 4 * OUT
    assert gradients < of.bytes_of(*REDUCTIONS) - activations <= gradients + SMALL
    assert of.large() == {"data": {"all-reduce"}, "tensor": {"all-reduce"}}
    assert list(of.held("params").values()) == list(of.held("opt_state").values()) == [1 / 2] * 2


def fully_sharded_tensor(of: Program) -> None:
    assert list(of.held("params").values()) == list(of.held("opt_state").values()) == [1 / 8] * 2
    # Of each kernel the half that is a device's part over tensor.
    assert of.bytes_of("all-gather") == KERNELS // 2 and of.arrays_of("all-gather") == 2
    assert of.large() == {"fsdp": {"all-gather", "all-reduce"}, "tensor": {"all-reduce"}}
    activations = 4 * (BATCH // 4) * OUT
    gradients = (PARAMETERS - 4 * OUT) // 2 + 4 * OUT
    assert gradients < of.bytes_of(*REDUCTIONS) - activations <= gradients + SMALL
    of.step.assert_no("all-reduce", larger_than=activations, axes="tensor")


def hybrid_fully_sharded(of: Program) -> None:
    gathered_once_over(of, "fsdp")  # within a group, and nothing of it between them
    assert list(of.held("params").values()) == list(of.held("opt_state").values()) == [1 / 4] * 2
    reduced_in_groups(of, "fsdp")


def hybrid_zero(of: Program) -> None:
    gathered_once_over(of, "data")
    assert set(of.held("params").values()) == {1}
    assert list(of.held("opt_state").values()) == [1 / 4] * 2
    reduced_in_groups(of, "data")


def reduced_in_groups(of: Program, axis: str) -> None:
    """Between groups go gradients, whole or in parts, and nothing else.

    XLA may reduce in one (over both axes) or in two: within each group, and over the groups only
    the part that a device keeps.
    """
    over = of.large()
    assert all(kinds <= set(REDUCTIONS) for axes, kinds in over.items() if "replica" in axes)
    assert any("replica" in axes for axes in over)
    reductions = [one for one in of.step.collectives if one.kind in REDUCTIONS]
    within, between, both = (
        sum(one.bytes for one in reductions if set(one.axes) == axes)
        for axes in ({axis}, {"replica"}, {"replica", axis})
    )
    assert PARAMETERS <= within + both <= PARAMETERS + SMALL
    assert abs(4 * between - within) <= 4 * SMALL


def no_collectives(of: Program) -> None:
    assert of.step.collectives == []
    assert "num_partitions" not in of.step.text.splitlines()[0]


CLAIMS: dict[str, Callable[[Program], None]] = {
    "default": no_collectives,
    "one_device --mesh.devices 3": no_collectives,
    "mirrored": lambda of: one_reduction_over(of, "data"),
    "zero": zero,
    "fully_sharded": fully_sharded,
    "tensor_parallel": tensor_parallel,
    "central_storage": lambda of: one_reduction_over(of, "data"),
    "hybrid": lambda of: one_reduction_over(of, "replica", "data"),
    "fully_sharded --mesh.tensor 2": fully_sharded_tensor,
    "hybrid+fully_sharded": hybrid_fully_sharded,
    "hybrid+zero": hybrid_zero,
    "central_storage+fully_sharded": fully_sharded,
}
ALIKE = [  # host memory changes no collective
    {"default", "one_device --mesh.devices 3"},
    {"mirrored", "central_storage"},
    {"fully_sharded", "central_storage+fully_sharded"},
]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_step_holds_what_its_strategy_says(name: str) -> None:
    CLAIMS[name](program(name))


@pytest.mark.parametrize("name", BY_NAME)
def test_and_not_what_another_one_says(name: str) -> None:
    """So that no claim is one that always holds."""
    alike = next((names for names in ALIKE if name in names), {name})
    for other in BY_NAME:
        if other not in alike:
            with pytest.raises((AssertionError, ValueError)):
                CLAIMS[name](program(other))


@pytest.mark.parametrize(
    ("name", "held"), [("mirrored", 1), ("zero", 1 / 8), ("fully_sharded", 1 / 8)]
)
def test_gradients_are_reduced_into_the_parts_that_the_optimizer_has(
    name: str, held: float
) -> None:
    """XLA may find that by itself, from the optimizer's state; here it is asked to."""
    steps = program(name).trainer.functions
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), steps.abstract_state.params)
    found = named_leaves(jax.jit(steps.layout.gradients)(zeros))
    large = [x for x in found.values() if x.size >= MIN_SIZE]
    assert [x.addressable_shards[0].data.size / x.size for x in large] == [held] * 2


# -- devices and memory ----------------------------------------------------------------------------


def test_default_has_no_mesh() -> None:
    of = program("default")
    assert of.trainer.mesh is None
    shardings = jax.tree.leaves(of.trainer.functions.shardings)
    shardings += [of.trainer.placement.batch, *jax.tree.leaves(of.step.compiled.output_shardings)]
    assert all(type(one) is SingleDeviceSharding for one in shardings)
    assert {one.device_set == {jax.devices()[0]} for one in shardings} == {True}


def test_one_device_has_all_of_the_state_and_of_the_batch() -> None:
    of = program("one_device --mesh.devices 3")
    arguments, _ = of.step.compiled.input_shardings
    shardings = jax.tree.leaves([arguments, of.step.compiled.output_shardings])
    assert len(shardings) > 12  # state, batch, state again and output
    assert {tuple(one.device_set) for one in shardings} == {(jax.devices()[3],)}
    x = jax.device_put(np.zeros((BATCH, 2)), of.trainer.placement.batch)
    assert x.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("name", ["central_storage", "central_storage+fully_sharded"])
def test_under_central_storage_the_step_takes_and_leaves_its_arrays_in_host_memory(
    name: str,
) -> None:
    of = program(name)
    (state, batch), _ = of.step.compiled.input_shardings
    after, output = of.step.compiled.output_shardings
    for one in (state, after):
        for field in ("params", "opt_state"):
            kinds = {x.memory_kind for x in jax.tree.leaves(getattr(one, field))}
            assert kinds == {"pinned_host"}, field
        assert one.step.memory_kind != "pinned_host" != one.key.memory_kind
    elsewhere = {x.memory_kind for x in jax.tree.leaves([batch, output])}
    assert "pinned_host" not in elsewhere


@pytest.mark.parametrize(
    ("offload", "on_host"),
    [
        (None, {"params", "opt_state", "averaged"}),
        ("optimizer", {"opt_state"}),
    ],
)
def test_central_storage_keeps_between_steps_what_is_asked_in_host_memory(
    offload: Any, on_host: set[str]
) -> None:
    found: list[set[str]] = []

    def look(event: CallbackContext) -> None:
        leaves = named_leaves(event.trainer.state).items()
        kinds = {(n.partition("/")[0], x.sharding.memory_kind == "pinned_host") for n, x in leaves}
        # Scalars (an optimizer's count) stay on the devices.
        assert all(x.ndim for _, x in leaves if x.sharding.memory_kind == "pinned_host")
        found.append({field for field, there in kinds if there})

    trainer = trainer_of(
        BY_NAME["central_storage"],
        model=FunctionModel(lambda key: {"w": jnp.ones(2)}),
        objective=line,
        rules=(),
        sharding=ShardingOptions(offload=offload),
        optimizer=optax.adam(0.1),
        ema_decay=0.5,
        callbacks={"fit_start": look, "step": look},
    )
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    trainer.fit((x, 3 * x), steps=3, global_batch_size=8)
    assert found == [on_host] * 4
    # What is given out is in device memory: it can be called.
    assert trainer.model["w"].sharding.memory_kind != "pinned_host"
    assert trainer.evaluate((x, 3 * x))["loss"] > 0
