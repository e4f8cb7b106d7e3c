"""Keras metrics as outputs of an objective: what Keras' own update adds to their variables."""

import functools
import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.adapters.keras_internals import (
    direction_of,
    has_variables,
    mask_of,
    reported_name,
    with_mask,
)
from spmdtrain.adapters.keras_losses import kind_of_labels
from spmdtrain.errors import UserError
from spmdtrain.record.storage import one_line
from spmdtrain.step.metrics import AddedState, PredictionMetric
from spmdtrain.xla.jaxpr import equations
from spmdtrain.xla.padding import why_not_sums
from spmdtrain.xla.padding_rules import adds_to_first

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
