"""The floating-point operations of a compiled program's matrix products and convolutions."""

import json
import math
import re
from collections.abc import Sequence

import numpy as np

from spmdtrain.xla.hlo_parser import Computation, Instruction, Module, arrays_of, reading_program

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"batch_group_count=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONFIG = re.compile(r"backend_config=(\{.*\})")
_GEMM = ("__cublas$gemm", "__cublas$lt$matmul")
# Whose operations nobody here can tell.
_OPAQUE = ("__cud", "__cublas", "__onednn", "__triton", "tpu_custom_call", "triton_kernel_call")


@reading_program()
def products(module: Module) -> float:
    """Floating-point operations of all products on one device, as often as they run in a step.

    As in `spmdtrain.plan.flops`, two for each multiply-add; what a convolution pads or dilates with
    is none. nan where a kernel is called that does not tell what it computes.
    """
    return sum(
        times * _operations(one, module.computations[name])
        for name, times in module.times.items()
        if times  # of what never runs nobody asks what it does not tell
        for one in module.computations[name].instructions.values()
    )


def _operations(one: Instruction, within: Computation) -> float:
    match one.opcode:
        case "dot":
            contracted = _CONTRACTED.search(one.attributes)
            dims = [int(n) for n in re.findall(r"\d+", contracted[1])] if contracted else []
            return _matmul(one, within, dims)
        case "convolution":
            return _convolution(one, within)
        case "custom-call":
            return _custom(one, within)
    return 0


def _custom(one: Instruction, within: Computation) -> float:
    target = _TARGET.search(one.attributes)
    name = target[1] if target else ""
    if name.startswith(_GEMM) and (config := _CONFIG.search(one.attributes)):
        numbers = json.loads(config[1]).get("gemm_backend_config", {})
        dims = numbers.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
        return _matmul(one, within, [int(n) for n in dims])
    return math.nan if name.startswith(_OPAQUE) else 0


def _matmul(one: Instruction, within: Computation, contracted: Sequence[int]) -> float:
    left = _dims(one.operands[0], within)
    return 2.0 * math.prod(one.arrays[0].dims) * math.prod(left[n] for n in contracted)


def _convolution(one: Instruction, within: Computation) -> float:
    """Each tap of the kernel counts where it meets an element of the input.

    TPUs know every product as one of these: what was a batch dim is a dilated spatial one.
    """
    labels = _LABELS.search(one.attributes)
    assert labels is not None
    of = [
        dict(zip(label, dims, strict=True))
        for label, dims in zip(
            labels.groups(),
            (*(_dims(name, within) for name in one.operands[:2]), one.arrays[0].dims),
            strict=True,
        )
    ]
    given, kernel, result = of
    found = _WINDOW.search(one.attributes)
    window = dict(part.split("=") for part in found[1].split()) if found else {}
    groups = _GROUPS.search(one.attributes)
    total = 2.0 * kernel["i"] * kernel["o"] * given["b"] / (int(groups[1]) if groups else 1)
    for n in range(len(given) - 2):
        low, _, _ = _part(window, "pad", n, "0_0").partition("_")
        total *= _meetings(
            given[str(n)],
            kernel[str(n)],
            result[str(n)],
            stride=int(_part(window, "stride", n, "1")),
            low=int(low),
            spread=int(_part(window, "lhs_dilate", n, "1")),
            apart=int(_part(window, "rhs_dilate", n, "1")),
        )
    return total


def _part(window: dict[str, str], key: str, n: int, otherwise: str) -> str:
    return window[key].split("x")[n] if key in window else otherwise


def _meetings(
    given: int, taps: int, result: int, *, stride: int, low: int, spread: int, apart: int
) -> int:
    """How often a tap meets an element of the input along one spatial dim."""
    places = np.arange(result)[:, None] * stride + np.arange(taps) * apart - low
    within = (places >= 0) & (places < given * spread) & (places % spread == 0)
    return int(within.sum())


def _dims(name: str, within: Computation) -> tuple[int, ...]:
    return arrays_of(within.instructions[name].shape)[0].dims
