"""The figures of a plan as JSON, as tables, and in sentences."""

import dataclasses
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.document.blocks import NoteBlock, TableBlock
from spmdtrain.document.terminal import byte_size, duration
from spmdtrain.plan import planner
from spmdtrain.plan.advice import Advice
from spmdtrain.plan.failures import failure_assumptions
from spmdtrain.plan.instruction_work import CUDNN_EFFICIENCY, KERNEL_EFFICIENCY, PlannedKernel
from spmdtrain.plan.measurement import Measured
from spmdtrain.plan.profile import Comparison, InstructionTime
from spmdtrain.plan.summary import Buffer
from spmdtrain.plan.time_model import Overlap, PlannedCollective, Traffic
from spmdtrain.sharding.layout import Row
from spmdtrain.step.flops import CONVENTION, MATRIX_UNIT, SHORT_CONVENTION, CostBasis
from spmdtrain.xla.chips import CHIPS, MEASURED

# -- Terminal output of plans: tables and sentences ------------------------------------------------

_MOST_ROWS = 12
_MOST_BUFFERS = 8
_FULL = 0.8  # fraction of a device's memory from which on the largest temporaries are listed


def plan_blocks(plan: dict[str, Any]) -> list[TableBlock | NoteBlock]:
    """Returns the tables and notes of one plan for a terminal, from `plan_as_json`."""
    chips = f"{plan['chips']} chip{'s' if plan['chips'] > 1 else ''}"
    batch = f"global batch {plan['global_batch_size']}"
    blocks: list[TableBlock | NoteBlock] = [
        NoteBlock(f"{plan['topology']}: {chips}, {plan['placement']}; {batch}"),
        NoteBlock(compiled_by(plan)),
        *memory_blocks(plan),
    ]
    if plan["collectives"]:
        blocks += [_collectives(plan["collectives"]), NoteBlock(sent_sentence(plan["sent"]))]
    if plan["time"]:
        blocks.append(_time(plan))
    elif plan["flops"]["step"]:
        model = f"{plan['flops']['model']:.4g}"
        blocks.append(NoteBlock(f"model FLOPs of a step: {model} ({SHORT_CONVENTION})"))
    if plan["measured"]:
        blocks.append(NoteBlock(measured_sentence(plan)))
    blocks += failure_blocks(plan)
    blocks += [NoteBlock(f"note: {note}") for note in all_notes(plan)]
    if plan["time"]:
        blocks.append(NoteBlock(assumptions(plan)))
    return blocks


def memory_blocks(plan: dict[str, Any]) -> list[TableBlock | NoteBlock]:
    """Returns the memory of a device and its largest temporaries, from `plan_as_json`."""
    memory = plan["memory"]
    blocks: list[TableBlock | NoteBlock] = [_memory(memory), NoteBlock(verdict(plan))]
    if memory["buffers"] and (memory["limit"] or 0) * _FULL < memory["peak"]:
        columns = ("largest temporaries", "bytes", "shape on a device", "source")
        rows = buffer_rows(memory["buffers"][:_MOST_BUFFERS])
        blocks.append(TableBlock(columns, rows, numeric=frozenset({1})))
    return blocks


def failure_blocks(plan: dict[str, Any]) -> list[TableBlock | NoteBlock]:
    """Returns what snapshots cost, and the goodput of a job that fails, from `plan_as_json`."""
    blocks: list[TableBlock | NoteBlock] = []
    if plan["snapshots"]:
        blocks.append(NoteBlock(snapshots_sentence(plan["snapshots"])))
    if (failures := plan["failures"]) is None:
        return blocks
    rows = []
    for row in failures["rows"]:
        every = run_time(row["interval"])
        every = every if row["steps"] is None else f"{row['steps']:,} steps, {every}"
        rows.append((row["what"], every, run_time(row["lost"]), f"{row['goodput']:.2%}"))
    columns = ("what", "every", "lost per failure", "goodput")
    blocks.append(TableBlock(columns, rows, numeric=frozenset({1, 2, 3})))
    return [*blocks, NoteBlock(sentence(failure_assumptions(failures)))]


def snapshots_sentence(cost: dict[str, Any]) -> str:
    """Returns a sentence about the host memory and the traffic of snapshots."""
    generations = f"2 x {byte_size(cost['kept'])} of its own"
    if cost["copies"]:
        generations += f" and 2 x {byte_size(cost['copies'])} of another host's"
    hosts = f", one on each of {cost['hosts']:,} hosts" if cost["hosts"] > 1 else ""
    text = (
        f"snapshots need {byte_size(cost['at_rest'])} of host memory per process{hosts} "
        f"({generations}), and {byte_size(cost['kept'])} more while one is taken"
    )
    if not cost["sent"]:
        return f"{text}; nothing is sent to another host"
    text += f"; for each, a process sends {byte_size(cost['sent'])} to the next host"
    if cost["seconds"] is None:
        return text
    return f"{text}, in at least {step_seconds(cost['seconds'])}, at the network's peak rate"


def advice_blocks(plan: dict[str, Any]) -> list[NoteBlock]:
    """Returns the advice for a plan for a terminal, from `plan_as_json`."""
    return [NoteBlock(f"advice: {_advice(each)}") for each in plan["advice"]]


# -- the comparison with a trace --

_WORST = 10  # instructions


def trace_blocks(found: dict[str, Any]) -> list[TableBlock | NoteBlock]:
    """Returns the tables of a comparison for a terminal, from `comparison_as_json`."""
    rows = []
    for each in found["classes"]:
        rows.append((each["name"], *_pair(each["predicted"], each["measured"])))
    rows.append(("step", *_pair(found["predicted"], found["measured"])))
    steps = f"{found['steps']} steps on {found['devices']} devices"
    blocks: list[TableBlock | NoteBlock] = [
        NoteBlock(f"{found['trace']}: {steps}"),
        TableBlock(
            ("time of a step", "predicted", "measured", "ratio"),
            rows,
            numeric=frozenset({1, 2, 3}),
            totals=1,
        ),
    ]
    if found["others"]:
        parts = (f"{name} {step_seconds(seconds)}" for name, seconds in found["others"].items())
        blocks.append(NoteBlock(f"other programs, in a step: {', '.join(parts)}"))
    blocks.append(
        TableBlock(
            ("slower than predicted", "by", "measured", "class", "shape", "of", "source"),
            [_worst(each) for each in found["worst"]],
            numeric=frozenset({1, 2}),
            whole=frozenset({1, 2, 4}),
            optional=frozenset({3, 4, 5}),
        )
    )
    return [*blocks, *(NoteBlock(f"note: {note}") for note in found["notes"])]


def _pair(predicted: float | None, measured: float) -> tuple[str, str, str]:
    """Returns the texts of a predicted time, a measured time and their ratio."""
    if not predicted:
        return "" if predicted is None else "0", step_seconds(measured) if measured else "0", ""
    return step_seconds(predicted), step_seconds(measured), f"{measured / predicted:.2f}"


def _worst(row: dict[str, Any]) -> tuple[str, ...]:
    times = "" if row["times"] is None or round(row["times"], 2) == 1 else f"{row['times']:.3g} x "
    source = short_line(row["line"]) or row["op_name"].partition("/")[2]
    return (
        f"{times}{row['name']}",
        step_seconds(row["excess"]),
        step_seconds(row["measured"]),
        row["class"],
        row["shape"],
        row["parameter"],
        source,
    )


def calibration_blocks(found: dict[str, Any]) -> list[TableBlock | NoteBlock]:
    """Returns what a calibration has measured, from `--json`'s field of this name."""
    rows = []
    for name, words in found["evidence"].items():
        before, after = found["before"][name], found["after"][name]
        same = before == after
        rows.append((name, _rate(before), "" if same else _rate(after), words))
    columns = ("rate", "before", "measured", "from")
    step = found["predicted"]
    return [
        TableBlock(columns, rows, numeric=frozenset({1, 2})),
        NoteBlock(
            f"with the measured rates the plan predicts {step_seconds(step['after'])} for a step, "
            f"before {step_seconds(step['before'])}; measured {step_seconds(step['measured'])}"
        ),
        NoteBlock(f"rates of {found['chip']}: {found['file']}; plans use them until it is removed"),
    ]


def _rate(rate: float | None) -> str:
    """Returns a rate per second, or a time."""
    if rate is None or rate == 0:
        return ""
    return step_seconds(rate) if rate < 1 else f"{scaled(rate)}/s"


def _memory(memory: dict[str, Any]) -> TableBlock:
    rows = [
        (kind, "unknown" if size is None else byte_size(size))
        for kind, size in memory_by_kind(memory).items()
    ]
    rows.append(("peak", byte_size(memory["peak"])))
    return TableBlock(("memory of a device", ""), rows, numeric=frozenset({1}), totals=1)


def buffer_rows(buffers: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Returns the use, size, shape and source of temporary arrays."""
    rows = []
    for buffer in buffers:
        times = f"{buffer['count']} x " if buffer["count"] > 1 else ""
        size = times + byte_size(buffer["bytes"])
        rows.append((buffer["use"], size, buffer["shape"], _buffer_source(buffer)))
    return rows


def _collectives(collectives: Sequence[dict[str, Any]]) -> TableBlock:
    """Returns a table of collectives, grouped by kind and source line, the longest first."""
    groups = group_collectives(collectives)
    more = len(groups) - _MOST_ROWS
    return TableBlock(
        ("collective", "axes", "times", "bytes", "time", "overlap", "carries", "source"),
        [
            (
                group.kind,
                " ".join(group.axes) or "?",
                f"{group.times:g}",
                byte_size(int(group.bytes)),
                "" if group.seconds is None else step_seconds(group.seconds),
                "yes" if group.overlapped else "no",
                group.carries,
                group.source,
            )
            for group in groups[:_MOST_ROWS]
        ],
        numeric=frozenset({2, 3, 4}),
        note=f"and {more} shorter ones" if more > 0 else "",
        whole=frozenset(range(6)),
        optional=frozenset({6, 7}),
    )


def _time(plan: dict[str, Any]) -> TableBlock:
    time, again = plan["time"], plan["flops"]["again"]
    on_cpu = uses_measured_rates(plan)
    parts = [(name, step_seconds(seconds), source) for name, seconds, source in time_parts(time)]
    totals = [
        ("lower bound", step_seconds(time["bound"]), ""),
        (f"estimate, mostly {time['rules']}", step_seconds(time["estimate"]), ""),
        ("model FLOPs", f"{plan['flops']['model']:.4g}", SHORT_CONVENTION),
    ]
    if again:
        totals.append(("recomputed FLOPs", f"{again:.4g}", ""))
    if time["utilization"] is not None and not on_cpu:
        name = f"MFU, {utilization_kind(time)}"
        totals.append((name, f"{time['utilization']:.1%}", SHORT_CONVENTION))
    totals.append(("examples/s", f"{time['examples_per_second']:,.0f}", ""))
    if time["tokens_per_second"]:
        totals.append(("tokens/s", f"{time['tokens_per_second']:,.0f}", ""))
    totals.append((f"all {time['steps']:,} steps", duration(time["run"]), ""))
    if not on_cpu:
        totals.append(("chip-hours", f"{time['chip_hours']:,.3g}", ""))
    columns = ("time of a step", "", "from")
    return TableBlock(columns, [*parts, *totals], numeric=frozenset({1}), totals=len(totals))


def _advice(advice: dict[str, Any]) -> str:
    if advice["with_options"] is None:
        tried = f" (tried {'; '.join(advice['tried'])})" if advice["tried"] else ""
        if advice["rescaled"]:
            return (
                f"{advice['finding']}\n  no option of the step fixes it{tried}; {rescaling(advice)}"
            )
        return f"{advice['finding']}\n  no known option fixes it{tried}"
    changes = [
        f"{name} {before} -> {after}" if before else f"{name} {after}"
        for name, before, after in advice_figures(advice)
    ]
    return f"{advice['finding']}\n  {advice['options']}: {', '.join(changes)}"


# -- several topologies ----------------------------------------------------------------------------


def scaling_blocks(
    plans: Sequence[dict[str, Any]], changes: Sequence[str]
) -> list[TableBlock | NoteBlock]:
    """Returns a table of several plans (`plan_as_json`) and the changes from each to the next."""
    return [_side_by_side(plans), *map(NoteBlock, changes)]


def _side_by_side(plans: Sequence[dict[str, Any]]) -> TableBlock:
    rows = []
    for plan in plans:
        time, memory = plan["time"], plan["memory"]
        kinds: dict[str, float] = defaultdict(float)
        for each in plan["collectives"]:
            kinds[each["kind"]] += each["bytes"] * each["times"]
        rows.append(
            (
                plan["topology"],
                str(plan["chips"]),
                {True: "yes", False: "no", None: "?"}[plan["fits"]],
                byte_size(memory["peak"]),
                step_seconds(time["estimate"]) if time else "",
                f"{time['examples_per_second']:,.0f}" if time else "",
                f"{time['utilization']:.1%}" if time and time["utilization"] is not None else "",
                ", ".join(f"{kind} {byte_size(int(size))}" for kind, size in kinds.items()),
            )
        )
    columns = ("topology", "chips", "fits", "memory", "estimate", "examples/s", "MFU")
    numeric = frozenset({1, 3, 4, 5, 6})
    return TableBlock((*columns, "collectives"), rows, numeric, whole=frozenset(range(7)))


# -- Words for the figures of a plan, which its tables and its page share --------------------------
#
# A plan is a dict as returned by `plan_as_json`.

_MOST_PARTS = 4  # parameters with excess traffic
_LONGEST_NAME = 40
_LARGE_PART = 0.05  # fraction of the excess traffic from which on a parameter is listed
_SHORT = 10.0  # seconds
_FEW_HOURS = 0.001
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
_MEASURED_HERE = (
    "All times are estimates from the speed of products, operations on elements, memory and "
    "all-reduces measured on this machine; they omit the time to start a step, and that "
    "convolutions are slower than products."
)
_ASSUMED = (
    "All times are estimates: products at the chip's peak for their dtype, memory and links at "
    "their peak bandwidths, inputs always ready. The lower bound holds for any step of this "
    "program; the estimate adds the memory traffic of all instructions and ignores caches."
)
_CALIBRATED = (
    "All times are estimates, with the rates of products, memory and links that a run has measured "
    "(see the notes), inputs always ready. The estimate adds the memory traffic of all "
    "instructions and ignores caches."
)
_CYCLES = (
    " Instructions take the cycles of the compiler's model, which may be too many for elementwise "
    "work, or the time to read and write their arrays if that is longer."
)
_NO_CYCLES = " It also ignores the vector unit, because the compiler gives no cycles for this chip."
_KERNELS = (
    f" Kernels are assumed to reach {KERNEL_EFFICIENCY:.0%} of the peak{{padded}}, or to take the "
    "time to read and write their blocks if that is longer."
)
_CUDNN = (
    f" cuDNN's attention is assumed to reach {CUDNN_EFFICIENCY:.0%} of the peak, as measured on an "
    "H100 with causal heads of width 64 and 1,024 tokens."
)
_ONE_BY_ONE = (
    " Products, kernels and the memory traffic of everything else follow each other, as measured "
    "on an H100."
)
_PADDED = f", on dims padded to {MATRIX_UNIT} (half of that with heads of width 64)"
_PARTS = {
    "compute": "products",
    "memory": "memory traffic",
    "instructions": "instructions",
    "elements": "operations on elements",
    "kernels": "kernels",
    "overlapped": "overlapped collectives",
    "waiting": "exposed collectives",
    "host": "host gaps",
}
_INSTRUCTIONS = {
    "products": "  with products",
    "vector": "  on the vector unit",
    "memory": "  that wait for memory",
}


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one kind, over the same axes, from the same source line.

    Attributes:
      source: Source line or operation.
      times: Number of executions in a step.
      bytes: Payload of all executions.
      seconds: Time of all executions; None if unknown.
      carries: The parameters that they carry, in words.
      sent: Bytes that a device sends over each link of the topology.
    """

    kind: str
    axes: tuple[str, ...]
    overlapped: bool
    source: str
    times: float
    bytes: float
    seconds: float | None
    carries: str
    sent: dict[str, float]


def compiled_by(plan: dict[str, Any]) -> str:
    """Returns which compiler the figures of a plan come from."""
    if plan["compiler"] is None:
        return "not compiled, because the state and the batch alone do not fit"
    return f"compiled by {plan['compiler']}"


def verdict(plan: dict[str, Any]) -> str:
    """Returns a sentence that says whether the step fits, and how much memory is left."""
    memory = plan["memory"]
    if memory["limit"] is None:
        return f"needs {byte_size(memory['peak'])} per device; device memory limit unknown"
    part = f"{byte_size(memory['peak'])} of {byte_size(memory['limit'])}"
    if plan["fits"]:
        return f"fits: {part}, {1 - memory['peak'] / memory['limit']:.0%} left"
    if memory["temporaries"] is None:
        part += " for the state and the batch alone"
    return f"does not fit: {part}"


def assumptions(plan: dict[str, Any]) -> str:
    """Returns what the times of a plan assume, and what its MFU counts."""
    if uses_measured_rates(plan):
        return _MEASURED_HERE
    measured = plan["chip"]["source"].startswith(MEASURED)
    text = _CALIBRATED if measured else _ASSUMED
    if plan["time"]["instructions"]:
        text += _CYCLES
    elif plan["chip"]["torus"]:  # a TPU
        text += _NO_CYCLES
    if plan["time"]["overlap"] == Overlap.COLLECTIVES:
        text += _ONE_BY_ONE
    bases = {kernel["basis"] for kernel in plan["kernels"]}
    if CostBasis.SHAPES in bases:
        text += _CUDNN
    if bases - {CostBasis.SHAPES}:
        text += _KERNELS.format(padded=_PADDED if plan["chip"]["torus"] else "")
    return f"{text} The MFU counts {plan['flops']['convention']}."


def utilization_kind(time: dict[str, Any]) -> str:
    """Returns whether the MFU of a plan is an estimate, or a bound that ignores work on elements.

    On a GPU, work on elements counts as memory traffic, which is added to the time of products.
    """
    counts_elements = time["instructions"] or time["overlap"] == Overlap.COLLECTIVES
    return "estimated" if counts_elements else "at most"


def time_parts(time: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Returns the parts of an estimate: name, seconds, and what they follow from.

    After the instructions come their parts, by what limits them, with indented names.
    """
    parts = []
    for key, name in _PARTS.items():
        if key not in time["sources"]:
            continue
        if key != "instructions":
            parts.append((name, time[key], time["sources"][key]))
            continue
        own = time[key]
        parts.append((name, sum(own.values()), time["sources"][key]))
        parts += [(label, own[each], "") for each, label in _INSTRUCTIONS.items()]
    return parts


def uses_measured_rates(plan: dict[str, Any]) -> bool:
    """Returns whether all rates of the devices were measured, as for virtual devices."""
    return plan["chip"] is not None and plan["chip"]["name"] not in CHIPS


def memory_by_kind(memory: dict[str, Any]) -> dict[str, int | None]:
    """Returns the bytes of a device by kind, the temporaries by use; None if unknown.

    Kinds without bytes are omitted.
    """
    rows = {
        "parameters": memory["params"],
        "optimizer state": memory["optimizer"],
        "moving average": memory["average"],
        "model state, step, key": memory["other"],
        "inputs": memory["inputs"],
        **_temporaries(memory),
        "results": memory["results"],
        "program": memory["code"],
    }
    # A compiler may pad the state and the batch to the tiles of its layout.
    known = [size for size in rows.values() if size is not None]
    if len(known) == len(rows):
        rows["padding of state and inputs"] = memory["peak"] - sum(known)
    return {kind: size for kind, size in rows.items() if size is None or size > 0}


def _temporaries(memory: dict[str, Any]) -> dict[str, int | None]:
    """Returns the temporaries by use; the remainder are gaps."""
    whole, uses = memory["temporaries"], memory["uses"]
    if whole is None or not uses:
        return {"gradients, activations, temporaries": whole}
    return {**uses, "gaps and compiler internals": max(0, whole - sum(uses.values()))}


def group_collectives(collectives: Sequence[dict[str, Any]]) -> list[CollectiveGroup]:
    """Returns collectives grouped by kind and source line, those that take longest first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for each in collectives:
        groups[each["kind"], tuple(each["axes"]), each["overlapped"], source_of(each)].append(each)
    rows = []
    for (kind, axes, overlapped, source), members in groups.items():
        seconds = [each["seconds"] for each in members]
        sent: dict[str, float] = defaultdict(float)
        for each in members:
            for link, size in each["sent"].items():
                sent[link] += size
        rows.append(
            CollectiveGroup(
                kind=kind,
                axes=axes,
                overlapped=overlapped,
                source=source,
                times=sum(each["times"] for each in members),
                bytes=sum(each["bytes"] * each["times"] for each in members),
                seconds=None if None in seconds else sum(seconds),
                carries=_carried(members),
                sent=dict(sent),
            )
        )
    return sorted(rows, key=lambda row: -(row.seconds or row.bytes * 1e-12))


def _carried(collectives: Sequence[dict[str, Any]]) -> str:
    """Returns the parameters that collectives carry themselves, or as gradients or new values."""
    names: dict[str, list[str]] = defaultdict(list)
    for each in collectives:
        for carried in each["carries"]:
            produced = "new " if each["kind"] == "all-gather" else "gradient of "
            names["" if carried["is_parameter"] else produced] += carried["parameters"]
    parts = []
    for prefix, parameters in filter(operator.itemgetter(1), names.items()):
        first, *others = dict.fromkeys(parameters)
        parts.append(f"{prefix}{first}" + (f" and {len(others)} more" if others else ""))
    return ", ".join(parts)


def _buffer_source(buffer: dict[str, Any]) -> str:
    """Returns the parameter and the source line of a temporary array."""
    return " ".join(filter(None, (buffer["parameter"], source_of(buffer))))


def source_of(item: dict[str, Any]) -> str:
    """Returns the source line of an array or collective, else JAX's name of the operation."""
    name = item["op_name"].removeprefix("jit(train_step)/")
    if len(name) > _LONGEST_NAME:
        name = "..." + name[-_LONGEST_NAME:]
    return short_line(item["line"]) or name


def short_line(line: str) -> str:
    """Returns a source line without the folders above its file."""
    path, _, rest = line.rpartition("/")
    return rest if path else line


def step_seconds(seconds: float) -> str:
    """Returns a time with three digits: `26.2 ms`, `3.40 us`."""
    below = 0.9995  # larger values round up to the next unit
    unit, scale = ("s", 1.0) if seconds >= below else ("ms", 1e3)
    if seconds < below * 1e-3:
        unit, scale = "us", 1e6
    return f"{seconds * scale:#.3g}".rstrip(".") + f" {unit}"


def run_time(seconds: float) -> str:
    """Returns the duration of a run: `1:05`, or `0.65 ms` if it is a matter of seconds."""
    return duration(seconds) if seconds >= _SHORT else step_seconds(seconds)


def chip_hours(time: dict[str, Any]) -> str:
    """Returns the chip-hours of a run; a tiny number as "less than"."""
    hours = time["chip_hours"]
    return f"{hours:,.3g}" if hours >= _FEW_HOURS else f"< {_FEW_HOURS:g}"


def scaled(count: float) -> str:
    """Returns a count with three digits and an SI prefix, before a unit: `34.2 T`, `512 `."""
    power = min(max(0, int(math.log10(count)) // 3), len(_PREFIXES) - 1) if count else 0
    return f"{count / 1000**power:.3g} {_PREFIXES[power]}"


def sentence(text: str) -> str:
    """Returns a text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def sent_sentence(sent: dict[str, Any]) -> str:
    """Returns a sentence that compares the bytes sent with the minimum of the strategy."""
    text = f"each device sends {byte_size(int(sent['bytes']))} in a step"
    if sent["least"] is None:
        return text
    text += f"; the strategy needs {byte_size(int(sent['least']))}"
    excess = sent["excess"]
    if excess < 0.01 * sent["bytes"]:
        return text
    more = [x for x in sent["by_parameter"] if x["excess"] > _LARGE_PART * excess][:_MOST_PARTS]
    parts = [f"{byte_size(int(x['excess']))} of {x['parameter']} ({x['how']})" for x in more]
    text += f"; {byte_size(int(excess))} are excess"
    return f"{text}: {'; '.join(parts)}" if parts else text


def measured_sentence(plan: dict[str, Any]) -> str:
    """Returns the measured time and memory of a plan, compared with the planned ones."""
    measured, time = plan["measured"], plan["time"]
    text = f"measured on {measured['devices']}: {step_seconds(measured['step'])} per step"
    if time:
        text += f", {measured['step'] / time['estimate']:.2f} times the estimate"
    if measured["peak"]:
        part = measured["peak"] / plan["memory"]["peak"]
        text += f"; peak memory {byte_size(measured['peak'])}, {part:.2f} times the plan"
    return text


def all_notes(plan: dict[str, Any]) -> list[str]:
    """Returns the limitations of a plan's figures, and arrays that XLA replicates."""
    return [*map(_rematerialized, plan["rematerialized"]), *plan["notes"]]


def _rematerialized(array: dict[str, Any]) -> str:
    source = " ".join(filter(None, (array["parameter"], short_line(array["line"]))))
    return (
        f"{source or 'unknown source'}: {array['shape']} is replicated on every device because XLA "
        f"has no other way to reshard it from {array['given']} to {array['wanted']}; constrain it "
        "to one of the two with spmdtrain.constrain_sharding"
    )


def rescaling(advice: dict[str, Any]) -> str:
    """Returns a sentence about the plans with fewer chips or a larger batch."""
    now = step_seconds(advice["without"]["estimate"])
    parts = [
        f"with {each['options']} ({each['chips']} chip{'s' if each['chips'] > 1 else ''}, batch "
        f"{each['global_batch_size']}) a step takes {step_seconds(each['estimate'])}"
        for each in advice["rescaled"]
    ]
    kinds = [
        "fewer chips" if "--topology" in each["options"] else "a larger batch"
        for each in advice["rescaled"]
    ]
    return f"use {' or '.join(kinds)}: {', '.join(parts)} (now {now})"


def advice_figures(advice: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the figures that the options of an advice change: name, without, with.

    The advice must have options that solve the problem. A figure without the options is "" if it is
    unknown.
    """
    before, after = advice["without"], advice["with_options"]
    figures = [("memory", byte_size(before["peak"]), byte_size(after["peak"]))]
    if before["sent"]:
        figures.append(("sent", byte_size(int(before["sent"])), byte_size(int(after["sent"]))))
    if after["estimate"]:
        known = before["estimate"]
        old = step_seconds(known) if known else ""
        figures.append(("step", old, step_seconds(after["estimate"])))
    return figures


# -- The JSON form of a plan: bytes on one device, seconds of one step -----------------------------

_MOST_JSON_BUFFERS = 12


def plan_as_json(
    plan: planner.Plan,
    advised: Sequence[Advice] = (),
    measured: Measured | None = None,
    failures: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a plan as `--json` prints it; `failures` is from `FailureOptions.as_json`."""
    times, memory = plan.times, dataclasses.asdict(plan.memory)
    report: dict[str, Any] = {
        "topology": plan.topology,
        "chips": plan.chips,
        "used": plan.used,
        "devices": plan.devices,
        "placement": plan.placement,
        "global_batch_size": plan.global_batch_size,
        "compiler": plan.compiler,
        "fits": plan.fits,
        "memory": memory | {"buffers": _buffers_as_json(plan.buffers)},
        "state": [_parameter(row) for row in plan.rows],
        "collectives": list(map(_collective, plan.collectives)),
        "sent": _sent(plan.traffic),
        "rematerialized": list(map(dataclasses.asdict, plan.rematerialized)),
        "flops": {
            "model": plan.model_flops,
            "convention": CONVENTION,
            "step": plan.flops,
            "again": plan.flops_again,
            "chip": plan.flops / plan.used,
            "device": None if math.isnan(plan.products) else plan.products,
            "by_line": plan.flops_by_line,
        },
        "kernels": list(map(_kernel, plan.kernels)),
        "time": None,
        "chip": None if plan.chip is None else dataclasses.asdict(plan.chip),
        "links": list(map(dataclasses.asdict, plan.links)),
        "measured": None if measured is None else dataclasses.asdict(measured),
        "snapshots": None if plan.snapshots is None else dataclasses.asdict(plan.snapshots),
        "failures": failures,
        "advice": list(map(dataclasses.asdict, advised)),
        "notes": plan.notes,
    }
    if times is not None:
        tokens = plan.global_batch_size * plan.tokens / times.estimate
        report["time"] = dataclasses.asdict(times) | {
            "bound": times.bound,
            "estimate": times.estimate,
            "busy": times.busy,
            "rules": times.bottleneck,
            "sources": times.sources,
            "utilization": plan.utilization,
            "examples_per_second": plan.global_batch_size / times.estimate,
            "tokens_per_second": tokens or None,
            "steps": plan.steps,
            "run": plan.steps * times.estimate,
            "chip_hours": plan.steps * times.estimate * plan.chips / 3600,
        }
    return report


def _collective(collective: PlannedCollective) -> dict[str, Any]:
    seconds = None if math.isnan(collective.seconds) else collective.seconds
    return dataclasses.asdict(collective) | {"seconds": seconds}


def _kernel(kernel: PlannedKernel) -> dict[str, Any]:
    flops = None if math.isnan(kernel.flops) else kernel.flops
    return dataclasses.asdict(kernel) | {"flops": flops}


def _parameter(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "shape": row.shape,
        "dtype": row.dtype,
        "spec": row.spec,
        "bytes": row.own.device,
        "parts": row.own.parts,
        "optimizer_bytes": row.optimizer.device,
        "optimizer_parts": row.optimizer.parts,
        "average_bytes": row.average.device,
    }


def _sent(traffic: Traffic) -> dict[str, Any]:
    return {
        "bytes": traffic.bytes,
        "least": traffic.least,
        "excess": traffic.excess,
        "by_parameter": list(map(dataclasses.asdict, traffic.by_parameter)),
    }


def _buffers_as_json(buffers: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Returns the largest buffers. Equal ones are one entry with a `count`; `bytes` is of one."""
    counts = Counter(buffers)
    largest = sorted(counts, key=lambda buffer: -buffer.bytes * counts[buffer])[:_MOST_JSON_BUFFERS]
    return [dataclasses.asdict(buffer) | {"count": counts[buffer]} for buffer in largest]


def comparison_as_json(found: Comparison, trace: str) -> dict[str, Any]:
    """Returns a comparison as `--json` prints it, with the instructions of the largest excess."""
    return {
        "trace": trace,
        "steps": found.steps,
        "devices": found.devices,
        "predicted": found.predicted,
        "measured": found.measured,
        "classes": [dataclasses.asdict(each) for each in found.classes],
        "others": dict(found.others),
        "worst": [_instruction(x) for x in found.instructions[:_WORST] if x.excess > 0],
        "notes": list(found.notes),
    }


def _instruction(row: InstructionTime) -> dict[str, Any]:
    known = {} if row.work is None else dataclasses.asdict(row.work)
    return {
        "name": row.name,
        "class": row.kind,
        "predicted": row.predicted,
        "measured": row.measured,
        "excess": row.excess,
        "times": row.times,
        **{name: known.get(name, "") for name in ("shape", "parameter", "op_name", "line")},
    }
