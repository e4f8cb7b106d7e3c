"""Files of named arrays, which `numpy.load` reads."""

import zipfile
from collections.abc import Mapping
from typing import IO

import numpy as np


def write_npz(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as `numpy.savez`, which has arguments of its own: `file`, `allow_pickle`.

    Args:
      file: A binary file.
      arrays: Name to array.
    """
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array))
