"""Folders of images: files, splits, decoded pixels, on any number of processes."""

import contextlib
import io
import itertools
import os
import re
import stat
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import optax
import pytest
from fake_gcs import Stored, fake_gcs
from flax import nnx
from helpers import BOUND, REPOSITORY, environment, small_experiment
from hypothesis import given, settings
from image_helpers import everything, folder_of, noise, numbered, plain, values
from PIL import Image

from spmdtrain import Trainer
from spmdtrain.checkpoints.run_identity import Identity, check_same_classes, check_same_run
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.data import images
from spmdtrain.data.datasets import Dataset, MappedDataset, Subset, fingerprint
from spmdtrain.data.images import SPLITS, BrokenImageError, ImageFolder, split_of
from spmdtrain.data.order import permuted
from spmdtrain.data.sources import files
from spmdtrain.distributed import progress
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import RunFiles, Status
from spmdtrain.run import main

DATA = Path(os.environ.get("SPMDTRAIN_DATA", REPOSITORY.parent / "shared" / "data"))


def decoded(tmp_path: Path, name: str, picture: Any, size: int | tuple[int, int] = 1) -> np.ndarray:
    """What a dataset makes of one picture."""
    dataset = ImageFolder(folder_of(tmp_path / "one", {f"a/{name}": picture}), size)
    (image,) = everything(dataset)["image"]
    return image


def experiment_on(folder: Path, *changes: tuple[str, str]) -> Path:
    """The file of an experiment on the images in --data-dir."""
    return small_experiment(
        folder,
        ("from spmdtrain ", "from spmdtrain.data.images import ImageFolder\nfrom spmdtrain "),
        ("    x, y = batch\n", '    x = batch["image"].mean((1, 2, 3))[:, None] / 255; y = x\n'),
        ("    data = (x, 3 * x + 2)\n", "    data = ImageFolder(config.data_dir, 2)\n"),
        *changes,
    )


@pytest.fixture
def flowers() -> Path:
    """The folder of real photographs; skips where it is absent."""
    folder = DATA / "tf_flowers_small"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (SPMDTRAIN_DATA says where it is)")
    return folder


# -- pixels ----------------------------------------------------------------------------------------


def palette(*transparency: int) -> bytes:
    """A PNG of two pixels from a palette: red, then green; with the alpha of each, if given."""
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    options = {"transparency": bytes(transparency)} if transparency else {}
    return saved(image, "PNG", **options)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(depth: int, color: int, rows: bytes, transparency: bytes | None = None) -> bytes:
    """A PNG of 2 x 1 pixels by hand, for what Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, depth, color, 0, 0, 0))
    hidden = b"" if transparency is None else chunk(b"tRNS", transparency)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + rows))
    return b"\x89PNG\r\n\x1a\n" + header + hidden + pixels + chunk(b"IEND", b"")


RED, GREEN, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (255, 255, 255), (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "content", "left", "right"),
    [
        ("gray.png", png(8, 0, b"\x64\x07"), (100, 100, 100), (7, 7, 7)),
        ("bits.png", png(1, 0, b"\x40"), BLACK, WHITE),
        ("colors.png", png(8, 2, bytes([1, 2, 3, 4, 5, 6])), (1, 2, 3), (4, 5, 6)),
        ("palette.png", palette(), RED, GREEN),
        ("palette.gif", saved(Image.open(io.BytesIO(palette())), "GIF"), RED, GREEN),
        # What is transparent lies on white: (1 - 51 / 255) of white and 51 / 255 of the color.
        ("palette_alpha.png", palette(0, 255), WHITE, GREEN),
        ("palette_some.png", palette(51, 255), (255, 204, 204), GREEN),
        ("alpha.png", png(8, 6, bytes([9, 8, 7, 0, 9, 8, 7, 255])), WHITE, (9, 8, 7)),
        ("gray_alpha.png", png(8, 4, bytes([0, 51, 50, 255])), (204, 204, 204), (50, 50, 50)),
        (
            "key.png",
            png(8, 2, bytes([1, 2, 3, 4, 5, 6]), bytes([0, 4, 0, 5, 0, 6])),
            (1, 2, 3),
            WHITE,
        ),
        # 16 bits: the upper byte
        ("deep.png", png(16, 0, b"\x12\x34\xff\xff"), (0x12, 0x12, 0x12), WHITE),
        ("deep_key.png", png(16, 0, b"\x12\x34\x12\x33", b"\x12\x34"), WHITE, (0x12, 0x12, 0x12)),
        ("deep_colors.png", png(16, 2, bytes(range(12))), (0, 2, 4), (6, 8, 10)),
        (
            "deep_colors_key.png",
            png(16, 2, bytes([1, 9, 2, 9, 3, 9, 9, 1, 9, 2, 9, 3]), bytes([9, 1, 9, 2, 9, 3])),
            (1, 2, 3),
            WHITE,
        ),
        (  # the lower bytes of what is transparent are the upper ones of what is not
            "deep_colors_low.png",
            png(16, 2, bytes([1, 9, 2, 9, 3, 9, 0, 1, 0, 2, 0, 3]), bytes([0, 1, 0, 2, 0, 3])),
            (1, 2, 3),
            WHITE,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_pixel_becomes_rgb(
    tmp_path: Path, name: str, content: bytes, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    image = decoded(tmp_path, name, content, size=(1, 2))
    assert image.dtype == np.uint8
    assert image.tolist() == [[list(left), list(right)]]


def of_frames(kind: str) -> bytes:
    """A file of two frames, dark and bright."""
    first, second = (Image.fromarray(plain(value, 16, 16)) for value in (40, 200))
    return saved(first, kind, save_all=True, append_images=[second])


def turned(orientation: int) -> bytes:
    """A PNG of 4 x 6 pixels with the orientation of a camera."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(noise(4, 6)), "PNG", exif=exif)


SEEN: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored.transpose(1, 0, 2), 2),
    8: np.rot90,
    9: lambda stored: stored,  # means nothing
}
CMYK = Image.new("CMYK", (8, 8), (0, 128, 255, 30))
NOISE = Image.fromarray(noise())
BAD_EXIF = {"no EXIF": b"what is this", "cut EXIF": b"II*\0\x08\0\0\0\x09\0\x12\x01"}
PICTURES: dict[str, tuple[bytes, np.ndarray, int]] = {
    # Content, pixels of the array, and by how much they may differ.
    # (255 - ink) * (255 - black) / 255, to what a JPEG loses.
    "CMYK": (saved(CMYK, "JPEG", quality=100), np.array([[[225, 112, 0]]]), 2),
    # The content says what a file is, not its name.
    "WEBP": (saved(NOISE, "WEBP", lossless=True), noise(), 0),
    "BMP": (saved(NOISE, "BMP"), noise(), 0),
    "PNG": (saved(NOISE, "PNG"), noise(), 0),
    **{
        f"the first frame, {kind}": (of_frames(kind), plain(40, 1, 1), 2)
        for kind in ("GIF", "MPO", "WEBP", "PNG")
    },
    **{
        f"orientation {number}": (turned(number), upright(noise(4, 6)), 0)
        for number, upright in SEEN.items()
    },
    **{
        f"{name}, {kind}": (
            saved(Image.fromarray(plain(77, 8, 8)), kind, exif=b"Exif\0\0" + exif),
            *(plain(77, 1, 1), 1),
        )
        for kind in ("JPEG", "PNG", "WEBP")
        for name, exif in BAD_EXIF.items()
    },
}


@pytest.mark.parametrize(("content", "pixels", "tolerance"), PICTURES.values(), ids=PICTURES)
def test_a_picture_is_read_as_it_is_seen_and_without_a_warning(
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    content: bytes,
    pixels: np.ndarray,
    tolerance: int,
) -> None:
    height, width, _ = pixels.shape
    image = decoded(tmp_path, "a.jpg", content, size=(height, width))
    np.testing.assert_allclose(image, pixels, rtol=0, atol=tolerance)
    assert not recwarn.list


def test_size_is_of_both_sides_or_of_each_and_the_aspect_ratio_is_not_kept(tmp_path: Path) -> None:
    picture = np.concatenate([plain(10, 32, 64), plain(250, 32, 64)], axis=1)
    assert decoded(tmp_path, "a.png", picture, size=4).shape == (4, 4, 3)
    image = decoded(tmp_path, "a.png", picture, size=(3, 4))
    assert image.shape == (3, 4, 3)
    # All of it is seen, and the middle stays where it was.
    assert image[:, 0].max() == 10 and image[:, -1].min() == 250
    assert image[:, 1].max() < 60 and image[:, 2].min() > 200


def test_resizing_averages_over_all_that_a_pixel_covers(tmp_path: Path) -> None:
    lines = np.zeros((64, 64, 3), np.uint8)
    lines[:, ::8] = 255  # sampling between few of the pixels would find none of them, or only them
    image = decoded(tmp_path, "a.png", lines, size=4)
    np.testing.assert_allclose(image[:, 1:-1], 255 / 8, atol=4)


def test_a_dataset_is_bytes_and_labels(tmp_path: Path) -> None:
    names = {"b/x.png": plain(1), "a/y.png": plain(2), "a/x.png": plain(3)}
    dataset = ImageFolder(folder_of(tmp_path, names), 2)
    assert isinstance(dataset, Dataset) and len(dataset) == 3
    rows = dataset.rows(np.array([2, 0, 0]))
    assert rows["image"].shape == (3, 2, 2, 3) and rows["image"].dtype == np.uint8
    assert rows["image"][:, 0, 0, 0].tolist() == [1, 3, 3]
    assert rows["label"].tolist() == [1, 0, 0] and rows["label"].dtype == np.int32
    none = dataset.rows(np.array([], np.int64))
    assert none["image"].shape == (0, 2, 2, 3) and none["label"].shape == (0,)


# -- files -----------------------------------------------------------------------------------------


def test_files_are_sorted_by_class_and_name_and_others_ignored(tmp_path: Path) -> None:
    wanted = [
        *("a/B.JPG", "a/b.bmp", "a/deep/er/c.gif", "a/é.webp", "a/🌻.png"),
        *("a-b/x.jpeg", "b/10.png", "b/9.png"),  # "a-b/" would be before "a/"
    ]
    others = [
        *("LICENSE.txt", ".hidden/x.png", "a/.x.png", "a/Thumbs.db", "a/.git/x.png", "b/x.png.txt"),
        *("a/png", "b/x.tiff", ".x.png"),
    ]
    for name in reversed([*wanted, *others]):
        folder_of(tmp_path, {name: b"?"})
    dataset = ImageFolder(tmp_path, 2)
    assert list(dataset.files) == wanted
    assert dataset.classes == ("a", "a-b", "b")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "flowers: no such folder"),
        (["."], "flowers: not a folder"),
        (
            ["LICENSE.txt", ".a/x.png"],
            "flowers: holds no folders: each class of images needs a folder",
        ),
        (["a/x.png", "b/x.txt"], r"flowers/b: holds no images \(.bmp, .gif, .jpeg.*so it is not a"),
        (
            ["a/x.png", "y.png", "z.jpg"],
            "flowers: 2 images are not in the folder of a class, the first is 'y.png'",
        ),
    ],
)
def test_a_folder_without_classes_of_images_is_refused(
    tmp_path: Path, names: list[str], expected: str
) -> None:
    folder = tmp_path / "flowers"
    if names == ["."]:
        folder.touch()
    else:
        folder_of(folder, dict.fromkeys(names, b"?"))
    with pytest.raises(UserError, match=expected):
        ImageFolder(folder, 2)


def test_a_folder_may_be_called_as_a_picture_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a.png/x.png": plain(1), "b/c.jpg/d.gif/x.png": plain(2)})
    dataset = ImageFolder(folder, 2)
    assert dataset.files == ("a.png/x.png", "b/c.jpg/d.gif/x.png")
    assert dataset.classes == ("a.png", "b") and values(dataset) == [1, 2]


@pytest.mark.parametrize(
    ("link", "to"),
    [("a/self", "."), ("a/up", ".."), ("out", ".."), ("here", "."), ("a/b/on", "../../b")],
)
def test_a_link_to_a_folder_above_itself_is_refused(tmp_path: Path, link: str, to: str) -> None:
    folder = folder_of(tmp_path / "data", {"a/x.png": plain(1), "a/b/y.png": plain(2)})
    (folder / "b").mkdir()
    (folder / "b" / "back").symlink_to("../a")  # the last one's way round
    (folder / link).symlink_to(to)
    with pytest.raises(UserError, match=rf"(/{link}|back): a link to /.*, which contains it"):
        ImageFolder(folder, 2)


def test_other_links_are_followed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "data", {"a/x.png": plain(1), "ab/y.png": plain(2)})
    (folder / "c").symlink_to("a")
    (folder / "ab" / "more").symlink_to("../a")  # beside it, and its own name begins with that
    (folder / "a" / "z.png").symlink_to("x.png")
    (folder / "gone").symlink_to("nowhere")
    files = ["a/x.png", "a/z.png", "ab/more/x.png", "ab/more/z.png", "ab/y.png"]
    assert [*ImageFolder(folder, 2).files] == [*files, "c/x.png", "c/z.png"]


def test_what_is_no_file_is_broken_and_not_opened(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 3)
    os.mkfifo(folder / "a" / "pipe.png")
    assert stat.S_ISFIFO((folder / "a" / "pipe.png").stat().st_mode)
    with pytest.raises(BrokenImageError, match=r"pipe\.png: .*regular file"):
        everything(ImageFolder(folder, 2))
    dataset = ImageFolder(folder, 2, broken="skip")
    assert dataset.skipped == {"a/pipe.png": "it is not a regular file"}
    assert values(dataset) == [0, 1, 2]


def test_pictures_of_kinds_that_are_not_read_are_counted_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("a/x.tif", "a/deep/y.TIF", "b/z.heic", "b/z.txt", "b/.z.tif", "w.tif")
    folder = folder_of(numbered(tmp_path, 40), dict.fromkeys(names, b"?"))
    folder_of(folder, {"b/x.png": plain(1)})
    for split in SPLITS:
        ImageFolder(folder, 2, split=split)
    assert capsys.readouterr().err == (
        f"{folder}: files of unsupported formats are ignored: .heic 1, .tif 2\n"
    )


IN_A_BUCKET = """
import numpy as np
from etils import epath
from spmdtrain.data.images import ImageFolder

kind = type(epath.Path("gs://bucket/data"))
is_dir, asked = kind.is_dir, set()
kind.is_dir = lambda path: asked.add(path.name) or is_dir(path)
dataset = ImageFolder("gs://bucket/data", 2, threads=3)
print(sorted(asked))
rows = dataset.rows(np.arange(len(dataset)))
print(dataset.files, rows["image"][:, 0, 0, 0].tolist(), rows["label"].tolist())
"""


@pytest.mark.slow
def test_a_folder_may_be_in_a_bucket() -> None:
    with fake_gcs() as storage:
        for name, value in {"a/0.png": 5, "b/1.png": 6, "a/deep/2.png": 7}.items():
            content = saved(Image.fromarray(plain(value)), "PNG")
            storage.objects[f"data/{name}"] = Stored(content, 1)
        printed = subprocess.run(
            [sys.executable, "-c", IN_A_BUCKET],
            env=environment() | storage.environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=BOUND,
        ).stdout
    names, printed = printed.splitlines()
    assert names == "['a', 'b', 'data', 'deep']"  # a request each, and none a file
    assert printed == "('a/0.png', 'a/deep/2.png', 'b/1.png') [5, 7, 6] [0, 0, 1]"


def test_folders_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    deep = tmp_path.joinpath("a", *["d"] * 400)
    deep.mkdir(parents=True)
    with pytest.raises(UserError, match="64 levels"):
        ImageFolder(tmp_path, 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 0}, "size is 0: it must be one number of pixels, or"),
        ({"size": (2, 2, 3)}, r"size is \(2, 2, 3\)"),
        ({"size": 2.5}, r"size is 2\.5"),
        ({"size": True}, "size is True: it must be"),
        ({"size": "64"}, "size is '64': it must be"),
        ({"size": (64, "64")}, r"size is \(64, '64'\): it must be"),
        ({"size": None}, "size is None: it must be"),
        (
            {"size": 10**7},
            "not enough memory for 1 images of 10000000 x 10000000 pixels, 300000 GB each",
        ),
        ({"size": 10**19}, "not enough memory for 1 images"),
        ({"threads": 0}, "threads is 0: it must be at least 1"),
        ({"threads": 2.5}, r"threads is 2\.5: it must be at least 1"),
        ({"threads": "2"}, "threads is '2': it must be at least 1"),
        ({"threads": True}, "threads is True: it must be at least 1"),
        ({"folder": ""}, "folder is '': give the folder that holds"),
        (
            {"splits": {}},
            r"splits is \{\}: it must be a dictionary of fractions, with at least one",
        ),
        ({"splits": [0.5, 0.5]}, r"splits is \[0\.5, 0\.5\]: it must be a dictionary of fractions"),
        ({"splits": {"a": "x", "b": 0.5}}, "splits must be fractions: a is 'x'"),
        ({"splits": {"a": True}}, "splits must be fractions: a is True"),
        ({"cache": "disk", "cache_dir": ""}, "needs cache_dir"),
        ({"cache_dir": "c"}, "cache_dir is for cache='disk', but cache is 'none': c"),
        ({"cache_dir": "c", "cache": "memory"}, "cache_dir is for cache='disk', but cache is 'me"),
        ({"broken": "skipp"}, "no broken 'skipp'. Did you mean 'skip'"),
        ({"cache": "disc"}, "no cache 'disc'. Did you mean 'disk'"),
        ({"cache": "disk"}, "needs cache_dir"),
        ({"cache": "disk", "cache_dir": "gs://a/b"}, "is gs:/.*local folder"),
        ({"split": "trian"}, "no split 'trian'. Did you mean 'train'"),
        ({"splits": {"a": 0.5, "b": 0.4}}, r"add up to 1: a 0\.5 \+ b 0\.4 = 0\.9"),
        ({"splits": {"a": 1.5, "b": -0.5}}, r"positive fractions: a 1\.5 \+ b -0\.5"),
        ({"splits": {"a": float("nan")}}, "positive fractions"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    numbered(tmp_path, 3)
    with pytest.raises(UserError, match=expected):
        ImageFolder(**{"folder": tmp_path, "size": 2, **options})


def test_numbers_may_be_those_of_numpy(tmp_path: Path) -> None:
    splits = {"a": np.float64(0.5), "b": np.float64(0.5)}
    dataset = ImageFolder(numbered(tmp_path, 3), np.int64(2), threads=np.int32(2), splits=splits)  # type: ignore[arg-type]
    assert dataset.size == (2, 2) and type(dataset.size[0]) is int
    assert values(dataset) == [0, 1, 2]


def test_rows_for_which_there_is_no_memory_are_an_error_of_one_line(tmp_path: Path) -> None:
    dataset = ImageFolder(numbered(tmp_path, 1), (2**24, 2**4))
    with pytest.raises(UserError, match="1,000,000 images"):
        dataset.rows(np.zeros(10**6, np.int8))


def test_a_picture_for_which_there_is_no_memory_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(content: bytes, size: tuple[int, int]) -> np.ndarray:
        raise MemoryError

    dataset = ImageFolder(numbered(tmp_path, 1), 2)
    monkeypatch.setattr(images, "decode", none)
    with pytest.raises(UserError, match=r"000\.png: .*memory") as error:
        everything(dataset)
    assert not isinstance(error.value, BrokenImageError)


def test_without_pillow_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.JpegImagePlugin", None)
    with pytest.raises(UserError, match=r"Pillow.*pip install"):
        ImageFolder(numbered(tmp_path, 3), 2)


# -- splits ----------------------------------------------------------------------------------------


def test_the_split_of_a_name_is_the_same_for_ever() -> None:
    # The first bytes of `printf NAME | sha256sum`, as a fraction of all there are.
    expected = {"daisy/1.jpg": 0.776036, "roses/été.jpg": 0.212501, "tulips/b/🌷.png": 0.602763}
    for name, fraction in expected.items():
        ends = {"below": fraction - 1e-6, "here": 2e-6, "above": 1 - fraction - 1e-6}
        assert split_of(name, ends) == "here", name


@settings(max_examples=15, deadline=None, derandomize=True)
@given(weights=st.lists(st.integers(1, 8), min_size=1, max_size=4), salt=st.text(max_size=5))
def test_splits_are_about_as_large_as_asked(weights: list[int], salt: str) -> None:
    splits = {str(n): weight / sum(weights) for n, weight in enumerate(weights)}
    count = 2000
    found = [split_of(f"{salt}/{number}.jpg", splits) for number in range(count)]
    for name, fraction in splits.items():
        spread = 5 * (count * fraction * (1 - fraction)) ** 0.5
        assert abs(found.count(name) - count * fraction) <= spread


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(few=st.sets(st.integers(0, 99), min_size=40, max_size=60))
def test_other_files_move_none_from_its_split(
    tmp_path_factory: pytest.TempPathFactory, few: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("splits")
    by_split = []
    for numbers in (few, range(100)):
        folder_of(folder, {f"{n % 2}/{n}.jpg": b"?" for n in numbers})
        by_split.append({s: set(ImageFolder(folder, 2, split=s).files) for s in SPLITS})
    before, after = by_split
    there = set(ImageFolder(folder, 2).files)
    assert set.union(*after.values()) == there and sum(map(len, after.values())) == len(there)
    for split in SPLITS:
        assert before[split] <= after[split]
        assert before[split]


def test_labels_are_those_of_the_whole_folder_in_every_split(tmp_path: Path) -> None:
    files = {f"{name}/{n}.png": plain(ord(name)) for name in "abc" for n in range(3)}
    files |= {f"b/{n}.png": plain(ord("b")) for n in range(60)}
    folder = folder_of(tmp_path, files)
    for split in SPLITS:
        dataset = ImageFolder(folder, 2, split=split)
        assert dataset.classes == ("a", "b", "c")
        rows = everything(dataset)
        assert (rows["label"] + ord("a") == rows["image"][:, 0, 0, 0]).all()


def test_an_empty_split_is_an_error_with_the_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a/0.jpg": b"?", "a/1.jpg": b"?"})
    counts = dict.fromkeys(SPLITS, 0)
    for file in ("a/0.jpg", "a/1.jpg"):
        counts[split_of(file)] += 1
    said = ", ".join(f"{split} {count}" for split, count in counts.items())
    empty = next(split for split, count in counts.items() if not count)
    with pytest.raises(UserError, match=f"'{empty}' .*{said}"):
        ImageFolder(folder, 2, split=empty)


def test_names_that_are_no_text_have_a_split(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 1)
    os.rename(os.fsencode(folder / "a" / "000.png"), os.fsencode(folder / "a") + b"/\xff.png")
    dataset = ImageFolder(folder, 2, split="all", splits={"all": 1.0})
    assert values(dataset) == [0]


# -- broken files ----------------------------------------------------------------------------------

PHOTO = saved(Image.fromarray(noise(64, 64)), "JPEG")
BROKEN = {
    "cut.jpg": (PHOTO[: len(PHOTO) // 2], "image file is truncated"),
    "almost.jpg": (PHOTO[:-2], "image file is truncated"),
    "cut.png": (saved(Image.fromarray(noise(64, 64)), "PNG")[:3000], "truncated"),
    "empty.jpg": (b"", "it is empty: not one of JPEG, PNG, WEBP, GIF, BMP"),
    "text.jpg": (b"hello", "it begins with 68 65 6c 6c 6f: not one of JPEG"),
    "program.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not one of JPEG"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    content, reason = BROKEN[name]
    dataset = ImageFolder(folder_of(numbered(tmp_path, 3), {f"a/{name}": content}), 2)
    place = dataset.files.index(f"a/{name}")
    dataset.rows(np.array([0, 1, 2]))
    with pytest.raises(UserError, match=f"{name}: .*{reason}.*skip") as e:
        dataset.rows(np.array([0, place, 1]))
    assert "\n" not in str(e.value) and "BytesIO" not in str(e.value)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [(3000, "64 x 64 = 4,096 pixels are more than 3,000, PIL"), (1000, r"\(4096 pixels\) exceeds")],
)
def test_a_decompression_bomb_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, reason: str
) -> None:
    dataset = ImageFolder(folder_of(tmp_path, {"a/bomb.png": noise(64, 64)}), 2)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(UserError, match=f"bomb\\.png: .*{reason}"):
        everything(dataset)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4096)
    assert everything(dataset)["image"].shape == (1, 2, 2, 3)


def test_a_file_larger_than_any_picture_is_not_read(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 3)
    with (folder / "a" / "sparse.png").open("wb") as file:
        file.truncate(2**40)
    dataset = ImageFolder(folder, 2, broken="skip")
    assert len(dataset) == 3
    assert dataset.skipped["a/sparse.png"].startswith("its 1,099,511,627,776 bytes are more than")


def test_broken_files_are_skipped_counted_and_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {f"{place}/{name}": content for place in "ac" for name, (content, _) in BROKEN.items()}
    folder = folder_of(numbered(tmp_path, 30), bad)
    dataset = ImageFolder(folder, 2, broken="skip")
    assert values(dataset) == list(range(30))
    assert dataset.classes == ("a", "c")  # numbers of labels do not depend on what is broken
    assert list(dataset.skipped) == sorted(bad)
    for file, reason in dataset.skipped.items():
        assert re.search(BROKEN[file[2:]][1], reason)
    said = capsys.readouterr().err
    assert said == (
        f"{folder}: 12 of 42 images are broken; the first is a/almost.jpg: "
        f"{dataset.skipped['a/almost.jpg']}. No example is left of c. They are left out\n"
    )


def test_nothing_is_said_where_nothing_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = ImageFolder(numbered(tmp_path, 30), 2, broken="skip", split="train")
    assert len(dataset) > 9 and dataset.skipped == {}
    assert capsys.readouterr() == ("", "")


def test_where_all_are_broken_none_is_left(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a/x.png": b"", "a/y.png": b""})
    with pytest.raises(UserError, match=r"2 of 2 .*a/x\.png"):
        ImageFolder(folder, 2, broken="skip")


def test_a_file_that_cannot_be_read_is_never_skipped(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 3)
    (folder / "a" / "x.jpg").symlink_to(folder / "gone.jpg")
    with pytest.raises(StorageError, match=r"x\.jpg: .*No such file"):
        ImageFolder(folder, 2, broken="skip")


def test_a_long_look_for_broken_files_shows_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[str] = []

    class Shown(Terminal):
        def progress(self, description: str, *, done: int, total: int) -> Any:
            if not self.console.quiet:
                bars.append(f"{description} {done}/{total}")
            return super().progress(description, done=done, total=total)

    monkeypatch.setattr(files, "Terminal", Shown)
    ImageFolder(numbered(tmp_path, 30), 2, broken="skip", threads=1)
    assert bars == []
    monkeypatch.setattr(files, "PROGRESS_DELAY", -1)
    ImageFolder(tmp_path, 2, broken="skip", threads=1)
    assert bars == ["checking 0/30"]
    files.hides_progress = True  # by `--quiet`
    try:
        ImageFolder(folder_of(tmp_path, {"a/x.png": plain(1)}), 2, broken="skip", threads=1)
    finally:
        files.hides_progress = False
    assert bars == ["checking 0/30"]


def test_classes_of_which_nothing_is_left_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {f"{name}/x.png": b"" for name in "abc"} | {"c/y.png": plain(1)}
    dataset = ImageFolder(folder_of(tmp_path, bad), 2, broken="skip")
    assert dataset.classes == ("a", "b", "c")
    said = capsys.readouterr().err
    assert said.endswith(". No example is left of a, b. They are left out\n"), said


def test_a_name_does_not_end_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, {"a\nb/c\x1b\rd.png": b"", "a\nb/e.png": plain(1)})
    with pytest.raises(UserError, match=r"/a\\nb/c\\x1b\\rd\.png") as error:
        everything(ImageFolder(folder, 2))
    assert str(error.value).isprintable()
    ImageFolder(folder, 2, broken="skip")
    said = capsys.readouterr().err
    assert r"the first is a\nb/c\x1b\rd.png: it is empty" in said and said.count("\n") == 1
    (folder / "a\nb" / "f.png").symlink_to("gone")
    with pytest.raises(StorageError, match=r"/a\\nb/f\.png") as unread:
        ImageFolder(folder, 2).rows(np.array([2]))
    assert str(unread.value).isprintable()


def test_a_file_that_breaks_after_the_check_was_whole_before(tmp_path: Path) -> None:
    dataset = ImageFolder(numbered(tmp_path, 3), 2, broken="skip")
    (tmp_path / "a" / "001.png").write_bytes(b"")
    with pytest.raises(BrokenImageError, match="intact") as e:
        everything(dataset)
    assert "skip" not in str(e.value)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 2])
def test_a_broken_file_ends_a_run_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: int
) -> None:
    folder = numbered(tmp_path / "data", 64)
    order = permuted(np.arange(64), size=64, seed=0, epochs=np.zeros(64, np.int64))
    # Of the seventh batch, and not among those few that a run looks at first.
    looked_at = np.linspace(0, 63, 16).astype(int)
    file = folder / "a" / f"{next(n for n in order[48:] if n not in looked_at):03}.png"
    file.write_bytes(b"what")
    config = experiment_on(tmp_path)
    options = ["--data-dir", folder, "--workdir", tmp_path / "run", "--steps", 8, "--log-every", 1]
    options += ["--global-batch-size", 8, "--data-threads", threads]
    command = ["--config", *map(str, (config, *options))]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        f"error: {file}: a broken image: it begins with 77 68 61 74: not one of JPEG, PNG, WEBP, "
        "GIF, BMP. Repair or remove it, or use broken='skip' to leave out such files\n"
    )
    assert "step 2/8" in printed.out
    file.unlink()
    file.symlink_to("gone")  # cannot be read now, but perhaps when it is tried again
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"failed: {file}: cannot be read: ")
    assert printed.err.count("\n") == 1
    file.unlink()
    Image.fromarray(plain(5)).save(file)
    assert main(command) == 0


# -- names that are no text ------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_escapes_what_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    Terminal().line("a\udcffb é :smile:")
    accent = "é" if encoding == "utf-8" else r"\xe9"
    assert written.getvalue().decode(encoding) == rf"a\udcffb {accent} :smile:" + "\n"


def test_a_reason_with_a_name_that_is_no_text_reaches_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.LAUNCH, str(tmp_path))
    monkeypatch.setenv(progress.TASK, "chief")
    progress.write_exit_reason(2, "a\udcffé: broken")
    reason = progress.read_reason(tmp_path, "chief")
    assert reason == progress.Reason(2, r"a\udcffé: broken", True)
    progress.write_ended(tmp_path, "failed: a\udcffé: broken")
    assert progress.job_ended() == r"failed: a\udcffé: broken"
    assert (tmp_path / "ended").read_bytes() == r"failed: a\udcffé: broken".encode()


def test_the_status_of_a_run_may_tell_a_name_that_is_no_text(tmp_path: Path) -> None:
    with contextlib.closing(RunFiles(str(tmp_path))) as files:
        files.write_status(Status.FAILED, 3, "a\udcffé: broken")
    found = Run(str(tmp_path)).status
    assert found == {"status": "failed", "step": 3, "reason": "a\udcffé: broken"}


# -- the classes of a run --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_knows_its_classes_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = numbered(tmp_path / "data", 8)
    folder_of(folder, {f"roses/{n}.png": plain(n) for n in range(8)})
    by = "predict=lambda model, batch: batch['label'],"
    predicting = ("        train=data", f"        {by}\n        train=data")
    config = experiment_on(tmp_path, predicting)
    options = ["--data-dir", folder, "--workdir", tmp_path / "run", "--global-batch-size", 8]
    command = ["--config", *map(str, (config, *options))]
    assert main([*command, "--steps", "2"]) == 0
    assert main([*command, "--mode", "evaluate"]) == 0
    (folder / "a").rename(folder / "tulips")  # as many, and the first is now the second
    for mode in ("evaluate", "predict"):
        capsys.readouterr()
        assert main([*command, "--mode", mode]) == 2
        assert capsys.readouterr().err == (
            "error: the model was trained on the classes a, roses; this data has roses, tulips "
            "(the first that differs: a, here roses)\n"
        )
    assert not (tmp_path / "run" / "predictions.npz").exists()
    assert main([*command, "--steps", "3"]) == 2
    said = capsys.readouterr().err
    assert "checkpoints/2 was trained on the classes a, roses; this data has roses, tul" in said
    assert said.endswith("; give the same, or another workdir\n")
    (folder / "tulips").rename(folder / "a")
    assert main([*command, "--steps", "3"]) == 0


@pytest.mark.slow
def test_a_trainer_refuses_other_classes_than_it_was_trained_on(tmp_path: Path) -> None:
    one, other = (
        ImageFolder(folder_of(numbered(tmp_path / name, 8), {f"{name}/x.png": plain(9)}), 2)
        for name in ("b", "c")
    )
    trainer = Trainer(
        model=partial(nnx.Linear, 1, 1),
        objective=lambda model, batch: {"loss": model(pixels(batch))[:, 0] ** 2},
        predict=lambda model, batch: model(pixels(batch)),
        optimizer=optax.sgd(0.1),
    )
    trainer.predict(other)  # was trained on nothing
    trainer.fit(Subset(one, np.arange(8)), steps=1, global_batch_size=8)
    trainer.evaluate(one)
    trainer.predict({"image": np.zeros((8, 2, 2, 3), np.uint8)})  # has no names
    for call in (trainer.evaluate, trainer.predict):
        for wrapped in (other, MappedDataset(Subset(other, np.arange(9)), lambda rows: rows)):
            with pytest.raises(UserError, match=r"a, b; .* a, c"):
                call(wrapped)


def pixels(batch: Any) -> Any:
    return batch["image"].mean((1, 2, 3))[:, None] / 255


def test_the_names_of_classes_are_in_the_identity_only_where_there_are_any(tmp_path: Path) -> None:
    dataset = ImageFolder(numbered(tmp_path, 3), 2)
    assert fingerprint(dataset)["classes"] == ["a"]
    assert "classes" not in fingerprint(MappedDataset(np.zeros(3), lambda rows: rows))
    config = config_as_json(RunConfig(global_batch_size=8))
    now = Identity(config, fingerprint(dataset), {}, "")
    before = Identity(config, {k: v for k, v in now.dataset.items() if k != "classes"}, {}, "")
    check_same_run(before, now, "an older checkpoint", 1)
    check_same_run(now, before, "a newer one", 1)


def test_many_classes_are_listed_in_short() -> None:
    many = [f"n{number:05}" for number in range(1000)]
    with pytest.raises(UserError) as error:
        check_same_classes(many, [*many[:700], "x\ny", *many[700:]], "the model was", "; give them")
    assert str(error.value) == (
        "the model was trained on the classes n00000, n00001, n00002, ... (1000); this data has "
        "n00000, n00001, n00002, ... (1001) (the first that differs: n00700, here x\\ny); give them"
    )
    with pytest.raises(UserError, match="n00999"):
        check_same_classes(many, many[:-1], "the model was")


@pytest.mark.slow
def test_predictions_are_kept_where_they_cannot_be_presented(tmp_path: Path) -> None:
    parts = "predict=lambda model, batch: model(batch[0]), format_predictions=lambda found: 1 / 0,"
    changed = ("        train=data", f"        {parts}\n        train=data")
    config = small_experiment(tmp_path, changed)
    command = ["--config", str(config), "--workdir", str(tmp_path / "run"), "--steps", "1"]
    assert main(command) == 0
    with pytest.raises(ZeroDivisionError):
        main([*command, "--mode", "predict"])
    with np.load(tmp_path / "run" / "predictions.npz") as found:
        assert found["predictions"].shape == (64, 1)


# -- real photographs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_photographs(flowers: Path, tmp_path: Path) -> None:
    folder = partial(ImageFolder, flowers, (48, 64), cache="disk", cache_dir=tmp_path / "cache")
    every = folder()
    assert every.classes == ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    rows = everything(every)
    assert np.bincount(rows["label"]).tolist() == [40] * 5
    np.testing.assert_allclose(rows["image"].mean((0, 1, 2)), (127.1, 113.9, 79.4), atol=1)
    assert rows["image"].std() > 60 and rows["image"].min() < 5 and rows["image"].max() > 250
    sunflowers = rows["image"][rows["label"] == 3].mean((0, 1, 2))
    assert sunflowers[0] > sunflowers[2] + 50  # are yellow: more red than blue
    parts = [folder(split=split, broken="skip") for split in SPLITS]
    assert [len(part) for part in parts] == [165, 16, 19]
    assert not any(part.skipped for part in parts)
    assert sorted(itertools.chain(*(part.files for part in parts))) == sorted(every.files)
    np.testing.assert_array_equal(everything(folder())["image"], rows["image"])
