"""Options of the evaluator. A module of its own, because the help needs nothing else of it."""

import enum


class Which(enum.StrEnum):
    """The checkpoints to evaluate."""

    EACH = "each"
    """All of them, the oldest first."""
    NEWEST = "newest"
    """The newest at each time, and so the last one; older ones are skipped."""
