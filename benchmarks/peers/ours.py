"""spmdtrain with its defaults: with its files, and a progress bar on a terminal."""

from gate import Gate
from work import Work

gate, work = Gate(), Work.from_arguments()

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = str(work.devices)
if work.processes > 1:
    host, port = gate.address.split(":")
    tasks = [f"{host}:{int(port) + n}" for n in range(work.processes)]
    task = {"type": "worker", "index": gate.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": tasks}, "task": task})

import gated_batches
import jax
import nets

from spmdtrain import ArrayDataset, CollectiveOptions, Trainer
from spmdtrain.step.program import plan_step

gate.mark("imported")
net = nets.net_of(work)
options: dict[str, Any] = {"compute_dtype": net.compute_dtype}
if work.accelerator:
    gate.device_peak = lambda: (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"]
if work.per_dispatch:
    options["steps_per_dispatch"] = work.per_dispatch
if "--data-on-device" in sys.argv:
    options["data_on_device"] = True
if "--automatic" in sys.argv:
    options["collectives"] = CollectiveOptions(reduction="automatic")
if gate.checks:
    import jax_work
    import same_work
    from flax import nnx

    module = net.make(rngs=nnx.Rngs(0))
    nets.assign(module, same_work.weights(work))
    trainer = Trainer(
        model=module,
        objective=net.objective,
        optimizer=net.optimizer,
        global_batch_size=work.batch_size,
        compute_dtype=net.compute_dtype,
    )
    functions, (inputs, targets) = trainer.functions, same_work.first_batch(work)
    batch = {"image": inputs, "label": targets}
    step, state = plan_step(functions, batch).program(), functions.init(0)
    facts = jax_work.facts(step, state, batch, params=state.params)
    gate.report_work(float(step(state, batch)[1].metrics["loss"]), **facts)

images, labels = work.arrays()
# The same for all processes; the benchmark removes its temporary folder.
workdir = Path(tempfile.gettempdir()) / f"spmdtrain-{gate.address.replace(':', '-')}"
run = Trainer(
    model=net.make,
    objective=net.objective,
    optimizer=net.optimizer,
    global_batch_size=work.batch_size,
    workdir=str(workdir),
    **options,
)
gated_batches.install(gate, work, lambda: run.state)
run.fit(ArrayDataset({"image": images, "label": labels}), epochs=10_000)
