"""Decoding of image files to RGB arrays of one size."""

import functools
import importlib
import io
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from spmdtrain.errors import UserError, import_extra
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
_JPEG = ("JPEG", "MPO")  # Pillow's names of what the reader of "JPEG" finds

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


Decoder = Literal["pillow", "simplejpeg"]


@dataclass(frozen=True)
class Decoding:
    """The decoding of image files to arrays.

    Attributes:
      size: Height and width of the arrays.
      antialias: Whether a pixel is the average over the area that it covers. If not, it is
        interpolated between four pixels of the image, as by `tf.image.resize`.
      decoder: What decodes JPEG files in RGB; Pillow decodes all others. "simplejpeg" gives the
        pixels of `tf.io.decode_image`, which differ from Pillow's by rounding.

    Raises:
      UserError: If a library is missing.
    """

    size: tuple[int, int]
    antialias: bool = True
    decoder: Decoder = "pillow"

    def __post_init__(self) -> None:
        load_pillow()
        if self.decoder == "simplejpeg":
            import_extra("simplejpeg", "simplejpeg", "images with decoder='simplejpeg'")
        if not self.antialias:
            import_extra("cv2", "opencv", "images with antialias=False")

    @property
    def libraries(self) -> str:
        """The names and versions of the libraries that are used beside Pillow."""
        used = []
        if self.decoder == "simplejpeg":
            import simplejpeg

            used.append(f"simplejpeg={simplejpeg.__version__}")
        if not self.antialias:
            import cv2

            used.append(f"opencv={cv2.__version__}")
        return " ".join(used)

    @property
    def recipe(self) -> str:
        """The size, versions and settings on which the pixels of decoded images depend."""
        from PIL.ImageFile import LOAD_TRUNCATED_IMAGES

        height, width = self.size
        pillow = f"{_VERSION} {_libraries()} truncated={LOAD_TRUNCATED_IMAGES}"
        return " ".join(filter(None, (pillow, f"{height}x{width}", self.libraries)))


@functools.cache
def _libraries() -> str:
    import PIL
    from PIL import features

    jpeg = features.version_feature("libjpeg_turbo") or features.version("jpg")
    return f"pillow={PIL.__version__} jpeg={jpeg} webp={features.version('webp')}"


def decode(content: bytes, how: Decoding) -> np.ndarray:
    """Decodes an image, turns it upright and resizes it to uint8 (height, width, 3), read-only.

    Each side is scaled independently by a bilinear filter. Of several frames, the first is decoded.

    Raises:
      UndecodableError: If it is not an image, is corrupted or is too large.
      MemoryError: If there is not enough memory.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_pixels(*image.size)
            if (rgb := _by_simplejpeg(image, content, how)) is None:
                if image.mode == "RGB" and "16B" in str(image.tile):
                    _shorten_key(image)
                image.load()
                rgb = _rgb(_upright(image))
            return _resized(rgb, how)
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


def _by_simplejpeg(image: Any, content: bytes, how: Decoding) -> Any:
    """Returns the upright pixels of a JPEG file in RGB, if simplejpeg is to decode it; else None.

    Also None for a file that it refuses: Pillow decodes that, or says why it is broken.
    """
    if how.decoder != "simplejpeg" or image.format not in _JPEG or image.mode != "RGB":
        return None
    import simplejpeg
    from PIL import Image

    try:
        # The faster of libjpeg's cosine transforms, which TensorFlow's decoder uses by default.
        pixels = simplejpeg.decode_jpeg(content, "RGB", fastdct=True)
    except ValueError:
        return None
    turn = _turn(image)
    return pixels if turn is None else Image.fromarray(pixels).transpose(turn)


def _resized(rgb: Any, how: Decoding) -> np.ndarray:
    """Returns the resized pixels of an image or array, read-only."""
    from PIL import Image

    height, width = how.size
    if how.antialias:
        image = Image.fromarray(rgb) if isinstance(rgb, np.ndarray) else rgb
        return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    import cv2

    # Of OpenCV's two bilinear filters the one that gives the same bits on every processor.
    filtered = cv2.resize(np.asarray(rgb), (width, height), interpolation=cv2.INTER_LINEAR_EXACT)
    filtered.flags.writeable = False
    return filtered


def _upright(image: Any) -> Any:
    """Returns the image turned upright by its EXIF orientation."""
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _turn(image: Any) -> Any:
    """Returns the transposition that turns an image upright; None if there is none."""
    from PIL import Image

    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION))
    except Exception:  # corrupted metadata, intact pixels: not turned, as in image viewers
        return None
    return None if turn is None else Image.Transpose[turn]


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
