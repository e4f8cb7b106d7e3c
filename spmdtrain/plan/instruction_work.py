"""The work of a compiled program's instructions: cycles of the compiler's model, and bytes."""

import re
from dataclasses import dataclass

from spmdtrain.plan.kernels import is_kernel
from spmdtrain.plan.memory_traffic import bytes_of
from spmdtrain.xla.collectives import KINDS
from spmdtrain.xla.hlo import ASYNC, Computation, Module, reading_program

# In the text of a TPU's program; https://github.com/openxla/xla calls it the window configuration.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PRODUCTS = ("dot", "convolution")


@dataclass(frozen=True)
class Work:
    """The work of an instruction in all its executions in a step.

    Attributes:
      cycles: Cycles that the compiler estimates; 0 if it gives none.
      bytes: Bytes that it reads and writes in the main memory.
      has_products: Whether it computes matrix products or convolutions.
    """

    cycles: float
    bytes: float
    has_products: bool


@reading_program()
def work_of(module: Module) -> list[Work]:
    """Returns the work of the instructions that run one after another on a device.

    Collectives, kernels and copies in the background are omitted. The list is empty if the compiler
    gives no cycles, as on GPU and CPU.
    """
    aside = {  # computations of the SparseCore, or of a collective
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ASYNC
        for _, name in instruction.called
    }
    found, with_products = [], dict[str, bool]()
    for instruction, within, times in module.instructions():
        opcode = instruction.opcode
        if within.name in aside or opcode.endswith(("-start", "-done")) or opcode in KINDS:
            continue
        if is_kernel(instruction) or not times:
            continue
        match = _CYCLES.search(instruction.attributes)
        work = Work(
            cycles=times * int(match[1]) if match else 0.0,
            bytes=times * bytes_of(instruction, within, module),
            has_products=opcode in _PRODUCTS
            or (
                opcode == "fusion"
                and any(
                    _has_products(name, module, with_products) for _, name in instruction.called
                )
            ),
        )
        if work.cycles or work.bytes:
            found.append(work)
    return found if any(work.cycles for work in found) else []


def _has_products(name: str, module: Module, known: dict[str, bool]) -> bool:
    if name not in known:
        computation = module.computations.get(name, Computation(name))
        known[name] = any(
            x.opcode in _PRODUCTS
            or (x.opcode == "fusion" and any(_has_products(y, module, known) for _, y in x.called))
            for x in computation.instructions.values()
        )
    return known[name]
