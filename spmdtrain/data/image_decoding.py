"""Decoding of image files to RGB arrays of one size."""

import functools
import importlib
import io
import warnings
from typing import Any

import numpy as np

from spmdtrain.errors import UserError
from spmdtrain.record.storage import one_line

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"})
"""Suffixes of image files, in lower case."""

OTHER_SUFFIXES = frozenset(
    {".avif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".tga", ".tif", ".tiff"}
)
"""Suffixes of image files that are not supported; the user is warned of them."""

# Detected by content, not by name: a PNG named .jpg is common. No other formats, because some of
# Pillow's readers start programs. "JPEG" also reads the files with several images that phones
# write.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

_VERSION = 2
"""The version of this code: increased whenever the pixels of any file change."""

_WIDEST_PIXEL = 8  # bytes: four channels of 16 bits
_HEAD = 2**24  # bytes that a file may have in addition to its pixels

# Values of the EXIF tag 0x0112, and the transposition that turns the image upright.
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class UndecodableError(Exception):
    """Bytes that are not an image, or not a complete one. The message is one line."""


def load_pillow() -> None:
    """Imports Pillow for `decode`, and silences its warnings; `UserError` if it is missing."""
    try:
        # All plugins are imported here, before any thread decodes.
        for name in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "WebP"):
            importlib.import_module(f"PIL.{name}ImagePlugin")
        from PIL.Image import DecompressionBombWarning
    except ImportError as error:
        raise UserError(f"images need Pillow: {error} (pip install 'spmdtrain[images]')") from error
    # Pillow warns of corrupted metadata, which no pixel depends on, and of large images, which
    # `decode` rejects itself. Python 3.11 cannot catch warnings in a single thread.
    for category in (UserWarning, DecompressionBombWarning):
        warnings.filterwarnings("ignore", category=category, module=r"PIL\.")


def recipe() -> str:
    """Returns the versions and settings on which the pixels of decoded images depend."""
    from PIL.ImageFile import LOAD_TRUNCATED_IMAGES

    return f"{_VERSION} {_libraries()} truncated={LOAD_TRUNCATED_IMAGES}"


@functools.cache
def _libraries() -> str:
    import PIL
    from PIL import features

    jpeg = features.version_feature("libjpeg_turbo") or features.version("jpg")
    return f"pillow={PIL.__version__} jpeg={jpeg} webp={features.version('webp')}"


def decode(content: bytes, size: tuple[int, int]) -> np.ndarray:
    """Decodes an image, turns it upright and resizes it to uint8 (height, width, 3), read-only.

    Each side is scaled independently by Pillow's bilinear filter, which averages over the area
    that a pixel covers. Of several frames, the first is decoded.

    Raises:
      UndecodableError: If it is not an image, is corrupted or is too large.
      MemoryError: If there is not enough memory.
    """
    from PIL import Image, UnidentifiedImageError

    height, width = size
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_pixels(*image.size)
            if image.mode == "RGB" and "16B" in str(image.tile):
                _shorten_key(image)
            image.load()
            rgb = _rgb(_upright(image))
            return np.asarray(rgb.resize((width, height), Image.Resampling.BILINEAR))
    except (UndecodableError, MemoryError):
        raise  # a MemoryError is not the file's fault
    except UnidentifiedImageError:
        begins = f"begins with {content[:8].hex(' ')}" if content else "is empty"
        raise UndecodableError(f"it {begins}: not one of {', '.join(_FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise many types of errors for corrupted files
        raise UndecodableError(one_line(error)) from error


def check_file_size(size: int) -> None:
    """Raises `UndecodableError` if a file has more bytes than any supported image."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and size > _HEAD + _WIDEST_PIXEL * limit:
        raise UndecodableError(
            f"its {size:,} bytes are more than {limit:,} pixels take, PIL.Image.MAX_IMAGE_PIXELS"
        )


def _check_pixels(width: int, height: int) -> None:
    """Enforces Pillow's limit of pixels; Pillow itself only warns up to twice the limit."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise UndecodableError(
            f"{width} x {height} = {width * height:,} pixels are more than {limit:,}, "
            "PIL.Image.MAX_IMAGE_PIXELS"
        )


def _upright(image: Any) -> Any:
    """Returns the image turned upright by its EXIF orientation."""
    from PIL import Image

    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION))
    except Exception:  # corrupted metadata, intact pixels: not turned, as in image viewers
        return image
    return image if turn is None else image.transpose(Image.Transpose[turn])


def _shorten_key(image: Any) -> None:
    """Shortens the transparent color to 8 bits: Pillow reads the upper byte of 16-bit colors."""
    if (key := image.info.get("transparency")) is not None:
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _rgb(image: Any) -> Any:
    """Converts an image of any mode to RGB; transparent pixels are blended with white."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        # The upper byte, as for 16-bit colors; Pillow's own conversion would clip at 255.
        wide = np.asarray(image)
        gray = (wide >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:
            gray[wide == transparent] = 255
        return Image.fromarray(gray).convert("RGB")
    if image.has_transparency_data:
        # Without blending, the invisible colors that an editor left there would show.
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    # Not copied needlessly: Pillow holds the GIL while it copies, which blocks the other threads.
    return image if image.mode == "RGB" else image.convert("RGB")
