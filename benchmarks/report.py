"""Generates docs/benchmarks.md from the files that `bench.py` wrote: `python benchmarks/report.py`."""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench
import checkpoints
import compare
import context
import data_input
import experts
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
    "w2-resnet": "W2: a small residual network on images of 32 x 32, batch 32",
    "keras-w1-8-devices": "Keras: the MNIST MLP over 8 virtual devices, by keras.distribution and here",
    "keras-w2-8-devices": "Keras: the residual network over 8 virtual devices, the same",
    "w3-transformer": "W3: a transformer of 10.8 million parameters, 8 rows of 128 tokens",
    "w5-rows": "W5: shuffled batches of 32 rows in memory, without training",
    "w5-pictures": "W5: JPEG files of 500 x 375, decoded to 224 x 224, batches of 32",
    "w8-images-0-workers": "W8: images of 64 x 64 from ArrayRecord files, shuffled, batches of 64",
    "w8-images-1-workers": "W8: the same images, one worker",
    "w8-images-2-workers": "W8: the same images, two workers",
    "w8-text-0-workers": "W8: text from Parquet files to 1,024 bytes, shuffled, batches of 64",
    "w8-text-1-workers": "W8: the same text, one worker",
    "w8-text-2-workers": "W8: the same text, two workers",
    "w7-10-leaves": "W7: almost no computation, 10 parameter arrays",
    "w7-100-leaves": "W7: 100 parameter arrays",
    "w7-500-leaves": "W7: 500 parameter arrays",
    "w7-2000-leaves": "W7: 2,000 parameter arrays",
}
ON_ACCELERATOR = {
    "accelerator-w1-batch-32": "W1: the MNIST MLP, batch 32",
    "accelerator-w1-batch-512": "W1: batch 512",
    "accelerator-w2-resnet": "W2: the residual network, batch 32",
    "accelerator-w3-transformer": "W3: the transformer of 10.8 million parameters",
    "accelerator-gpt2-small": "GPT-2 small: 124 million parameters, 16 rows of 1,024 tokens",
}
INTRODUCTION = """# Benchmarks

Written by `make bench` (`make bench-setup` before it, for PyTorch and TensorFlow); `benchmarks/report.py` generates each table from the file named below it.

Each peer is a process that lives as long as the measurement of its table. Peers start one after another and train one at a time, one segment of steps each (slow peers a fifth of it), in an order that rotates and reverses from round to round. A *ratio* is the speed of a peer relative to the first peer of the table in the same round: median, lowest and highest of the rounds. The first peer runs twice; if the two medians differ by more than 5 %, the table is marked as void. The *floor* is a hand-written loop with `jax.jit`, which places each batch while the previous step runs (`benchmarks/peers/floor.py`); on CPU it is faster to pass batches to the step without placing them, which is what spmdtrain does there. Libraries with OpenMP are configured to use all processors, as XLA does by default. "spmdtrain" is the `Trainer` with its defaults: a progress bar on a terminal, `metrics.jsonl`, TensorBoard, and a checkpoint at the end of each epoch; the tables state how many checkpoints fell into the measured segments. The floor does none of that. *keras.distribution* is Keras' `fit` with `DataParallel` over the devices, and "spmdtrain, the same Keras model" is `Trainer.from_keras` with the same compiled model, both without files. *CPUs* is the average number of busy processors of a peer. Before anything is timed, each peer trains one step on one device, with the same weights and the same batch (`benchmarks/peers/same_work.py`): *loss* is its mean loss, *parameters* their number, *MFLOP* the operations of its matrix products and convolutions in millions (those of TensorFlow are not counted), and *dtypes* those of parameters and products. A table whose losses differ by more than 0.01 % (1 % in bfloat16), or whose numbers of parameters differ, is not measured. *first step* is the time from the start of its process to the end of its first step, with an empty compilation cache, while the other peers are idle.

In W8 nothing is trained: each peer makes shuffled batches from the same files (`benchmarks/peers/inputs.py`), and the first peer is Grain alone. Workers are threads of Grain, tf.data and spmdtrain (`data_threads`), and processes of PyTorch and of "spmdtrain, processes" (`data_workers`). Images are shuffled completely; text within 8 row groups. Grain reads Parquet as a stream, and PyTorch and tf.data by PyArrow in a generator.
"""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table of rows, the heading first."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return [f"| {' | '.join(line)} |" for line in lines]


def section(name: str, result: dict[str, Any]) -> list[str]:
    """Returns the section about one comparison."""
    loads = [turn["load"] for turn in result["rounds"]]
    lines = [f"## {(TITLES | ON_ACCELERATOR)[name]}", "", *table(compare.table(result)), ""]
    if compare.is_void(result):
        lines += [f"**Void: the two runs of {result['floor']} differ too much.**", ""]
    rounds, segment = len(result["rounds"]), result["work"]["segment"]
    note = f"{rounds} rounds of {segment:,} steps, load {min(loads):.1f} to {max(loads):.1f}"
    saves = [
        turn["spmdtrain"]["saves"] for turn in result["rounds"] if "saves" in turn["spmdtrain"]
    ]
    if saves:
        note += f"; spmdtrain saved {sum(saves)} times"
    if result["missing"]:
        note += f"; skipped: {', '.join(result['missing'])}"
    note += f"; {result['origin']['time']}, commit {result['origin']['commit']}"
    return [*lines, f"{note}; `benchmarks/results/{name}.json`. `{command(name, result)}`", ""]


def command(name: str, result: dict[str, Any]) -> str:
    """Returns the command that measures a line as a result was measured."""
    (line,) = (line for line in bench.LINES if line.name == name)
    words = [f"python benchmarks/bench.py --only {name} --rounds {len(result['rounds'])}"]
    if (steps := result["work"]["segment"]) != line.work.segment:
        words.append(f"--steps {steps}")
    names = [x.name for x in line.peers[1:] if x.name not in result["missing"]]
    if missing := [x for x in names if x not in result["start"]]:
        kept = [x for x in names if x not in missing]
        words.append(" ".join(["--peers", *(f'"{x}"' for x in kept)]))
    if result["work"]["accelerator"]:
        words.append("--accelerator")
    return " ".join(words)


def page(folder: Path) -> str:
    """Returns the page for all result files of a folder."""
    results = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    # Lines may be measured separately: the machine is repeated where it changes.
    lines, current = [INTRODUCTION], ""
    for name in [*TITLES, bench.CHECKPOINTS, bench.START]:
        if (result := results.get(name)) is None:
            continue
        if (where := machine(result["origin"])) != current:
            lines, current = [*lines, where, ""], where
        if name == bench.CHECKPOINTS:
            lines += saves(result)
        else:
            lines += start(result) if name == bench.START else section(name, result)
    if (result := results.get(data_input.RESULT)) is not None:
        lines += memory(result)
    for name in scaling.TITLES:
        if (result := results.get(f"scaling-{name}")) is not None:
            if (where := machine(result["origin"])) != current:
                lines, current = [*lines, where, ""], where
            lines += scaled(name, result)
    if (result := results.get(context.RESULT)) is not None:
        if (where := machine(result["origin"])) != current:
            lines, current = [*lines, where, ""], where
        lines += split_tokens(result)
    if (result := results.get(experts.RESULT)) is not None:
        if (where := machine(result["origin"])) != current:
            lines, current = [*lines, where, ""], where
        lines += mixture(result)
    lines += ["## On an accelerator", ""]
    measured = {name: results[name] for name in ON_ACCELERATOR if name in results}
    if not measured:
        figures = "[Figures of an H100](performance.md#on-an-h100)"
        lines += [f"Not measured. Run `{COMMAND}` on one. {figures} are not of this command.", ""]
    for name, result in measured.items():
        rate = result["origin"]["matmul TFLOP/s"]
        if (where := machine(result["origin"])) != current:
            lines += [where, f"It multiplies bfloat16 matrices at {rate:,.0f} TFLOP/s.", ""]
            current = where
        lines += section(name, result)
        if shape := TRANSFORMERS.get(result["work"]["workload"]):
            lines += tokens(result, shape, rate)
    return "\n".join(lines).rstrip() + "\n"


def saves(result: dict[str, Any]) -> list[str]:
    """Returns the section about saves (W6)."""
    lines = [f"- {checkpoints.describe(each)}" for each in result["saves"]]
    note = (
        f"{checkpoints.REPEATS} saves each, alternating with copies; {result['origin']['time']}, "
    )
    note += f"commit {result['origin']['commit']}; `benchmarks/results/{bench.CHECKPOINTS}.json`."
    return ["## W6: how long a save blocks training", "", *lines, "", note, ""]


def memory(result: dict[str, Any]) -> list[str]:
    """Returns the section about the memory while files are read (W8)."""
    rows = [
        ["", "GB of files", "MB resident after 10 %", "20 %", "50 %", "100 %", "growth from 20 %"]
    ]
    for each in result["kinds"]:
        mb = each["resident_mb"]
        chosen = [f"{mb[tenth]:.0f}" for tenth in (0, 1, 4, -1)]
        rows.append([each["kind"], f"{each['gigabytes']:.1f}", *chosen, f"{each['growth']:+.1%}"])
    note = (
        f"`python benchmarks/data_input.py`, {result['threads']} threads and {result['workers']} "
    )
    note += f"processes that read ahead; {result['origin']['time']}, commit "
    note += f"{result['origin']['commit']}; `benchmarks/results/{data_input.RESULT}.json`."
    return ["## W8: memory while an epoch is read", "", *table(rows), "", note, ""]


def split_tokens(result: dict[str, Any]) -> list[str]:
    """Returns the section about attention over split tokens (W9)."""
    lengths = " ".join(str(x["tokens"]) for x in result["lengths"])
    timed = " ".join(str(x["tokens"]) for x in result["lengths"] if any(x["seconds"].values()))
    note = f"{context.EXPLANATION} {result['origin']['time']}, commit "
    note += f"{result['origin']['commit']}; `benchmarks/results/{context.RESULT}.json`. "
    note += f"`python benchmarks/context.py --lengths {lengths} --timed {timed} --rounds "
    note += f"{result['rounds']}`"
    return [f"## {context.TITLE}", "", *table(context.table(result)), "", note, ""]


def mixture(result: dict[str, Any]) -> list[str]:
    """Returns the section about a mixture of experts (W10)."""
    note = f"{experts.EXPLANATION} {result['rounds']} rounds; {result['origin']['time']}, commit "
    note += f"{result['origin']['commit']}; `benchmarks/results/{experts.RESULT}.json`. "
    note += "`python benchmarks/experts.py`"
    return [f"## {experts.TITLE}", "", *table(experts.table(result)), "", note, ""]


def scaled(name: str, result: dict[str, Any]) -> list[str]:
    """Returns the section about one process against two, each pinned to one core."""
    loads = [turn["load"] for turn in result["rounds"]]
    note = f"{len(result['rounds'])} rounds of {result['segment']} steps, load {min(loads):.1f} to "
    note += f"{max(loads):.1f}; {result['origin']['time']}, commit {result['origin']['commit']}; "
    note += f"`benchmarks/results/scaling-{name}.json`."
    words = [scaling.EXPLANATION, "", *table(scaling.table(result)), "", *scaling.losses(result)]
    return [f"## {scaling.TITLES[name]}", "", *words, "", note, ""]


def machine(origin: dict[str, Any]) -> str:
    """Returns a sentence about the machine and the library versions."""
    versions = ", ".join(f"{name} {number}" for name, number in origin["versions"].items())
    accelerator = origin.get("accelerator", "no accelerator")
    return (
        f"Machine: {origin['cpus']} processors ({origin['processor']}), {accelerator}; Python "
        f"{origin['python']}, {versions}."
    )


def tokens(result: dict[str, Any], shape: Shape, rate: float) -> list[str]:
    """Returns a table of tokens/s and MFU.

    Args:
        result: Result of a transformer.
        shape: Its shape.
        rate: Measured rate of the accelerator in TFLOP/s.
    """
    rows = [["", "tokens/s", "MFU"]]
    for name in result["start"]:
        tokens = result["work"]["batch_size"] * shape.context
        speed = tokens / compare.seconds_a_step(result, name)
        rows.append([name, f"{speed:,.0f}", f"{speed * shape.flops / rate / 1e12:.3f}"])
    words = (
        f"MFU: {shape.flops / 1e9:.2f} GFLOP per token (6 per parameter in a product, plus 12 times "
        "layers, width and context for attention), relative to the measured bfloat16 rate."
    )
    return [*table(rows), "", words, ""]


def start(result: dict[str, Any]) -> list[str]:
    """Returns the section about the seconds to the first step."""
    names = [name for name in result["rounds"][0] if name != "load"]
    rows = [["", "import s", "first step s"]]
    for each in names:
        marks = [turn[each] for turn in result["rounds"]]
        medians = (statistics.median(m[k] for m in marks) for k in ("imported", "first step"))
        rows.append([each, *(f"{seconds:.2f}" for seconds in medians)])
    words = (
        "Time from the start of the process to the first step, with an empty (cold) and a full (warm) "
        f"compilation cache: medians of {len(result['rounds'])} rounds. The floor with flax trains the "
        "same model as spmdtrain; the other floor uses only JAX and Optax."
    )
    note = f"{result['origin']['time']}, commit {result['origin']['commit']}; "
    note += f"`benchmarks/results/{bench.START}.json`."
    return ["## Starts", "", words, "", *table(rows), "", note, ""]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    options.page.write_text(page(options.results))
