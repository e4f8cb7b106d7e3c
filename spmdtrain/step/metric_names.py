"""The names of metrics: those that a run itself writes are reserved."""

from collections.abc import Collection, Iterable

from spmdtrain.errors import UserError, is_text

NORMS_OF_GRADIENTS = ("gradient_norm", "update_norm")
"""The names of the norms that a `Loop` does not know, and its function may return."""
NORMS = ("parameter_norm", *NORMS_OF_GRADIENTS)
"""The names of the norms that `step_norms` returns."""
LEARNING_RATE = "learning_rate"
"""The name of the learning rate in a line of training."""
OF_EPOCH = ("epoch", LEARNING_RATE, "seconds", "examples_per_second", "input_wait")
"""Names of what a run itself writes into the line of an epoch."""
RESERVED = ("step", "split", "trajectory", *OF_EPOCH, *NORMS)
"""Names that a run itself writes into lines of metrics and the history; no metric may have them."""


def check_names(names: Iterable[str], whose: str, allowed: Collection[str] = ()) -> None:
    """Raises `UserError` if the name of a metric is no text, or one that a run itself writes.

    Args:
      whose: The start of the error message, for example "the objective's".
      allowed: Names of values that this run does not write itself.
    """
    for name in names:
        if not isinstance(name, str):
            raise UserError(
                f"{whose} {name!r} has a {type(name).__name__} as its name: use a string"
            )
        if not is_text(name):
            raise UserError(f"{whose} {name!r} cannot be written as UTF-8: rename it")
    for name in RESERVED:
        if name in names and name not in allowed:
            raise UserError(f"{whose} {name!r} is a reserved name in the metrics file: rename it")
