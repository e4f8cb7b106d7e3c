"""The partition of a training: workers compute gradients, servers hold the state.

The scheme follows `tf.distribute.ParameterServerStrategy` (Li et al., "Scaling Distributed Machine
Learning with the Parameter Server", OSDI 2014), for any model and any optimizer that can be split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from rich.table import Table

from spmdtrain.document.terminal import Terminal, byte_size
from spmdtrain.parameter_server.optimizer_split import split_optimizer
from spmdtrain.parameter_server.partition import (
    FixedShards,
    Partitioner,
    TreePartition,
    partition_tree,
)
from spmdtrain.parameter_server.scheduler import BatchResult
from spmdtrain.parameter_server.server import Pulled, Push, PushResult, ServerState
from spmdtrain.step.metrics import Combination
from spmdtrain.step.optimizer import Update
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

PyTree = Any


@dataclass(frozen=True)
class Computed:
    """A worker's result for a batch; for the other fields see `BatchResult`.

    Attributes:
      gradients: Gradients of the weighted mean for the trained parameters, after the part of the
        optimizer that runs on the worker, such as clipping.
      model_state: The change of the model state by the batch (see `difference`).
    """

    gradients: PyTree
    model_state: PyTree
    metrics: dict[str, float]
    sums: Mapping[str, Sequence[float]] = field(default_factory=dict)
    combined: dict[str, Combination] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerPartition:
    """The partition of a state over servers, and of the optimizer over workers and servers.

    The optimizer's state and the averaged parameters are partitioned like the parameters; each
    array of the model state is whole on one server. `on_worker` are the transformations that need
    whole gradients, `on_server` is the update that each server applies to its part.
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
        """Returns the partition of an abstract state; raises as `split_optimizer` does."""
        params = partition_tree(state.params, servers, partitioner)
        trained = params.map(lambda params: update.partition(params)[0])
        on_worker, on_server = split_optimizer(update.optimizer, trained)
        server_update = Update(on_server, update.frozen, update.ema_decay)
        return cls(
            params=params,
            trained=trained,
            opt_state=params.map(server_update.init),
            averaged=params.map(server_update.first_average),
            model_state=partition_tree(state.model_state, servers, FixedShards(1)),
            on_worker=on_worker,
            on_server=server_update,
        )

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.params.parts)

    def held_by(self, server: int, state: TrainState) -> ServerState:
        """Returns a server's part of a state."""
        return ServerState(
            params=self.params.cut(state.params, server),
            opt_state=self.opt_state.cut(state.opt_state, server),
            averaged=self.averaged.cut(state.averaged, server),
            model_state=self.model_state.cut(state.model_state, server),
            averaged_before=state.averaged_before,
        )

    def state(self, held: Sequence[ServerState], step: int, key: Any) -> TrainState:
        """Returns the whole state, NumPy arrays, from the parts of all servers in their order."""
        return TrainState(
            step=np.asarray(step, np.int32),  # type: ignore[arg-type]
            params=self.params.join([part.params for part in held]),
            opt_state=self.opt_state.join([part.opt_state for part in held]),
            averaged=self.averaged.join([part.averaged for part in held]),
            model_state=self.model_state.join([part.model_state for part in held]),
            key=key,
            averaged_before=held[0].averaged_before,
        )

    def pulled(self, parts: Sequence[Pulled]) -> tuple[PyTree, PyTree]:
        """Returns the whole parameters and model state from the answers of all servers."""
        params = self.params.join([part.params for part in parts])
        return params, self.model_state.join([part.model_state for part in parts])

    def pushes(self, number: int, computed: Computed, parts: Sequence[Pulled]) -> list[Push]:
        """Returns each server's push of a batch, with the version of its pulled part."""
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


def batch_result(
    number: int,
    metrics: Mapping[str, float],
    results: Sequence[PushResult],
    *,
    sums: Mapping[str, Sequence[float]] | None = None,
    combined: dict[str, Combination] | None = None,
    pulled: int = 0,
    pushed: int = 0,
) -> BatchResult:
    """Returns the result of a batch from the answers of all servers to its pushes.

    The staleness that a server reports for a batch which it had applied before is ignored, because
    this push was not applied. `pulled` and `pushed` are bytes.
    """
    return BatchResult(
        number=number,
        metrics=dict(metrics),
        sums=sums or {},
        combined=combined or {},
        finite=tuple(np.all([result.finite for result in results], axis=0).tolist()),
        staleness=max((result.staleness for result in results if result.is_new), default=0),
        is_stale=any(result.is_stale for result in results),
        pulled=pulled,
        pushed=pushed,
    )


def bytes_in(tree: PyTree) -> int:
    """Returns the size of all arrays of a tree in bytes."""
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))


def print_partition(terminal: Terminal, partition: ServerPartition) -> None:
    """Prints the rows of each parameter on each server, and the bytes of the server's part."""
    table = Table()
    table.add_column("parameter")
    table.add_column("shape")
    for server in range(partition.servers):
        table.add_column(f"ps {server}", justify="right")
    shapes = {name: leaf.shape for name, leaf in named_leaves(partition.params.whole).items()}
    parts = [named_leaves(part) for part in partition.params.parts]
    for name, shape in shapes.items():
        table.add_row(name, str(shape), *_row_ranges(shape, [part[name].shape for part in parts]))
    table.add_section()
    fields = {"parameters": partition.params, "optimizer": partition.opt_state}
    fields |= {"average": partition.averaged, "model state": partition.model_state}
    for name, tree in fields.items():
        if jax.tree.leaves(tree.whole):
            table.add_row(name, "", *_sizes(tree, partition.servers))
    terminal.console.print(table)


def _row_ranges(shape: tuple[int, ...], parts: list[tuple[int, ...]]) -> list[str]:
    """Returns each server's rows of a parameter; an empty text for a server without any."""
    if not shape:
        return ["all" if part == shape else "" for part in parts]
    ranges, first = [], 0
    for part in parts:
        ranges.append(f"{first}:{first + part[0]}" if part[0] else "")
        first += part[0]
    return ["all" if part == shape else rows for part, rows in zip(parts, ranges, strict=True)]


def _sizes(tree: TreePartition, servers: int) -> list[str]:
    return [byte_size(tree.bytes_of(server)) for server in range(servers)]
