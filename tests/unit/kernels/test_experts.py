"""Experts: the numbers of a dense layer on any devices and under any skew; programs for TPUs."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BOUND, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from plan_helpers import needs_libtpu

from spmdtrain import MeshSpec, Rule, ShardingOptions, Trainer, UserError, experts
from spmdtrain.config.options import ExpertExchange, ExpertOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.kernels.experts import grouped_product
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.plan import topologies
from spmdtrain.plan.topologies import compiler_environment, devices_of
from spmdtrain.sharding.mesh import BATCH_AXES, abstract_devices, build_mesh
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.flops import count_flops
from spmdtrain.strategies import strategy
from spmdtrain.xla.collectives import collectives

PyTree = Any
ROWS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 8, 8, 8, 12, 8, 2
SPLIT = {
    "up": PartitionSpec("expert", None, "tensor"),
    "down": PartitionSpec("expert", "tensor", None),
}


def ffn(rows: jax.Array, weights: PyTree, dot: Any) -> jax.Array:
    return dot(jax.nn.silu(dot(rows, weights["up"])), weights["down"])


def arrays(skew: float, dtype: Any = "f") -> tuple[Any, ...]:
    """Tokens, router logits, weights and cotangent; each token chooses expert 1 if skewed."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return draw.normal(size=shape).astype(dtype)

    weights = {"up": normal(EXPERTS, WIDTH, HIDDEN), "down": normal(EXPERTS, HIDDEN, WIDTH)}
    logits = normal(ROWS, TOKENS, EXPERTS) + skew * np.eye(EXPERTS, dtype="f")[1]
    cotangent = normal(ROWS, TOKENS, WIDTH).astype("f")
    return normal(ROWS, TOKENS, WIDTH), logits.astype("f"), weights, cotangent


def total_of_experts(x: Any, logits: Any, weights: Any, by: Any) -> Any:
    found = experts(x, logits, weights, ffn, top_k=TOP_K)
    values = (found.balance + 0.1 * found.z).sum()
    return (found.output * by).sum() + values, found


def total_of_dense(x: Any, logits: Any, weights: Any, by: Any) -> Any:
    """The same by the definitions: every expert for every token, weighted by 0 if not chosen."""
    probabilities = jax.nn.softmax(logits)
    values, chosen = jax.lax.top_k(probabilities, TOP_K)
    is_chosen = jax.nn.one_hot(chosen, EXPERTS)
    scale = (is_chosen * (values / values.sum(-1, keepdims=True))[..., None]).sum(2)
    hidden = jax.nn.silu(jnp.einsum("btw,ewh->bteh", x, weights["up"]))
    output = jnp.einsum("bteh,ehw,bte->btw", hidden, weights["down"], scale)
    load = is_chosen.sum((1, 2))
    share = load / (TOKENS * TOP_K)
    balance = EXPERTS * (share * probabilities.mean(1)).sum(-1)
    z = (jax.nn.logsumexp(logits, axis=-1) ** 2).mean(-1)
    return (output * by).sum() + (balance + 0.1 * z).sum(), (output, balance, z, load)


def placement(sizes: dict[str, int], **options: Any) -> Placement:
    of, count = strategy("mirrored"), int(np.prod([*sizes.values()]))
    spec = MeshSpec(**{"data": 1} | sizes, devices=tuple(range(count)))
    return Placement(of, build_mesh(spec, of), expert=ExpertOptions(**options))


def check_equals_dense(
    sizes: dict[str, int],
    skew: float,
    capacity_factor: float,
    dtype: Any = "f",
    tolerance: float = 1e-5,
) -> float:
    """Compares output, values and gradients; returns `overflow`."""
    given = arrays(skew, dtype)
    of_dense = jax.jit(jax.value_and_grad(total_of_dense, (0, 1, 2), has_aux=True))
    (_, wanted), gradients = of_dense(*given)
    with use_placement(placement(sizes, capacity_factor=capacity_factor)):
        of_experts = jax.jit(jax.value_and_grad(total_of_experts, (0, 1, 2), has_aux=True))
        (_, found), own = of_experts(*given)
    values = found.output, found.balance, found.z, found.load
    pairs = zip(jax.tree.leaves((values, own)), jax.tree.leaves((wanted, gradients)), strict=True)
    for one, other in pairs:
        one, other = np.asarray(one, "f"), np.asarray(other, "f")
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())
    return float(found.overflow)


@pytest.mark.nightly
@pytest.mark.slow
def test_split_experts_are_those_of_a_dense_layer_under_skew() -> None:
    assert check_equals_dense({"expert": 2}, skew=8, capacity_factor=1.25) == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_experts_in_bfloat16_compile_on_cpus_that_split_their_dims() -> None:
    """XLA's CPU compiler aborts at 16-bit sums over a part of the axes: the worker would crash."""
    sizes = {"data": 2, "expert": 2, "tensor": 2}
    assert check_equals_dense(sizes, 8, 1.25, jnp.bfloat16, tolerance=0.02) == 1


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "skew", "capacity_factor", "overflow"),
    [
        ({"fsdp": 2, "expert": 2, "tensor": 2}, 8, 1, 1),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in (
                ({"expert": 8}, 0, 4, 0),
                ({"data": 1}, 8, 2, 0),
                ({"expert": 2}, 0, 2, 0),
                ({"expert": 8}, 8, 2, 1),
                ({"data": 2, "expert": 2, "context": 2}, 0, 2, 0),
                ({"data": 8}, 8, 2, 0),
            )
        ),
    ],
)
def test_experts_on_other_meshes(
    sizes: dict[str, int], skew: float, capacity_factor: float, overflow: float
) -> None:
    assert check_equals_dense(sizes, skew, capacity_factor) == overflow


def test_the_reference_for_analyses_is_the_same_layer() -> None:
    with reference_kernels():
        found = jax.jit(total_of_experts)(*arrays(0))
    wanted = jax.jit(total_of_experts)(*arrays(0))
    np.testing.assert_allclose(found[1].output, wanted[1].output, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_without_normalize_the_probabilities_of_all_experts_weight_the_output() -> None:
    x, logits, weights, _ = arrays(0)
    one, other = (
        experts(x, logits, weights, ffn, top_k=TOP_K, normalize=normalize).output
        for normalize in (False, True)
    )
    total = np.sort(jax.nn.softmax(logits))[..., -TOP_K:].sum(-1, keepdims=True)
    np.testing.assert_allclose(one, other * total, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_batch_that_does_not_divide_over_the_axis_has_the_same_output() -> None:
    x, logits, weights, _ = arrays(0)

    def output(x: Any, logits: Any, weights: Any) -> Any:
        return experts(x, logits, weights, ffn, top_k=TOP_K).output

    wanted = jax.jit(output)(x[:3], logits[:3], weights)
    with use_placement(placement({"expert": 2})):
        found = jax.jit(output)(x[:3], logits[:3], weights)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_a_token_that_is_nan_changes_no_other_token_after_an_overflow() -> None:
    """A device of 2 experts fills its rows with the tokens, if each chooses both of them."""
    x, logits, weights, _ = arrays(0)
    x[-1, -1] = np.nan
    logits = logits + 50 * np.isin(np.arange(EXPERTS), (0, 1))

    def layer(x: Any, logits: Any, weights: Any) -> Any:
        return experts(x, logits, weights, ffn, top_k=3)

    with use_placement(placement({"expert": 4}, capacity_factor=1)):
        found = jax.jit(layer)(x, logits.astype("f"), weights)
    assert found.overflow == 1
    assert np.argwhere(np.isnan(found.output).any(-1)).tolist() == [[ROWS - 1, TOKENS - 1]]


def by_largest_row(rows: jax.Array, weights: PyTree, dot: Any) -> jax.Array:
    return ffn(rows / rows.max(), weights, dot)


def by_mean_of_experts(rows: jax.Array, weights: PyTree, dot: Any) -> jax.Array:
    return ffn(rows, weights, dot) + weights["up"].mean()


def with_more(rows: jax.Array, weights: PyTree, dot: Any) -> Any:
    return ffn(rows, weights, dot), rows


def of_other_width(rows: jax.Array, weights: PyTree, dot: Any) -> jax.Array:
    return dot(rows, weights["up"])


@pytest.mark.parametrize(
    ("sizes", "wrong", "message"),
    [
        ({"data": 2}, by_largest_row, "reduce_max at"),
        ({"expert": 2}, by_mean_of_experts, "reduce_sum at"),
        ({"expert": 2}, with_more, "returns 2 arrays"),
        ({"expert": 2}, of_other_width, r"returns \(4, 12\) for rows of \(4, 8\)"),
    ],
)
def test_a_function_that_does_not_compute_each_row_alone_is_refused(
    sizes: dict[str, int], wrong: Any, message: str
) -> None:
    x, logits, weights, _ = arrays(0)
    with use_placement(placement(sizes)), pytest.raises(UserError, match=f"experts: .*{message}"):
        jax.eval_shape(partial(experts, ffn=wrong, top_k=TOP_K), x, logits, weights)


def test_a_parameter_that_is_no_argument_is_refused_if_experts_are_split() -> None:
    x, logits, weights, _ = arrays(0)

    def total(scale: jax.Array) -> jax.Array:
        def scaled(rows: jax.Array, weights: PyTree, dot: Any) -> jax.Array:
            return scale * ffn(rows, weights, dot)

        return experts(x, logits, weights, scaled, top_k=TOP_K).output.sum()

    with use_placement(placement({"data": 2})):
        assert jax.eval_shape(jax.grad(total), 1.0).shape == ()
    with (
        use_placement(placement({"expert": 2})),
        pytest.raises(UserError, match="ffn reads an array that is not an argument"),
    ):
        jax.eval_shape(jax.grad(total), 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": lambda x: x.astype("bfloat16")}, "router_logits are bfloat16: .* float32"),
        ({"logits": lambda x: x[..., :6]}, r"shape \(8, 12, 8\) .* 6 experts: .* must be 6"),
        ({"top_k": 9}, "top_k is 9: it must be from 1 to 8"),
        ({"sizes": {"expert": 3}}, "8 experts do not divide over mesh.expert=3"),
        ({"exchange": "ragged_all_to_all"}, "XLA does not support on CPU: use all_to_all"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: Any, message: str) -> None:
    x, logits, weights, _ = arrays(0)
    logits = change.get("logits", lambda x: x)(jnp.asarray(logits))
    where = placement(
        change.get("sizes", {"expert": 2}), exchange=change.get("exchange", "all_to_all")
    )
    with use_placement(where), pytest.raises(UserError, match=message):
        experts(x, logits, weights, ffn, top_k=change.get("top_k", TOP_K))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert": {"capacity_factor": 0.5}}, "capacity_factor is 0.5: it must be at least 1"),
        ({"expert": {"capacity_factor": 1.5}}, "capacity_factor is 1.5, and mesh.expert is not"),
        ({"strategy": "parameter_server", "mesh": {"expert": 2}}, "under parameter_server"),
        ({"jit": False, "mesh": {"expert": 2}}, "mesh.expert is 2 and jit is False"),
    ],
)
def test_options_that_do_not_fit_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunConfig(
            strategy=fields.get("strategy", "mirrored"),
            mesh=MeshSpec(**fields.get("mesh", {})),
            expert=ExpertOptions(**fields.get("expert", {})),
            jit=fields.get("jit", True),
        )


# -- a model ---------------------------------------------------------------------------------------


class Mixture(nnx.Module):
    """One layer of experts after a dense one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))

        self.first = normal(WIDTH, WIDTH)
        self.router = normal(WIDTH, EXPERTS)
        self.experts = nnx.Dict(up=normal(EXPERTS, WIDTH, 64), down=normal(EXPERTS, 64, WIDTH))

    def __call__(self, x: jax.Array) -> Any:
        x = x @ self.first[...]
        weights = nnx.to_pure_dict(nnx.state(self.experts))
        found = experts(x, x @ self.router[...], weights, ffn, top_k=TOP_K)
        return x + found.output, found


DATA = {
    name: np.random.default_rng(seed).normal(size=(64, 4, WIDTH)).astype("f")
    for seed, name in enumerate("xy")
}
RULES = [Rule(f"experts/{name}$", spec) for name, spec in SPLIT.items()]


def trainer(sizes: dict[str, int], found: list[float] | None = None, **options: Any) -> Trainer:
    def objective(model: Any, batch: Any) -> Any:
        output, of_experts = model(batch["x"])
        loss = jnp.square(output - batch["y"]).mean((1, 2))
        return {"loss": loss + 0.1 * of_experts.balance, "balance": of_experts.balance}

    def record(event: Any) -> None:
        if found is not None:
            found.append(event.metrics["loss"])

    count = int(np.prod([*sizes.values()]))
    return Trainer(
        model=Mixture,
        objective=objective,
        optimizer=optax.adam(1e-2),
        mesh=MeshSpec(**sizes, devices=tuple(range(count))),
        rules=options.pop("rules", RULES),
        sharding=ShardingOptions(min_size=1),
        log_every=1,
        callbacks={"log": record},
        terminal=Terminal(quiet=True),
        **options,
    )


def losses(sizes: dict[str, int], steps: int = 20, **options: Any) -> list[float]:
    found: list[float] = []
    trainer(sizes, found, **options).fit(DATA, steps=steps, global_batch_size=16)
    return found


# Of the first, the experts' other dims are split over fsdp and tensor.
RUNS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"fsdp": 2, "expert": 2, "tensor": 2}, {"strategy": "fully_sharded", "microbatches": 2}),
    ({"data": 2, "expert": 4}, {"strategy": "zero"}),
    ({"expert": 8}, {}),
)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.nightly  # a drill compares the losses of experts in several processes
def test_a_run_on_any_devices_for_experts_has_the_losses_of_one_device(tmp_path: Path) -> None:
    found: list[float] = []
    for number, (sizes, options) in enumerate(RUNS):  # each reads the checkpoint of another mesh
        steps = 20 if number == len(RUNS) - 1 else 7 * (number + 1)
        found += losses(sizes, steps, workdir=str(tmp_path), **options)
    assert len(found) == 20 and found[-1] < 0.9 * found[0]
    np.testing.assert_allclose(found, losses({"data": 1}), rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("sizes", "options"), [*RUNS, ({"data": 8}, {})])
def test_a_model_has_the_losses_of_one_device(sizes: dict[str, int], options: Any) -> None:
    np.testing.assert_allclose(losses(sizes, **options), losses({"data": 1}), rtol=1e-5)


@pytest.mark.nightly
def test_without_the_axis_exact_has_the_bits_of_one_device_on_two() -> None:
    states = []
    for count in (1, 2):
        of = trainer({"data": count}, exact=4)
        of.fit(DATA, steps=2, global_batch_size=16)
        states.append(jax.tree.leaves(of.state))
    for one, other in zip(*states, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_an_axis_that_no_rule_names_is_refused() -> None:
    with pytest.raises(UserError, match=r"expert=4 is not used: .* all parameters.* mesh.data"):
        trainer({"data": 2, "expert": 4}, rules=()).compile_step({"x": DATA["x"], "y": DATA["y"]})


# -- for TPUs that are not there -------------------------------------------------------------------


TOPOLOGY = topologies.parse("v5e:2x4")


def print_collectives_for_tpus() -> None:
    """Prints kind, bytes and executions of the collectives over "expert", for each exchange."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for exchange in get_args(ExpertExchange):
        with abstract_devices(devices_of(TOPOLOGY)):
            spec, of = MeshSpec(data=2, expert=4), strategy("mirrored")
            mesh = build_mesh(spec, of)
            with use_placement(Placement(of, mesh, expert=ExpertOptions(exchange=exchange))):
                rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
                by_expert = NamedSharding(mesh, PartitionSpec("expert"))
                step = jax.jit(
                    jax.value_and_grad(total_of_experts, (0, 1, 2), has_aux=True),
                    in_shardings=(rows, rows, by_expert, rows),
                )
                shapes = (
                    jax.ShapeDtypeStruct((64, 64, 128), jnp.float32),
                    jax.ShapeDtypeStruct((64, 64, EXPERTS), jnp.float32),
                    {
                        "up": jax.ShapeDtypeStruct((EXPERTS, 128, 256), jnp.float32),
                        "down": jax.ShapeDtypeStruct((EXPERTS, 256, 128), jnp.float32),
                    },
                    jax.ShapeDtypeStruct((64, 64, 128), jnp.float32),
                )
                text = step.trace(*shapes).lower().compile().as_text()
        assert text is not None
        of_axis = [x for x in collectives(text, mesh) if "expert" in x.axes]
        found[exchange] = [(x.kind, x.bytes, x.times) for x in of_axis]
    print(json.dumps(found))


@needs_libtpu
@pytest.mark.nightly
def test_on_tpus_only_the_rare_branch_gathers() -> None:
    # In a process of its own, because programs for absent devices cannot be read from the cache.
    code = f"import {__name__}; {__name__}.print_collectives_for_tpus()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(8) | compiler_environment(TOPOLOGY) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    for exchange in get_args(ExpertExchange):
        usual = [(kind, size) for kind, size, times in found[exchange] if times]
        rare = {kind for kind, _, times in found[exchange] if not times}
        large = {kind for kind, size in usual if size > 10_000}
        assert large == {exchange.replace("_", "-")}, usual
        assert "all-gather" in rare


# -- products of rows with the matrices of their groups, by blocks of rows -------------------------

GROUPS, GROUPED_ROWS, ROW_WIDTH, OUT = 4, 560, 5, 3  # blocks of 64 rows


@partial(jax.jit, static_argnums=3)
def products(rows: Any, kernel: Any, counts: Any, platform: str) -> Any:
    """Returns the products, and gradients of a sum over the rows that belong to a group."""
    used = (jnp.arange(len(rows)) < counts.sum())[:, None]

    def total(rows: Any, kernel: Any) -> Any:
        rows = jnp.where(used, rows, 0)  # the gradients of others are not specified either
        found = jnp.where(used, grouped_product(rows, kernel, counts), 0)
        return (found * jnp.cos(jnp.arange(found.size).reshape(found.shape))).sum(), found

    (_, found), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(rows, kernel)
    return found, *gradients


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 300), min_size=GROUPS, max_size=GROUPS).filter(
        lambda counts: sum(counts) <= GROUPED_ROWS
    ),
    spoiled=st.integers(0, GROUPS - 1),
)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "another"])
def test_each_row_has_the_product_with_its_own_matrix(
    platform: str, counts: list[int], spoiled: int
) -> None:
    draw = np.random.default_rng(sum(counts))
    rows = draw.normal(size=(GROUPED_ROWS, ROW_WIDTH)).astype("f")
    kernel = draw.normal(size=(GROUPS, ROW_WIDTH, OUT)).astype("f")
    if platform in ("cpu", "gpu"):  # not by `ragged_dot`, with which a CPU computes all products
        kernel[spoiled, 0, 0] = np.nan  # stays in the rows of its group
    with pytest.MonkeyPatch.context() as patch:
        device = SimpleNamespace(platform=platform)
        patch.setattr("spmdtrain.kernels.experts.current_device", lambda: device)
        of_three = 3 * kernel[0].nbytes
        patch.setattr("spmdtrain.kernels.experts.GATHERED_BYTES", of_three)
        outputs = products(rows, kernel, np.array(counts, "i"), platform)
    found, of_rows, of_kernel = map(np.asarray, outputs)
    by = np.cos(np.arange(GROUPED_ROWS * OUT).reshape(GROUPED_ROWS, OUT))
    start = 0
    for group, count in enumerate(counts):
        part = slice(start, start := start + count)
        for one, other in (
            (found[part], rows[part] @ kernel[group]),
            (of_rows[part], by[part] @ kernel[group].T),
            (of_kernel[group], rows[part].T @ by[part]),
        ):
            np.testing.assert_allclose(one, other, atol=1e-4)
    assert not found[start:].any() and not of_rows[start:].any()


def test_on_cpu_it_multiplies_few_more_rows_than_there_are() -> None:
    shapes = [(2048, 64), (8, 64, 32), (8,)]
    arrays = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, ("f", "f", "i"), strict=True)]
    program = jax.jit(grouped_product).lower(*arrays).compile()
    costs: Any = program.cost_analysis()
    assert costs["flops"] < 1.7 * 2 * 2048 * 64 * 32  # `ragged_dot` needs 8 times as many


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_on_accelerators_the_gradients_are_computed_from_few_more_rows(
    platform: str, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr("spmdtrain.kernels.experts.current_device", lambda: device)
    over = SimpleNamespace(parts={"tensor": tensor}.get)
    monkeypatch.setattr("spmdtrain.kernels.experts.current_mesh", lambda: over)
    rows, kernel, counts = jnp.ones((2048, 64)), jnp.ones((8, 64, 32)), jnp.full(8, 256)
    gradient = jax.make_jaxpr(jax.grad(lambda x: grouped_product(rows, x, counts).sum()))(kernel)
    in_blocks = (2048 // 128 + 8 - 1) * 128
    # JAX leaves out the gradient of the rows, which nothing uses, except by a `custom_vjp`.
    if platform == "gpu":
        rows_computed = 3 * in_blocks
    else:
        rows_computed = 2 * 2048 + in_blocks if tensor == 1 else 2 * 2048
    assert count_flops(gradient).total == 2 * 64 * 32 * rows_computed
