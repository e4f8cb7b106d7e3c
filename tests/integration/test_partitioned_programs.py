"""Small programs on several devices against one device, for the installed version of JAX.

XLA's partitioner computes some of them wrongly, also with plain `jax.jit`: `WRONG` names these. A
test fails if another one is wrong, and if one of them is repaired: then remove its row, and what
`spmdtrain/xla/partitioner_faults.py` refuses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain import FunctionModel, Loop, MeshSpec, Trainer, UserError, constrain_sharding
from spmdtrain.document.terminal import Terminal
from spmdtrain.xla.partitioner_faults import check_partitioning

ROWS, WIDTH = 32, 3
P = PartitionSpec
_MESH: list[Mesh] = []
"""The mesh of the program that is traced, for `gathered`."""
Values = Callable[[jax.Array], jax.Array]
PERMUTATION = np.random.default_rng(1).permutation(ROWS)
SOME = np.array([1, 5, 30, 5])
GROUPS = np.arange(ROWS) // 6


def windows(operation: Any, start: float, size: int, stride: int, padding: str = "VALID") -> Values:
    return lambda x: lax.reduce_window(x, start, operation, (size, 1), (stride, 1), padding)


def convolution(kernel: Values, stride: int = 1, **options: Any) -> Values:
    """Along the rows: each column is an example."""

    def convolved(x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x.T[:, None, :], kernel(x)[None, None, :], (stride,), ((1, 1),), **options
        )

    return convolved


def constant_kernel(_: jax.Array) -> jax.Array:
    return jnp.array([1.0, 2.0, -1.0])


def gram(x: jax.Array) -> jax.Array:
    return x @ x.T + jnp.eye(len(x))


def scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, row: (carry * 0.9 + row, carry * row), jnp.zeros(WIDTH), x)[1]


PROGRAMS: dict[str, Values] = {
    # windows
    "max of 2, stride 1": windows(lax.max, -jnp.inf, 2, 1),
    "min of 2, stride 1": windows(lax.min, jnp.inf, 2, 1),
    "max of 3, same": windows(lax.max, -jnp.inf, 3, 1, "SAME"),
    "max of 5, stride 2": windows(lax.max, -jnp.inf, 5, 2, "SAME"),
    "max of 2, stride 2": windows(lax.max, -jnp.inf, 2, 2),
    "max of 3, stride 3": windows(lax.max, -jnp.inf, 3, 3, "SAME"),
    "max of 2, stride 3": windows(lax.max, -jnp.inf, 2, 3),
    "sum of 2, stride 1": windows(lax.add, 0.0, 2, 1),
    "sum of 5, stride 2": windows(lax.add, 0.0, 5, 2, "SAME"),
    "max of columns": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"),
    "max in vmap": lambda x: jax.vmap(
        lambda r: lax.reduce_window(r, -jnp.inf, lax.max, (2,), (1,), "VALID")
    )(x.T),
    "max in remat": jax.checkpoint(windows(lax.max, -jnp.inf, 2, 1)),
    "max in a loop": lambda x: lax.fori_loop(
        0, 2, lambda _, y: windows(lax.max, -jnp.inf, 3, 1, "SAME")(y), x
    ),
    "max, gathered": lambda x: windows(lax.max, -jnp.inf, 2, 1)(gathered(x)),
    # convolutions along the rows
    "convolution": convolution(constant_kernel),
    "convolution, stride 2": convolution(constant_kernel, 2),
    "convolution, dilated": convolution(constant_kernel, rhs_dilation=(3,)),
    "convolution, transposed": convolution(constant_kernel, lhs_dilation=(2,)),
    "convolution with a kernel of rows": convolution(lambda x: x[:5, 0]),
    "convolution of rows with rows": lambda x: jnp.convolve(x[:, 0], x[:, 1]),
    "convolution with a trained kernel": convolution(lambda x: x.sum(0)),
    # cumulative
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "cumsum, reversed": lambda x: lax.cumsum(x, 0, reverse=True),
    "cumprod": lambda x: jnp.cumprod(x, 0),
    "cummax": lambda x: lax.cummax(x, 0),
    "cummin, reversed": lambda x: lax.cummin(x, 0, reverse=True),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 0),
    "associative scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "associative scan of maxima": lambda x: lax.associative_scan(jnp.maximum, x, reverse=True),
    "scan": scanned,
    "map": lambda x: lax.map(lambda row: row**2, x, batch_size=5),
    # order
    "sort": lambda x: jnp.sort(x, 0),
    "argsort": lambda x: x[jnp.argsort(x[:, 0])],
    "top_k": lambda x: lax.top_k(x.T, 5)[0],
    "median": lambda x: jnp.median(x, 0),
    "max with ties": lambda x: jnp.max(lax.stop_gradient(jnp.round(2 * x) - x) + x, 0),
    "min": lambda x: jnp.min(x, 0),
    "argmax": lambda x: x[jnp.argmax(x[:, 0])],
    "one-hot of argmax": lambda x: jax.nn.one_hot(jnp.argmax(x, 0), ROWS) @ x,
    "prod": lambda x: jnp.prod(x, 0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
    "variance": lambda x: jnp.var(x, 0),
    # gather and scatter
    "permutation": lambda x: x[PERMUTATION] * x,
    "some rows": lambda x: x[SOME],
    "take_along_axis": lambda x: jnp.take_along_axis(x, PERMUTATION[:, None], 0),
    "segment_sum": lambda x: jax.ops.segment_sum(x, GROUPS, 6),
    "segment_max": lambda x: jax.ops.segment_max(x, GROUPS, 6),
    "at.set": lambda x: x.at[SOME[:3]].set(x[:3]),
    "at.add": lambda x: x.at[SOME].add(x[:4]),
    "at.max": lambda x: x.at[SOME].max(x[:4]),
    "one-hot product": lambda x: jax.nn.one_hot(GROUPS, 6).T @ x,
    "vmap of slices": lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (4, WIDTH)))(
        jnp.arange(0, 20, 3)
    ),
    # moves
    "roll": lambda x: jnp.roll(x, 11, 0) * x,
    "reverse": lambda x: x[::-1] * x,
    "concatenate": lambda x: jnp.concatenate([x[5:], x**2, x[:5]]),
    "pad": lambda x: lax.pad(x, 0.0, ((1, -2, 1), (0, 0, 0))),
    "pad, wrapped": lambda x: jnp.pad(x, ((3, 2), (0, 0)), mode="wrap"),
    "pad, reflected": lambda x: jnp.pad(x, ((3, 2), (0, 0)), mode="reflect"),
    "neighbors": lambda x: x[1:] - x[:-1],
    "strided slice": lambda x: x[1::3],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.argmax(x[:, 0]) % 20, 0), (7, WIDTH)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(
        x, x[:7] * 2, (jnp.argmax(x[:, 0]) % 20, 0)
    ),
    "pairs of rows": lambda x: x.reshape(ROWS // 2, 2, WIDTH).max(1),
    "other dims": lambda x: x.reshape(WIDTH, ROWS).max(1),
    "transposed dims": lambda x: x.T.reshape(ROWS, WIDTH) * x,
    "repeat": lambda x: jnp.repeat(x, 3, 0),
    "tile": lambda x: jnp.tile(x, (3, 1)),
    # products and factorizations
    "gram": gram,
    "covariance": lambda x: x.T @ x,
    "einsum": lambda x: jnp.einsum("bi,ci,bj->cj", x, x, x),
    "hardest negative": lambda x: jnp.max(jnp.where(jnp.eye(ROWS) > 0, -jnp.inf, x @ x.T), 1),
    "cholesky": lambda x: jnp.linalg.cholesky(gram(x)),
    "solve": lambda x: jnp.linalg.solve(gram(x), x),
    "inverse": lambda x: jnp.linalg.inv(gram(x)),
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)) + 0.1,
}
OVERLAPPING: tuple[str, ...] = (
    "max of 2, stride 1",
    "min of 2, stride 1",
    "max of 3, same",
    "max of 5, stride 2",
)
OVERLAPPING = (*OVERLAPPING, "max in vmap", "max in remat", "max in a loop")
OF_ROWS: tuple[str, ...] = ("convolution with a kernel of rows", "convolution of rows with rows")
OF_ROWS = (*OF_ROWS, "convolution with a trained kernel")

RECURRENT: tuple[str, ...] = ("cumprod", "cummax", "cummin, reversed", "cumlogsumexp")
RECURRENT = (*RECURRENT, "associative scan", "associative scan of maxima")
"""They compile for long, and have the splits of "cumsum"."""

Shape = dict[str, int]
MESHES: dict[str, Shape] = {
    "4": {"data": 4},
    "2 x 4, rows over the first": {"data": 2, "tensor": 4},
}
AT_NIGHT: dict[str, Shape] = {
    "2": {"data": 2},
    "8": {"data": 8},
    "2 x 2, rows over both": {"data": 2, "fsdp": 2},
}
WRONG = {(program, mesh) for program in OVERLAPPING for mesh in (*MESHES, *AT_NIGHT)} | {
    (program, "2 x 4, rows over the first") for program in OF_ROWS
}
"""What XLA computes wrongly, in JAX 0.10.2 and 0.12.0."""


def gathered(x: jax.Array) -> jax.Array:
    if not _MESH:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(_MESH[0], P()))


def objective(values: Values) -> Callable[..., jax.Array]:
    def loss(kernel: jax.Array, rows: jax.Array) -> jax.Array:
        found = values(jnp.tanh(rows @ kernel))
        positions = jnp.arange(1, found.size + 1).reshape(found.shape) / found.size
        return (found * positions + found**2).sum()

    return loss


def refusal(program: Any, args: Any, mesh: Mesh) -> str:
    try:
        jaxpr = program.trace(*args).jaxpr.jaxpr
        check_partitioning(jaxpr, args, mesh.shape, ("data", "fsdp"))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        *(  # every second one is left to the night: most differ in a size or a stride
            pytest.param(name, MESHES, marks=[pytest.mark.nightly] * (number % 2), id=name)
            for number, name in enumerate(PROGRAMS)
            if name not in RECURRENT
        ),
        *(
            pytest.param(name, AT_NIGHT, marks=pytest.mark.nightly, id=f"{name}, at night")
            for name in PROGRAMS
            if name not in RECURRENT
        ),
        *(
            pytest.param(name, MESHES | AT_NIGHT, marks=pytest.mark.nightly, id=name)
            for name in RECURRENT
        ),
    ],
)
def test_a_program_on_several_devices_computes_what_it_does_on_one(
    name: str, meshes: dict[str, Shape]
) -> None:
    generator = np.random.default_rng(0)
    kernel = generator.normal(size=(4, WIDTH)).astype(np.float32)
    rows = generator.normal(size=(ROWS, 4)).astype(np.float32)
    function = jax.value_and_grad(objective(PROGRAMS[name]), (0, 1))
    _MESH.clear()
    expected = jax.jit(function)(kernel, rows)
    for mesh_name, shape in meshes.items():
        sizes = [*shape.values()]
        devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
        mesh = Mesh(devices, tuple(shape))
        _MESH[:] = [mesh]
        split = P(tuple(axis for axis in shape if axis != "tensor"))
        places = [NamedSharding(mesh, P()), NamedSharding(mesh, split)]
        placed = [*map(jax.device_put, (kernel, rows), places)]
        program = jax.jit(lambda *args: function(*args))  # traced again for each mesh
        found = program(*placed)
        errors = [
            float(np.abs(a - b).max() / np.abs(a).max())
            for a, b in zip(*map(jax.tree.leaves, jax.device_get((expected, found))), strict=True)
        ]
        refused = refusal(program, placed, mesh)
        if (name, mesh_name) in WRONG:
            assert max(errors) > 1e-3, f"{mesh_name}: JAX {jax.__version__} has repaired it"
            assert "is computed wrongly by XLA's partitioner" in refused, mesh_name
        else:
            assert max(errors) < 2e-4, f"{mesh_name}: wrong in JAX {jax.__version__}: {errors}"
            assert not refused, mesh_name


def plain(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    return (b.T @ a.T).T


def after_gather(a: jax.Array, b: jax.Array) -> jax.Array:
    return gathered(a @ b)


BATCH = ("data", "fsdp")
PRODUCTS: list[tuple[Any, Any, Any, Any, bool]] = [
    (plain, P(BATCH, "tensor"), P("tensor", "fsdp"), P(BATCH, "tensor"), True),
    (plain, P("data", "tensor"), P("tensor", "fsdp"), P("tensor", BATCH), True),
    (plain, P(None, "tensor"), P("tensor", None), P(BATCH[::-1], "tensor"), True),
    (jax.jit(plain), P(BATCH, "tensor"), P("tensor", "fsdp"), P(BATCH, "tensor"), True),
    (transposed, P(BATCH, "tensor"), P("tensor", "fsdp"), P(BATCH, "tensor"), True),
    (lambda a, b: a @ b + 1, P(BATCH, "tensor"), P("tensor", "fsdp"), P(BATCH, "tensor"), True),
    # its neighbors, with the usual splits of models and the remedy
    (after_gather, P(BATCH, "tensor"), P("tensor", "fsdp"), P(BATCH, "tensor"), False),
    (plain, P(BATCH, "tensor"), P("tensor", None), P(BATCH, "tensor"), False),
    (plain, P(BATCH, "tensor"), P("tensor", "data"), P(BATCH, "tensor"), False),
    (plain, P(BATCH, "tensor"), P("tensor", "fsdp"), P(BATCH, None), False),
    (plain, P(BATCH, None), P("fsdp", "tensor"), P(BATCH, "tensor"), False),
    (plain, P(BATCH, "tensor"), P("fsdp", "tensor"), P(BATCH, "tensor"), False),
]


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_a_product_with_swapped_splits_is_refused_where_it_is_wrong(number: int) -> None:
    function, *specs, is_wrong = PRODUCTS[number]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    _MESH[:] = [mesh]
    *places, result = [NamedSharding(mesh, spec) for spec in specs]
    generator = np.random.default_rng(0)
    given = [generator.normal(size=(8, 8)).astype(np.float32) for _ in range(2)]
    program = jax.jit(lambda a, b: lax.with_sharding_constraint(function(a, b), result))
    placed = [*map(jax.device_put, given, places)]
    expected = function(*map(jnp.asarray, given))
    off = float(np.abs(np.asarray(program(*placed)) - expected).max())
    assert (off > 1e-2) == is_wrong, f"JAX {jax.__version__} differs: {off}"
    assert ("contracted dim is split over tensor" in refusal(program, placed, mesh)) == is_wrong


# -- the trainer and the loop refuse them ----------------------------------------------------------

PAIRS = windows(lax.max, -jnp.inf, 2, 1)
X = np.random.default_rng(3).normal(size=(16, 4)).astype(np.float32)
Y = np.random.default_rng(4).normal(size=16).astype(np.float32)


def neighbors(model: Any, batch: dict[str, jax.Array], *, gather: bool) -> dict[str, jax.Array]:
    values = (model(batch["x"]) - batch["y"])[:, None] ** 2
    if gather:
        values = constrain_sharding(values, None, None)
    largest = PAIRS(values)
    if gather:
        largest = constrain_sharding(largest, None, None)
    return {"loss": jnp.concatenate([largest, largest[:1]])[:, 0]}


def trained(devices: int, *, gather: bool = False, **options: Any) -> np.ndarray:
    trainer = Trainer(
        model=FunctionModel(lambda _: {"w": jnp.ones(4)}, lambda params, x: x @ params["w"]),
        objective=lambda model, batch: neighbors(model, batch, gather=gather),
        optimizer=optax.sgd(0.1),
        strategy="mirrored",
        mesh=MeshSpec(devices=tuple(range(devices))),
        global_batch_size=16,
        terminal=Terminal(quiet=True),
        **options,
    )
    trainer.fit({"x": X, "y": Y}, steps=3)
    assert trainer.state is not None
    return np.asarray(trainer.state.params["w"])


def test_the_trainer_refuses_the_gradient_and_the_remedy_in_its_message_is_right() -> None:
    with pytest.raises(UserError, match=r"overlap along dim 0 .* split over data.*constrain_shar"):
        trained(4)
    for options in ({"steps_per_dispatch": 3}, {"data_on_device": True}):
        with pytest.raises(UserError, match="overlap along dim 0"):
            trained(4, **options)
    np.testing.assert_allclose(trained(4, gather=True), trained(1), rtol=1e-5)


def test_a_loop_refuses_it_in_a_step_and_in_its_other_functions() -> None:
    quiet = Terminal(quiet=True)
    with Loop(strategy="mirrored", steps=1, global_batch_size=16, terminal=quiet) as loop:
        state = loop.start(lambda _: {"params": jnp.ones(4)}, train={"x": X, "y": Y})

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return PAIRS((x @ w)[:, None]).sum()

        def function(state: Any, batch: Any, _: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(state.params, batch["x"])
            return dataclasses.replace(state, params=state.params - gradient), {"loss": value}

        batch = next(loop.batches())
        with pytest.raises(UserError, match="overlap along dim 0"):
            loop.compile_step(function)(state, batch)
        with pytest.raises(UserError, match="overlap along dim 0"):
            loop.compile(jax.grad(loss))(state.params, batch["x"])
        loop.stop()
