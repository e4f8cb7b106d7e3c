"""The files of a source: which are found, and what happens to a run if they vanish or change."""

import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import grain
import jax
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx
from PIL import Image
from stream_helpers import tf_record

from spmdtrain import (
    ImageFolder,
    JsonLinesSource,
    Mixture,
    Packed,
    Subset,
    TextSource,
    TokenDocuments,
    Trainer,
)
from spmdtrain.data.sources.array_record import ArrayRecordSource
from spmdtrain.data.sources.files import find_files
from spmdtrain.data.sources.parquet import ParquetSource
from spmdtrain.data.sources.tf_record import TFRecordSource
from spmdtrain.data.sources.token_files import TokenFile
from spmdtrain.data.sources.web_dataset import WebDatasetSource
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError, UserError
from spmdtrain.train.callbacks import CallbackContext
from spmdtrain.tree import named_leaves


def make(folder: Path) -> None:
    for name in ("b.txt", "a/c.TXT", "a/.hidden.txt", "_tmp/d.txt", "a/e.csv", "[1].txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(folder: Path, given: Any) -> list[str]:
    found = find_files(given, (".txt",), "text files")
    assert all(file.size == os.path.getsize(file.path) for file in found)
    return [os.path.relpath(file.path, folder) for file in found]


def test_folders_patterns_and_lists_have_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    assert names(tmp_path, tmp_path) == ["[1].txt", "a/c.TXT", "b.txt"]
    assert names(tmp_path, str(tmp_path / "*.txt")) == ["[1].txt", "b.txt"]
    assert names(tmp_path, f"{tmp_path}/**/*.csv") == ["a/e.csv"]
    assert names(tmp_path, [tmp_path / "b.txt", f"{tmp_path}/a"]) == ["b.txt", "a/c.TXT"]
    assert names(tmp_path, tmp_path / "[1].txt") == ["[1].txt"]
    assert names(tmp_path, tmp_path / "a" / "e.csv") == ["a/e.csv"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(tmp_path, "~/b.txt") == ["b.txt"]


def test_a_folder_is_searched_through_links_and_other_names_are_not_examined(
    tmp_path: Path,
) -> None:
    folder, linked = tmp_path / "data", tmp_path / "linked"
    for path in (folder / "b.txt", linked / "deep" / "a.txt"):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    (folder / "sub").symlink_to(linked)
    (linked / "loop").symlink_to(folder)
    (folder / "latest").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    assert names(folder, folder) == ["b.txt", "sub/deep/a.txt"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", "{}/none: no such file"),
        ("*.pdf", "{}/*.pdf: no file matches this pattern"),
        ("empty", "{}/empty: the folder holds no text files (.txt)"),
        ("pipe", "{}/pipe: not a regular file"),
        ("broken", "{}/broken: no such file"),
        (["b.txt", "b.txt"], "{}/b.txt: given twice, so its examples would be read twice an epoch"),
        (
            ["b.txt", "a/../b.txt"],
            "{}/a/../b.txt: given twice, so its examples would be read twice an epoch",
        ),
        ([], "text files: the list of files is empty: give at least one"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, given: Any, expected: str) -> None:
    make(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    files = f"{tmp_path}/{given}" if isinstance(given, str) else [tmp_path / name for name in given]
    with pytest.raises(UserError) as caught:
        find_files(files, (".txt",), "text files")
    assert str(caught.value) == expected.format(tmp_path)


def test_a_path_of_another_type_and_a_file_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"text files: 3 is not a path: .* such as data/\*\.txt"):
        find_files([3], (".txt",), "text files")  # type: ignore[list-item]
    for read in (ParquetSource, ArrayRecordSource, partial(TokenFile, length=4)):
        with pytest.raises(UserError, match="None is not a path: give a file"):
            read(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'' is not a path"):
        find_files("", (".txt",), "text files")
    (tmp_path / "a.txt").write_text("a")
    (file,) = find_files(tmp_path / "a.txt", (".txt",), "text files")
    with file.open() as content:
        assert content.read() == b"a"
    (tmp_path / "a.txt").unlink()
    with pytest.raises(StorageError, match=r"a\.txt: the file has been removed since the run"):
        file.open()


# -- files that vanish in mid-epoch ----------------------------------------------------------------


class Mean(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        return self.linear(image.reshape(image.shape[0], -1) / 255)[:, 0]


def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"loss": (model(batch["image"]) - batch["label"]) ** 2}


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(1, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x[:, None])[:, 0]


def line(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"loss": (model(batch["x"].astype(float) / 160) - 1) ** 2}


def fit(folder: Path, workdir: Path, **callbacks: Any) -> dict[str, np.ndarray]:
    return train(ImageFolder(folder, 2), workdir, Mean, objective, **callbacks)


def train(
    data: Any,
    workdir: Path,
    model: Any,
    objective: Any,
    options: Mapping[str, Any] = MappingProxyType({}),
    **callbacks: Any,
) -> dict[str, np.ndarray]:
    trainer = Trainer(
        model=model,
        objective=objective,
        optimizer=optax.adam(0.1),
        workdir=str(workdir),
        global_batch_size=8,
        checkpoint_every_steps=2,
        terminal=Terminal(quiet=True),
        callbacks=callbacks,
        **options,
    )
    trainer.fit(data, steps=30)
    assert trainer.state is not None
    return {name: np.asarray(leaf) for name, leaf in named_leaves(trainer.state.params).items()}


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["moved", pytest.param("cut short", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_files_that_vanish_in_mid_epoch_are_named_and_the_run_resumes(
    what: str, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (160, 4, 4, 3)).astype(np.uint8)
    for number, picture in enumerate(pixels):
        place = tmp_path / "data" / "ab"[number % 2] / f"{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place)
    whole = fit(tmp_path / "data", tmp_path / "whole")

    def vanish(event: CallbackContext) -> None:
        if event.step == 6:  # of 20 an epoch
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
            for path in (tmp_path / "data").rglob("*.png"):
                if what == "moved":
                    path.unlink()
                else:
                    path.write_bytes(b"")

    with pytest.raises((StorageError, ValueError), match=r"data/[ab]/\d+\.png: ") as caught:
        fit(tmp_path / "data", tmp_path / "run", step=vanish)
    assert isinstance(caught.value, StorageError) == (what == "moved")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed" and ".png" in status["reason"]
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "copy").rename(tmp_path / "data")
    resumed = fit(tmp_path / "data", tmp_path / "run")
    for name, value in whole.items():
        assert resumed[name].tobytes() == value.tobytes(), name


def parquet(path: Path, cached: int = 1) -> Any:
    pq.write_table(pa.table({"x": np.arange(160)}), path, row_group_size=4)
    return ParquetSource(path, cached_row_groups=cached)


def json_lines(path: Path) -> Any:
    path.write_text("\n".join(f'{{"x": {x}}}' for x in range(160)))
    return JsonLinesSource(path)


def array_record(path: Path) -> Any:
    noise = np.random.default_rng(0)  # so that records do not compress
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for x in range(160):
        writer.write(np.int64(x).tobytes() + noise.bytes(1000))
    writer.close()
    return ArrayRecordSource(path, lambda record: {"x": np.frombuffer(record[:8], np.int64)[0]})


@pytest.mark.parametrize(
    ("read", "spoil", "error", "expected"),
    [
        (parquet, os.unlink, StorageError, "removed since"),
        pytest.param(
            *(parquet, lambda path: os.truncate(path, 500), UserError, "changed since"),
            marks=pytest.mark.nightly,
        ),
        (array_record, lambda path: os.truncate(path, 70_000), UserError, "changed since"),
        (json_lines, lambda path: os.truncate(path, 0), UserError, "truncated since"),
    ],
    ids=["parquet removed", "parquet truncated", "ArrayRecord truncated", "JSON Lines truncated"],
)
@pytest.mark.slow
def test_a_shard_that_fails_in_mid_epoch_is_named_and_the_run_resumes(
    read: Callable[[Path], Any],
    spoil: Callable[[Path], Any],
    error: type[Exception],
    expected: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    whole = train(read(path), tmp_path / "whole", Line, line)

    def fail(event: CallbackContext) -> None:
        if event.step == 6:  # of 20 an epoch
            shutil.copy2(path, tmp_path / "copy")
            spoil(path)

    with pytest.raises(error, match=f"{path}: the file has (been )?{expected}"):
        train(read(path), tmp_path / "run", Line, line, step=fail)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed" and str(path) in status["reason"]
    shutil.copy2(tmp_path / "copy", path)
    resumed = train(read(path), tmp_path / "run", Line, line)
    for name, value in whole.items():
        assert resumed[name].tobytes() == value.tobytes(), name


# -- files that change while they are read ---------------------------------------------------------


def text(path: Path) -> Any:
    return JsonLinesSource(path, cache_dir=path.parent / "cache")


def copied(path: Path) -> Any:
    path.write_bytes(gzip.compress(path.read_bytes()))
    return text(path)


def in_blocks(path: Path) -> Any:
    with mock.patch("spmdtrain.data.sources.indexed_parts.LARGE", 0):  # as from 1 GiB on
        return text(path)


def tokens(path: Path) -> Any:
    return TokenFile(path, 8)


def documents(path: Path) -> Any:
    return Packed(TokenDocuments(path, int.from_bytes(b'{"', "little")), 16)


def row_groups(path: Path) -> Any:
    return parquet(path, 16)


def tf_records(path: Path) -> Any:
    path.write_bytes(b"".join(tf_record(f"{x}".encode()) for x in range(160)))
    return TFRecordSource(
        path, decode=lambda content: {"x": int(content)}, cache_dir=path.parent / "cache"
    )


def samples(path: Path) -> Any:
    with tarfile.open(path, "w") as tar:
        for x in range(160):
            member = tarfile.TarInfo(f"{x}.cls")
            member.size = len(f"{x}")
            tar.addfile(member, io.BytesIO(f"{x}".encode()))
    return WebDatasetSource(path, {"x": "cls"}, cache_dir=path.parent / "cache")


def mapped(path: Path) -> Any:
    np.save(path, np.arange(160))
    os.rename(f"{path}.npy", path)
    return (np.load(path, mmap_mode="r"),)


def rewrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20:-10] = (x ^ 1 for x in content[-20:-10])
    with path.open("r+b") as file:
        file.write(content)


def rewrite_and_set_the_time(path: Path) -> None:
    before = path.stat()
    rewrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"{}")


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


CHANGED = "changed since"
_READERS = (
    *(text, copied, in_blocks, tokens, documents, row_groups, array_record, tf_records),
    *(samples, mapped),
)


@pytest.mark.parametrize("read", _READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        (rewrite, UserError, CHANGED),
        (rewrite_and_set_the_time, UserError, CHANGED),
        (append, UserError, CHANGED),
        (replace, UserError, CHANGED),
        (os.unlink, StorageError, "removed since"),
    ],
)
def test_a_file_is_compared_whenever_it_is_read(
    read: Callable[[Path], Any],
    change: Callable[[Path], Any],
    error: type[Exception],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = tmp_path / "data"
    path.write_bytes(b"".join(b'{"x": %3d}\n' % x for x in range(160)))
    dataset = Subset(read(path), np.arange(1))  # also of a dataset in another one
    dataset.rows(np.array([0]))
    change(path)
    with pytest.raises(error, match=f"{path}: the file has (been )?{expected}"):
        dataset.rows(np.array([0]))


def rename(path: Path) -> None:
    path.rename(path.with_name("other")).rename(path)


def link_and_permit(path: Path) -> None:
    os.link(path, path.with_name("backup"))
    path.chmod(0o600)


def set_the_time_of_access(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns))


@pytest.mark.parametrize("read", _READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("change", [rename, link_and_permit, set_the_time_of_access])
def test_a_file_whose_content_is_the_same_is_read_on(
    read: Callable[[Path], Any],
    change: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = tmp_path / "data"
    path.write_bytes(b"".join(b'{"x": %3d}\n' % x for x in range(160)))
    dataset = Subset(read(path), np.arange(1))
    expected = jax.tree.leaves(dataset.rows(np.array([0])))
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:  # the clock of a file system is coarse
        change(path)
        path.with_name("backup").unlink(missing_ok=True)
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(dataset.rows(np.array([0]))), expected
    )
    rewrite_and_set_the_time(path)  # also after the comparison of its content
    with pytest.raises(UserError, match=f"{path}: the file has {CHANGED}.*other content"):
        dataset.rows(np.array([0]))


@pytest.mark.parametrize("place", [0, 1_300_000, 2_700_000])
def test_parts_of_a_large_file_are_compared(place: int, tmp_path: Path) -> None:
    path = tmp_path / "data"
    np.arange(800_000, dtype=np.uint32).tofile(path)
    before = path.stat()
    dataset = TokenFile(path, 8, dtype="uint32")
    dataset.rows(np.array([0]))
    path.chmod(0o600)
    dataset.rows(np.array([0]))
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes(500_000))  # more than between two parts
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=f"{path}: the file has {CHANGED}.*other content"):
        dataset.rows(np.array([0]))


def test_an_image_is_compared_with_what_was_read_before(tmp_path: Path) -> None:
    for name in ("a", "a-b"):  # whose paths are in another order than the classes
        for number in range(3):
            path = tmp_path / name / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(path)
    (tmp_path / "a" / "broken.png").write_bytes(b"")
    dataset = ImageFolder(tmp_path, 2, broken="skip")
    Image.fromarray(np.full((2, 2, 3), 9, np.uint8)).save(path)
    assert dataset.rows(np.arange(5))["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(UserError, match=f"{path}: the image has {CHANGED}"):
        dataset.rows(np.arange(6))


def as_mixture(path: Path) -> Any:
    return Mixture({"a": (text(path), 0.5), "b": ({"x": np.arange(160)}, 0.5)})


def as_stream(path: Path) -> Any:
    return grain.MapDataset.source(text(path)).to_iter_dataset(grain.ReadOptions(1, 1))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("read", "options"),
    [(text, {}), (text, {"data_workers": 1}), (as_mixture, {}), (as_stream, {})],
    ids=["records", "worker", "mixture", "stream"],
)
@pytest.mark.slow
def test_a_run_ends_when_a_file_is_rewritten_in_place(
    read: Callable[[Path], Any], options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"".join(b'{"x": %3d}\n' % x for x in range(160)))

    def change(event: CallbackContext) -> None:
        if event.step == 6:
            with path.open("r+b") as file:
                file.write(b'{"x": 999}')

    with pytest.raises(UserError, match=f"{path}: the file has {CHANGED}"):
        train(read(path), tmp_path / "run", Line, line, options, step=change)


@pytest.mark.parametrize("separator", ["\n", "x"])
def test_a_corrupted_copy_is_removed_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "a.txt.gz"
    lines = [f"{number:07}" for number in range(40_000)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert TextSource(path)[39_000] == {"text": lines[39_000]}
    source = TextSource(path, separator)  # the same copy
    expected = [row["text"] for row in source.__getitems__(range(len(source)))]
    (copy,) = (tmp_path / "spmdtrain" / "data").glob("text-*")
    before = copy.stat()
    with copy.open("r+b") as file:
        file.seek(8 * 39_000)
        file.write(b"1")
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    corrupted = TextSource(path, separator)
    if separator == "\n":
        assert corrupted[0] == {"text": lines[0]}  # of another part
    with pytest.raises(StorageError, match=f"{copy}: this copy in the cache was corrupted"):
        corrupted.__getitems__(range(len(corrupted)))
    again = TextSource(path, separator)
    assert [row["text"] for row in again.__getitems__(range(len(again)))] == expected
