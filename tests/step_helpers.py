"""What tests of the step's options share: one step's gradients, and what its program is made of."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh

from spmdtrain import FunctionModel, MeshSpec, Trainer, TrainState
from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.placement import use_placement
from spmdtrain.step.program import StepOutput, plan_step
from spmdtrain.tree import named_leaves
from spmdtrain.xla import collectives

# Canceled to nearly nothing, an element keeps the rounding of its terms: it is measured against
# the largest of its array.
FLOOR = 5e-6
SHOWS_GRADIENTS = optax.trace(decay=0.0)  # an "optimizer" whose state is the gradient

ROWS, TOKENS, WIDTH = 64, 3, 5  # 64 rows divide over 8 devices and 8 microbatches


def on(devices: int) -> MeshSpec:
    """The mesh of the first so many devices."""
    return MeshSpec(devices=tuple(range(devices)))


def trainer(**options: Any) -> Trainer:
    defaults = {
        "optimizer": SHOWS_GRADIENTS,
        "global_batch_size": ROWS,
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


def one_step(of: Trainer, batch: Any, *, seed: int = 0) -> tuple[TrainState, StepOutput]:
    """The state after one step from the initial one, and the output of the step."""
    with use_placement(of.placement):
        program = plan_step(of.functions, batch).program()
    return run_program(program, of, batch, seed=seed)


def run_program(
    program: Callable[..., Any], of: Trainer, batch: Any, *, seed: int = 0
) -> tuple[TrainState, StepOutput]:
    """The same of a compiled step, which more than one batch or question may share."""
    with use_placement(of.placement):
        placed = jax.device_put(batch, of.placement.batch)
        result: tuple[TrainState, StepOutput] = program(of.functions.init(seed), placed)
    return result


def gradients(
    of: Trainer, batch: Any, program: Callable[..., Any] | None = None
) -> dict[str, np.ndarray]:
    """Gradients and metrics of a batch at the initial parameters, of `SHOWS_GRADIENTS`."""
    after, output = one_step(of, batch) if program is None else run_program(program, of, batch)
    assert bool(output.finite.all())
    shown = named_leaves(after.opt_state.trace) | output.metrics
    return {name: np.asarray(x) for name, x in shown.items()}


def check_equal(found: dict[str, Any], expected: dict[str, Any], what: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        atol = FLOOR * np.abs(value).max()
        np.testing.assert_allclose(
            found[name], value, rtol=1e-5, atol=atol, err_msg=f"{name} {what}"
        )


# -- a small network whose gradients NumPy knows -------------------------------------------------


def _init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (WIDTH, 7)),
        "second": jax.random.normal(second, (7,)),
        "shift": jax.numpy.ones(()),  # smaller than any number of devices
    }


def _apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.numpy.tanh(x @ params["first"]) @ params["second"] + params["shift"]


def tokens_model() -> FunctionModel:
    """(B, tokens, width) to (B, tokens)."""
    return FunctionModel(_init, _apply)


def tokens_objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, Any]:
    """The squared error, weighted by token; the absolute one, weighted by example."""
    error = model(batch["x"]) - batch["y"]
    return {"loss": (error**2, batch["tokens"]), "off": (abs(error), batch["examples"])}


def tokens_batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
    shape = (ROWS, TOKENS)
    batch = {
        "x": generator.normal(size=(*shape, WIDTH)),
        "y": generator.normal(size=shape),
        "tokens": generator.choice([0, 0.25, 1, 3, 100], size=shape),
        "examples": generator.choice([0, 0.5, 7], size=ROWS),
    }
    return {name: x.astype(np.float32) for name, x in batch.items()}


def tokens_expected(params: Any, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `gradients` gives, by NumPy in f64 from the batch as a whole."""
    first, second, shift = (
        np.asarray(params[name], np.float64) for name in ("first", "second", "shift")
    )
    x, y, tokens, examples = (
        np.asarray(batch[name], np.float64) for name in ("x", "y", "tokens", "examples")
    )
    hidden = np.tanh(x @ first)
    error = hidden @ second + shift - y
    each = examples[:, None] * np.ones(TOKENS)
    above = 2 * error * tokens / (tokens.sum() or 1)
    below = above[..., None] * second * (1 - hidden**2)
    return {
        "first": np.einsum("btw,bth->wh", x, below),
        "second": np.einsum("bth,bt->h", hidden, above),
        "shift": above.sum(),
        "loss": (tokens * error**2).sum() / (tokens.sum() or 1),
        "off": (each * np.abs(error)).sum() / (each.sum() or 1),
    }


# -- what a program is made of --------------------------------------------------------------------


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of its inner ones too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, (Jaxpr, ClosedJaxpr)):
                    yield from equations(inner)


def primitives(of: Trainer, batch: Any, name: str) -> list[Any]:
    """The equations of that primitive in the trainer's train step.

    Of products those with matrices: with vectors of zeros what is not finite is looked for.
    """
    steps = of.functions
    with use_placement(of.placement):
        jaxpr = plan_step(steps, batch).program().trace(steps.abstract_state, batch).jaxpr
    found = [equation for equation in equations(jaxpr) if equation.primitive.name == name]
    return [x for x in found if name != "dot_general" or x.invars[-1].aval.ndim > 1]


def in_loops(text: str, mesh: Mesh) -> list[collectives.Collective]:
    """The collectives of a program that are inside of a loop, in what it calls too."""
    parts = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) .*?\{$(.*?)^\}", text, re.M | re.S))
    reached: set[str] = set()
    waiting = re.findall(r"\bbody=%?([\w.\-]+)", text)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            called = re.findall(r"%?([\w.\-]+)", parts[name])
            waiting += [other for other in called if other in parts]
    return [one for name in sorted(reached) for one in collectives.collectives(parts[name], mesh)]
