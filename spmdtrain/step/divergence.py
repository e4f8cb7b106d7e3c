"""Steps that diverge: how they are found, and how their updates or their batches are left out."""

import bisect
import collections
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spmdtrain.config.run_config import RunConfig, SkippedBatches
from spmdtrain.errors import NonFiniteError
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.health import has_norms
from spmdtrain.step.metrics import NORMS
from spmdtrain.step.state import Step, StepTransform, TrainState
from spmdtrain.strategies import StateField

PyTree = Any

# -- Steps whose loss or gradient is far above those of the steps before ---------------------------

_LEAST = 16  # values that are needed for a verdict
_NORMAL = 1.4826  # standard deviations of a normal distribution in a median absolute deviation
_SMALLEST = 1e-2  # of the median: the deviation of values that are all but equal


class DivergenceWatch:
    """Compares each step's loss and gradient norm with those of the steps before it.

    All processes read the same numbers, so they come to the same verdict. The numbers are part of a
    checkpoint, so that a resumed run comes to the same one, too.

    Args:
      sigma: The number of robust standard deviations above the median that a value may have.
      window: The number of steps that it is compared with.
    """

    def __init__(self, sigma: float, window: int) -> None:
        self._sigma, self._window = sigma, window
        self._values: dict[str, collections.deque[float]] = {}  # in the order of the steps
        self._ordered: dict[str, list[float]] = {}

    def verdict(self, values: Mapping[str, float]) -> str | None:
        """Returns why the next step diverges; None if it does not, and its values are kept.

        Args:
          values: Finite numbers by name; a name may be missing in some steps.
        """
        for name, value in values.items():
            if (why := self._why_far(name, value)) is not None:
                return why
        for name, value in values.items():
            kept = self._values.setdefault(name, collections.deque())
            ordered = self._ordered.setdefault(name, [])
            if len(kept) == self._window:
                del ordered[bisect.bisect_left(ordered, kept.popleft())]
            kept.append(value)
            bisect.insort(ordered, value)
        return None

    def _why_far(self, name: str, value: float) -> str | None:
        ordered = self._ordered.get(name, [])
        # The second condition takes no time, and holds for each value that is far above others.
        if len(ordered) < min(_LEAST, self._window) or value <= ordered[-1]:
            return None
        middle = statistics.median(ordered)
        spread = _NORMAL * statistics.median(abs(x - middle) for x in ordered)
        spread = max(spread, _SMALLEST * abs(middle))
        if value - middle <= self._sigma * spread:
            return None
        far = f"{(value - middle) / spread:.3g}" if spread else "infinitely many"
        return (
            f"{name} {value:.6g} is {far} robust standard deviations above {middle:.6g}, the "
            f"median of the {len(ordered)} steps before (divergence_sigma is {self._sigma:g})"
        )

    def to_json(self) -> dict[str, list[float]]:
        """Returns the values, which a checkpoint keeps."""
        return {name: list(values) for name, values in self._values.items()}

    def restore(self, saved: Mapping[str, Sequence[float]]) -> None:
        """Continues from the values that `to_json` returned."""
        self._values = {n: collections.deque(x[-self._window :]) for n, x in saved.items()}
        self._ordered = {name: sorted(values) for name, values in self._values.items()}


# -- Updates that the step itself leaves out -------------------------------------------------------

WATCHED = ("loss", "gradient_norm")
"""The numbers of a step that are compared with those of the steps before.

The first integer of `StepOutput.left_out` is the place of such a number, counted from 1.
"""
MOST_IN_A_ROW = 10
"""Updates in a row that are left out before the run ends: more are no outliers."""
_NOT_FINITE = 1 + len(WATCHED)


class LeavesUpdatesOut(StepTransform):
    """Leaves out the update of a step that diverges: the state is the one before the step.

    The step counts nevertheless, so the next one has the next batch. The verdict is made on the
    devices, as by `DivergenceWatch`, because the next step starts before the host reads this one.
    So it is the same whatever the number of steps in a dispatch, devices or processes.
    """

    fields: ClassVar[Mapping[str, StateField]] = {
        "divergence": StateField(item="extra", replicated=True, renewed=True)
    }

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self._names = () if config.divergence_sigma is None else WATCHED
        self._sigma, self._window = config.divergence_sigma or 0.0, config.divergence_window
        self._log_every = config.log_every

    def begin(self, init: Callable[..., TrainState]) -> Callable[..., TrainState]:
        """Returns a function that returns the first state, in which no update is left out."""
        windows = {
            name: {"count": jnp.int32(0), "values": jnp.zeros(self._window, jnp.float32)}
            for name in self._names
        }
        first = {"windows": windows, "in_a_row": jnp.int32(0), "total": jnp.int32(0)}
        return lambda *given: dataclasses.replace(init(*given), extra={"divergence": first})

    def explained_kind(self, step: int) -> str:
        """Returns the kind of step that leaves nothing out."""
        return "explained"

    def programs(self, step: Step) -> Mapping[str, Step]:
        """Returns the step that leaves its update out if it diverges, and the one that does not."""

        def run(state: TrainState, batch: Any, is_last: Any = None) -> tuple[TrainState, Any]:
            # Without `is_last`, because each step of a dispatch needs all flags.
            before = dataclasses.replace(state, extra={})
            after, output = step(before, batch)
            known = state.extra["divergence"]
            numbers = dict(zip(NORMS, output.norms, strict=False)) | {
                "loss": output.metrics["loss"]
            }
            why = jnp.where(output.finite.all(), 0, _NOT_FINITE)
            counts = {name: jnp.isfinite(numbers[name]) for name in self._names}
            if "gradient_norm" in counts:
                counts["gradient_norm"] &= has_norms(after.step, self._log_every)
            for number, name in enumerate(self._names, 1):
                is_far = counts[name] & self._is_far(numbers[name], known["windows"][name])
                why = jnp.where((why == 0) & is_far, number, why)
            is_left_out = why != 0
            windows = {
                name: _with_value(window, numbers[name], counts[name] & ~is_left_out)
                for name, window in known["windows"].items()
            }
            in_a_row = jnp.where(is_left_out, known["in_a_row"] + 1, 0)
            total = known["total"] + is_left_out
            kept = self._chosen(is_left_out, before, after)
            found = {"windows": windows, "in_a_row": in_a_row, "total": total}
            state = dataclasses.replace(kept, step=after.step, extra={"divergence": found})
            return state, dataclasses.replace(output, left_out=jnp.stack([why, in_a_row, total]))

        def run_whole(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            after, output = step(dataclasses.replace(state, extra={}), batch)
            return dataclasses.replace(after, extra=state.extra), output

        return {self.kind(1): run, self.explained_kind(1): run_whole}

    def _is_far(self, value: jax.Array, window: Mapping[str, jax.Array]) -> jax.Array:
        """Returns whether a value is far above those of a window, as `DivergenceWatch` decides."""
        values, known = window["values"], jnp.minimum(window["count"], self._window)
        is_known = jnp.arange(self._window) < known
        middle = _median(jnp.where(is_known, values, jnp.inf), known)
        deviations = jnp.where(is_known, jnp.abs(values - middle), jnp.inf)
        spread = jnp.maximum(_NORMAL * _median(deviations, known), _SMALLEST * jnp.abs(middle))
        is_largest = (value > jnp.where(is_known, values, -jnp.inf)).all()
        is_enough = known >= min(_LEAST, self._window)
        return is_enough & is_largest & (value - middle > self._sigma * spread)

    def _chosen(self, is_left_out: jax.Array, before: PyTree, after: PyTree) -> PyTree:
        """Returns the state before a step if its update is left out, else the one after it."""
        if self.placement.strategy.on_host:
            before = jax.device_put(before, jax.memory.Space.Device)
        if self.placement.devices[0].platform == "cpu":
            # A choice between elements would be fused with the update, and change its last bits.
            return jax.lax.cond(is_left_out, lambda: before, lambda: after)
        # A branch would make the host wait for the device.
        return jax.tree.map(lambda old, new: jnp.where(is_left_out, old, new), before, after)


def _median(values: jax.Array, known: jax.Array) -> jax.Array:
    """Returns the median of as many values as are known; infinity is in place of the others."""
    ordered = jnp.sort(values)
    return (ordered[jnp.maximum(known - 1, 0) // 2] + ordered[known // 2]) / 2


def _with_value(
    window: Mapping[str, jax.Array], value: jax.Array, is_kept: jax.Array
) -> dict[str, jax.Array]:
    """Returns a window with one more value if it is kept, in place of the oldest one if full."""
    count, values = window["count"], window["values"]
    longer = values.at[count % values.size].set(value.astype(values.dtype))
    return {"count": count + is_kept, "values": jnp.where(is_kept, longer, values)}


# -- The start that follows a step that diverges ---------------------------------------------------


class Rewound(Exception):
    """Ends a start whose step has diverged, so that the next one leaves out the batch of that step.

    Args:
      skip_steps: The batches that the next start leaves out, as in the option.
    """

    def __init__(self, skip_steps: tuple[str, ...]) -> None:
        super().__init__("the run goes back to a step before the divergence")
        self.skip_steps = skip_steps


def rewind(
    error: NonFiniteError,
    config: RunConfig,
    earlier: Sequence[Sequence[str]],
    log: Callable[[str], None],
) -> Rewound | None:
    """Returns what ends this start after a step that has diverged.

    None if the run ends with the error: by the option, because the step is not known, or because
    it has gone back often enough, which is added to the message.

    Args:
      error: The step that has diverged.
      config: The configuration of this start, with all batches that it leaves out.
      earlier: The batches that the run has left out after each time that it went back. A start that
        was killed before its first checkpoint is made again, and so is its decision.
      log: Receives a line for the user.
    """
    if config.on_divergence != "rewind" or error.step is None:
        return None
    first = error.step if error.first_step is None else error.first_step
    batches = [config.skipped_batches.batch_of(step - 1) for step in range(first, error.step + 1)]
    texts = SkippedBatches.parse([*config.skip_steps, *batches]).texts
    decisions = list(map(tuple, earlier))
    number = 1 + (decisions.index(texts) if texts in decisions else len(decisions))
    if number > config.max_rewinds:
        left_out = " ".join(config.skipped_batches.texts) or "none"
        error.args = (
            f"{error}. The run has gone back {len(decisions)} of {config.max_rewinds} times "
            f"(max_rewinds); batches left out: {left_out}",
        )
        return None
    which = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
    log(f"{error}; goes back and leaves out {which}, rewind {number} of {config.max_rewinds}")
    return Rewound(texts)
