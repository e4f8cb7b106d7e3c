"""Loading checkpoints: which one is good, what is in it, and parameters for inference."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding

from spmdtrain.adapters import Variables
from spmdtrain.checkpoint import ITEMS, items_of, raw_keys
from spmdtrain.errors import StorageError, UserError
from spmdtrain.identity import check_same_model, describe_leaves
from spmdtrain.manifest import NAME, Damaged, Manifest
from spmdtrain.sharding import named_leaves, path_name
from spmdtrain.step import TrainState
from spmdtrain.storage import absolute, folder_of, hush_late_answers, in_short, out_of_reach
from spmdtrain.sums import sums

PyTree = Any
T = TypeVar("T")


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


def saved_in(workdir: str) -> Source:
    """The checkpoints of a workdir, perhaps none."""
    folder = absolute(folder_of(workdir) / "checkpoints")
    return Source(folder, sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else [])


def find(path: str) -> Source:
    """What a path means: all checkpoints of a workdir, or the one that is `checkpoints/STEP`."""
    given = absolute(folder_of(path))
    if given.name.isdecimal() and any((given / name).exists() for name in (NAME, "model")):
        return Source(given.parent, [int(given.name)], whole_workdir=False)
    source = saved_in(path)
    if not source.steps:
        raise UserError(f"{path}: holds no checkpoint (neither a workdir nor a checkpoints/STEP)")
    return source


def newest_good(
    source: Source, load: Callable[[epath.Path, Manifest], T], tell: Callable[[str], None]
) -> Found[T]:
    """What `load` makes of the newest checkpoint that is good.

    A damaged one is told of and passed over. A refusal by `load` is none of that and is raised.
    Raises `Damaged` where none is good.
    """
    damaged: dict[int, Damaged] = {}
    for step in reversed(source.steps):
        folder = source.path(step)
        try:
            manifest = Manifest.read(folder)
            return Found(load(folder, manifest), manifest, list(damaged))
        except Damaged as error:
            damaged[step] = error
            if len(source.steps) > 1:
                tell(f"checkpoint {folder} is damaged: {error}; trying the one before")
    newest = max(damaged)
    if len(source.steps) == 1:
        raise Damaged(f"checkpoint {source.path(newest)} is damaged: {damaged[newest]}")
    raise Damaged(
        f"none of the {len(damaged)} checkpoints in {source.folder} is good; of the newest, "
        f"{newest}: {damaged[newest]}"
    )


# -- the whole state ---------------------------------------------------------------------------


def load_state(
    folder: epath.Path, manifest: Manifest, abstract: TrainState, shardings: TrainState
) -> TrainState:
    """The state, each leaf placed as `shardings` says, on whatever devices there are now.

    It is as `abstract` says (see `identity.check_same_run`). Raises `Damaged`.
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
    averaged = has_average(manifest)
    params = jax.tree.map(_placed, abstract.params, shardings.params)
    state = jax.tree.map(_placed, abstract.model_state, shardings.model_state)
    targets: dict[str, dict[str, PyTree]] = {"model": {"params": params, "model_state": state}}
    if averaged:
        targets["averaged"] = {"averaged": params}
    fields = _read(folder, manifest, targets)
    return Variables(fields["averaged" if averaged else "params"], fields["model_state"])


def has_average(manifest: Manifest) -> bool:
    """Whether the run kept an average of its parameters."""
    return any(name.split("/")[0] == "averaged" for name in manifest.sums)


def warn(text: str) -> None:
    """Tell of a damaged checkpoint where there is no terminal."""
    warnings.warn(text, stacklevel=4)


def load_variables(
    path: str,
    *,
    sharding: Any = None,
    averaged: bool | None = None,
    tell: Callable[[str], None] = warn,
) -> tuple[Variables, Manifest]:
    """Parameters and model state (batch statistics) of a checkpoint, see `load_params`.

    `tell` hears of damaged checkpoints that are passed over.
    """

    def load(folder: epath.Path, manifest: Manifest) -> Variables:
        average = has_average(manifest) if averaged is None else averaged
        if average and not has_average(manifest):
            raise UserError(f"{folder} holds no averaged parameters: its run had no ema_decay")
        items = ["model", "averaged"] if average else ["model"]
        fields: dict[str, PyTree] = {}
        for item in items:
            fields |= _read_host(folder, manifest, item)
        params = fields["averaged" if average else "params"]
        if sharding is not None:
            params = jax.device_put(params, sharding)
        return Variables(params, fields.get("model_state", {}))

    found = newest_good(find(path), load, tell)
    return found.value, found.manifest


def load_params(path: str, *, sharding: Any = None, averaged: bool | None = None) -> PyTree:
    """The parameters of a run for inference, without its code, optimizer or devices.

    `path` is a workdir, whose newest good checkpoint is taken, or one `checkpoints/STEP`. Nested
    dictionaries (lists where the model has sequences) of NumPy arrays in the dtypes they were
    saved in; with `sharding`, one for all or a tree of them, JAX arrays placed so. Where the run
    kept an average of its parameters, that is what is loaded: `averaged=False` takes the trained
    ones themselves, `averaged=True` insists. Raises `UserError`.
    """
    return load_variables(path, sharding=sharding, averaged=averaged)[0].params


def read_manifest(path: str, *, tell: Callable[[str], None] = warn) -> Manifest:
    """What is known of a checkpoint without loading it: arrays, sizes, metrics, its run.

    `path` is as for `load_params`; of a workdir it is the newest checkpoint with a manifest.
    """
    return newest_good(find(path), lambda _, manifest: manifest, tell).value


# -- reading and checking ----------------------------------------------------------------------


def _read(
    folder: epath.Path, manifest: Manifest, targets: Mapping[str, Mapping[str, PyTree]]
) -> dict[str, PyTree]:
    """Arrays placed as `targets` say, by item and field; by field. All of them are checked."""
    manifest.check_files(folder)
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    items = {item: ocp.args.StandardRestore(raw_keys(dict(x))) for item, x in targets.items()}
    with _named_faults(folder, manifest):
        restored = checkpointer.restore(folder, args=ocp.args.Composite(**items))
    found = {field: x for item in restored.values() for field, x in item.items()}
    _check(found, manifest)
    wanted = {field: x for item in targets.values() for field, x in item.items()}
    fields: dict[str, PyTree] = jax.tree.map(_as_wanted, wanted, found)
    return fields


def _as_wanted(target: jax.ShapeDtypeStruct, leaf: jax.Array) -> jax.Array:
    """A random key again where one was saved as its numbers."""
    if not jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
        return leaf
    implementation: list[Any] = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), target)
    return jax.random.wrap_key_data(leaf, impl=implementation[0])


def _read_host(folder: epath.Path, manifest: Manifest, item: str) -> dict[str, PyTree]:
    """One item, whatever is in it, as NumPy arrays; checked."""
    manifest.check_files(folder)
    with _named_faults(folder, manifest):
        tree = _saved_tree(folder / item)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        fields: dict[str, PyTree] = ocp.PyTreeCheckpointHandler().restore(
            folder / item, args=ocp.args.PyTreeRestore(item=tree, restore_args=as_numpy)
        )
    _check(fields, manifest)
    return fields


def _saved_tree(folder: epath.Path) -> PyTree:
    """The structure of an item as Orbax wrote it, without arrays."""
    return ocp.PyTreeCheckpointHandler().metadata(folder).tree


def _check(fields: Mapping[str, PyTree], manifest: Manifest) -> None:
    """Raise `Damaged` naming the first array that is not what was saved."""
    found = sums(dict(fields))
    expected = {n: x for n, x in manifest.sums.items() if n.split("/")[0] in fields}
    for name in [*expected, *found]:
        if fault := _difference(name, found.get(name), expected.get(name)):
            raise Damaged(fault)


def _difference(name: str, found: str | None, saved: str | None) -> str | None:
    """What is wrong with an array of which these are the check sums, if anything."""
    if found == saved:
        return None
    if found is None or saved is None:
        return f"{name} is {'missing' if found is None else 'not of this checkpoint'}"
    return f"{name} is not what was saved: its check sum is {found}, and was {saved}"


@contextlib.contextmanager
def _named_faults(folder: epath.Path, manifest: Manifest) -> Iterator[None]:
    """Says why a checkpoint cannot be read: out of reach, damaged, or no fault of its own."""
    hush_late_answers()
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as error:
        if reason := out_of_reach(error):
            raise StorageError(f"{folder} cannot be read: {reason}") from error
        faults = (fault for _, fault in examine(folder, manifest) if fault)
        raise Damaged(next(faults, f"it cannot be read: {in_short(error)}")) from error


def examine(folder: epath.Path, manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Read a checkpoint array by array: each one's name and what is wrong with it, if anything.

    Needs the memory of one array, on the host. Raises `StorageError`.
    """
    hush_late_answers()
    seen = set()
    try:
        manifest.check_files(folder)
    except Damaged as error:
        yield "files", str(error)
    for item in ITEMS:
        if not any(name.split("/")[0] in ITEMS[item] for name in manifest.sums):
            continue
        try:
            tree = _saved_tree(folder / item)
        except Exception as error:
            if reason := out_of_reach(error):
                raise StorageError(f"{folder} cannot be read: {reason}") from error
            yield item, f"{item} cannot be read: {in_short(error)}"
            continue
        for path, _ in jax.tree_util.tree_leaves_with_path(tree):
            seen.add(path_name(path))
            yield path_name(path), _fault(folder / item, tree, path, manifest)
    for name in manifest.sums:
        if name not in seen:
            yield name, f"{name} is missing"


def _fault(folder: epath.Path, tree: PyTree, path: Any, manifest: Manifest) -> str | None:
    """What is wrong with one array, if anything."""
    one = jax.tree_util.tree_map_with_path(lambda p, leaf: leaf if p == path else ..., tree)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    name = path_name(path)
    try:
        found = ocp.PyTreeCheckpointHandler().restore(
            folder, args=ocp.args.PyTreeRestore(item=one, restore_args=as_numpy)
        )
    except Exception as error:
        if reason := out_of_reach(error):
            raise StorageError(f"{folder} cannot be read: {reason}") from error
        return f"{name} cannot be read: {in_short(error)}"
    (value,) = sums([named_leaves(found)[name]]).values()
    return _difference(name, value, manifest.sums.get(name))
