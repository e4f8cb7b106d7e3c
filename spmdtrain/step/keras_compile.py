"""The objective of a compiled Keras model: its losses and metrics for each example."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.adapters.keras import BoundKeras, import_keras
from spmdtrain.adapters.keras_internals import all_layers, compile_arguments, reported_name
from spmdtrain.adapters.keras_losses import ExampleLosses, loss_of
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.step.keras_metrics import CompiledMetric, OutputMetric

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
