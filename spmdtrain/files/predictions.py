"""The file of predictions in a workdir."""

from typing import Any

from etils import epath

from spmdtrain.errors import UserError
from spmdtrain.files import no_follow
from spmdtrain.files.npz import write_npz
from spmdtrain.files.storage import failures, folder_of, is_url, one_line
from spmdtrain.tree import as_numpy, named_leaves


def write_predictions(workdir: str | None, predictions: Any) -> epath.Path:
    """Writes `predictions.npz`, with an array for each leaf by its path, and returns its path.

    `workdir` is created. A single array is named `predictions`. Raises `UserError` if the file
    cannot be written.
    """
    assert workdir is not None
    path = folder_of(workdir) / "predictions.npz"
    arrays = {name or "predictions": x for name, x in named_leaves(predictions).items()}
    plain = {name: as_numpy(x) for name, x in arrays.items()}
    try:
        if not is_url(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        no_follow.write(path.parent, path.name, lambda file: write_npz(file, plain))
    except failures(path) as error:
        raise UserError(f"{path} cannot be written: {one_line(error)}") from error
    return path
