"""How long a save stops training, against a copy of the same state to the host.

    python benchmarks/checkpoints.py [MEGABYTES]

Prints one line for each number of devices; the ratios are what to look at.
"""

import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain.checkpoint import Checkpoints
from spmdtrain.identity import Identity
from spmdtrain.retention import Retention
from spmdtrain.step import TrainState

REPEATS = 5


def state_of(megabytes: float, devices: int, spec: PartitionSpec) -> TrainState:
    """Parameters and Adam's moments in sixteen arrays each, `megabytes` in all."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    place = NamedSharding(mesh, spec)
    rows = int(megabytes * 1e6 / 4 / 48 / 512) // 8 * 8
    trees = [
        {str(n): jax.device_put(jnp.full((rows, 512), n + 0.5), place) for n in range(16)}
        for _ in range(3)
    ]
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, PartitionSpec()))
    step = jax.device_put(jnp.int32(1), NamedSharding(mesh, PartitionSpec()))
    return TrainState(step, trees[0], (trees[1], trees[2]), {}, {}, key)


def measure(megabytes: float, devices: int, spec: PartitionSpec) -> str:
    """Median blocking time of a save, and of a copy, of the same state."""
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0009765625, tree))
    state = state_of(megabytes, devices, spec)
    identity = Identity(config={}, dataset={}, leaves={}, optimizer="")
    copies, blocked, whole = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(epath.Path(folder) / "checkpoints", Retention(latest=1))
        for number in range(REPEATS + 1):  # the first compiles, and does not count
            fresh = jax.block_until_ready(update(state.params))
            state = TrainState(state.step, fresh, state.opt_state, {}, {}, state.key)
            host = (state.params, state.opt_state)
            began = time.perf_counter()
            jax.tree.map(np.array, host)
            copies.append(time.perf_counter() - began)
            began = time.perf_counter()
            checkpoints.save(state, number, identity, None)
            blocked.append(time.perf_counter() - began)
            checkpoints.wait()
            whole.append(time.perf_counter() - began)
        checkpoints.close()
    copy, block, all_ = (statistics.median(times[1:]) for times in (copies, blocked, whole))
    return (
        f"{devices} devices, {spec}: copy {copy * 1e3:.0f} ms; a save blocks {block * 1e3:.0f} ms "
        f"({block / copy:.2f} of the copy; the first {blocked[0] * 1e3:.0f} ms) and is whole after "
        f"{all_ * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    amount = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
    for count, split in ((1, PartitionSpec()), (8, PartitionSpec("data")), (8, PartitionSpec())):
        print(measure(amount, count, split), flush=True)
