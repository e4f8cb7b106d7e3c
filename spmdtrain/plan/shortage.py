"""The explanation of an error of a run because the memory of a device is exhausted."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
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
from spmdtrain.errors import UserError
from spmdtrain.plan import tables, topologies
from spmdtrain.sharding.placement import make_placement
from spmdtrain.sharding.rules import field_of
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.train.run_logger import bytes_on_devices, device_memory
from spmdtrain.train.session import Trainable
from spmdtrain.tree import named_leaves

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
    def parse(cls, message: str) -> "Shortage":
        """Returns what a message of a GPU, a TPU or a CPU says."""
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


# -- The arrays that are alive, by owner -----------------------------------------------------------


@dataclass(frozen=True)
class Owned:
    """Arrays of an owner.

    Attributes:
      arrays: Their number.
      bytes: On the device that holds the most of all owners.
    """

    owner: str
    arrays: int
    bytes: int


def live_arrays(state: TrainState | None, batch: Any) -> list[Owned]:
    """Returns the arrays on the devices of this process by owner, the largest first.

    Args:
      state: The shapes and shardings of the run's state.
      batch: The shapes of a batch.
    """
    titles = {name: row.title or name for name, row in TrainState.FIELDS.items()}
    of_state: dict[Any, list[str]] = {}
    for name, leaf in named_leaves(state).items():
        field = field_of(name)
        of_state.setdefault(_kind(leaf), []).append(titles.get(field, field))
    of_batch = {(x.shape, x.dtype) for x in jax.tree.leaves(batch)}
    counts: Counter[str] = Counter()
    sizes: dict[jax.Device, Counter[str]] = {}
    for array in jax.live_arrays():
        if owners := of_state.get(_kind(array)):
            owner = owners.pop(0)  # another array of this kind is a copy
        elif (array.shape, array.dtype) in of_batch:
            owner = "batches"
        else:
            owner = f"others, such as {array.dtype}[{','.join(map(str, array.shape))}]"
        counts[owner] += 1
        for device, size in bytes_on_devices(array).items():
            sizes.setdefault(device, Counter())[owner] += size
    fullest = max(sizes.values(), key=lambda of: of.total(), default=Counter[str]())
    return [Owned(owner, counts[owner], size) for owner, size in fullest.most_common()]


def _kind(x: Any) -> Any:
    return x.shape, x.dtype, x.sharding


# -- The explanation -------------------------------------------------------------------------------

_SMALL = 1e-3  # part of the bytes of all arrays
_LONGEST = 900  # seconds for which a plan is made


def explain(
    error: BaseException, config: RunConfig, trained: Trainable, train: TrainingData | None
) -> None:
    """Adds to an error what has used the memory of the devices, and what would need less.

    It is printed below the traceback.
    """
    try:
        blocks = _blocks(str(error), config, trained, train)
    except Exception as failed:  # of any class; it must not hide the error
        error.add_note(f"(its explanation has failed: {type(failed).__name__}: {failed})")
        return
    with contextlib.redirect_stdout(io.StringIO()) as text:
        Terminal().show(*blocks)
    error.add_note(f"\n{text.getvalue().rstrip()}")


def _blocks(
    message: str, config: RunConfig, trained: Trainable, train: TrainingData | None
) -> list[Block]:
    shortage, devices = Shortage.parse(message), jax.local_devices()
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
        facts.append(Fact("limit of a device", byte_size(limit)))
    if (in_use := _in_use(devices)) is not None:
        facts.append(Fact("programs, steps in progress and gaps", byte_size(max(0, in_use - used))))
    large = [x for x in owned if x.bytes > _SMALL * used]
    rows = [(x.owner, f"{x.arrays:,}", byte_size(x.bytes)) for x in large]
    if others := [x for x in owned if x not in large]:
        count, size = (sum(getattr(x, name) for x in others) for name in ("arrays", "bytes"))
        rows.append(("small ones", f"{count:,}", byte_size(size)))
    rows.append(("all arrays", f"{sum(x.arrays for x in owned):,}", byte_size(used)))
    return [
        FactsBlock(facts, title="the memory of a device is exhausted"),
        TableBlock(
            ("arrays on the fullest device", "arrays", "bytes"),
            rows,
            numeric=frozenset({1, 2}),
            totals=1,
        ),
        *_plan_blocks(config, limit),
    ]


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


def _plan_blocks(config: RunConfig, limit: int | None) -> list[Block]:
    """Returns the memory of the run's step by a plan, and the first advice that fits."""
    try:
        words = _plan_words(config, limit)
    except UserError as error:
        return [NoteBlock(f"the memory of this step is not planned: {error}")]
    command = ["-m", "spmdtrain.plan", *words]
    if process_group.count() > 1:  # the other processes wait
        return [
            NoteBlock(f"what the step needs, and what needs less: python {shlex.join(command)}")
        ]
    print("planning the step, to explain its memory ...", file=sys.stderr)
    line = [sys.executable, *command, "--json"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=_LONGEST)
    try:
        plan: Mapping[str, Any] = json.loads(ended.stdout)
    except ValueError:
        return [NoteBlock(f"the plan of the step has failed: {ended.stderr.strip()[-500:]}")]
    if "error" in plan:
        return [NoteBlock(f"the step cannot be planned: {plan['error']}")]
    return [*tables.memory_blocks(dict(plan)), *tables.advice_blocks(dict(plan))]


def _plan_words(config: RunConfig, limit: int | None) -> list[str]:
    """Returns the options of a plan of this run; raises `UserError` if it has none."""
    path = file_of_config(config)
    if path is None or strategy(config.strategy).is_asynchronous:
        raise UserError("only the step of an experiment's file on a mesh can be")
    devices = jax.devices()
    topology = topologies.topology_of_run(
        devices[0].device_kind, len(devices), process_group.count(), None
    )
    words = arguments_of(config_as_json(config), type(config)(), path)
    most = [] if limit is None else ["--device-memory", str(limit)]
    return ["--config", path, "--topology", str(topology), *most, *words]
