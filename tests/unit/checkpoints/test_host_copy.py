"""A save on CPU blocks for one copy; the rest reads the copy while training continues."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import load_state
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain.checkpoints.checksums import host_sum, sums
from spmdtrain.checkpoints.host_copy import HostCopy, as_jax_arrays, copy_to_host, is_on_cpu
from spmdtrain.checkpoints.listing import Retention, list_checkpoints
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.run_identity import Identity, describe_leaves
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

P = PartitionSpec
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
SPECS = {"replicated": P(), "split": P(("a", "b")), "both": P(None, "a")}


def state_of(spec: PartitionSpec) -> TrainState:
    """A state of three arrays of 1 MB of which only the devices hold a copy."""
    values = np.random.default_rng(0).normal(size=(3, 512, 512)).astype(np.float32)
    kernels = [jnp.copy(jax.device_put(x, NamedSharding(MESH, spec))) for x in values]
    everywhere = NamedSharding(MESH, P())
    step, key = jax.device_put((jnp.int32(1), jax.random.key(0)), everywhere)
    opt_state = {"mu": kernels[1], "nu": kernels[2].astype(jnp.bfloat16)}
    return TrainState(step, {"kernel": kernels[0]}, opt_state, {}, {}, key)


def identity_of(state: TrainState) -> Identity:
    return Identity(config_as_json(RunConfig()), {}, describe_leaves(state), "")


def as_numpy(state: TrainState) -> dict[str, np.ndarray]:
    leaves = named_leaves(vars(state) | {"key": jax.random.key_data(state.key)})
    return {name: np.array(x) for name, x in leaves.items()}


overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_save_returns_before_the_sums_and_keeps_the_bits_of_its_step(
    spec: PartitionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwritten, threads = threading.Event(), set()

    def late_sum(*arguments: Any) -> int:
        threads.add(threading.current_thread())
        assert overwritten.wait(60)
        return host_sum(*arguments)

    monkeypatch.setattr("spmdtrain.checkpoints.host_copy.host_sum", late_sum)
    state = state_of(spec)
    expected, names = as_numpy(state), sums(vars(state))
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    identity = identity_of(state)
    folder = epath.Path(tmp_path / "checkpoints")
    with contextlib.closing(Checkpoints(folder, Retention())) as checkpoints:
        checkpoints.save(state, 1, identity, None)  # would wait for ever if it read the sums
        kernels = (state.params, state.opt_state)
        places = [x.unsafe_buffer_pointer() for x in shards_of(kernels)]
        after = jax.block_until_ready(overwrite(kernels))
        # The memory of the saved state holds other values now, while nothing is written yet.
        assert [x.unsafe_buffer_pointer() for x in shards_of(after)] == places
        assert all(float(x.min()) == -7 == float(x.max()) for x in jax.tree.leaves(after))
        overwritten.set()
        checkpoints.wait()
    manifest = Manifest.read(folder / "1")
    assert threads and threading.current_thread() not in threads
    assert manifest.sums == names
    assert sum(manifest.files.values()) > sum(x.nbytes for x in expected.values())  # uncompressed
    loaded = as_numpy(load_state(folder / "1", shape, shardings))
    assert {name: x.tobytes() for name, x in loaded.items()} == {
        name: x.tobytes() for name, x in expected.items()
    }


def shards_of(tree: Any) -> list[jax.Array]:
    return [shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


@pytest.mark.parametrize(("spec", "parts"), [(P(), 1), (P("b"), 4), (P(("a", "b")), 8)])
@pytest.mark.parametrize("rows", [16, 2**18])
def test_a_copy_holds_each_part_once(spec: PartitionSpec, parts: int, rows: int) -> None:
    x = jax.device_put(jnp.ones((rows, 8)), NamedSharding(MESH, spec))
    copy = copy_to_host({"x": x})["x"]
    assert isinstance(copy, HostCopy) and len(copy.addressable_shards) == 8
    for shards in (copy.addressable_shards, as_jax_arrays(copy).addressable_shards):
        distinct = {np.asarray(shard.data).ctypes.data: shard for shard in shards}
        assert len(distinct) == parts
        assert sum(shard.data.nbytes for shard in distinct.values()) == x.nbytes == copy.nbytes
        assert distinct.keys().isdisjoint(shard.unsafe_buffer_pointer() for shard in shards_of(x))


def test_arrays_of_numpy_are_in_the_memory_of_the_host() -> None:
    """The metrics of a chief of parameter servers are of NumPy, and have no sharding."""
    assert is_on_cpu({"finite": np.asarray(True), "loss": np.zeros(()), "rate": jnp.zeros(())})


@pytest.mark.parametrize("has_cpu", [True, False], ids=["with-cpu", "without-cpu"])
def test_a_save_from_accelerators_has_the_sums_of_the_devices(
    has_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accelerator is imitated: the arrays are on CPU, so they are not overwritten."""
    for module in ("save", "host_copy"):
        monkeypatch.setattr(f"spmdtrain.checkpoints.{module}.is_on_cpu", lambda _: False)
    monkeypatch.setattr("spmdtrain.checkpoints.save.can_copy", lambda _: has_cpu)
    monkeypatch.delattr("spmdtrain.checkpoints.host_copy.host_sum")
    state, folder = state_of(P(None, "a")), epath.Path(tmp_path / "checkpoints")
    with contextlib.closing(Checkpoints(folder, Retention())) as checkpoints:
        checkpoints.save(state, 1, identity_of(state), None)
    manifest = Manifest.read(folder / "1")
    assert manifest.sums == sums(vars(state))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    loaded = as_numpy(load_state(folder / "1", state, shardings))
    assert {name: x.tobytes() for name, x in loaded.items()} == {
        name: x.tobytes() for name, x in as_numpy(state).items()
    }


def test_an_empty_folder_is_listed_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start is not delayed; a folder with a checkpoint that is just renamed is listed again."""
    folder, pauses = tmp_path / "checkpoints", list[float]()
    folder.mkdir()
    monkeypatch.setattr("time.sleep", pauses.append)
    assert list(list_checkpoints(str(tmp_path)).steps) == [] == pauses
    (folder / "5.orbax-checkpoint-tmp").mkdir()
    assert list(list_checkpoints(str(tmp_path)).steps) == [] and len(pauses) == 3


def test_a_listing_that_missed_the_newest_checkpoint_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run kept the best, 2, and replaced 4 by 6 while the folder was read."""
    folder = tmp_path / "checkpoints"
    for step in (2, 6):
        (folder / str(step)).mkdir(parents=True)
    listings = iter([[2], [2, 6]])
    monkeypatch.setattr("spmdtrain.checkpoints.listing.steps_in", lambda _: next(listings))
    assert list(list_checkpoints(str(tmp_path)).steps) == [2, 6]


def test_a_failure_of_the_thread_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> int:
        raise MemoryError("no memory for the sums")

    state = state_of(P())
    identity = identity_of(state)
    with contextlib.closing(Checkpoints(epath.Path(tmp_path / "run"), Retention())) as checkpoints:
        checkpoints.save(state, 1, identity, None)
        checkpoints.wait()
        monkeypatch.setattr("spmdtrain.checkpoints.host_copy.host_sum", fails)
        checkpoints.save(state, 2, identity, None)
        with pytest.raises(MemoryError, match="no memory for the sums"):
            checkpoints.save(state, 3, identity, None)
        assert checkpoints.saved_step == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1"]
