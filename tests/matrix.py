"""The support matrix: what each strategy can do. `docs/strategies.md` shows it, rendered here.

Each cell is a test of `test_strategy_matrix.py`: of what is done where it says yes, and of the
refusal where it says no.

    python tests/matrix.py --write      # writes the table into the page
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "strategies.md"
BEGIN, END = "<!-- matrix: python tests/matrix.py --write -->", "<!-- end of the matrix -->"

COLUMNS = {
    "train": "train",
    "evaluate": "evaluate",
    "resume": "resume",
    "restore": "from another's checkpoint",
    "processes": "many processes",
}


@dataclass(frozen=True)
class Row:
    """A strategy, or a product of them, with the options that go with it."""

    strategy: str
    options: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)
    """By column, what the refusal says (a regular expression); in the others it works."""

    @property
    def name(self) -> str:
        """As one gives it: `fully_sharded --mesh.tensor 2`."""
        return " ".join([self.strategy, *self.options])

    @property
    def arguments(self) -> list[str]:
        """What the command line gets."""
        return ["--strategy", self.strategy, *self.options]


def _alone(name: str) -> dict[str, str]:
    return {
        "processes": f"strategy {name} is for one process, and there are 2: mirrored uses them all"
    }


ROWS = (
    Row("default", refused=_alone("default")),
    Row("one_device", ("--mesh.devices", "3"), refused=_alone("one_device")),
    Row("mirrored"),
    Row("zero"),
    Row("fully_sharded"),
    Row("tensor_parallel"),
    Row("central_storage"),
    Row("hybrid"),
    Row("fully_sharded", ("--mesh.tensor", "2")),
    Row("hybrid+fully_sharded"),
    Row("hybrid+zero"),
    Row("central_storage+fully_sharded"),
)


def accepted(column: str) -> list[Row]:
    """The rows that say yes there."""
    return [row for row in ROWS if column not in row.refused]


def refused() -> list[tuple[Row, str]]:
    """The cells that say no."""
    return [(row, column) for row in ROWS for column in row.refused]


def render() -> str:
    """The matrix as a table of Markdown."""
    lines = [
        f"| strategy | {' | '.join(COLUMNS.values())} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in ROWS:
        cells = ["no" if column in row.refused else "yes" for column in COLUMNS]
        lines.append(f"| `{row.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown() -> str:
    """The table that the page has."""
    return _parts()[1]


def _parts() -> tuple[str, str, str]:
    before, begun, rest = PAGE.read_text().partition(BEGIN)
    table, ended, after = rest.partition(END)
    assert begun and ended, f"{PAGE} has no place for the matrix"
    return before, table.strip(), after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        before, _, after = _parts()
        PAGE.write_text(f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}")
    else:
        print(render())
