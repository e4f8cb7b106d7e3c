"""The files of a source: which are found, in which order, and which are refused."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spmdtrain.data.sources.array_record import ArrayRecordSource
from spmdtrain.data.sources.files import find_files
from spmdtrain.data.sources.parquet import ParquetSource
from spmdtrain.data.sources.token_files import TokenFile
from spmdtrain.errors import StorageError, UserError


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
