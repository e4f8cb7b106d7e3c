"""Pictures to arrays: whatever they are stored as, RGB bytes of one size."""

import functools
import importlib
import io
import warnings
from typing import Any

import numpy as np

from spmdtrain.errors import UserError
from spmdtrain.files.storage import one_line

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"})
"""What the names of pictures end with, in lower or upper case."""

OTHER_SUFFIXES = frozenset(
    {".avif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".tga", ".tif", ".tiff"}
)
"""Of pictures that are not read: a person would miss them."""

# Tried by content, not by name: a PNG called .jpg is common. No others, as some of Pillow's many
# readers start programs. "JPEG" also reads the several pictures in one file that phones write.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

_VERSION = 2
"""Of this code: another number wherever the pixels of any file become others."""

_WIDEST_PIXEL = 8  # bytes: four channels of 16 bits
_HEAD = 2**24  # bytes that a picture may have beside its pixels

# Of the tag 0x0112 of EXIF: what stores the picture upright.
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
    """Bytes that are no picture, or not a whole one; says why in one line."""


def load_pillow() -> None:
    """Have what `decode` needs, and keep its warnings quiet. Raises `UserError` without Pillow."""
    try:
        # All that is imported is imported here, before any thread decodes.
        for name in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "WebP"):
            importlib.import_module(f"PIL.{name}ImagePlugin")
        from PIL.Image import DecompressionBombWarning
    except ImportError as error:
        raise UserError(f"images need Pillow: {error} (pip install 'spmdtrain[images]')") from error
    # Pillow warns of damaged metadata, which no pixel depends on, and of large pictures, which
    # `decode` refuses itself. Python 3.11 cannot catch warnings in one thread alone.
    for category in (UserWarning, DecompressionBombWarning):
        warnings.filterwarnings("ignore", category=category, module=r"PIL\.")


def recipe() -> str:
    """What the pixels of a decoded picture depend on beside its bytes and the size."""
    from PIL.ImageFile import LOAD_TRUNCATED_IMAGES

    return f"{_VERSION} {_libraries()} truncated={LOAD_TRUNCATED_IMAGES}"


@functools.cache
def _libraries() -> str:
    import PIL
    from PIL import features

    jpeg = features.version_feature("libjpeg_turbo") or features.version("jpg")
    return f"pillow={PIL.__version__} jpeg={jpeg} webp={features.version('webp')}"


def decode(content: bytes, size: tuple[int, int]) -> np.ndarray:
    """The picture in a file's bytes, upright and resized: uint8, (height, width, 3), read-only.

    Of several frames the first. `size` is (height, width): each side is scaled by itself, by
    Pillow's bilinear filter, which averages over all that a pixel covers. Raises
    `UndecodableError`.
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
        raise  # the latter is no fault of the file
    except UnidentifiedImageError:
        begins = f"begins with {content[:8].hex(' ')}" if content else "is empty"
        raise UndecodableError(f"it {begins}: none of {', '.join(_FORMATS)}") from None
    except Exception as error:  # of many kinds: Pillow's readers raise what they stumble over
        raise UndecodableError(one_line(error)) from error


def check_file_size(size: int) -> None:
    """Raises `UndecodableError` for more bytes than any picture that is read can have.

    Args:
      size: Bytes of the file.
    """
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and size > _HEAD + _WIDEST_PIXEL * limit:
        raise UndecodableError(
            f"its {size:,} bytes are more than {limit:,} pixels take, PIL.Image.MAX_IMAGE_PIXELS"
        )


def _check_pixels(width: int, height: int) -> None:
    """Pillow only warns up to twice its limit; beyond, it raises an error of its own."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise UndecodableError(
            f"{width} x {height} = {width * height:,} pixels are more than {limit:,}, "
            "PIL.Image.MAX_IMAGE_PIXELS"
        )


def _upright(image: Any) -> Any:
    """The picture as its EXIF orientation says it is to be seen."""
    from PIL import Image

    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION))
    except Exception:  # damaged metadata around whole pixels: shown as stored, as viewers do
        return image
    return image if turn is None else image.transpose(Image.Transpose[turn])


def _shorten_key(image: Any) -> None:
    """Of 16-bit colours the upper bytes are read: of the one that is transparent, too."""
    if (key := image.info.get("transparency")) is not None:
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _rgb(image: Any) -> Any:
    """Any mode as RGB; what is transparent lies on white."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        # The upper byte, as of 16-bit colours; Pillow's own conversion would cut off at 255.
        wide = np.asarray(image)
        grey = (wide >> 8).astype(np.uint8)
        if (hidden := image.info.get("transparency")) is not None:
            grey[wide == hidden] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        # Never the colours below: what an editor left there is seen by nobody.
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    # Not copied in vain: Pillow copies while it keeps the other threads waiting.
    return image if image.mode == "RGB" else image.convert("RGB")
