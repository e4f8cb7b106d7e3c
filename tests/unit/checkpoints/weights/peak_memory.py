"""Prints how much memory the placement of a file takes beyond the arrays on 8 virtual devices.

    python tests/unit/checkpoints/weights/peak_memory.py FILE

The file is written first: `ARRAYS` arrays of `MEGABYTES` MB.
"""

import json
import os
import resource
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

import jax
import numpy as np
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain.checkpoints.weights.assignment import assign_weights, place
from spmdtrain.checkpoints.weights.source import open_weights


def peak() -> int:
    """The most memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(path: str) -> dict[str, int]:
    """Bytes of the file's arrays, of the largest one, and by which the peak grew."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    source = open_weights(path)
    where = NamedSharding(mesh, PartitionSpec("data"))
    targets = {
        name: jax.ShapeDtypeStruct(header.shape, header.dtype, sharding=where)
        for name, header in source.headers.items()
    }
    jax.device_put(np.zeros((8, 8)), where).block_until_ready()  # initializes the devices
    found = assign_weights(path, source.headers, targets, ())
    before = peak()
    arrays = place(source, found, targets)
    after = peak()
    assert len(arrays["a0"].sharding.device_set) == 8
    assert float(arrays["a0"][5, 1]) == 5.0
    sizes = [header.nbytes for header in source.headers.values()]
    return {"total": sum(sizes), "largest": max(sizes), "grown": after - before}


if __name__ == "__main__":
    file, mode = sys.argv[1], sys.argv[2:]
    if mode:
        count, rows = int(mode[0]), int(mode[1])
        row = np.arange(rows, dtype=np.float32)[:, None] + np.zeros(1024, np.float32)
        safetensors.numpy.save_file({f"a{i}": row for i in range(count)}, file)
    else:
        print(json.dumps(measure(file)))
