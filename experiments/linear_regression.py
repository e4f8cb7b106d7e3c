"""A minimal example in Python: a dense layer fitted to a noisy line.

Expected: a slope near 3, an offset near 2 and a mean squared error near 0.01, in a few seconds.

    python experiments/linear_regression.py
"""

import jax
import numpy as np
import optax
from flax import nnx

from spmdtrain import Trainer


def squared_error(model: nnx.Linear, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


def main() -> None:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (1000, 1)).astype(np.float32)
    y = 3 * x + 2 + random.normal(0, 0.1, x.shape).astype(np.float32)

    trainer = Trainer(
        model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        objective=squared_error,
        optimizer=optax.sgd(0.1),
        log_every=100,
    )
    trainer.fit((x[:800], y[:800]), global_batch_size=16, epochs=5)

    print("mean squared error on new data:", trainer.evaluate((x[800:], y[800:]))["loss"])
    print("slope:", trainer.model.kernel[...].item(), "offset:", trainer.model.bias[...].item())


if __name__ == "__main__":
    main()
