"""Random crossings of features, and a loop of plain JAX that computes what each of them must give.

A `Cell` is one run with all its features; `draw` draws one from `FEATURES`. `expected` computes its
losses, evaluation, predictions and parameters as the docs define them, without the package: each
batch is the next slice of the examples in their order, epoch after epoch; the loss is
sum(w * v) / sum(w) over the batch; row r of a batch belongs to microbatch r % m, and to virtual
shard r // (batch / shards) of an exact run, each of which draws from a key of its own. Epoch e ends
at step ceil(e * examples / batch), where Keras' callbacks and optimizers do what Keras documents.
"""

import math
import random
from dataclasses import dataclass, field, fields
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
    callback: str = "none"
    average: float | None = None
    freeze: bool = False
    lora: bool = False
    seed: int = 0

    @property
    def fits(self) -> list[range]:
        """The steps of each call of `fit`, counted from 0."""
        if self.continued == "restarted":
            return [range(self.steps)] * 2
        if self.continued == "no" or self.steps == 1:
            return [range(self.steps)]
        return [range(self.steps // 2), range(self.steps // 2, self.steps)]

    @property
    def features(self) -> dict[str, Any]:
        """What differs from the plain run."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {each.name: each.default for each in fields(self)}
        return {name: value for name, value in values.items() if value != plain[name]}


# Values of each feature with their weights. A value that several features exclude is drawn anyway:
# a refusal that names the pair is a right answer.
FEATURES: dict[str, list[tuple[Any, int]]] = {
    "entry": [("trainer", 6), ("from_keras", 3), ("loop", 2)],
    "model": [
        *(("function", 4), ("nnx", 3), ("linen", 2), ("keras", 2)),
        *(("batch_norm", 2), ("eval_batch_norm", 2), ("eval_dropout", 2)),
        ("dropout", 2),
    ],
    "optimizer": [
        *(("sgd", 2), ("momentum", 2), ("adam", 3), ("clipped", 2), ("schedule", 3)),
        *(("Adam", 3), ("SGD", 3), ("ExponentialDecay", 1), ("use_ema", 2)),
    ],
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
    "callback": [
        *(("none", 2), ("LearningRateScheduler", 2), ("ReduceLROnPlateau", 2)),
        *(("EarlyStopping", 2), ("ModelCheckpoint", 2)),
    ],
}
CHANGE_RATE = ("LearningRateScheduler", "ReduceLROnPlateau")
OF_KERAS = ("Adam", "SGD", "ExponentialDecay", "use_ema")
"""Optimizers of Keras; these and the callbacks are those of `from_keras`."""
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
        if chosen.get("callback") in CHANGE_RATE and chosen.get("optimizer", "sgd") == "sgd":
            chosen["optimizer"] = "Adam"  # the plain optimizer is no feature that a message names
        if chosen.get("source") != "py_dataset":
            chosen.pop("source", None)
    else:
        chosen.pop("callback", None)
        if chosen.get("optimizer") in OF_KERAS:
            del chosen["optimizer"]
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
    fixes_program = chosen.get("strategy") == "tensor_parallel" or chosen.get("exact")
    if resumes and not fixes_program:
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
    return plain_keras(cell.optimizer) if cell.optimizer in OF_KERAS else optax.sgd(0.1)


# -- the optimizers and callbacks of Keras ---------------------------------------------------------

RATE = 0.05
DECAY_STEPS, DECAY_RATE = 3, 0.5
EMA_MOMENTUM = 0.6
FACTOR, BETTER_BY = 0.3, 0.04


def plain_keras(kind: str) -> optax.GradientTransformation:
    """Keras' formulas; the rate is in the state, where a callback may change it."""

    def init(params: PyTree) -> PyTree:
        zeros = jax.tree.map(jnp.zeros_like, params)
        state = {"iteration": 0, "rate": RATE, "momentum": zeros}
        slots = {"Adam": {"velocity": zeros}, "use_ema": {"average": params}}
        return state | slots.get(kind, {})

    def update(gradients: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        count, rate = state["iteration"], state["rate"]
        if kind == "ExponentialDecay":
            rate = RATE * DECAY_RATE ** (count / DECAY_STEPS)
        new = state | {"iteration": count + 1}
        moment = state["momentum"]
        if kind == "Adam":
            moment = jax.tree.map(lambda m, g: m + 0.1 * (g - m), moment, gradients)
            second = jax.tree.map(
                lambda v, g: v + 0.001 * (g * g - v), state["velocity"], gradients
            )
            size = rate * math.sqrt(1 - 0.999 ** (count + 1)) / (1 - 0.9 ** (count + 1))
            changes = jax.tree.map(lambda m, v: -size * m / (jnp.sqrt(v) + 1e-4), moment, second)
            new["velocity"] = second
        else:
            moment = jax.tree.map(lambda m, g: 0.9 * m - rate * g, moment, gradients)
            changes = jax.tree.map(lambda m, g: 0.9 * m - rate * g, moment, gradients)
        if kind == "use_ema":
            after = optax.apply_updates(params, changes)
            new["average"] = mixed(state["average"], after, EMA_MOMENTUM) if count else after
        return changes, new | {"momentum": moment}

    return optax.GradientTransformation(init, update)


@dataclass
class Watcher:
    """The decisions of a Keras callback with a patience of 1, from the metrics of each epoch."""

    kind: str
    best: float = math.inf
    stops: bool = False

    @staticmethod
    def scheduled(epoch: int, rate: float) -> float:
        """Returns the rate of an epoch, counted from 0, for the schedule of the callback."""
        return rate * (0.5, 1.5, 0.8)[epoch % 3]

    def begin_epoch(self, epoch: int, state: PyTree) -> PyTree:
        """Returns the optimizer's state for an epoch, counted from 0."""
        self.stops = False
        if self.kind != "LearningRateScheduler":
            return state
        return state | {"rate": self.scheduled(epoch, state["rate"])}

    def end_epoch(self, watched: float, state: PyTree) -> PyTree:
        """Returns the optimizer's state after an epoch with a value of the metric watched."""
        is_better = watched < self.best - BETTER_BY
        self.best = watched if is_better else self.best
        self.stops = self.kind == "EarlyStopping" and not is_better
        if self.kind != "ReduceLROnPlateau" or is_better:
            return state
        return state | {"rate": FACTOR * state["rate"]}


# -- the loop of plain JAX -------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """The results of a run: the loss of each step, and the final values.

    `evaluated` maps a step to the loss of its evaluation. `saved` maps an epoch to the values in
    its file: those of the model and of the optimizer.
    """

    losses: list[float]
    evaluation: dict[str, float]
    predictions: np.ndarray | None
    params: dict[str, np.ndarray]
    evaluated: dict[int, float] | None
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)


def forward(
    cell: Cell,
    params: PyTree,
    stats: PyTree,
    x: jax.Array,
    *,
    training: bool,
    key: jax.Array | None = None,
) -> tuple[jax.Array, PyTree]:
    """The model, by hand: two layers, and in some cells something between them."""
    kernel = params["first/kernel"]
    if cell.lora:
        kernel = (
            kernel + ALPHA / RANK * params["lora/first/kernel/a"] @ params["lora/first/kernel/b"]
        )
    hidden = jnp.tanh(x @ kernel + params["first/bias"])
    if cell.model in ("batch_norm", "eval_batch_norm"):
        mean, variance = stats
        if training and cell.model == "batch_norm" and not cell.lora:  # LoRA freezes the base model
            mean, variance = hidden.mean(0), hidden.var(0)
            moved = zip(stats, (mean, variance), strict=True)
            stats = tuple(MOMENTUM * old + (1 - MOMENTUM) * new for old, new in moved)
        hidden = (hidden - mean) / jnp.sqrt(variance + EPSILON)
    if cell.model == "dropout" and training and key is not None:
        keys = [jax.random.fold_in(each, OF_STREAM) for each in keys_of_shards(cell, key)]
        hidden = drawn(hidden, *(jax.random.fold_in(each, 0) for each in keys))
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


OF_OBJECTIVE, OF_STREAM = 0x6F626A65, 1
"""The numbers that are folded into a step's key: for the objective, and for the random stream of an
nnx model. They are part of the definition of a run's random numbers."""


def keys_of_shards(cell: Cell, key: jax.Array) -> list[jax.Array]:
    return [jax.random.fold_in(key, i) for i in range(cell.exact)] if cell.exact else [key]


def drawn(x: jax.Array, *keys: jax.Array) -> jax.Array:
    """Drops values at random; each key has a part of the rows."""
    shape = (len(x) // len(keys), *x.shape[1:])
    kept = jnp.concatenate([jax.random.bernoulli(key, KEEP, shape) for key in keys])
    return jnp.where(kept, x / KEEP, 0)


def batch_loss(
    trained: PyTree, fixed: PyTree, cell: Cell, stats: PyTree, batch: PyTree, key: jax.Array
) -> tuple[jax.Array, PyTree]:
    """sum(w * v) / sum(w) over the microbatches, each with the statistics after the last one."""
    params, total, weight = trained | fixed, jnp.zeros(()), jnp.zeros(())
    for part in range(cell.microbatches):
        rows = {name: x[part :: cell.microbatches] for name, x in batch.items()}
        x, of_part = rows["x"], key if cell.microbatches == 1 else jax.random.fold_in(key, part)
        if cell.draws:
            keys = keys_of_shards(cell, of_part)
            in_step = cell.entry == "loop"  # the user's own step has the key itself
            x = drawn(x, *(k if in_step else jax.random.fold_in(k, OF_OBJECTIVE) for k in keys))
        output, stats = forward(cell, params, stats, x, training=True, key=of_part)
        values, weights = values_and_weights(cell, output, rows, params)
        total, weight = total + (values * weights).sum(), weight + counted(cell, weights)
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1, weight)), stats


def counted(cell: Cell, weights: jax.Array) -> Any:
    """Returns the divisor of the sum: the total weight; for Keras' losses the number of values."""
    return weights.size if cell.entry == "from_keras" else weights.sum()


class PlainRun:
    """The loop of plain JAX: what a step changes, and what is computed from it."""

    def __init__(self, cell: Cell, factors: PyTree) -> None:
        self.cell, self.optimizer = cell, make_optimizer(cell)
        self.params: PyTree = first_params(cell) | factors
        self.fixed = {n: self.params.pop(n) for n in list(self.params) if frozen(cell, n)}
        self.stats: PyTree = (jnp.zeros(HIDDEN), jnp.ones(HIDDEN))
        self.opt_state, self.updates = self.optimizer.init(self.params), 0
        self.average = self.final
        self._gradient = jax.jit(jax.value_and_grad(batch_loss, has_aux=True), static_argnums=2)

    @property
    def final(self) -> PyTree:
        return self.params | self.fixed

    @property
    def used(self) -> PyTree:
        """The parameters that evaluations, predictions and files have."""
        return self.final if self.cell.average is None else self.average

    def step(self, batch: PyTree, key: jax.Array) -> float:
        arguments = self.params, self.fixed, self.cell, self.stats, batch, key
        (loss, self.stats), gradients = self._gradient(*arguments)
        changes, self.opt_state = self.optimizer.update(gradients, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, changes)
        if self.cell.average is not None:
            decay = min(self.cell.average, (2 + self.updates) / (11 + self.updates))
            self.average = mixed(self.average, self.final, decay)
        self.updates += 1
        return float(loss)

    def evaluate(self, test: PyTree) -> tuple[dict[str, float], np.ndarray]:
        output, _ = forward(self.cell, self.used, self.stats, test["x"], training=False)
        values, weights = values_and_weights(self.cell, output, test, self.used)
        loss = (values * weights).sum() / counted(self.cell, weights)
        off = jnp.abs(output - test["y"]).mean()
        return {"loss": float(loss), "off": float(off)}, np.asarray(output)

    def saved(self) -> dict[str, Any]:
        """Returns what a file of Keras has: the model's values and its optimizer's variables."""
        if self.cell.optimizer not in OF_KERAS:
            return dict(self.used)
        slots = {k: x for k, x in self.opt_state.items() if isinstance(x, dict)}
        named = {f"{name}/{slot}": x[name] for slot, x in slots.items() for name in x}
        return self.used | named | {"iteration": self.opt_state["iteration"]}


def expected(
    cell: Cell, step_key: jax.Array, test: dict[str, np.ndarray], factors: PyTree
) -> Numbers:
    """Computes a cell; the key is that of the run's steps, the factors are the first of LoRA."""
    data, run = make_data(cell), PlainRun(cell, factors)
    losses, evaluated, saved = list[float](), dict[int, float](), dict[int, dict[str, Any]]()
    for steps in cell.fits:
        if steps.start == 0:  # a restart too: parameters and the optimizer's state remain
            step, epoch, of_epoch, watcher = 0, 0, list[float](), Watcher(cell.callback)
        while step < steps.stop:
            if not of_epoch:
                run.opt_state = watcher.begin_epoch(epoch, run.opt_state)
            positions = np.arange(step * cell.batch, (step + 1) * cell.batch) % cell.examples
            batch = {name: x[positions] for name, x in data.items()}
            of_epoch.append(run.step(batch, jax.random.fold_in(step_key, step)))
            losses.append(of_epoch[-1])
            step += 1
            validates = cell.eval_every and (step % cell.eval_every == 0 or step == steps.stop)
            if validates:
                evaluated[step] = run.evaluate(test)[0]["loss"]
            if step < math.ceil((epoch + 1) * cell.examples / cell.batch):
                continue
            epoch, mean, of_epoch = epoch + 1, np.mean(of_epoch), []
            if cell.callback == "ModelCheckpoint":
                saved[epoch] = run.saved()
            if validates or not cell.eval_every:
                watched = evaluated[step] if validates else float(mean)
                run.opt_state = watcher.end_epoch(watched, run.opt_state)
                if watcher.stops:
                    break
        # Keras' moving average replaces the parameters at the end of a fit; the state that is
        # saved before has the parameters.
        if cell.optimizer == "use_ema" and (
            steps == cell.fits[-1] or cell.continued in ("twice", "restarted")
        ):
            run.params = run.opt_state["average"]
    means, output = run.evaluate(test)
    return Numbers(losses, means, output, jax.tree.map(np.asarray, run.final), evaluated, saved)


def mixed(old: PyTree, new: PyTree, decay: float) -> PyTree:
    return jax.tree.map(lambda x, y: decay * x + (1 - decay) * y, old, new)


def frozen(cell: Cell, name: str) -> bool:
    return cell.lora != name.startswith("lora/") or (cell.freeze and name.startswith("first/"))


def tolerance(cell: Cell) -> tuple[float, float]:
    """The relative and absolute rounding that a cell may have."""
    return (
        (0.08, 0.03) if cell.compute_dtype == "bfloat16" else (2e-4 * math.sqrt(cell.steps), 1e-5)
    )
