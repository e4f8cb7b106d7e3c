"""Processes whose copies of the state come apart: found, named, and nothing of it saved."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOUND, saved_steps, status
from jax.sharding import NamedSharding, PartitionSpec
from processes import codes, drill, job, quiet, show

from spmdtrain.checkpoints import checksums
from spmdtrain.checkpoints.checksums import find_odd
from spmdtrain.checkpoints.host_copy import StateSums
from spmdtrain.testing import run_processes

P = PartitionSpec

# -- real processes --------------------------------------------------------------------------------

# Changes the copies that one process holds of an array, as another program or faulty memory would:
# no comparison of settings can see it.
CORRUPTED = """

def corrupted(state, name, rank):
    import dataclasses
    import jax
    import numpy as np
    from spmdtrain.sharding.layout import path_name

    def change(path, x):
        if path_name(path) != name or jax.process_index() != rank:
            return x
        shards = x.addressable_shards
        parts = [np.array(shard.data) for shard in shards]
        for part in parts:
            part.flat[-1] += 0.25
        placed = [jax.device_put(p, s.device) for p, s in zip(parts, shards)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)

    params = jax.tree_util.tree_map_with_path(change, state.params)
    return dataclasses.replace(state, params=params)


"""
NAME = "layers/1/kernel"


def corrupting(folder: Path, moment: str, step: int, rank: int) -> Path:
    """The experiment, in which a callback changes one process's copy of a parameter."""
    call = (
        f"lambda event: event.step == {step} and "
        f"setattr(event.trainer, 'state', corrupted(event.trainer.state, {NAME!r}, {rank}))"
    )
    callbacks = 'callbacks={"step": stop} if config.stop_at else {},'
    return drill(
        folder,
        ("def build(config):", CORRUPTED.lstrip("\n") + "def build(config):"),
        (callbacks, f"callbacks={{{moment!r}: {call}}},"),
    )


@pytest.mark.drill
def test_the_first_step_finds_two_processes_of_other_copies_and_nothing_is_saved(
    tmp_path: Path,
) -> None:
    """The parameters are split within each process, and each part is held by both."""
    workdir = tmp_path / "run"
    sharded = ("--strategy", "hybrid+fully_sharded", "--mesh.replica", 2, "--mesh.fsdp", 2)
    options = ("--workdir", workdir, *sharded, "--sharding.min_size", 1)
    ended = job(corrupting(tmp_path, "fit_start", 0, 1), *options, devices=2, check=False)
    assert codes(ended) == [1, 1], show(ended)
    reason = status(workdir)["reason"]
    assert f"step 1: the copies of params/{NAME} differ" in reason, reason
    assert "chief and worker 0 differ from each other" in reason
    assert saved_steps(workdir) == []
    assert not any("Traceback" in one.output for one in ended), show(ended)


@pytest.mark.drill
def test_a_save_detects_which_of_three_processes_differs_and_keeps_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    workdir = tmp_path / "run"
    config = corrupting(tmp_path, "step", 7, 2)
    ended = job(config, "--workdir", workdir, processes=3, check=False)
    assert codes(ended) == [1, 1, 1], show(ended)
    reason = status(workdir)["reason"]
    assert f"step 10: the copies of params/{NAME} differ" in reason, reason
    assert "worker 1 differs from the other processes" in reason
    assert saved_steps(workdir) == [5]


LOOP = """
import sys

import numpy as np
import optax
import jax.numpy as jnp

from spmdtrain import Loop


def init(key):
    params = {"layers": [{}, {"kernel": jnp.ones((8, 3))}]}
    return {"params": params, "opt_state": optimizer.init(params)}


def train_step(state, batch, key):
    import jax, dataclasses

    def loss(params):
        return ((batch @ params["layers"][1]["kernel"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return dataclasses.replace(state, params=params, opt_state=opt_state), {"loss": value}


optimizer = optax.adam(1e-3)
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
options = {"strategy": "mirrored", "steps": 12, "global_batch_size": 8, "workdir": sys.argv[1]}
every = int(sys.argv[3]) or None
with Loop(**options, checkpoint_every_steps=3, compare_copies_every=every) as loop:
    state = loop.start(init, train=x)
    step = loop.compile_step(train_step)
    for batch in loop.batches():
        state, output = step(state, batch)
        if loop.step == int(sys.argv[2]) - 1:
            state = corrupted(state, "layers/1/kernel", 1)
        loop.end_step(state, output)
"""


@pytest.mark.drill
@pytest.mark.parametrize(
    ("at", "every", "found", "saved"), [(1, 0, 1, []), (4, 0, 6, [3]), (7, 4, 8, [3, 6])]
)
def test_a_loop_finds_it_as_well(
    tmp_path: Path, at: int, every: int, found: int, saved: list[int]
) -> None:
    script, workdir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(CORRUPTED + LOOP)
    ended = run_processes(
        [sys.executable, str(script), str(workdir), str(at), str(every)],
        processes=2,
        timeout=BOUND,
        check=False,
        grace=40.0,
        env=quiet(),
    )
    assert codes(ended) == [1, 1], show(ended)
    reason = status(workdir)["reason"]
    assert f"step {found}: the copies of params/{NAME} differ" in reason, reason
    assert saved_steps(workdir) == saved


# -- who differs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digests", "found"),
    [
        ("aaaa", None),
        ("aaba", ("g", 0, [2], True)),
        ("baaa", ("g", 1, [0], True)),
        ("ab", ("g", 0, [1], False)),
        ("aabb", ("g", 0, [1, 2, 3], False)),
        ("abc", ("g", 0, [1, 2], False)),
        ("aabca", ("g", 0, [2, 3], True)),
    ],
)
def test_the_majority_is_right_if_there_is_one(digests: str, found: object) -> None:
    assert find_odd([{"g": digest} for digest in digests]) == found


def test_only_processes_that_hold_the_same_part_are_compared() -> None:
    """Four processes: the first two hold one half of an array, the others the other."""
    halves = [{"x": "a", "all": "z"}] * 2 + [{"y": "b", "all": "z"}] * 2
    assert find_odd(halves) is None
    halves[3] = {"y": "c", "all": "z"}
    assert find_odd(halves) == ("y", 2, [3], False)


# -- what is compared ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(), P("a")], ids=["replicated", "split"])
def test_the_first_step_is_compared_as_it_was_before_its_arrays_were_donated(
    spec: PartitionSpec,
) -> None:
    mesh = jax.make_mesh((8,), ("a",))
    values = np.random.default_rng(0).normal(size=(4096, 16)).astype(np.float32)
    state: Any = {
        "large": jnp.copy(jax.device_put(values, NamedSharding(mesh, spec))),
        "small": jnp.copy(jax.device_put(values[:8], NamedSharding(mesh, P()))),
        "on host": jax.device_put(values, NamedSharding(mesh, P(), memory_kind="pinned_host")),
    }
    first = StateSums(state, in_host_memory=False)
    jax.jit(lambda x: jax.tree.map(lambda x: x * 0 - 7, x), donate_argnums=0)(state)
    assert state["large"].is_deleted() and state["small"].is_deleted()
    compared = first.parts()
    expected = checksums.sums({"large": values, "small": values[:8]})
    assert checksums.format_sums(checksums.read_parts(compared)) == expected
    assert {part.holders for parts in compared.values() for part in parts} == {(0,)}
    assert len(compared["large"]) == (1 if spec == P() else 8)
