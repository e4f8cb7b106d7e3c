"""Reading of the arrays of a checkpoint, and their verification."""

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.checkpoints.checksums import format_sums, read_parts, start_sums, sums
from spmdtrain.checkpoints.manifest import (
    ITEMS,
    CheckpointCorruptedError,
    Manifest,
    items_of,
    raw_keys,
    read_positions,
)
from spmdtrain.checkpoints.orbax_import import ocp
from spmdtrain.checkpoints.run_identity import describe_leaf
from spmdtrain.distributed import process_group
from spmdtrain.distributed.out_of_memory import available_memory
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError
from spmdtrain.record.storage import (
    in_short,
    is_corruption,
    silence_tensorstore_shutdown,
    storage_errors,
)
from spmdtrain.record.validation import Malformed, check_array_names
from spmdtrain.tree import is_key, named_leaves, path_name

PyTree = Any


def holds(manifest: Manifest, field: str) -> bool:
    """Returns whether a checkpoint has arrays of a field of the state."""
    return any(name.split("/")[0] == field for name in manifest.sums)


def read_arrays(
    folder: epath.Path, manifest: Manifest, fields: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """Reads arrays to devices, verifies their checksums, and returns them by field.

    All processes of a job call it, and each reads its own shards. `fields` has trees of
    `jax.ShapeDtypeStruct` with shardings. Fields without arrays in an item without arrays are left
    out. Raises `CheckpointCorruptedError` or `StorageError`.
    """
    targets = items_of(fields)
    items = {item: ocp.args.StandardRestore(raw_keys(x)) for item, x in targets.items()}

    def read() -> Mapping[str, Mapping[str, PyTree]]:
        with (
            _reported_faults(folder, manifest, items, in_memory=False),
            _checkpointer() as checkpointer,
        ):
            restored: Any = checkpointer.restore(folder, args=ocp.args.Composite(**items))
        return {item: restored[item] for item in items}

    restored = process_group.run_on_all(read, CheckpointCorruptedError)
    arrays = {field: x for item in restored.values() for field, x in item.items()}
    actual = format_sums(process_group.summed(read_parts(start_sums(arrays))))
    _verify_checksums(actual, manifest, arrays)
    wanted = {field: x for item in targets.values() for field, x in item.items()}
    restored_keys: dict[str, PyTree] = jax.tree.map(restore_key, wanted, arrays)
    return restored_keys


def _checkpointer() -> contextlib.AbstractContextManager[Any]:
    # Each process reads independently: one that finds corruption would miss Orbax' barriers.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process_group.rank(), active_processes={process_group.rank()}
    )
    options = alone if process_group.count() > 1 else ocp.options.MultiprocessingOptions()
    return contextlib.closing(
        ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=options)
    )


def restore_key(target: jax.ShapeDtypeStruct, leaf: jax.Array) -> jax.Array:
    """Returns a leaf as it was before `manifest.raw_keys`: a random key if the target is one."""
    if not is_key(target):
        return leaf
    implementation: list[Any] = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), target)
    return jax.random.wrap_key_data(leaf, impl=implementation[0])


def read_host_arrays(folder: epath.Path, manifest: Manifest, field: str) -> PyTree:
    """Returns a field of any structure as NumPy arrays, whose checksums are verified.

    There must be an item with the name of the field. Raises `CheckpointCorruptedError` or
    `StorageError`.
    """
    with _reported_faults(folder, manifest, [field], in_memory=True):
        tree = _saved_tree(folder / field)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays: dict[str, PyTree] = ocp.PyTreeCheckpointHandler().restore(
            folder / field, args=ocp.args.PyTreeRestore(item=tree, restore_args=as_numpy)
        )
    _verify_checksums(sums(arrays), manifest, arrays)
    return arrays[field]


def _saved_tree(folder: epath.Path) -> PyTree:
    """Returns the structure of an item with the headers of its arrays, from Orbax' metadata.

    Raises `CheckpointCorruptedError` if the metadata are not valid, or name a path outside the
    checkpoint.
    """
    try:
        check_array_names(folder)
    except Malformed as error:
        raise CheckpointCorruptedError(f"{folder.name} cannot be read: {error}") from error
    return ocp.PyTreeCheckpointHandler().metadata(folder).tree


def _verify_checksums(
    actual: Mapping[str, str], manifest: Manifest, fields: Collection[str]
) -> None:
    """Raises `CheckpointCorruptedError` for the first array whose checksum differs."""
    expected = {n: x for n, x in manifest.sums.items() if n.split("/")[0] in fields}
    for name in [*expected, *actual]:
        if fault := _checksum_fault(name, actual.get(name), expected.get(name)):
            raise CheckpointCorruptedError(fault)


def _checksum_fault(name: str, actual: str | None, saved: str | None) -> str | None:
    """Returns what is wrong with an array that has these checksums; None if they are equal."""
    if actual == saved:
        return None
    if actual is None or saved is None:
        return f"{name} is {'missing' if actual is None else 'not of this checkpoint'}"
    return f"{name} is not what was saved: its checksum is {actual}, and was {saved}"


@contextlib.contextmanager
def _reported_faults(
    folder: epath.Path, manifest: Manifest, items: Iterable[str], *, in_memory: bool
) -> Iterator[None]:
    """Checks the files and array headers of items that are read in the block.

    Raises `CheckpointCorruptedError`; if the block fails because of corrupted content, with the
    first fault that `examine` finds.
    """
    silence_tensorstore_shutdown()
    try:
        with storage_errors(folder):
            manifest.check_kinds(folder)
            manifest.check_files(folder)
            read_positions(folder, manifest.stream)
            for item in items:
                check_headers(_saved_tree(folder / item), manifest, in_memory=in_memory)
            yield
    except UserError:
        raise
    except Exception as error:
        if not is_corruption(error):
            raise
        fault = next((fault for _, fault in examine(folder, manifest) if fault), None)
        if fault is None:
            raise  # every array can be read and is valid, so the checkpoint is not the cause
        raise CheckpointCorruptedError(fault) from error


def examine(folder: epath.Path, manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Reads a checkpoint array by array, with the memory of one array on the host.

    Yields the name of each array and what is wrong with it; None if it is valid. Raises
    `StorageError` if the checkpoint cannot be read.
    """
    silence_tensorstore_shutdown()
    seen = set()
    with storage_errors(folder):
        try:
            manifest.check_kinds(folder)
        except CheckpointCorruptedError as error:
            yield "files", str(error)
            return  # nothing else in this folder may be opened
        try:
            manifest.check_files(folder)
            read_positions(folder, manifest.stream)
        except CheckpointCorruptedError as error:
            yield "files", str(error)
    for item, fields in ITEMS.items():
        if not any(holds(manifest, field) for field in fields):
            continue
        try:
            with storage_errors(folder):
                tree = _saved_tree(folder / item)
        except CheckpointCorruptedError as error:
            yield item, str(error)
            continue
        except Exception as error:
            if not is_corruption(error):
                raise
            yield item, f"{item} cannot be read: {in_short(error)}"
            continue
        for path, header in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path)
            seen.add(name)
            fault = header_fault(name, header, manifest, in_memory=True)
            yield name, fault or _array_fault(folder / item, tree, path, manifest)
    for name in dict.fromkeys([*manifest.sums, *manifest.identity.leaves]):
        if name not in seen:
            yield name, f"{name} is missing"


def _array_fault(folder: epath.Path, tree: PyTree, path: Any, manifest: Manifest) -> str | None:
    """Reads one array of an item; returns what is wrong with it, None if it is valid."""
    try:
        _read_array(folder, tree, path, manifest)
    except CheckpointCorruptedError as error:
        return str(error)
    return None


def _read_array(folder: epath.Path, tree: PyTree, path: Any, manifest: Manifest) -> np.ndarray:
    """Returns one array of an item, whose checksum is verified."""
    single = jax.tree_util.tree_map_with_path(lambda p, leaf: leaf if p == path else ..., tree)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    name = path_name(path)
    try:
        with storage_errors(folder):
            arrays = ocp.PyTreeCheckpointHandler().restore(
                folder, args=ocp.args.PyTreeRestore(item=single, restore_args=as_numpy)
            )
    except Exception as error:
        if not is_corruption(error):
            raise
        raise CheckpointCorruptedError(f"{name} cannot be read: {in_short(error)}") from error
    array: np.ndarray = named_leaves(arrays)[name]
    (actual,) = sums([array]).values()
    if fault := _checksum_fault(name, actual, manifest.sums.get(name)):
        raise CheckpointCorruptedError(fault)
    return array


def check_saved_items(folder: epath.Path, manifest: Manifest, items: Iterable[str]) -> None:
    """Checks the files and the array headers of some items, before their arrays are read.

    Raises `CheckpointCorruptedError` or `StorageError`.
    """
    with _reported_faults(folder, manifest, items, in_memory=False):
        pass


def read_host_array(folder: epath.Path, manifest: Manifest, item: str, name: str) -> np.ndarray:
    """Returns one array of an item as NumPy array, whose checksum is verified.

    `check_saved_items` must have checked the item. `name` is the path of the array in the state,
    `params/hidden/kernel`. Raises `CheckpointCorruptedError` or `StorageError`.
    """
    tree = _saved_tree(folder / item)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return _read_array(
        folder / item, tree, next(p for p in paths if path_name(p) == name), manifest
    )


# -- Checks of the headers of stored arrays, before memory is allocated for the arrays -------------
#
# A header of a few bytes can declare any size, which TensorStore then allocates.

_LONGEST_KEY = 16  # uint32s; JAX's own keys have 2 or 4


def check_headers(tree: PyTree, manifest: Manifest, *, in_memory: bool) -> None:
    """Compares the headers of an item's arrays with the manifest of the checkpoint.

    `tree` is Orbax' metadata of the arrays. `in_memory` means that this machine then reads all of
    them whole, so they must also fit into its memory together.

    Raises:
      CheckpointCorruptedError: If an array is not in the manifest, has another shape or dtype
        there, or needs more memory than there is.
    """
    total = 0
    for path, header in jax.tree_util.tree_leaves_with_path(tree):
        if fault := header_fault(path_name(path), header, manifest, in_memory=in_memory):
            raise CheckpointCorruptedError(fault)
        total += _size(header)
    if in_memory and total > available_memory():
        raise CheckpointCorruptedError(
            f"its arrays have {byte_size(total)} by their headers, {_more_than_memory()}"
        )


def header_fault(name: str, header: Any, manifest: Manifest, *, in_memory: bool) -> str | None:
    """Returns what is wrong with the header of one array; None if it is valid."""
    saved = manifest.identity.leaves.get(name)
    if saved is None:
        return f"{name} is not of this checkpoint"
    if getattr(header, "shape", None) is None or getattr(header, "dtype", None) is None:
        return f"{name} is not an array by its header, and was saved as {saved}"
    shape, declared = tuple(header.shape), describe_leaf(header)
    if declared != saved and not _is_key_data(header, saved):
        return f"{name} is {declared} by its header, and was saved as {saved}"
    chunk = tuple(getattr(header.storage, "chunk_shape", None) or ())
    if math.prod(chunk) > max(1, math.prod(shape)):
        return f"{name} is {declared} by its header, and a chunk of it is {list(chunk)}"
    if in_memory and (size := _size(header)) > available_memory():
        return f"{name} is {declared} by its header, {byte_size(size)}, {_more_than_memory()}"
    return None


def _size(header: Any) -> int:
    """Returns the bytes that a header declares."""
    return math.prod(header.shape) * jnp.dtype(header.dtype).itemsize


def _more_than_memory() -> str:
    return f"more than the {byte_size(available_memory())} of memory here"


def _is_key_data(header: Any, saved: str) -> bool:
    """Returns whether an array can be the data of a random key that `saved` describes."""
    *dims, words = header.shape or (0,)
    as_key = f"{saved.partition('[')[0]}[{','.join(map(str, dims))}]"
    return saved.startswith("key<") and saved == as_key and words <= _LONGEST_KEY
