"""The transformer: attention masks, positions, and its sharding on the mesh."""

import dataclasses
import functools
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import REPOSITORY

from spmdtrain import MeshSpec, Trainer, UserError
from spmdtrain.config.experiment import load_experiment
from spmdtrain.config.options import ShardingOptions
from spmdtrain.data.text import Packed
from spmdtrain.models import MLP, TRANSFORMER_RULES, Transformer, TransformerConfig, mlp_rules
from spmdtrain.models.layers import rotary_speeds, rotation
from spmdtrain.step.flops import count_flops, model_flops
from spmdtrain.tree import named_leaves

SMALL = TransformerConfig(
    vocabulary=50, rows=64, layers=2, width=32, heads=2, hidden=64, context=16, unroll=True
)


def small(seed: int = 0, **changes: Any) -> Transformer:
    model = Transformer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(seed))
    model.eval()  # type: ignore[no-untyped-call]
    return model


@nnx.jit
def forward(model: Transformer, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def some_tokens(rows: int = 3, length: int = 16) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (rows, length), 0, SMALL.vocabulary)


def loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def gradients(model: Transformer, tokens: jax.Array) -> dict[str, np.ndarray]:
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, rest = states
    found = jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p, rest), tokens)))(params)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(nnx.to_pure_dict(found)).items()}


@pytest.mark.slow
@pytest.mark.parametrize("positions", [pytest.param("rotary", marks=pytest.mark.slow), "learned"])
def test_a_token_sees_itself_and_those_before_it_alone(positions: str) -> None:
    model, tokens = small(positions=positions), some_tokens()
    before = forward(model, tokens)
    after = forward(model, tokens.at[:, 9].set((tokens[:, 9] + 1) % SMALL.vocabulary))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    changed = np.abs(before - after)[..., : SMALL.vocabulary].max(axis=(0, 2))
    assert (changed[9:] > 1e-4).all(), changed  # not the token alone, those after it too


@pytest.mark.slow
def test_rotary_products_depend_on_the_distance_alone() -> None:
    turn = rotation(12, rotary_speeds(8, 10_000.0))
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    queries, keys = (turn(jnp.tile(x, (1, 12, 1, 1)))[0, :, 0] for x in (query, key))
    products = np.asarray(queries @ keys.T)
    for distance in range(-11, 12):
        along = np.diagonal(products, distance)
        assert np.ptp(along) < 1e-5
    assert np.ptp(products[0]) > 0.1  # and it does depend on it
    np.testing.assert_allclose(queries[0], query[0, 0, 0], rtol=1e-6)  # the first is not turned


@pytest.mark.slow
@pytest.mark.parametrize("positions", [300, jnp.arange(7, 307)[None]], ids=["known", "given"])
def test_rotations_in_the_matrix_unit_of_tpus_have_the_same_bits(
    positions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, change = jax.random.normal(jax.random.key(0), (2, 1, 300, 2, 64), jnp.bfloat16)
    results = {}
    for platform in ("cpu", "tpu"):
        device = SimpleNamespace(platform=platform)

        def turn(x: jax.Array) -> jax.Array:
            return rotation(positions, rotary_speeds(64, 10_000.0))(x)

        monkeypatch.setattr("spmdtrain.models.layers.current_device", lambda device=device: device)
        results[platform] = [turn(x), *jax.vjp(turn, x)[1](change)]
        program = jax.make_jaxpr(turn)(x)
        assert bool(count_flops(program).total) == (platform == "tpu")
        assert model_flops(program, partial(jax.make_jaxpr(turn), x)).total == 0
    np.testing.assert_array_equal(results["cpu"], results["tpu"])


@pytest.mark.parametrize(("count", "are_constants"), [(2**18, True), (2**18 + 1, False)])
def test_rotations_by_few_known_positions_are_constants(count: int, are_constants: bool) -> None:
    speeds = rotary_speeds(8, 10_000.0)
    x = jax.ShapeDtypeStruct((1, count, 1, 8), jnp.float32)
    program = jax.make_jaxpr(lambda x: rotation(count, speeds)(x))(x)
    assert ("cos" not in {e.primitive.name for e in program.eqns}) == are_constants


def test_rotations_by_known_positions_are_those_by_given_ones() -> None:
    speeds, x = rotary_speeds(8, 10_000.0), jax.random.normal(jax.random.key(0), (1, 300, 2, 8))
    given = rotation(jnp.arange(300)[None], speeds)(x)
    np.testing.assert_allclose(rotation(300, speeds)(x), given, atol=1e-6)
    assert np.abs(given - x).max() > 1


def test_rotations_by_known_positions_are_rounded_once() -> None:
    speeds = rotary_speeds(64, 10_000.0).astype(np.float32)
    ones = jnp.concatenate([jnp.ones((1, 300, 1, 32)), jnp.zeros((1, 300, 1, 32))], axis=-1)
    angles = (np.arange(300, dtype=np.float32)[:, None] * speeds).astype(np.float64)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    np.testing.assert_array_equal(rotation(300, speeds)(ones)[0, :, 0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_order_of_earlier_tokens_counts(positions: str) -> None:
    # In one layer they reach the last token as a sum: without positions their order is lost.
    model, tokens = small(positions=positions, layers=1), some_tokens()
    swapped = tokens.at[:, 2].set(tokens[:, 5]).at[:, 5].set(tokens[:, 2])
    last = [np.asarray(forward(model, x)[:, -1, : SMALL.vocabulary]) for x in (tokens, swapped)]
    assert np.abs(last[0] - last[1]).max() > 1e-4
    if positions == "learned":
        model.positions[...] = jnp.zeros_like(model.positions[...])
        last = [np.asarray(forward(model, x)[:, -1, : SMALL.vocabulary]) for x in (tokens, swapped)]
        np.testing.assert_allclose(last[0], last[1], atol=1e-5)


@pytest.mark.slow
def test_a_position_outside_of_the_context_is_nan() -> None:
    model, tokens = small(positions="learned", layers=1), some_tokens(rows=1, length=4)
    for last, is_nan in ((SMALL.context - 1, False), (SMALL.context, True), (-1, True)):
        found = model.hidden(tokens, positions=jnp.array([[0, 1, 2, last]]))
        assert np.isnan(found[0, 3]).all() == is_nan


@pytest.mark.nightly
def test_a_loop_computes_what_the_unrolled_layers_do() -> None:
    loop, unrolled, tokens = small(unroll=False), small(), some_tokens()
    np.testing.assert_allclose(
        forward(loop, tokens), forward(unrolled, tokens), rtol=1e-5, atol=1e-5
    )
    one, other = gradients(loop, tokens), gradients(unrolled, tokens)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_every_parameter_of_every_layer_is_used() -> None:
    found = gradients(small(positions="learned", tied=False), some_tokens(length=17))
    names = {"embedding", "positions", "head", "norm", "blocks/attention/norm", "blocks/mlp/norm"}
    names |= {f"blocks/{part}" for part in ("attention/qkv", "attention/out", "mlp/up", "mlp/down")}
    assert set(found) == names
    for name, gradient in found.items():
        parts = gradient if name.startswith("blocks/") else gradient[None]
        assert all(np.abs(part).max() > 0 for part in parts), name


@pytest.mark.parametrize("token", [-1, -100, 60, 64, 1000])
def test_a_token_outside_the_vocabulary_makes_nan(token: int) -> None:
    model = small(vocabulary=60, rows=64)
    tokens = jnp.array([[1, 59, token], [0, 59, 2]])
    found = np.isnan(np.asarray(forward(model, tokens)[:, -1])).any(-1)
    assert found.tolist() == [True, False]


@pytest.mark.slow
def test_rows_without_a_token_count_nothing() -> None:
    padded, tokens = small(), some_tokens(length=17)
    exact = small(rows=SMALL.vocabulary)
    state = nnx.to_pure_dict(nnx.state(padded, nnx.Param))
    state["embedding"] = state["embedding"][: SMALL.vocabulary]
    nnx.update(exact, state)
    logits = forward(padded, tokens[:, :-1])
    assert logits.shape[-1] == 64 and logits.dtype == jnp.float32
    assert (jax.nn.softmax(logits)[..., SMALL.vocabulary :] == 0).all()
    losses = [float(jax.jit(partial(loss, model))(tokens)) for model in (padded, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert (gradients(padded, tokens)["embedding"][SMALL.vocabulary :] == 0).all()


@pytest.mark.slow
def test_it_computes_in_the_dtype_of_its_parameters() -> None:
    model, tokens = small(unroll=False), some_tokens()
    wide = forward(model, tokens)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param))
    nnx.update(model, narrow)
    logits = forward(model, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, wide, atol=0.05)
    assert np.abs(logits - wide).max() > 1e-5
    loops = [
        e for e in jax.make_jaxpr(lambda t: model(t))(tokens).eqns if str(e.primitive) == "scan"
    ]
    assert [str(v.aval.dtype) for e in loops for v in e.outvars] == ["bfloat16"]


@pytest.mark.slow
def test_dropout_is_for_training_and_differs_in_each_step() -> None:
    model, tokens = small(dropout=0.5), some_tokens()
    np.testing.assert_array_equal(forward(model, tokens), forward(model, tokens))
    np.testing.assert_array_equal(forward(model, tokens), forward(small(), tokens))
    model.train()  # type: ignore[no-untyped-call]
    once, twice = np.asarray(forward(model, tokens)), np.asarray(forward(model, tokens))
    assert np.abs(once - twice).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "width 32 does not divide over 5 heads"),
        ({"heads": 32}, "32 heads is 1 a head: an odd number"),
        ({"rows": 49}, "49 rows of the embedding for 50 tokens"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"positions": "learnd"}, "positions is 'learnd'. Did you mean 'learned'"),
        ({"blocks": "gpt-2"}, "blocks is 'gpt-2'. Did you mean 'gpt2'"),
        ({"width": "32"}, "width is '32': it must be a whole number"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_a_row_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="17 tokens"):
        small()(some_tokens(length=17))


def test_logits_have_the_dtype_of_an_option_of_the_experiment() -> None:
    path = REPOSITORY / "experiments" / "shakespeare_gpt.py"
    experiment: Any = load_experiment(str(path), frozenset()).module
    config = experiment.Config(
        layers=1, width=8, heads=2, vocabulary_rows=48, logits_dtype="bfloat16"
    )
    shape = experiment.shape(config, vocabulary=40)
    model, state = nnx.split(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))

    def losses(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(model, state).token_losses(x, x).loss

    jaxpr = jax.make_jaxpr(losses)(state, np.zeros((3, 9), np.int32))
    assert ":bf16[3,9,48] = dot_general" in str(jaxpr)


# -- several documents in a row --------------------------------------------------------------------


def token_losses(model: Transformer, batch: dict[str, jax.Array]) -> jax.Array:
    """The weighted sum of the losses of the tokens of each row."""
    logits = model(batch["tokens"], batch.get("segments"), batch.get("positions"))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:])
    return (losses * batch["weights"][:, 1:]).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "positions", ["rotary", pytest.param("learned", marks=pytest.mark.nightly)]
)
def test_packed_documents_have_the_loss_and_the_gradients_of_single_ones(positions: str) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 12, 40)
    documents = [rng.integers(0, SMALL.vocabulary, n) for n in lengths]
    packed = Packed(documents, SMALL.context, window=16)
    assert len(packed) < 30  # several documents in a row, and some padding
    rows = packed.rows(np.arange(len(packed)))
    assert rows["weights"].sum() == (lengths - 1).sum()
    alone = np.zeros((40, SMALL.context), np.int32)
    for row, document in enumerate(documents):
        alone[row, : len(document)] = document
    single = {"tokens": alone, "weights": np.arange(SMALL.context) < lengths[:, None]}
    model = small(positions=positions)

    def mean(model: Transformer, batch: dict[str, Any]) -> jax.Array:
        return token_losses(model, batch).sum() / (lengths - 1).sum()

    graph, *states = nnx.split(model, nnx.Param, ...)
    params, rest = states

    @jax.jit
    @jax.value_and_grad
    def of(params: Any, batch: Any) -> jax.Array:
        return mean(nnx.merge(graph, params, rest), batch)

    found, expected = (of(params, jax.tree.map(jnp.asarray, batch)) for batch in (rows, single))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, gradient in named_leaves(nnx.to_pure_dict(found[1])).items():
        other = named_leaves(nnx.to_pure_dict(expected[1]))[name]
        assert np.abs(gradient - other).max() <= 1e-5 * np.abs(other).max(), name
    mixed = {k: v for k, v in rows.items() if k in ("tokens", "weights")}
    without = of(params, jax.tree.map(jnp.asarray, mixed))[0]
    assert abs(float(without - expected[0])) > 1e-4  # without segments the loss is another


@pytest.mark.slow
def test_segments_and_positions_of_one_document_change_no_bit() -> None:
    for positions in ("rotary", "learned"):
        model, tokens = small(positions=positions), some_tokens()
        whole = {
            "segments": jnp.ones_like(tokens),
            "positions": jnp.broadcast_to(jnp.arange(16), tokens.shape),
        }
        found = nnx.jit(lambda model, t, s, p: model(t, s, p))(model, tokens, *whole.values())
        np.testing.assert_array_equal(found, forward(model, tokens))


# -- on a mesh -------------------------------------------------------------------------------------


def objective(model: Transformer, tokens: jax.Array) -> dict[str, jax.Array]:
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return {"loss": losses.mean(-1)}


def fitted(strategy: str, mesh: MeshSpec | None = None, **changes: Any) -> tuple[Trainer, float]:
    """A trainer after three steps under a strategy, and its loss on the data then.

    All arrays but one, of 32 numbers, are large enough to be split.
    """
    tokens = np.asarray(some_tokens(rows=32, length=17))
    trainer = Trainer(
        model=partial(Transformer, dataclasses.replace(SMALL, unroll=False, **changes)),
        objective=objective,
        optimizer=optax.sgd(0.5, momentum=0.5),
        rules=TRANSFORMER_RULES,
        strategy=strategy,
        mesh=mesh or MeshSpec(),
        sharding=ShardingOptions(min_size=64),
    )
    trainer.fit(tokens, steps=3, global_batch_size=8)
    return trainer, trainer.evaluate(tokens)["loss"]


@functools.cache
def mirrored_loss() -> float:
    trainer, found = fitted("mirrored")
    assert not any(split_over(trainer).values())
    return found


def split_over(trainer: Trainer, tree: str = "params") -> dict[str, set[str]]:
    """By parameter, or what the optimizer keeps of it, the axes it is split over."""
    assert trainer.state is not None and trainer.mesh is not None
    sizes, found = trainer.mesh.shape, {}
    for name, x in named_leaves(getattr(trainer.state, tree)).items():
        axes = {a for e in x.sharding.spec for a in ((e,) if isinstance(e, str) else e or ())}
        found[name] = {axis for axis in axes if sizes[axis] > 1}
    return found


BY_RULE = {
    "embedding",
    "blocks/attention/qkv",
    "blocks/attention/out",
    "blocks/mlp/up",
    "blocks/mlp/down",
}
NORMS = {"blocks/attention/norm", "blocks/mlp/norm"}  # no rule is for them
SMALLEST = "norm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "axes", "axes_of_optimizer"),
    [
        ("zero+tensor_parallel", MeshSpec(data=4, tensor=2), "tensor", "data tensor"),
        (
            "hybrid+fully_sharded+tensor_parallel",
            MeshSpec(replica=2, fsdp=2, tensor=2),
            "fsdp tensor",
            "fsdp tensor",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) and x else None,
)
@pytest.mark.nightly
def test_it_learns_the_same_under_strategies_and_their_products(
    strategy: str, mesh: MeshSpec | None, axes: str, axes_of_optimizer: str
) -> None:
    """The others are those of test_shakespeare_strategies."""
    trainer, found = fitted(strategy, mesh)
    assert found == pytest.approx(mirrored_loss(), rel=1e-5)
    assert trainer.state is not None
    for tree, asked in (("params", axes), ("opt_state", axes_of_optimizer)):
        over = set(asked.split())
        expected = dict.fromkeys(BY_RULE, over) | dict.fromkeys(NORMS, over - {"tensor"})
        prefix = "0/trace/" if tree == "opt_state" else ""
        assert split_over(trainer, tree) == {
            prefix + name: split for name, split in (expected | {SMALLEST: set()}).items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [(), (8,), (8, 8)])
def test_the_rules_of_an_mlp_fit_its_hidden_widths_only(hidden: tuple[int, ...]) -> None:
    sizes = (6, *hidden, 3)  # neither 6 nor 3 divides over 4
    rules = mlp_rules(len(sizes) - 1)
    layers = {rule.pattern for rule in rules if rule.pattern.endswith("kernel$")}
    assert len(layers) == 2 * ((len(sizes) - 1) // 2)
    x = np.zeros((8, 6), np.float32)
    trainer = Trainer(
        model=partial(MLP, 6, hidden, 3),
        objective=lambda model, x: {"loss": (model(x) ** 2).mean(-1)},
        optimizer=optax.sgd(0.1),
        rules=rules,
        mesh=MeshSpec(data=2, tensor=4) if hidden else MeshSpec(),
        strategy="tensor_parallel" if hidden else "mirrored",
    )
    trainer.fit(x, steps=1, global_batch_size=8)
    kernels = {n: over for n, over in split_over(trainer).items() if n.endswith("kernel")}
    assert {n for n, over in kernels.items() if over} == {
        f"layers/{number}/kernel" for number in range(2 * ((len(sizes) - 1) // 2))
    }
