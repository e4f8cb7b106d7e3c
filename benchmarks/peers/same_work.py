"""Weights and a batch on which all peers of a comparison must have the same loss. Imports NumPy.

Before anything is timed, each peer trains one step on them and reports its loss, its number of
parameters, its FLOPs and its dtypes (`Gate.report_work`).
"""

import math
from collections.abc import Iterator

import numpy as np
from work import CLASSES, TRANSFORMERS, Work


def weights(work: Work) -> list[np.ndarray]:
    """Returns the parameters of a workload, float32, in the order in which the model uses them.

    Kernels have the input's dims first: (inputs, outputs), (height, width, inputs, outputs).
    """
    draws = np.random.default_rng(1)
    found = []
    for shape in _shapes(work):
        noise = draws.normal(size=shape)
        # Vectors, biases and scales alike, are neither 0 nor 1, so that none may be left out.
        x = 0.5 + 0.1 * noise if len(shape) == 1 else noise / math.sqrt(_inputs(shape))
        found.append(x.astype(np.float32))
    return found


def first_batch(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and the targets of the batch."""
    inputs, targets = work.arrays()
    return inputs[: work.batch_size], targets[: work.batch_size]


def _inputs(shape: tuple[int, ...]) -> int:
    """Returns the number of values that a product with an array of this shape adds up."""
    return shape[0] if len(shape) == 4 and shape[1] == 3 != shape[0] else math.prod(shape[:-1])


def _shapes(work: Work) -> Iterator[tuple[int, ...]]:
    if shape := TRANSFORMERS.get(work.workload):
        width, heads = shape.width, (shape.heads, shape.width // shape.heads)
        yield shape.rows, width
        if shape.learned:
            yield shape.context, width
        for _ in range(shape.layers):
            yield from ((width,), (width, 3, *heads), (*heads, width))
            yield from ((width,), (width, 4 * width), (4 * width, width))
        yield (width,)
    elif work.workload == "leaves":
        yield from ((4,) for _ in range(work.leaves))
    elif work.workload == "resnet":
        yield from ((3, 3, 3, 16), (16,))
        for inside, outside in ((16, 16), (16, 32), (32, 64)):
            yield from ((3, 3, inside, outside), (outside,), (outside,))
            yield from ((3, 3, outside, outside), (outside,), (outside,))
            if inside != outside:
                yield 1, 1, inside, outside
        yield from ((64, CLASSES), (CLASSES,))
    else:
        for size in ((784, 256), (256, 256), (256, CLASSES)):
            yield from (size, size[1:])
