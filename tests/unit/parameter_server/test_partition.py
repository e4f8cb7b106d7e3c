"""The partition of the state over servers: partitioners, and the numbers of a mirrored step."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import DIGITS
from hypothesis import given

from spmdtrain import Combination, Trainer
from spmdtrain.config.experiment import Experiment, load_experiment
from spmdtrain.config.run_config import RunConfig
from spmdtrain.parameter_server.partition import (
    FixedShards,
    Leaf,
    MaxSize,
    MinSize,
    Partitioner,
    ServerPartition,
    assign_rows,
    bytes_in,
)
from spmdtrain.parameter_server.server import Server
from spmdtrain.parameter_server.worker import Worker
from spmdtrain.sharding.mesh import resolve


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        # The examples of tf.distribute.experimental.partitioners, all of float32.
        (FixedShards(num_shards=2), (10, 3), 2),
        (MinSize(min_shard_bytes=4, max_shards=2), (6, 1), 2),
        (MinSize(min_shard_bytes=4, max_shards=10), (6, 1), 6),
        (MaxSize(max_shard_bytes=4), (6, 1), 6),
        (MaxSize(max_shard_bytes=4, max_shards=2), (6, 1), 2),
        (MaxSize(max_shard_bytes=1024), (6, 1), 1),
        # Their defaults, and what follows from their rules.
        (MinSize(), (1 << 20, 4), 1),
        (MinSize(max_shards=4), (1024, 64), 1),  # of 256 KiB
        (MinSize(max_shards=4), (1025, 64), 2),
        (MinSize(max_shards=4), (1 << 20, 4), 4),
        (MaxSize(max_shard_bytes=100), (10, 10), 5),  # two rows of 40 bytes each
        (MaxSize(max_shard_bytes=10), (10, 10), 10),  # a row is not cut
        (FixedShards(num_shards=8), (3, 100), 3),
        (FixedShards(num_shards=8), (), 1),
        (MaxSize(max_shard_bytes=1), (), 1),
        (MaxSize(max_shard_bytes=1), (0, 4), 1),
    ],
)
def test_shards(partitioner: Partitioner, shape: tuple[int, ...], shards: int) -> None:
    assert partitioner(shape, 4) == shards


PARTITIONERS = st.one_of(
    st.builds(FixedShards, st.integers(1, 9)),
    st.builds(MinSize, st.integers(1, 9), st.integers(1, 400)),
    st.builds(MaxSize, st.integers(1, 400), st.none() | st.integers(1, 9)),
)
SHAPES = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 5), PARTITIONERS)
def test_each_row_is_on_one_server(
    shapes: list[tuple[int, ...]], servers: int, partitioner: Partitioner
) -> None:
    leaves = {str(n): Leaf(shape, 4) for n, shape in enumerate(shapes)}
    placed = assign_rows(leaves, servers, partitioner)
    for name, leaf in leaves.items():
        held = [rows[name] for rows in placed if name in rows]
        # In the order of the servers, without a gap.
        assert [rows.start for rows in held] == [0, *(rows.stop for rows in held[:-1])]
        assert held[-1].stop == (leaf.shape[0] if leaf.shape else 1)
        assert len(held) == min(partitioner(leaf.shape, 4), servers)


def test_more_shards_than_servers_lie_side_by_side() -> None:
    first, second = assign_rows({"w": Leaf((10, 3), 4)}, 2, FixedShards(5))
    assert (first["w"].start, first["w"].stop, second["w"].start) == (0, 6, 6)  # three and two


def test_servers_get_as_much_as_each_other() -> None:
    leaves = {str(size): Leaf((size, 8), 4) for size in (60, 50, 40, 30, 20, 10)}
    placed = assign_rows(leaves, 2, MinSize())
    rows = [sum(r.stop - r.start for r in held.values()) for held in placed]
    assert rows == [110, 100] or rows == [100, 110]


# -- workers and servers without their messages make what one mirrored step makes ------------------

STEPS = 4
DTYPES = ("bool", "int4", "uint8", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2")


class Normed(nnx.Module):
    """A model with batch statistics and dropout, so with a state and with randomness."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(64, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(self.norm(self.inner(x.reshape(len(x), -1)))))


class Counted(nnx.Module):
    """A linear layer with a state, and a part that is frozen, in dtypes beyond float32."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(64, 10, rngs=rngs)
        ones = {name: jnp.ones(8, getattr(jnp, name)) for name in DTYPES}
        self.counts = nnx.data({name: nnx.Variable(x) for name, x in ones.items()})
        self.steps = nnx.data({name: nnx.Param(x) for name, x in ones.items()})

    def __call__(self, x: jax.Array) -> jax.Array:
        for name, variable in self.counts.items():
            value = variable[...]
            variable[...] = ~value if name == "bool" else value + self.steps[name][...]
        return self.layer(x.reshape(len(x), -1))


def two_terms(model: Any, batch: Any) -> dict[str, Any]:
    logits = model(batch["image"])
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {
        "loss": Combination({"even": 1.0, "all": 0.5}),
        "even": (values, batch["label"] % 2 == 0),
        "all": values,
    }


def experiment(**options: Any) -> tuple[Experiment, RunConfig]:
    found = load_experiment(str(DIGITS), frozenset())
    config = resolve(found.config_class(epochs=None, steps=STEPS, **options), batch_shards=1)
    return found.build(config), config


def divided(of: Experiment, config: RunConfig, servers: int) -> Any:
    """The state after some batches, each computed from the newest parameters and pushed."""
    trainer = Trainer.from_experiment(of, config)
    steps, placement = trainer.functions, trainer.placement
    begun = jax.tree.map(np.asarray, steps.init(config.seed))
    division = ServerPartition.of(steps.abstract_state, steps.update, servers, FixedShards(servers))
    made = [Server(division.on_server, division.held_by(n, begun), step=0) for n in range(servers)]
    worker = Worker(
        steps,
        placement,
        division,
        of.train,
        batch_size=config.global_batch_size or 0,
        seed=config.seed,
        shuffle=config.shuffle,
        threads=0,
        augment=of.augment,
        key=begun.key,
    )
    losses = []
    for number in range(STEPS):
        parts = [server.pull() for server in made]
        computed = worker.compute(number, *division.pulled(parts))
        losses.append(computed.metrics["loss"])
        for server, push in zip(made, division.pushes(number, computed, parts), strict=True):
            assert server.push(push).is_new
            assert bytes_in(push.gradients) == division.trained.bytes_of(made.index(server))
    held = [server.held() for server in made]
    return division.state(held, STEPS, begun.key), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "clipped",
        *(
            pytest.param(x, marks=pytest.mark.nightly)
            for x in ("state", "mlp", "freeze and averaged", "terms", "dtypes")
        ),
    ],
)
def test_one_worker_makes_what_a_mirrored_step_makes(kind: str) -> None:
    options: dict[str, Any] = {}
    if kind == "freeze and averaged":
        options = {"freeze": ("layers/0",), "ema_decay": 0.9}
    if kind == "dtypes":
        options = {"freeze": ("^steps/",)}
    of, config = experiment(strategy="mirrored", **options)
    if kind == "dtypes":
        of = dataclasses.replace(of, model=Counted, rules=())
    if kind == "state":
        of = dataclasses.replace(of, model=Normed, rules=())
    if kind == "clipped":
        clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
        of = dataclasses.replace(of, optimizer=clipped)
    if kind == "terms":
        of = dataclasses.replace(of, objective=two_terms)
    trainer = Trainer.from_experiment(of, config)
    trainer.fit(of.train)
    assert trainer.state is not None
    expected = trainer.state
    for servers in (1, 3) if kind == "state" else (3,):
        state, losses = divided(of, config, servers)
        assert str(jax.tree.structure(state)) == str(jax.tree.structure(expected))
        for x, y in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
            assert x.dtype == y.dtype
            x, y = (np.asarray(each).astype(np.complex64) for each in (x, y))
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=f"{servers} servers")
        assert len(set(losses)) == STEPS


@pytest.mark.slow
def test_threads_read_the_same_batches() -> None:
    of, config = experiment(strategy="mirrored", global_batch_size=40)
    read = []
    for threads in (0, 3):
        trainer = Trainer.from_experiment(of, config)
        steps = trainer.functions
        division = ServerPartition.of(steps.abstract_state, steps.update, 1, FixedShards(1))
        worker = Worker(
            steps,
            trainer.placement,
            division,
            of.train,
            batch_size=40,
            seed=config.seed,
            shuffle=True,
            threads=threads,
            augment=lambda row, draw: {**row, "noise": draw.normal(size=3)},
            key=np.zeros(2, np.uint32),
        )
        read.append([worker.read_batch(number) for number in (0, 7, 3)])
    jax.tree.map(np.testing.assert_array_equal, *read)
    assert read[0][0]["noise"].shape == (40, 3)
