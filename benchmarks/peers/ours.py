"""spmdtrain with its defaults: with its files, and a progress bar on a terminal."""

from gate import Gate
from work import Work

gate, work = Gate(), Work.from_arguments()

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = str(work.devices)
if work.processes > 1:
    host, port = gate.address.split(":")
    tasks = [f"{host}:{int(port) + n}" for n in range(work.processes)]
    task = {"type": "worker", "index": gate.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": tasks}, "task": task})

import jax
import nets

from spmdtrain import ArrayDataset, CollectiveOptions, Trainer
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.data import loader
from spmdtrain.data.sampling import CountedBatches
from spmdtrain.step.program import plan_step
from spmdtrain.train import executor

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
train_batches = loader.train_batches


saving: list[Checkpoints] = []  # one for each save of the segment
save = Checkpoints.save


def record_save(self: Checkpoints, *arguments: Any, **options: Any) -> None:
    saving.append(self)
    save(self, *arguments, **options)


Checkpoints.save = record_save  # type: ignore[method-assign]


def gated(*arguments: Any, **options: Any) -> Iterator[Any]:
    """Yields the batches; waits at the gate between segments, after all steps are complete."""
    due = count = 0
    for batch in train_batches(*arguments, **options):
        if count >= due:
            jax.block_until_ready(run.state)
            for checkpoints in saving:  # pending writes belong to this segment
                checkpoints.wait()
            gate.wait(steps=count - due + work.segment, saves=len(saving)) or os._exit(0)
            saving.clear()
            due = count + work.segment
        leading = jax.tree.leaves(batch)[0].shape[0]
        steps = leading if leading != work.batch_size else 1
        steps = int(batch.count) if isinstance(batch, CountedBatches) else steps
        count += steps
        yield batch
        if count == steps:
            jax.block_until_ready(run.state)
            gate.mark("first step")


vars(executor)["train_batches"] = gated
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
run.fit(ArrayDataset({"image": images, "label": labels}), epochs=10_000)
