"""Parameters on servers, for functions that workers run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.errors import NonFiniteError, UserError
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.remote_call import Running
from spmdtrain.parameter_server.server import PushResult
from spmdtrain.parameter_server.state_partition import Computed, ServerPartition
from spmdtrain.step.optimizer import clipped
from spmdtrain.tree import named_leaves

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Shared:
    """Parameters on servers; see `Coordinator.share`.

    `number` identifies these parameters among those that are shared; `servers` are Ray actors.
    """

    number: int
    partition: ServerPartition
    servers: Sequence[Any]

    def pull(self) -> PyTree:
        """Returns the current parameters, NumPy arrays."""
        parts = self._call("pull")
        running: Running | None = CONTEXT.running_call
        if running is not None:
            running.pulled[self.number] = parts
        return self.partition.pulled(parts)[0]

    def push(self, gradients: PyTree, loss: Any) -> int:
        """Updates the parameters on the servers.

        A scheduled function may call this once, after `pull`. If the function is run again because
        its worker was lost, the update is still applied once.

        Args:
          gradients: Gradients, with the structure and shapes of the parameters.
          loss: The loss, a scalar, for optimizers that use it.

        Returns:
          The number of updates between the pull and this one.

        Raises:
          UserError: If the call is not allowed here, or the arguments have other shapes.
          NonFiniteError: If a parameter or the loss is NaN or infinite after the update.
        """
        import ray

        running: Running | None = CONTEXT.running_call
        if running is None:
            raise UserError("push() was called outside a function that a worker runs: schedule one")
        parts = running.pulled.get(self.number)
        if parts is None or self.number in running.pushed:
            raise UserError("push() must be called after pull(), and once in a function")
        running.pushed.add(self.number)
        params, _ = self.partition.pulled(parts)
        _check_gradients(gradients, params)
        if np.shape(loss):
            raise UserError(f"push() was given a loss of shape {np.shape(loss)}: pass its mean")
        transformed = clipped(self.partition.on_worker, gradients, params, loss)
        computed = Computed(jax.tree.map(np.asarray, transformed), {}, {"loss": float(loss)})
        pushes = [
            dataclasses.replace(push, floor=running.floor)
            for push in self.partition.pushes(running.number, computed, parts)
        ]
        results: list[PushResult] = ray_pool.answers(
            ray,
            [server.push.remote(push) for server, push in zip(self.servers, pushes, strict=True)],
        )
        if not all(all(result.finite) for result in results):
            raise NonFiniteError(f"the parameters are not finite after a push of loss {loss}")
        return max(result.staleness for result in results)

    def state(self) -> tuple[PyTree, PyTree]:
        """Returns the current parameters and optimizer state, for example to save them.

        Call after `join`, because the servers' parts are not read at the same time.
        """
        held = [held for held, _ in self._call("held")]
        state = self.partition.state(held, 0, None)
        return state.params, state.opt_state

    def _call(self, method: str) -> list[Any]:
        import ray

        return ray_pool.answers(ray, [getattr(server, method).remote() for server in self.servers])


def check_params(params: PyTree) -> None:
    """Raises `UserError` if a leaf is not a floating-point array, or there is none."""
    for name, leaf in (leaves := named_leaves(params)).items():
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise UserError(
                f"share() was given {name or 'params'} of dtype {kind}: expected float arrays"
            )
    if not leaves:
        raise UserError("share() was given no parameters")


def _check_gradients(gradients: PyTree, params: PyTree) -> None:
    """Raises `UserError` if gradients do not have the parameters' names and shapes."""
    actual, expected = (
        {name: np.shape(leaf) for name, leaf in named_leaves(tree).items()}
        for tree in (gradients, params)
    )
    for name in [*expected, *actual]:
        if (given := actual.get(name)) != (shape := expected.get(name)):
            raise UserError(
                f"push() was given {name or 'gradients'} of shape {given}: the parameter has "
                f"shape {shape}"
            )
