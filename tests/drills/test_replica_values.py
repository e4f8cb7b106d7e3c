"""Values of each replica, in several processes."""

import json
import sys
from pathlib import Path

from helpers import BOUND, environment

from spmdtrain.testing import run_processes

SCRIPT = """
import json, sys
import jax
import numpy as np
import spmdtrain
from spmdtrain import Loop, per_replica

spmdtrain.initialize()
with Loop(steps=1, global_batch_size=8) as loop:
    x = loop.shard_batch(np.arange(8, dtype=np.float32))
    values = per_replica(lambda rows: rows * 2, x)
    sums = jax.jit(lambda x: per_replica(lambda rows: rows.sum(), x))(x)
    found = [values.gather(), values.stack(), values.local(), values.sum(), values.mean()]
    found += [sums.stack(), sums.local()]
print("found", json.dumps([np.asarray(x).tolist() for x in found]))
"""


def test_each_process_has_all_or_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_processes(
        [sys.executable, "script.py"],
        processes=2,
        devices_per_process=2,
        timeout=BOUND,
        env=environment(),
        cwd=tmp_path,
    )
    rows = [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0], [12.0, 14.0]]
    shared = [[x for row in rows for x in row], rows]
    for one, own, sums in zip(ended, (rows[:2], rows[2:]), ([1.0, 5.0], [9.0, 13.0]), strict=True):
        (line,) = [line for line in one.output.splitlines() if line.startswith("found")]
        expected = [*shared, own, [24.0, 32.0], 7.0, [1.0, 5.0, 9.0, 13.0], sums]
        assert json.loads(line.removeprefix("found")) == expected
