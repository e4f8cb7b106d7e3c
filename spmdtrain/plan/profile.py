"""A profiler trace of a run, compared with the plan of its step, and rates measured from it."""

import bisect
import dataclasses
import datetime
import enum
import functools
import itertools
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from spmdtrain.errors import UserError, foreign, version_of
from spmdtrain.plan.instruction_work import Work, WorkKind
from spmdtrain.plan.planner import Plan
from spmdtrain.plan.time_model import NETWORKS, WITHIN, Overlap, Times, instruction_seconds
from spmdtrain.plan.topologies import Topology
from spmdtrain.record.storage import one_line
from spmdtrain.record.user_folders import cache_folder, make_folder, replaced
from spmdtrain.xla.chips import MEASURED, Chip

# -- The events of a trace: what each device executed, and when ------------------------------------
#
# A trace has planes, which have lines, which have events. On a TPU, the line "XLA Ops" of the plane
# of a device has an event for each instruction, named by its text, and the line "XLA Modules" one
# for each execution of a program. On a GPU, a line is a stream and an event a kernel, which states
# its instruction (`hlo_op`) and program (`hlo_module`). On CPU, the lines of the plane of the host
# are threads, and the events of instructions state these and the device.

_DEVICE = re.compile(r"/device:[A-Z]+:\d+")  # others are parts of a device, such as SparseCores
_HOST = "/host:"
_OPERATIONS, _PROGRAMS, _STREAM = "XLA Ops", "XLA Modules", "Stream"
_PYTHON = "python"  # the line with the calls of Python functions, which are many
_TEXT = re.compile(r"%?([\w.\-]+) = ")
_NUMBER = re.compile(r"\(\d+\)$")


@dataclass(frozen=True, slots=True)
class _Event:
    """An instruction's execution; times are in ns. `program` is "" if it is not known."""

    name: str
    program: str
    start: float
    end: float


_Trace = Mapping[str, Sequence[_Event]]
"""The events of each device, ascending by their start."""


def newest_trace(workdir: str) -> Sequence[Path]:
    """Returns the files of the newest trace of a run, one for each process that wrote one.

    Raises:
      UserError: If the run has none.
    """
    folder = Path(workdir) / "plugins" / "profile"
    # Not a pipe, which would be waited for.
    files = [path for path in folder.glob("*/*.xplane.pb") if path.is_file()]
    if not files:
        raise UserError(
            f"{workdir} has no profiler trace: train with --profile-steps A:B, which writes one to "
            f"{folder}"
        )
    newest = max(path.parent for path in files)  # the names are times
    return sorted(path for path in files if path.parent == newest)


def read_trace(files: Sequence[Path]) -> _Trace:
    """Returns the events of each device.

    Raises:
      UserError: If a file is no trace, or has no instructions.
    """
    found: dict[str, list[_Event]] = {}
    for file in files:
        prefix = f"{file.name} " if len(files) > 1 else ""
        for device, events in _events_of(file).items():
            found[f"{prefix}{device}"] = sorted(events, key=lambda event: event.start)
    if not found:
        raise UserError(
            f"{files[0]} has no event of a device: it is no trace of steps, or its format is not "
            f"that of jax {version_of('jax')}"
        )
    return found


def _events_of(file: Path) -> Mapping[str, list[_Event]]:
    try:
        planes = list(ProfileData.from_file(str(file)).planes)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({one_line(error)}): it is truncated, or was not written by a "
            f"profiler whose format jax {version_of('jax')} knows; profile the run again"
        ) from error
    on_device = {p.name: list(_of_device(p)) for p in planes if _DEVICE.fullmatch(p.name)}
    if any(on_device.values()):
        return {name: events for name, events in on_device.items() if events}
    on_host: dict[str, list[_Event]] = defaultdict(list)
    for plane in planes:
        if plane.name.startswith(_HOST):
            for device, event in _of_host(plane):
                on_host[device].append(event)
    return on_host


def _of_device(plane: Any) -> Iterator[_Event]:
    """Yields the events of a GPU's streams, or of a TPU's instructions."""
    lines = list(plane.lines)
    programs = sorted(
        (event.start_ns, event.end_ns, _NUMBER.sub("", event.name))
        for line in lines
        if line.name == _PROGRAMS
        for event in line.events
    )
    starts = [start for start, _, _ in programs]
    streams = [line for line in lines if line.name.startswith(_STREAM)]
    for line in streams or [line for line in lines if line.name == _OPERATIONS]:
        for event in line.events:
            stats = dict(event.stats)
            program = _NUMBER.sub("", str(stats.get("hlo_module", "")))
            place = bisect.bisect_right(starts, event.start_ns) - 1
            if not program and place >= 0 and event.start_ns < programs[place][1]:
                program = programs[place][2]
            text = _TEXT.match(event.name)
            name = str(stats.get("hlo_op", "")) or (text[1] if text else event.name)
            yield _Event(name, program, event.start_ns, event.end_ns)


def _of_host(plane: Any) -> Iterator[tuple[str, _Event]]:
    """Yields the events of virtual devices."""
    for line in plane.lines:
        for event in line.events if line.name != _PYTHON else ():
            stats = dict(event.stats)
            if "hlo_op" in stats and "device_ordinal" in stats:
                name, program = str(stats["hlo_op"]), str(stats.get("hlo_module", ""))
                device = f"device {stats['device_ordinal']}"
                yield device, _Event(name, program, event.start_ns, event.end_ns)


# -- The seconds of a step by instruction ----------------------------------------------------------


class _Rank(enum.IntEnum):
    """The precedence of spans: a moment counts for those of the highest rank."""

    AROUND = 0  # loops, around the instructions in them
    ASIDE = 1  # collectives and copies in the background, exposed if nothing else runs
    WORK = 2


@dataclass(frozen=True, slots=True)
class _Span:
    """A time in ns that counts for a key: the name of an instruction, or one of those below."""

    start: float
    end: float
    rank: _Rank
    key: str


_GAP, _WAITING, _OTHER = "", "\0waiting", "\0other "  # no instruction has such a name


def _shares(spans: Iterable[_Span], begin: float, end: float) -> Mapping[str, float]:
    """Divides the time from `begin` to `end` among spans, and gaps between them.

    Spans of the highest rank at a moment share it equally.
    """
    changes: list[tuple[float, bool, int, _Span]] = []
    for number, span in enumerate(spans):
        if (start := max(span.start, begin)) < (stop := min(span.end, end)):
            changes += [(start, True, number, span), (stop, False, number, span)]
    changes.sort(key=lambda change: change[:3])
    found: dict[str, float] = defaultdict(float)
    running: list[dict[int, str]] = [{} for _ in _Rank]
    before = begin
    for time, begins, number, span in changes:
        keys = next((each.values() for each in reversed(running) if each), (_GAP,))
        for key in keys:
            found[key] += (time - before) / len(keys)
        before = time
        if begins:
            running[span.rank][number] = span.key
        else:
            del running[span.rank][number]
    found[_GAP] += end - before
    return found


class _Matched:
    """The events of a trace, with the instructions of a plan that they execute.

    Raises:
      UserError: If the trace is of another program.
    """

    def __init__(self, trace: _Trace, plan: Plan, where: Path) -> None:
        self.trace, self._program = trace, plan.program
        self._works = {
            name: work for work in plan.work for name in (work.name, work.runner, work.end) if name
        }
        # A GPU's kernel without `hlo_op` has its instruction's name, with other punctuation.
        self._kernels = {re.sub(r"[.\-]", "_", name): work for name, work in self._works.items()}
        self._check(where)
        # Only if all devices of a group are in the trace, it shows which of them came last.
        sizes = {each.name: each.group_size for each in plan.collectives}
        self._shared = {name for name, size in sizes.items() if size == len(trace)}

    def work(self, event: _Event) -> Work | None:
        """Returns the instruction of an event; None if it is not one of the plan's program."""
        if event.program not in ("", self._program):
            return None
        return self._works.get(event.name) or self._kernels.get(event.name)

    def executed(self, event: _Event) -> Work | None:
        """Returns the instruction that an event executes; None if it only waits for one's end."""
        work = self.work(event)
        return None if work is None or event.name == work.end else work

    def _check(self, where: Path) -> None:
        seconds: dict[str, float] = defaultdict(float)
        known = 0.0
        for event in (event for events in self.trace.values() for event in events):
            work = self.work(event)
            if work is not None and work.kind is WorkKind.CONTROL:
                continue  # other events are within it
            program = event.program or ("" if work is None else self._program)
            seconds[program] += event.end - event.start
            known += 0.0 if work is None else event.end - event.start
        own = seconds.pop(self._program, None)
        if own is None:
            others = (
                ", ".join(sorted(foreign(name, 60) for name in seconds if name)) or "no program"
            )
            raise UserError(
                f"{where} is the trace of another program: it has no {self._program}, the step of "
                f"the run, but {others}"
            )
        if known < _LEAST_KNOWN * own:
            raise UserError(
                f"{where} is the trace of another program: {known / own:.0%} of its time in "
                f"{self._program} is of instructions of the step as it is compiled here. The "
                "experiment has changed since, or other versions of jax and its compiler are "
                "installed"
            )

    @functools.cached_property
    def last_starts(self) -> Mapping[tuple[str, int], float]:
        """When the last device began an execution of a collective, by device and its event."""
        found: dict[tuple[str, int], float] = {}
        places: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for device, events in self.trace.items():
            for number, event in enumerate(events):
                work = self.executed(event)
                if work is not None and work.name in self._shared:
                    places[work.name][device].append(number)
        for by_device in places.values():
            # Counted from the end: an execution may have begun before the trace did.
            count = min(map(len, by_device.values()))
            if len(by_device) < len(self.trace):
                continue
            for back in range(1, count + 1):
                same = [(device, numbers[-back]) for device, numbers in by_device.items()]
                last = max(self.trace[device][number].start for device, number in same)
                found |= dict.fromkeys(same, last)
        return found

    def spans(self, device: str) -> Iterator[_Span]:
        """Yields the times of a device's events, with what they count for."""
        for number, event in enumerate(self.trace[device]):
            work, start, end = self.work(event), event.start, event.end
            if work is None:
                is_own = event.program == self._program
                key = event.name if is_own else f"{_OTHER}{event.program or 'transfers'}"
                yield _Span(start, end, _Rank.WORK, key)
            elif work.kind is WorkKind.CONTROL:
                yield _Span(start, end, _Rank.AROUND, _GAP)
            elif work.in_order or work.kind is WorkKind.KERNELS:
                yield _Span(start, end, _Rank.WORK, work.name)
            else:
                last = min(self.last_starts.get((device, number), start), end)
                yield _Span(start, last, _Rank.ASIDE, _WAITING)
                yield _Span(last, end, _Rank.ASIDE, work.name)

    def step_starts(self, device: str) -> Sequence[float]:
        """Returns when the instruction began that begins a step on a device.

        It is the first one of the last step, among those that run as often as most others do.
        """
        starts: dict[str, list[float]] = defaultdict(list)
        for event in self.trace[device]:
            work = self.executed(event)
            if work is not None and work.times == 1:
                starts[work.name].append(event.start)
        if not starts:
            return ()
        often = statistics.mode(sorted(map(len, starts.values()), reverse=True))
        # The trace may have begun within a step, whose last part then is one more.
        usual = [each for each in starts.values() if len(each) in (often, often - 1)]
        return min(usual, key=lambda each: each[-1])


_LEAST_KNOWN = 0.5  # share of the time in the step's program


@dataclass(frozen=True)
class _Measured:
    """The seconds of a step in a trace, on the average device.

    Attributes:
      steps: Number of whole steps.
      left_out: Steps that do not count, because other programs ran in them.
      others: Names of these programs.
      seconds: Seconds of a step by key; see `_Span`. They add up to those of the step.
      executions: Executions in a step by instruction.
      transfers: Seconds of an execution of a collective after all devices have begun it.
    """

    steps: int
    left_out: int
    others: Sequence[str]
    seconds: Mapping[str, float]
    executions: Mapping[str, float]
    transfers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step on a device, from `begin` to `end` in ns; `shares` are ns by key."""

    device: str
    begin: float
    end: float
    shares: Mapping[str, float]

    @property
    def others(self) -> set[str]:
        """The keys of other programs that ran in it."""
        return {key for key in self.shares if key.startswith(_OTHER)}


def _measure(found: _Matched, where: Path) -> _Measured:
    """Returns the seconds of a step by instruction.

    Raises:
      UserError: If the trace has no whole step.
    """
    steps = []
    for device in found.trace:
        spans = list(found.spans(device))
        for begin, end in itertools.pairwise(found.step_starts(device)):
            steps.append(_Step(device, begin, end, _shares(spans, begin, end)))
    if not steps:
        raise UserError(
            f"{where} has no two steps on one device, which show where a step begins: profile "
            "several, such as --profile-steps 20:25"
        )
    # What runs beside most steps belongs to them, but not an evaluation between two of them.
    times = Counter(key for step in steps for key in step.others)
    rare = {key for key, count in times.items() if count <= len(steps) / 2}
    kept = [step for step in steps if not step.others & rare] or steps
    seconds: dict[str, float] = defaultdict(float)
    executions: dict[str, float] = defaultdict(float)
    transfers: dict[str, list[float]] = defaultdict(list)
    for step in kept:
        for key, share in step.shares.items():
            seconds[key] += share / len(kept) / 1e9
        events = found.trace[step.device]
        first, last = (
            bisect.bisect_left(events, at, key=lambda event: event.start)
            for at in (step.begin, step.end)
        )
        for number in range(first, last):
            event = events[number]
            if (work := found.executed(event)) is None:
                continue
            executions[work.name] += 1 / len(kept)
            if work.kind is WorkKind.COLLECTIVES:
                begun = found.last_starts.get((step.device, number), event.start)
                transfers[work.name].append((event.end - min(begun, event.end)) / 1e9)
    devices = len({step.device for step in steps})
    return _Measured(
        steps=round(len(kept) / devices),
        left_out=round((len(steps) - len(kept)) / devices),
        others=sorted(key.removeprefix(_OTHER) for key in rare),
        seconds=seconds,
        executions=executions,
        transfers={name: statistics.median(each) for name, each in transfers.items()},
    )


# -- The comparison of a trace with a plan ---------------------------------------------------------


class TimeClass(enum.StrEnum):
    """A class of the time of a step."""

    PRODUCTS = "products"
    KERNELS = "kernels"
    VECTOR = "vector"
    COLLECTIVES = "exposed collectives"
    WAITING = "waiting for other devices"
    CALLBACKS = "callbacks to the host"
    GAPS = "host gaps"
    UNKNOWN = "not in the plan"
    OTHER = "other programs"


_CLASSES = {
    WorkKind.PRODUCTS: TimeClass.PRODUCTS,
    WorkKind.KERNELS: TimeClass.KERNELS,
    WorkKind.VECTOR: TimeClass.VECTOR,
    WorkKind.COLLECTIVES: TimeClass.COLLECTIVES,
    WorkKind.HOST: TimeClass.CALLBACKS,
    WorkKind.CONTROL: TimeClass.GAPS,
}
ALWAYS_SHOWN = (
    *(TimeClass.PRODUCTS, TimeClass.KERNELS, TimeClass.VECTOR, TimeClass.COLLECTIVES),
    TimeClass.GAPS,
)
"""The classes that have a row without time, too."""


@dataclass(frozen=True)
class ClassTime:
    """Seconds of a step in a class; `predicted` is None if a plan does not predict it."""

    name: TimeClass
    predicted: float | None
    measured: float


@dataclass(frozen=True)
class InstructionTime:
    """Seconds of a step in an instruction; of a collective only those in which nothing else runs.

    Attributes:
      predicted: 0 for an instruction that the plan does not have.
      times: Executions in a step; None for an instruction that the plan does not have.
      work: What the plan knows of it; None if it is not in the plan.
    """

    name: str
    kind: TimeClass
    predicted: float
    measured: float
    times: float | None
    work: Work | None

    @property
    def excess(self) -> float:
        """Seconds by which it is slower than predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class Comparison:
    """The steps in a trace, and the same steps in a plan.

    Attributes:
      steps: Number of whole steps in the trace.
      devices: Number of devices in the trace.
      predicted: Seconds of a step in the plan.
      measured: Seconds of a step in the trace.
      classes: The classes of `TimeClass`, which add up to `measured`.
      instructions: All instructions, the one with the largest excess first.
      others: Seconds of a step in other programs, by name.
      transfers: Seconds of an execution of a collective, without waiting for other devices.
      notes: What the figures do not cover.
    """

    steps: int
    devices: int
    predicted: float
    measured: float
    classes: Sequence[ClassTime]
    instructions: Sequence[InstructionTime]
    others: Mapping[str, float]
    transfers: Mapping[str, float]
    notes: Sequence[str] = ()


def compare(plan: Plan, files: Sequence[Path], processes: int) -> Comparison:
    """Compares the steps in a trace with their plan, which has times.

    Args:
      files: The trace, a file for each process that has written one.
      processes: Number of processes of the run.

    Raises:
      UserError: If the trace cannot be read, is of another program or of other devices, or has less
        than two steps.
    """
    trace, where = read_trace(files), files[0].parent
    if len(trace) * processes != plan.used_devices * len(files):
        raise UserError(
            f"{where} has {len(trace)} devices of {len(files)} of {processes} processes, and the "
            f"last start of the run had {plan.used_devices} devices in all: profile it again"
        )
    found = _Matched(trace, plan, where)
    measured = _measure(found, where)
    works = {work.name: work for work in plan.work}
    predicted = _predicted(plan)
    instructions = [
        InstructionTime(
            name,
            TimeClass.UNKNOWN if work is None else _CLASSES[work.kind],
            predicted.get(name, 0.0),
            measured.seconds.get(name, 0.0),
            measured.executions.get(name),
            work,
        )
        for name in {**works, **measured.seconds}
        if not name.startswith("\0") and name != _GAP
        for work in [works.get(name)]
        if work is None or work.kind is not WorkKind.CONTROL
    ]
    instructions.sort(key=lambda each: -each.excess)
    others = {
        key.removeprefix(_OTHER): seconds
        for key, seconds in measured.seconds.items()
        if key.startswith(_OTHER)
    }
    return Comparison(
        steps=measured.steps,
        devices=len(trace),
        predicted=_times(plan).estimate,
        measured=sum(measured.seconds.values()),
        classes=_classes(plan, instructions, measured, others),
        instructions=instructions,
        others=dict(sorted(others.items(), key=lambda item: -item[1])),
        transfers=measured.transfers,
        notes=[*_notes(plan, measured), *_absent(trace, plan)],
    )


def _times(plan: Plan) -> Times:
    if plan.times is None:
        raise UserError(
            f"the plan for {plan.topology} has no times to compare with: by the plan, the step "
            "does not fit in the memory of a device"
        )
    return plan.times


def _predicted(plan: Plan) -> Mapping[str, float]:
    """Returns the seconds of each instruction in a step; of collectives those that are exposed."""
    assert plan.chip is not None
    overlap = _times(plan).overlap
    found = {}
    for work in plan.work:
        known = work if not math.isnan(work.flops) else dataclasses.replace(work, flops=0.0)
        found[work.name] = instruction_seconds(known, plan.chip, overlap)
    for kernel in plan.kernels:
        found[kernel.instruction] = kernel.seconds
    for each in plan.collectives:
        hidden = each.overlapped and overlap is not Overlap.NOTHING
        found[each.name] = 0.0 if hidden or math.isnan(each.seconds) else each.seconds
    return found


def _classes(
    plan: Plan,
    instructions: Sequence[InstructionTime],
    measured: _Measured,
    others: Mapping[str, float],
) -> Sequence[ClassTime]:
    times = _times(plan)
    exposed = times.waiting + (times.overlapped if times.overlap is Overlap.NOTHING else 0.0)
    seconds, by_plan = dict.fromkeys(TimeClass, 0.0), dict.fromkeys(TimeClass, 0.0)
    for each in instructions:
        seconds[each.kind] += each.measured
        by_plan[each.kind] += each.predicted
    seconds[TimeClass.GAPS] += measured.seconds.get(_GAP, 0.0)
    seconds[TimeClass.WAITING] += measured.seconds.get(_WAITING, 0.0)
    seconds[TimeClass.OTHER] += sum(others.values())
    predicted: dict[TimeClass, float | None] = {
        TimeClass.PRODUCTS: by_plan[TimeClass.PRODUCTS],
        TimeClass.KERNELS: times.kernels,
        TimeClass.VECTOR: by_plan[TimeClass.VECTOR],
        TimeClass.COLLECTIVES: exposed,
        TimeClass.GAPS: times.host or None,
    }
    return [
        ClassTime(name, predicted.get(name), seconds[name])
        for name in TimeClass
        if seconds[name] or name in ALWAYS_SHOWN
    ]


def _absent(trace: _Trace, plan: Plan) -> Sequence[str]:
    if len(trace) == plan.used_devices:
        return []
    return [
        f"the trace has {len(trace)} of {plan.used_devices} devices, those of process 0: how long "
        "they wait for the others is among the exposed collectives"
    ]


_LARGE_GAP = 0.1  # share of the step


def _notes(plan: Plan, measured: _Measured) -> Sequence[str]:
    hidden = [
        work.line or work.op_name or work.name
        for work in plan.work
        if work.kind is WorkKind.HOST and work.times and work.name not in measured.executions
    ]
    notes = [
        f"the trace has no event of the callback at {line}: its time is among the host gaps"
        for line in dict.fromkeys(hidden)
    ]
    if measured.left_out:
        others = ", ".join(foreign(name, 60) for name in measured.others)
        notes.append(
            f"{measured.left_out} of {measured.left_out + measured.steps} steps are left out, in "
            f"which other programs ran: {others}"
        )
    if measured.seconds.get(_GAP, 0.0) > _LARGE_GAP * sum(measured.seconds.values()):
        notes.append(
            "the profiler records the Python calls of the host, which is slower for it: without "
            "the profiler the host gaps are shorter"
        )
    return notes


# -- Rates measured by a trace ---------------------------------------------------------------------

_LEAST_EVENTS = 20  # executions, on all devices
_LEAST_SHARE = 0.01  # of the step
_LEAST_STEPS = 3
_LEAST_OWN = 0.1  # of a measured time: what remains of it without another part
_TINY = 2**16  # bytes of a collective: its time is the latency


@dataclass(frozen=True)
class Calibration:
    """Rates of a chip that a trace has measured.

    Attributes:
      chip: The chip with them.
      rates: The measured rates, by the names of `Chip`.
      evidence: The source of each rate in words, or why it was not measured.
    """

    chip: Chip
    rates: Mapping[str, Any]
    evidence: Mapping[str, str]


def calibrate(plan: Plan, comparison: Comparison, run: str) -> Calibration:
    """Returns the rates of the plan's chip that the trace of a run has measured.

    The plan has the published rates or, of virtual devices, those of loops.
    """
    base, overlap = plan.chip, _times(plan).overlap
    assert base is not None
    found = _Evidence(comparison)
    if base.clock is not None and overlap is Overlap.ALL:
        chip = _by_cycles(base, base.clock, found)
    else:
        chip = _by_operations(base, overlap, found)
    chip = _links(plan, chip, found)
    if comparison.steps < _LEAST_STEPS:
        found.words["gap"] = f"not measured: {comparison.steps} steps, of at least {_LEAST_STEPS}"
    else:
        found.words["gap"] = f"{comparison.steps} steps"
        gaps = sum(x.measured for x in comparison.classes if x.name is TimeClass.GAPS)
        chip = dataclasses.replace(chip, gap=gaps)
    measured = {
        name: getattr(chip, name)
        for name in _RATES
        # Of virtual devices all rates are measured, if not by the trace then by loops.
        if base.is_measured or getattr(chip, name) != getattr(base, name)
    }
    source = f"{MEASURED} on {datetime.datetime.now(datetime.UTC).date()} by {run}"
    return Calibration(dataclasses.replace(chip, source=source), measured, found.words)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Seconds of an instruction in a step, by the plan's rates and measured, and its executions."""

    predicted: float
    measured: float
    executions: float


class _Evidence:
    """The instructions of a comparison that show rates, and what they show, in words."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.rows = [(x.work, x) for x in comparison.instructions if x.work is not None and x.times]
        self.words: dict[str, str] = {}

    def sample(
        self, row: InstructionTime, predicted: float, measured: float, taken: float = 0.0
    ) -> _Sample:
        """Returns the times of an instruction, without a part of the measured one."""
        executions = (row.times or 0.0) * self.comparison.steps * self.comparison.devices
        return _Sample(predicted, max(measured - taken, _LEAST_OWN * measured), executions)

    def factor(self, name: str, samples: Iterable[_Sample]) -> float:
        """Returns by what the times must be multiplied that follow from a rate; 1 if unknown.

        The factor has the smallest sum of absolute errors, so that a few slow instructions do not
        decide it: it is the median of the ratios, weighted with the predicted times.
        """
        known = [each for each in samples if each.predicted > 0 and each.measured > 0]
        executions = round(sum(each.executions for each in known))
        share = sum(each.measured for each in known) / self.comparison.measured
        text = self.words[name] = f"{executions:,} executions, {share:.1%} of the step"
        if executions < _LEAST_EVENTS or share < _LEAST_SHARE:
            least = f"of at least {_LEAST_EVENTS} and {_LEAST_SHARE:.0%}"
            self.words[name] = f"not measured: {text}, {least}"
            return 1.0
        ratios = sorted((each.measured / each.predicted, each.predicted) for each in known)
        weights = itertools.accumulate(weight for _, weight in ratios)
        half = sum(weight for _, weight in ratios) / 2
        return next(ratio for (ratio, _), sum_ in zip(ratios, weights, strict=True) if sum_ >= half)


def _slower(chip: Chip, factor: float, name: str) -> Chip:
    """Returns a chip with another rate; exactly the same chip for a factor of 1."""
    return (
        chip if factor == 1 else dataclasses.replace(chip, **{name: getattr(chip, name) / factor})
    )


def _by_cycles(chip: Chip, clock: float, found: _Evidence) -> Chip:
    """Returns a chip with the measured rates of instructions that take the compiler's cycles."""
    busy, slow = [], []
    for work, row in found.rows:
        cycles, waiting = work.cycles / clock, work.bytes * chip.devices / chip.bandwidth
        if work.in_order and waiting > cycles:
            slow.append(found.sample(row, waiting, row.measured))
        elif work.in_order:
            busy.append(found.sample(row, cycles, row.measured))
    chip = _slower(chip, found.factor("clock", busy), "clock")
    return _slower(chip, found.factor("bandwidth", slow), "bandwidth")


def _by_operations(chip: Chip, overlap: Overlap, found: _Evidence) -> Chip:
    """Returns a chip with the measured rates of products and of all other instructions."""
    others = [(w, row) for w, row in found.rows if w.kind is WorkKind.VECTOR]
    samples = [found.sample(row, row.predicted, row.measured) for _, row in others]
    factor = found.factor("bandwidth", samples)
    elements = {kind: rate / factor for kind, rate in chip.element_rates.items()}
    chip = dataclasses.replace(_slower(chip, factor, "bandwidth"), element_rates=elements)
    products: dict[str, list[_Sample]] = {"flops": []}
    if chip.float32_flops is not None:
        products["float32_flops"] = []
    for work, row in found.rows:
        if work.kind is not WorkKind.PRODUCTS or not work.flops > 0:
            continue
        name = "float32_flops" if work.dtype == "f32" and len(products) > 1 else "flops"
        rest = 0.0  # the time of its arrays, if that is added
        if overlap is not Overlap.ALL:
            rest = instruction_seconds(dataclasses.replace(work, flops=0.0), chip, overlap)
        seconds = work.flops * chip.devices / getattr(chip, name)
        products[name].append(found.sample(row, seconds, row.measured, rest))
    for name, each in products.items():
        chip = _slower(chip, found.factor(name, each), name)
    return chip


def _links(plan: Plan, chip: Chip, found: _Evidence) -> Chip:
    """Returns a chip with the measured latency and bandwidths of its links."""
    rows = {row.name: row for row in found.comparison.instructions if row.times}
    alone = [
        (each, rows[each.name], found.comparison.transfers[each.name])
        for each in plan.collectives
        if each.name in found.comparison.transfers and each.name in rows
        if not each.overlapped and not math.isnan(each.seconds) and each.link != WITHIN
    ]
    tiny = [(row, seconds) for each, row, seconds in alone if each.bytes <= _TINY]
    executions = sum(found.sample(row, 0.0, seconds).executions for row, seconds in tiny)
    before, latency = chip.latency, chip.latency
    found.words["latency"] = f"{round(executions):,} executions of tiny collectives"
    if round(executions) < _LEAST_EVENTS:
        found.words["latency"] = (
            f"not measured: {found.words['latency']}, of at least {_LEAST_EVENTS}"
        )
    else:
        latency = statistics.median(seconds for _, seconds in tiny)
    samples: dict[str, list[_Sample]] = {"link": [], "network": []}
    for each, row, seconds in alone:
        if each.bytes > _TINY:
            name, times = "network" if each.link in NETWORKS else "link", row.times or 0.0
            transfer = each.seconds - each.times * before
            taken = times * latency
            samples[name].append(found.sample(row, transfer, times * seconds, taken))
    for name, known in samples.items():
        if known:
            chip = _slower(chip, found.factor(name, known), name)
    return dataclasses.replace(chip, latency=latency)


# -- The file with measured rates of a chip --------------------------------------------------------

_RATES = (
    *("flops", "float32_flops", "bandwidth", "link", "network", "latency", "clock", "gap"),
    "element_rates",
)
_VIRTUAL = "cpu"
_MAY_BE_ZERO = ("latency", "gap", "network")  # where there is none
NO_RATES = "none"
"""The value of --rates for the published rates."""


def rates_file(topology: Topology, given: str | None) -> Path | None:
    """Returns the file with the rates of a topology's chip; None for the published rates.

    `given` is --rates. By default the file is the chip's in the cache of the user; virtual devices
    share the machine, so each number of them has its own rates.
    """
    if given == NO_RATES:
        return None
    if given is not None:
        return Path(given)
    return cache_folder() / "rates" / f"{_chip_name(topology)}.json"


def _chip_name(topology: Topology) -> str:
    if topology.platform == "cpu" or topology.chip is None:
        return str(topology).replace(":", "-")
    return topology.chip.name


def write_rates(file: Path, topology: Topology, calibration: Calibration) -> None:
    """Writes measured rates of a chip.

    Raises:
      UserError: If the file cannot be written.
    """
    content = {
        "chip": _chip_name(topology),
        "source": calibration.chip.source,
        "rates": calibration.rates,
        "evidence": calibration.evidence,
    }
    try:
        make_folder(file.parent)
        with replaced(file) as out:
            out.write(json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        raise UserError(f"--rates {file} cannot be written: {error.strerror}") from error


def with_rates(topology: Topology, given: str | None) -> Topology:
    """Returns a topology with the measured rates of its chip; unchanged if there are none.

    Raises:
      UserError: If the file that --rates names is missing, is of another chip, or is not valid.
    """
    file = rates_file(topology, given)
    if file is None or (given is None and not file.exists()):
        return topology
    try:
        content = json.loads(file.read_bytes())
        name, source, rates = content["chip"], content["source"], dict(content["rates"])
        numbers = {**rates, **rates.get("element_rates", {})}
        numbers.pop("element_rates", None)
        bad = [
            key
            for key, x in numbers.items()
            if x is not None and not (0 < x < math.inf or (x == 0 and key in _MAY_BE_ZERO))
        ]
        if bad or not {*rates} <= {*_RATES} or not str(source).startswith(MEASURED):
            raise ValueError(f"rates are positive numbers, by these names: {', '.join(_RATES)}")
        base = topology.chip or Chip(
            name=_VIRTUAL,
            flops=rates["flops"],
            memory=0,
            bandwidth=rates["bandwidth"],
            links=1,
            link=rates["link"],
            network=0.0,
            torus=0,
            devices=1,
            source=MEASURED,
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(
            f"--rates {file} is not a file of rates: {why}; write it with plan --calibrate RUN, "
            f"remove it, or give --rates {NO_RATES}"
        ) from error
    if name != _chip_name(topology):
        raise UserError(
            f"--rates {file} has the rates of {foreign(name)}, and the topology is {topology}: "
            f"leave it out, or give --rates {NO_RATES}"
        )
    chip = dataclasses.replace(base, **rates, source=f"{source} ({file})")
    return dataclasses.replace(topology, chip=chip)
