"""Export of parameters to files of other programs: `.npz` and `.safetensors`."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from spmdtrain.checkpoints.restore import read_variables, warn
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record import no_follow
from spmdtrain.record.storage import failures, folder_of, in_short, is_url, storage_reason
from spmdtrain.record.validation import write_npz
from spmdtrain.tree import as_numpy, named_leaves
from spmdtrain.weights.safetensors_files import SAFETENSORS_DTYPES
from spmdtrain.weights.weight_map import WeightMap, checked_weight_map, plain_name, unmapped

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
        raise UserError(f"{to}: export writes {' and '.join(_SUFFIXES)} files")
    save = _save_npz if target.suffix == ".npz" else _safetensors()
    variables, manifest = read_variables(path, which=which, averaged=averaged, log=log)
    arrays: dict[str, np.ndarray] = {}
    for tree in variables:
        for name, leaf in named_leaves(tree).items():
            name = name if weight_map else plain_name(name)
            if name in arrays:
                raise UserError(f"{path}: two arrays of the model have the name {name}")
            arrays[name] = np.asarray(leaf)
    metadata = {"step": str(manifest.step), "saved_at": manifest.saved_at}
    if weight_map:
        arrays = unmapped(weight_map, arrays)
        metadata["format"] = "pt"  # which transformers requires; the arrays are the same
    try:
        if not is_url(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        no_follow.write(target.parent, target.name, lambda file: save(file, arrays, metadata))
    except failures(target) as error:
        raise StorageError(
            f"{to} cannot be written: {storage_reason(error) or in_short(error)}"
        ) from error
    return arrays


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
