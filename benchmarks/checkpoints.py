"""W6: how long a save blocks training, compared with a copy of the same state to the host.

    python benchmarks/checkpoints.py [--megabytes 200 ...] [--json FILE]

Prints one line for each size and number of devices; compare the ratios. Parameters and Adam's
moments take 12 bytes per parameter: 120 MB are 10 million parameters.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain.checkpoints.checksums import distinct_shards
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.step.state import TrainState

REPEATS = 5


def state_of(megabytes: float, devices: int, spec: PartitionSpec) -> TrainState:
    """Returns parameters and Adam's moments in sixteen arrays each, `megabytes` in total."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    place = NamedSharding(mesh, spec)
    rows = int(megabytes * 1e6 / 4 / 48 / 512) // 8 * 8
    trees = [
        {str(n): jax.device_put(jnp.full((rows, 512), n + 0.5), place) for n in range(16)}
        for _ in range(3)
    ]
    key_data = jax.random.key_data(jax.random.key(0))
    key = jax.device_put(key_data, NamedSharding(mesh, PartitionSpec()))
    step = jax.device_put(jnp.int32(1), NamedSharding(mesh, PartitionSpec()))
    return TrainState(step, trees[0], (trees[1], trees[2]), {}, {}, key)


def measure(megabytes: float, devices: int, spec: PartitionSpec) -> dict[str, Any]:
    """Measures the seconds of saves and of copies to the host, alternating between the two."""
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0009765625, tree))
    state = state_of(megabytes, devices, spec)
    identity = Identity(config={}, dataset={}, leaves={}, optimizer="")
    copies, blocked, whole = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(epath.Path(folder) / "checkpoints", Retention(latest=1))
        for number in range(REPEATS + 1):  # the first one compiles and does not count
            fresh = jax.block_until_ready(update(state.params))
            state = TrainState(state.step, fresh, state.opt_state, {}, {}, state.key)
            leaves = jax.tree.leaves((state.params, state.opt_state))
            parts = [shard.data for leaf in leaves for shard in distinct_shards(leaf)]
            start = time.perf_counter()
            [np.array(part) for part in parts]
            copies.append(time.perf_counter() - start)
            start = time.perf_counter()
            checkpoints.save(state, number, identity, None)
            blocked.append(time.perf_counter() - start)
            checkpoints.wait()
            whole.append(time.perf_counter() - start)
        checkpoints.close()
    return {
        "megabytes": megabytes,
        "devices": devices,
        "split": bool(tuple(spec)),
        "copies": copies[1:],
        "blocked": blocked[1:],
        "first blocked": blocked[0],
        "whole": whole[1:],
    }


def describe(result: Mapping[str, Any]) -> str:
    """Returns a line about a result of `measure`."""
    copy, block, whole = (statistics.median(result[n]) for n in ("copies", "blocked", "whole"))
    first = result["first blocked"]
    return (
        f"{result['megabytes']:g} MB on {result['devices']} devices"
        f"{', sharded' if result['split'] else ''}: copy {copy * 1e3:.0f} ms; a save blocks "
        f"{block * 1e3:.0f} ms ({block / copy:.2f} of the copy; the first {first * 1e3:.0f} ms) "
        f"and completes after {whole * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, nargs="+", default=[200.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for amount in options.megabytes:
        for count, spec in ((1, PartitionSpec()), (8, PartitionSpec("data")), (8, PartitionSpec())):
            results.append(measure(amount, count, spec))
            print(describe(results[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
