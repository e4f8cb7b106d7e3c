"""Parameters as a file that other programs read: `.npz` or `.safetensors`."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from spmdtrain.checkpoints.restore import read_variables, warn
from spmdtrain.errors import StorageError, UserError
from spmdtrain.files import no_follow
from spmdtrain.files.storage import failures, folder_of, in_short, is_url, storage_reason
from spmdtrain.tree import as_numpy, named_leaves

_SUFFIXES = (".npz", ".safetensors")


def export_params(
    path: str,
    to: str,
    *,
    which: str | int = "latest",
    averaged: bool | None = None,
    tell: Callable[[str], None] = warn,
) -> dict[str, np.ndarray]:
    """Write the model of a checkpoint into one file; the arrays by the names it has there.

    `path`, `which` and `averaged` are those of `load_params`; `tell` hears of damaged checkpoints
    that are passed over. Names are paths in the model with dots, `layers.0.kernel`; model state,
    such as batch statistics, is among them. A `.npz` holds float32 where NumPy has not the dtype
    (bfloat16), a `.safetensors` every dtype as it is. Raises `UserError` and `StorageError`.
    """
    target = folder_of(to)
    if target.suffix not in _SUFFIXES:
        raise UserError(f"{to}: export writes {' and '.join(_SUFFIXES)} files")
    save = _save_npz if target.suffix == ".npz" else _safetensors()
    variables, manifest = read_variables(path, which=which, averaged=averaged, tell=tell)
    arrays: dict[str, np.ndarray] = {}
    for tree in variables:
        for name, leaf in named_leaves(tree).items():
            name = name.replace("/", ".") or "params"
            if name in arrays:
                raise UserError(f"{path}: two arrays of the model are both called {name}")
            arrays[name] = np.asarray(leaf)
    metadata = {"step": str(manifest.step), "saved_at": manifest.saved_at}
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
    plain: dict[str, Any] = {name: as_numpy(x) for name, x in arrays.items()}
    np.savez(file, **plain)


def _safetensors() -> Any:
    try:
        library = importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UserError(
            "to write .safetensors needs one more library: pip install 'spmdtrain[safetensors]'"
        ) from error

    def save(file: Any, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        whole = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        file.write(library.save(whole, metadata))

    return save
