"""A generative adversarial network on 8 x 8 digits: two models, two optimizers, a custom loop.

Expected: after 150 epochs, in about a minute on two CPU cores, a distance of about 0.9 to unseen
digits (near 20 at the start; the distance between unseen digits and training digits is 0.3).

    python -m spmdtrain.run --config experiments/digits_gan.py

The distance is Frechet's, between Gaussians fitted to the pixels of generated and of real digits
(Heusel et al. 2017, arXiv:1706.08500, without their network). Samples are written to samples.png in
the workdir. The digits come with scikit-learn (extra `examples`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_mlp import load_digits
from etils import epath

from spmdtrain import Loop, Mode, RunConfig, TrainState, Variables, as_adapter, weighted_mean
from spmdtrain.models import MLP

PIXELS = 64
SAMPLES = 512  # generated digits for the distance

Batch = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    epochs: int | None = 150
    global_batch_size: int | None = 64
    learning_rate: float | None = 1e-3
    cpu_devices: int | None = 8
    log_every: int = 100
    eval_every_steps: int | None = 500
    checkpoint_every_steps: int | None = 500
    best_metric: str = "distance"
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers of both models."""
    noise: int = 32
    """Dims of the noise that digits are generated from."""


def train(config: Config, loop: Loop) -> None:
    """Trains; the run command calls it."""
    generator = as_adapter(partial(MLP, config.noise, config.hidden, PIXELS))
    critic = as_adapter(partial(MLP, PIXELS, config.hidden, 1))
    optimizer = optax.adam(config.learning_rate, b1=0.5)

    def init(key: jax.Array) -> dict[str, Any]:
        models = {"generator": generator, "critic": critic}
        params = {
            name: model.init(model.given, jax.random.fold_in(key, index)).params
            for index, (name, model) in enumerate(models.items())
        }
        return {"params": params, "opt_state": {n: optimizer.init(p) for n, p in params.items()}}

    def generate(params: Any, noise: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(call(generator, params, noise))

    def score(params: Any, pixels: jax.Array) -> jax.Array:
        return call(critic, params, pixels)[:, 0]

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Any]:
        real = batch["image"].reshape(-1, PIXELS)
        noise = jax.random.normal(key, (len(real), config.noise))
        params, opt_state = dict(state.params), dict(state.opt_state)

        def critic_loss(params: Any, generated: jax.Array) -> jax.Array:
            on_real = cross_entropy(score(params, real), 0.9)  # one-sided label smoothing
            return weighted_mean(on_real + cross_entropy(score(params, generated), 0.0))

        def generator_loss(params: Any, critic_params: Any) -> jax.Array:
            generated = generate(params, noise)
            return weighted_mean(cross_entropy(score(critic_params, generated), 1.0))

        losses = {}
        for name, loss, fixed in (
            ("critic", critic_loss, generate(params["generator"], noise)),
            ("generator", generator_loss, params["critic"]),
        ):
            losses[name], gradients = jax.value_and_grad(loss)(params[name], fixed)
            updates, opt_state[name] = optimizer.update(gradients, opt_state[name])
            params[name] = optax.apply_updates(params[name], updates)
        after = replace(state, params=params, opt_state=opt_state)
        return after, {f"{name}_loss": loss for name, loss in losses.items()}

    images, validation, _ = load_digits()
    unseen = validation.rows(np.arange(len(validation)))["image"].reshape(-1, PIXELS)
    noise = np.random.default_rng(config.seed).standard_normal((SAMPLES, config.noise), np.float32)
    sample = loop.compile(lambda params: generate(params, jnp.asarray(noise)))

    state = loop.start(init, train=images)
    compiled = loop.compile_step(step)
    for batch in loop.batches():
        state, output = compiled(state, batch)
        loop.end_step(state, output)
        if loop.should_evaluate():
            generated = np.asarray(sample(state.params["generator"]))
            loop.log_evaluation({"distance": distance(generated, unseen)})
    generated = np.asarray(sample(state.params["generator"]))
    if config.workdir is not None and jax.process_index() == 0:
        draw(generated[:64], epath.Path(config.workdir) / "samples.png")


def call(model: Any, params: Any, x: jax.Array) -> jax.Array:
    """Calls a model without batch statistics or dropout."""
    result: jax.Array
    result, _ = model.run(
        lambda model, x: model(x), Variables(params, {}), x, jax.random.key(0), Mode.TRAIN
    )
    return result


def cross_entropy(logits: jax.Array, target: float) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, target))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the Frechet distance of Gaussians fitted to rows of pixels, (N, D) and (M, D)."""
    means = [x.mean(0, dtype=np.float64) for x in (a, b)]
    covariances = [np.cov(x.astype(np.float64), rowvar=False) for x in (a, b)]
    # The eigenvalues of a product of two covariances are real and not negative, up to rounding.
    common = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).real.clip(min=0)).sum()
    between = float(np.square(means[0] - means[1]).sum())
    return between + float(np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * common)


def draw(pixels: np.ndarray, path: epath.Path) -> None:
    """Writes 64 digits as an image of 8 x 8 digits."""
    import io

    from PIL import Image

    digits = np.pad(pixels.reshape(8, 8, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows = (255 * digits.transpose(0, 2, 1, 3).reshape(80, 80)).astype(np.uint8)
    picture = Image.fromarray(rows).resize((640, 640), Image.Resampling.BOX)
    with io.BytesIO() as file:
        picture.save(file, "PNG")
        path.write_bytes(file.getvalue())
