"""A parameter server: its part of the state, pulls and pushes."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.parameter_server.scheduler import IdSet
from spmdtrain.step.gradients import with_difference
from spmdtrain.step.health import FLAGS, finite_flags
from spmdtrain.step.optimizer import ExtraArguments, Update
from spmdtrain.step.state import averaged_steps

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ServerState:
    """The part of a `TrainState` that one server holds; see `TreePartition`."""

    params: PyTree
    opt_state: PyTree
    averaged: PyTree
    model_state: PyTree
    averaged_before: PyTree = field(default_factory=dict)


@dataclass(frozen=True)
class Pulled:
    """A server's parts of parameters and model state, NumPy arrays."""

    version: int
    """Number of updates that they contain."""
    params: PyTree
    model_state: PyTree


@dataclass(frozen=True)
class Push:
    """One server's part of the gradients of a batch."""

    number: int
    """Number of the batch."""
    version: int
    """Version of the parameters that the gradients were computed with."""
    gradients: PyTree
    """None in the place of a parameter that is frozen."""
    model_state: PyTree
    """The change of the model state by the batch (see `difference`)."""
    loss: float
    floor: int = 0
    """Batches below this number have ended; a further push of one is ignored."""


@dataclass(frozen=True)
class PushResult:
    """A server's answer to a push.

    Attributes:
      is_new: Whether the push was applied now; False if its batch was applied before, or if it is
        too stale.
      is_stale: Whether it was refused because its staleness exceeds `max_staleness`.
      staleness: Number of updates between the pull and this push.
      finite: Whether each of `FLAGS` is finite in this server's part, after this update and all
        earlier ones.
    """

    is_new: bool
    is_stale: bool
    staleness: int
    finite: tuple[bool, ...]


@dataclass
class Counts:
    """Numbers of pushes to a server, by result."""

    added: int = 0
    """Applied."""
    repeated: int = 0
    """Ignored, because their batches were applied before."""
    stale: int = 0
    """Refused as too stale."""


class Server:
    """A part of the state, which each pushed batch updates once.

    Args:
      step: Number of updates in `held`: it contains all batches below this number.
      max_staleness: Maximum number of updates between a pull and its push; None for no bound.
    """

    def __init__(
        self, update: Update, held: ServerState, step: int, max_staleness: int | None = None
    ) -> None:
        self.applied = IdSet(step)
        """Numbers of the batches in the state."""
        self._version = step
        self._finite = (True,) * len(FLAGS)
        self.counts = Counts()
        # With max_staleness=0: the last applied batch, and the state that its worker had pulled.
        self._last: int | None = None
        self._before: ServerState | None = None
        self._state = jax.tree.map(jnp.asarray, held)
        self._max_staleness = max_staleness
        sharding = jax.tree.leaves(self._state)[0].sharding if jax.tree.leaves(held) else None

        def apply(
            state: ServerState,
            gradients: PyTree,
            model_state_change: PyTree,
            loss: jax.Array,
            count: jax.Array,
            staleness: jax.Array,
        ) -> tuple[ServerState, jax.Array]:
            extra = ExtraArguments(loss, gradients)
            new = update(state.params, state.opt_state, gradients, extra)
            steps = averaged_steps(count, state.averaged_before)
            averaged = update.average(state.averaged, new.params, new.opt_state, steps)
            model_state = with_difference(state.model_state, model_state_change, staleness)
            parts = new.params, new.opt_state, averaged, model_state
            after = ServerState(*parts, state.averaged_before)
            return after, finite_flags(loss, state, after, jax.tree.map(lambda _: sharding, state))

        # The old arrays are not donated, because a pull may still be reading them.
        self._apply = jax.jit(apply)

    def pull(self, number: int | None = None) -> Pulled:
        """Returns the parameters and model state for the computation of a batch.

        They are the current ones, with one exception. With `max_staleness=0`, this server may have
        applied the same batch already, because its worker was lost before it pushed to another
        server. Then they are the values before that update, so that the batch has the same
        gradients again.
        """
        if self._before is not None and number == self._last:
            return _pulled(self._version - 1, self._before)
        return _pulled(self._version, self._state)

    def push(self, pushed: Push) -> PushResult:
        """Applies a push, unless its batch was applied before or it is too stale."""
        staleness = self._version - pushed.version
        self.applied.close(pushed.floor)
        if pushed.number in self.applied:
            self.counts.repeated += 1
            return PushResult(False, False, staleness, self._finite)
        if self._max_staleness is not None and staleness > self._max_staleness:
            self.counts.stale += 1
            return PushResult(False, True, staleness, self._finite)
        if self._max_staleness == 0:
            self._last = pushed.number
            self._before = replace(self._state, opt_state=None, averaged=None)
        self._state, finite = self._apply(
            self._state,
            pushed.gradients,
            pushed.model_state,
            pushed.loss,
            self._version,
            staleness,
        )
        self.applied.enter(pushed.number)
        self._version += 1
        self.counts.added += 1
        # A non-finite result is kept, so that another worker that pushes the batch receives it too.
        self._finite = tuple(map(bool, np.asarray(finite) & self._finite))
        return PushResult(True, False, staleness, self._finite)

    def held(self) -> ServerState:
        """Returns this server's part of the state, NumPy arrays."""
        state: ServerState = jax.tree.map(np.asarray, self._state)
        return state


def _pulled(version: int, state: ServerState) -> Pulled:
    return Pulled(version, *jax.tree.map(np.asarray, (state.params, state.model_state)))
