"""spmdtrain as one uses it: with its files, and a bar at a terminal."""

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
from nets import net_of

from spmdtrain import ArrayDataset, CollectiveOptions, Trainer
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.data import loader
from spmdtrain.train import executor

gate.mark("imported")
net = net_of(work)
options: dict[str, Any] = {"compute_dtype": net.compute_dtype}
if work.accelerator:
    gate.device_peak = lambda: (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"]
if work.per_dispatch > 1:
    options |= {"steps_per_dispatch": work.per_dispatch, "data_on_device": True}
if "--automatic" in sys.argv:
    options["collectives"] = CollectiveOptions(reduction="automatic")
train_batches = loader.train_batches


saving: list[Checkpoints] = []  # one for each save of the segment
save = Checkpoints.save


def noted(self: Checkpoints, *arguments: Any, **options: Any) -> None:
    saving.append(self)
    save(self, *arguments, **options)


Checkpoints.save = noted  # type: ignore[method-assign]


def gated(*arguments: Any, **options: Any) -> Iterator[Any]:
    """The batches as the loop takes them, which stops between segments once all steps are done."""
    due = made = 0
    for batch in train_batches(*arguments, **options):
        if made >= due:
            jax.block_until_ready(run.state)
            for one in saving:  # what is being written still is this segment's
                one.wait()
            gate.wait(steps=made - due + work.segment, saves=len(saving)) or os._exit(0)
            saving.clear()
            due = made + work.segment
        leaf = jax.tree.leaves(batch)[0]
        made += leaf.shape[0] if leaf.shape[0] != work.batch_size else 1
        yield batch
        if made == 1 or made == work.per_dispatch:
            jax.block_until_ready(run.state)
            gate.mark("first step")


vars(executor)["train_batches"] = gated
images, labels = work.arrays()
# One for all processes; the benchmark removes what is in its temporary folder.
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
