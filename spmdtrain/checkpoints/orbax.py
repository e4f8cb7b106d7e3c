"""Orbax' manager of checkpoints as we use it: imported with the first save, as Orbax takes long."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from spmdtrain.distributed import process_group

_MIN_SLICE = 2**20  # bytes


class Manager(ocp.CheckpointManager):  # type: ignore[misc]
    """Orbax' own, which would put a step of ours among JAX's points to stop at."""

    def reached_preemption(self, step: int) -> bool:
        return False


def open_manager(
    folder: epath.Path,
    items: Iterable[str],
    *,
    seal: Callable[[], None],
    keep: Callable[[Sequence[int]], list[bool]],
    removed: str | None,
) -> Manager:
    """Of the checkpoints in `folder`: `seal` is called before each is published.

    `keep` says of the steps that are there which ones stay; the others go into `removed`, a folder
    inside, or at once where it is None. All processes of the job call it together.
    """
    return Manager(
        folder,
        options=ocp.CheckpointManagerOptions(
            create=False,
            multiprocessing_options=_by_all(),
            # What a killed run left half-written goes before the first save.
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # our manifests hold times and metrics
            # One that is removed loses its name first: half of it is never counted.
            todelete_subdir=removed,
            preservation_policy=_Policy(keep),
            async_options=ocp.AsyncOptions(
                post_finalization_callback=seal,
                # Else a folder that cannot be written shows after minutes of waiting.
                create_directories_asynchronously=False,
            ),
        ),
        item_handlers={item: _handler() for item in items},
    )


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax' own, but for one thing: a process alone copies what is replicated from one device.

    To slice it up among all of them is for those of several hosts, and for what is large; else it
    takes several times as long as the copy, and to compile.
    """
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=process_group.count() > 1,
        min_slice_bytes_for_replica_parallel=_MIN_SLICE,
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _by_all() -> ocp.options.MultiprocessingOptions:
    """Options for all processes of the job.

    With the processes named, it waits for them without the devices, which may be more in one
    process than in another.
    """
    count = process_group.count()
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(count)) if count > 1 else None
    )


@dataclass(frozen=True)
class _Policy:
    """Our retention in the form in which Orbax asks for it."""

    keep: Callable[[Sequence[int]], list[bool]]

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> list[bool]:
        return self.keep([info.step for info in checkpoints])
