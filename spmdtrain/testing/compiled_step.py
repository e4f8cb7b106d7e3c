"""Assertions about the collectives of a compiled train step."""

import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from jax.stages import Compiled

from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import did_you_mean
from spmdtrain.train.trainer import Trainer
from spmdtrain.xla.collectives import KINDS, Collective, collectives

_UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base, prefixes in (("", 1000, "kMGT"), ("i", 1024, "KMGT"))
    for power, prefix in enumerate(prefixes, 1)
}


def compiled_step(trainer: Trainer, batch: Any) -> "CompiledStep":
    """Compiles the trainer's train step for a global batch, without running it.

    Example::

        def test_one_all_reduce_and_nothing_else():
            step = compiled_step(trainer, {"image": images[:64], "label": labels[:64]})
            step.assert_count(1, "all-reduce", axes="data")
            step.assert_no("all-gather", larger_than="1 MB")

    Args:
      trainer: The trainer.
      batch: A batch as the objective receives it: a pytree of arrays with leading dim B, or of
        anything with a shape and a dtype, such as `jax.ShapeDtypeStruct`.

    Returns:
      The compiled step, with assertions about its collectives.

    Raises:
      UserError: If the trainer does not compile its steps (`jit` is off).
    """
    return CompiledStep(trainer.compile_step(batch), trainer.mesh)


class CompiledStep:
    """A compiled step on a mesh, with assertions about its collectives.

    The size of a collective is its whole payload: see `spmdtrain.xla.collectives.Collective`. A
    failed assertion raises `AssertionError` and lists all collectives. An unknown kind, axis or
    size unit raises `ValueError`, so that a misspelled assertion never passes.

    Args:
      compiled: The compiled step.
      mesh: Its mesh; None for a single device, where it has no collectives.

    Raises:
      ValueError: If XLA does not provide the step's HLO.
    """

    def __init__(self, compiled: Compiled, mesh: Mesh | None) -> None:
        self.compiled = compiled
        self._axes = {} if mesh is None else {str(name): n for name, n in mesh.shape.items()}
        text = compiled.as_text()
        if text is None:
            raise ValueError(
                "XLA does not provide the HLO of this step: its collectives are unknown"
            )
        self.text = text
        """The optimized HLO."""
        self.collectives = [] if mesh is None else collectives(self.text, mesh)
        """Collectives in the order of the text; one in a loop is listed once."""

    @property
    def memory(self) -> Any:
        """XLA's memory analysis of one device: `memory.temp_size_in_bytes` and so on."""
        return self.compiled.memory_analysis()

    def assert_no(
        self, kind: str, *, larger_than: int | str = 0, axes: str | Sequence[str] | None = None
    ) -> None:
        """Asserts that the step has no such collective.

        Args:
          kind: See `assert_count`.
          larger_than: See `assert_count`.
          axes: See `assert_count`.

        Raises:
          AssertionError: If there is one; lists the collectives.
        """
        __tracebackhide__ = True
        self.assert_count(0, kind, larger_than=larger_than, axes=axes)

    def assert_count(
        self,
        count: int,
        kind: str,
        *,
        larger_than: int | str = 0,
        axes: str | Sequence[str] | None = None,
    ) -> None:
        """Asserts the number of collectives of a kind.

        Args:
          count: Expected number of entries in `collectives`.
          kind: XLA's name: "all-reduce", "all-gather", "reduce-scatter", ...
          larger_than: Counts only larger ones: bytes, or a string such as "1 MB" or "1 MiB".
          axes: Counts only those over exactly these mesh axes; by default over any.

        Raises:
          AssertionError: If the number differs, or the axes of a candidate are unknown; lists all
            collectives.
          ValueError: If kind, size or axis is unknown.
        """
        __tracebackhide__ = True
        if kind not in KINDS:
            raise ValueError(f"unknown kind of collective {kind!r}.{did_you_mean(kind, KINDS)}")
        least, wanted = _bytes(larger_than), self._known(axes)
        candidates = [x for x in self.collectives if x.kind == kind and x.bytes > least]
        # If XLA's text cannot be parsed, the assertion must fail.
        unclear = [x for x in candidates if wanted is not None and not x.axes]
        matching = [x for x in candidates if wanted is None or set(x.axes) == wanted]
        if unclear or len(matching) != count:
            expected = f"{count or 'no'} {kind}" + (f" above {byte_size(least)}" if least else "")
            if wanted is not None:
                expected += f" over {self._named([a for a in self._axes if a in wanted])}"
            problem = "the axes of some are unknown" if unclear else f"found {len(matching)}"
            listed = self._listed(unclear or matching)
            raise AssertionError(f"expected {expected}, but {problem}:\n{listed}")

    def _known(self, axes: str | Sequence[str] | None) -> set[str] | None:
        if axes is None:
            return None
        wanted = {axes} if isinstance(axes, str) else set(axes)
        if not wanted:
            raise ValueError("axes=() names no axis: omit it to count collectives over any axes")
        for axis in sorted(wanted - set(self._axes)):
            known = did_you_mean(axis, self._axes) if self._axes else " It has no axes."
            raise ValueError(f"the mesh has no axis {axis!r}.{known}")
        return wanted

    def _named(self, axes: Sequence[str]) -> str:
        return " ".join(f"{axis}={self._axes[axis]}" for axis in axes) or "unknown axes"

    def _listed(self, marked: Sequence[Collective]) -> str:
        """Returns a table of all collectives, the largest first, with some marked by `*`."""
        if not self.collectives:
            return "  the step has no collectives"
        marks, ordered = set(map(id, marked)), sorted(self.collectives, key=lambda x: -x.bytes)
        rows = [
            (
                *("*" if id(each) in marks else "", each.kind, f"over {self._named(each.axes)}"),
                *(byte_size(each.bytes), each.op_name),
            )
            for each in ordered
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
        return "\n".join(f"  {line}".rstrip() for line in lines)


def _bytes(size: int | str) -> int:
    """Parses a size such as `1 MB`."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(size))
    if match is None:
        raise ValueError(
            f"larger_than={size!r} is not a size: give bytes or a string such as '1 MB'"
        )
    units = {unit.casefold(): value for unit, value in _UNITS.items()}
    if match[2].casefold() not in units:
        raise ValueError(
            f"larger_than={size!r}: unknown unit {match[2]!r}.{did_you_mean(match[2], _UNITS)}"
        )
    return round(float(match[1]) * units[match[2].casefold()])
