"""Metrics of Keras, flax.nnx and clu as functions of arrays."""

import inspect
from collections.abc import Callable
from typing import Any

from spmdtrain.errors import UserError


def as_function(metric: Any) -> Callable[..., Any]:
    """Returns a function of all predictions that computes a metric.

    A metric object of a library is reset first, so it can be used in several evaluations.

    Args:
      metric: A function; an object with `reset_state`, `update_state` and `result` (Keras), or with
        `reset`, `update` and `compute` (`flax.nnx.metrics`); or a class with `from_model_output`
        (`clu.metrics`).

    Raises:
      UserError: If it is none of them.
    """
    if inspect.isclass(metric) and hasattr(metric, "from_model_output"):
        return lambda *arrays, **named: metric.from_model_output(*arrays, **named).compute()
    for reset, update, compute in _OF_OBJECTS:
        if not inspect.isclass(metric) and all(hasattr(metric, x) for x in (reset, update)):
            return _updated(metric, reset, update, compute)
    if callable(metric) and not inspect.isclass(metric):
        function: Callable[..., Any] = metric
        return function
    name = metric.__name__ if inspect.isclass(metric) else type(metric).__name__
    raise UserError(
        f"PredictionMetric takes a function of arrays, a metric object of Keras or "
        f"flax.nnx.metrics, or a class of clu.metrics, not {name}"
        f"{': create the object outside of the objective' if inspect.isclass(metric) else ''}"
    )


_OF_OBJECTS = (("reset_state", "update_state", "result"), ("reset", "update", "compute"))


def _updated(metric: Any, reset: str, update: str, compute: str) -> Callable[..., Any]:
    def function(*arrays: Any, **named: Any) -> Any:
        getattr(metric, reset)()
        getattr(metric, update)(*arrays, **named)
        return getattr(metric, compute)()

    return function
