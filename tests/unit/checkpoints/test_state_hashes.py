"""Hashes of the state: independent of the topology, logged beside the training, read again."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import metrics
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain import CallbackContext, FunctionModel, Trainer, UserError
from spmdtrain.checkpoints.checksums import format_sums, read_parts
from spmdtrain.checkpoints.host_copy import StateSums
from spmdtrain.checkpoints.listing import list_checkpoints
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.document.terminal import Terminal
from spmdtrain.record.lines import hash_of_sums
from spmdtrain.record.run import Run
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

P = PartitionSpec


def state_of(values: np.ndarray, devices: int, spec: PartitionSpec) -> TrainState:
    mesh = jax.make_mesh((devices,), ("a",), devices=jax.devices()[:devices])
    split, whole = NamedSharding(mesh, spec), NamedSharding(mesh, P())
    params = {"kernel": jax.device_put(values, split), "bias": jax.device_put(values[0], whole)}
    step, key = jax.device_put((np.int32(3), np.array([1, 2], np.uint32)), whole)
    return TrainState(step, params, (params,), {}, {}, key)


def test_a_state_has_one_hash_on_any_topology_and_another_one_if_a_bit_differs() -> None:
    values = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    flipped = values.copy()
    flipped.view(np.uint32)[17, 3] ^= 1

    def sums(values: np.ndarray, devices: int, spec: PartitionSpec) -> dict[str, str]:
        found = StateSums(state_of(values, devices, spec), in_host_memory=True).parts()
        return format_sums(read_parts(found))

    one = sums(values, 1, P())
    assert list(one) == list(named_leaves(state_of(values, 1, P())))  # in the order of the state
    assert sums(values, 8, P()) == sums(values, 8, P("a")) == sums(values, 4, P(None, "a")) == one
    other = sums(flipped, 8, P("a"))
    names = {name for name in one if one[name] != other[name]}
    assert names == {"params/kernel", "opt_state/0/kernel"}
    assert hash_of_sums(other) != hash_of_sums(one) == hash_of_sums(dict(reversed(one.items())))


def trainer(workdir: Path, **options: Any) -> Trainer:
    return Trainer(
        model=FunctionModel(lambda key: {"w": jax.random.normal(key, (256, 128))}),
        objective=lambda model, batch: {"loss": (batch["x"] @ model["w"]).mean(-1) ** 2},
        optimizer=optax.adam(0.1),
        workdir=str(workdir),
        global_batch_size=16,
        trackers=(),
        terminal=Terminal(quiet=True),
        **options,
    )


@pytest.mark.slow
def test_a_run_logs_the_hashes_of_its_checkpoints_and_trains_to_the_same_bits(
    tmp_path: Path,
) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(48, 256)).astype(np.float32)}
    plain, hashed = trainer(tmp_path / "plain"), trainer(tmp_path / "hashed", log_hash_every=2)
    plain.fit(data, steps=5)
    hashed.fit(data, steps=5)
    pairs = zip(*(jax.tree.leaves(each.state) for each in (plain, hashed)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert not (tmp_path / "plain" / "hashes.jsonl").exists()
    found = Run(str(tmp_path / "hashed")).hashes
    assert list(found) == [2, 4, 5]  # each second one, and the last
    source = list_checkpoints(str(tmp_path / "plain"))
    assert found[5].hash == hash_of_sums(Manifest.read(source.path(5)).sums)
    # Steps that one dispatch makes end where a hash is due.
    several = trainer(tmp_path / "several", log_hash_every=2, steps_per_dispatch=2)
    several.fit(data, steps=5)
    again = Run(str(tmp_path / "several")).hashes
    assert list(again) == [2, 4, 5]
    assert again[4].loss == pytest.approx(found[4].loss, rel=1e-5)
    with pytest.raises(UserError, match="log_hash_every is 0: it must be above 0"):
        trainer(tmp_path, log_hash_every=0)


def test_the_last_step_has_a_hash_also_if_a_callback_makes_it_the_last(tmp_path: Path) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(48, 256)).astype(np.float32)}

    def stop(event: CallbackContext) -> None:
        if event.step == 3:
            event.trainer.stop()

    stopped = trainer(tmp_path, log_hash_every=2, callbacks={"step": stop})
    stopped.fit(data, steps=8)
    found = Run(str(tmp_path)).hashes
    assert list(found) == [2, 3]
    source = list_checkpoints(str(tmp_path))
    assert found[3].hash == hash_of_sums(Manifest.read(source.path(3)).sums)
    assert found[3].loss == metrics(tmp_path, "train")[-1]["loss"]


@pytest.mark.slow
def test_hashes_after_the_step_of_a_resume_are_void(tmp_path: Path) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(48, 256)).astype(np.float32)}
    trainer(tmp_path, log_hash_every=1, checkpoint_every_steps=2).fit(data, steps=4)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    trainer(tmp_path, log_hash_every=3).fit(data, steps=3)
    with (tmp_path / "hashes.jsonl").open("a") as file:
        file.write('no line\n{"step": 11')
    lines = (tmp_path / "hashes.jsonl").read_text().split("\n")[:-2]
    steps = [line.get("step", line.get("resumed")) for line in map(json.loads, lines)]
    assert steps == [1, 2, 3, 4, 2, 3]
    found = Run(str(tmp_path)).hashes
    assert list(found) == [1, 2, 3]
    newer = "".join(json.dumps(json.loads(line) | {"host": "a"}) + "\n" for line in lines)
    (tmp_path / "hashes.jsonl").write_text(newer)
    assert Run(str(tmp_path)).hashes == found
    assert Run(str(tmp_path / "nothing")).hashes == {}
