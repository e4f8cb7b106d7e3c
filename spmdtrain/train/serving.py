"""Export of a predict function for serving: StableHLO, SavedModel and ONNX."""

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.export_folder import (
    CARD,
    CardFacts,
    Save,
    check_new_folder,
    model_card,
    write_folder,
)
from spmdtrain.checkpoints.manifest import Manifest, raw_keys
from spmdtrain.checkpoints.read_arrays import restore_key
from spmdtrain.config.options import MeshSpec
from spmdtrain.config.run_config import Purpose, RunConfig, derive_seed
from spmdtrain.data.streams import ShardedStream, as_stream
from spmdtrain.data.training_data import run_dataset
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, foreign, import_extra, option, version_of
from spmdtrain.record.storage import folder_of, one_line, storage_errors
from spmdtrain.record.validation import Malformed, OtherFields, build, parse_object, write_npz
from spmdtrain.sharding.placement import make_placement, mirrored_config, use_placement
from spmdtrain.step.functions import RunFunctions
from spmdtrain.train.trainer import Trainer
from spmdtrain.tree import named_leaves

PyTree = Any
Platform = Literal["cpu", "cuda", "rocm", "tpu"]
Weights = Literal["inside", "beside"]
ProgramFormat = Literal["stablehlo", "saved_model", "onnx"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda", "tpu")

# -- The predict function of a trainer, as a function of dictionaries of arrays --------------------

_BATCH = "batch"
_TRIED = 64  # rows of a trial: halves and quarters of a batch have a size
_LARGEST_PROGRAM = 2**31 - 2**20  # bytes; serialized programs have 32-bit offsets


@dataclass(frozen=True)
class PredictProgram:
    """A predict function without its trainer.

    Attributes:
      run: (weights, inputs) -> outputs, dictionaries, lists and tuples of arrays.
      weights: The weights that the outputs depend on, by path in the model.
      inputs: The inputs that the outputs depend on, by path in the batch; shapes and dtypes.
      batch_size: The leading dim of the inputs; None if it is free.
    """

    run: Callable[[Mapping[str, Any], Mapping[str, Any]], PyTree]
    weights: Mapping[str, np.ndarray]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    batch_size: int | None

    def of_inputs(self, inputs: Mapping[str, Any]) -> PyTree:
        """Returns the outputs, with the weights as constants of the program."""
        return self.run({name: jnp.asarray(x) for name, x in self.weights.items()}, inputs)


def config_for_export(config: RunConfig) -> RunConfig:
    """Returns a configuration with one CPU device: its programs run on every platform."""
    # Models and kernels choose by the device what only that platform has, such as cuDNN.
    return mirrored_config(config, MeshSpec(devices=("cpu:0",)))


def program_of(
    functions: RunFunctions, variables: Variables, rows: PyTree, batch_size: int | None
) -> PredictProgram:
    """Returns the predict function of a model with its values.

    Args:
      functions: The functions of a run on one CPU device.
      variables: The values of the model, on the host.
      rows: Arrays with the shapes and dtypes of a batch, except for its leading dim.
      batch_size: The leading dim of the inputs; None if it is free.

    Raises:
      UserError: If the predict function cannot be exported.
    """
    targets = jax.eval_shape(lambda: variables)
    weights = {name: np.asarray(x) for name, x in named_leaves(raw_keys(variables)).items()}
    size = batch_size or jax.export.symbolic_shape(_BATCH)[0]
    of_batch = {
        name: jax.ShapeDtypeStruct((size, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in named_leaves(rows).items()
    }
    structures: list[Any] = [jax.tree.structure(tree) for tree in (targets, rows)]

    def run(given: Mapping[str, Any], inputs: Mapping[str, Any]) -> PyTree:
        rows_given = next(iter(inputs.values())).shape[0]
        leaves = []
        for name, target in named_leaves(targets).items():
            raw = raw_keys(target)
            leaf = given[name] if name in given else jnp.zeros(raw.shape, raw.dtype)
            leaves.append(restore_key(target, leaf))
        values = structures[0].unflatten(leaves)
        batch = structures[1].unflatten(
            [
                inputs[name] if name in inputs else jnp.zeros((rows_given, *x.shape[1:]), x.dtype)
                for name, x in of_batch.items()
            ]
        )
        with use_placement(functions.placement):
            mask = jnp.ones(rows_given, jnp.float32)
            # The key of a predict function with random numbers: that of the first batch.
            draw = jnp.array([derive_seed(functions.config.seed, Purpose.EVAL), 0], jnp.uint32)
            return _plain(functions.forward.predictions(values, batch, mask, draw))

    # With a fixed size first: its errors are those of the predict function itself, and JAX tells
    # what the outputs depend on.
    fixed = {name: _with_rows(x, batch_size or _TRIED) for name, x in of_batch.items()}
    exported = _exported(PredictProgram(run, weights, fixed, batch_size or _TRIED), ("cpu",))
    # In the order of `jax.tree.leaves`. Targets, on which no output depends, are left out.
    names = [*((name, True) for name in sorted(weights)), *((n, False) for n in sorted(of_batch))]
    used = {names[index] for index in exported.module_kept_var_idx}
    inputs = {name: x for name, x in of_batch.items() if (name, False) in used}
    if not inputs:
        raise UserError("predict uses no array of its batch, so there is nothing to serve")
    kept = {name: x for name, x in weights.items() if (name, True) in used}
    return PredictProgram(run, kept, inputs, batch_size)


def _plain(tree: PyTree) -> PyTree:
    """Returns outputs in dictionaries, lists and tuples, which need no class to be loaded."""
    children = jax.tree_util.tree_flatten(tree, is_leaf=lambda x: x is not tree)[0]
    if jax.tree_util.all_leaves([tree]):
        return tree
    if type(tree) is dict and all(isinstance(name, str) for name in tree):
        return {name: _plain(x) for name, x in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_plain, children))
    return named_leaves(tree)


def _exported(
    program: PredictProgram, platforms: Sequence[str], weights: Weights = "beside"
) -> jax.export.Exported:
    """Lowers a program for platforms.

    Raises `UserError` if its outputs are not rows, or if only a fixed batch size is possible.
    """
    beside = (_shapes(program.weights),) if weights == "beside" else ()
    function = program.run if beside else program.of_inputs
    export = jax.export.export(jax.jit(function), platforms=tuple(platforms))
    try:
        with _without_places():
            exported: jax.export.Exported = export(*beside, dict(program.inputs))
    except UserError:
        raise
    except NotImplementedError as error:
        if "host_callbacks" not in str(error):
            raise
        raise UserError(
            "predict calls Python (jax.pure_callback, jax.debug.print, ...), which no program can "
            "hold: leave the call out"
        ) from error
    except Exception as error:
        if "custom call" in str(error):
            raise UserError(
                "predict uses an operation whose form may change in later versions of XLA, so it "
                f"cannot be exported: {one_line(error)[:300]}"
            ) from error
        if program.batch_size is not None:
            raise
        raise UserError(
            "predict depends on the size of its batch, so it cannot be exported for every size: "
            f"{one_line(error)[:300]}. Write x.shape[0] for len(x), or give one size: "
            + option("batch_size", 64)
        ) from error
    size = next(iter(program.inputs.values())).shape[0]
    for output in exported.out_avals:
        if not output.shape or output.shape[0] != size:
            raise UserError(
                f"predict returned an array of shape {output.shape}: it must hold a row for each "
                f"of the {size} examples of the batch"
            )
    return exported


@contextlib.contextmanager
def _without_places() -> Iterator[None]:
    """Keeps the places of operations, paths of this machine, out of programs."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _with_rows(x: jax.ShapeDtypeStruct, size: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)


def _shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


# -- Export of a trainer's predict function to a folder --------------------------------------------


def export_predict(
    trainer: Trainer,
    to: str,
    data: Any,
    *,
    format: ProgramFormat = "stablehlo",
    weights: Weights = "inside",
    platforms: Sequence[Platform] = PLATFORMS,
    batch_size: int | None = None,
    license: str | None = None,
    manifest: Manifest | None = None,
) -> None:
    """Writes the predict function of a trainer, with the values trained so far, for serving.

    Arrays of the batch that the outputs do not depend on, such as targets, are no inputs of the
    exported function. Two exports of the same values have the same bytes, except for SavedModels.

    Args:
      trainer: The trainer.
      to: The folder to write, which must be new or empty, or a `gs://` URL.
      data: A dataset, a stream, or arrays in a tuple or dictionary, with the shapes and dtypes of a
        batch.
      format: "stablehlo" for `load_exported`; "saved_model" for TensorFlow (extra `tensorflow`);
        "onnx" (extra `onnx`).
      weights: Whether the weights are constants of the program or a file beside it, for
        "stablehlo".
      platforms: The platforms on which the program runs, for "stablehlo" and "saved_model".
      batch_size: The only number of rows that the function takes; by default any.
      license: The license that the model card names.
      manifest: The checkpoint of the values, for the model card.

    Raises:
      UserError: If an argument is wrong, a library is missing, or the function cannot be exported.
      StorageError: If a file cannot be written.
    """
    if process_group.count() > 1:
        raise UserError(
            f"export is for one process, and there are {process_group.count()}: export a "
            "checkpoint: python -m spmdtrain.checkpoints export RUN OUT --format stablehlo"
        )
    _check_arguments(format, weights, platforms, batch_size)
    check_new_folder(to)
    write = _WRITERS[format]()  # first: its library may be missing
    identity = manifest.identity if manifest else trainer.trained_as
    variables = jax.device_get(trainer.variables)
    count = sum(x.size for x in jax.tree.leaves(variables.params))
    facts = CardFacts(
        step=manifest.step if manifest else trainer.step,
        parameters=count,
        identity=identity,
        metrics=(manifest.metrics if manifest else None) or {},
        saved_at=manifest.saved_at if manifest else "",
        license=license,
    )
    config = config_for_export(trainer.config)
    functions = trainer.functions_on(config, make_placement(config))
    if (stream := as_stream(data)) is not None:
        rows = ShardedStream(stream, 1).first_row(None)
    else:
        rows = run_dataset(data, trainer.config).rows(np.arange(1))
    program = program_of(functions, variables, rows, batch_size)
    write(to, program, Target(tuple(platforms), weights, facts))


@dataclass(frozen=True)
class Target:
    """The platforms of an export, the place of its weights, and the facts of its model card."""

    platforms: tuple[Platform, ...]
    weights: Weights
    facts: CardFacts


Write = Callable[[str, PredictProgram, Target], None]
"""Writes a program to a new folder."""


def _check_arguments(
    format: str, weights: str, platforms: Sequence[str], batch_size: int | None
) -> None:
    for name, value, known in (
        ("format", format, get_args(ProgramFormat)),
        ("weights", weights, get_args(Weights)),
    ):
        if value not in known:
            raise UserError(f"{name} is {value!r}: it must be {' or '.join(known)}")
    unknown = [name for name in platforms if name not in get_args(Platform)]
    if unknown or not platforms or len({*platforms}) < len(platforms):
        raise UserError(
            f"platforms is {platforms!r}: it must be a list of different names of "
            f"{', '.join(get_args(Platform))}"
        )
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: it must be 1 or more")
    if weights == "beside" and format != "stablehlo":
        raise UserError(f"weights is beside, and {format} files hold their own: leave weights out")


# -- StableHLO: a folder that `load_exported` reads ------------------------------------------------

_DESCRIPTION, _PROGRAM, _WEIGHTS = "export.json", "predict.jax_export", "weights.npz"
_FORMAT = 1


@dataclass(frozen=True)
class Description:
    """The content of `export.json`.

    Attributes:
      inputs: Dtype and shape of each input by its path in a batch, as `float32[batch,8,8]`.
      dtypes: The dtype of each weight that is a file beside the program.
      files: The SHA-256 of each file.
    """

    format: int
    inputs: Mapping[str, str]
    platforms: Sequence[str]
    batch_size: int | None
    step: int
    versions: Mapping[str, str]
    dtypes: Mapping[str, str]
    files: Mapping[str, str]


_USE = """```python
import spmdtrain

model = spmdtrain.load_exported("PATH OF THIS FOLDER")
outputs = model(batch)  # {inputs}
```"""


def _stablehlo() -> Write:
    import_extra("flatbuffers", "serving", "Exported models")
    return _write_stablehlo


def _write_stablehlo(to: str, program: PredictProgram, target: Target) -> None:
    size = sum(x.nbytes for x in program.weights.values())
    if target.weights == "inside" and size > _LARGEST_PROGRAM:
        raise UserError(
            f"the weights have {size:,} bytes, and a program has at most {_LARGEST_PROGRAM:,}: "
            f"write them beside it: {option('weights', 'beside')}"
        )
    exported = _exported(program, target.platforms, target.weights)
    files: dict[str, bytes] = {_PROGRAM: bytes(exported.serialize())}
    dtypes: dict[str, str] = {}
    if target.weights == "beside":
        buffer = io.BytesIO()
        write_npz(buffer, {name: _as_bits(x) for name, x in program.weights.items()})
        files[_WEIGHTS] = buffer.getvalue()
        dtypes = {name: x.dtype.name for name, x in program.weights.items()}
    inputs = {
        name: f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for name, x in program.inputs.items()
    }
    description = Description(
        format=_FORMAT,
        inputs=inputs,
        platforms=target.platforms,
        batch_size=program.batch_size,
        step=target.facts.step,
        versions={name: version_of(name) for name in ("jax", "spmdtrain")},
        dtypes=dtypes,
        files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    )
    use = _USE.format(inputs=_listed(inputs))
    files[CARD] = model_card(target.facts, library="jax", use=use).encode()
    # Last: a folder without it is not complete.
    files[_DESCRIPTION] = (json.dumps(asdict(description), indent=1) + "\n").encode()
    write_folder(to, files)


def _listed(inputs: Mapping[str, str]) -> str:
    """Returns inputs by name for a message; a batch that is one array has no name."""
    return ", ".join(f"{name}: {text}" if name else text for name, text in inputs.items())


def _as_bits(x: np.ndarray) -> np.ndarray:
    """Returns an array in a dtype that `.npy` files have: the bits of bfloat16 as uint16."""
    return x if x.dtype.isbuiltin == 1 else x.view(np.dtype(f"uint{8 * x.dtype.itemsize}"))


class ExportedModel:
    """An exported predict function, as `load_exported` returns it.

    Attributes:
      description: Inputs, platforms, batch size, step and versions.
    """

    def __init__(
        self, exported: jax.export.Exported, weights: Mapping[str, Any] | None, about: Description
    ) -> None:
        self.description = about
        self._weights = None if weights is None else jax.device_put(dict(weights))
        self._call = jax.jit(exported.call)

    def __call__(self, batch: PyTree) -> PyTree:
        """Returns the outputs for a batch.

        Args:
          batch: A batch as in training. Arrays that the outputs do not depend on may be left out;
            if there is one input, it may be the batch itself. NumPy or JAX arrays of leading dim B.

        Returns:
          What the predict function returned: arrays of leading dim B in dictionaries, lists and
          tuples.

        Raises:
          UserError: If an array is missing, or has another shape or dtype than its input, or the
            program was not exported for the devices.
        """
        given, inputs = named_leaves(batch), self.description.inputs
        if len(inputs) == 1 and list(given) == [""]:
            given = dict(zip(inputs, given.values(), strict=True))
        if missing := [name for name in inputs if name not in given]:
            raise UserError(
                f"the batch has no {missing[0]!r}: the exported model takes {_listed(inputs)}"
            )
        platform = jax.default_backend()
        known = self.description.platforms
        if platform not in known and not (platform == "gpu" and {"cuda", "rocm"} & {*known}):
            raise UserError(
                f"the model was exported for {', '.join(known)}, and the device is a {platform}: "
                "export it with this platform among platforms"
            )
        arrays = {name: _checked(name, given[name], text) for name, text in inputs.items()}
        if len({x.shape[0] for x in arrays.values()}) > 1:
            sizes = {name: x.shape[0] for name, x in arrays.items()}
            raise UserError(f"the arrays of the batch have different numbers of rows: {sizes}")
        beside = () if self._weights is None else (self._weights,)
        return self._call(*beside, arrays)


def _checked(name: str, value: Any, text: str) -> Any:
    """Returns an input in its dtype, after a check of its shape."""
    kind, _, dims = text.rstrip("]").partition("[")
    dtype, shape = jnp.dtype(kind), dims.split(",")
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    fits = len(array.shape) == len(shape) and all(
        expected in (_BATCH, str(dim)) for expected, dim in zip(shape, array.shape, strict=True)
    )
    if not fits or not np.can_cast(array.dtype, dtype, "same_kind"):
        found = f"{array.dtype.name}[{','.join(map(str, array.shape))}]"
        raise UserError(f"{name or 'the batch'} is {found}: the exported model takes {text}")
    return array if array.dtype == dtype else array.astype(dtype)


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """Returns an exported model, which needs neither the experiment nor its library.

    Nothing is unpickled, and every file is compared with its recorded checksum. A program is code:
    load only folders of people whom you trust.

    Args:
      path: The folder or `gs://` URL that `export --format stablehlo` wrote.

    Returns:
      A function of a batch.

    Raises:
      UserError: If it is no export, or is incomplete or corrupted.
      StorageError: If a file cannot be read.
    """
    import_extra("flatbuffers", "serving", "Exported models")
    folder = folder_of(os.fspath(path))
    try:
        content = parse_object(_read(folder, _DESCRIPTION, most=2**25))
        if content.get("format") != _FORMAT:
            raise OtherFields(f"format is {foreign(content.get('format'), 60)}, not {_FORMAT}")
        about = build(Description, content)
        _check_description(about)
    except OtherFields as error:
        raise error.of_file(folder / _DESCRIPTION) from None
    except Malformed as error:
        raise UserError(f"{folder / _DESCRIPTION} is corrupted: {error}") from error
    files = {name: _read(folder, name) for name in about.files}
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != about.files[name]:
            raise UserError(f"{folder / name} is corrupted: its SHA-256 is not the recorded one")
    try:
        exported = jax.export.deserialize(bytearray(files[_PROGRAM]))
    except Exception as error:  # the checksum may have been forged, too
        raise UserError(
            f"{folder / _PROGRAM} is no program that JAX {jax.__version__} can read: "
            f"{one_line(error)[:200]}. It was written by JAX "
            f"{foreign(about.versions.get('jax'), 60)}"
        ) from error
    weights = None
    if _WEIGHTS in files:
        weights = _read_weights(folder / _WEIGHTS, files[_WEIGHTS], about.dtypes)
    return ExportedModel(exported, weights, about)


def _check_description(about: Description) -> None:
    if {*about.files} not in ({_PROGRAM}, {_PROGRAM, _WEIGHTS}):
        raise Malformed(f"files are {sorted(about.files)}")
    for name, text in about.inputs.items():
        kind, _, dims = text.rstrip("]").partition("[")
        try:
            np.dtype(jnp.dtype(kind))
        except TypeError:
            raise Malformed(f"input {name!r} is {text!r}") from None
        if not all(dim == _BATCH or dim.isdecimal() for dim in dims.split(",")):
            raise Malformed(f"input {name!r} is {text!r}")


def _read(folder: epath.Path, name: str, most: int | None = None) -> bytes:
    """Returns the content of a file of an export; raises `UserError` or `StorageError`."""
    file = folder / name
    with storage_errors(folder):
        try:
            if not file.is_file():
                raise FileNotFoundError
            with file.open("rb") as opened:
                return bytes(opened.read() if most is None else opened.read(most))
        except FileNotFoundError:
            raise UserError(
                f"{folder} is no complete export: {name} is missing. Export it again"
            ) from None


def _read_weights(
    file: epath.Path, content: bytes, dtypes: Mapping[str, str]
) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return {name: arrays[name].view(jnp.dtype(dtype)) for name, dtype in dtypes.items()}
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{file} is corrupted: {one_line(error)[:200]}") from error


# -- SavedModel and ONNX: files of other programs --------------------------------------------------


def _serving_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names of arrays in files of other programs, by their paths."""
    found = {name: re.sub(r"\W", "_", name) for name in names}
    return {
        name: text if text.isidentifier() else f"array_{text}".rstrip("_")
        for name, text in found.items()
    }


def _named_outputs(outputs: PyTree) -> dict[str, Any]:
    """Returns outputs by name: `output` is the only one, others have their paths."""
    found = named_leaves(outputs)
    if list(found) == [""]:
        return {"output": found[""]}
    names = _serving_names(found)
    return {names[name]: x for name, x in found.items()}


def _saved_model() -> Write:
    tensorflow = import_extra("tensorflow", "tensorflow", "SavedModels")
    from jax.experimental import jax2tf

    def write(to: str, program: PredictProgram, target: Target) -> None:
        def run(weights: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            return _named_outputs(program.run(dict(zip(names, weights, strict=True)), inputs))

        names, renamed = list(program.weights), _serving_names(program.inputs)
        shapes = {n: str(x.shape).replace("'", "") for n, x in program.inputs.items()}
        converted = jax2tf.convert(
            run,
            polymorphic_shapes=[None, shapes],
            native_serialization_platforms=target.platforms,
            with_gradient=False,
        )
        module = tensorflow.Module()
        module.values = [tensorflow.Variable(x, trainable=False) for x in program.weights.values()]

        def serve(**inputs: Any) -> Any:
            return converted(module.values, {name: inputs[renamed[name]] for name in renamed})

        specs = {
            renamed[name]: tensorflow.TensorSpec(
                [program.batch_size, *x.shape[1:]], x.dtype, name=renamed[name]
            )
            for name, x in program.inputs.items()
        }
        module.serve = tensorflow.function(serve, autograph=False)
        signatures = {"serving_default": module.serve.get_concrete_function(**specs)}
        use = _USE_SAVED_MODEL.format(inputs=", ".join(specs))
        with tempfile.TemporaryDirectory(prefix="spmdtrain-export-") as folder:
            tensorflow.saved_model.save(module, folder, signatures=signatures)
            files: dict[str, bytes | Save] = {
                str(path.relative_to(folder)): path.read_bytes()
                for path in sorted(Path(folder).rglob("*"))
                if path.is_file()
            }
            files[CARD] = model_card(target.facts, library="tf-keras", use=use).encode()
            write_folder(to, files)

    return write


_USE_SAVED_MODEL = """```python
import tensorflow as tf

serve = tf.saved_model.load("PATH OF THIS FOLDER").signatures["serving_default"]
outputs = serve(...)  # tensors by keyword: {inputs}
```"""


def _onnx() -> Write:
    jax2onnx = import_extra("jax2onnx", "onnx", "ONNX files")

    def write(to: str, program: PredictProgram, target: Target) -> None:
        outputs: list[str] = []

        def run(*inputs: Any) -> tuple[Any, ...]:
            named = _named_outputs(
                program.of_inputs(dict(zip(program.inputs, inputs, strict=True)))
            )
            outputs[:] = named
            return tuple(named.values())

        jax.eval_shape(run, *program.inputs.values())  # sets the names of the outputs
        names = list(_serving_names(program.inputs).values())
        try:
            model = jax2onnx.to_onnx(
                run,
                inputs=list(program.inputs.values()),
                model_name="predict",
                input_names=names,
                output_names=list(outputs),
            )
        except NotImplementedError as error:
            raise UserError(
                f"predict has an operation that jax2onnx {version_of('jax2onnx')} cannot convert: "
                f"{one_line(error)[:300]}. Export it as stablehlo or saved_model"
            ) from error
        use = _USE_ONNX.format(inputs=", ".join(names))
        card = model_card(target.facts, library="onnx", use=use).encode()
        content = model.SerializeToString(deterministic=True)
        write_folder(to, {"model.onnx": content, CARD: card})

    return write


_USE_ONNX = """```python
import onnxruntime

session = onnxruntime.InferenceSession("PATH OF THIS FOLDER/model.onnx")
outputs = session.run(None, {{...}})  # NumPy arrays by name: {inputs}
```"""

_WRITERS: dict[str, Callable[[], Write]] = {
    "stablehlo": _stablehlo,
    "saved_model": _saved_model,
    "onnx": _onnx,
}
