"""Text and JSON Lines files as sources: the example at each index, the cache, files that fail."""

import gzip
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from fake_gcs import Stored, fake_gcs
from helpers import BOUND, environment
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.data.sources.text_files import (
    JsonLinesSource,
    LineScanner,
    SeparatorScanner,
    TextSource,
)
from spmdtrain.errors import StorageError, UserError

END = "<|end|>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spmdtrain" / "data"


def examples(text: str, separator: str) -> list[str]:
    """The definition of the examples of a text."""
    if separator == "\n":
        parts = re.split("\n", text)
    elif separator == "\n\n":
        parts = re.split("\n(?:\r?\n)+", re.sub("^(?:\r?\n)+", "", text))
    else:
        return [part.strip("\r\n") for part in text.split(separator) if part.strip()]
    return [part.rstrip("\r\n") for part in parts if part not in ("", "\r")]


def texts(source: TextSource) -> list[str]:
    return [source[index]["text"] for index in range(len(source))]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["a", "é", " ", "\n", "\r\n", "\n\n", END, END[:4], "<", ">", "bcd"]),
        max_size=14,
    ),
    separator=st.sampled_from(["\n", "\n\n", END]),
    piece=st.integers(1, 9),
)
def test_scanners_find_the_examples_however_the_text_is_cut_into_pieces(
    parts: list[str], separator: str, piece: int
) -> None:
    text = "".join(parts).encode()
    paragraphs = separator == "\n\n"
    scanner: Any = LineScanner(paragraphs=paragraphs)
    if separator == END:
        scanner = SeparatorScanner(END.encode())
    found = [scanner.feed(text[i : i + piece]) for i in range(0, len(text), piece)]
    starts = np.concatenate([*found, scanner.finish()]).tolist()
    assert len(starts) == len(examples(text.decode(), separator))
    for start, stop in itertools.pairwise([*starts, len(text)]):
        assert text[start:stop].strip(b"\r\n")
        if separator == "\n":
            assert b"\n" not in text[start:stop].strip(b"\r\n")


@pytest.mark.parametrize("separator", ["\n", "\n\n", END])
@pytest.mark.parametrize("large", [False, True])
def test_the_example_at_an_index_is_that_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, large: bool
) -> None:
    if large:
        monkeypatch.setattr("spmdtrain.data.sources.indexed_parts.LARGE", 1)
        monkeypatch.setattr("spmdtrain.data.sources.indexed_parts.BLOCK", 30)
    random, expected = np.random.default_rng(0), []
    pieces = ["one", "two words", "drei ä", "\n", "\r\n", "\n\n", END, "\t", "4"]
    (tmp_path / "data").mkdir()
    for number, kind in enumerate(["txt", "txt.gz", "txt.zst", "txt"]):
        text = "".join(random.choice(pieces, 60 if number < 3 else 0))
        content = text.encode()
        if kind == "txt.gz":
            content = gzip.compress(content[:100]) + gzip.compress(content[100:])
        elif kind == "txt.zst":
            content = zstandard.compress(content[:100]) + zstandard.compress(content[100:])
        (tmp_path / "data" / f"{number}.{kind}").write_bytes(content)
        expected += examples(text, separator)
    source = TextSource(tmp_path / "data", separator)
    assert texts(source) == expected and len(expected) > 20
    indices = [*random.integers(0, len(source), 30).tolist(), *range(len(source)), 3, 2, 2]
    assert source.__getitems__([]) == []
    again = pickle.loads(pickle.dumps(source))
    assert [row["text"] for row in again.__getitems__(indices)] == [expected[i] for i in indices]
    assert again.fingerprint() == source.fingerprint()
    with pytest.raises(IndexError):
        source[len(source)]
    if large:
        source.reserve_blocks(99)
        assert source.blocks is not None
        assert source.blocks[0] == 0 and source.blocks[-1] == len(source) > len(source.blocks) > 8
    else:
        assert source.blocks is None


def test_the_index_is_kept_and_made_again_if_the_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert texts(TextSource(path)) == ["one", "two"]
    kept = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert sorted(name.partition("-")[0] for name in kept) == ["offsets", "text"]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert texts(TextSource(path)) == ["one", "two"]
    assert kept == {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert texts(TextSource(path, "w")) == ["one\nt", "o"]  # the same copy, other positions
    assert len([file for file in cache.iterdir() if file.name.startswith("text-")]) == 1
    for file in cache.iterdir():  # a truncated index is not used
        if file.name in kept and file.name.startswith("offsets-"):
            file.write_bytes(file.read_bytes()[:-8])
    assert texts(TextSource(path)) == ["one", "two"]
    path.write_bytes(gzip.compress(b"three"))
    assert texts(TextSource(path)) == ["three"]
    other = TextSource(path, cache_dir=tmp_path / "other")
    assert texts(other) == ["three"] and len([*(tmp_path / "other").iterdir()]) == 2


@pytest.mark.parametrize("name", ["text", "offsets"])
@pytest.mark.parametrize("how", ["overwritten", "truncated", "other"])
def test_a_corrupted_cache_is_not_used(tmp_path: Path, cache: Path, name: str, how: str) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\nsix\n"))
    expected = texts(TextSource(path))
    (file,) = cache.glob(f"{name}-*")
    content = bytearray(file.read_bytes())
    if how == "overwritten":
        content[8:9] = b"\x05"
        file.write_bytes(content)
    elif how == "truncated":
        file.write_bytes(content[:-1])
    else:
        file.write_bytes(bytes(len(content)))
    assert texts(TextSource(path)) == expected == ["one", "two", "six"]


def test_processes_that_start_together_index_a_file_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"line\n" * 100_000))
    found: list[int] = []
    opened: list[str] = []
    scan = LineScanner.finish

    def finish(self: LineScanner) -> np.ndarray:
        opened.append("scan")
        return scan(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LineScanner, "finish", finish)
        threads = [
            threading.Thread(target=lambda: found.append(len(TextSource(path)))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [100_000] * 4 and opened == ["scan"]
    assert not [file for file in cache.iterdir() if file.name.startswith(".")]


def test_records_of_json_lines(tmp_path: Path) -> None:
    records = [
        {"text": "a\nb é", "n": 3, "tokens": [1, 2, 3], "x": [[0.5, 1], [2, 3]], "flag": True},
        {"text": "", "n": None, "tokens": [], "x": [[1], [2, 3]], "flag": ["a", "b"]},
    ]
    lines = "\ufeff" + "\r\n\n".join(json.dumps(record) for record in records)
    (tmp_path / "a.jsonl").write_text(lines)
    source = JsonLinesSource(tmp_path)
    first, second = source.__getitems__([0, 1])
    assert first["tokens"].dtype == np.int64 and first["x"].dtype == np.float64
    assert first | {"tokens": first["tokens"].tolist(), "x": first["x"].tolist()} == records[0]
    assert second | {"tokens": second["tokens"].tolist()} == records[1]
    assert JsonLinesSource(tmp_path / "a.jsonl", ["text"])[0] == {"text": "a\nb é"}


# -- files that fail -------------------------------------------------------------------------------


def refusal(read: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)"),
        (b'{"text": "\xff"}', "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 10"),
        (b"[1, 2]", "holds list, not an object with fields: each line must be as"),
        (b'{"txt": "a"}', "there is no field 'text'. Did you mean 'txt'?"),
        (b"[" * 100_000, "not JSON: "),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 5 + b"\n\r\n" + line + b'\n{"text": "b"}\n')
    source = JsonLinesSource(tmp_path, ["text"])
    assert len(source) == 7 and source[6] == {"text": "b"}
    assert refusal(lambda: source[5]).startswith(f"{path}: line 8: {expected}")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_that_are_truncated_or_corrupted_are_named(
    tmp_path: Path, cache: Path, suffix: str
) -> None:
    text = os.urandom(3000).hex().encode()
    compressor = zstandard.ZstdCompressor(write_checksum=True)  # as the command `zstd` does
    content = gzip.compress(text) if suffix == "gz" else compressor.compress(text)
    path = tmp_path / f"a.txt.{suffix}"
    for wrong in (content[:-5], content[:500], content[:200] + b"\0" * 60 + content[260:], b"text"):
        path.write_bytes(wrong)
        message = refusal(lambda: TextSource(path))
        assert message.startswith(f"{path}: cannot be decompressed: "), message
        assert not [file for file in cache.iterdir() if file.suffix != ".lock"]


@pytest.mark.slow
def test_memory_is_bounded_however_much_a_file_decompresses_to(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a\n" * 3_000_000))
    (tmp_path / "b.txt.zst").write_bytes(zstandard.compress(b"b" * 500_000_000))
    code = f"""
import resource
import zstandard
from spmdtrain.data.sources.text_files import TextSource
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(TextSource({str(tmp_path)!r})) == 3_000_001
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
        timeout=BOUND,
    )
    assert int(ended.stdout) < 250_000  # kB


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda path: TextSource(path, ""), "separator is ''"),
        (lambda path: TextSource(path / "empty.txt"), "empty.txt: no text in it"),
        (lambda path: JsonLinesSource(path / "empty.txt", "text"), "fields is 'text'"),
        (lambda path: TextSource(path, cache_dir="gs://b/c"), "cache_dir is 'gs://b/c'"),
        (lambda path: TextSource(path, cache_dir=path / "empty.txt"), "empty.txt is not a folder"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, read: Any, expected: str) -> None:
    (tmp_path / "empty.txt").write_bytes(b"\n\r\n")
    assert expected in refusal(lambda: read(tmp_path))


def test_a_file_that_changes_or_is_removed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    source, other = TextSource(path), TextSource(path)
    assert source[0] == {"text": "one"}
    with path.open("r+") as file:
        file.truncate(5)
    assert refusal(lambda: source[1]) == (
        f"{path}: the file has been truncated since the run started: 8 bytes at the start, 5 now"
    )
    assert "has changed since the run started" in refusal(lambda: other[0])
    path.unlink()
    assert "has been removed" in refusal(lambda: other[0], StorageError)


# -- in a bucket -----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_files_in_a_bucket_are_copied_once(cache: Path) -> None:
    code = """
from spmdtrain.data.sources.text_files import JsonLinesSource
source = JsonLinesSource("gs://bucket/data")
print(source.__getitems__([2, 0]), [len(source), source.fingerprint() != ""])
"""
    printed = []
    with fake_gcs() as storage:
        storage.objects["data/a.jsonl"] = Stored(b'{"n": 1}\n{"n": 2}\n', 1)
        storage.objects["data/b.jsonl.gz"] = Stored(gzip.compress(b'{"n": 3}'), 2)
        for _ in range(2):
            printed.append(
                subprocess.run(
                    [sys.executable, "-c", code],
                    env=environment() | storage.environment() | {"XDG_CACHE_HOME": str(cache)},
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=BOUND,
                ).stdout
            )
    assert printed == ["[{'n': 3}, {'n': 1}] [3, True]\n"] * 2
    kept = sorted(file.name.partition("-")[0] for file in (cache / "spmdtrain" / "data").iterdir())
    assert kept == ["offsets", "offsets", "text", "text"]
