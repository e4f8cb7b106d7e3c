"""The explanation of an error of a run because the memory of a device is exhausted."""

import contextlib
import dataclasses
import io
import json
import math
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdtrain.config.command_line import arguments_of
from spmdtrain.config.run_config import RunConfig, config_as_json, file_of_config
from spmdtrain.data.loader import abstract_batch
from spmdtrain.data.training_data import TrainingData
from spmdtrain.distributed import process_group
from spmdtrain.document.blocks import Fact, FactsBlock, NoteBlock, TableBlock
from spmdtrain.document.terminal import Terminal, byte_size
from spmdtrain.errors import UserError, option
from spmdtrain.plan import tables, topologies
from spmdtrain.plan.planner import Memory
from spmdtrain.sharding.placement import make_placement
from spmdtrain.sharding.rules import field_of
from spmdtrain.step.compile import ProgramMemory
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.train.live_arrays import live_arrays
from spmdtrain.train.session import Trainable
from spmdtrain.tree import named_leaves
from spmdtrain.xla.chips import chip_of, device_memory

Block = TableBlock | FactsBlock | NoteBlock

# -- The messages of XLA ---------------------------------------------------------------------------

_NUMBER = r"(\d+(?:\.\d+)?[KMGT]?(?:iB)?)B?"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# What was asked for, and what was free or the limit; the last pattern has the former alone.
_MESSAGES = (
    ("the compiler", "limit", rf"Used {_NUMBER} of {_NUMBER} hbm"),
    ("the compiler", "limit", rf"\({_NUMBER}\) exceeds available HBM \({_NUMBER}\)"),
    (
        "a step or an array",
        "free",
        rf"Attempting to (?:allocate|reserve) {_NUMBER}.*?There are {_NUMBER} free",
    ),
    ("an array", "free", r"Could not allocate (\d+) bytes in memory .*? (\d+) bytes allocatable"),
    (
        "a step or an array",
        "",
        rf"(?:while trying to allocate|Out of memory allocating|allocate request for) {_NUMBER}",
    ),
)
# Another limit: of the files or messages of a process, or of the memory in a core of a device.
_NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED(?!.*(?i:memory|alloc|hbm))"
    r"|Ran out of memory in memory space [sv]mem|Shared memory size limit",
    re.DOTALL,
)
_FRAGMENTED = re.compile(r"largest contiguous region of free memory is ([\d.]+[KMGT]?)")


@dataclass(frozen=True)
class Shortage:
    """The contents of a message of XLA about memory that is exhausted.

    Attributes:
      asked: What the memory was for.
      needed: Bytes; None if the message does not say how many.
      free: Bytes that were free.
      limit: Bytes that a program may use.
      contiguous: Bytes of the largest free region, if the free memory is in several.
    """

    asked: str = "a step or an array"
    needed: int | None = None
    free: int | None = None
    limit: int | None = None
    contiguous: int | None = None

    @classmethod
    def parse(cls, message: str) -> "Shortage | None":
        """Returns what a message of a GPU, a TPU or a CPU says; None if it is not about memory."""
        if _NO_MEMORY.search(message):
            return None
        for asked, other, pattern in _MESSAGES:
            if (match := re.search(pattern, message, re.DOTALL)) is None:
                continue
            needed, *rest = map(_bytes, match.groups())
            region = _FRAGMENTED.search(message)
            known = {other: rest[0]} if rest else {}
            return cls(asked, needed, contiguous=region and _bytes(region[1]), **known)
        return cls()


def _bytes(text: str) -> int:
    text = text.removesuffix("iB")
    unit = text[-1:] if text[-1:] in _UNITS else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


# -- The explanation -------------------------------------------------------------------------------

_TITLE = "the memory of a device is exhausted"
_SMALL = 1e-3  # part of the bytes of all arrays
_LONGEST = 600  # seconds for which a plan is made
_SHARE = 0.9  # of a GPU's memory, below which JAX leaves a part to other processes


def explain(
    error: Exception,
    config: RunConfig,
    trained: Trainable,
    train: TrainingData | None,
    program: ProgramMemory | None,
    advice: str,
) -> None:
    """Adds to an error what has used the memory of the devices, and what would need less.

    It is printed below the traceback. An error that is explained, or not about the memory of a
    device, stays as it is.

    Args:
      program: The memory of the train step, if it is compiled.
      advice: What needs less, if no training has failed.
    """
    if any(_TITLE in note for note in getattr(error, "__notes__", ())):
        return
    message = str(error)
    if not _is_of_xla(error) or (shortage := Shortage.parse(message)) is None:
        return
    try:
        blocks = _blocks(shortage, config, trained, train, program, advice)
    except Exception as failed:  # of any class; it must not hide the error
        error.add_note(f"(its explanation has failed: {type(failed).__name__}: {failed})")
        return
    with contextlib.redirect_stdout(io.StringIO()) as text:
        Terminal().show(*blocks)
    error.add_note(f"\n{text.getvalue().rstrip()}")


def _is_of_xla(error: BaseException | None) -> bool:
    """Returns whether XLA has raised an error or its cause."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__
    return False


def _blocks(
    shortage: Shortage,
    config: RunConfig,
    trained: Trainable,
    train: TrainingData | None,
    program: ProgramMemory | None,
    advice: str,
) -> list[Block]:
    devices = jax.local_devices()
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        *(trained.abstract_state, trained.shardings),
    )
    owned = live_arrays(state, _batch_shapes(config, train))
    used = sum(each.bytes for each in owned)
    limit = shortage.limit or device_memory(devices).limit
    facts = []
    if shortage.needed is not None:
        facts.append(Fact("asked for", byte_size(shortage.needed), shortage.asked))
    if shortage.free is not None:
        facts.append(Fact("free", byte_size(shortage.free)))
    if shortage.contiguous is not None:
        facts.append(Fact("largest free region", byte_size(shortage.contiguous)))
    if limit:
        share = share_of_gpu(limit, devices[0].platform, devices[0].device_kind)
        facts.append(Fact("limit of a device", byte_size(limit), share))
    if (in_use := _in_use(devices)) is not None:
        facts.append(Fact("programs, steps in progress and gaps", byte_size(max(0, in_use - used))))
    large = [x for x in owned if x.bytes > _SMALL * used]
    rows = [(x.owner, f"{x.arrays:,}", byte_size(x.bytes)) for x in large]
    if others := [x for x in owned if x not in large]:
        count, size = (sum(getattr(x, name) for x in others) for name in ("arrays", "bytes"))
        rows.append(("small ones", f"{count:,}", byte_size(size)))
    rows.append(("all arrays", f"{sum(x.arrays for x in owned):,}", byte_size(used)))
    blocks: list[Block] = [
        FactsBlock(facts, title=_TITLE),
        TableBlock(
            ("arrays on the fullest device", "arrays", "bytes"),
            rows,
            numeric=frozenset({1, 2}),
            totals=1,
        ),
    ]
    if advice:
        return [*blocks, NoteBlock(advice)]
    plan, note = _plan(config, trained, limit)
    if plan is None and program is not None:
        plan = _plan_of_program(state, program, limit)
    if plan is not None:
        memory = plan["memory"]
        blocks += tables.memory_blocks(plan)
        own = sum(memory[name] for name in ("params", "optimizer", "average", "other", "inputs"))
        if text := cause(shortage, memory["peak"], max(0, used - own), limit):
            blocks.append(NoteBlock(text))
        blocks += tables.advice_blocks(plan)
    return [*blocks, NoteBlock(note)] if note else blocks


def share_of_gpu(limit: int, platform: str, kind: str) -> str:
    """Returns why JAX may use a part of a GPU's memory only; "" for a TPU, or if it has it all."""
    chip = chip_of(kind) if platform == "gpu" else None
    if chip is None or limit >= _SHARE * chip.memory:
        return ""
    return (
        f"{limit / chip.memory:.0%} of its memory: XLA_PYTHON_CLIENT_MEM_FRACTION sets the part of "
        "JAX, and other processes may use the rest"
    )


def cause(shortage: Shortage, peak: int, others: int, limit: int | None) -> str:
    """Returns why a step that fits has no memory; "" if it does not fit, or if that is unknown.

    Args:
      peak: Bytes of a device that the step needs.
      others: Bytes of live arrays beside the state and a batch.
      limit: Bytes of a device that programs may use.
    """
    needed, free, contiguous = shortage.needed, shortage.free, shortage.contiguous
    if contiguous is not None and needed is not None and needed <= (free or 0):
        return (
            f"the free memory would suffice, and is in pieces of at most {byte_size(contiguous)}: "
            "keep fewer small arrays between large ones, or start again from a checkpoint"
        )
    if limit is None or peak > limit:
        return ""
    if needed is not None and needed > peak:
        return (
            f"the step fits, and needs less than the {byte_size(needed)} that were asked for: "
            "another program or array has asked for them, at the line of the traceback"
        )
    if peak + others > limit:
        return (
            f"the step alone fits, and not beside the {byte_size(others)} of arrays that are "
            "neither its state nor a batch of it: keep fewer of them, or on the host"
        )
    return (
        "the step fits: other programs and processes of the device, steps in progress or gaps "
        "between arrays have used what is missing"
    )


def _in_use(devices: Sequence[jax.Device]) -> int | None:
    found = [(device.memory_stats() or {}).get("bytes_in_use") for device in devices]
    known = [x for x in found if x is not None]
    return max(known, default=None)


def _batch_shapes(config: RunConfig, train: TrainingData | None) -> Any:
    """Returns the shapes of a batch; none if they are not known."""
    if train is None:
        return ()
    with contextlib.suppress(Exception):  # the user's data may be what has failed
        placement = make_placement(config)
        return abstract_batch(
            train,
            config.resolved_batch_size,
            placement,
            augment=None,
            steps=1,
            by_index=config.data_on_device,
            step_may_place=True,
            padded_to=config.padded_batch_size(placement.batch_shards),
        )
    return ()


def _plan_of_program(
    state: TrainState, program: ProgramMemory, limit: int | None
) -> dict[str, Any]:
    """Returns the part about memory of a plan (`plan_as_json`) for a compiled step."""
    sizes: Counter[str] = Counter()
    for name, leaf in named_leaves(state).items():
        if leaf.sharding.memory_kind != "pinned_host":
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            sizes[_PLANNED.get(field_of(name), "other")] += size
    memory = Memory(
        params=sizes["params"],
        optimizer=sizes["optimizer"],
        average=sizes["average"],
        other=sizes["other"],
        inputs=max(0, program.arguments - sizes.total()),
        temporaries=program.temporaries,
        results=program.results,
        code=program.code,
        peak=program.peak,
        limit=limit,
    )
    return {
        "memory": dataclasses.asdict(memory) | {"buffers": []},
        "fits": memory.fits,
        "advice": [],
    }


_PLANNED = {"params": "params", "opt_state": "optimizer", "averaged": "average"}


def _plan(
    config: RunConfig, trained: Trainable, limit: int | None
) -> tuple[dict[str, Any] | None, str]:
    """Returns a plan of the run's step as JSON, or a sentence that says what needs less."""
    try:
        words = _plan_words(config, limit)
    except UserError as error:
        less = f"{option('strategy', 'fully_sharded')} splits the state over the devices"
        if isinstance(trained, RunFunctions):  # the step is not the user's own
            less += f", {option('remat', 'full')} or {option('microbatches', 4)} needs less for "
            less += "activations"
        return None, f"{error}; {less}"
    command = ["-m", "spmdtrain.plan", *words]
    hint = f"what the step needs, and what needs less: python {shlex.join(command)}"
    if process_group.count() > 1:  # the other processes wait
        return None, hint
    print("planning the step, to explain its memory ...", file=sys.stderr)
    line = [sys.executable, *command, "--json"]
    try:
        ended = subprocess.run(line, capture_output=True, text=True, timeout=_LONGEST)
        plan: dict[str, Any] = json.loads(ended.stdout)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        return None, hint
    except ValueError:
        return None, f"{hint}\nhere it has failed: {ended.stderr.strip()[-500:]}"
    if "error" in plan:
        return None, f"the step cannot be planned: {plan['error']}"
    return plan, ""


def _plan_words(config: RunConfig, limit: int | None) -> list[str]:
    """Returns the options of a plan of this run; raises `UserError` if it has none."""
    path = file_of_config(config)
    if path is None or strategy(config.strategy).is_asynchronous:
        raise UserError("only the step of an experiment's file on a mesh can be planned")
    devices = jax.devices()
    topology = topologies.topology_of_run(
        devices[0].device_kind, len(devices), process_group.count(), None
    )
    words = arguments_of(config_as_json(config), type(config)(), path)
    most = [] if limit is None else ["--device-memory", str(limit)]
    return ["--config", path, "--topology", str(topology), *most, *words]
