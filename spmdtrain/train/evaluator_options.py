"""Options of the evaluator, in a separate module so that the help need not import the evaluator."""

import enum


class Which(enum.StrEnum):
    """The checkpoints to evaluate."""

    EACH = "each"
    """All of them, the oldest first."""
    NEWEST = "newest"
    """The newest at each time, and so the last one; older ones are skipped."""
