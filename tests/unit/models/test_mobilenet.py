"""MobileNetV2 as published: its parameters, its numbers, and its batch statistics."""

import os
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st
from step_helpers import equations, on, trainer

from spmdtrain import MeshSpec, TrainState, UserError
from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Adapter, Mode, Variables
from spmdtrain.config.run_config import RunConfig
from spmdtrain.models import MobileNetV2, mobilenet
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import make_placement, use_placement
from spmdtrain.testing.compiled_step import compiled_step
from spmdtrain.tree import named_leaves

SHALLOW = mobilenet.STAGES[:2]  # three blocks: one without expansion, with a stride, and residual


def abstract(classes: int = 1000, **options: Any) -> tuple[Adapter, Variables]:
    """The model and the shapes of its variables; nothing is drawn."""
    adapter = as_adapter(partial(MobileNetV2, classes, **options))
    return adapter, jax.eval_shape(adapter.init, {}, jax.random.key(0))


def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def drawn(variables: Variables, seed: int = 0) -> Variables:
    """Values for variables: no norm leaves its input as it is."""
    draw = np.random.default_rng(seed)

    def values(path: Any, x: Any) -> np.ndarray:
        name = path[-1].key
        if name in ("scale", "var"):
            return draw.uniform(0.5, 1.5, x.shape).astype(np.float32)
        fan_in = max(1, x.size // x.shape[-1])
        deviation = 0.3 if name in ("bias", "mean") else fan_in**-0.5
        return draw.normal(0, deviation, x.shape).astype(np.float32)

    found: Variables = jax.tree_util.tree_map_with_path(values, variables)
    return found


def forward(adapter: Adapter, variables: Variables, x: Any, mode: Mode = Mode.EVAL) -> Any:
    key = jax.random.key(0)
    return adapter.run(lambda model, x: model(x), variables, x, key, mode)


# -- as published ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_has_the_parameters_that_were_published() -> None:
    _, variables = abstract(1000)
    assert count(variables.params) == 3_504_872
    shapes = {name: x.shape for name, x in named_leaves(variables.params).items()}
    assert shapes["stem/convolution/kernel"] == (3, 3, 3, 32)
    assert shapes["blocks/1/depthwise/convolution/kernel"] == (3, 3, 1, 96)
    assert shapes["blocks/16/project/convolution/kernel"] == (960, 320)
    assert shapes["classifier/kernel"] == (1280, 1000)
    assert sum(name.endswith("kernel") for name in shapes) == 53


@given(st.floats(0.1, 5000))
@example(9.5)  # to the nearest it would be 8, which is 16 % less
def test_channels_are_multiples_of_8_and_never_more_than_10_percent_less(channels: float) -> None:
    rounded = mobilenet.round_channels(channels)
    assert rounded % 8 == 0 and rounded >= 8
    assert 0.9 * channels <= rounded <= max(8, channels + 8)
    assert mobilenet.round_channels(rounded) == rounded


@pytest.mark.slow
@pytest.mark.nightly
def test_the_numbers_are_those_of_keras() -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip(f"keras is here with {keras.backend.backend()}, not JAX")
    size = 75  # odd and even on the way: 75, 38, 19, 10, 5, 3
    theirs = keras.applications.MobileNetV2(
        (size, size, 3), alpha=0.35, weights=None, classes=7, classifier_activation=None
    )
    adapter, shapes = abstract(7, width_multiplier=0.35)
    variables = drawn(shapes)
    assert theirs.count_params() == count(variables)  # the averages of the norms, too
    ours = named_leaves(variables.params) | named_leaves(variables.model_state)
    for mine, name in keras_layers():
        convolution, norm = theirs.get_layer(name[0]), theirs.get_layer(name[1])
        kernel = ours[f"{mine}/convolution/kernel"]
        shape = convolution.kernel.shape  # 1x1 kernels have their place, depthwise ones another
        convolution.set_weights([kernel.reshape(shape)])
        norm.set_weights([ours[f"{mine}/norm/{part}"] for part in ("scale", "bias", "mean", "var")])
        assert norm.epsilon == 1e-3
    theirs.get_layer("predictions").set_weights(
        [ours["classifier/kernel"], ours["classifier/bias"]]
    )

    x = np.random.default_rng(1).uniform(0, 1, (2, size, size, 3)).astype(np.float32)
    weights = [
        [v.value for v in vs] for vs in (theirs.trainable_variables, theirs.non_trainable_variables)
    ]
    expected = jax.jit(lambda w, x: theirs.stateless_call(*w, x, training=False)[0])(weights, x)
    found, _ = jax.jit(partial(forward, adapter))(variables, x)
    assert np.ptp(np.asarray(expected)) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def keras_layers() -> list[tuple[str, tuple[str, str]]]:
    """Each of our layers, with the names of Keras' convolution and norm."""
    found = [("stem", ("Conv1", "bn_Conv1")), ("head", ("Conv_1", "Conv_1_bn"))]
    for number in range(17):
        prefix = f"block_{number}_" if number else "expanded_conv_"
        for part in ("expand", "depthwise", "project")[not number :]:
            found.append((f"blocks/{number}/{part}", (prefix + part, f"{prefix}{part}_BN")))
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 0}, "classes is 0"),
        ({"width_multiplier": 0.0}, "width_multiplier is 0.0: it must be above 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
    ],
)
def test_what_it_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        abstract(**{"classes": 5} | options)


# -- depthwise convolutions ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(6, 9), (1, 2)])
def test_on_a_cpu_depthwise_convolutions_are_sums_of_products_and_equal(
    stride: int, sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, *sides, 5)).astype(np.float32)
    kernel = draw.normal(size=(3, 3, 1, 5)).astype(np.float32)

    def program(x: Any, kernel: Any) -> Any:
        out = mobilenet.depthwise(x, kernel, stride)
        return (out**3).sum(), out

    def primitives() -> set[str]:
        jaxpr = jax.make_jaxpr(partial(mobilenet.depthwise, stride=stride))(x, kernel)
        return {one.primitive.name for one in equations(jaxpr)}

    gradients = jax.value_and_grad(program, argnums=(0, 1), has_aux=True)
    assert "conv_general_dilated" not in primitives()
    on_cpu = gradients(x, kernel)
    monkeypatch.setattr(mobilenet, "current_device", lambda: SimpleNamespace(platform="gpu"))
    assert "conv_general_dilated" in primitives()
    by_convolution = gradients(x, kernel)
    assert by_convolution[0][1].shape == (2, *(-(-side // stride) for side in sides), 5)
    for one, other in zip(*map(jax.tree.leaves, (on_cpu, by_convolution)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# -- batch statistics ------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_bfloat16_the_statistics_are_float32_and_the_products_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mobilenet, "STAGES", SHALLOW)
    adapter, shapes = abstract(5, width_multiplier=0.35)
    variables = drawn(shapes)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), variables.params)
    x = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (4, 12, 12, 3)), jnp.bfloat16)
    run = partial(forward, adapter, mode=Mode.TRAIN)
    program = jax.make_jaxpr(run)(Variables(narrow, variables.model_state), x)
    products = [
        {v.aval.dtype.name for v in one.invars}
        for one in equations(program)
        if one.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    assert products == [{"bfloat16"}] * 8  # stem, 1 + 2 + 2 of blocks, head and classifier
    out, after = jax.eval_shape(run, Variables(narrow, variables.model_state), x)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param("default", marks=pytest.mark.nightly), "mirrored"]
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_the_statistics_of_values_far_from_0_keep_their_digits(
    monkeypatch: pytest.MonkeyPatch, dtype: str, strategy: str
) -> None:
    monkeypatch.setattr(mobilenet, "STAGES", SHALLOW)
    placement = make_placement(RunConfig(strategy=strategy, mesh=MeshSpec()))
    norm = MobileNetV2(2, momentum=0.9, epsilon=1e-3, rngs=nnx.Rngs(0)).stem.norm
    shape = (64, 4, 4, norm.num_features)
    x = jnp.asarray(np.random.default_rng(0).normal(1000, 1, shape), dtype)
    with use_placement(placement):
        found = nnx.jit(lambda norm, x: norm(x))(norm, jax.device_put(x, placement.batch))
    exact = np.asarray(x).astype(np.float64)
    mean, var = exact.mean((0, 1, 2)), exact.var((0, 1, 2))
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * var, rtol=1e-5)
    np.testing.assert_allclose(norm.mean[...], 0.1 * mean, rtol=1e-6)
    normal = (exact - mean) / np.sqrt(var + 1e-3)
    np.testing.assert_allclose(found, normal, rtol=1e-4, atol=5e-4)  # a mean of 1000 in f32


@pytest.mark.slow
@pytest.mark.nightly
def test_mean_and_variance_of_a_layer_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mobilenet, "STAGES", SHALLOW)
    batch = {"x": np.zeros((8, 8, 8, 3), np.float32), "label": np.zeros(8, np.int32)}

    def objective(model: Any, batch: Any) -> Any:
        return {"loss": model(batch["x"])[:, 0]}

    of = trainer(
        model=partial(MobileNetV2, 5, width_multiplier=0.35),
        objective=objective,
        global_batch_size=8,
        mesh=on(2),
    )
    kinds = Counter(of.kind for of in compiled_step(of, batch).collectives)
    # Of 10 norms, forward and backward, and one for all gradients and metrics.
    assert kinds == {"all-gather": 10, "all-reduce": 10 + 1}


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "zero", "fully_sharded", "hybrid+fully_sharded"])
def test_the_published_model_has_a_place_under_every_strategy(strategy: str) -> None:
    _, variables = abstract(1000)
    config = RunConfig(strategy=strategy, mesh=MeshSpec())
    placement = make_placement(config)
    assert len(placement.devices) == 8
    step: Any
    key: Any
    step, key = (jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in ((), (2,)))
    state = TrainState(step, variables.params, {}, {}, variables.model_state, key)
    layout = Layout(state, placement, (), config.sharding)
    whole = 0
    for name, place_of in named_leaves(layout.shardings.params).items():
        size = named_leaves(variables.params)[name].size
        if place_of.is_fully_replicated:
            whole += size
            assert size < 2**14 or not placement.strategy.shards_params, name
    expected = 1.0 if not placement.strategy.shards_params else 0.06
    assert whole / count(variables.params) <= expected
