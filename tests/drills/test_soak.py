"""A long run with nothing but its steps: what goes wrong once in thousands of them."""

import math
from pathlib import Path

from helpers import DIGITS, metrics, run

STEPS = 10_000


def test_ten_thousand_steps_on_eight_virtual_devices(tmp_path: Path) -> None:
    """Without a bound on pending steps, the in-process all-reduce can end the process."""
    ended = run(
        *(DIGITS, "--steps", STEPS, "--eval-every-steps", STEPS, "--dropout", 0),
        *("--checkpoint-every-steps", STEPS, "--log-every", 1000, "--workdir", tmp_path),
        *("--collectives.reduction", "flattened"),
        devices=8,
    )
    assert ended.returncode == 0, ended.stderr
    losses = [line["loss"] for line in metrics(tmp_path, "train")]
    assert len(losses) == 11 and all(map(math.isfinite, losses)) and losses[-1] < 0.1 * losses[0]
