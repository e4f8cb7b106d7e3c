"""Patterns of array names with named fields, which both match names and write them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from spmdtrain.errors import UserError

_FIELD = re.compile(r"([a-z_][a-z0-9_]*)(?::(.+))?", re.ASCII | re.DOTALL)
_SLOT = re.compile(r"(.+)\[([^\[\]]*)\]", re.DOTALL)
_DEFAULT = "[0-9]+"


@dataclass(frozen=True)
class NamePattern:
    """A name such as `h.{layer}.attn.bias`, and perhaps a part of the array, `[:,0/3]`.

    Text outside of braces is literal. `{layer}` is a field of digits, and `{name:REGEX}` a field of
    a regular expression. Raises `UserError` if a brace is not closed, or a regular expression is
    invalid.
    """

    text: str

    def __post_init__(self) -> None:
        assert self._regex is not None  # raises for an invalid pattern

    @cached_property
    def slot(self) -> str:
        """The text between the brackets at the end; empty for a whole array."""
        match = _SLOT.fullmatch(self.text)
        return match[2] if match else ""

    @cached_property
    def fields(self) -> frozenset[str]:
        """The names of the fields."""
        return frozenset(self._regex.groupindex)

    def match(self, name: str) -> dict[str, str] | None:
        """Returns the fields of a name; None if the pattern does not match all of it."""
        match = self._regex.fullmatch(name)
        return match.groupdict() if match else None

    def format(self, fields: Mapping[str, str]) -> str:
        """Returns the name with these fields; a missing one becomes nothing."""
        return "".join(
            part if is_text else fields.get(_field_of(part)[0], "") for is_text, part in self._parts
        )

    @cached_property
    def _parts(self) -> list[tuple[bool, str]]:
        """The name in parts: whether a part is literal text, and the text or the field."""
        match = _SLOT.fullmatch(self.text)
        name = match[1] if match else self.text
        parts, text, rest = [], "", name
        while rest:
            if not rest.startswith("{"):
                text, rest = text + rest[0], rest[1:]
                continue
            end = _closing_brace(rest)
            if end is None or not _FIELD.fullmatch(rest[1:end]):
                raise UserError(
                    f"weight rule: {self.text!r} has a brace that is not a field: write {{name}} "
                    "for digits, or {name:REGEX}"
                )
            parts += [(True, text), (False, rest[1:end])]
            text, rest = "", rest[end + 1 :]
        return [*parts, (True, text)]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        seen: set[str] = set()
        regex = ""
        for is_text, part in self._parts:
            if is_text:
                regex += re.escape(part)
                continue
            name, own = _field_of(part)
            regex += f"(?P={name})" if name in seen else f"(?P<{name}>{own})"
            seen.add(name)
        try:
            return re.compile(regex)
        except re.error as error:
            raise UserError(f"weight rule: {self.text!r} is not valid: {error}") from error


def _field_of(part: str) -> tuple[str, str]:
    """Returns the name and the regular expression of a field."""
    name, _, regex = part.partition(":")
    return name, regex or _DEFAULT


def _closing_brace(text: str) -> int | None:
    """Returns the index of the brace that closes the first one; None if there is none."""
    depth = 0
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return index
    return None
