"""Loading of states, models and parameters from checkpoints, and their export."""

import copy
import functools
import importlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Sharding

from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Variables
from spmdtrain.adapters.lora import FACTORS, merge_factors
from spmdtrain.checkpoints.checksums import format_sums, read_parts, start_sums, sums
from spmdtrain.checkpoints.export_folder import (
    CARD,
    CardFacts,
    Save,
    check_new_folder,
    model_card,
    write_folder,
)
from spmdtrain.checkpoints.listing import LATEST, Source, find, load_latest_valid
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest, raw_keys
from spmdtrain.checkpoints.read_arrays import (
    check_saved_items,
    holds,
    read_host_array,
    read_host_arrays,
    restore_key,
)
from spmdtrain.checkpoints.run_identity import LoraRecord
from spmdtrain.checkpoints.weights.assignment import assign_weights, read_whole
from spmdtrain.checkpoints.weights.source import (
    SAFETENSORS_DTYPES,
    ArrayHeader,
    WeightSource,
    is_weights_file,
    open_weights,
)
from spmdtrain.checkpoints.weights.weight_map import (
    Box,
    WeightMap,
    checked_weight_map,
    plain_name,
    slices,
    unmapped,
)
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError, foreign, option
from spmdtrain.record import no_follow
from spmdtrain.record.storage import (
    failures,
    folder_of,
    in_short,
    is_url,
    storage_errors,
    storage_reason,
)
from spmdtrain.record.validation import read_bytes, write_npz
from spmdtrain.step.state import TREES, TrainState, average_of, evaluated_field
from spmdtrain.tree import as_numpy, named_leaves, path_name

# -- One order in which everything is loaded from a checkpoint -------------------------------------

PyTree = Any
T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """The content to read from one checkpoint.

    Attributes:
      fields: Fields of the state by name, as shapes with shardings, to which the arrays are placed;
        None reads a field of any structure as NumPy arrays.
      take: (the parameters and the model state, by their names in the model) -> fields that are
        made of them. It is for a model that need not have the same arrays, instead of `fields`.
    """

    fields: Mapping[str, PyTree] = field(default_factory=dict)
    take: Callable[[WeightSource], Mapping[str, PyTree]] | None = None


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights that the checkpoint of a run with low-rank factors leaves out.

    Attributes:
      sums: Their checksums by path in the state.
      lora: The record of the checkpoint, with the place where the weights were found.
    """

    values: Any
    sums: Mapping[str, str]
    lora: LoraRecord


Want = Callable[[epath.Path, Manifest], Wanted]
"""(folder of a checkpoint, its manifest) -> what is read from it. Raises `UserError` if the
checkpoint is of another run or model than the caller's."""
ReadBase = Callable[[epath.Path, Manifest], BaseWeights]
"""(folder of a checkpoint, its manifest) -> the weights that the checkpoint leaves out."""


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint that was loaded.

    Attributes:
      corrupted: The steps of newer checkpoints, which are corrupted.
      base: Weights that the checkpoint leaves out; None if it leaves none out.
    """

    source: Source
    fields: Mapping[str, PyTree]
    manifest: Manifest
    corrupted: Sequence[int]
    base: BaseWeights | None

    @property
    def folder(self) -> epath.Path:
        """The folder of the checkpoint."""
        return self.source.path(self.manifest.step)

    @property
    def state(self) -> TrainState:
        """The whole state."""
        empty: dict[str, PyTree] = {name: {} for name in TREES}  # of items without arrays
        return TrainState(**{**empty, **self.fields})

    @property
    def variables(self) -> Variables:
        """The parameters, averaged ones if these were wanted, and the model state."""
        name = evaluated_field(lambda name: name in self.fields)
        return Variables(self.fields[name], self.fields.get("model_state", {}))


def load(
    source: Source,
    want: Want,
    log: Callable[[str], None],
    *,
    read_base: ReadBase | None = None,
    by_all: bool = False,
) -> Loaded:
    """Loads from the newest valid checkpoint of a source.

    A resume, a fork, `init_from`, evaluations, predictions and `load_params` load in this order:

    1. The manifest is read and checked.
    2. `want` refuses a checkpoint of another run or model, before any array is read, and chooses
       what is read, such as averaged or trained parameters.
    3. Headers and files are checked, the arrays are read and placed, and their checksums verified.
       If 1 or 3 shows that the checkpoint is corrupted, the one before is tried.
    4. Weights of a base model that the checkpoint leaves out are read from their own place, and
       their checksums verified.

    Args:
      log: Receives a line for each corrupted checkpoint that is skipped.
      read_base: Reads these weights; None if they are not wanted.
      by_all: Whether all processes of the job load together.

    Raises:
      CheckpointCorruptedError: If no checkpoint is valid.
      UserError: If `want` refuses the checkpoint, there is none any more, or base weights are
        missing or have changed.
      StorageError: If a checkpoint cannot be read.
    """

    def read(folder: epath.Path, manifest: Manifest) -> Mapping[str, PyTree]:
        wanted = want(folder, manifest)
        if wanted.take is not None:
            expected = CheckpointCorruptedError
            return wanted.take(_call(RunWeights, folder, manifest, raises=expected, by_all=by_all))
        if all(target is None for target in wanted.fields.values()):
            return {name: read_host_arrays(folder, manifest, name) for name in wanted.fields}
        return source.read_arrays(manifest, wanted.fields)

    fields, manifest, corrupted = load_latest_valid(source, read, log, by_all=by_all)
    folder, lora = source.path(manifest.step), manifest.identity.lora
    base = None
    if lora.source and read_base is not None:
        try:
            base = read_base(folder, manifest)
        except UserError as error:
            raise UserError(
                f"{folder} holds LoRA factors alone, and its base weights cannot be read from "
                f"{foreign(lora.source)}: {error}. Put them back; a run finds them elsewhere by "
                f"{option('init_from')}"
            ) from error
        _check_unchanged(base.sums, lora, folder)
    return Loaded(source, fields, manifest, corrupted, base)


def _call(
    function: Callable[..., T], *args: Any, raises: type[Exception] = UserError, by_all: bool
) -> T:
    """Calls a function; `by_all`, an error that it raises in one process is raised in all."""
    if not by_all:
        return function(*args)
    return process_group.run_on_all(lambda: function(*args), raises)


def open_source(
    path: str, which: str | int = LATEST, *, by_all: bool = False
) -> Source | WeightSource:
    """Returns the checkpoints that a path names, or the arrays of a file of another program.

    Args:
      path: A workdir, one of its `checkpoints/STEP`, or a file or folder of weights.
      which: The checkpoint of a workdir: "latest", "best" or a step.
      by_all: Whether all processes of the job call it together.

    Raises:
      UserError: If there is no such file or checkpoint.
      StorageError: If it cannot be read.
    """
    is_file = _call(is_weights_file, path, by_all=by_all)
    if not (process_group.broadcast(is_file) if by_all else is_file):
        return _call(find, path, which, by_all=by_all)
    if which != LATEST:
        raise UserError(f"{path} is a file of weights: leave checkpoint={which} out")
    return _call(open_weights, path, by_all=by_all)


# -- what is wanted ----------------------------------------------------------------------------


def whole_state(abstract: TrainState, shardings: TrainState) -> Wanted:
    """Wants the whole state, on the current devices, whatever devices saved it."""
    return Wanted(vars(jax.tree.map(with_sharding, abstract, shardings)))


def with_sharding(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array with its sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def values_of_model(manifest: Manifest, abstract: TrainState, shardings: TrainState) -> Wanted:
    """Wants the parameters and the model state of a run of the same model.

    The parameters are the averaged ones if that run kept an average. `abstract` and `shardings` are
    of this run.
    """
    name = evaluated_field(functools.partial(holds, manifest))
    like = average_of(abstract.params) if TrainState.FIELDS[name].evaluated else abstract.params
    # A run without an average has no shardings for one: that of the parameters applies.
    places = getattr(shardings, name) or shardings.params
    params = jax.tree.map(with_sharding, like, places)
    state = jax.tree.map(with_sharding, abstract.model_state, shardings.model_state)
    return Wanted({name: params} | ({"model_state": state} if jax.tree.leaves(state) else {}))


def host_values(folder: epath.Path, manifest: Manifest, averaged: bool | None) -> Wanted:
    """Wants the parameters and the model state of any run as NumPy arrays.

    `averaged` is as for `load_params`. Raises `UserError` if the run has no average.
    """
    name = "params"
    if averaged or averaged is None:
        name = evaluated_field(functools.partial(holds, manifest))
    if averaged and not TrainState.FIELDS[name].evaluated:
        raise UserError(
            f"{folder} holds no averaged parameters: its run had neither ema_decay nor a "
            "schedule-free optimizer"
        )
    fields = [name, "model_state"] if holds(manifest, "model_state") else [name]
    return Wanted(dict.fromkeys(fields))


# -- Values of a model, for use outside a run ------------------------------------------------------


def warn(text: str) -> None:
    """Warns of a corrupted checkpoint: the default of `log`, outside a run."""
    warnings.warn(text, stacklevel=5)


def read_variables(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    sharding: Any = None,
    averaged: bool | None = None,
    log: Callable[[str], None] = warn,
) -> tuple[Variables, Manifest]:
    """Returns the variables and the manifest of a checkpoint.

    Arguments and errors are as for `load_params`. Low-rank factors are merged: the variables are
    those of the base model. `log` receives a line for each corrupted checkpoint that is skipped; by
    default it warns.
    """
    want = functools.partial(host_values, averaged=averaged)
    loaded = load(find(path, which), want, log, read_base=_read_base)
    variables, manifest = loaded.variables, loaded.manifest
    if loaded.base is not None:
        variables = Variables(
            *(_filled(tree, loaded.base.values, name) for name, tree in variables._asdict().items())
        )
    if alpha := manifest.identity.lora.alpha:
        variables = variables._replace(params=merge_factors(variables.params, alpha, np.einsum))
    if sharding is not None:
        variables = variables._replace(params=jax.device_put(variables.params, sharding))
    return variables, manifest


def load_variables(
    path: str | os.PathLike[str], *, which: str | int = LATEST, averaged: bool | None = None
) -> Variables:
    """Returns the parameters and the model state (batch statistics) of a run.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" or a step.
      averaged: As for `load_params`.

    Returns:
      `Variables(params, model_state)`, NumPy arrays; `model_state` is `{}` if the model has none.

    Raises:
      UserError: If there is no such checkpoint, or none that is valid.
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
    """Returns the parameters of a run for inference, without its code, optimizer or devices.

    `load_variables` returns batch statistics too, and `load_model` a whole model.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" (by the run's
        `best_metric`) or a step.
      sharding: Sharding of all parameters, or a tree of shardings; by default NumPy arrays are
        returned.
      averaged: True for averaged parameters, False for the trained ones; by default averaged ones
        if the run kept an average. Averages of parameters narrower than float32 are float32.

    Returns:
      Nested dictionaries (lists if the model has sequences) of arrays in their saved dtypes: NumPy
      arrays, or JAX arrays if `sharding` is given.

    Raises:
      UserError: If there is no such checkpoint, none that is valid, or no average.
      StorageError: If it cannot be read.
    """
    return read_variables(path, which=which, sharding=sharding, averaged=averaged)[0].params


def read_manifest(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    log: Callable[[str], None] = warn,
) -> Manifest:
    """Returns the manifest of a checkpoint: arrays, sizes, metrics and its run.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest one with a manifest), "best" or a
        step.
      log: Receives a line for each corrupted checkpoint that is skipped; by default warns.

    Raises:
      UserError: If there is no such checkpoint, or none with a manifest.
      StorageError: If it cannot be read.
    """
    return load(find(path, which), lambda *_: Wanted(), log).manifest


# -- Models with the values of a checkpoint, for use outside a run ---------------------------------


def load_model(
    model: Any,
    path: str | os.PathLike[str],
    *,
    which: str | int = "latest",
    averaged: bool | None = None,
) -> Any:
    """Returns a model with the parameters and batch statistics of a checkpoint.

    Args:
      model: What a `Trainer` takes: an nnx module or a function of `rngs` that makes one, a
        `LinenModel`, an `EquinoxModel`, a `KerasModel` or a `FunctionModel`. It is not changed.
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" or a step.
      averaged: Whether to load averaged parameters; by default, if the run kept an average.

    Returns:
      The model in evaluation mode, an nnx module for an nnx module, as `Trainer.model`.

    Raises:
      UserError: If the checkpoint is of another model, or there is none that is valid.
      StorageError: If it cannot be read.
    """
    adapter = as_adapter(model)
    expected = jax.eval_shape(adapter.init, adapter.given, jax.random.key(0))
    saved, _ = read_variables(path, which=which, averaged=averaged)
    return adapter.merge(
        Variables(
            _match(expected.params, saved.params, f"{os.fspath(path)}: parameter"),
            _match(expected.model_state, saved.model_state, f"{os.fspath(path)}: model state"),
        )
    )


def _match(expected: PyTree, saved: PyTree, label: str) -> PyTree:
    """Returns the saved arrays in the structure of the expected ones, matched by path."""
    arrays, leaves = named_leaves(saved), named_leaves(raw_keys(expected))
    for name in sorted(arrays.keys() | leaves.keys()):
        saved_shape, own_shape = _shape(arrays.get(name)), _shape(leaves.get(name))
        if saved_shape != own_shape:
            raise UserError(
                f"{label} {name}: {saved_shape} in the checkpoint, {own_shape} in the model. Build "
                "the model that was trained"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: restore_key(leaf, jnp.asarray(arrays[path_name(path)])), expected
    )


def _shape(leaf: Any) -> str:
    return "absent" if leaf is None else f"shape {tuple(leaf.shape)}"


# -- Export of parameters to files of other programs: `.npz` and `.safetensors` --------------------

_SUFFIXES = (".npz", ".safetensors")


def export_params(
    path: str,
    to: str,
    *,
    which: str | int = "latest",
    averaged: bool | None = None,
    weight_map: WeightMap = (),
    log: Callable[[str], None] = warn,
) -> dict[str, np.ndarray]:
    """Writes the parameters and the model state of a checkpoint to one file.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      to: The file: NAME.npz or NAME.safetensors. A `.npz` has float32 for dtypes that NumPy lacks,
        such as bfloat16. A `.safetensors` keeps bfloat16; a dtype that its format lacks, such as
        int4, is an error.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" or a step.
      averaged: Whether to export averaged parameters; by default, if the run kept an average.
      weight_map: Rules that give the arrays the names and shapes of another program's file, the
        same as for `init_from`.
      log: Receives a line for each corrupted checkpoint that is skipped; by default warns.

    Returns:
      The arrays by their names in the file: by default paths in the model with dots,
      `layers.0.kernel`.

    Raises:
      UserError: If there is no such checkpoint, or none that is valid, `to` has another suffix, or
        the map does not fit the model.
      StorageError: If the checkpoint cannot be read, or the file cannot be written.
    """
    weight_map, target = checked_weight_map(weight_map), folder_of(to)
    if target.suffix not in _SUFFIXES:
        how = ""
        if target.suffix == ".eqx":  # the order of its leaves is that of the module
            model = "eqx.nn.inference_mode(load_model(model, run), False)"
            how = f": write one by eqx.tree_serialise_leaves(file, {model})"
        raise UserError(f"{to}: export writes {' and '.join(_SUFFIXES)} files{how}")
    save = _save_npz if target.suffix == ".npz" else _safetensors()
    variables, manifest = read_variables(path, which=which, averaged=averaged, log=log)
    arrays = _arrays_of_file(path, variables, weight_map)
    metadata = _metadata(manifest, weight_map)
    try:
        if not is_url(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        no_follow.write(target.parent, target.name, lambda file: save(file, arrays, metadata))
    except failures(target) as error:
        raise StorageError(
            f"{to} cannot be written: {storage_reason(error) or in_short(error)}"
        ) from error
    return arrays


def _arrays_of_file(
    path: str, variables: Variables, weight_map: WeightMap
) -> dict[str, np.ndarray]:
    """Returns the arrays of a model by their names in a file."""
    arrays: dict[str, np.ndarray] = {}
    for tree in variables:
        for name, leaf in named_leaves(tree).items():
            name = name if weight_map else plain_name(name)
            if name in arrays:
                raise UserError(f"{path}: two arrays of the model have the name {name}")
            arrays[name] = np.asarray(leaf)
    return unmapped(weight_map, arrays) if weight_map else arrays


def _metadata(manifest: Manifest, weight_map: WeightMap) -> dict[str, str]:
    """Returns the metadata of a file of arrays."""
    metadata = {"step": str(manifest.step), "saved_at": manifest.saved_at}
    # transformers requires the format; the arrays are the same.
    return {**metadata, "format": "pt"} if weight_map else metadata


def _save_npz(file: Any, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    write_npz(file, {name: as_numpy(x) for name, x in arrays.items()})


def _safetensors() -> Any:
    try:
        library = importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UserError(
            "export to .safetensors requires a library: pip install 'spmdtrain[safetensors]'"
        ) from error

    def save(file: Any, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        for name, x in arrays.items():
            if x.dtype.name not in SAFETENSORS_DTYPES:
                raise UserError(
                    f"{name} is {x.dtype.name}, which .safetensors files lack: export a .npz file"
                )
        contiguous = {name: np.asarray(x, order="C") for name, x in arrays.items()}
        file.write(library.save(contiguous, metadata))

    return save


# -- Export to the layout of Hugging Face ----------------------------------------------------------

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja"),
)
_LARGEST_TOKENIZER = 2**28  # bytes

_USE_TRANSFORMERS = """```python
import transformers

model = transformers.{architecture}.from_pretrained("PATH OF THIS FOLDER")
```"""


def export_huggingface(
    path: str,
    to: str,
    *,
    files: Mapping[str, Any],
    weight_map: WeightMap,
    which: str | int = "latest",
    averaged: bool | None = None,
    tokenizer: str | None = None,
    license: str | None = None,
    log: Callable[[str], None] = warn,
) -> list[str]:
    """Writes a checkpoint as a folder that Hugging Face's `transformers` loads.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      to: The folder to write, which must be new or empty, or a `gs://` URL.
      files: JSON objects by the name of their file, "config.json" among them.
      weight_map: Rules that give the arrays the names and shapes of the published model.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" or a step.
      averaged: Whether to export averaged parameters; by default, if the run kept an average.
      tokenizer: A folder with the files of a tokenizer, or a tokenizer.json; None for none.
      license: The license that the model card names.
      log: Receives a line for each corrupted checkpoint that is skipped; by default warns.

    Returns:
      The names of the files.

    Raises:
      UserError: If there is no such checkpoint, or none that is valid, the folder has content, or
        the map or a file does not fit.
      StorageError: If the checkpoint cannot be read, or a file cannot be written.
    """
    weight_map = checked_weight_map(weight_map)
    if not weight_map or "config.json" not in files:
        raise UserError(
            "the experiment has no layout of Hugging Face: give Experiment(weight_map=..., "
            "huggingface={'config.json': {...}})"
        )
    check_new_folder(to)
    save, found = _safetensors(), _tokenizer_files(tokenizer)
    variables, manifest = read_variables(path, which=which, averaged=averaged, log=log)
    facts = CardFacts(
        step=manifest.step,
        parameters=sum(np.asarray(x).size for x in jax.tree.leaves(variables.params)),
        identity=manifest.identity,
        metrics=manifest.metrics or {},
        saved_at=manifest.saved_at,
        license=license,
    )
    arrays = _arrays_of_file(path, variables, weight_map)
    metadata = _metadata(manifest, weight_map)
    kinds = files["config.json"].get("architectures") or ["AutoModel"]
    use = _USE_TRANSFORMERS.format(architecture=kinds[0])
    written: dict[str, bytes | Save] = {
        "model.safetensors": lambda file: save(file, arrays, metadata),
        **{name: (json.dumps(x, indent=2) + "\n").encode() for name, x in files.items()},
        **found,
        CARD: model_card(facts, library="transformers", use=use).encode(),
    }
    write_folder(to, written)
    return list(written)


def _tokenizer_files(path: str | None) -> dict[str, bytes]:
    """Returns the content of the files of a tokenizer by name; raises `UserError` without any."""
    if path is None:
        return {}
    place = folder_of(path)
    with storage_errors(place):
        if place.is_file():
            if place.suffix != ".json":
                raise UserError(f"{path}: the tokenizer must be a tokenizer.json, or its folder")
            kind = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
            content = read_bytes(place, _LARGEST_TOKENIZER)
            return {"tokenizer.json": content, "tokenizer_config.json": kind.encode()}
        names = [name for name in _TOKENIZER_FILES if (place / name).is_file()]
        if not names:
            raise UserError(
                f"{path} has no file of a tokenizer, such as {', '.join(_TOKENIZER_FILES[:2])}"
            )
        return {name: read_bytes(place / name, _LARGEST_TOKENIZER) for name in names}


def has_tokenizer(path: str) -> bool:
    """Returns whether a path is a local folder with the files of a tokenizer."""
    return not is_url(path) and any((folder_of(path) / name).is_file() for name in _TOKENIZER_FILES)


# -- The base weights of a run that trains low-rank factors ----------------------------------------


def _filled(tree: PyTree, values: Mapping[str, np.ndarray], field: str) -> PyTree:
    """Returns a copy of a tree of dictionaries and lists, with a field's arrays added by path."""
    tree = copy.deepcopy(tree)
    for name, value in values.items():
        first, *parts, last = name.split("/")
        if first != field:
            continue
        place: Any = tree
        for part in parts:
            if isinstance(place, list):
                place = place[int(part)]
            else:
                place[part] = place.get(part) or {}
                place = place[part]
        place[int(last) if isinstance(place, list) else last] = value
    return tree


def _read_base(folder: epath.Path, manifest: Manifest) -> BaseWeights:
    """Reads the base weights that a checkpoint leaves out, as NumPy arrays by path in the state."""
    lora = manifest.identity.lora
    described = {**lora.leaves, **manifest.identity.leaves}
    targets = {
        name.partition("/")[2]: _target(text)
        for name, text in described.items()
        if name.split("/")[0] in Variables._fields
        and not name.startswith(f"params/{FACTORS}/")
        and not text.startswith("key<")
    }

    def take(source: WeightSource) -> dict[str, np.ndarray]:
        found = assign_weights(source.path, source.headers, targets, lora.weight_map)
        arrays = {}
        for name in lora.leaves:
            own = name.partition("/")[2]
            if own not in found.pieces:
                raise UserError(f"{lora.source} has no array for {own}")
            arrays[name] = read_whole(source, found, own, targets[own])
        return arrays

    source = open_source(lora.source)
    if isinstance(source, Source):
        arrays = load(source, lambda *_: Wanted(take=take), warn).fields
    else:
        arrays = take(source)
    return BaseWeights(arrays, sums(arrays), lora)


def base_sums(base: Variables) -> dict[str, str]:
    """Returns the checksums of base weights on devices, by path in the state.

    All processes of a job call it. `base` has None in place of variables that are not base weights.
    """
    started = start_sums(base._asdict())
    return format_sums(process_group.summed(read_parts(started)))


def _check_unchanged(actual: Mapping[str, str], lora: LoraRecord, folder: epath.Path) -> None:
    """Checks that base weights are those that the factors of a checkpoint were trained for.

    `actual` has the weights' checksums by path in the state. Raises `UserError` if one differs from
    the record.
    """
    for name, expected in lora.sums.items():
        if actual.get(name) != expected:
            raise UserError(
                f"{folder} holds LoRA factors for other base weights: {foreign(name, 200)} has the "
                f"checksum {actual.get(name, 'of no array')}, and had {expected} when they were "
                f"read from {foreign(lora.source)}. Give "
                f"{option('init_from')} with the weights of that time"
            )


def _target(text: str) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array described as `float32[784,128]`."""
    dtype, _, dims = text.rstrip("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(int(n) for n in dims.split(",") if n), jnp.dtype(dtype))


# -- The arrays of a run's checkpoint as weights for another model ---------------------------------


class RunWeights:
    """The parameters and the model state of a checkpoint, by their paths in the model.

    The parameters are the averaged ones if the run kept an average. An array is read as a whole,
    its checksum is verified, and the last one is kept in memory. Raises `CheckpointCorruptedError`
    or `StorageError`.
    """

    def __init__(self, folder: epath.Path, manifest: Manifest) -> None:
        self.path = str(folder)
        self._folder, self._manifest = folder, manifest
        fields = [evaluated_field(functools.partial(holds, manifest))]
        fields += ["model_state"] if holds(manifest, "model_state") else []
        check_saved_items(folder, manifest, fields)
        headers: dict[str, ArrayHeader] = {}
        self._where: dict[str, tuple[str, str]] = {}
        for saved_name, text in manifest.identity.leaves.items():
            field, _, name = saved_name.partition("/")
            if field in fields and not text.startswith("key<"):
                dtype, _, dims = text.rstrip("]").partition("[")
                shape = tuple(int(dim) for dim in dims.split(",") if dim)
                headers[name] = ArrayHeader(shape, np.dtype(jnp.dtype(dtype)))
                self._where[name] = field, saved_name
        self.headers: Mapping[str, ArrayHeader] = headers
        self._read_whole = functools.lru_cache(maxsize=1)(self._read_array)

    def read(self, name: str, box: Box) -> np.ndarray:
        part: np.ndarray = self._read_whole(name)[slices(box)]
        return part

    def _read_array(self, name: str) -> np.ndarray:
        field, saved_name = self._where[name]
        return read_host_array(self._folder, self._manifest, field, saved_name)
