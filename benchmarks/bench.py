"""Benchmark of spmdtrain against a hand-written loop and other libraries: `make bench`.

    python benchmarks/bench.py [--quick] [--rounds 9] [--only NAME ...] [--accelerator]
        [--steps N] [--peers PEER ...]

Each benchmark line is a workload and the peers that train it. After each round its times are
written to FOLDER/NAME.json (--results FOLDER; default benchmarks/results), from which `report.py`
generates docs/benchmarks.md. Peers whose environment is missing (`make bench-setup` creates it) are
skipped and reported; BENCH_TORCH is the path of another Python with PyTorch. Lines named
accelerator-... need an accelerator and run only with --accelerator.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import compare
import data_input
import images
from compare import HERE, Peer
from work import Work

ENVIRONMENTS = HERE.parent / ".bench"
TORCH = os.environ.get("BENCH_TORCH", str(ENVIRONMENTS / "torch" / "bin" / "python"))
TENSORFLOW = str(ENVIRONMENTS / "tensorflow" / "bin" / "python")

FLOOR = Peer("floor", "floor.py")
UNPLACED = Peer("floor, batches not placed", "floor.py", ("--unplaced",))
WITH_FLAX = Peer("floor with flax", "floor.py", ("--flax",))
OURS = Peer("spmdtrain", "ours.py")
OURS_1 = Peer("spmdtrain, 1 step a dispatch", "ours.py", ("--per-dispatch=1",))
FAST = Peer(
    "spmdtrain, 50 steps a dispatch, data on device",
    "ours.py",
    ("--per-dispatch=50", "--data-on-device"),
)
AUTOMATIC = Peer("spmdtrain, reduced by XLA", "ours.py", ("--automatic",))
KERAS = Peer("Keras on JAX", "keras_fit.py")
KERAS_10 = Peer("Keras on JAX, 10 steps an execution", "keras_fit.py", ("--per-dispatch=10",))
KERAS_BY_TRAINER = Peer("spmdtrain, the same Keras model", "keras_fit.py", ("--trainer",))
# The first of a table on many devices, where Keras' `fit` uses `keras.distribution`.
DISTRIBUTION = Peer("keras.distribution", "keras_fit.py")
EAGER = Peer("PyTorch eager", "torch_loop.py", (), TORCH)
COMPILED = Peer("PyTorch compiled", "torch_gpt.py", (), TORCH)
LIGHTNING = Peer("Lightning", "lightning_fit.py", (), TORCH)
TF_FIT = Peer("TensorFlow fit", "tf_fit.py", (), TENSORFLOW, 5)
TF_LOOP = Peer("TensorFlow custom loop", "tf_fit.py", ("--custom",), TENSORFLOW, 5)


@dataclass(frozen=True)
class Line:
    """One comparison: a workload and its peers, the floor first."""

    name: str
    work: Work
    peers: Sequence[Peer]
    quick: bool = False
    """Whether --quick includes it."""


def rows_by(name: str, way: str, python: str = sys.executable) -> Peer:
    """Returns a peer that only creates batches of rows in memory, with the library `way`."""
    return Peer(name, "rows.py", (f"--way={way}",), python, trains=False)


def inputs(kind: str, workers: int) -> Line:
    """Returns the line that reads files of one kind with a number of threads or processes.

    Args:
        kind: text or images.
        workers: Number of threads or processes that read ahead.
    """

    def peer(name: str, way: str, python: str = sys.executable) -> Peer:
        arguments = (f"--way={way}", f"--workers={workers}")
        return Peer(name, "inputs.py", arguments, python, trains=False)

    peers = [peer("Grain", "grain"), peer("spmdtrain", "spmdtrain")]
    if workers:
        peers.append(peer("spmdtrain, processes", "processes"))
    peers.append(peer("torch.utils.data", "torch", TORCH))
    peers.append(peer("tf.data", "tensorflow", TENSORFLOW))
    work = Work(kind, 64, 200, data=str(data_input.FOLDER))
    return Line(f"w8-{kind}-{workers}-workers", work, peers)


ROWS = (
    ("NumPy", "numpy"),
    ("spmdtrain", "spmdtrain"),
    ("Grain's DataLoader", "grain"),
    ("PyTorch's DataLoader", "torch", TORCH),
    ("tf.data", "tensorflow", TENSORFLOW),
)
RESULTS = HERE / "results"
PICTURES = ENVIRONMENTS / "pictures"
SINGLE = (FLOOR, UNPLACED, OURS, OURS_1, FAST, KERAS, KERAS_10, TF_LOOP, TF_FIT, EAGER, LIGHTNING)
LINES = [
    Line("w1-batch-32", Work("mlp", 32, 2000), SINGLE, quick=True),  # one epoch, hence one save
    Line("w1-batch-512", Work("mlp", 512, 125), SINGLE),  # the same
    Line(
        "w1-2-devices",
        Work("mlp", 32, 500, devices=2),
        (FLOOR, UNPLACED, OURS, AUTOMATIC, FAST, KERAS, TF_FIT),
    ),
    Line(
        "w1-8-devices",
        Work("mlp", 32, 200, devices=8),
        (FLOOR, UNPLACED, OURS, AUTOMATIC, FAST, KERAS, TF_FIT),
    ),
    Line(
        "w1-2-processes",
        Work("mlp", 32, 100, processes=2),
        (
            FLOOR,
            OURS,
            AUTOMATIC,
            OURS_1,
            FAST,
            Peer("PyTorch DDP", "torch_loop.py", (), TORCH),
            TF_LOOP,
        ),
        quick=True,
    ),
    Line("w2-resnet", Work("resnet", 32, 20), (FLOOR, OURS, KERAS)),
    Line(
        "keras-w1-8-devices",
        Work("mlp", 32, 200, devices=8),
        (DISTRIBUTION, KERAS_BY_TRAINER, OURS),
    ),
    Line(
        "keras-w2-8-devices",
        Work("resnet", 32, 10, devices=8),
        (DISTRIBUTION, KERAS_BY_TRAINER, OURS),
    ),
    Line("w3-transformer", Work("transformer", 8, 4), (FLOOR, OURS, KERAS)),
    Line("w5-rows", Work("mlp", 32, 2000), tuple(rows_by(*each) for each in ROWS)),
    Line(
        "w5-pictures",
        Work("images", 32, 40, data=str(PICTURES)),
        (
            Peer("spmdtrain, 1 thread", "pictures.py", ("--way=one",), trains=False),
            Peer("spmdtrain", "pictures.py", ("--way=all",), trains=False),
            Peer("tf.data", "pictures.py", ("--way=tensorflow",), TENSORFLOW, trains=False),
        ),
    ),
    *(inputs(kind, workers) for kind in ("images", "text") for workers in (0, 1, 2)),
    *(
        Line(
            f"w7-{n}-leaves",
            Work("leaves", 32, 2000 // (1 + n // 100), leaves=n),
            (FLOOR, UNPLACED, OURS),
        )
        for n in (10, 100, 500, 2000)
    ),
    Line("accelerator-w1-batch-32", Work("mlp", 32, 1000, accelerator=1), (FLOOR, OURS, FAST)),
    Line("accelerator-w1-batch-512", Work("mlp", 512, 1000, accelerator=1), (FLOOR, OURS, FAST)),
    Line("accelerator-w2-resnet", Work("resnet", 32, 500, accelerator=1), (FLOOR, OURS)),
    Line(
        "accelerator-w3-transformer",
        Work("transformer", 8, 200, accelerator=1),
        (FLOOR, OURS, COMPILED),
    ),
    Line(
        "accelerator-gpt2-small",
        Work("gpt2-small", 16, 20, accelerator=1),
        (FLOOR, OURS, COMPILED),
    ),
]


CHECKPOINTS, START = "w6-checkpoints", "start"
NAMES = [*(line.name for line in LINES), CHECKPOINTS, START]
ACCELERATOR = [line.name for line in LINES if line.work.accelerator]


def output_of(*command: str) -> str:
    """Returns what a command writes to standard output."""
    done = subprocess.run(command, stdout=-1, stderr=subprocess.DEVNULL, text=True, check=True)
    return done.stdout.strip()


def origin() -> dict[str, Any]:
    """Returns the commit, time, machine and library versions of a measurement."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "keras", "numpy", "grain")
    versions = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):  # such as Keras, if its peers are skipped
            versions[name] = version(name)
    for python, name in ((TORCH, "torch"), (TORCH, "lightning"), (TENSORFLOW, "tensorflow")):
        script = f"from importlib.metadata import version; print(version({name!r}))"
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # not installed
            versions[name] = output_of(python, "-c", script)
    return {
        "commit": output_of("git", "-C", str(HERE), "describe", "--always", "--dirty"),
        "time": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "processor": names[0] if names else platform.processor(),
        "cpus": compare.THREADS,
        "python": platform.python_version(),
        "versions": versions,
    }


def starts(rounds: int, file: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """Measures seconds from process start to first step, with a cold and a warm compilation cache.

    The other peers use JAX's own persistent cache, for all programs.

    Args:
        rounds: Number of rounds.
        file: Result file, written after each round.
        origin: Origin of the measurement; see `origin`.
    """
    result: dict[str, Any] = {"origin": origin, "work": vars(STARTED), "rounds": []}
    for _ in range(rounds):
        turn: dict[str, Any] = {"load": os.getloadavg()[0]}
        for peer in (FLOOR, WITH_FLAX, OURS, KERAS):
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
    """Runs the benchmark; returns 1 if one of its lines is void or refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="run two lines with 3 rounds of a quarter of the steps"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each line (default: 9)")
    parser.add_argument(
        "--accelerator", action="store_true", help="run only the lines that need an accelerator"
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[])
    parser.add_argument("--steps", type=int, help="steps of a segment (default: those of the line)")
    parser.add_argument(
        "--peers", nargs="+", default=[], help="names of the peers (default: all of the line)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for results (default: benchmarks/results; with --quick .bench/quick)",
    )
    options = parser.parse_args()
    # As SystemExit, so that the peers end, too, and do not disturb the next measurement.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results = options.results or (ENVIRONMENTS / "quick" if options.quick else RESULTS)
    quick = [line.name for line in LINES if line.quick]
    on_processor = [name for name in NAMES if name not in ACCELERATOR]
    chosen = ACCELERATOR if options.accelerator else quick if options.quick else on_processor
    chosen = options.only or chosen
    rounds = options.rounds or (3 if options.quick else 9)
    results.mkdir(parents=True, exist_ok=True)
    measured_on = origin()
    if options.accelerator:
        measured_on |= json.loads(output_of(sys.executable, str(HERE / "peers" / "matmul.py")))
    void = []
    for line in LINES:
        if line.name not in chosen:
            continue
        if line.work.data and not Path(line.work.data).exists():
            Path(line.work.data).mkdir(parents=True)
            make = images.make if line.work.data == str(PICTURES) else data_input.make
            make(Path(line.work.data))
        load = os.getloadavg()[0]
        print(f"{line.name}: {len(line.peers)} peers, load {load:.2f}", file=sys.stderr)
        file = results / f"{line.name}.json"
        steps = options.steps or line.work.segment // (4 if options.quick else 1)
        first, *others = line.peers
        peers = [first, *(x for x in others if not options.peers or x.name in options.peers)]
        try:
            result = compare.compare(
                peers, replace(line.work, segment=steps), rounds, file, measured_on
            )
        except compare.UnequalWorkError as error:
            void.append(line.name)
            print(f"REFUSED: {error}")
            continue
        print_table(line.name, compare.table(result))
        if result["missing"]:
            print(f"skipped: {', '.join(result['missing'])} (run make bench-setup)")
        if compare.is_void(result):
            void.append(line.name)
            print("VOID: the two runs of the floor differ by more than 5 %")
    if CHECKPOINTS in chosen:
        file = results / f"{CHECKPOINTS}.json"
        measure = [sys.executable, str(HERE / "checkpoints.py"), "--json", str(file), "--megabytes"]
        launch = [sys.executable, "-m", "spmdtrain.launch", "--processes", "2"]
        subprocess.run([*measure, "120", "1200"], check=True)
        results_of = json.loads(file.read_text())
        subprocess.run([*launch, "--devices-per-process", "4", "--", *measure, "120"], check=True)
        results_of += json.loads(file.read_text())
        saves = {"origin": measured_on, "saves": results_of}
        file.write_text(json.dumps(saves, indent=1) + "\n")
    if START in chosen:
        result = starts(min(rounds, 5), results / f"{START}.json", measured_on)
        for name in result["rounds"][0]:
            if name != "load":
                seconds = [turn[name]["first step"] for turn in result["rounds"]]
                print(f"{name}: first step after {statistics.median(seconds):.2f} s")
    if results == RESULTS:
        import report  # imports this module

        report.PAGE.write_text(report.page(results))
    return 1 if void else 0


def print_table(name: str, rows: Sequence[Sequence[str]]) -> None:
    """Prints rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{name}")
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [word.rjust(width) for word, width in zip(others, widths[1:], strict=True)]
        print("  ".join(cells))


if __name__ == "__main__":
    sys.exit(main())
