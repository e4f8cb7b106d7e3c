"""The filters and decoders of images: TensorFlow's pixels, and the same treatment of every file."""

import base64
import io
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_helpers import everything, folder_of, noise, numbered, plain
from PIL import Image

from spmdtrain.data.datasets import MappedDataset, fingerprint
from spmdtrain.data.images import BrokenImageError, ImageFolder
from spmdtrain.errors import UserError

# np.rint(tf.image.resize(noise(11, 13), size)) of TensorFlow 2.20, to fewer and to more pixels.
TENSORFLOW = {
    (6, 7): (
        "c2gwZViBf5TonPFvc9ZdlWVZhzWlgWOBibFvVdloRRNfc13Pv0Nxhrawjt5bdGx/OoBX4t0/1sKsYtAUmnmyh1NW"
        "ln5qN42nOtNGs0GztcY1e3ZrgaPGYi5zhJtuPHe/jNVnfbB9SJpUTJCZwfWdjGJArq2bdVaVW3infbFl"
    ),
    (13, 9): (
        "uJBnJB0hx6XroJ67j+9HoMA/Esa12R89QDx+a2QcYFNdY5vRn7isqPKQo8Rncr/Ak1hmqS7MdVZglXJwT7SJaMaJ"
        "S2p7nn+ot1hhfnl/wI+9bn9xgp1rc7Obb6mVdhFfnly+o0VRkWaVnprNY8I8WrdvjYDUkYqo71JPl2yymJljk3OQ"
        "fljenNpEbZd8i1akeZ6E2c9Mh2205sA1bMpTfGOj13i9cn075dInpbp8cSbutRq5hwvkgnUPa97BdjtzrHIuedXS"
        "RnN5PsZTgi54mK2gqqgfd31+q6aPjWV0VLJRo5I0sewZgKSwSlFOcWozVb6Ypcu5ZDOYV4dAwJ9jbJmMeMCrWWdC"
        "aoBnRslwm56+f2ajdJade5xvR4GrkZmgmqF6cbCDQ6F5lHWdue6rl9fETJIhs8NXsHy/qo+4XqJ1VJSxB5CEftWc"
        "neFSumhEqJPrX4bCc4C3Vm15o8U5"
    ),
}
# A JPEG file of 16 x 16 pixels, of which TensorFlow 2.20 makes pixels with this CRC-32:
# tf.io.decode_image(JPEG). Pillow's differ in two thirds of the values, by up to 3.
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywt"
    "QFdBRkxOUlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09P"
    "T09PT09PT09PT09PT09PT09PT0//wAARCAAQABADASIAAhEBAxEB/8QAFwAAAwEAAAAAAAAAAAAAAAAAAQQFBv/EACAQ"
    "AAECBgMBAAAAAAAAAAAAAAECAwAEBRESIRMjQVH/xAAVAQEBAAAAAAAAAAAAAAAAAAACBP/EAB8RAAEDAwUAAAAAAAAA"
    "AAAAAAIAAQMEBRESFDEyYf/aAAwDAQACEQMRAD8AE5LJJD2Q692+xQpNYTWEll0cXHq59jOVWcUyU70YWRMqWm7JwPto"
    "ojt24jcpGyb9XTrIZAEKYi1+cYX/2Q=="
)
CRC = 53544976
SMOOTH = Image.fromarray(noise(3, 4)).resize((64, 48), Image.Resampling.BICUBIC)


def decoded(
    tmp_path: Path, content: Any, size: Any, name: str = "a.jpg", **options: Any
) -> np.ndarray:
    """The pixels of one picture in a folder."""
    folder = folder_of(tmp_path / "one", {f"a/{name}": content})
    image: np.ndarray = everything(ImageFolder(folder, size, **options))["image"][0]
    return image


def jpeg(image: Image.Image, **options: Any) -> bytes:
    image.save(file := io.BytesIO(), "JPEG", quality=95, **options)
    return file.getvalue()


@pytest.fixture(params=["pillow", "simplejpeg"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param != "pillow":
        pytest.importorskip(request.param)
    return str(request.param)


@pytest.mark.parametrize("size", TENSORFLOW)
def test_without_antialiasing_the_pixels_are_those_of_tensorflow(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    pytest.importorskip("cv2")
    expected = np.frombuffer(base64.b64decode(TENSORFLOW[size]), np.uint8).reshape(*size, 3)
    found = decoded(tmp_path, noise(11, 13), size, "a.png", antialias=False)
    np.testing.assert_allclose(found.astype(int), expected.astype(int), rtol=0, atol=1)
    averaged = decoded(tmp_path, noise(11, 13), size, "a.png")
    assert (np.abs(averaged.astype(int) - expected) > 1).mean() > 0.5


def test_simplejpeg_decodes_to_the_pixels_of_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    found = decoded(tmp_path, JPEG, 16, decoder="simplejpeg")
    assert zlib.crc32(found.tobytes()) == CRC
    assert zlib.crc32(decoded(tmp_path, JPEG, 16).tobytes()) != CRC


def test_both_decoders_treat_every_kind_of_file_alike(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = {"save_all": True, "append_images": [Image.fromarray(plain(9, 48, 64))]}
    SMOOTH.save(several := io.BytesIO(), "MPO", quality=95, **frames)
    SMOOTH.save(png := io.BytesIO(), "PNG", exif=exif)
    pictures = {
        "RGB": jpeg(SMOOTH),
        "turned": jpeg(SMOOTH, exif=exif),
        "bad EXIF": jpeg(SMOOTH, exif=b"Exif\0\0what is this"),
        "progressive": jpeg(SMOOTH, progressive=True),
        "gray": jpeg(SMOOTH.convert("L")),
        "CMYK": jpeg(SMOOTH.convert("CMYK")),
        "several images": several.getvalue(),
        "a PNG, turned": png.getvalue(),
        "bytes after the end": jpeg(SMOOTH) + b"more",
    }
    for kind, content in pictures.items():
        one, other = (
            decoded(tmp_path, content, (32, 24), decoder=name).astype(int)
            for name in ("pillow", "simplejpeg")
        )
        assert np.abs(one - other).max() <= 8 and np.abs(one - other).mean() < 2, kind
        turn = Image.Transpose.ROTATE_270
        seen = np.asarray((SMOOTH.transpose(turn) if "turned" in kind else SMOOTH).resize((24, 32)))
        if kind not in ("gray", "CMYK"):
            assert np.abs(other - seen).mean() < 12, kind


@pytest.mark.parametrize("cut", [1000, -2])
def test_a_truncated_file_is_broken_for_each_decoder(
    tmp_path: Path, decoder: str, cut: int
) -> None:
    with pytest.raises(BrokenImageError, match=r"a\.jpg: .*image file is truncated"):
        decoded(tmp_path, jpeg(SMOOTH)[:cut], 8, decoder=decoder)


def test_a_file_that_only_pillow_decodes_is_decoded(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    corrupted = bytearray(jpeg(SMOOTH))
    corrupted[len(corrupted) // 2 : len(corrupted) // 2 + 4] = b"\xff\xd0\xff\xd5"
    one, other = (
        decoded(tmp_path, bytes(corrupted), 8, decoder=name) for name in ("pillow", "simplejpeg")
    )
    np.testing.assert_array_equal(one, other)


def test_the_libraries_belong_to_the_identity_of_the_data(tmp_path: Path) -> None:
    simplejpeg, cv2 = pytest.importorskip("simplejpeg"), pytest.importorskip("cv2")
    folder = folder_of(tmp_path, {"a/x.jpg": JPEG})
    assert "decoders" not in fingerprint(ImageFolder(folder, 4))
    found = ImageFolder(folder, 4, antialias=False, decoder="simplejpeg")
    names = f"simplejpeg={simplejpeg.__version__} opencv={cv2.__version__}"
    assert fingerprint(MappedDataset(found, lambda rows: rows))["decoders"] == names


def test_a_cache_keeps_the_pixels_of_each_filter_and_decoder(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    pytest.importorskip("cv2")
    folder = folder_of(tmp_path / "data", {"a/x.jpg": jpeg(SMOOTH)})
    ways: list[dict[str, Any]] = [
        {"antialias": antialias, "decoder": decoder}
        for antialias in (True, False)
        for decoder in ("pillow", "simplejpeg")
    ]
    cached: dict[str, Any] = {"cache": "disk", "cache_dir": tmp_path / "cache"}
    for _ in range(2):
        for way in ways:
            found = everything(ImageFolder(folder, 16, **way, **cached))["image"]
            expected = everything(ImageFolder(folder, 16, **way))["image"]
            np.testing.assert_array_equal(found, expected)
    assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == len(ways)


@pytest.mark.parametrize(
    ("options", "library", "expected"),
    [
        ({"decoder": "simplejpeg"}, "simplejpeg", r"simplejpeg, .*'spmdtrain\[simplejpeg\]'"),
        ({"antialias": False}, "cv2", r"antialias=False need cv2, .*'spmdtrain\[opencv\]'"),
        ({"decoder": "simplejpg"}, "", "no decoder 'simplejpg'. Did you mean 'simplejpeg'"),
        ({"antialias": "no"}, "", "antialias is 'no': it must be True or False"),
    ],
)
def test_a_way_of_decoding_that_is_not_there_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    library: str,
    expected: str,
) -> None:
    if library:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=expected):
        ImageFolder(numbered(tmp_path, 3), 2, **options)
