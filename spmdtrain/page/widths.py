"""The widths of the parts of a page."""

import enum


class Width(enum.StrEnum):
    """The part of the page's width that a block takes on a wide screen; on a phone it takes all."""

    THIRD = "third"
    COLUMN = "column"  # a half
    FULL = "full"
