"""What tests of image folders share: folders of pictures, and the values that a dataset has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from spmdtrain.data.images import ImageFolder


def folder_of(folder: Path, pictures: Mapping[str, Any]) -> Path:
    """A folder with pictures by path: arrays or Pillow's images are saved, bytes written."""
    for name, picture in pictures.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(picture, bytes):
            path.write_bytes(picture)
        else:
            image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
            image.save(path)
    return folder


def plain(value: int, height: int = 2, width: int = 2) -> np.ndarray:
    """One gray value everywhere."""
    return np.full((height, width, 3), value, np.uint8)


def numbered(folder: Path, count: int, name: str = "a/{:03}.png") -> Path:
    """A folder of so many pictures, each of one gray value: its number."""
    return folder_of(folder, {name.format(n): plain(n) for n in range(count)})


def everything(dataset: ImageFolder) -> dict[str, np.ndarray]:
    return dataset.rows(np.arange(len(dataset)))


def values(dataset: ImageFolder) -> list[int]:
    """The first byte of each picture."""
    return everything(dataset)["image"][:, 0, 0, 0].tolist()


def noise(height: int = 16, width: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
