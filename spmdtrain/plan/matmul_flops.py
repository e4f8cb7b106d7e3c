"""Floating-point operations of a compiled program's matrix products and convolutions."""

import json
import math
import re
from collections.abc import Sequence

import numpy as np

from spmdtrain.plan.kernels import is_kernel
from spmdtrain.xla.hlo import Computation, Instruction, Module, arrays_of, reading_program

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"batch_group_count=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONFIG = re.compile(r"backend_config=(\{.*\})")
_GEMM = ("__cublas$gemm", "__cublas$lt$matmul")
# Custom calls whose operations are unknown.
_OPAQUE = ("__cud", "__cublas", "__onednn", "__triton", "triton_kernel_call")


@reading_program()
def products(module: Module) -> float:
    """Returns the floating-point operations of all products of a step on one device.

    As in `spmdtrain.step.flops`, each multiply-add counts as two; padding and dilation of a
    convolution do not count. Kernels do not count either: see `kernel_calls`. The result is NaN if
    the program calls a kernel whose operations are unknown.
    """
    return sum(
        times * _operations(instruction, module.computations[name])
        for name, times in module.times.items()
        if times  # an unknown kernel that never runs must not make the sum NaN
        for instruction in module.computations[name].instructions.values()
    )


def _operations(instruction: Instruction, within: Computation) -> float:
    match instruction.opcode:
        case "dot":
            contracted = _CONTRACTED.search(instruction.attributes)
            dims = [int(n) for n in re.findall(r"\d+", contracted[1])] if contracted else []
            return _matmul(instruction, within, dims)
        case "convolution":
            return _convolution(instruction, within)
        case "custom-call":
            return _custom(instruction, within)
    return 0


def _custom(instruction: Instruction, within: Computation) -> float:
    if is_kernel(instruction):
        return 0
    target = _TARGET.search(instruction.attributes)
    name = target[1] if target else ""
    if name.startswith(_GEMM) and (config := _CONFIG.search(instruction.attributes)):
        numbers = json.loads(config[1]).get("gemm_backend_config", {})
        dims = numbers.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
        return _matmul(instruction, within, [int(n) for n in dims])
    return math.nan if name.startswith(_OPAQUE) else 0


def _matmul(instruction: Instruction, within: Computation, contracted: Sequence[int]) -> float:
    left = _dims(instruction.operands[0], within)
    return 2.0 * math.prod(instruction.arrays[0].dims) * math.prod(left[n] for n in contracted)


def _convolution(instruction: Instruction, within: Computation) -> float:
    """Returns the FLOPs of a convolution; only taps that meet an element of the input count.

    TPUs write every product as a convolution, with a batch dim as a dilated spatial dim.
    """
    labels = _LABELS.search(instruction.attributes)
    assert labels is not None
    sizes = [
        dict(zip(label, dims, strict=True))
        for label, dims in zip(
            labels.groups(),
            (
                *(_dims(name, within) for name in instruction.operands[:2]),
                instruction.arrays[0].dims,
            ),
            strict=True,
        )
    ]
    image, kernel, result = sizes
    match = _WINDOW.search(instruction.attributes)
    window = dict(part.split("=") for part in match[1].split()) if match else {}
    groups = _GROUPS.search(instruction.attributes)
    total = 2.0 * kernel["i"] * kernel["o"] * image["b"] / (int(groups[1]) if groups else 1)
    for n in range(len(image) - 2):
        low, _, _ = _part(window, "pad", n, "0_0").partition("_")
        total *= _meetings(
            image[str(n)],
            kernel[str(n)],
            result[str(n)],
            stride=int(_part(window, "stride", n, "1")),
            low=int(low),
            image_dilation=int(_part(window, "lhs_dilate", n, "1")),
            kernel_dilation=int(_part(window, "rhs_dilate", n, "1")),
        )
    return total


def _part(window: dict[str, str], key: str, n: int, default: str) -> str:
    return window[key].split("x")[n] if key in window else default


def _meetings(
    image: int,
    taps: int,
    result: int,
    *,
    stride: int,
    low: int,
    image_dilation: int,
    kernel_dilation: int,
) -> int:
    """Returns how often a tap meets an element of the input along one spatial dim."""
    places = np.arange(result)[:, None] * stride + np.arange(taps) * kernel_dilation - low
    within = (places >= 0) & (places < image * image_dilation) & (places % image_dilation == 0)
    return int(within.sum())


def _dims(name: str, within: Computation) -> tuple[int, ...]:
    return arrays_of(within.instructions[name].shape)[0].dims
