"""spmdtrain beside the bare loop and what else one could take: `make bench`.

    python benchmarks/bench.py [--quick] [--rounds 9] [--only NAME ...] [--results FOLDER]

Each line of the plan is a workload and the peers that train it. What a round took is written to
FOLDER/NAME.json when it is over; `report.py` makes docs/benchmarks.md of these files. Peers whose
environment is not there (`make bench-setup`) are left out, and named.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compare
import images
from compare import HERE, Peer
from work import Work

ENVIRONMENTS = HERE.parent / ".bench"
TORCH = str(ENVIRONMENTS / "torch" / "bin" / "python")
TENSORFLOW = str(ENVIRONMENTS / "tensorflow" / "bin" / "python")

FLOOR = Peer("floor", "floor.py")
OURS = Peer("spmdtrain", "ours.py")
FAST = Peer("spmdtrain, 50 steps a dispatch", "ours.py", ("--per-dispatch=50",))
AUTOMATIC = Peer("spmdtrain, reduced by XLA", "ours.py", ("--automatic",))
KERAS = Peer("Keras on JAX", "keras_fit.py")
KERAS_10 = Peer("Keras on JAX, 10 steps an execution", "keras_fit.py", ("--per-dispatch=10",))
EAGER = Peer("PyTorch eager", "torch_loop.py", (), TORCH)
LIGHTNING = Peer("Lightning", "lightning_fit.py", (), TORCH)
TF_FIT = Peer("TensorFlow fit", "tf_fit.py", (), TENSORFLOW)
TF_LOOP = Peer("TensorFlow custom loop", "tf_fit.py", ("--custom",), TENSORFLOW)


@dataclass(frozen=True)
class Line:
    """One comparison."""

    name: str
    work: Work
    peers: Sequence[Peer]
    quick: bool = False
    """Whether it is a part of --quick."""


def rows_by(name: str, way: str, python: str = sys.executable) -> Peer:
    """What makes batches of rows in memory."""
    return Peer(name, "rows.py", (f"--way={way}",), python)


ROWS = (
    ("floor", "numpy"),
    ("spmdtrain", "spmdtrain"),
    ("Grain's DataLoader", "grain"),
    ("PyTorch's DataLoader", "torch", TORCH),
    ("tf.data", "tensorflow", TENSORFLOW),
)
PICTURES = ENVIRONMENTS / "pictures"
SINGLE = (FLOOR, OURS, FAST, KERAS, KERAS_10, TF_LOOP, TF_FIT, EAGER, LIGHTNING)
LINES = [
    Line("w1-batch-32", Work("mlp", 32, 1000), SINGLE, quick=True),
    Line("w1-batch-512", Work("mlp", 512, 100), SINGLE),
    Line(
        "w1-2-devices",
        Work("mlp", 32, 500, devices=2),
        (FLOOR, OURS, AUTOMATIC, FAST, KERAS, TF_FIT),
    ),
    Line(
        "w1-8-devices",
        Work("mlp", 32, 200, devices=8),
        (FLOOR, OURS, AUTOMATIC, FAST, KERAS, TF_FIT),
    ),
    Line(
        "w1-2-processes",
        Work("mlp", 32, 100, processes=2),
        (FLOOR, OURS, AUTOMATIC, Peer("PyTorch DDP", "torch_loop.py", (), TORCH), TF_LOOP),
        quick=True,
    ),
    Line("w2-resnet", Work("resnet", 32, 20), (FLOOR, OURS, KERAS)),
    Line("w3-transformer", Work("transformer", 8, 4), (FLOOR, OURS, KERAS)),
    Line("w5-rows", Work("mlp", 32, 2000), tuple(rows_by(*each) for each in ROWS)),
    Line(
        "w5-pictures",
        Work("images", 32, 4, data=str(PICTURES)),
        (
            Peer("floor", "pictures.py", ("--way=one",)),
            Peer("spmdtrain", "pictures.py", ("--way=all",)),
            Peer("tf.data", "pictures.py", ("--way=tensorflow",), TENSORFLOW),
        ),
    ),
    *(
        Line(f"w7-{n}-leaves", Work("leaves", 32, 2000 // (1 + n // 100), leaves=n), (FLOOR, OURS))
        for n in (10, 100, 500, 2000)
    ),
]


CHECKPOINTS, START = "w6-checkpoints", "start"
NAMES = [*(line.name for line in LINES), CHECKPOINTS, START]


def machine() -> dict[str, object]:
    """Where the numbers are from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "keras", "numpy", "grain")
    versions = {name: version(name) for name in packages}
    for python, others in ((TORCH, ["torch", "lightning"]), (TENSORFLOW, ["tensorflow"])):
        if Path(python).exists():
            asked = f"from importlib.metadata import version; print(*map(version, {others}))"
            found = subprocess.run(
                [python, "-c", asked], capture_output=True, text=True, check=True
            )
            versions |= dict(zip(others, found.stdout.split(), strict=True))
    return {
        "processor": names[0] if names else platform.processor(),
        "cpus": compare.THREADS,
        "python": platform.python_version(),
        "versions": versions,
    }


def starts(rounds: int, file: Path) -> dict[str, Any]:
    """Seconds from the start of a process to its first step, without a cache of programs and with.

    The floor is given one as well: JAX's own, of all programs.
    """
    result: dict[str, Any] = {"work": vars(STARTED), "rounds": []}
    for _ in range(rounds):
        turn: dict[str, Any] = {"load": os.getloadavg()[0]}
        for peer in (FLOOR, OURS, KERAS):
            with tempfile.TemporaryDirectory() as folder:
                caches = {
                    "XDG_CACHE_HOME": folder,
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                }
                if peer is not OURS:
                    caches["JAX_COMPILATION_CACHE_DIR"] = folder
                for kind in ("cold", "warm"):
                    log = file.with_name(f"{file.stem}-{peer.name}.log".replace(" ", "-"))
                    with compare.running(peer, STARTED, log, **caches) as one:
                        turn[f"{peer.name}, {kind}"] = one.turn()["since start"]
        result["rounds"].append(turn)
        file.write_text(json.dumps(result, indent=1) + "\n")
    return result


STARTED = Work("mlp", 32, 1)


def main() -> int:
    """The benchmark; 1 where one of its lines is void."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two lines, 3 rounds")
    parser.add_argument("--rounds", type=int, help="rounds of each line; 9 where nothing is said")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    given = parser.parse_args()
    quick = [line.name for line in LINES if line.quick]
    chosen = given.only or (quick if given.quick else NAMES)
    rounds = given.rounds or (3 if given.quick else 9)
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
    void = []
    for line in LINES:
        if line.name not in chosen:
            continue
        if line.work.data and not Path(line.work.data).exists():
            Path(line.work.data).mkdir(parents=True)
            images.make(Path(line.work.data))
        load = os.getloadavg()[0]
        print(f"{line.name}: {len(line.peers)} peers, load {load:.2f}", file=sys.stderr)
        file = given.results / f"{line.name}.json"
        result = compare.compare(line.peers, line.work, rounds, file)
        print_table(line.name, compare.table(result))
        if result["missing"]:
            print(f"left out: {', '.join(result['missing'])} (make bench-setup)")
        if compare.is_void(result):
            void.append(line.name)
            print("VOID: the floor against itself is more than 5 % off")
    if CHECKPOINTS in chosen:
        file = given.results / f"{CHECKPOINTS}.json"
        sizes = ["--megabytes", "120", "1200", "--json", str(file)]
        subprocess.run([sys.executable, str(HERE / "checkpoints.py"), *sizes], check=True)
    if START in chosen:
        found = starts(min(rounds, 5), given.results / f"{START}.json")
        for name in found["rounds"][0]:
            if name != "load":
                seconds = [turn[name]["first step"] for turn in found["rounds"]]
                print(f"{name}: first step after {statistics.median(seconds):.2f} s")
    return 1 if void else 0


def print_table(name: str, rows: Sequence[Sequence[str]]) -> None:
    """Columns side by side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{name}")
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [word.rjust(width) for word, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells))


if __name__ == "__main__":
    sys.exit(main())
