"""Resident memory of a long run: digits_mlp on 8 virtual CPU devices.

.venv/bin/python benchmarks/soak.py                 # 100,000 steps
.venv/bin/python benchmarks/soak.py --steps 2000    # whether the script works

The run evaluates, saves checkpoints, and writes TensorBoard files and a log. Memory is read every
1,000 steps; the last line is its growth over the second half of the run. Other arguments are
options of the run. It needs Linux's /proc.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
EVERY = 1_000  # steps between two readings
OPTIONS = ("--eval-every-steps", "2000", "--checkpoint-every-steps", "5000")


def resident(pid: int) -> float:
    """Returns the resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(steps: int, workdir: str, options: Sequence[str]) -> dict[int, float]:
    """Runs the training; returns the resident memory in MB by step.

    Args:
      steps: Steps of the run.
      workdir: Its folder.
      options: Further options of the run.

    Raises:
      SystemExit: If the run fails.
    """
    command = [sys.executable, "-u", "-m", "spmdtrain.run", "--config"]
    command += [str(REPOSITORY / "experiments" / "digits_mlp.py"), "--workdir", workdir]
    command += ["--steps", str(steps), "--log-every", str(EVERY), *OPTIONS, *options]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    found: dict[int, float] = {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.match(rf"step (\d+)/{steps}\b", line.replace(",", "")):
                step = int(match[1])
                found[step] = resident(process.pid)
                print(f"step {step:>7,}  {found[step]:.1f} MB", flush=True)
    if process.returncode:
        raise SystemExit(f"the run exited {process.returncode}")
    return found


def growth(found: dict[int, float]) -> float:
    """Returns the growth of memory over the second half of the steps, in percent."""
    last = max(found)
    half = min(found, key=lambda step: abs(step - last / 2))
    return 100 * (found[last] / found[half] - 1)


def main() -> None:
    """Runs the benchmark and prints its readings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workdir", help="default: a temporary folder")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(arguments.steps, arguments.workdir or folder, options)
    print(f"growth over the second half: {growth(found):.2f} %")


if __name__ == "__main__":
    main()
