"""Random crossings of features, and a loop of plain JAX that computes what each of them must give.

A `Cell` is one run with all its features; `draw` draws one from `FEATURES`. `expected` computes its
losses, evaluation, predictions and parameters as the docs define them, without the package: each
batch is the next slice of the examples in their order, epoch after epoch; the loss is
sum(w * v) / sum(w) over the batch; row r of a batch belongs to microbatch r % m.
"""

import math
import random
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any
WIDTH, HIDDEN, OUTPUTS = 5, 8, 3
MOMENTUM, EPSILON, KEEP = 0.9, 1e-5, 0.75
ALPHA, RANK = 3.0, 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run. The defaults are the plain one; each other value is a feature of the crossing."""

    entry: str = "trainer"
    model: str = "function"
    optimizer: str = "sgd"
    strategy: str = "mirrored"
    devices: int = 1
    microbatches: int = 1
    steps_per_dispatch: int | None = 1
    remat: str = "none"
    exact: int | None = None
    compute_dtype: str = "float32"
    weights: str = "none"
    draws: bool = False
    source: str = "arrays"
    examples: int = 40
    batch: int = 8
    eval_batch: int | None = None
    steps: int = 6
    eval_every: int | None = None
    continued: str = "no"
    begun_with: tuple[tuple[str, Any], ...] = ()  # other options of the part before a resume
    average: float | None = None
    freeze: bool = False
    lora: bool = False
    seed: int = 0

    @property
    def features(self) -> dict[str, Any]:
        """What differs from the plain run."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in values.items() if value != plain[name]}


# Values of each feature with their weights. A value that several features exclude is drawn anyway:
# a refusal that names the pair is a right answer.
FEATURES: dict[str, list[tuple[Any, int]]] = {
    "entry": [("trainer", 6), ("from_keras", 2), ("loop", 2)],
    "model": [
        *(("function", 4), ("nnx", 3), ("linen", 2), ("keras", 2)),
        *(("batch_norm", 2), ("eval_batch_norm", 2), ("eval_dropout", 2)),
    ],
    "optimizer": [("sgd", 2), ("momentum", 2), ("adam", 3), ("clipped", 2), ("schedule", 3)],
    "strategy": [
        *(("mirrored", 4), ("default", 1), ("zero", 2), ("fully_sharded", 2)),
        *(("central_storage", 1), ("hybrid", 1), ("tensor_parallel", 1)),
    ],
    "devices": [(1, 1), (2, 2), (4, 4), (8, 1)],
    "microbatches": [(1, 4), (2, 2), (4, 1)],
    "steps_per_dispatch": [(1, 3), (None, 1), (2, 1), (3, 1)],
    "remat": [("none", 4), ("full", 1), ("dots", 1)],
    "exact": [(None, 6), (8, 1)],
    "compute_dtype": [("float32", 7), ("bfloat16", 1)],
    "weights": [("none", 2), ("data", 2), ("zeros", 2), ("params", 1)],
    "draws": [(False, 3), (True, 1)],
    "source": [
        *(("arrays", 4), ("records", 2), ("grain", 2), ("hugging_face", 1)),
        *(("grain_stream", 1), ("hugging_face_stream", 1), ("py_dataset", 2)),
    ],
    "examples": [(40, 2), (37, 2), (24, 1)],
    "batch": [(8, 2), (16, 2), (24, 1)],
    "eval_batch": [(None, 2), (5, 1), (16, 1)],
    "steps": [(1, 1), (2, 1), (6, 3), (7, 2)],
    "eval_every": [(None, 1), (1, 1), (3, 1)],
    "continued": [("no", 4), ("resumed", 2), ("twice", 1), ("forked", 1), ("restarted", 1)],
    "average": [(None, 3), (0.9, 1)],
    "freeze": [(False, 4), (True, 1)],
    "lora": [(False, 3), (True, 1)],
}
# What a resume may change: the numbers stay. Only without rules, which the strategies then need.
BEGUN_WITH: list[tuple[tuple[str, Any], ...]] = [
    (),
    (("devices", 2), ("strategy", "zero")),
    (("devices", 4), ("strategy", "fully_sharded")),
    (("devices", 1), ("steps_per_dispatch", 2)),
    (("remat", "full"), ("strategy", "mirrored")),
]
FREE_IN_A_LOOP: tuple[str, ...] = (
    "optimizer",
    "strategy",
    "devices",
    "weights",
    "draws",
    "source",
    "examples",
)
FREE_IN_A_LOOP = (*FREE_IN_A_LOOP, "batch", "steps", "continued", "seed")
"""What a loop has: the user writes the model and the update."""


def draw(seed: int) -> Cell:
    """Draws the cell of a seed; about a third of the features keep their plain value."""
    generator = random.Random(seed)
    chosen: dict[str, Any] = {"seed": seed}
    for name, values in FEATURES.items():
        plain = generator.random() < 0.35
        value = generator.choices([v for v, _ in values], [w for _, w in values])[0]
        chosen |= {} if plain else {name: value}
    if chosen.get("entry") == "from_keras":  # its objective, data and average are Keras' own
        left = ("model", "draws", "freeze", "lora")
        chosen = {name: value for name, value in chosen.items() if name not in left}
        if chosen.get("weights") == "params":
            del chosen["weights"]
        if chosen.get("source") != "py_dataset":
            chosen.pop("source", None)
    if chosen.get("entry") == "loop":
        allowed = {"entry", *FREE_IN_A_LOOP}
        chosen = {name: value for name, value in chosen.items() if name in allowed}
        if chosen.get("continued") in ("twice", "forked", "restarted"):
            chosen["continued"] = "resumed"
    if chosen.get("weights") == "params" and "model" in chosen:
        del chosen["weights"]  # only the function's objective sees the parameters
    if chosen.get("lora"):  # which freezes the model by itself
        chosen.pop("freeze", None)
        chosen.pop("weights", None) if chosen.get("weights") == "params" else None
    resumes = chosen.get("continued") == "resumed" and chosen.get("entry") != "loop"
    if resumes and chosen.get("strategy") != "tensor_parallel":
        chosen["begun_with"] = generator.choice(BEGUN_WITH)
    return Cell(**chosen)


# -- the data and the initial parameters -----------------------------------------------------------


def make_data(cell: Cell, *, count: int | None = None, shift: int = 0) -> dict[str, np.ndarray]:
    """The examples of a cell: x, y, and w with the kind of weights that it has."""
    generator = np.random.default_rng(cell.seed + shift)
    count = cell.examples if count is None else count
    x = generator.normal(size=(count, WIDTH)).astype(np.float32)
    y = np.tanh(x[:, :OUTPUTS] - x[:, 1:][:, :OUTPUTS] ** 2).astype(np.float32)
    weights = generator.uniform(0.1, 3, size=count).astype(np.float32)
    if cell.weights == "zeros":
        weights[generator.random(count) < 0.4] = 0
    return {"x": x, "y": y, "w": weights}


def first_params(cell: Cell) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(cell.seed + 1)
    return {
        "first/kernel": generator.normal(size=(WIDTH, HIDDEN)).astype(np.float32) / 2,
        "first/bias": generator.normal(size=HIDDEN).astype(np.float32) / 5,
        "second/kernel": generator.normal(size=(HIDDEN, OUTPUTS)).astype(np.float32) / 2,
        "second/bias": generator.normal(size=OUTPUTS).astype(np.float32) / 5,
    }


def make_optimizer(cell: Cell) -> optax.GradientTransformation:
    """The optimizer; the schedule has another rate in every step."""
    if cell.optimizer == "momentum":
        return optax.sgd(0.05, momentum=0.9)
    if cell.optimizer == "adam":
        return optax.adam(0.02, eps=1e-4)
    if cell.optimizer == "clipped":
        return optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.2))
    if cell.optimizer == "schedule":
        return optax.sgd(optax.linear_schedule(0.3, 0.0, 9))
    return optax.sgd(0.1)


# -- the loop of plain JAX -------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """What a run gives: of each step the loss, and at its end the rest."""

    losses: list[float]
    evaluation: dict[str, float]
    predictions: np.ndarray | None
    params: dict[str, np.ndarray]


def forward(
    cell: Cell, params: PyTree, stats: PyTree, x: jax.Array, *, training: bool
) -> tuple[jax.Array, PyTree]:
    """The model, by hand: two layers, and in some cells a batch normalization between them."""
    kernel = params["first/kernel"]
    if cell.lora:
        kernel = (
            kernel + ALPHA / RANK * params["lora/first/kernel/a"] @ params["lora/first/kernel/b"]
        )
    hidden = jnp.tanh(x @ kernel + params["first/bias"])
    if cell.model in ("batch_norm", "eval_batch_norm"):
        mean, variance = stats
        if training and cell.model == "batch_norm":
            mean, variance = hidden.mean(0), hidden.var(0)
            moved = zip(stats, (mean, variance), strict=True)
            stats = tuple(MOMENTUM * old + (1 - MOMENTUM) * new for old, new in moved)
        hidden = (hidden - mean) / jnp.sqrt(variance + EPSILON)
    return hidden @ params["second/kernel"] + params["second/bias"], stats


def values_and_weights(
    cell: Cell, output: jax.Array, batch: PyTree, params: PyTree
) -> tuple[jax.Array, jax.Array]:
    values = ((output - batch["y"]) ** 2).mean(-1)
    if cell.weights == "none":
        return values, jnp.ones_like(values)
    if cell.weights == "params":
        return values, jax.nn.sigmoid(batch["x"][:, 0] + params["first/bias"][0])
    return values, jnp.asarray(batch["w"])


def drawn(x: jax.Array, key: jax.Array) -> jax.Array:
    """Drops inputs at random."""
    return jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)


def batch_loss(
    trained: PyTree, fixed: PyTree, cell: Cell, stats: PyTree, batch: PyTree, key: jax.Array
) -> tuple[jax.Array, PyTree]:
    """sum(w * v) / sum(w) over the microbatches, each with the statistics after the last one."""
    params, total, weight = trained | fixed, jnp.zeros(()), jnp.zeros(())
    for part in range(cell.microbatches):
        rows = {name: x[part :: cell.microbatches] for name, x in batch.items()}
        x = rows["x"]
        if cell.draws:
            of_part = key if cell.microbatches == 1 else jax.random.fold_in(key, part)
            x = drawn(
                x, of_part if cell.entry == "loop" else jax.random.fold_in(of_part, OBJECTIVE)
            )
        output, stats = forward(cell, params, stats, x, training=True)
        values, weights = values_and_weights(cell, output, rows, params)
        total, weight = total + (values * weights).sum(), weight + counted(cell, weights)
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1, weight)), stats


def counted(cell: Cell, weights: jax.Array) -> Any:
    """Returns the divisor of the sum: the total weight; for Keras' losses the number of values."""
    return weights.size if cell.entry == "from_keras" else weights.sum()


OBJECTIVE = 0x6F626A65
"""What is folded into a step's key for the objective's own draws. Another number is another run."""


def expected(
    cell: Cell, step_key: jax.Array, evaluated: dict[str, np.ndarray], factors: PyTree
) -> Numbers:
    """Computes a cell; the key is that of the run's steps, the factors are the first of LoRA."""
    data, optimizer = make_data(cell), make_optimizer(cell)
    params: PyTree = first_params(cell) | factors
    fixed = {name: params.pop(name) for name in list(params) if frozen(cell, name)}
    stats: PyTree = (jnp.zeros(HIDDEN), jnp.ones(HIDDEN))
    opt_state, average = optimizer.init(params), params | fixed
    gradient = jax.jit(jax.value_and_grad(batch_loss, has_aux=True), static_argnums=2)
    losses = []
    # A restart begins with the first batch and step again, with parameters and optimizer state.
    numbers = [*range(cell.steps)] * (2 if cell.continued == "restarted" else 1)
    for update, step in enumerate(numbers):
        positions = np.arange(step * cell.batch, (step + 1) * cell.batch) % cell.examples
        batch = {name: x[positions] for name, x in data.items()}
        key = jax.random.fold_in(step_key, step)
        (loss, stats), grads = gradient(params, fixed, cell, stats, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        if cell.average is not None:
            decay = min(cell.average, (2 + update) / (11 + update))
            average = jax.tree.map(
                lambda old, new, d=decay: d * old + (1 - d) * new, average, params | fixed
            )
    final = params | fixed
    used = final if cell.average is None else average
    output, _ = forward(cell, used, stats, jnp.asarray(evaluated["x"]), training=False)
    values, weights = values_and_weights(cell, output, evaluated, used)
    off = np.abs(np.asarray(output) - evaluated["y"]).mean(-1)
    means = {
        "loss": float((values * weights).sum() / counted(cell, weights)),
        "off": float(off.mean()),
    }
    return Numbers(losses, means, np.asarray(output), jax.tree.map(np.asarray, final))


def frozen(cell: Cell, name: str) -> bool:
    return cell.lora != name.startswith("lora/") or (cell.freeze and name.startswith("first/"))


def tolerance(cell: Cell) -> tuple[float, float]:
    """The relative and absolute rounding that a cell may have."""
    return (
        (0.08, 0.03) if cell.compute_dtype == "bfloat16" else (2e-4 * math.sqrt(cell.steps), 1e-5)
    )
