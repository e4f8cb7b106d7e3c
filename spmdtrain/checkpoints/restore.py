"""Loading checkpoints: which one is good, what is in it, and parameters for inference."""

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath, epy
from jax.sharding import Sharding

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.array_headers import check_headers, header_fault
from spmdtrain.checkpoints.checksums import as_text, read_parts, start_sums, sums
from spmdtrain.checkpoints.items import ITEMS, items_of, raw_keys, steps_in
from spmdtrain.checkpoints.listing import BEST, LATEST, choose, parse_choice
from spmdtrain.checkpoints.manifest import NAME, CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.run_identity import check_same_model, describe_leaves
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError
from spmdtrain.files.storage import (
    absolute,
    folder_of,
    in_short,
    is_damage,
    silence_tensorstore_shutdown,
    why_failed,
)
from spmdtrain.step.state import TrainState, average_of
from spmdtrain.tree import named_leaves, path_name

with epy.lazy_imports():  # as it takes long, and is for what is restored alone
    import orbax.checkpoint as ocp

PyTree = Any
T = TypeVar("T")

_LOOKS, _BETWEEN_LOOKS = 3, 0.02  # seconds


# -- which one ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Checkpoints that one may be loaded from: the `steps` in `folder`, oldest first."""

    folder: epath.Path
    steps: Sequence[int]
    whole_workdir: bool = True

    def path(self, step: int) -> epath.Path:
        """The folder of one checkpoint."""
        return self.folder / str(step)


@dataclass(frozen=True)
class Found(Generic[T]):
    """What was loaded, from where, and which newer checkpoints are damaged."""

    value: T
    manifest: Manifest
    damaged: Sequence[int]


def list_checkpoints(workdir: str) -> Source:
    """The checkpoints of a workdir, perhaps none."""
    return _listed(absolute(folder_of(workdir) / "checkpoints"))


def _listed(folder: epath.Path) -> Source:
    """The checkpoints in a folder, perhaps none.

    While a run keeps but one, the next may come and the last go between two names of a listing:
    where there seems to be none, another look tells.
    """
    with _reachable(folder):
        steps = steps_in(folder)
        for _ in range(_LOOKS):
            if steps or not folder.exists():
                break
            time.sleep(_BETWEEN_LOOKS)
            steps = steps_in(folder)
        return Source(folder, steps)


def find(path: str | os.PathLike[str], which: str | int = LATEST) -> Source:
    """What a path means: all checkpoints of a workdir, or the one that is `checkpoints/STEP`.

    `which` selects one of a workdir's: "best" or a step; "latest" leaves all of them, of which the
    newest good one is loaded. Raises `UserError` where there is none, and `StorageError` where one
    cannot look.
    """
    path, which = os.fspath(path), parse_choice(which)
    given = absolute(folder_of(path))
    inside = given.parent.name == "checkpoints" or (given / NAME).exists()
    if given.name.isdecimal() and inside and given.is_dir():
        if which not in (LATEST, int(given.name)):
            raise UserError(
                f"{path} names one checkpoint; to choose {'the best' if which == BEST else which}, "
                "give its workdir"
            )
        return Source(given.parent, [int(given.name)], whole_workdir=False)
    source = _listed(given) if given.name == "checkpoints" else list_checkpoints(path)
    if not source.steps:
        raise UserError(f"{path}: holds no checkpoint (neither a workdir nor a checkpoints/STEP)")
    if which == LATEST:
        return source
    with _reachable(source.folder):
        step = choose(source.folder, source.steps, which)
    return Source(source.folder, [step], whole_workdir=False)


def broadcast_source(source: Source) -> Source:
    """As process 0 sees it: all processes of a job call it, to load the same checkpoint."""
    return replace(source, steps=process_group.broadcast(list(source.steps)))


def load_latest_valid(
    source: Source,
    load: Callable[[epath.Path, Manifest], T],
    tell: Callable[[str], None],
    *,
    by_all: bool = False,
) -> Found[T]:
    """Loads the newest valid checkpoint of a source.

    Args:
      source: The checkpoints.
      load: Loads one; its `UserError` other than a corrupted checkpoint ends the search.
      tell: Receives a line for each corrupted checkpoint.
      by_all: Whether all processes of the job load together.

    Raises:
      CheckpointCorruptedError: If no checkpoint is valid.
    """

    def read(folder: epath.Path) -> Manifest:
        with _reachable(folder):
            return Manifest.read(folder)

    source = broadcast_source(source) if by_all else source
    damaged: dict[int, CheckpointCorruptedError] = {}
    for step in reversed(source.steps):
        folder = source.path(step)
        try:
            reading = functools.partial(read, folder)
            manifest = (
                process_group.run_on_all(reading, CheckpointCorruptedError) if by_all else reading()
            )
            return Found(load(folder, manifest), manifest, list(damaged))
        except CheckpointCorruptedError as error:
            gone = not folder.exists()
            if source.whole_workdir and (process_group.broadcast(gone) if by_all else gone):
                # Removed while it was read, by a run that goes on: there is a newer one.
                return load_latest_valid(_listed(source.folder), load, tell, by_all=by_all)
            damaged[step] = error
            if step != source.steps[0]:
                tell(f"checkpoint {folder} is damaged: {error}; trying the one before")
    if not damaged:
        raise UserError(f"{source.folder}: holds no checkpoint any more")
    newest = max(damaged)
    if len(damaged) == 1:
        raise CheckpointCorruptedError(
            f"checkpoint {source.path(newest)} is damaged: {damaged[newest]}"
        )
    raise CheckpointCorruptedError(
        f"none of the {len(damaged)} checkpoints in {source.folder} is good; of the newest, "
        f"{newest}: {damaged[newest]}"
    )


# -- the whole state ---------------------------------------------------------------------------


def load_state(
    folder: epath.Path, manifest: Manifest, abstract: TrainState, shardings: TrainState
) -> TrainState:
    """The state, each leaf placed as `shardings` says, on whatever devices there are now.

    It is as `abstract` says (see `identity.check_same_run`). Raises `CheckpointCorruptedError`.
    """
    target: TrainState = jax.tree.map(_placed, abstract, shardings)
    fields: dict[str, PyTree] = {"averaged": {}, "model_state": {}} | _read(
        folder, manifest, items_of(target)
    )
    return TrainState(**fields)


def _placed(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


# -- the model alone ---------------------------------------------------------------------------


def load_model(
    folder: epath.Path,
    manifest: Manifest,
    abstract: TrainState,
    shardings: TrainState,
    config: Mapping[str, Any],
) -> Variables:
    """Parameters, averaged ones where the run kept an average, and model state.

    Refuses, by `UserError`, a checkpoint of another model than this run's of that `config`,
    whatever else its run was.
    """
    check_same_model(manifest.identity, config, describe_leaves(abstract), str(folder))
    averaged = holds(manifest, "averaged")
    like = average_of(abstract.params) if averaged else abstract.params
    # This run may keep no average, and yet evaluate with another's.
    places = shardings.averaged if averaged and shardings.averaged else shardings.params
    params = jax.tree.map(_placed, like, places)
    state = jax.tree.map(_placed, abstract.model_state, shardings.model_state)
    targets = {"averaged": {"averaged": params}} if averaged else {"params": {"params": params}}
    if jax.tree.leaves(state):
        targets["model_state"] = {"model_state": state}
    fields = _read(folder, manifest, targets)
    return Variables(fields["averaged" if averaged else "params"], fields.get("model_state", {}))


def holds(manifest: Manifest, field: str) -> bool:
    """Whether a field of the state has arrays in a checkpoint."""
    return any(name.split("/")[0] == field for name in manifest.sums)


def warn(text: str) -> None:
    """Tell of a damaged checkpoint where there is no terminal."""
    warnings.warn(text, stacklevel=4)


def read_variables(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    sharding: Any = None,
    averaged: bool | None = None,
    tell: Callable[[str], None] = warn,
) -> tuple[Variables, Manifest]:
    """Parameters and model state (batch statistics) of a checkpoint, and its manifest.

    Arguments are those of `load_params`; `tell` hears of damaged checkpoints that are passed over.
    """

    def load(folder: epath.Path, manifest: Manifest) -> Variables:
        average = holds(manifest, "averaged") if averaged is None else averaged
        if average and not holds(manifest, "averaged"):
            raise UserError(f"{folder} holds no averaged parameters: its run had no ema_decay")
        params = _read_host(folder, manifest, "averaged" if average else "params")
        if sharding is not None:
            params = jax.device_put(params, sharding)
        has_state = holds(manifest, "model_state")
        return Variables(params, _read_host(folder, manifest, "model_state") if has_state else {})

    found = load_latest_valid(find(path, which), load, tell)
    return found.value, found.manifest


def load_variables(
    path: str | os.PathLike[str], *, which: str | int = LATEST, averaged: bool | None = None
) -> Variables:
    """Returns the parameters and the model state (batch statistics) of a run.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest good one), "best" or a step.
      averaged: As for `load_params`.

    Returns:
      `Variables(params, model_state)`, NumPy arrays; `model_state` is `{}` if the model has none.

    Raises:
      UserError: If there is no such checkpoint, or none that is good.
      StorageError: If it cannot be read.
    """
    return read_variables(path, which=which, averaged=averaged)[0]


def load_params(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    sharding: Any = None,
    averaged: bool | None = None,
) -> PyTree:
    """The parameters of a run for inference, without its code, optimizer or devices.

    `path` is a workdir or one `checkpoints/STEP`. `which` selects the checkpoint of a workdir:
    "latest" (the newest good one), "best" (by the run's best_metric) or a step. Nested
    dictionaries (lists where the model has sequences) of NumPy arrays in the dtypes they were
    saved in; with `sharding`, one for all or a tree of them, JAX arrays placed so. Where the run
    kept an average of its parameters, that is what is loaded: `averaged=False` takes the trained
    ones themselves, `averaged=True` insists. Averages are float32 where parameters are narrower.
    Batch statistics are in `load_variables`, a whole model in `load_model`.
    Raises `UserError`, also where nothing is good, and `StorageError` where it cannot be read.
    """
    return read_variables(path, which=which, sharding=sharding, averaged=averaged)[0].params


def read_manifest(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    tell: Callable[[str], None] = warn,
) -> Manifest:
    """What is known of a checkpoint without loading it: arrays, sizes, metrics, its run.

    `path` and `which` are as for `load_params`; the latest is the newest with a manifest.
    Raises `UserError` and `StorageError`.
    """
    return load_latest_valid(find(path, which), lambda _, manifest: manifest, tell).value


# -- reading and checking ----------------------------------------------------------------------


def _read(
    folder: epath.Path, manifest: Manifest, targets: Mapping[str, Mapping[str, PyTree]]
) -> dict[str, PyTree]:
    """Arrays placed as `targets` say, by item and field; by field. All of them are checked.

    All processes of a job read together, each its own shards.
    """
    items = {item: ocp.args.StandardRestore(raw_keys(dict(x))) for item, x in targets.items()}

    def read() -> Mapping[str, Mapping[str, PyTree]]:
        with (
            _named_faults(folder, manifest, items, in_memory=False),
            _checkpointer() as checkpointer,
        ):
            restored: Any = checkpointer.restore(folder, args=ocp.args.Composite(**items))
        return {item: restored[item] for item in items}

    restored = process_group.run_on_all(read, CheckpointCorruptedError)
    found = {field: x for item in restored.values() for field, x in item.items()}
    _check(as_text(process_group.summed(read_parts(start_sums(found)))), manifest, found)
    wanted = {field: x for item in targets.values() for field, x in item.items()}
    fields: dict[str, PyTree] = jax.tree.map(_as_wanted, wanted, found)
    return fields


def _checkpointer() -> contextlib.AbstractContextManager[Any]:
    # Each process by itself: one that finds damage would not come to a barrier of Orbax'.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process_group.rank(), active_processes={process_group.rank()}
    )
    options = alone if process_group.count() > 1 else ocp.options.MultiprocessingOptions()
    return contextlib.closing(
        ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=options)
    )


def _as_wanted(target: jax.ShapeDtypeStruct, leaf: jax.Array) -> jax.Array:
    """A random key again where one was saved as its numbers."""
    if not jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
        return leaf
    implementation: list[Any] = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), target)
    return jax.random.wrap_key_data(leaf, impl=implementation[0])


def _read_host(folder: epath.Path, manifest: Manifest, field: str) -> PyTree:
    """A field that is an item of its own, whatever is in it, as NumPy arrays; checked."""
    with _named_faults(folder, manifest, [field], in_memory=True):
        tree = _saved_tree(folder / field)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found: dict[str, PyTree] = ocp.PyTreeCheckpointHandler().restore(
            folder / field, args=ocp.args.PyTreeRestore(item=tree, restore_args=as_numpy)
        )
    _check(sums(found), manifest, found)
    return found[field]


def _saved_tree(folder: epath.Path) -> PyTree:
    """The structure of an item as Orbax wrote it, without arrays."""
    return ocp.PyTreeCheckpointHandler().metadata(folder).tree


def _check(found: Mapping[str, str], manifest: Manifest, fields: Collection[str]) -> None:
    """Raises `CheckpointCorruptedError` for the first array whose check sum differs."""
    expected = {n: x for n, x in manifest.sums.items() if n.split("/")[0] in fields}
    for name in [*expected, *found]:
        if fault := _difference(name, found.get(name), expected.get(name)):
            raise CheckpointCorruptedError(fault)


def _difference(name: str, found: str | None, saved: str | None) -> str | None:
    """What is wrong with an array of which these are the check sums, if anything."""
    if found == saved:
        return None
    if found is None or saved is None:
        return f"{name} is {'missing' if found is None else 'not of this checkpoint'}"
    return f"{name} is not what was saved: its check sum is {found}, and was {saved}"


@contextlib.contextmanager
def _reachable(folder: epath.Path) -> Iterator[None]:
    """What keeps one from reading, whatever is stored there, is a `StorageError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_damage(error) or (reason := why_failed(error, folder)) is None:
            raise
        raise StorageError(f"{folder} cannot be read: {reason}") from error


@contextlib.contextmanager
def _named_faults(
    folder: epath.Path, manifest: Manifest, items: Iterable[str], *, in_memory: bool
) -> Iterator[None]:
    """Checks the files and array headers of items that are then read.

    Says what is wrong with a checkpoint that cannot be read, if it is the checkpoint.
    """
    silence_tensorstore_shutdown()
    try:
        with _reachable(folder):
            manifest.check_kinds(folder)
            manifest.check_files(folder)
            for item in items:
                check_headers(_saved_tree(folder / item), manifest, in_memory=in_memory)
            yield
    except UserError:
        raise
    except Exception as error:
        if not is_damage(error):
            raise
        fault = next((fault for _, fault in examine(folder, manifest) if fault), None)
        if fault is None:
            raise  # each array can be read and is as it was: what failed is not the checkpoint
        raise CheckpointCorruptedError(fault) from error


def examine(folder: epath.Path, manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Read a checkpoint array by array: each one's name and what is wrong with it, if anything.

    Needs the memory of one array, on the host. Raises `StorageError`.
    """
    silence_tensorstore_shutdown()
    seen = set()
    with _reachable(folder):
        try:
            manifest.check_kinds(folder)
        except CheckpointCorruptedError as error:
            yield "files", str(error)
            return  # nothing else here may be opened
        try:
            manifest.check_files(folder)
        except CheckpointCorruptedError as error:
            yield "files", str(error)
    for item, fields in ITEMS.items():
        if not any(holds(manifest, field) for field in fields):
            continue
        try:
            with _reachable(folder):
                tree = _saved_tree(folder / item)
        except Exception as error:
            if not is_damage(error):
                raise
            yield item, f"{item} cannot be read: {in_short(error)}"
            continue
        for path, header in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path)
            seen.add(name)
            fault = header_fault(name, header, manifest, in_memory=True)
            yield name, fault or _fault(folder / item, tree, path, manifest)
    for name in manifest.sums:
        if name not in seen:
            yield name, f"{name} is missing"


def _fault(folder: epath.Path, tree: PyTree, path: Any, manifest: Manifest) -> str | None:
    """What is wrong with one array, if anything."""
    one = jax.tree_util.tree_map_with_path(lambda p, leaf: leaf if p == path else ..., tree)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    name = path_name(path)
    try:
        with _reachable(folder):
            found = ocp.PyTreeCheckpointHandler().restore(
                folder, args=ocp.args.PyTreeRestore(item=one, restore_args=as_numpy)
            )
    except Exception as error:
        if not is_damage(error):
            raise
        return f"{name} cannot be read: {in_short(error)}"
    (value,) = sums([named_leaves(found)[name]]).values()
    return _difference(name, value, manifest.sums.get(name))
