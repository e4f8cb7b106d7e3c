"""Files of tokens: windows and documents at each index, and files that are refused."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.checkpoints.weights.source import open_weights
from spmdtrain.data.datasets import as_dataset, fingerprint
from spmdtrain.data.sources.token_files import TokenDocuments, TokenFile
from spmdtrain.data.text import Packed, document_lengths
from spmdtrain.errors import StorageError, UserError

LLM_C = {"<u2": (20240520, 1), "<u4": (20240801, 7)}


def llm_c(tokens: np.ndarray, count: int | None = None) -> bytes:
    magic, version = LLM_C[tokens.dtype.str]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


def write(path: Path, tokens: Any, dtype: str = "<u2", kind: str = "raw") -> Path:
    array = np.asarray(tokens, dtype)
    if kind == "npy":
        np.save(path, array)
    else:
        path.write_bytes(array.tobytes() if kind == "raw" else llm_c(array))
    return path


def windows(tokens: list[int], length: int, stride: int) -> list[tuple[list[int], list[float]]]:
    """The definition: windows from 0, stride apart, until one reaches the end."""
    found = []
    for start in range(0, len(tokens) - 1, stride):
        part = tokens[start : start + length + 1]
        missing = length + 1 - len(part)
        found.append((part + [0] * missing, [1.0] * (len(part) - 1) + [0.0] * missing))
        if start + length + 1 >= len(tokens):
            break
    return found


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    files=st.lists(st.lists(st.integers(1, 60_000), max_size=20), min_size=1, max_size=3),
    length=st.integers(1, 8),
    stride=st.integers(1, 8),
    kind=st.sampled_from(["raw", "npy", "llm.c"]),
    dtype=st.sampled_from(["<u2", "<u4"]),
    data=st.data(),
)
def test_the_window_at_an_index_is_that_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[int]],
    length: int,
    stride: int,
    kind: str,
    dtype: str,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    for number, tokens in enumerate(files):
        write(folder / f"{number}.{'npy' if kind == 'npy' else 'bin'}", tokens, dtype, kind)
    expected = [each for tokens in files for each in windows(tokens, length, stride)]

    def read() -> TokenFile:
        return TokenFile(folder, length, stride=stride, dtype=dtype)

    if not expected:
        with pytest.raises(UserError, match="fewer than two tokens"):
            read()
        return
    dataset = as_dataset(read())
    assert len(dataset) == len(expected)
    indices = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=9))
    rows = dataset.rows(np.array(indices))
    assert rows["tokens"].dtype == np.int32 and rows["weights"].dtype == np.float32
    assert rows["tokens"].tolist() == [expected[index][0] for index in indices]
    assert rows["weights"].tolist() == [expected[index][1] for index in indices]


def test_by_default_each_token_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", range(1000))
    dataset = TokenFile(path, 64)
    rows = dataset.rows(np.arange(len(dataset)))
    targets = rows["tokens"][:, 1:][rows["weights"] > 0]
    assert targets.tolist() == list(range(1, 1000))
    assert fingerprint(pickle.loads(pickle.dumps(dataset))) == fingerprint(dataset)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(files=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=3))
def test_documents_end_with_their_token_or_their_file(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    for number, tokens in enumerate(files):
        write(folder / f"{number}.bin", tokens)
    expected = [
        [*map(int, part.strip())]
        for tokens in files
        for part in "".join(map(str, tokens)).replace("3", "3 ").split()
    ]
    if not expected:
        with pytest.raises(UserError, match=r"0\.bin: no tokens"):
            TokenDocuments(folder, 3)
        return
    documents = TokenDocuments(folder, 3)
    assert [documents[index].tolist() for index in range(len(documents))] == expected
    assert documents[0].dtype == np.int32
    assert document_lengths(documents).tolist() == [len(tokens) for tokens in expected]
    with pytest.raises(IndexError):
        documents[len(expected)]


def test_documents_are_found_across_the_pieces_of_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50, 5000)
    path = write(tmp_path / "a.bin", tokens)
    whole = TokenDocuments(path, 7)
    monkeypatch.setattr("spmdtrain.data.sources.token_files.PIECE", 17)
    parts = TokenDocuments(path, 7)
    assert parts.lengths().tolist() == whole.lengths().tolist()
    assert np.concatenate([*map(parts.__getitem__, range(len(parts)))]).tolist() == tokens.tolist()
    rows = Packed(parts, 128).rows(np.arange(5))
    assert set(rows) == {"tokens", "segments", "positions", "weights"}


# -- what is refused -------------------------------------------------------------------------------


def refusal(read: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"length": 0}, "length is 0: it must be at least 1"),
        ({"length": 2.5}, "length is 2.5"),
        ({"stride": 0}, "stride is 0"),
        ({"dtype": "float32"}, "dtype is 'float32': it must be a type of integers"),
        ({"dtype": "u17"}, "dtype is 'u17'"),
        ({"files": "gs://bucket/a.bin"}, "gs://bucket/a.bin: token files are read at random"),
        ({"dtype": "uint32"}, "42 bytes are not a whole number of uint32 tokens"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {"files": write(tmp_path / "a.bin", range(21)), "length": 4} | options
    assert expected in refusal(lambda: TokenFile(**given))


def test_files_whose_size_contradicts_their_header_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(llm_c(np.arange(500, dtype="<u2"), count=501))
    assert refusal(lambda: TokenFile(path, 4)) == (
        f"{path}: the header says 501 tokens of uint16, which are 2,026 bytes, but the file has "
        "2,024: truncated or corrupted"
    )
    write(path, range(500), kind="llm.c")
    assert "its header says uint16, but dtype is uint32: leave" in refusal(
        lambda: TokenFile(path, 4, dtype="uint32")
    )
    array = write(tmp_path / "a.npy", range(500), kind="npy")
    array.write_bytes(array.read_bytes()[:-2])
    assert "says uint16[500], which are 1,128 bytes, but the file has 1,126: truncated" in refusal(
        lambda: TokenFile(array, 4)
    )
    array.write_bytes(b"text")
    assert f"{array}: not a .npy file: " in refusal(lambda: TokenFile(array, 4))
    array.write_bytes(b"\x93NUMPY\x09\x00")
    assert "not a .npy file: version 9.0 is not known" in refusal(lambda: TokenFile(array, 4))
    np.save(array, np.zeros((3, 4), np.int32))
    assert "holds int32[3, 4], not a 1-D array of integers" in refusal(lambda: TokenFile(array, 4))
    np.save(array, np.array([{}]), allow_pickle=True)
    assert "holds object[1], not a 1-D array" in refusal(lambda: TokenFile(array, 4))


@pytest.mark.parametrize(("dtype", "value"), [("<u4", 2**31), ("<i4", -1), ("<i8", 2**40)])
def test_tokens_that_do_not_fit_int32_are_named(tmp_path: Path, dtype: str, value: int) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3, 4, 5, 6, value, 8, 9], dtype)
    dataset = TokenFile(path, 4, dtype=dtype)
    assert dataset.rows(np.array([0]))["tokens"].tolist() == [[1, 2, 3, 4, 5]]
    assert f"{path}: token 6 is {value}: tokens are 0 to" in refusal(
        lambda: dataset.rows(np.array([1]))
    )


def test_a_file_that_is_truncated_or_removed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", range(100))
    dataset = TokenFile(path, 9)
    dataset.rows(np.array([0]))
    with path.open("r+b") as file:
        file.truncate(90)
    assert refusal(lambda: dataset.rows(np.array([5]))) == (
        f"{path}: the file has been truncated since the run started: 200 bytes at the start, 90 now"
    )
    other = write(tmp_path / "b.npy", range(100), kind="npy")
    unread = TokenFile(other, 9)
    other.unlink()
    assert "has been removed since" in refusal(lambda: unread.rows(np.array([0])), StorageError)


@pytest.mark.parametrize("end", [-1, 2**31, 1.5, None])
def test_a_wrong_last_token_is_named(tmp_path: Path, end: Any) -> None:
    path = write(tmp_path / "a.bin", range(9))
    assert f"end_of_document is {end!r}: it must" in refusal(lambda: TokenDocuments(path, end))


def npy(header: str, version: int = 1) -> bytes:
    """A file of NumPy with any text as its header."""
    text = header.encode("latin1")
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 * version, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        npy("{'descr': " + "'" * 3),  # tokenize.TokenError
        npy("(" * 5000),  # RecursionError or MemoryError
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (" + "1" * 5000 + ",)}"),
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (-4,)}"),
        npy("{'descr': [1], 'fortran_order': False, 'shape': (4,)}"),
        npy("{'descr': '<i4', 'fortran_order': False, 'shape': (4,)}", 3),
        npy("{}", 2)[:-4] + b"\xff\xff\xff\xff",  # a header of 4 GB
        b"\x93NUMPY",
    ],
)
def test_a_forged_header_of_numpy_is_refused_by_both_readers(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npy: not a \.npy file: "):
        TokenFile(str(tmp_path / "a.npy"), 2)
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", content)
    with pytest.raises(UserError, match=r"w\.npz is not a valid \.npz file: "):
        open_weights(str(tmp_path / "w.npz"))
