"""What would mend a plan: options that are tried, with the figures with them and without."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax

from spmdtrain.config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.plan.aot import has_compiler
from spmdtrain.plan.planner import Plan, PlannedCollective
from spmdtrain.plan.topologies import Topology
from spmdtrain.sharding.table import Row
from spmdtrain.strategies import strategy
from spmdtrain.terminal import byte_size

Again = Callable[[Sequence[str]], Plan]
"""Plans once more, with these options after the others. Raises `UserError`."""

_NOT_WORTH_A_WORD = 0.02  # of the estimated time, of what is sent, or of a device's memory
_SHORT = 1e-4  # seconds of a step: of shorter ones the start of each rules anyway
_GIANT = 0.1  # of what a device may hold

# Without these a TPU's compiler lets sums of zeros and of a device's part stand for a gather over
# more than one dim of the torus.
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
    """What an option may change: bytes on a device, seconds of a step, bytes a device sends."""

    fits: bool | None
    peak: int
    estimate: float | None
    sent: float


@dataclass(frozen=True)
class Advice:
    """What was found, and what mends it.

    Attributes:
        finding: What is wrong, in words.
        options: What to add to the command line; "" where nothing that was tried mends it.
        without: The figures of the plan as it is.
        with_options: Those with the options; None where there are none.
        tried: What was tried before, or in vain, with why it does not do.
    """

    finding: str
    options: str
    without: Figures
    with_options: Figures | None
    tried: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Finding:
    text: str
    tries: Sequence[Sequence[str]]
    mends: Callable[[Plan, Plan], bool]


def advise(plan: Plan, config: RunConfig, topology: Topology, again: Again) -> list[Advice]:
    """What is known to go wrong, where it does, each with the first options that mend it.

    Each try is a plan of its own: it builds, traces and compiles.
    """
    if plan.fits is False:
        findings = [_too_big(plan, config)]
    else:
        findings = [
            *_giants(plan, config),
            *_undivided(plan, config),
            *_reduced_twice(plan, config),
            *_reduced_gathers(plan, topology),
            *_waiting(plan, topology),
        ]
    tried: dict[tuple[str, ...], Plan | UserError] = {}
    return [_try(finding, plan, again, tried) for finding in findings]


def _try(
    finding: _Finding, plan: Plan, again: Again, known: dict[tuple[str, ...], Plan | UserError]
) -> Advice:
    in_vain: list[str] = []
    for options in map(tuple, finding.tries):
        if options not in known:
            try:
                known[options] = again(options)
            except UserError as error:  # not with this experiment, or on these devices
                known[options] = error
            except jax.errors.JaxRuntimeError as error:  # of the compiler's own
                known[options] = UserError(str(error).partition("\n")[0][:200])
        other = known[options]
        if isinstance(other, Plan) and finding.mends(plan, other):
            return Advice(
                finding.text, " ".join(options), _figures(plan), _figures(other), tuple(in_vain)
            )
        why = str(other) if isinstance(other, UserError) else "no better"
        if isinstance(other, Plan) and other.fits is False:
            least = "at least " if other.memory.temporaries is None else ""
            why = f"needs {least}{byte_size(other.memory.peak)}"
        in_vain.append(f"{' '.join(options)}: {why}")
    return Advice(finding.text, "", _figures(plan), None, tuple(in_vain))


def _figures(plan: Plan) -> Figures:
    estimate = None if plan.times is None else plan.times.estimate
    return Figures(plan.fits, plan.memory.peak, estimate, plan.traffic.bytes)


# -- what is known to go wrong ---------------------------------------------------------------------


def _too_big(plan: Plan, config: RunConfig) -> _Finding:
    limit = plan.memory.limit or 0
    splits = _splits(plan, config)
    again = ["--remat", "full"] if config.remat == "none" else []
    batch = plan.global_batch_size / plan.batch_shards
    parts = [
        ["--microbatches", str(m)] for m in (4, 16) if m > config.microbatches and batch % m == 0
    ]
    tries = [*splits, *([again] if again else []), *parts]
    best = splits[-1] if splits else []
    tries += [best + again] if best and again else []
    tries += [best + again + part for part in parts if best or again]
    return _Finding(
        f"{byte_size(plan.memory.peak - limit)} more than a device may hold",
        [one for one in tries if one],
        lambda _, other: other.fits is not False,
    )


def _splits(plan: Plan, config: RunConfig) -> list[list[str]]:
    """Options that split the state over more devices than now."""
    of = strategy(config.strategy)
    if plan.used_devices < 2 or of.shards_params or of.needs_rules:
        return []
    fully = ["--strategy", "fully_sharded"]
    if (parts := _dividing(plan.rows, plan.devices)) < plan.devices:
        fully += ["--sharding.max-shards", str(parts)]
    return [fully] if of.shards_optimizer else [["--strategy", "zero"], fully]


def _dividing(rows: Sequence[Row], devices: int) -> int:
    """The most parts, of as many devices, into which each large parameter has a dim to divide."""
    most = max((row.elements for row in rows), default=0)
    dims = [
        [int(n) for n in row.shape.strip("(),").split(",") if n.strip()]
        for row in rows
        if row.elements >= max(2, most // 100)
    ]
    divisors = [parts for parts in range(devices, 0, -1) if devices % parts == 0]
    return next(
        (parts for parts in divisors if all(any(n % parts == 0 for n in d) for d in dims)), 1
    )


def _giants(plan: Plan, config: RunConfig) -> Iterator[_Finding]:
    """A parameter that each device has whole, with what belongs to it, and that fills it."""
    limit = plan.memory.limit
    if not limit or not (splits := _splits(plan, config)):
        return
    held = {row: row.own.device + row.optimizer.device + row.average.device for row in plan.rows}
    giants = [row for row in plan.rows if held[row] >= _GIANT * limit]
    giants.sort(key=lambda row: -held[row])
    if giants:
        first, more = giants[0], len(giants) - 1
        others = f", and {more} more are that large" if more else ""
        yield _Finding(
            f"{first.name} {first.shape} and what the optimizer keeps of it are whole on each of "
            f"{plan.used_devices} devices, {byte_size(held[first])}{others}",
            splits,
            lambda now, other: other.memory.peak < 0.9 * now.memory.peak,
        )


def _undivided(plan: Plan, config: RunConfig) -> Iterator[_Finding]:
    """Parameters that the strategy would split, had they a dim that divides."""
    of = strategy(config.strategy)
    whole = [row for row in plan.rows if row.name in plan.undivided]
    size = sum(row.own.device + row.optimizer.device for row in whole)
    if not whole or size < _NOT_WORTH_A_WORD * plan.memory.peak:
        return
    parts = _dividing(plan.rows, plan.devices)
    fully = [] if of.shards_params else ["--strategy", "fully_sharded"]
    names = ", ".join(f"{row.name} {row.shape}" for row in whole[:3])
    yield _Finding(
        f"no dim of {names}{', ...' if len(whole) > 3 else ''} divides over {plan.devices} "
        f"devices: {byte_size(size)} are whole on each",
        [[*fully, "--sharding.max-shards", str(parts)]],
        lambda now, other: other.memory.peak < now.memory.peak,
    )


def _reduced_twice(plan: Plan, config: RunConfig) -> Iterator[_Finding]:
    """Parameters whose gradient crosses more than once: one that is used twice, say."""
    elements = {row.name: row.elements for row in plan.rows}
    crossed: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = {one.parameter: one.bytes for one in plan.traffic.by_parameter}
    for one in plan.collectives:
        if one.kind in ("all-reduce", "reduce-scatter"):
            for carried in one.carries:
                if not carried.is_parameter:
                    names = [name for name in carried.parameters if name in elements]
                    whole = sum(elements[name] for name in names)
                    for name in names:
                        crossed[name] += one.times * carried.elements * elements[name] / whole
    again = [
        name
        for name, count in crossed.items()
        if count >= 1.9 * elements[name]
        and sent.get(name, 0) >= _NOT_WORTH_A_WORD * plan.traffic.bytes
    ]
    once = ["--collectives.reduction", "all_reduce"]  # in the dtype of the parameters
    narrow = config.compute_dtype == "bfloat16" and config.collectives.reduce_dtype is None
    of = strategy(config.strategy)
    tries: list[list[str]] = []  # where each device has all parameters, gradients may cross by hand
    if not (of.shards_params or of.needs_rules):
        tries = [once, [*once, "--collectives.reduce-dtype", "bfloat16"]] if narrow else [once]
    why = "automatic partitioning does so for each use"
    if config.microbatches > 1:
        why = "for each microbatch, or for each use"
    if again:
        times = max(crossed[name] / elements[name] for name in again)
        yield _Finding(
            f"the gradient of {', '.join(again[:3])}{', ...' if len(again) > 3 else ''} is reduced "
            f"{times:.2g} times in a step: {why}",
            tries,
            lambda now, other: other.traffic.bytes < 0.98 * now.traffic.bytes,
        )


def _reduced_gathers(plan: Plan, topology: Topology) -> Iterator[_Finding]:
    """Gathers of parameters that a TPU's compiler made sums of."""
    if topology.platform != "tpu" or plan.times is None:
        return
    sums = [one for one in plan.collectives if _is_summed_gather(one)]
    seconds = sum(one.seconds for one in sums)
    if seconds >= _NOT_WORTH_A_WORD * plan.times.estimate:
        size = byte_size(int(sum(one.bytes * one.times for one in sums)))
        yield _Finding(
            f"parameters are gathered as all-reduces, {size} during which nothing else runs: twice "
            "the bytes of a gather",
            [_compiler(_GATHER)],
            _is_faster,
        )


def _is_summed_gather(one: PlannedCollective) -> bool:
    large = sum(x.bytes for x in one.carries if x.is_parameter)
    return one.kind == "all-reduce" and not one.overlapped and 2 * large > one.bytes


def _waiting(plan: Plan, topology: Topology) -> Iterator[_Finding]:
    """Collectives during which nothing else runs."""
    if plan.times is None or not has_compiler(topology) or topology.platform not in _OVERLAP:
        return
    if any(_reduced_gathers(plan, topology)):
        return
    part = plan.times.waiting / plan.times.estimate
    if part >= _NOT_WORTH_A_WORD and plan.times.estimate >= _SHORT:
        kinds = {one.kind for one in plan.collectives if not one.overlapped and one.seconds > 0}
        names = ", ".join(sorted(kinds))
        yield _Finding(
            f"during {part:.0%} of a step nothing runs but collectives ({names})",
            [_compiler(options) for options in _OVERLAP[topology.platform]],
            _is_faster,
        )


def _compiler(options: Sequence[str]) -> list[str]:
    return [word for option in options for word in ("--compiler-options", option)]


def _is_faster(now: Plan, other: Plan) -> bool:
    assert now.times is not None
    return other.times is not None and other.times.estimate < 0.99 * now.times.estimate
