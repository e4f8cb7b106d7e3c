"""Collectives that time out, in real processes."""

import re
import sys
from typing import Any

from helpers import BOUND, together

from spmdtrain.testing import run_processes

GLOO = """
import sys, time
import jax, numpy as np
import spmdtrain
from jax.sharding import NamedSharding, PartitionSpec as P
from spmdtrain.distributed import process_group
from spmdtrain.xla.compiler import compiler_options, configure_collectives
from spmdtrain.config.options import CollectiveOptions

spmdtrain.initialize()
options = CollectiveOptions(timeout=float(sys.argv[1]) or None, cpu_implementation="gloo")
configure_collectives(options, process_group.count())
mesh = jax.make_mesh((jax.device_count(),), ("data",))
step = jax.jit(
    jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    ),
    compiler_options=compiler_options(options, jax.devices()[0].platform),
)
ones = np.ones((4, 2), np.float32)
x = jax.make_array_from_callback(ones.shape, NamedSharding(mesh, P("data")), ones.__getitem__)
step = step.lower(x).compile()
process_group.barrier()  # so that neither waits for the other's compiler
print("first", float(step(x).addressable_data(0).sum()), flush=True)
if process_group.rank() == 1:
    time.sleep(5)
began = time.time()
try:
    print("second", float(step(x).addressable_data(0).sum()), flush=True)
except Exception as error:
    print("ended after", time.time() - began, error, flush=True)
    raise
"""


def test_a_collective_of_several_processes_ends_them_when_the_timeout_is_over() -> None:
    def both(timeout: float) -> list[Any]:
        line = [sys.executable, "-c", GLOO, str(timeout)]
        return run_processes(line, processes=2, devices_per_process=2, timeout=BOUND, check=False)

    patient, limited = together(lambda: both(0), lambda: both(1.5))
    assert [one.code for one in patient] == [0, 0], patient
    assert all("second 8.0" in one.output for one in patient)
    chief = limited[0]
    assert chief.code != 0 and "second" not in chief.output, chief.output
    # The first of its devices to give up closes its connections, and another may tell of that.
    reason = r"Gloo all-reduce failed: .*(Timed out waiting 2000ms|Connection closed by peer)"
    assert re.search(reason, chief.output), chief.output
    (seconds,) = re.findall(r"ended after (\S+)", chief.output)
    assert 1.9 < float(seconds) < 5
    assert limited[1].code != 0
