"""What the accelerator is, and how fast it multiplies: one line of JSON.

The median of 9 products of bfloat16 matrices, 8192 by 8192, summed in float32.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp

EDGE = 8192
AT_ONCE = 10  # so that the time to dispatch them is none of it

one, other = (jax.random.normal(jax.random.key(n), (EDGE, EDGE), jnp.bfloat16) for n in range(2))
product = jax.jit(lambda a, b: (a @ b) * EDGE**-0.5)


def seconds() -> float:
    began, x = time.perf_counter(), one
    for _ in range(AT_ONCE):
        x = product(x, other)
    jax.block_until_ready(x)
    return (time.perf_counter() - began) / AT_ONCE


seconds()
rate = 2 * EDGE**3 / statistics.median(seconds() for _ in range(9))
print(json.dumps({"accelerator": jax.devices()[0].device_kind, "matmul TFLOP/s": rate / 1e12}))
