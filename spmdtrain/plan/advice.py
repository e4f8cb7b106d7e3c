"""Advice for a plan, and changes from one topology to the next."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError
from spmdtrain.plan.planner import Plan
from spmdtrain.plan.time_model import PlannedCollective
from spmdtrain.plan.topologies import Topology, half_of, has_compiler
from spmdtrain.sharding.layout import Row
from spmdtrain.strategies import EXPERT_AXIS, SEQUENCE_AXIS, strategy

# -- Advice for a plan: options that fix known problems, with the figures before and after ---------

Replan = Callable[[Sequence[str]], Plan]
"""Plans again with additional command-line options, also of the command. Raises `UserError`."""

_NEGLIGIBLE = 0.02  # fraction of the estimated time, of the bytes sent, or of a device's memory
_SHORT = 1e-4  # seconds of a step; the start-up of each operation dominates shorter steps
_GIANT = 0.1  # fraction of the memory limit
_WORTHWHILE = 0.95  # part of the estimate that a change of numerics must leave at most
_IDLE = 0.2  # part of the estimate for products, or for exposed collectives
_MORE_EXAMPLES = 4  # times the batch
_BETTER_USE = 0.75  # part of the chips' time for an example that remains

# Without these options a TPU's compiler replaces a gather over several dims of the torus by an
# all-reduce of each device's part, padded with zeros.
_GATHER = (
    "xla_tpu_prefer_async_allgather_to_allreduce=true",
    "xla_enable_async_all_gather=true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
)
_OVERLAP = {
    "tpu": (
        ("xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",),
        (
            "xla_enable_async_all_reduce=true",
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
        ),
    ),
    "gpu": (("xla_gpu_enable_latency_hiding_scheduler=true",),),
}


@dataclass(frozen=True)
class Figures:
    """Peak bytes on a device, estimated seconds of a step, and bytes that a device sends."""

    fits: bool | None
    peak: int
    estimate: float | None
    sent: float


@dataclass(frozen=True)
class Rescaled:
    """A plan with fewer chips or a larger batch, which needs less of the chips' time per example.

    Attributes:
      options: Command-line options of that plan.
      estimate: Seconds of its step.
    """

    options: str
    chips: int
    global_batch_size: int
    estimate: float


@dataclass(frozen=True)
class Advice:
    """A problem and the options that fix it.

    Attributes:
      options: Command-line options that fix it; "" if none of the tried options does.
      with_options: Figures with the options; None if there are no options.
      tried: Options that were tried without success, each with the reason.
      rescaled: Plans with fewer chips or a larger batch, if no option fixes it.
    """

    finding: str
    options: str
    without: Figures
    with_options: Figures | None
    tried: tuple[str, ...] = ()
    rescaled: tuple[Rescaled, ...] = ()


@dataclass(frozen=True)
class _Finding:
    """A problem; `is_problem` is false of one that is none unless an option improves it."""

    text: str
    tries: Sequence[Sequence[str]]
    is_fixed: Callable[[Plan, Plan], bool]
    is_problem: bool = True


def advise(plan: Plan, config: RunConfig, topology: Topology, replan: Replan) -> list[Advice]:
    """Returns the known problems of a plan, each with the first options that fix it.

    Each try is a complete plan: it builds, traces and compiles.
    """
    if plan.fits is False:
        findings, waiting = [_too_big(plan, config)], []
    else:
        waiting = [*_reduced_gathers(plan, topology), *_waiting(plan, topology)]
        findings = [
            *_giants(plan, config),
            *_unsharded_params(plan, config),
            *_in_float32(plan, config, topology),
            *_reduced_twice(plan, config),
            *waiting,
        ]
    known: dict[tuple[str, ...], Plan | UserError] = {}
    tried = [(finding, _try(finding, plan, replan, known)) for finding in findings]
    advised = [advice for finding, advice in tried if advice.options or finding.is_problem]
    if any(advice.options for advice in advised) or not _is_idle(plan, topology):
        return advised
    if rescaled := tuple(_rescaled(plan, config, topology, replan)):
        if not waiting:
            advised.append(Advice(_little_work(plan), "", _figures(plan), None))
        *others, last = advised
        return [*others, dataclasses.replace(last, rescaled=rescaled)]
    return advised


def _try(
    finding: _Finding, plan: Plan, replan: Replan, known: dict[tuple[str, ...], Plan | UserError]
) -> Advice:
    failed: list[str] = []
    for options in map(tuple, finding.tries):
        if options not in known:
            known[options] = _replanned(options, replan)
        other = known[options]
        if isinstance(other, Plan) and finding.is_fixed(plan, other):
            return Advice(
                finding.text, " ".join(options), _figures(plan), _figures(other), tuple(failed)
            )
        why = str(other) if isinstance(other, UserError) else "no improvement"
        if isinstance(other, Plan) and other.fits is False:
            least = "at least " if other.memory.temporaries is None else ""
            why = f"needs {least}{byte_size(other.memory.peak)}"
        failed.append(f"{' '.join(options)}: {why}")
    return Advice(finding.text, "", _figures(plan), None, tuple(failed))


def _replanned(options: Sequence[str], replan: Replan) -> Plan | UserError:
    try:
        return replan(options)
    except UserError as error:  # invalid for this experiment or topology
        return error
    except RuntimeError as error:  # of the compiler, or of a library that it lacks
        return UserError(str(error).partition("\n")[0][:200])


def _figures(plan: Plan) -> Figures:
    estimate = None if plan.times is None else plan.times.estimate
    return Figures(plan.fits, plan.memory.peak, estimate, plan.traffic.bytes)


# -- known problems --------------------------------------------------------------------------------


def _too_big(plan: Plan, config: RunConfig) -> _Finding:
    limit = plan.memory.limit or 0
    splits = _splits(plan, config)
    remat = ["--remat", "full"] if config.remat == "none" else []
    batch = plan.global_batch_size / plan.batch_shards
    microbatches = [
        ["--microbatches", str(m)] for m in (4, 16) if m > config.microbatches and batch % m == 0
    ]
    tries = [*splits, *([remat] if remat else []), *microbatches]
    best = splits[-1] if splits else []
    tries += [best + remat] if best and remat else []
    tries += [best + remat + option for option in microbatches if best or remat]
    return _Finding(
        f"the step exceeds a device's memory by {byte_size(plan.memory.peak - limit)}",
        [options for options in tries if options],
        lambda _, other: other.fits is not False,
    )


def _splits(plan: Plan, config: RunConfig) -> list[list[str]]:
    """Returns options that shard more of the state."""
    current, shards = strategy(config.strategy), _max_shards(plan.rows, plan.devices)
    limit = ["--sharding.max-shards", str(shards)]
    if plan.limits_shards and shards > (current.max_shards or shards):
        return [limit]
    if plan.used_devices < 2 or current.shards_params or current.needs_rules:
        return []
    fully = ["--strategy", "fully_sharded"]
    fully += limit if shards < plan.devices else []
    return [fully] if current.shards_optimizer else [["--strategy", "zero"], fully]


def _max_shards(rows: Sequence[Row], devices: int) -> int:
    """Returns the largest divisor of `devices` that divides a dim of every large parameter."""
    most = max((row.elements for row in rows), default=0)
    dims = [
        [int(n) for n in row.shape.strip("(),").split(",") if n.strip()]
        for row in rows
        if row.elements >= max(2, most // 100)
    ]
    divisors = [shards for shards in range(devices, 0, -1) if devices % shards == 0]
    return next(
        (shards for shards in divisors if all(any(n % shards == 0 for n in d) for d in dims)), 1
    )


def _giants(plan: Plan, config: RunConfig) -> Iterator[_Finding]:
    """Finds parameters that are replicated and, with their optimizer state, fill a device."""
    limit = plan.memory.limit
    if not limit or not (splits := _splits(plan, config)):
        return
    sizes = {row: row.own.device + row.optimizer.device + row.average.device for row in plan.rows}
    giants = [row for row in plan.rows if sizes[row] >= _GIANT * limit]
    giants.sort(key=lambda row: -sizes[row])
    if giants:
        first, more = giants[0], len(giants) - 1
        others = f"; {more} more parameters are that large" if more else ""
        yield _Finding(
            f"{first.name} {first.shape} and its optimizer state, {byte_size(sizes[first])}, are "
            f"replicated on each of {plan.used_devices} devices{others}",
            splits,
            lambda now, other: other.memory.peak < 0.9 * now.memory.peak,
        )


def _unsharded_params(plan: Plan, config: RunConfig) -> Iterator[_Finding]:
    """Finds parameters that the strategy cannot shard because no dim is divisible."""
    whole = [row for row in plan.rows if row.name in plan.unsharded_params]
    size = sum(row.own.device + row.optimizer.device for row in whole)
    if not whole or size < _NEGLIGIBLE * plan.memory.peak:
        return
    shards = _max_shards(plan.rows, plan.devices)
    fully = [] if strategy(config.strategy).shards_params else ["--strategy", "fully_sharded"]
    names = ", ".join(f"{row.name} {row.shape}" for row in whole[:3])
    yield _Finding(
        f"no dim of {names}{', ...' if len(whole) > 3 else ''} is divisible by {plan.devices} "
        f"devices: {byte_size(size)} are replicated on each",
        [[*fully, "--sharding.max-shards", str(shards)]],
        lambda now, other: other.memory.peak < now.memory.peak,
    )


def _in_float32(plan: Plan, config: RunConfig, topology: Topology) -> Iterator[_Finding]:
    """Finds a model that computes in float32 on a chip that is made for bfloat16."""
    chip, times = topology.chip, plan.times
    if chip is None or topology.platform == "cpu" or config.compute_dtype != "float32":
        return
    if times is None or times.estimate < _SHORT:
        return
    products = "which a TPU multiplies in bfloat16 anyway"
    if chip.float32_flops is not None:
        slower = chip.flops / chip.float32_flops
        products = f"whose products take {slower:.2g} times as long as those of bfloat16"
    yield _Finding(
        f"the model computes in float32, {products}, and whose arrays have twice the bytes",
        [["--compute-dtype", "bfloat16"]],
        lambda now, other: _is_faster(now, other, _WORTHWHILE),
        is_problem=False,
    )


def _reduced_twice(plan: Plan, config: RunConfig) -> Iterator[_Finding]:
    """Finds parameters whose gradient is reduced more than once, such as tied embeddings."""
    elements = {row.name: row.elements for row in plan.rows}
    # By axis, because a sum over one axis of the mesh and then over another is one reduction.
    over: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    sent: dict[str, float] = {each.parameter: each.bytes for each in plan.traffic.by_parameter}
    for collective in plan.collectives:
        if collective.kind in ("all-reduce", "reduce-scatter"):
            for carried in collective.carries:
                if not carried.is_parameter:
                    names = [name for name in carried.parameters if name in elements]
                    whole = sum(elements[name] for name in names)
                    for name in names:
                        share = carried.elements * elements[name] / whole
                        for axis in collective.axes or ("",):
                            over[name][axis] += collective.times * share
    crossed = {name: max(by_axis.values()) for name, by_axis in over.items()}
    repeated = [
        name
        for name, count in crossed.items()
        if count >= 1.9 * elements[name] and sent.get(name, 0) >= _NEGLIGIBLE * plan.traffic.bytes
    ]
    once = ["--collectives.reduction", "all_reduce"]  # in the dtype of the parameters
    narrow = config.compute_dtype == "bfloat16" and config.collectives.reduce_dtype is None
    current = strategy(config.strategy)
    tries: list[list[str]] = []
    # The explicit reduction needs all parameters on each device, and whole examples.
    given = config.mesh.given()
    splits_examples = {given[SEQUENCE_AXIS], given[EXPERT_AXIS]} - {None, 1}
    if not (current.shards_params or current.needs_rules or splits_examples):
        tries = [once, [*once, "--collectives.reduce-dtype", "bfloat16"]] if narrow else [once]
    why = "automatic partitioning reduces it for each use"
    if config.microbatches > 1:
        why = "once for each microbatch or each use"
    if repeated:
        times = max(crossed[name] / elements[name] for name in repeated)
        more = ", ..." if len(repeated) > 3 else ""
        yield _Finding(
            f"the gradient of {', '.join(repeated[:3])}{more} is reduced {times:.2g} times in a "
            f"step: {why}",
            tries,
            lambda now, other: (
                other.traffic.bytes < 0.98 * now.traffic.bytes and not _is_faster(other, now)
            ),
        )


def _reduced_gathers(plan: Plan, topology: Topology) -> Iterator[_Finding]:
    """Finds gathers of parameters that a TPU's compiler replaced by all-reduces."""
    if topology.platform != "tpu" or plan.times is None:
        return
    sums = [each for each in plan.collectives if _is_summed_gather(each)]
    seconds = sum(each.seconds for each in sums)
    if seconds >= _NEGLIGIBLE * plan.times.estimate:
        size = byte_size(int(sum(each.bytes * each.times for each in sums)))
        yield _Finding(
            f"parameters are gathered as all-reduces, {size} with nothing else running: these send "
            "twice the bytes of a gather",
            [_compiler(_GATHER)],
            _is_faster,
        )


def _is_summed_gather(collective: PlannedCollective) -> bool:
    params = sum(carried.bytes for carried in collective.carries if carried.is_parameter)
    is_exposed = collective.kind == "all-reduce" and not collective.overlapped
    return is_exposed and 2 * params > collective.bytes


def _waiting(plan: Plan, topology: Topology) -> Iterator[_Finding]:
    """Finds collectives during which nothing else runs."""
    if plan.times is None or not has_compiler(topology) or topology.platform not in _OVERLAP:
        return
    if any(_reduced_gathers(plan, topology)):
        return
    part = plan.times.waiting / plan.times.estimate
    if part >= _NEGLIGIBLE and plan.times.estimate >= _SHORT:
        exposed = [x for x in plan.collectives if not x.overlapped and x.seconds > 0]
        names = ", ".join(sorted({each.kind for each in exposed}))
        yield _Finding(
            f"only collectives ({names}) run during {part:.0%} of a step",
            [_compiler(options) for options in _OVERLAP[topology.platform]],
            _is_faster,
        )


def _compiler(options: Sequence[str]) -> list[str]:
    return [word for option in options for word in ("--compiler-options", option)]


def _is_faster(now: Plan, other: Plan, part: float = 0.99) -> bool:
    if now.times is None or other.times is None:
        return False
    return other.times.estimate < part * now.times.estimate


# -- fewer chips, or a larger batch ----------------------------------------------------------------


def _is_idle(plan: Plan, topology: Topology) -> bool:
    """Returns whether a chip waits for others, or computes few products, most of the time."""
    if plan.times is None or topology.platform == "cpu":
        return False
    idle = plan.times.useful < _IDLE * plan.times.estimate
    return idle or plan.times.waiting > _IDLE * plan.times.estimate


def _little_work(plan: Plan) -> str:
    assert plan.times is not None
    products, alone = (
        seconds / plan.times.estimate for seconds in (plan.times.useful, plan.times.waiting)
    )
    examples = plan.global_batch_size / plan.used
    text = f"products take {products:.1%} of a step with {examples:,g} "
    text += f"example{'s' if examples != 1 else ''} per chip"
    return f"{text}, exposed collectives {alone:.0%}" if alone >= _NEGLIGIBLE else text


def _rescaled(
    plan: Plan, config: RunConfig, topology: Topology, replan: Replan
) -> Iterator[Rescaled]:
    """Yields plans with half the chips, and with a larger batch, that use the chips better."""
    assert plan.times is not None
    given = config.batch_size_per_device
    tries = []
    if fewer := half_of(topology):
        # The same global batch.
        more = [] if given is None else ["--batch-size-per-device", str(2 * given)]
        tries.append(["--topology", str(fewer), *more])
    name = "--global-batch-size" if given is None else "--batch-size-per-device"
    tries.append([name, str(_MORE_EXAMPLES * (given or plan.global_batch_size))])
    now = plan.times.estimate * plan.chips / plan.global_batch_size
    for options in tries:
        other = _replanned(options, replan)
        if isinstance(other, UserError) or other.fits is False or other.times is None:
            continue
        estimate = other.times.estimate
        if estimate * other.chips / other.global_batch_size < _BETTER_USE * now:
            yield Rescaled(" ".join(options), other.chips, other.global_batch_size, estimate)


# -- Qualitative changes from the plan for one topology to the plan for the next -------------------

_LARGE_CHANGE = 0.05  # fraction of a step


def describe_changes(plans: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the changes from each plan to the next, as lines."""
    return [
        f"{before['topology']} to {after['topology']}: {event}"
        for before, after in itertools.pairwise(plans)
        for event in events(before, after)
    ]


def events(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields the qualitative changes between the plans (`plan_as_json`) of two topologies."""
    if before["fits"] != after["fits"] and None not in (before["fits"], after["fits"]):
        yield "fits" if after["fits"] else "no longer fits"
    yield from _shards(before, after)
    yield from _kinds(before, after)
    links = [{each["link"] for each in plan["collectives"]} for plan in (before, after)]
    for link in sorted(x for x in links[1] - links[0] if x.startswith("the network")):
        yield f"collectives cross {link}"
    times = before["time"], after["time"]
    if all(times):
        waits = [time["waiting"] / time["estimate"] for time in times]
        if abs(waits[1] - waits[0]) > _LARGE_CHANGE:
            yield f"only collectives run in {waits[1]:.0%} of a step ({waits[0]:.0%} before)"
        if times[0]["rules"] != times[1]["rules"]:
            yield f"the bottleneck is {times[1]['rules']} ({times[0]['rules']} before)"


def _shards(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields sharded state whose number of shards grows less than the number of devices."""
    growth = after["devices"] / before["devices"]
    old_rows = {row["name"]: row for row in before["state"]}
    lagging: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for row in after["state"]:
        old = old_rows.get(row["name"], row)
        own, optimizer = (
            row[key] if old[key] > 1 and row[key] / old[key] < growth else None
            for key in ("parts", "optimizer_parts")
        )
        name = f"{row['name']} {row['shape']}"
        if own is not None:
            lagging["", old["parts"], own].append(name)
        elif optimizer is not None:
            lagging["optimizer state of ", old["optimizer_parts"], optimizer].append(name)
    for (prefix, old_parts, parts), names in lagging.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        now = f"{parts} shards" if parts > 1 else "replicated"
        still = "still " if parts == old_parts else ""
        yield (
            f"{prefix}{names[0]}{more}: {still}{now} ({old_parts} shards before) on {growth:g} "
            "times the devices"
        )


def _kinds(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields parameters or gradients whose kind of collective changes."""
    old, new = _by_parameter(before), _by_parameter(after)
    changed: dict[tuple[bool, str, str], list[str]] = defaultdict(list)
    for (name, is_parameter), kinds in new.items():
        before_kinds = old.get((name, is_parameter), set())
        if before_kinds and kinds != before_kinds:
            key = is_parameter, ", ".join(sorted(before_kinds)), ", ".join(sorted(kinds))
            changed[key].append(name)
    for (is_parameter, old_kinds, new_kinds), names in changed.items():
        prefix = "" if is_parameter else "gradient or new value of "
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{prefix}{names[0]}{more}: sent by {new_kinds} ({old_kinds} before)"


def _by_parameter(plan: dict[str, Any]) -> dict[tuple[str, bool], set[str]]:
    kinds: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for each in plan["collectives"]:
        for carried in each["carries"]:
            for name in carried["parameters"]:
                kinds[name, carried["is_parameter"]].add(each["kind"])
    return kinds
