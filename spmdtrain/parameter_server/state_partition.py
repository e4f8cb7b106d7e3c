"""A training divided between workers, which compute gradients, and servers, which have the state.

What `tf.distribute.ParameterServerStrategy` does (Li et al., "Scaling Distributed Machine Learning
with the Parameter Server", OSDI 2014), for any model and any optimizer that can be divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from rich.table import Table

from spmdtrain.parameter_server.optimizer_split import divided
from spmdtrain.parameter_server.partition import FixedShards, Partitioner, TreePartition, cuts_of
from spmdtrain.parameter_server.scheduler import Outcome
from spmdtrain.parameter_server.server import Pulled, Push, PushResult, ServerState
from spmdtrain.step.optimizer import Update
from spmdtrain.step.state import TrainState
from spmdtrain.terminal import Terminal, byte_size
from spmdtrain.tree import named_leaves

PyTree = Any


@dataclass(frozen=True)
class Computed:
    """What a worker makes of a batch.

    Attributes:
        gradients: Of the weighted mean, those that are trained; clipped, say, where the optimizer
            begins with that.
        model_state: What the batch adds to it (see `difference`).
        metrics: Weighted means, "loss" among them.
        sums: Weighted sum and weight of each metric.
    """

    gradients: PyTree
    model_state: PyTree
    metrics: dict[str, float]
    sums: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerPartition:
    """Which server has what of a state, and which part of the optimizer works where.

    Attributes:
        params: How the parameters are cut, and with them what the optimizer keeps of them.
        trained: The same, of those that are trained.
        model_state: Each of its arrays is whole on one server.
        on_worker: What is done to a gradient while it is whole.
        on_server: What each server does with its part.
    """

    params: TreePartition
    trained: TreePartition
    opt_state: TreePartition
    averaged: TreePartition
    model_state: TreePartition
    on_worker: optax.GradientTransformation
    on_server: Update

    @classmethod
    def of(
        cls, state: TrainState, update: Update, servers: int, partitioner: Partitioner
    ) -> "ServerPartition":
        """For an abstract state. Raises `UserError` for an optimizer that cannot be divided."""
        params = cuts_of(state.params, servers, partitioner)
        trained = params.map(lambda params: update.partition(params)[0])
        on_worker, on_server = divided(update.optimizer, trained)
        on_its_server = Update(on_server, update.frozen, update.ema_decay)
        return cls(
            params=params,
            trained=trained,
            opt_state=params.map(on_its_server.init),
            averaged=params.map(on_its_server.first_average),
            model_state=cuts_of(state.model_state, servers, FixedShards(1)),
            on_worker=on_worker,
            on_server=on_its_server,
        )

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self.params.parts)

    def held_by(self, server: int, state: TrainState) -> ServerState:
        """What a server has of a state."""
        return ServerState(
            params=self.params.cut(state.params, server),
            opt_state=self.opt_state.cut(state.opt_state, server),
            averaged=self.averaged.cut(state.averaged, server),
            model_state=self.model_state.cut(state.model_state, server),
        )

    def state(self, held: Sequence[ServerState], step: int, key: Any) -> TrainState:
        """The whole state again, in NumPy arrays."""
        return TrainState(
            step=np.asarray(step, np.int32),  # type: ignore[arg-type]
            params=self.params.join([one.params for one in held]),
            opt_state=self.opt_state.join([one.opt_state for one in held]),
            averaged=self.averaged.join([one.averaged for one in held]),
            model_state=self.model_state.join([one.model_state for one in held]),
            key=key,
        )

    def pulled(self, parts: Sequence[Pulled]) -> tuple[PyTree, PyTree]:
        """Parameters and model state, from what all servers have."""
        params = self.params.join([part.params for part in parts])
        return params, self.model_state.join([part.model_state for part in parts])

    def pushes(self, number: int, computed: Computed, parts: Sequence[Pulled]) -> list[Push]:
        """What each server gets of what a batch gives."""
        return [
            Push(
                number=number,
                version=part.version,
                gradients=self.trained.cut(computed.gradients, server),
                model_state=self.model_state.cut(computed.model_state, server),
                loss=computed.metrics["loss"],
            )
            for server, part in enumerate(parts)
        ]


def outcome(
    number: int,
    metrics: Mapping[str, float],
    landed: Sequence[PushResult],
    *,
    sums: Mapping[str, Sequence[float]] | None = None,
    pulled: int = 0,
    pushed: int = 0,
) -> Outcome:
    """What came of a batch, from what each server has said of its push.

    Where a server had added it before, for another worker, what it says of this push's staleness
    is of nothing that was added.
    """
    return Outcome(
        number=number,
        metrics=dict(metrics),
        sums=sums or {},
        finite=tuple(np.all([one.finite for one in landed], axis=0).tolist()),
        staleness=max((one.staleness for one in landed if one.is_new), default=0),
        is_stale=any(one.is_stale for one in landed),
        pulled=pulled,
        pushed=pushed,
    )


def bytes_in(tree: PyTree) -> int:
    """Of all arrays."""
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))


def show(terminal: Terminal, division: ServerPartition) -> None:
    """Print the rows that each server has of each parameter, and the bytes of its part."""
    table = Table()
    table.add_column("parameter")
    table.add_column("shape")
    for server in range(division.servers):
        table.add_column(f"ps {server}", justify="right")
    shapes = {name: leaf.shape for name, leaf in named_leaves(division.params.whole).items()}
    parts = [named_leaves(part) for part in division.params.parts]
    for name, shape in shapes.items():
        table.add_row(name, str(shape), *_rows(shape, [part[name].shape for part in parts]))
    table.add_section()
    kept = {"parameters": division.params, "optimizer": division.opt_state}
    kept |= {"average": division.averaged, "model state": division.model_state}
    for name, cuts in kept.items():
        if jax.tree.leaves(cuts.whole):
            table.add_row(name, "", *_bytes(cuts, division.servers))
    terminal.console.print(table)


def _rows(shape: tuple[int, ...], parts: list[tuple[int, ...]]) -> list[str]:
    """Of a parameter, each server's rows; nothing where it has none."""
    if not shape:
        return ["all" if part == shape else "" for part in parts]
    found, first = [], 0
    for part in parts:
        found.append(f"{first}:{first + part[0]}" if part[0] else "")
        first += part[0]
    return ["all" if part == shape else rows for part, rows in zip(parts, found, strict=True)]


def _bytes(cuts: TreePartition, servers: int) -> list[str]:
    return [byte_size(cuts.bytes_of(server)) for server in range(servers)]
