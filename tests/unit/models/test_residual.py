"""The residual stream of transformers with split tokens: its memory, and collectives on TPUs."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import environment
from plan_helpers import needs_libtpu

from spmdtrain import MeshSpec, Trainer
from spmdtrain.document.terminal import Terminal
from spmdtrain.models.transformer import TRANSFORMER_RULES, Transformer, TransformerConfig
from spmdtrain.plan import topologies
from spmdtrain.plan.topologies import compiler_environment, devices_of
from spmdtrain.sharding.mesh import abstract_devices
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step

ROWS, WIDTH, LAYERS = 64, 128, 32
TOPOLOGY = topologies.parse("v5e:2x4")


def step(length: int, layers: int, **options: Any) -> CompiledStep:
    """Compiles a step of a transformer, whose heads and hidden values are split over "tensor"."""
    config = TransformerConfig(
        vocabulary=64,
        rows=64,
        layers=layers,
        width=WIDTH,
        heads=4,
        hidden=WIDTH,
        context=length,
        unroll=False,
    )
    trainer = Trainer(
        model=partial(Transformer, config),
        objective=lambda model, x: {"loss": model.token_losses(x[:, :-1], x[:, 1:]).loss},
        optimizer=optax.sgd(0.1),
        mesh=MeshSpec(data=2, tensor=4),
        rules=TRANSFORMER_RULES,
        global_batch_size=ROWS,
        compilation_cache="off",
        terminal=Terminal(quiet=True),
        **options,
    )
    with jax.default_device(trainer.placement.devices[0]):
        return compiled_step(trainer, jax.ShapeDtypeStruct((ROWS, length + 1), jnp.int32))


@pytest.mark.slow
def test_a_device_keeps_its_part_of_the_tokens_between_blocks() -> None:
    memory = step(128, LAYERS, remat="full").memory
    whole = 4 * LAYERS * ROWS // 2 * 128 * WIDTH  # bytes of the inputs of all blocks
    assert memory.temp_size_in_bytes < 0.7 * whole, memory


def print_collectives_for_tpus() -> None:
    """Prints kind, axes and bytes of the collectives of a step on TPUs."""
    with abstract_devices(devices_of(TOPOLOGY)):
        found = step(128, 1, compute_dtype="bfloat16").collectives
    print(json.dumps([(x.kind, x.axes, x.bytes, x.line) for x in found]))


@needs_libtpu
@pytest.mark.nightly
def test_for_tpus_each_half_of_a_block_scatters_and_gathers_instead_of_an_all_reduce() -> None:
    # In a process of its own, because programs for absent devices cannot be read from the cache.
    code = f"import {__name__}; {__name__}.print_collectives_for_tpus()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(8) | compiler_environment(TOPOLOGY) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    residual = 2 * ROWS // 2 * 128 * WIDTH  # bytes of the residual stream of a device's rows
    over = [kind for kind, axes, size, _ in found if axes == ["tensor"] and size >= residual]
    assert set(over) == {"reduce-scatter", "all-gather"}, found
    # Forward and backward: two halves of a block, the embedding or the output layer.
    assert over.count("reduce-scatter") == 6, found
