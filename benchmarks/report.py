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
import scaling
from work import TRANSFORMERS, Shape

HERE = Path(__file__).parent
COMMAND = "make bench BENCH_FLAGS=--accelerator"
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
ON_ACCELERATOR = {
    "accelerator-w1-batch-32": "W1 there: the MNIST MLP, batch 32",
    "accelerator-w1-batch-512": "W1 there: batch 512",
    "accelerator-w2-resnet": "W2 there: the residual network, batch 32",
    "accelerator-w3-transformer": "W3 there: the transformer of 10.8 million parameters",
    "accelerator-gpt2-small": "GPT-2 small there: 124 million parameters, 16 rows of 1,024 tokens",
}
INTRODUCTION = """# Benchmarks

Written by `make bench` (`make bench-setup` before it, for PyTorch and TensorFlow); each table is made of the file under it by `benchmarks/report.py`.

Peers are processes that live as long as a table's measurement, started one after the other, of which one at a time trains, a segment of steps each (slow ones a fifth of it), in an order that rotates and turns about from round to round. A *ratio* is how many times as fast as the first peer of the table another was in the same round: the median of the rounds, the lowest and the highest. The first peer runs twice, and where the two differ by more than 5 % in the median, the table says so and means nothing. The *floor* is the loop that one would write by hand with `jax.jit`, each batch placed while the step before runs (`benchmarks/peers/floor.py`); on CPU it is faster where batches are not placed but given to the step as they are, which is what spmdtrain does there. Libraries with OpenMP are told to use all of the machine's processors, as XLA does by itself. "spmdtrain" is the `Trainer` with its defaults: a progress bar at a terminal, `metrics.jsonl`, TensorBoard, a checkpoint at the end of each epoch, of which the tables say how many fell into what they count; the floor does nothing of that. *CPUs* is how many processors a peer kept busy, *first step* the seconds from the start of its process until its first step was done, nothing compiled being kept from before, while other peers stand still.
"""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown of rows, the heading first."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return [f"| {' | '.join(line)} |" for line in lines]


def section(name: str, result: dict[str, Any]) -> list[str]:
    """One comparison."""
    loads = [turn["load"] for turn in result["rounds"]]
    lines = [f"## {(TITLES | ON_ACCELERATOR)[name]}", "", *table(compare.table(result)), ""]
    if compare.is_void(result):
        lines += [f"**Void: {result['floor']} was too far from itself.**", ""]
    rounds, segment = len(result["rounds"]), result["work"]["segment"]
    note = f"{rounds} rounds of {segment:,} steps, load {min(loads):.1f} to {max(loads):.1f}"
    saves = [
        turn["spmdtrain"]["saves"] for turn in result["rounds"] if "saves" in turn["spmdtrain"]
    ]
    if saves:
        note += f"; spmdtrain saved {sum(saves)} times"
    if result["missing"]:
        note += f"; left out: {', '.join(result['missing'])}"
    note += f"; {result['origin']['time']}, commit {result['origin']['commit']}"
    return [*lines, f"{note}; `benchmarks/results/{name}.json`.", ""]


def page(folder: Path) -> str:
    """All of it."""
    results = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    # Lines may be measured one by one; the machine is told again where it is another.
    lines, told = [INTRODUCTION], ""
    for name in [*TITLES, bench.CHECKPOINTS, bench.START]:
        if (result := results.get(name)) is None:
            continue
        if (where := machine(result["origin"])) != told:
            lines, told = [*lines, where, ""], where
        if name == bench.CHECKPOINTS:
            lines += saves(result)
        else:
            lines += start(result) if name == bench.START else section(name, result)
    for name in scaling.TITLES:
        if (result := results.get(f"scaling-{name}")) is not None:
            if (where := machine(result["origin"])) != told:
                lines, told = [*lines, where, ""], where
            lines += scaled(name, result)
    lines += ["## On an accelerator", ""]
    there = {name: results[name] for name in ON_ACCELERATOR if name in results}
    if not there:
        lines += [f"Not measured: none could be reached. `{COMMAND}` measures there.", ""]
    for name, result in there.items():
        rate = result["origin"]["matmul TFLOP/s"]
        if (where := machine(result["origin"])) != told:
            lines += [where, f"It multiplies bfloat16 matrices at {rate:,.0f} TFLOP/s.", ""]
            told = where
        lines += section(name, result)
        if shape := TRANSFORMERS.get(result["work"]["workload"]):
            lines += tokens(result, shape, rate)
    return "\n".join(lines).rstrip() + "\n"


def saves(result: dict[str, Any]) -> list[str]:
    """W6."""
    lines = [f"- {checkpoints.told(found)}" for found in result["saves"]]
    note = f"{checkpoints.REPEATS} saves each, in turns with copies; {result['origin']['time']}, "
    note += f"commit {result['origin']['commit']}; `benchmarks/results/{bench.CHECKPOINTS}.json`."
    return ["## W6: how long a save stops training", "", *lines, "", note, ""]


def scaled(name: str, result: dict[str, Any]) -> list[str]:
    """Returns the section about one process against two, each held to one core."""
    loads = [turn["load"] for turn in result["rounds"]]
    note = f"{len(result['rounds'])} rounds of {result['segment']} steps, load {min(loads):.1f} to "
    note += f"{max(loads):.1f}; {result['origin']['time']}, commit {result['origin']['commit']}; "
    note += f"`benchmarks/results/scaling-{name}.json`."
    words = [scaling.EXPLANATION, "", *table(scaling.table(result)), "", *scaling.losses(result)]
    return [f"## {scaling.TITLES[name]}", "", *words, "", note, ""]


def machine(of: dict[str, Any]) -> str:
    """A sentence about where numbers are from."""
    versions = ", ".join(f"{name} {number}" for name, number in of["versions"].items())
    accelerator = of.get("accelerator", "no accelerator")
    return (
        f"The machine: {of['cpus']} processors ({of['processor']}), {accelerator}; Python "
        f"{of['python']}, {versions}."
    )


def tokens(result: dict[str, Any], shape: Shape, rate: float) -> list[str]:
    """What peers make of the accelerator, which multiplies at `rate` TFLOP/s."""
    rows = [["", "tokens/s", "MFU"]]
    for name in result["start"]:
        tokens = result["work"]["batch_size"] * shape.context
        speed = tokens / compare.seconds_a_step(result, name)
        rows.append([name, f"{speed:,.0f}", f"{speed * shape.flops / rate / 1e12:.3f}"])
    words = (
        f"MFU: {shape.flops / 1e9:.2f} GFLOP a token (6 for each parameter that multiplies, and 12 "
        "times layers, width and context for attention), against the rate of its bfloat16 products."
    )
    return [*table(rows), "", words, ""]


def start(result: dict[str, Any]) -> list[str]:
    """Seconds to the first step."""
    names = [name for name in result["rounds"][0] if name != "load"]
    rows = [["", "imported s", "first step s"]]
    for each in names:
        marks = [turn[each] for turn in result["rounds"]]
        medians = (statistics.median(m[k] for m in marks) for k in ("imported", "first step"))
        rows.append([each, *(f"{seconds:.2f}" for seconds in medians)])
    words = (
        "From the start of the process to the first step, with an empty cache of compiled programs "
        f"(cold) and a full one (warm): medians of {len(result['rounds'])}. The floor with flax trains "
        "the model that spmdtrain does; the other is free of every library but JAX and Optax."
    )
    note = f"{result['origin']['time']}, commit {result['origin']['commit']}; "
    note += f"`benchmarks/results/{bench.START}.json`."
    return ["## Starts", "", words, "", *table(rows), "", note, ""]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    given.page.write_text(page(given.results))
