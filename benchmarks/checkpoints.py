"""W6: how long a save blocks training, compared with a copy of the same state to the host.

    python benchmarks/checkpoints.py [--megabytes 200 ...] [--json FILE]
    python -m spmdtrain.launch --processes 2 -- python benchmarks/checkpoints.py ...

The copy is one of the bytes that this process holds, and alternates with the saves. Prints one line
for each size and number of devices; compare the ratios. Parameters and Adam's moments take 12 bytes
per parameter: 120 MB are 10 million parameters.
"""

import argparse
import contextlib
import json
import os
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

from spmdtrain import initialize
from spmdtrain.checkpoints.checksums import distinct_shards
from spmdtrain.checkpoints.listing import Retention
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.distributed import process_group
from spmdtrain.step.state import TrainState

REPEATS = 5


def state_of(megabytes: float, devices: int, spec: PartitionSpec) -> TrainState:
    """Returns parameters and Adam's moments in sixteen arrays each, `megabytes` in total."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    rows = int(megabytes * 1e6 / 4 / 48 / 512) // 8 * 8

    @jax.jit(out_shardings=NamedSharding(mesh, spec))
    def arrays() -> Any:
        return [{str(n): jnp.full((rows, 512), n + 0.5) for n in range(16)} for _ in range(3)]

    @jax.jit(out_shardings=NamedSharding(mesh, PartitionSpec()))
    def step_and_key() -> Any:
        return jnp.int32(1), jax.random.key_data(jax.random.key(0))

    params, *moments = arrays()
    step, key = step_and_key()
    return TrainState(step, params, tuple(moments), {}, {}, key)


def measure(megabytes: float, devices: int, spec: PartitionSpec) -> dict[str, Any]:
    """Measures the seconds of saves and of copies to the host, alternating between the two."""
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0009765625, tree))
    state = state_of(megabytes, devices, spec)
    identity = Identity(config={}, dataset={}, leaves={}, optimizer="")
    copies, blocked, whole = [], [], []
    with contextlib.ExitStack() as stack:
        folder = None
        if process_group.is_chief():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        folder = process_group.broadcast(folder)
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
        process_group.barrier()
    return {
        "megabytes": megabytes,
        "devices": devices,
        "processes": process_group.count(),
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
    processes = result.get("processes", 1)
    return (
        f"{result['megabytes']:g} MB on {result['devices']} devices"
        f"{f' of {processes} processes' if processes > 1 else ''}"
        f"{', sharded' if result['split'] else ''}: copy {copy * 1e3:.0f} ms; a save blocks "
        f"{block * 1e3:.0f} ms ({block / copy:.2f} of the copy; the first {first * 1e3:.0f} ms) "
        f"and completes after {whole * 1e3:.0f} ms"
    )


def main() -> None:
    """Measures states of some sizes on one device and on all, or on those of several processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, nargs="+", default=[200.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    initialize()
    places = [(jax.device_count(), PartitionSpec("data")), (jax.device_count(), PartitionSpec())]
    if process_group.count() == 1:
        places.insert(0, (1, PartitionSpec()))
    results = []
    for amount in options.megabytes:
        for count, spec in places:
            results.append(measure(amount, count, spec))
            if process_group.is_chief():
                print(describe(results[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if "TF_CONFIG" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    main()
