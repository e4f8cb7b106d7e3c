"""Steps that diverge: how they are found, and the start that leaves their batches out."""

import bisect
import collections
import statistics
from collections.abc import Callable, Mapping, Sequence

from spmdtrain.config.run_config import RunConfig, SkippedBatches
from spmdtrain.errors import NonFiniteError

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
    error: NonFiniteError, config: RunConfig, rewinds: int, log: Callable[[str], None]
) -> Rewound | None:
    """Returns what ends this start after a step that has diverged.

    None if the run ends with the error: by the option, because the step is not known, or because
    it has gone back often enough, which is added to the message.

    Args:
      error: The step that has diverged.
      config: The configuration of this start, with all batches that it leaves out.
      rewinds: The number of times that the run has gone back already.
      log: Receives a line for the user.
    """
    if config.on_divergence != "rewind" or error.step is None:
        return None
    if rewinds >= config.max_rewinds:
        left_out = " ".join(config.skipped_batches.texts)
        error.args = (
            f"{error}. The run has gone back {rewinds} of {config.max_rewinds} times "
            f"(max_rewinds); it leaves out batches {left_out}",
        )
        return None
    first = error.step if error.first_step is None else error.first_step
    batches = [config.skipped_batches.batch_of(step - 1) for step in range(first, error.step + 1)]
    which = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
    log(f"{error}; goes back and leaves out {which}, rewind {rewinds + 1} of {config.max_rewinds}")
    return Rewound(SkippedBatches.parse([*config.skip_steps, *batches]).texts)
