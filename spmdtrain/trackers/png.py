"""PNG files."""

import io
import struct

import numpy as np

from spmdtrain.optional import import_extra


def check_pillow() -> None:
    """Raises `UserError` if Pillow, which writes images, is missing."""
    import_extra("PIL.Image", "images", "logged images")


def encode_png(array: np.ndarray) -> bytes:
    """Returns an image, uint8 (H, W, C) with C = 1, 3 or 4, as the content of a PNG file."""
    pillow = import_extra("PIL.Image", "images", "logged images")
    file = io.BytesIO()
    pillow.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(file, "PNG")
    return file.getvalue()


def png_size(content: bytes) -> tuple[int, int]:
    """Returns the width and the height of an image from the content of a PNG file."""
    width, height = struct.unpack(">II", content[16:24])
    return width, height
