"""spmdtrain with one core per process: the flowers' MobileNetV2, or an MLP.

`--core N` is the core of the first process, `--statistics global|replica` the batch statistics.
"""

from gate import Gate
from work import Work

gate, work = Gate(), Work.from_arguments()

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--core", type=int, default=0)
parser.add_argument("--statistics", default="global")
options = parser.parse_known_args()[0]
# Before JAX starts threads: XLA starts one per available core.
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[(options.core + gate.rank) % len(cores)]})
os.environ["JAX_NUM_CPU_DEVICES"] = "1"
if work.processes > 1:
    host, port = gate.address.split(":")
    tasks = [f"{host}:{int(port) + n}" for n in range(work.processes)]
    task = {"type": "worker", "index": gate.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": tasks}, "task": task})

import jax
from nets import net_of

from spmdtrain import ArrayDataset, Experiment, RunConfig, Trainer, resolve_config
from spmdtrain.config.experiment import load_experiment
from spmdtrain.document.terminal import Terminal
from spmdtrain.train import executor

gate.mark("imported")
FLOWERS = Path(__file__).parents[2] / "experiments" / "flowers_mobilenet.py"
train_batches = vars(executor)["train_batches"]


def gated(*arguments: Any, **options: Any) -> Iterator[Any]:
    """Yields the batches; waits at the gate between segments, after all steps are complete."""
    for count, batch in enumerate(train_batches(*arguments, **options)):
        if count % work.segment == 0:
            jax.block_until_ready(run.state)
            gate.wait() or os._exit(0)
        yield batch


def experiment_and_config() -> tuple[Experiment, RunConfig]:
    """Returns the workload without evaluations and saves."""
    common: dict[str, Any] = {
        "workdir": str(Path(tempfile.gettempdir()) / f"held-{gate.address.replace(':', '-')}"),
        "global_batch_size": work.batch_size,
        "epochs": None,
        "steps": 10**6,
        "checkpoint_every_steps": 10**6,
        "steps_per_dispatch": 1,  # the gate counts dispatches
    }
    if work.workload == "flowers":
        flowers = load_experiment(str(FLOWERS), frozenset()).module
        config = flowers.Config(data_dir=work.data, batch_statistics=options.statistics, **common)
        config = resolve_config(config)
        return dataclasses.replace(flowers.build(config), validation=None, test=None), config
    net, (images, labels) = net_of(work), work.arrays()
    config = resolve_config(RunConfig(**common))
    data = ArrayDataset({"image": images, "label": labels})
    return Experiment(
        model=net.make, objective=net.objective, optimizer=net.optimizer, train=data
    ), config


vars(executor)["train_batches"] = gated
experiment, config = experiment_and_config()
run = Trainer.from_experiment(experiment, config, terminal=Terminal(quiet=True))
run.fit(experiment.train)
sys.exit("the run ended before the benchmark")
