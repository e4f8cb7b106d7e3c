"""Losses of several terms with their own weights, scalars, and batch-coupled objectives."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_helpers import (
    ROWS,
    check_equal,
    equations,
    gradients,
    on,
    tokens_batch,
    tokens_model,
    trainer,
)

from spmdtrain import Combination, Scalar, UserError, batch_coupled
from spmdtrain.config.option_groups import CollectiveOptions
from spmdtrain.sharding.placement import use_placement
from spmdtrain.step.metrics import Means, Sums

COEFFICIENTS = {"tokens": 1.0, "examples": 0.5, "penalty": 0.1}
# Devices, microbatches, the reduction of gradients: all paths of `Gradients`.
WAYS: list[tuple[int, int, str | None]] = [
    (1, 4, None),
    (8, 1, None),  # on CPU flattened under shard_map
    (8, 4, None),
    (8, 4, "automatic"),
    (2, 2, "all_reduce"),
]


def two_losses(model: Any, batch: Any) -> dict[str, Any]:
    """A loss of tokens, one of labelled examples only, and a penalty on a parameter."""
    output = model(batch["x"])
    error = output - batch["y"]
    return {
        "loss": Combination(COEFFICIENTS),
        "tokens": (error**2, batch["tokens"]),
        "examples": (jnp.abs(error).sum(1), batch["examples"]),
        "penalty": Scalar((model(jnp.zeros((1, 3, 5))) ** 2).sum()),
    }


def expected(params: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same, as one function of the whole batch on one device, without spmdtrain."""

    def of(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        def model(x: Any) -> jax.Array:
            return jnp.tanh(x @ params["first"]) @ params["second"] + params["shift"]

        error = model(batch["x"]) - batch["y"]
        tokens, examples = batch["tokens"], batch["examples"]
        terms = {
            "tokens": (error**2 * tokens).sum() / max(tokens.sum(), 1e-9),
            "examples": (jnp.abs(error).sum(1) * examples).sum() / max(examples.sum(), 1e-9),
            "penalty": (model(jnp.zeros((1, 3, 5))) ** 2).sum(),
        }
        return sum((COEFFICIENTS[n] * x for n, x in terms.items()), jnp.zeros(())), terms

    found, (loss, terms) = jax.grad(lambda p: of(p)[0])(params), of(params)
    return {name: np.asarray(x) for name, x in (found | terms | {"loss": loss}).items()}


@pytest.mark.parametrize("missing", ["some", "in a microbatch", "all"])
def test_each_term_has_the_weights_of_the_whole_batch(missing: str) -> None:
    batch = tokens_batch(np.random.default_rng(1))
    if missing == "in a microbatch":
        batch["examples"][np.arange(ROWS) % 4 < 2] = 0  # microbatches 0 and 1 of 4
    if missing == "all":
        batch["examples"][:] = 0
    one = trainer(model=tokens_model(), objective=two_losses, mesh=on(1))
    reference = expected(one.functions.init(0).params, batch)
    check_equal(gradients(one, batch), reference, "on one device")
    for devices, microbatches, reduction in WAYS if missing != "all" else WAYS[:3]:
        of = trainer(
            model=tokens_model(),
            objective=two_losses,
            mesh=on(devices),
            strategy="mirrored",
            microbatches=microbatches,
            collectives=CollectiveOptions(reduction=reduction),
        )
        check_equal(gradients(of, batch), reference, f"{devices} {microbatches} {reduction}")
