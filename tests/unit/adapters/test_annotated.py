"""Models that annotate their arrays: names become shardings, and constraints apply to the mesh."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.sharding import PartitionSpec

from spmdtrain import (
    AxisRules,
    LinenModel,
    MeshSpec,
    Rule,
    ShardingOptions,
    Trainer,
    UserError,
    open_run,
)
from spmdtrain.tree import named_leaves

P = PartitionSpec
WIDTH, HIDDEN, BATCH, LAYERS = 16, 32, 16, 4
DATA = {"x": np.random.default_rng(0).normal(size=(2 * BATCH, 4, WIDTH)).astype(np.float32)}
TABLE = {"batch": ("data", "fsdp"), "embed": "fsdp", "mlp": "tensor", "norm": None}
SPLIT: dict[str, Any] = {"strategy": "fully_sharded", "mesh": MeshSpec(fsdp=4, tensor=2)}


def reconstruction(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": ((model(batch["x"]) - batch["x"]) ** 2).mean(-1)}


def trainer(model: Any, **options: Any) -> Trainer:
    given = {"objective": reconstruction, "optimizer": optax.adam(1e-2), "log_every": 1}
    return Trainer(
        **({"model": model, "global_batch_size": BATCH, "quiet": True} | given | options)
    )


def trained(model: Any, **options: Any) -> tuple[Trainer, list[float]]:
    """A trainer after three steps, and their losses."""
    losses: list[float] = []
    callbacks = {"log": lambda event: losses.append(event.metrics["loss"])}
    fitted = trainer(model, callbacks=callbacks, **options)
    fitted.fit(DATA, steps=3)
    assert len(losses) == 3
    return fitted, losses


def shards(of: Trainer) -> dict[str, tuple[int, ...]]:
    """The shape on one device of each parameter and of the leaves that follow it."""
    assert of.state is not None
    assert len(of.placement.devices) == 8
    arrays = named_leaves(of.state)
    return {name: x.addressable_shards[0].data.shape for name, x in arrays.items() if x.ndim}


class Named(nnx.Module):
    """Logical names, as in flax's guides; constraints of activations in terms of mesh axes."""

    def __init__(self, rngs: nnx.Rngs, names: tuple[str | None, ...] = ("embed", "mlp")) -> None:
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            WIDTH, HIDDEN, kernel_init=nnx.with_partitioning(init, names), rngs=rngs
        )
        self.down = nnx.Linear(
            *(HIDDEN, WIDTH),
            kernel_init=nnx.with_partitioning(init, ("mlp", "embed")),
            bias_init=nnx.with_partitioning(nnx.initializers.zeros_init(), ("norm",)),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(self.up(x), P("fsdp", None, "tensor"))
        return self.down(nnx.gelu(hidden))


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A sharding configuration like that of flax's gemma example."""

    weight_df: PartitionSpec
    weight_fd: PartitionSpec
    norm: PartitionSpec
    act_btd: PartitionSpec
    act_btf: PartitionSpec

    @classmethod
    def fsdp_tp(cls, fsdp: str = "fsdp", tensor: str = "tensor") -> "Sharding":
        activations = P(fsdp, None, tensor)
        return cls(P(fsdp, tensor), P(tensor, fsdp), P(tensor), activations, activations)


class Explicit(nnx.Module):
    """Weights and activations have specs of explicit axes, as in flax's gemma example."""

    def __init__(self, rngs: nnx.Rngs, of: Sharding) -> None:
        self.of = of
        self.scale = nnx.Param(jnp.ones(WIDTH), out_sharding=of.norm)
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.up = linear(WIDTH, HIDDEN, kernel_metadata={"out_sharding": of.weight_df})
        self.down = linear(HIDDEN, WIDTH, kernel_metadata={"out_sharding": of.weight_fd})

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.gelu(self.up(x, out_sharding=self.of.act_btf))
        return self.down(hidden, out_sharding=self.of.act_btd) * self.scale


class Logical(nn.Module):
    """A feed-forward layer as in MaxText: logical names for weights and activations."""

    box: Any = staticmethod(nn.with_logical_partitioning)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        x = with_logical_constraint(x, ("batch", None, "embed_activation"))
        up = self.param("up", self.box(init, ("embed", "mlp")), (WIDTH, HIDDEN))
        down = self.param("down", self.box(init, ("mlp", "embed")), (HIDDEN, WIDTH))
        hidden = with_logical_constraint(nn.gelu(x @ up), ("batch", None, "mlp"))
        return with_logical_constraint(hidden @ down, ("batch", None, "embed_activation"))


def logical(box: Any = nn.with_logical_partitioning) -> LinenModel:
    return LinenModel(Logical(box), np.ones((1, 4, WIDTH), np.float32))


MODELS = {
    "nnx with names": (Named, AxisRules(TABLE)),
    "nnx with explicit axes": (
        partial(Explicit, of=Sharding.fsdp_tp()),
        AxisRules(explicit=("fsdp", "tensor")),
    ),
    "linen with logical names": (logical(), AxisRules(TABLE)),
    "linen with partitioning": (logical(nn.with_partitioning), AxisRules(TABLE)),
}


@pytest.mark.parametrize("place", [SPLIT, {"strategy": "one_device"}], ids=str)
def test_layers_of_explicit_axes_can_be_watched(place: dict[str, Any], tmp_path: Path) -> None:
    model, axis_rules = MODELS["nnx with explicit axes"]
    options = {"watch": ["^up"], "workdir": str(tmp_path), "shuffle": False, **place}
    fitted, _ = trained(model, axis_rules=axis_rules, **options)
    found = open_run(tmp_path).watched[1]
    kernel = trainer(model, axis_rules=axis_rules, **place).init().params["up"]["kernel"]
    rows = DATA["x"][: fitted.config.resolved_batch_size]
    norm = np.linalg.norm(rows @ np.asarray(kernel))
    assert found["outputs"]["up"]["norm"] == pytest.approx(norm, rel=1e-4)
    assert list(found["gradients"]) == ["up/kernel"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.nightly] * (x != "linen with logical names"))
        for x in MODELS
    ],
)
def test_annotated_models_are_split_and_have_the_losses_of_one_device(name: str) -> None:
    model, axis_rules = MODELS[name]
    split, losses = trained(model, axis_rules=axis_rules, **SPLIT)
    _, expected = trained(model, axis_rules=axis_rules, strategy="one_device")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = shards(split)
    kernel = "" if "linen" in name else "/kernel"
    for of in ("params", "opt_state/0/mu", "opt_state/0/nu"):
        assert found[f"{of}/up{kernel}"] == (WIDTH // 4, HIDDEN // 2)
        assert found[f"{of}/down{kernel}"] == (HIDDEN // 2, WIDTH // 4)
    sources = {row.name: row.source for row in split.sharding_table().rows}
    assert sources[f"up{kernel}"] == "annotation"
    np.testing.assert_allclose(
        split.evaluate({"x": DATA["x"][:19]})["loss"],
        trained(model, axis_rules=axis_rules, strategy="default")[0].evaluate(
            {"x": DATA["x"][:19]}
        )["loss"],
        rtol=1e-4,
    )


class StackedNamed(nnx.Module):
    """Layers stacked along a new first dim, run by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        stack: Any = nnx.vmap(
            lambda rngs: Named(rngs), transform_metadata={nnx.PARTITION_NAME: "layers"}
        )
        self.layers = stack(rngs.split(LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        scan: Any = nnx.scan(
            lambda layer, x: x + layer(x),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        return scan(self.layers, x)


class StackedLogical(nn.Module):
    """The same in linen, by `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan: Any = nn.scan(
            lambda layer, x, _: (x + layer(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(Logical(name="layers"), x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [pytest.param(None, marks=pytest.mark.nightly), "tensor"])
@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (StackedNamed, "layers/up/kernel"),
        pytest.param(
            LinenModel(StackedLogical(), np.ones((1, 4, WIDTH), np.float32)),
            "layers/up",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_dim_of_stacked_layers_has_a_name_too(
    model: Any, kernel: str, layers: str | None
) -> None:
    axis_rules = AxisRules(TABLE | {"mlp": None if layers else "tensor", "layers": layers})
    split, losses = trained(model, axis_rules=axis_rules, **SPLIT)
    _, expected = trained(model, axis_rules=axis_rules, strategy="one_device")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    shape = (LAYERS // 2, WIDTH // 4, HIDDEN) if layers else (LAYERS, WIDTH // 4, HIDDEN // 2)
    assert shards(split)[f"params/{kernel}"] == shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["nnx with names", pytest.param("nnx with explicit axes", marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"strategy": "mirrored"}, (WIDTH, HIDDEN)),
        pytest.param(
            {"strategy": "tensor_parallel"}, (WIDTH, HIDDEN // 2), marks=pytest.mark.nightly
        ),
        ({"strategy": "fully_sharded+tensor_parallel"}, (WIDTH // 4, HIDDEN // 2)),
        (
            {"strategy": "hybrid+fully_sharded", "mesh": MeshSpec(replica=2, tensor=2)},
            (WIDTH // 2, HIDDEN // 2),
        ),
    ],
)
def test_axes_that_the_mesh_does_not_have_split_nothing(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model, axis_rules = MODELS[name]
    split, losses = trained(model, axis_rules=axis_rules, **options)
    assert shards(split)["params/up/kernel"] == shape
    _, expected = trained(model, axis_rules=axis_rules, strategy="one_device")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_rules_of_the_experiment_win_and_the_strategy_splits_what_is_free() -> None:
    made = trainer(
        partial(Named, names=(None, "mlp")),
        axis_rules=AxisRules(TABLE),
        rules=[Rule("down/kernel", P(None, "tensor"))],
        sharding=ShardingOptions(min_size=1),
        **SPLIT,
    )
    rows = {row.name: (row.spec, row.source) for row in made.sharding_table().rows}
    assert rows["up/kernel"] == ("P('fsdp', 'tensor')", "annotation + strategy")
    assert rows["down/kernel"] == ("P('fsdp', 'tensor')", "rule 1 + strategy")
    assert rows["up/bias"] == ("P('fsdp')", "strategy")


def test_a_name_that_is_not_mapped_is_an_error_with_the_path() -> None:
    with pytest.raises(
        UserError,
        match=r"^params/down/bias is annotated \('norm',\): axis_rules do "
        r"not map 'norm', 'mlp', 'embed', and the axes",
    ):
        trainer(Named, **SPLIT)
    with pytest.raises(
        UserError, match=r"params/down is annotated \('mlp', 'embed'\): .* not map 'mlp', "
    ):
        trainer(logical(), axis_rules=AxisRules({"embed": "fsdp"}), **SPLIT)


def test_dims_that_do_not_divide_and_axes_that_nothing_uses_are_named() -> None:
    with pytest.raises(
        UserError,
        match=r"params/down/kernel: dim 1 of shape \(32, 16\) does not "
        r"divide over fsdp=3 \* tensor=1 \(16 = 5 \* 3 \+ 1\)",
    ):
        trainer(
            partial(Named),
            axis_rules=AxisRules(TABLE | {"embed": ("fsdp", "tensor"), "mlp": None}),
            strategy="fully_sharded",
            mesh=MeshSpec(fsdp=3, tensor=1, devices=(0, 1, 2)),
        )
    with pytest.raises(UserError, match="none of the 0 rules and 3 annotations names it"):
        trainer(Named, axis_rules=AxisRules(TABLE | {"mlp": None}), **SPLIT)


def test_a_model_that_needs_explicit_axes_says_so() -> None:
    model, _ = MODELS["nnx with explicit axes"]
    with pytest.raises(
        UserError, match=r"out_sharding.*AxisRules\(explicit=\(\.\.\.\)\)"
    ) as caught:
        trainer(model, **SPLIT).fit(DATA, steps=1)
    assert re.search(r"test_annotated\.py:\d+, in __call__: ", str(caught.value))  # the user's line


def test_a_table_of_another_type_is_refused() -> None:
    with pytest.raises(UserError, match=r"axis_rules is a dict: it must be AxisRules\(\.\.\.\)"):
        trainer(Named, axis_rules=TABLE)


@pytest.mark.nightly
@pytest.mark.slow
def test_steps_that_are_not_compiled_have_the_same_losses() -> None:
    model, axis_rules = MODELS["linen with logical names"]
    _, losses = trained(model, axis_rules=axis_rules, jit=False, **SPLIT)
    _, expected = trained(model, axis_rules=axis_rules, **SPLIT)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
