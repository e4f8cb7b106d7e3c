"""A parameter server: its part of the state, what is pulled from it, and what is pushed to it."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.parameter_server.id_set import IdSet
from spmdtrain.step.finite import HEALTH, health
from spmdtrain.step.model_state import with_difference
from spmdtrain.step.optimizer import Update

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ServerState:
    """What a server has of a `TrainState`; see `TreePartition`."""

    params: PyTree
    opt_state: PyTree
    averaged: PyTree
    model_state: PyTree


@dataclass(frozen=True)
class Pulled:
    """What a worker computes with, in NumPy arrays."""

    version: int
    """Updates that are in it."""
    params: PyTree
    model_state: PyTree


@dataclass(frozen=True)
class Push:
    """What a batch gives to a server: its part of it."""

    number: int
    version: int
    """Of the parameters that it was computed with."""
    gradients: PyTree
    """None in the places of parameters that are not trained."""
    model_state: PyTree
    """What the batch adds to the model state (see `difference`)."""
    loss: float
    floor: int = 0
    """No batch below this number will be pushed any more, but for those that were."""


@dataclass(frozen=True)
class PushResult:
    """What a server says of a push.

    Attributes:
        is_new: Whether it was added; else it had been before, or is too stale.
        is_stale: Whether it was refused, as more than `max_staleness` others were added since.
        staleness: How many those are.
        finite: Whether each of `HEALTH` is, of this server's part, and was with each push before.
    """

    is_new: bool
    is_stale: bool
    staleness: int
    finite: tuple[bool, ...]


@dataclass
class Counts:
    """What has come of the pushes to a server."""

    added: int = 0
    repeated: int = 0
    """Had been added before, and were not again."""
    stale: int = 0
    """Were refused."""


class Server:
    """Adds what is pushed to it to its part of the state, each batch once.

    Args:
        update: The optimizer, as far as it works on a part.
        held: The part.
        step: Updates that are in it: all batches below that number.
        max_staleness: See `PushResult`; None is any number.
    """

    def __init__(
        self, update: Update, held: ServerState, step: int, max_staleness: int | None = None
    ) -> None:
        self.ledger = IdSet(step)
        self._version = step
        self._sound = (True,) * len(HEALTH)
        self.counts = Counts()
        # The batch that was added last, and what its worker had pulled: where nothing may be stale.
        self._last: int | None = None
        self._before: ServerState | None = None
        self._held = jax.tree.map(jnp.asarray, held)
        self._max_staleness = max_staleness
        place = jax.tree.leaves(self._held)[0].sharding if jax.tree.leaves(held) else None

        def add(
            held: ServerState,
            gradients: PyTree,
            more: PyTree,
            loss: jax.Array,
            count: jax.Array,
            staleness: jax.Array,
        ) -> tuple[ServerState, jax.Array]:
            params, opt_state = update(held.params, held.opt_state, gradients, loss)
            averaged = update.average(held.averaged, params, count)
            model_state = with_difference(held.model_state, more, staleness)
            after = ServerState(params, opt_state, averaged, model_state)
            return after, health(loss, held, after, jax.tree.map(lambda _: place, held))

        # The old arrays are not donated: who has pulled them may still be reading.
        self._add = jax.jit(add)

    def pull(self, number: int | None = None) -> Pulled:
        """What it has now, for a worker that computes batch `number`.

        Where nothing may be stale, and that batch has been added here and its worker lost before it
        came to another server, what there was before it: so it is the same again.
        """
        if self._before is not None and number == self._last:
            return _pulled(self._version - 1, self._before)
        return _pulled(self._version, self._held)

    def push(self, pushed: Push) -> PushResult:
        """Add what a batch gives, if it has not been added before and is fresh enough."""
        staleness = self._version - pushed.version
        self.ledger.close(pushed.floor)
        if pushed.number in self.ledger:
            self.counts.repeated += 1
            return PushResult(False, False, staleness, self._sound)
        if self._max_staleness is not None and staleness > self._max_staleness:
            self.counts.stale += 1
            return PushResult(False, True, staleness, self._sound)
        if self._max_staleness == 0:
            self._last = pushed.number
            self._before = replace(self._held, opt_state=None, averaged=None)
        self._held, finite = self._add(
            self._held,
            pushed.gradients,
            pushed.model_state,
            pushed.loss,
            self._version,
            staleness,
        )
        self.ledger.enter(pushed.number)
        self._version += 1
        self.counts.added += 1
        # Once it is not finite it stays so: whoever brings that batch again is to hear it, too.
        self._sound = tuple(map(bool, np.asarray(finite) & self._sound))
        return PushResult(True, False, staleness, self._sound)

    def held(self) -> ServerState:
        """Its part, in NumPy arrays."""
        found: ServerState = jax.tree.map(np.asarray, self._held)
        return found


def _pulled(version: int, held: ServerState) -> Pulled:
    return Pulled(version, *jax.tree.map(np.asarray, (held.params, held.model_state)))
