"""Files of runs in the formats of the workdir, for the page of a run."""

import json
import math
import random
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0
PHASES = ("start", "compile", "restore", "step", "load", "evaluate", "save", "host")


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def metric_lines(steps: int, every: int = 1, seed: int = 0) -> Iterable[dict[str, Any]]:
    """Lines of a run that learns, with all splits."""
    draw = random.Random(seed)
    evaluated = max(every, steps // 10 // every * every)
    for step in range(every, steps + 1, every):
        loss = 2.3 * math.exp(-3 * step / steps) + 0.05 + 0.1 * draw.random()
        yield {
            **{"step": step, "split": "train", "loss": loss, "accuracy": 1 - loss / 3},
            "learning_rate": 1e-3 * (1 - step / steps),
            "gradient_norm": loss * (1 + draw.random()),
            "parameter_norm": 10 + step / steps,
            "update_norm": 1e-3 * loss,
        }
        if step % evaluated == 0:
            line = {"step": step, "loss": loss + 0.1, "accuracy": 0.95 - loss / 3}
            yield {**line, "split": "eval"}
            yield {**line, "split": "epoch", "epoch": step // evaluated, "seconds": 2.0}
    yield {"step": steps, "split": "test", "loss": 0.123, "accuracy": 0.987}


def performance_lines(
    steps: int, every: int = 1, seconds: float = 0.01, after: int = 0, began: float = BEGAN
) -> Iterable[dict[str, Any]]:
    draw = random.Random(1)
    for step in range(after + every, steps + 1, every):
        rate = 100 + 5 * draw.random()
        yield {
            **{"step": step, "time": began + (step - after) * seconds},
            **{"examples_per_second": 64 * rate, "steps_per_second": rate},
            **{"tokens_per_second": 64 * rate * 128, "model_flops_utilization": 0.41},
            **{"input_wait": 0.01 * draw.random(), "device_memory_bytes": 1_500_000_000 + step},
            "goodput": 0.8,
        }


def phases(time: float, step: int, *seconds: float) -> dict[str, Any]:
    """An event with the seconds of each phase since the start, in the order of `PHASES`."""
    found = dict(zip(PHASES, seconds, strict=True))
    return {"time": BEGAN + time, "event": "phases", "step": step, "seconds": found}


def restarted_events() -> list[dict[str, Any]]:
    """A start that was killed at step 400, down for 60 s, and one that repeats 100 steps."""
    begin = {"event": "start", "processes": 2, "devices": 8}
    return [
        {**begin, "time": BEGAN, "step": 0},
        phases(20, 100, 3, 5, 0, 10, 0.5, 1, 0.5, 0),
        {"time": BEGAN + 40, "event": "checkpoint", "step": 300},
        phases(55, 400, 3, 5, 0, 40, 2, 3, 2, 0),
        {**begin, "time": BEGAN + 115, "step": 300},
        phases(145, 600, 3, 2, 2, 20, 1, 1, 1, 0),
        {"time": BEGAN + 150, "event": "end", "status": "finished"},
    ]


PROGRAM = {
    "parameters": 118_282,
    "flops_per_step": 4.5e7,
    "peak_flops_per_device": None,
    "devices": 8,
    "mesh": {"data": 8},
    "collectives": [{"kind": "all-reduce", "axes": ["data"], "count": 1, "bytes": 473_128}],
    "sharding": [
        {
            **{"path": "layers/0/kernel", "shape": [64, 128], "dtype": "float32"},
            **{"spec": "P('data')", "bytes_per_device": 4096},
        },
        {
            **{"path": "layers/0/bias", "shape": [128], "dtype": "float32"},
            **{"spec": "replicated", "bytes_per_device": 512},
        },
    ],
}
CONFIG = {
    "config": {"workdir": "x", "seed": 0, "steps": 600, "epochs": None, "hidden": [128, 128]}
    | {"learning_rate": 1e-3, "best_metric": "loss", "best_direction": "min", "strategy": "zero"},
    "versions": {"spmdtrain": "0.1.0", "jax": "0.10.2"},
    **{"mesh": "data=8", "devices": 8, "device_kind": "cpu"},
    "skipped_records": {"train": 0},
}


def png(shade: int = 128, side: int = 8) -> bytes:
    """A gray square."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    rows = b"".join(
        b"\0" + bytes(min(255, shade + 8 * x) for x in range(side)) for _ in range(side)
    )
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def write_media(workdir: Path) -> None:
    (workdir / "media").mkdir()
    item = {"split": "eval", "name": "samples"}
    lines: list[dict[str, Any]] = []
    for step in (300, 600):
        for number in range(3):
            name = f"media/samples-{step}-{number}.png"
            (workdir / name).write_bytes(png(60 * number))
            lines.append({**item, "step": step, "kind": "image", "file": name})
    lines.append({**item, "step": 600, "name": "poem", "kind": "text", "text": "one\n  two"})
    lines[3]["captions"] = ["a", "<b>"]
    bins = {"edges": [0, 1, 2, 4], "counts": [3, 1, 7]}
    lines.append({**item, "step": 600, "name": "weights", "kind": "histogram", **bins})
    cells = {"columns": ["word", "count"], "rows": [["a", 1], ["b", 2.5]]}
    lines.append({**item, "step": 600, "name": "words", "kind": "table", **cells})
    write_lines(workdir / "media.jsonl", lines)


def watch_lines(layers: int, steps: Iterable[int], broken_from: int = 10**9) -> Iterable[Any]:
    """Lines of watched layers, whose norms grow from layer to layer and from step to step.

    From a step on, the last layer has values that are not finite.
    """
    for step in steps:
        found = {}
        for n in range(layers):
            broken = n == layers - 1 and step >= broken_from
            found[f"blocks/{n}"] = {
                **{"size": 8, "norm": 2.0**n * step, "mean": 0.0, "std": 1.0, "min": -1.0},
                **{"max": 1.0, "zeros": 0.25, "nonfinite": 0.5 if broken else 0.0},
                **{"first": 20, "counts": [4, 4]},
            }
        yield {"step": step, "time": BEGAN + step, "outputs": found, "gradients": {}}


def write_run(workdir: Path, steps: int = 600, every: int = 10, **config: Any) -> Path:
    """Writes all files of a run but its checkpoints."""
    workdir.mkdir(parents=True)
    content = {**CONFIG, "config": CONFIG["config"] | {"steps": steps} | config}  # type: ignore[operator]
    (workdir / "config.json").write_text(json.dumps(content))
    (workdir / "status.json").write_text(json.dumps({"status": "finished", "step": steps}))
    (workdir / "program.json").write_text(json.dumps(PROGRAM))
    write_lines(workdir / "metrics.jsonl", metric_lines(steps, every, config.get("seed", 0)))
    write_lines(workdir / "performance.jsonl", performance_lines(steps, every))
    write_lines(workdir / "events.jsonl", restarted_events())
    write_media(workdir)
    return workdir
