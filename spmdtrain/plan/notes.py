"""Notes for the user about what the figures of a plan do not cover."""

from collections.abc import Sequence

from spmdtrain.document.terminal import byte_size
from spmdtrain.plan.aot import other_compiler
from spmdtrain.plan.compiler_log import short
from spmdtrain.plan.kernels import PlannedKernel, TrafficBasis
from spmdtrain.plan.memory import Memory
from spmdtrain.plan.summary import CompiledSummary
from spmdtrain.plan.topologies import Topology
from spmdtrain.step.flops import CostBasis, Flops, KernelFlops
from spmdtrain.train.trainer import Trainer

# A device's products in excess of its share above which a note is written: padding of split dims
# alone adds a little.
_EXCESS_PRODUCTS = 1.05


def used_chips(trainer: Trainer, topology: Topology) -> float:
    """Returns the number of chips that the trainer's mesh uses; 0.5 if it uses half of one."""
    per_chip = 1 if topology.chip is None else topology.chip.devices
    return len(trainer.placement.devices) / per_chip


def notes_of(
    trainer: Trainer,
    topology: Topology,
    flops: Flops,
    memory: Memory,
    summary: CompiledSummary,
    products: float,
    host: int,
    *,
    virtual: bool,
) -> list[str]:
    """Returns notes about what the figures of a plan do not cover.

    Args:
      flops: Operations of the traced step.
      products: Operations of the compiled step on one device.
      host: Bytes of a device's state that are in host memory.
      virtual: Whether virtual CPU devices stand in for the topology's devices.
    """
    notes = [
        f"a loop with an unknown trip count is counted once: {line}" for line in flops.unknown_loops
    ]
    notes += [
        f"compiled to a loop with an unknown trip count, which is counted once: {line}"
        for line in summary.unknown
    ]
    notes += [
        f"only the most expensive branch is counted, in the lower bound too: {line}"
        for line in dict.fromkeys(summary.choices)
    ]
    notes += [
        "a branch that seldom runs is not counted in the times, and its collectives have times 0: "
        f"{line}"
        for line in dict.fromkeys(summary.rare)
    ]
    if summary.refusal:
        notes.append(f"the compiler: {short(Exception(summary.refusal))}")
    if not summary.has_triton:
        notes.append(
            "XLA cannot compile this step with Triton for an absent GPU: the plan is that of a "
            "program that computes all products with cuBLAS"
        )
    if other := other_compiler(topology):
        notes.append(other)
    if topology.platform == "gpu" and memory.limit and 0.75 < memory.peak / memory.limit <= 1:
        notes.append(
            "JAX preallocates three quarters of a GPU's memory, which is less than this step "
            "needs: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for this run"
        )
    if virtual:
        notes.append(
            "compiled for virtual CPU devices because the CUDA plugin is not installed (pip "
            "install 'spmdtrain[cuda12]' or 'spmdtrain[cuda13]'): all times, temporaries and "
            "16-bit collectives are rough estimates, and kernels are those of a CPU"
        )
    share = flops.total / len(trainer.placement.devices)
    if share and products > _EXCESS_PRODUCTS * share:
        notes.append(
            f"each device computes {products / share:.3g} times its share of the products: "
            "operations that are not split run on several devices identically (see "
            "--show-sharding), and a compiler may replace grouped operations by dense ones"
        )
    if (used := used_chips(trainer, topology)) < topology.chips:
        notes.append(f"uses {used:g} of the {topology.chips} chips")
    if trainer.has_custom_reduction:
        notes.append(
            "a run first tries the experiment's own reduction on its devices; a plan does not"
        )
    if (more := (trainer.config.steps_per_dispatch or 1) - 1) > 0:
        notes.append(f"memory is that of one step: each dispatch holds {more} more batches")
    if host:
        notes.append(
            f"{byte_size(host)} of a device's state are in host memory and are copied to the "
            "device and back in each step: the times omit these copies and are far too short"
        )
    return notes


def kernel_notes(kernels: Sequence[PlannedKernel], useful: Flops) -> list[str]:
    """Returns notes about kernels whose operations are assumed or unknown.

    `useful` are the operations of the model's mathematics.
    """
    notes = []
    for kernel in kernels:
        name = _described(kernel)
        if kernel.basis in (CostBasis.INDICES, CostBasis.SHAPES):
            continue
        if not kernel.basis:
            notes.append(
                f"{name}: its operations are unknown, because it states no cost_estimate: its time "
                f"is that of reading and writing {kernel.traffic}, and the MFU is unknown"
            )
        elif kernel.basis == CostBasis.BODY:
            grid = ", of which an unknown dim counts as 1" if kernel.unknown_grid else ""
            notes.append(
                f"{name} states no cost_estimate: its operations are assumed to be those of "
                f"{kernel.basis}{grid}"
            )
        if kernel.basis and kernel.traffic == TrafficBasis.ONCE:
            notes.append(
                f"{name} copies its arrays by itself: its bytes are assumed to be those of "
                f"{kernel.traffic}"
            )
    notes += [
        f"the MFU includes the operations of {_described(kernel)} as they are computed: it has no "
        "reference (plain JAX for a trace in which spmdtrain.kernels.reference.uses_reference() is "
        "true)"
        for kernel in useful.kernels
    ]
    return list(dict.fromkeys(notes))


def _described(kernel: PlannedKernel | KernelFlops) -> str:
    return f"kernel {kernel.name}" + (f" ({kernel.line})" if kernel.line else "")
