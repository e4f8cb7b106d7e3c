"""Estimated and measured step times of four configurations on eight virtual CPU devices.

    python benchmarks/plans.py --data-dir FOLDER

FOLDER has the text on which the transformer trains. Each configuration is estimated and measured
by `spmdtrain.plan --measure` in a process of its own; nothing else must run on the machine. The
order of the estimates must be the order of the measured times: a plan is used to choose between
configurations.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SPLIT = ("--strategy", "fully_sharded", "--sharding.min-size", "1")
TINY = ("--preset", "tiny")


def step_times(experiment: str, *options: str) -> tuple[float, float]:
    """Return the estimated and the measured time of a step, in seconds."""
    command = (sys.executable, "-m", "spmdtrain.plan", "--config", str(EXPERIMENTS / experiment))
    asked = ("--topology", "cpu:8", "--measure", "--no-advice", "--json")
    found = json.loads(subprocess.check_output((*command, *options, *asked)))
    return found["time"]["estimate"], found["measured"]["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    gpt = ("--data-dir", parser.parse_args().data_dir, *TINY)
    wide = ("--width", "128", "--heads", "8", "--batch-size-per-device", "16")
    layers = ("--width", "256", "--heads", "8", "--layers", "4")
    configurations = {
        "MLP, fully sharded": ("digits_mlp.py", *SPLIT),
        "transformer": ("shakespeare_gpt.py", *gpt, "--batch-size-per-device", "16"),
        "transformer, width 256, fully sharded": ("shakespeare_gpt.py", *gpt, *SPLIT, *layers),
        "transformer, width 128": ("shakespeare_gpt.py", *gpt, *wide),
    }
    print("| configuration | estimated, ms | measured, ms |\n|---|---|---|")
    found = []
    for name, (experiment, *options) in configurations.items():
        found.append(step_times(experiment, *options))
        print(f"| {name} | {found[-1][0] * 1e3:.1f} | {found[-1][1] * 1e3:.1f} |", flush=True)
    orders = [sorted(range(len(found)), key=lambda row: found[row][n]) for n in (0, 1)]
    print(f"the order of the estimates is {'' if orders[0] == orders[1] else 'NOT '}the measured")


if __name__ == "__main__":
    main()
