"""The checkpoint manager of Orbax. Imported with the first save, because the import takes long."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from spmdtrain.checkpoints.host_copy import HostCopy
from spmdtrain.checkpoints.orbax_import import check_s3, ocp
from spmdtrain.distributed import process_group
from spmdtrain.record.storage import is_url

_MIN_SLICE = 2**20  # bytes


class Manager(ocp.CheckpointManager):  # type: ignore[misc]
    """Orbax' manager without its handling of preemption, which stops at steps of Orbax' choice."""

    def reached_preemption(self, step: int) -> bool:
        return False


class SharedManager(Manager):
    """The manager of several processes.

    Attributes:
      failure: Why this process could not write its part. It is known before Orbax' barrier, in
        which this process waits for others that wait for it.
    """

    failure: Exception | None = None

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except Exception as error:
            self.failure = error
            raise


def open_manager(
    folder: epath.Path,
    items: Iterable[str],
    *,
    seal: Callable[[], None],
    keep: Callable[[Sequence[int]], list[bool]],
    removed: str | None,
) -> Manager:
    """Returns the manager of the checkpoints in a folder. All processes of the job call it.

    Args:
      items: Names of the items of a checkpoint.
      seal: Called before each checkpoint is published.
      keep: Returns for each of the existing steps whether its checkpoint is kept.
      removed: Subfolder to which other checkpoints are moved; None to remove them at once.
    """
    if is_url(folder):
        check_s3(folder)
    count = process_group.count()
    return (SharedManager if count > 1 else Manager)(
        folder,
        options=ocp.CheckpointManagerOptions(
            create=False,
            # If the processes are listed, Orbax' barriers do not use devices, whose number may
            # differ between processes.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=0, active_processes=set(range(count)) if count > 1 else None
            ),
            # Removes the unfinished checkpoints of a killed run before the first save.
            # Of a local folder `Checkpoints` removes it: Orbax would remove foreign folders too.
            cleanup_tmp_directories=is_url(folder),
            lightweight_initialize=True,  # times and metrics are in the manifests
            # A checkpoint is renamed before it is removed, so a partial one is never listed.
            todelete_subdir=removed,
            preservation_policy=_Policy(keep),
            async_options=ocp.AsyncOptions(
                post_finalization_callback=seal,
                # Otherwise a folder that cannot be written is detected minutes later.
                create_directories_asynchronously=False,
            ),
        ),
        item_handlers={item: _handler(item) for item in items},
    )


def _handler(item: str) -> ocp.PyTreeCheckpointHandler:
    """Returns Orbax' handler; a single process copies replicated arrays from one device.

    The item `training` is stored without shardings, because a restore defines them, and writing the
    shardings of all items takes a quarter of the processor time of a small save. The other items
    have shardings, so that Orbax alone can read the model.

    Nothing is compressed, because compression makes floating-point numbers only about a tenth
    smaller, and takes a third to two thirds of the processor time of a large save.

    Slicing a replicated array over all devices is useful with several hosts and for large arrays.
    Otherwise it takes several times as long as the copy, and has to be compiled.
    """
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=process_group.count() > 1,
        min_slice_bytes_for_replica_parallel=_MIN_SLICE,
        enable_write_sharding_file=item != "training",
    )
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (HostCopy, arrays)
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


@dataclass(frozen=True)
class _Policy:
    """The retention of this package as a preservation policy of Orbax."""

    keep: Callable[[Sequence[int]], list[bool]]

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> list[bool]:
        return self.keep([info.step for info in checkpoints])
