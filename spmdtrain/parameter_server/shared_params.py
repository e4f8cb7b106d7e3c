"""Parameters that servers have, for functions which workers run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import NonFiniteError, UserError
from spmdtrain.parameter_server import ray_pool, remote_call
from spmdtrain.parameter_server.server import PushResult
from spmdtrain.parameter_server.state_partition import Computed, ServerPartition
from spmdtrain.step.optimizer import clipped
from spmdtrain.tree import named_leaves

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Shared:
    """Parameters that servers have; see `Coordinator.share`."""

    number: int
    division: ServerPartition
    servers: Sequence[Any]

    def pull(self) -> PyTree:
        """The parameters as they are now, in NumPy arrays."""
        parts = self._answers("pull")
        if (call := remote_call.current) is not None:
            call.pulled[self.number] = parts
        return self.division.pulled(parts)[0]

    def push(self, gradients: PyTree, loss: Any) -> int:
        """Have the servers make an update; how many others came since the pull.

        In a scheduled function, once, after a pull. However often that is run again, its update is
        made once. `loss` is for optimizers that look at it. Raises `UserError`, and
        `NonFiniteError` where the parameters are no numbers any more.
        """
        import ray

        call = remote_call.current
        if call is None:
            raise UserError("push() is for a function that a worker runs: schedule one")
        parts = call.pulled.get(self.number)
        if parts is None or self.number in call.pushed:
            raise UserError("push() comes after a pull(), and once in a function")
        call.pushed.add(self.number)
        params, _ = self.division.pulled(parts)
        _check_like(gradients, params)
        if np.shape(loss):
            raise UserError(f"push() is given a loss of shape {np.shape(loss)}: give their mean")
        whole = clipped(self.division.on_worker, gradients, params, loss)
        computed = Computed(jax.tree.map(np.asarray, whole), {}, {"loss": float(loss)})
        pushes = [
            dataclasses.replace(push, floor=call.floor)
            for push in self.division.pushes(call.number, computed, parts)
        ]
        landed: list[PushResult] = ray_pool.answers(
            ray,
            [server.push.remote(push) for server, push in zip(self.servers, pushes, strict=True)],
        )
        if not all(all(one.finite) for one in landed):
            raise NonFiniteError(f"the parameters are not finite after a push of loss {loss}")
        return max(one.staleness for one in landed)

    def state(self) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state as they are now, whole: to be saved, say.

        After `join`, as each server has its part at a time of its own.
        """
        held = [held for held, _ in self._answers("held")]
        whole = self.division.state(held, 0, None)
        return whole.params, whole.opt_state

    def _answers(self, what: str) -> list[Any]:
        import ray

        return ray_pool.answers(ray, [getattr(server, what).remote() for server in self.servers])


def check_params(params: PyTree) -> None:
    """Raise `UserError` where they are not arrays of floating-point numbers."""
    for name, leaf in (leaves := named_leaves(params)).items():
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            what = getattr(leaf, "dtype", type(leaf).__name__)
            raise UserError(f"share() is given {name or 'params'}, {what}: it takes float arrays")
    if not leaves:
        raise UserError("share() is given no parameters")


def _check_like(gradients: PyTree, params: PyTree) -> None:
    """Raise `UserError` where gradients are not of the parameters' names and shapes."""
    found, expected = (
        {name: np.shape(leaf) for name, leaf in named_leaves(tree).items()}
        for tree in (gradients, params)
    )
    for name in [*expected, *found]:
        if (given := found.get(name)) != (shape := expected.get(name)):
            what = name or "gradients"
            raise UserError(f"push() is given {what} of shape {given}: the parameter's is {shape}")
