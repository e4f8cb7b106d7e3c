"""The objective of a compiled Keras model: its losses and metrics for each example."""

import functools
import importlib
import inspect
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.keras.callbacks import KerasCallbacks
from spmdtrain.keras.internals import (
    all_layers,
    compile_arguments,
    direction_of,
    has_variables,
    loss_of_function,
    mask_of,
    reported_name,
    values_and_masks,
    with_mask,
)
from spmdtrain.keras.model import BoundKeras, KerasModel, KerasOptimizer, import_keras
from spmdtrain.record.storage import one_line
from spmdtrain.step.metrics import AddedState, PredictionMetric
from spmdtrain.train.callbacks import Callbacks, listed_callbacks
from spmdtrain.xla.jaxpr import equations
from spmdtrain.xla.padding import why_not_sums
from spmdtrain.xla.padding_rules import adds_to_first

# -- Keras losses without their reduction: values for each example, with what divides their sum ----

ExampleLosses = Callable[[jax.Array, jax.Array, jax.Array | None], tuple[Any, Any]]
"""(targets, predictions, sample weights) -> (values, weights). The loss is the sum of the values,
divided by the sum of the weights. If the weights are None, the values have shape (B,), and B
divides their sum.
"""

_SUM_OF_WEIGHTS = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _SUM_OF_WEIGHTS)


def loss_of(keras: Any, given: Any, targets: jax.Array, predictions: jax.Array) -> ExampleLosses:
    """Returns a Keras loss without its reduction.

    Keras divides the sum of the values times their sample weights by the number of values, or, if
    the model or the loss has computed a mask, by the number of values that it keeps. The reduction
    `mean_with_sample_weight` divides by the sum of the sample weights instead.

    Args:
      given: The name of a loss, a function, or a Keras loss. "crossentropy" means the variant for
        the shapes of targets and predictions.

    Raises:
      UserError: If its reduction is not a mean.
    """
    if isinstance(given, str) and given.lower() in ("crossentropy", "ce"):
        given = f"{kind_of_labels(targets, predictions)}_crossentropy"
    loss = keras.losses.get(given)
    if not isinstance(loss, keras.losses.Loss):
        loss = loss_of_function(loss, _name(loss))
    if loss.reduction not in _MEANS:
        raise UserError(
            f"the loss {loss.name!r} has the reduction {loss.reduction!r}: it must be a mean "
            "('sum_over_batch_size'), which does not depend on the batch size"
        )
    by_weights = loss.reduction == _SUM_OF_WEIGHTS

    def values_of(true: jax.Array, prediction: jax.Array, weight: jax.Array | None) -> Any:
        values, masks = values_and_masks(loss, true, prediction)
        rows = prediction.shape[0]
        if values.ndim == 0 or values.shape[0] != rows:
            # Keras' own that have an axis combine the whole batch by default: Dice, Tversky.
            kind, axes = loss.name.title(), tuple(range(1, prediction.ndim))
            has_axis = (
                getattr(loss, "axis", 0) is None
                or "axis" in inspect.signature(getattr(keras.losses, kind, object)).parameters
            )
            hint = (
                f"give it axis, as in keras.losses.{kind}(axis={axes})"
                if has_axis
                else "for example keras.ops.mean(..., axis=-1)"
            )
            raise UserError(
                f"the loss {loss.name!r} returns shape {values.shape} for a batch of {rows}: it "
                f"must return a value for each example, not their mean: {hint}"
            )
        for each in masks:
            if each.shape != values.shape:
                raise UserError(
                    f"the loss {loss.name!r} has values of shape {values.shape}, and a mask of "
                    f"shape {each.shape}: they must be equal"
                )
        mask = functools.reduce(operator.and_, masks) if masks else None
        if weight is not None:
            weight = expanded(weight, values)
        if by_weights and weight is not None:
            kept = jnp.broadcast_to(weight, values.shape)
            return values, kept if mask is None else kept * mask
        if weight is not None:
            values = values * weight
        if mask is not None:
            return values, mask.astype(values.dtype)
        return values.reshape(rows, math.prod(values.shape[1:])).mean(1), None

    return values_of


def kind_of_labels(targets: jax.Array, predictions: jax.Array) -> str:
    """Returns which of its variants Keras means by "accuracy" or "crossentropy"."""
    if predictions.shape[-1] == 1:
        return "binary"
    if targets.ndim < predictions.ndim or targets.shape[-1] == 1:
        return "sparse_categorical"
    return "categorical"


def expanded(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Reshapes sample weights, one for each example or each value, to multiply values (B, ...)."""
    weights = jnp.asarray(weights, values.dtype)
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        return weights[..., 0]
    return weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


# -- Keras metrics as outputs of an objective: what Keras' own update adds to their variables ------

_ON_HOST = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


@dataclass(frozen=True)
class OutputMetric:
    """A Keras metric of one output.

    Keras updates the variables of a metric with each batch, and computes the result from them. If
    the variables are proven to be sums over the batches, the same update computes what a batch adds
    to them. If they are proven to be sums over the examples too, it computes what each example
    adds, so that batches may be split and padded. Any other metric is updated on the host, with one
    batch after the other.

    Attributes:
      name: The name, as Keras reports it.
      metric: The Keras metric. Only `of_batches` changes its state.
      divisor: The variables whose sum divides the first one in its result; None if the result is
        something else. Training steps compute such means only.
    """

    name: str
    metric: Any
    divisor: tuple[int, ...] | None
    _copies: dict[str, int | None] = field(default_factory=dict, compare=False)

    @property
    def direction(self) -> str | None:
        """The kind of its best value: "min" (the lowest) or "max"; None if it is unknown."""
        return direction_of(self.metric)

    def __call__(
        self, targets: jax.Array, predictions: jax.Array, weights: jax.Array | None
    ) -> AddedState | PredictionMetric:
        """Returns the output of an objective whose value over a dataset is the metric's result."""
        mask = mask_of(predictions)
        batch = {"targets": targets, "predictions": predictions, "weights": weights, "mask": mask}
        batch = {name: x for name, x in batch.items() if x is not None}
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
        if (key := str(shapes)) not in self._copies:
            self._copies[key] = self._copies_of_row(shapes)
        copies = self._copies[key]
        if copies is None:
            return PredictionMetric(self, **batch)

        def of_example(row: Mapping[str, jax.Array]) -> jax.Array:
            added = self._added({n: jnp.stack([x] * copies) for n, x in row.items()})
            return added if copies == 1 else added / copies

        sums = jax.vmap(of_example)(batch) if copies else self._added(batch)
        return AddedState(sums, self._of_sums, self.divisor, bool(copies))

    def of_batches(self, batches: Sequence[Mapping[str, np.ndarray]]) -> float:
        """Returns the metric's result.

        Args:
          batches: The keyword arguments of the `PredictionMetric` for each batch of a dataset.

        Raises:
          UserError: If the result is not one number, or a metric of Keras does not take the shapes.
          ValueError: If a metric of the user's raises it.
        """
        self.metric.reset_state()
        for batch in batches:
            arrays = {name: jnp.asarray(x) for name, x in batch.items()}
            try:
                self.metric.update_state(*_arguments(arrays), **_weights(arrays))
            except ValueError as error:
                if not type(self.metric).update_state.__module__.startswith("keras."):
                    raise
                raise UserError(
                    f"the metric {self.name!r} ({type(self.metric).__name__}): {one_line(error)}"
                ) from error
        return self._number(self.metric.result())

    def check_result(self) -> None:
        """Raises `UserError` if the result is not one number, before an evaluation needs it."""
        # The result of a user's class may need a batch.
        is_of_keras = type(self.metric).result.__module__.startswith("keras.")
        if is_of_keras and has_variables(self.metric):
            with jax.ensure_compile_time_eval(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about no examples
                self._number(_result(self.metric, self._initial()))

    # -- the update ----------------------------------------------------------------------------

    def _copies_of_row(self, batch: Mapping[str, Any]) -> int | None:
        """Returns how many copies of an example form the batch that shows what the example adds.

        It is 1, or 2 if Keras updates the metric with a batch of one example in another way; 0 if
        it does not add up examples; None if it does not add up batches. Errors of the metric's own
        update are raised as they are.

        Raises:
          UserError: If it creates variables besides those that it has, or cannot be weighted.
        """
        if not has_variables(self.metric):  # the first update creates them: not within a step
            return None
        variables = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.metric.variables]
        update = functools.partial(_updated, self.metric)
        try:
            program = jax.make_jaxpr(update)(variables, batch)
        except _ON_HOST:  # it computes with values of NumPy or Python
            return None
        except (TypeError, ValueError) as error:
            self._check_weights(variables, batch, error)
            raise
        if len(self.metric.variables) != len(variables):
            raise UserError(
                f"the metric {self.name!r} ({type(self.metric).__name__}) creates variables in "
                "update_state: create them in __init__"
            )
        if not adds_to_first(program, len(variables)):
            return None

        def of(rows: int) -> Any:
            return {
                n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in batch.items()
            }

        def added(batch: Mapping[str, jax.Array]) -> list[jax.Array]:
            rows = batch["targets"].shape[0]
            # Each example contributes a 0, so that the state before it is a sum, too.
            return update([jnp.zeros((rows, *v.shape), v.dtype).sum(0) for v in variables], batch)

        if why_not_sums(added, of(max(2, batch["targets"].shape[0]))):
            return 0
        one, several = (
            [x.primitive.name for x in equations(jax.make_jaxpr(added)(of(rows)).jaxpr)]
            for rows in (1, 2)
        )
        return 1 if one == several else 2

    def _check_weights(
        self, variables: Sequence[Any], batch: Mapping[str, Any], error: Exception
    ) -> None:
        """Raises `UserError` if an update fails with the sample weights only."""
        unweighted = {name: x for name, x in batch.items() if name != "weights"}
        if len(unweighted) == len(batch):
            return
        try:
            jax.eval_shape(functools.partial(_updated, self.metric), variables, unweighted)
        except (TypeError, ValueError):
            return
        raise UserError(
            f"the metric {self.name!r} cannot be weighted: with sample weights of shape "
            f"{batch['weights'].shape}, its update fails ({str(error).splitlines()[0]}). "
            "Give it in `metrics` instead of `weighted_metrics` of `compile`, or let it return a "
            "value for each example"
        ) from error

    def _added(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns what a batch adds to the variables, one after the other."""
        zeros = [jnp.zeros(v.shape, v.dtype) for v in self.metric.variables]
        found = _updated(self.metric, zeros, batch)
        return jnp.concatenate([x.ravel().astype(jnp.float32) for x in found])

    # -- the result ----------------------------------------------------------------------------

    def _of_sums(self, sums: np.ndarray) -> float:
        """Returns the result from what a dataset adds to the variables."""
        if self.divisor:
            divisor = sums[list(self.divisor)].sum()
            return float(sums[0] / divisor) if divisor else 0.0
        initial = self._initial()
        ends = np.cumsum([v.size for v in initial])
        parts = zip(initial, np.split(sums, ends[:-1]), strict=True)
        values = [(v + x.reshape(v.shape)).astype(v.dtype) for v, x in parts]
        return self._number(_result(self.metric, values))

    def _initial(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in self.metric.stateless_reset_state()]

    def _number(self, result: Any) -> float:
        if isinstance(result, dict) or np.size(result) != 1:
            shown = "a dictionary" if isinstance(result, dict) else f"an array {np.shape(result)}"
            raise UserError(
                f"the metric {self.name!r} ({type(self.metric).__name__}) returns {shown}: it must "
                "return one number. Give an average (average='macro'), one threshold, or one "
                "metric for each class (class_id=0)"
            )
        return float(np.asarray(result).reshape(()))


@dataclass(frozen=True)
class CompiledMetric:
    """A metric that `model.compile` was given, with the variables that it has before an update.

    It is made before a step is traced: a variable that Keras creates within a step gets no value.

    Attributes:
      name: The name, as Keras reports it.
      metrics: The Keras metric for each kind of labels, or for all of them ("").
    """

    name: str
    metrics: Mapping[str, Any]

    @classmethod
    def of(cls, keras: Any, given: Any) -> "CompiledMetric":
        """Returns the metric for a name, a function or a Keras metric; `keras` is the module."""
        metrics = keras.metrics
        if isinstance(given, str) and given.lower() in ("accuracy", "acc"):
            kinds = {
                "binary": metrics.BinaryAccuracy,
                "categorical": metrics.CategoricalAccuracy,
                "sparse_categorical": metrics.SparseCategoricalAccuracy,
            }
            return cls(given, {kind: make() for kind, make in kinds.items()})
        metric = metrics.get(given)
        name = given if isinstance(given, str) else reported_name(metric)
        if not isinstance(metric, metrics.Metric):
            metric = metrics.MeanMetricWrapper(metric, name=name)
        return cls(name, {"": metric})

    def of_output(self, keras: Any, targets: jax.Array, predictions: jax.Array) -> OutputMetric:
        """Returns the metric of an output; the rank of its targets decides what "accuracy" means.

        Raises:
          UserError: If the metric's result is not one number.
        """
        kind = "" if "" in self.metrics else kind_of_labels(targets, predictions)
        metric = self.metrics[kind]
        found = OutputMetric(self.name, metric, _divisor(keras.metrics, metric))
        found.check_result()
        return found


def _divisor(metrics: Any, metric: Any) -> tuple[int, ...] | None:
    """Returns which variables divide the first one in a metric's result; see `OutputMetric`."""
    divisors = {metrics.Mean: (1,), metrics.Precision: (0, 1), metrics.Recall: (0, 1)}
    for kind, divisor in divisors.items():
        if isinstance(metric, kind) and type(metric).result is kind.result:
            shapes = {math.prod(v.shape) for v in metric.variables[:2]}
            keeps = type(metric).reset_state is not kind.reset_state
            return divisor if shapes == {1} and not keeps else None
    return None


def _updated(
    metric: Any, variables: Sequence[jax.Array], batch: Mapping[str, jax.Array]
) -> list[jax.Array]:
    """Returns the variables of a metric after a batch, as a pure function."""
    return list(metric.stateless_update_state(variables, *_arguments(batch), **_weights(batch)))


def _result(metric: Any, values: Sequence[Any]) -> Any:
    """Returns the result of a metric whose variables have these values."""
    keras = importlib.import_module("keras")
    with keras.StatelessScope(list(zip(metric.variables, values, strict=True))):
        # A variable that the metric returns has its own value again outside of the scope.
        return keras.tree.map_structure(
            lambda x: x.value if isinstance(x, keras.Variable) else x, metric.result()
        )


def _arguments(batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    predictions = batch["predictions"]
    if "mask" in batch:
        with_mask(predictions, batch["mask"])
    return batch["targets"], predictions


def _weights(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array | None]:
    return {"sample_weight": batch.get("weights")}  # always given, as Keras does


# -- The objective of a compiled Keras model: its losses and metrics for each example --------------

PyTree = Any
_PARTS = ("x", "y", "sample_weight")
_OVERRIDES = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


class CompiledKeras:
    """The arguments of `model.compile` as an objective and a predict function.

    A batch has Keras' form: a tuple (x,), (x, y) or (x, y, sample_weight), a dictionary with these
    names, or x alone. The loss is computed as by Keras: the mean over the batch of the loss of each
    output times its sample weights, the sum of the outputs with their loss weights, and the model's
    own losses (regularizers, `add_loss`).

    Raises:
      UserError: If the model is not compiled, or needs Keras' own training loop.
    """

    def __init__(self, model: Any) -> None:
        self._keras = import_keras()
        if not isinstance(model, self._keras.Model):
            raise UserError(f"from_keras takes a keras.Model, not a {type(model).__name__}")
        if not model.compiled:
            raise UserError(
                f"the Keras model {model.name!r} is not compiled: call "
                "model.compile(optimizer, loss, metrics) before from_keras, or use KerasModel with "
                "an objective"
            )
        for name in _OVERRIDES:
            if getattr(type(model), name) is not getattr(self._keras.Model, name):
                raise UserError(
                    f"the Keras model {model.name!r} overrides {name}, which only Keras' own loop "
                    "calls: use KerasModel with an objective that does the same"
                )
        given = compile_arguments(model)
        # Keras itself chooses jit_compile=False for layers most of which JAX does compile.
        chosen_by_keras = not all(layer.supports_jit for layer in all_layers(model))
        for name, expected in {"run_eagerly": False, "jit_compile": True}.items():
            if given[name] is not expected and not (name == "jit_compile" and chosen_by_keras):
                raise UserError(
                    f"the Keras model {model.name!r} is compiled with {name}={given[name]}: leave "
                    "it out; jit=False of from_keras runs a step operation by operation"
                )
        self.optimizer, self.steps_per_execution = model.optimizer, given["steps_per_execution"]
        self._loss, self._loss_weights = given["loss"], given["loss_weights"]
        self._metrics = {
            prefix: self._keras.tree.map_structure(self._metric, given[name])
            for prefix, name in (("", "metrics"), ("weighted_", "weighted_metrics"))
        }
        self._names: Sequence[str] = getattr(model, "output_names", None) or ()
        self._losses: list[ExampleLosses | None] = []  # of each output, known with the shapes
        self._loss_names: list[str] = []
        self._names_outputs = True  # whether Keras knows the names of outputs
        self._of_outputs: list[tuple[str, int, bool, OutputMetric]] = []
        self.directions: dict[str, str] = {"loss": "min"}
        """The kind of the best value of each metric, once it is known: "min" or "max"."""

    def objective(self, model: BoundKeras, batch: PyTree) -> dict[str, Any]:
        """Returns the losses and metrics of each example.

        Raises:
          UserError: If the batch, a loss or a metric does not fit the model's outputs.
        """
        x, y, sample_weight = _parts(batch, model.keras_model)
        outputs = self._outputs(model(x))
        names = list(outputs)
        predictions = list(outputs.values())
        self._resolve(names, y, predictions)
        targets = self._targets(y, names)
        weights = _spread(sample_weight, names, "sample_weight", shared=True)
        rows = jax.tree.leaves(x)[0].shape[0]
        own = sum((jnp.sum(loss) for loss in model.losses), jnp.zeros((), jnp.float32))
        found = self._loss_values(names, targets, predictions, weights, own, rows)
        for name, index, is_weighted, metric in self._of_outputs:
            weight = weights[index] if is_weighted else None
            found[name] = metric(targets[index], predictions[index], weight)
        return found

    def predict(self, model: BoundKeras, batch: PyTree) -> PyTree:
        """Returns the model's output."""
        return model(_parts(batch, model.keras_model)[0])

    def describe_losses(self) -> str:
        """Returns the compiled losses, and what else may add one, for an error message."""
        given = [each for each in self._keras.tree.flatten(self._loss) if each is not None]
        names = [
            each
            if isinstance(each, str)
            else getattr(each, "__name__", None) or f"keras.losses.{type(each).__name__}"
            if type(each).__module__.startswith("keras.")
            else type(each).__name__
            for each in given
        ]
        return " and ".join((*dict.fromkeys(names), "what layers add (regularizers, add_loss)"))

    # -- losses --------------------------------------------------------------------------------

    def _loss_values(
        self,
        names: Sequence[str],
        targets: Sequence[Any],
        predictions: Sequence[Any],
        weights: Sequence[Any],
        own: jax.Array,
        rows: int,
    ) -> dict[str, Any]:
        present = [(index, loss) for index, loss in enumerate(self._losses) if loss is not None]
        if not present:
            return {"loss": jnp.broadcast_to(own, (rows,))}
        factors = _spread(self._loss_weights, names, "loss_weights")
        terms = []
        for index, loss in present:
            values, divisor = loss(targets[index], predictions[index], weights[index])
            terms.append((names[index], values, divisor, factors[index]))
        total = sum(v if f is None else f * v for _, v, _, f in terms) + own
        if len(terms) == 1:
            divisor = terms[0][2]
            return {"loss": total if divisor is None else (total, divisor)}
        if masked := [name for name, _, divisor, _ in terms if divisor is not None]:
            raise UserError(
                f"the loss of output {masked[0]!r} is divided by a mask or by sample weights, "
                "and the losses of the other outputs are not: use KerasModel with an objective"
            )
        names_of = [self._loss_names[index] for index, _ in present]
        return {"loss": total} | {
            f"{name}_loss": values for name, (_, values, _, _) in zip(names_of, terms, strict=True)
        }

    def _resolve(self, names: Sequence[str], y: PyTree, predictions: Sequence[Any]) -> None:
        """Makes the losses and metrics, whose kinds may depend on the ranks of the arrays."""
        if self._losses:
            return
        losses, targets = self._given_losses(names), self._targets(y, names)
        self._losses = [
            None if loss is None else loss_of(self._keras, loss, _target(name, target), prediction)
            for name, loss, target, prediction in zip(
                names, losses, targets, predictions, strict=True
            )
        ]
        self._loss_names = [
            name if self._names_outputs or loss is None else self._name_of_loss(loss)
            for name, loss in zip(names, losses, strict=True)
        ]
        counts: Counter[str] = Counter()
        for prefix, spec in self._metrics.items():
            one = len(names) == 1
            whole = [spec] if one and not isinstance(spec, Mapping) else spec
            for index, found in enumerate(_spread(whole, names, f"{prefix}metrics")):
                of_output = "" if one or not self._names_outputs else f"{names[index]}_"
                for each in [] if found is None else self._keras.tree.flatten(found):
                    target = _target(names[index], targets[index])
                    metric = each.of_output(self._keras, target, predictions[index])
                    name = f"{of_output}{metric.name}"
                    if prefix and counts[name]:
                        name = f"{of_output}{prefix}{metric.name}"
                    counts[name] += 1
                    name = f"{name}_{counts[name] - 1}" if counts[name] > 1 else name
                    self._of_outputs.append((name, index, bool(prefix), metric))
                    if metric.direction is not None:
                        self.directions[name] = metric.direction
        self._check_metric_names()

    def _check_metric_names(self) -> None:
        """Checks that no metric has the name of a loss, which it would replace."""
        losses = {"loss", *(f"{name}_loss" for name in self._loss_names)}
        for name, _, _, metric in self._of_outputs:
            if name in losses:
                raise UserError(
                    f"the metric {metric.name!r} of model.compile has the name of a loss, "
                    f"{name!r}: give it another name"
                )

    # -- the structure of outputs --------------------------------------------------------------

    def _outputs(self, prediction: PyTree) -> dict[str, Any]:
        """Returns the outputs of the model by name, in Keras' order."""
        if isinstance(prediction, Mapping):
            known = self._names if set(self._names) == set(prediction) else sorted(prediction)
            found = {name: prediction[name] for name in known}
        elif isinstance(prediction, list | tuple):
            numbered = [f"output_{number}" for number in range(len(prediction))]
            self._names_outputs = len(self._names) == len(prediction)
            names = self._names if self._names_outputs else numbered
            found = dict(zip(names, prediction, strict=True))
        else:
            found = {(*self._names, "output")[0]: prediction}
        for name, value in found.items():
            if not isinstance(value, jax.Array):
                raise UserError(
                    f"the output {name!r} of the model is a {type(value).__name__}: outputs must "
                    "be arrays, or one list or dictionary of arrays"
                )
        return found

    def _metric(self, given: Any) -> CompiledMetric | None:
        return None if given is None else CompiledMetric.of(self._keras, given)

    def _name_of_loss(self, given: Any) -> str:
        """Returns the name under which Keras reports the loss of an output without a name."""
        if isinstance(given, self._keras.losses.Loss):
            return str(given.name)
        return given if isinstance(given, str) else reported_name(given)

    def _given_losses(self, names: Sequence[str]) -> list[Any]:
        return _spread(self._loss, names, "loss", shared=True)

    def _targets(self, y: PyTree, names: Sequence[str]) -> list[Any]:
        """Returns the target of each output; one without a loss may have none."""
        if isinstance(y, list | tuple) and len(y) != len(names):
            losses = zip(names, self._given_losses(names), strict=True)
            used = [name for name, loss in losses if loss is not None]
            if len(y) == len(used):
                y = dict(zip(used, y, strict=True))
        return _spread(y, names, "y")


def _parts(batch: PyTree, keras_model: Any) -> tuple[PyTree, PyTree, PyTree]:
    """Returns x, y and sample_weight of a batch; None for those that it does not have."""
    if isinstance(batch, tuple):
        if not 1 <= len(batch) <= 3:
            raise UserError(f"the batch is a tuple of {len(batch)}: use (x, y, sample_weight)")
        x, y, weight = (*batch, None, None)[:3]
        return x, y, weight
    if isinstance(batch, Mapping) and "x" in batch and set(batch) <= set(_PARTS):
        return batch["x"], batch.get("y"), batch.get("sample_weight")
    inputs = getattr(keras_model, "inputs", None)  # None for a model without fixed inputs
    if isinstance(batch, Mapping) and "x" in batch and inputs:
        by_key = getattr(keras_model, "input", None)
        known = {*_PARTS, *(each.name for each in inputs)}
        known |= set(by_key) if isinstance(by_key, Mapping) else set()
        if unknown := [name for name in batch if name not in known]:
            raise UserError(
                f"a batch has {unknown[0]!r}, which is neither one of {', '.join(_PARTS)} nor an "
                f"input of the Keras model {keras_model.name!r}."
                f"{did_you_mean(str(unknown[0]), sorted(known))}"
            )
    return batch, None, None


def _target(output: str, target: Any) -> Any:
    """Returns the target of an output that has a loss or a metric."""
    if target is None:
        raise UserError(
            f"the output {output!r} of the model has a loss or a metric, but a batch has no target "
            "for it: use (x, y), with a target for each such output in y"
        )
    return target


def _spread(given: Any, names: Sequence[str], what: str, *, shared: bool = False) -> list[Any]:
    """Returns the part of an argument for each output; raises `UserError` if it does not fit.

    Args:
      given: A dictionary by output, a list with an entry for each, or one object.
      what: The argument, for the error.
      shared: Whether one object is for all outputs.
    """
    if given is None:
        return [None] * len(names)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in names]:
            raise UserError(
                f"{what} names the output {unknown[0]!r}: the outputs are {', '.join(names)}"
            )
        return [given.get(name) for name in names]
    if isinstance(given, list | tuple) and len(given) == len(names):
        return list(given)
    if not isinstance(given, list | tuple) and (shared or len(names) == 1):
        return [given] * len(names)
    raise UserError(
        f"{what} has {len(given) if isinstance(given, list | tuple) else 'one entry'} for the "
        f"{len(names)} outputs {', '.join(names)}: use a dictionary by output"
    )


# -- The parts of an experiment that a compiled Keras model has ------------------------------------


def parts_of_compiled(
    model: Any,
    *,
    optimizer: optax.GradientTransformation | None,
    callbacks: Callbacks,
    steps_per_dispatch: int | None,
) -> dict[str, Any]:
    """Returns the arguments of an experiment that a compiled Keras model determines.

    Args:
      optimizer: Replaces the model's optimizer.
      callbacks: Keras callbacks and callbacks of this package.
      steps_per_dispatch: The option of the run; None if it is not known.

    Raises:
      UserError: If a part of the model cannot be used.
    """
    compiled = CompiledKeras(model)
    own = None
    if optimizer is None:
        if compiled.optimizer is None:
            raise UserError(
                f"the Keras model {model.name!r} is compiled without an optimizer: name one in "
                "model.compile, or pass optimizer=optax.adam(1e-3)"
            )
        own = KerasOptimizer(compiled.optimizer, model)
        optimizer = own.transformation
    if compiled.steps_per_execution not in (1, steps_per_dispatch):
        raise UserError(
            f"the Keras model {model.name!r} is compiled with steps_per_execution="
            f"{compiled.steps_per_execution}: leave it out and use the option steps_per_dispatch"
        )
    others = listed_callbacks(callbacks)
    kind = import_keras().callbacks.Callback
    of_keras = [callback for callback in others if isinstance(callback, kind)]
    bridge = KerasCallbacks(model, own, of_keras, compiled.directions)
    return {
        "model": KerasModel(model, enforces_constraints=own is not None),
        "objective": compiled.objective,
        "optimizer": optimizer,
        "predict": compiled.predict,
        # First, so that callbacks at the end of a fit find the trained values in the model.
        "callbacks": [bridge, *(each for each in others if not isinstance(each, kind))],
    }
