"""Claims about a compiled train step, for tests: which collectives it has, and how large."""

import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from jax.stages import Compiled

from spmdtrain.errors import did_you_mean
from spmdtrain.terminal import byte_size
from spmdtrain.train.trainer import Trainer
from spmdtrain.xla.collectives import KINDS, Collective, collectives

_UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base, prefixes in (("", 1000, "kMGT"), ("i", 1024, "KMGT"))
    for power, prefix in enumerate(prefixes, 1)
}


def compiled_step(trainer: Trainer, batch: Any) -> "CompiledStep":
    """The trainer's train step, compiled for a global batch and not run.

        def test_one_all_reduce_and_nothing_else():
            step = compiled_step(trainer, {"image": images[:64], "label": labels[:64]})
            step.assert_count(1, "all-reduce", axes="data")
            step.assert_no("all-gather", larger_than="1 MB")

    The batch is as the objective gets it: arrays of leading dim B, or anything with their shapes
    and dtypes. Raises `UserError` for a trainer whose steps are not compiled.
    """
    return CompiledStep(trainer.compile_step(batch), trainer.mesh)


class CompiledStep:
    """What XLA made of a step on a mesh, and what a test claims about it.

    A collective's size is its payload where it is whole: see `hlo.Collective`. Claims that do not
    hold are `AssertionError`s with all that was found; a kind, an axis or a size that does not
    exist is a `ValueError`, so that no claim holds by a misspelling.
    """

    def __init__(self, compiled: Compiled, mesh: Mesh | None) -> None:
        self.compiled = compiled
        self._axes = {} if mesh is None else {str(name): n for name, n in mesh.shape.items()}
        text = compiled.as_text()
        if text is None:
            raise ValueError("XLA does not show this step's HLO, so that nothing can be claimed")
        self.text = text
        """The optimized HLO."""
        self.collectives = [] if mesh is None else collectives(self.text, mesh)
        """In the order of the text, each as often as it is written: in a loop's body, once."""

    @property
    def memory(self) -> Any:
        """What XLA says that it needs: `memory.temp_size_in_bytes` and so on, of one device."""
        return self.compiled.memory_analysis()

    def assert_no(
        self, kind: str, *, larger_than: int | str = 0, axes: str | Sequence[str] | None = None
    ) -> None:
        """Asserts that there is no such collective; arguments as for `assert_count`."""
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
          count: Expected number; each is counted as often as it is in `collectives`.
          kind: XLA's name: "all-reduce", "all-gather", "reduce-scatter", ...
          larger_than: Counts only larger ones: bytes, or a text such as "1 MB" or "1 MiB".
          axes: Counts only those over exactly these mesh axes; by default over any.

        Raises:
          AssertionError: If the number differs; lists the collectives.
        """
        __tracebackhide__ = True
        if kind not in KINDS:
            raise ValueError(f"there is no collective {kind!r}.{did_you_mean(kind, KINDS)}")
        least, wanted = _bytes(larger_than), self._known(axes)
        alike = [one for one in self.collectives if one.kind == kind and one.bytes > least]
        # Where XLA's text cannot be read, nothing is known to hold.
        unclear = [one for one in alike if wanted is not None and not one.axes]
        found = [one for one in alike if wanted is None or set(one.axes) == wanted]
        if unclear or len(found) != count:
            claim = f"{count or 'no'} {kind}" + (f" above {byte_size(least)}" if least else "")
            claim += (
                ""
                if wanted is None
                else f" over {self._named([a for a in self._axes if a in wanted])}"
            )
            but = "the axes of some cannot be told" if unclear else f"there are {len(found)}"
            raise AssertionError(f"{claim} claimed, but {but}:\n{self._listed(unclear or found)}")

    def _known(self, axes: str | Sequence[str] | None) -> set[str] | None:
        if axes is None:
            return None
        wanted = {axes} if isinstance(axes, str) else set(axes)
        if not wanted:
            raise ValueError("axes=() names no axis; leave it out for any")
        for axis in sorted(wanted - set(self._axes)):
            known = did_you_mean(axis, self._axes) if self._axes else " It has none."
            raise ValueError(f"the mesh has no axis {axis!r}.{known}")
        return wanted

    def _named(self, axes: Sequence[str]) -> str:
        return " ".join(f"{axis}={self._axes[axis]}" for axis in axes) or "unknown axes"

    def _listed(self, marked: Sequence[Collective]) -> str:
        """All collectives, the largest first, those in question marked."""
        if not self.collectives:
            return "  the step has no collectives"
        marks, ordered = set(map(id, marked)), sorted(self.collectives, key=lambda one: -one.bytes)
        rows = [
            (
                *("*" if id(one) in marks else "", one.kind, f"over {self._named(one.axes)}"),
                *(byte_size(one.bytes), one.op_name),
            )
            for one in ordered
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
        return "\n".join(f"  {line}".rstrip() for line in lines)


def _bytes(size: int | str) -> int:
    """The bytes of `1 MB`."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(size))
    if match is None:
        raise ValueError(f"larger_than={size!r} is no size: give bytes, or a text such as '1 MB'")
    units = {unit.casefold(): value for unit, value in _UNITS.items()}
    if match[2].casefold() not in units:
        raise ValueError(
            f"larger_than={size!r}: no unit {match[2]!r}.{did_you_mean(match[2], _UNITS)}"
        )
    return round(float(match[1]) * units[match[2].casefold()])
