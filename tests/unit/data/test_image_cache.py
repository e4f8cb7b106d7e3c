"""Image folders read by threads, and the caches of decoded images in memory and on disk."""

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BOUND, together
from image_helpers import everything, folder_of, noise, numbered, plain, values
from PIL import ImageFile

from spmdtrain.data import image_decoding, images
from spmdtrain.data.image_decoding import Decoding
from spmdtrain.data.image_decoding import decode as decode_image
from spmdtrain.data.images import BrokenImageError, ImageFolder
from spmdtrain.errors import StorageError, UserError


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The contents of the files that were decoded from now on."""
    seen: list[bytes] = []

    def count(content: bytes, how: Decoding) -> np.ndarray:
        seen.append(content)
        return decode_image(content, how)

    monkeypatch.setattr(images, "decode", count)
    return seen


def cached(
    folder: Path, cache: str, size: int | tuple[int, int] = 2, **options: Any
) -> ImageFolder:
    """The images of folder/data with a cache, of a new folder if it is on disk."""
    place = {"cache_dir": folder / "new" / "c"} if cache == "disk" else {}
    return ImageFolder(folder / "data", size, **{"cache": cache, **place, **options})


@pytest.mark.parametrize(
    ("cache", "options"),
    [
        ("none", {}),
        ("none", {"threads": 1}),
        ("memory", {"threads": 5}),
        ("disk", {"threads": 3}),
        ("disk", {"threads": 1}),
        ("memory", {"broken": "skip"}),
    ],
)
def test_the_rows_are_the_same_however_they_are_read(
    tmp_path: Path, cache: str, options: dict[str, Any]
) -> None:
    pictures = {f"{n % 3}/{n}.png": noise(20 + n, 30 - n, seed=n) for n in range(20)}
    folder = folder_of(tmp_path / "data", pictures)
    how = Decoding((9, 7))
    expected = {file: decode_image((folder / file).read_bytes(), how) for file in pictures}
    dataset = cached(tmp_path, cache, (9, 7), **options)
    asked = [np.random.default_rng(n).integers(0, 20, 8) for n in range(12)]
    found = together(*(partial(dataset.rows, indices) for indices in asked))
    for indices, rows in zip(asked, found, strict=True):
        for index, image, label in zip(indices, rows["image"], rows["label"], strict=True):
            np.testing.assert_array_equal(image, expected[dataset.files[index]])
            assert str(label) == dataset.files[index][0]


@pytest.mark.parametrize("threads", [3, None])
def test_as_many_are_decoded_at_a_time_as_there_are_threads_or_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))
    wanted = threads or 7
    together, lock = threading.Barrier(wanted, timeout=20), threading.Lock()
    decoding, most = 0, 0

    def meet(content: bytes, how: Decoding) -> np.ndarray:
        nonlocal decoding, most
        with lock:
            decoding += 1
            most = max(most, decoding)
        together.wait()
        time.sleep(0.02)  # if there were more, they would come in now
        with lock:
            decoding -= 1
        return decode_image(content, how)

    dataset = ImageFolder(numbered(tmp_path, 2 * wanted), 2, threads=threads)
    monkeypatch.setattr(images, "decode", meet)
    assert values(dataset) == list(range(2 * wanted))
    assert most == wanted


def test_only_the_rows_asked_for_are_read(tmp_path: Path, decodes: list[bytes]) -> None:
    dataset = ImageFolder(numbered(tmp_path, 9), 2, split=None)
    dataset.rows(np.array([7, 2]))
    assert {*decodes} == {(tmp_path / "a" / f"00{n}.png").read_bytes() for n in (2, 7)}
    assert len(decodes) == 2


def test_memory_decodes_each_once_and_hands_out_copies(
    tmp_path: Path, decodes: list[bytes]
) -> None:
    dataset = ImageFolder(numbered(tmp_path, 9), 2, cache="memory", threads=2)
    together(*[partial(everything, dataset)] * 4)
    rows = everything(dataset)
    rows["image"][:] = 99
    rows["label"][:] = 99
    assert values(dataset) == list(range(9))
    assert everything(dataset)["label"].tolist() == [0] * 9
    assert len(decodes) == 9
    everything(ImageFolder(tmp_path, 2))
    assert len(decodes) == 18


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
def test_worker_processes_receive_a_folder_with_an_empty_cache(
    tmp_path: Path, decodes: list[bytes], cache: str
) -> None:
    numbered(tmp_path / "data", 9)
    dataset = cached(tmp_path, cache)
    assert values(dataset) == list(range(9))
    content = pickle.dumps(dataset)
    assert values(pickle.loads(content)) == list(range(9))
    assert len(decodes) == (9 if cache == "disk" else 18)


def test_the_error_of_a_worker_process_is_that_of_a_broken_image(tmp_path: Path) -> None:
    dataset = ImageFolder(folder_of(tmp_path, {"a/x.png": b"?"}), 2)
    with pytest.raises(BrokenImageError) as found:
        dataset.rows(np.array([0]))
    copy = pickle.loads(pickle.dumps(found.value))
    assert type(copy) is BrokenImageError
    assert (str(copy), copy.reason) == (str(found.value), found.value.reason)


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_looking_for_broken_files_fills_the_cache(
    tmp_path: Path, decodes: list[bytes], cache: str
) -> None:
    numbered(tmp_path / "data", 30)
    dataset = cached(tmp_path, cache, broken="skip")
    assert len(decodes) == 30
    assert values(dataset) == list(range(30))
    assert len(decodes) == 30


def test_a_corrected_file_is_read_again(tmp_path: Path) -> None:
    dataset = ImageFolder(folder_of(tmp_path, {"a/x.png": b""}), 2, cache="memory")
    with pytest.raises(UserError, match="is empty"):
        everything(dataset)
    folder_of(tmp_path, {"a/x.png": plain(5)})
    assert values(dataset) == [5]


def test_where_one_picture_fails_the_others_are_not_decoded_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bytes] = []

    def slow(content: bytes, how: Decoding) -> np.ndarray:
        begun.append(content)
        time.sleep(0.05)
        return decode_image(content, how)

    folder = folder_of(numbered(tmp_path, 40), {"a/000.png": b"?"})
    monkeypatch.setattr(images, "decode", slow)
    for cache in ("none", "memory"):
        dataset = ImageFolder(folder, 2, threads=1, cache=cache)
        begun.clear()
        with pytest.raises(BrokenImageError):
            everything(dataset)
        assert dataset.rows(np.array([39]))["image"].max() == 39
        assert len(begun) <= 4  # the broken one, this one, and what had just been begun
    begun.clear()
    (folder / "a" / "000.png").unlink()
    (folder / "a" / "000.png").symlink_to("gone")
    with pytest.raises(StorageError):  # while all are checked
        ImageFolder(folder, 2, threads=1, broken="skip")
    ImageFolder(folder, 2, threads=1).rows(np.array([39]))
    assert len(begun) <= 3


def test_a_picture_that_another_thread_gave_up_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, waiting = threading.Event(), threading.Event()

    def decode(content: bytes, how: Decoding) -> np.ndarray:
        if content == b"?":
            assert held.wait(20)
        return decode_image(content, how)

    folder = folder_of(numbered(tmp_path, 9), {"a/000.png": b"?"})
    dataset = ImageFolder(folder, 2, threads=1, cache="memory")
    monkeypatch.setattr(images, "decode", decode)
    ask, found = dataset._decoded, list[Any]()

    def tell(file: str) -> Any:
        if file == "a/008.png" and threading.current_thread().name == "other":
            waiting.set()
        return ask(file)

    monkeypatch.setattr(dataset, "_decoded", tell)

    def fail() -> None:
        with pytest.raises(BrokenImageError):
            everything(dataset)

    def read_others() -> None:
        found.append(dataset.rows(np.arange(1, 9)))

    failing = threading.Thread(target=fail)
    failing.start()
    other = threading.Thread(target=read_others, name="other")
    other.start()
    assert waiting.wait(20)  # both wait for the same pictures, and none of them has been begun
    held.set()
    failing.join(20)
    other.join(20)
    assert found[0]["image"][:, 0, 0, 0].tolist() == list(range(1, 9))


LEAVING = """
import sys, threading, time
import numpy as np
from spmdtrain.data import image_decoding, images

def slow(content, how):
    print("decoding", flush=True)
    time.sleep(0.2)
    return np.zeros((*how.size, 3), np.uint8)

images.decode = slow
dataset = images.ImageFolder(sys.argv[1], 2, threads=1)
threading.Thread(target=lambda: dataset.rows(np.arange(40)), daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_process_that_ends_decodes_nothing_first(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", LEAVING, str(numbered(tmp_path, 40))]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=BOUND, check=True)
    assert 1 <= ended.stdout.count("decoding") <= 5


def on_disk(folder: Path, size: int | tuple[int, int] = 2) -> ImageFolder:
    return cached(folder, "disk", size)


def stored(folder: Path) -> list[Path]:
    """The files of the cache, those half written too."""
    return sorted(path for path in (folder / "new" / "c").rglob("*") if path.is_file())


def test_a_disk_cache_outlives_the_process(tmp_path: Path, decodes: list[bytes]) -> None:
    numbered(tmp_path / "data", 9)
    assert values(on_disk(tmp_path)) == list(range(9))
    assert len(decodes) == 9 and len(stored(tmp_path)) == 9
    assert values(on_disk(tmp_path)) == list(range(9))
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "data").symlink_to(tmp_path / "elsewhere")
    assert values(on_disk(tmp_path)) == list(range(9))  # names and places do not matter
    assert len(decodes) == 9


def test_another_picture_of_the_same_name_length_and_time_is_seen(tmp_path: Path) -> None:
    file = folder_of(tmp_path / "data", {"a/x.bmp": plain(1)}) / "a" / "x.bmp"
    assert values(on_disk(tmp_path)) == [1]
    before = file.stat()
    folder_of(tmp_path / "data", {"a/x.bmp": plain(2)})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert values(on_disk(tmp_path)) == [2]


def test_another_size_or_way_of_decoding_is_another_example(
    tmp_path: Path, decodes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "data", {"a/x.png": noise()})
    sizes = [(6, 6), (4, 9), (9, 4)]  # the last two with as many bytes as the first
    for size in sizes * 2:
        shape = everything(on_disk(tmp_path, size))["image"].shape[1:3]
        assert shape == size
    assert len(decodes) == 3
    changes = [
        (image_decoding, "_VERSION", -1),
        (image_decoding, "_libraries", lambda: "pillow=99"),
        (ImageFile, "LOAD_TRUNCATED_IMAGES", True),
    ]
    for number, change in enumerate(changes, 4):
        monkeypatch.setattr(*change)
        everything(on_disk(tmp_path, (6, 6)))
        everything(on_disk(tmp_path, (6, 6)))
        assert len(decodes) == number


def test_the_libraries_that_decode_are_part_of_the_recipe() -> None:
    import PIL

    assert f"pillow={PIL.__version__} jpeg=" in Decoding((2, 2)).recipe
    assert "None" not in Decoding((2, 2)).recipe


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("corruption", [flip, lambda content: content[:-1], lambda content: b""])
def test_a_corrupted_file_of_the_cache_is_made_again(
    tmp_path: Path, decodes: list[bytes], corruption: Callable[[bytes], bytes]
) -> None:
    folder_of(tmp_path / "data", {"a/x.png": plain(5)})
    everything(on_disk(tmp_path))
    (file,) = stored(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(corruption(whole))
    assert everything(on_disk(tmp_path))["image"].tolist() == [plain(5).tolist()]
    assert file.read_bytes() == whole and len(decodes) == 2


def test_a_file_of_the_cache_under_another_name_is_not_believed(tmp_path: Path) -> None:
    numbered(tmp_path / "data", 2)
    everything(on_disk(tmp_path))
    one, other = stored(tmp_path)
    shutil.copy(one, other)
    assert values(on_disk(tmp_path)) == [0, 1]


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from spmdtrain.data.images import ImageFolder

whole = Path.write_bytes

def half(path, content):
    whole(path, content[: len(content) // 2])
    os.kill(os.getpid(), 9)

Path.write_bytes = half
ImageFolder(sys.argv[1], 2, cache="disk", cache_dir=sys.argv[2]).rows(np.arange(1))
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_nothing_to_be_read(tmp_path: Path) -> None:
    folder_of(tmp_path / "data", {"a/x.png": plain(5)})
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "data"), str(tmp_path / "new" / "c")]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=BOUND)
    assert ended.returncode == -9, ended.stderr
    (half,) = stored(tmp_path)
    assert half.name.startswith(".") and half.stat().st_size == (32 + 12) // 2
    assert values(on_disk(tmp_path)) == [5]
    assert len(stored(tmp_path)) == 2


def test_two_that_fill_a_cache_at_once_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "data", {"a/x.png": plain(5)})
    both = threading.Barrier(2, timeout=20)
    whole, written = Path.write_bytes, set[Path]()

    def meet(path: Path, content: Any) -> int:
        written.add(path)
        whole(path, content[:20])
        both.wait()  # each has written half
        return whole(path, content)

    monkeypatch.setattr(Path, "write_bytes", meet)
    together(*[lambda: everything(on_disk(tmp_path))] * 2)
    assert not both.broken
    assert len(written) == 2
    assert len(stored(tmp_path)) == 1
    monkeypatch.setattr(images, "decode", None)  # existing files are used
    assert values(on_disk(tmp_path)) == [5]


def test_a_cache_may_be_deleted_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(tmp_path / "data", 5)
    dataset = on_disk(tmp_path)
    everything(dataset)
    shutil.rmtree(tmp_path / "new")
    assert values(dataset) == list(range(5)) and len(stored(tmp_path)) == 5
    shutil.rmtree(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: None)  # deleted right after it was made
        assert values(dataset) == list(range(5)) and stored(tmp_path) == []


def test_a_full_disk_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(tmp_path / "data", 1)
    dataset = on_disk(tmp_path)

    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    there = re.escape(f"image cache in {tmp_path / 'new' / 'c'}: ")
    advice = r"free some space \(this folder may be deleted at any time\), or use"
    with pytest.raises(StorageError, match=f"{there}.*No space left.*{advice}"):
        everything(dataset)
    assert stored(tmp_path) == []


@pytest.mark.parametrize("kind", ["above", "file", "link"])
def test_a_cache_that_cannot_be_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    numbered(tmp_path / "data", 1)
    place = tmp_path / "new" / "c"
    if kind == "above":
        (tmp_path / "new").touch()
        expected = r"cache_dir: .*Not a directory.*: give a folder"
    else:
        (tmp_path / "new").mkdir()
        place.touch() if kind == "file" else place.symlink_to("gone")
        what = "a file" if kind == "file" else "a broken link"
        expected = rf"cache_dir: {re.escape(str(place))} is {what}: give a folder"
    with pytest.raises(UserError, match=expected):
        on_disk(tmp_path)


def test_what_does_not_belong_into_a_cache_is_named_and_may_be_deleted(tmp_path: Path) -> None:
    numbered(tmp_path / "data", 1)
    everything(on_disk(tmp_path))
    (entry,) = stored(tmp_path)
    advice = re.escape(f"{tmp_path / 'new' / 'c'}: ") + ".*this folder may be deleted"
    entry.unlink()
    entry.mkdir()
    with pytest.raises(StorageError, match=advice):
        everything(on_disk(tmp_path))
    shutil.rmtree(entry.parent)
    entry.parent.touch()
    with pytest.raises(StorageError, match=advice):
        everything(on_disk(tmp_path))
