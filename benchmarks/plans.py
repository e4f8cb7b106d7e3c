"""Estimated and measured step times of ten configurations on eight virtual CPU devices.

    python benchmarks/plans.py --data-dir FOLDER

FOLDER has the text on which the transformer trains. Each configuration is estimated and measured
by `spmdtrain.plan --measure` in a process of its own; nothing else must run on the machine. The
order of the estimates must be the order of the measured times: a plan is used to choose between
configurations. Results are kept in `benchmarks/results/plans.json`; `--only NAME` measures some of
the configurations again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
RESULTS = Path(__file__).parent / "results" / "plans.json"
SPLIT = ("--strategy", "fully_sharded", "--sharding.min-size", "1")
GPT = ("shakespeare_gpt.py", "--preset", "tiny")
WIDE = ("--width", "128", "--heads", "8", "--batch-size-per-device", "16")
DEEP = ("--width", "256", "--heads", "8", "--layers", "4")
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "MLP, fully sharded": ("digits_mlp.py", *SPLIT),
    "MLP of width 1,024": (
        *("digits_mlp.py", "--hidden", "1024", "1024", "--global-batch-size", "128"),
    ),
    "transformer": (*GPT, "--batch-size-per-device", "16"),
    "transformer, context 128": (*GPT, "--batch-size-per-device", "16", "--length", "128"),
    "width 128": (*GPT, *WIDE),
    "width 128, two microbatches, zero": (
        *(*GPT, *WIDE, "--microbatches", "2", "--strategy", "zero"),
    ),
    "width 128, 4 layers, full remat": (*GPT, *WIDE, "--layers", "4", "--remat", "full"),
    "width 256, 4 layers": (*GPT, *DEEP),
    "width 256, 4 layers, fully sharded": (*GPT, *SPLIT, *DEEP),
    "width 256, 4 layers, batch x 4": (*GPT, *DEEP, "--batch-size-per-device", "32"),
}


def step_times(experiment: str, *options: str) -> tuple[float, float]:
    """Return the estimated and the measured time of a step, in seconds."""
    command = (sys.executable, "-m", "spmdtrain.plan", "--config", str(EXPERIMENTS / experiment))
    asked = ("--topology", "cpu:8", "--measure", "--no-advice", "--json")
    found = json.loads(subprocess.check_output((*command, *options, *asked)))
    return found["time"]["estimate"], found["measured"]["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in given.only:
        experiment, *options = CONFIGURATIONS[name]
        if experiment == GPT[0]:
            options += ["--data-dir", given.data_dir]
        found[name] = step_times(experiment, *options)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    rows = {name: found[name] for name in CONFIGURATIONS if name in found}
    print("| configuration | estimated, ms | measured, ms |\n|---|---:|---:|")
    for name in sorted(rows, key=lambda name: rows[name][1]):
        print(f"| {name} | {rows[name][0] * 1e3:.1f} | {rows[name][1] * 1e3:.1f} |")
    estimated, measured = (sorted(rows, key=lambda name: rows[name][n]) for n in (0, 1))
    print(f"the order of the estimates is {'' if estimated == measured else 'NOT '}the measured")


if __name__ == "__main__":
    main()
