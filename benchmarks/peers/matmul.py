"""Name of the accelerator and its matrix multiplication rate, as one line of JSON.

The rate is the median of 9 measurements with bfloat16 matrices of 8192 x 8192, accumulated in
float32.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp

EDGE = 8192
PRODUCTS = 10  # per measurement, so that the dispatch time does not count

left, right = (jax.random.normal(jax.random.key(n), (EDGE, EDGE), jnp.bfloat16) for n in range(2))
product = jax.jit(lambda a, b: (a @ b) * EDGE**-0.5)


def seconds() -> float:
    start, x = time.perf_counter(), left
    for _ in range(PRODUCTS):
        x = product(x, right)
    jax.block_until_ready(x)
    return (time.perf_counter() - start) / PRODUCTS


seconds()
rate = 2 * EDGE**3 / statistics.median(seconds() for _ in range(9))
print(json.dumps({"accelerator": jax.devices()[0].device_kind, "matmul TFLOP/s": rate / 1e12}))
