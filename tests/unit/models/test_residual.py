"""The residual stream of transformers with split tokens: its memory, and its collectives on TPUs."""

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
from spmdtrain.models.transformer import TRANSFORMER_RULES, Transformer, TransformerConfig
from spmdtrain.plan import aot, topologies
from spmdtrain.sharding.mesh import abstract_devices
from spmdtrain.terminal import Terminal
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step

ROWS, WIDTH = 8, 256


def step(length: int, **options: Any) -> CompiledStep:
    """Compiles a step of a transformer, whose heads and hidden values are split over "tensor"."""
    config = TransformerConfig(
        vocabulary=64, rows=64, layers=2, width=WIDTH, heads=4, hidden=256, context=length
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
