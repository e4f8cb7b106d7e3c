"""docs/benchmarks.md, from the files that `bench.py` wrote: `python benchmarks/report.py`."""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench
import checkpoints
import compare

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"

TITLES = {
    "w1-batch-32": "W1: the MNIST MLP (784-256-256-10, Adam), batch 32, one device",
    "w1-batch-512": "W1: the same, batch 512",
    "w1-2-devices": "W1: batch 32 over 2 virtual devices",
    "w1-8-devices": "W1: batch 32 over 8 virtual devices",
    "w1-2-processes": "W1: batch 32 over 2 processes",
    "w2-resnet": "W2: a small residual network on pictures of 32 x 32, batch 32",
    "w3-transformer": "W3: a transformer of 10.8 million parameters, 8 rows of 128 tokens",
    "w5-rows": "W5: batches of 32 rows in memory, shuffled, and nothing done with them",
    "w5-pictures": "W5: JPEG files of 500 x 375, decoded to 224 x 224, batches of 32",
    "w7-10-leaves": "W7: next to no work in 10 arrays",
    "w7-100-leaves": "W7: in 100 arrays",
    "w7-500-leaves": "W7: in 500 arrays",
    "w7-2000-leaves": "W7: in 2,000 arrays",
}
INTRODUCTION = """# Benchmarks

Written by `make bench` (`make bench-setup` before it, for PyTorch and TensorFlow); each table is made of the file under it by `benchmarks/report.py`.

Peers are processes that live as long as a table's measurement, started one after the other, of which one at a time trains, a segment of steps each, in an order that rotates from round to round. A *ratio* is how many times as fast as the floor a peer was in the same round: the median of the rounds, the lowest and the highest. The *floor* is the loop that one would write by hand with `jax.jit` (`benchmarks/peers/floor.py`); it runs twice, and where the two differ by more than 5 % in the median, the table says so and means nothing. Each peer may use all of the machine's processors. "spmdtrain" is the `Trainer` with its defaults: a progress bar at a terminal, `metrics.jsonl`, TensorBoard, a checkpoint at the end of each epoch; what the floor does is nothing of that. *CPUs* is how many processors a peer kept busy, *first step* the seconds from the start of its process until its first step was done, in a machine where other peers stand still.
"""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown of rows, the heading first."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return [f"| {' | '.join(line)} |" for line in lines]


def section(name: str, result: dict[str, Any]) -> list[str]:
    """One comparison."""
    loads = [turn["load"] for turn in result["rounds"]]
    lines = [f"## {TITLES[name]}", "", *table(compare.table(result)), ""]
    if compare.is_void(result):
        lines += ["**Void: the floor was too far from itself.**", ""]
    rounds, segment = len(result["rounds"]), result["work"]["segment"]
    note = f"{rounds} rounds of {segment} steps, load {min(loads):.1f} to {max(loads):.1f}"
    if result["missing"]:
        note += f"; left out: {', '.join(result['missing'])}"
    return [*lines, f"{note}; `benchmarks/results/{name}.json`.", ""]


def page(folder: Path) -> str:
    """All of it."""
    of = json.loads((folder / "machine.json").read_text())
    versions = ", ".join(f"{name} {number}" for name, number in of["versions"].items())
    lines = [
        INTRODUCTION,
        f"The machine: {of['cpus']} processors ({of['processor']}), no accelerator; Python "
        f"{of['python']}, {versions}.",
        "",
    ]
    for name in TITLES:
        file = folder / f"{name}.json"
        if file.exists():
            lines += section(name, json.loads(file.read_text()))
    if (file := folder / f"{bench.CHECKPOINTS}.json").exists():
        lines += ["## W6: how long a save stops training", ""]
        lines += [f"- {checkpoints.told(found)}" for found in json.loads(file.read_text())]
        lines += ["", f"5 saves each, in turns with copies; `benchmarks/results/{file.name}`.", ""]
    if (file := folder / f"{bench.START}.json").exists():
        lines += start(json.loads(file.read_text()), file.name)
    lines += ["## On an accelerator", "", "Not measured: none could be reached.", ""]
    return "\n".join(lines).rstrip() + "\n"


def start(result: dict[str, Any], name: str) -> list[str]:
    """Seconds to the first step."""
    names = [name for name in result["rounds"][0] if name != "load"]
    rows = [["", "imported s", "first step s"]]
    for each in names:
        marks = [turn[each] for turn in result["rounds"]]
        medians = (statistics.median(m[k] for m in marks) for k in ("imported", "first step"))
        rows.append([each, *(f"{seconds:.2f}" for seconds in medians)])
    words = (
        "From the start of the process to the first step, with an empty cache of compiled programs "
        f"(cold) and a full one (warm): medians of {len(result['rounds'])}."
    )
    return ["## Starts", "", words, "", *table(rows), "", f"`benchmarks/results/{name}`.", ""]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    given.page.write_text(page(given.results))
