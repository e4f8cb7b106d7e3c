"""Folders of `.npy` and `.npz` files: parts, layouts of arrays, malformed files, memory."""

import io
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import NumpyFiles, Trainer, UserError
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8)


def check(dataset: Any, x: np.ndarray = X, y: np.ndarray = Y) -> None:
    assert len(dataset) == len(x)
    for indices in (np.array([5, 0, 7, 5]), np.arange(8), np.array([3]), np.zeros(0, np.int64)):
        rows = dataset.rows(indices)
        assert list(rows) == ["x", "y"]
        np.testing.assert_array_equal(rows["x"], x[indices])
        np.testing.assert_array_equal(rows["y"], y[indices])
        assert rows["x"].dtype == x.dtype.newbyteorder("=") and rows["x"].flags.c_contiguous


def test_files_of_a_folder_are_the_fields(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    check(NumpyFiles(tmp_path))
    check(NumpyFiles([tmp_path / "x.npy", tmp_path / "y.npy"]))
    assert list(NumpyFiles(tmp_path, ["y"]).rows(np.array([2]))) == ["y"]
    with pytest.raises(IndexError, match="rows 3 to 8 of 8"):
        NumpyFiles(tmp_path).rows(np.array([3, 8]))


@pytest.mark.parametrize("layout", ["part-{}/{}.npy", "{1}-{0:05}-of-00003.npy", "{}.npz"])
def test_parts_follow_each_other(tmp_path: Path, layout: str) -> None:
    for part, (start, stop) in enumerate([(0, 3), (3, 3), (3, 8)]):  # one is empty
        arrays: dict[str, Any] = {"x": X[start:stop], "y": Y[start:stop]}
        if layout == "{}.npz":
            np.savez(tmp_path / f"{part}.npz", **arrays)
            continue
        for name, array in arrays.items():
            path = tmp_path / layout.format(part, name)
            path.parent.mkdir(exist_ok=True)
            np.save(path, array)
    dataset = NumpyFiles(tmp_path)
    check(dataset)
    check(pickle.loads(pickle.dumps(dataset)))
    assert len(pickle.dumps(dataset)) < 5000
    assert re.search(r"[/-](part-|0000)?2[./-].*: row 1$", dataset.describe(4))


@pytest.mark.parametrize(
    "change",
    [
        np.asfortranarray,
        lambda x: x.astype(">f4"),
        lambda x: np.asfortranarray(x.astype(">f8")),
        lambda x: x.astype(np.float16),
        lambda x: x > 5,
        lambda x: x.astype(np.complex64),
        lambda x: x.reshape(8, 3, 1, 1),
        lambda x: x[:, :0],
    ],
)
def test_layouts_of_arrays_are_read_also_where_a_zip_has_them(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    x = change(X)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", Y)
    check(NumpyFiles(tmp_path), x)
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    check(NumpyFiles(tmp_path / "a.npz"), x)


def test_a_row_does_not_read_the_file(tmp_path: Path) -> None:
    header, path = io.BytesIO(), tmp_path / "x.npy"
    kind = {"descr": "|u1", "fortran_order": False, "shape": (2**30, 1024)}
    np.lib.format.write_array_header_1_0(header, kind)
    path.write_bytes(header.getvalue())
    os.truncate(path, len(header.getvalue()) + 2**40)  # a sparse file, larger than memory
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\7")
    rows = NumpyFiles(path).rows(np.array([0, 2**30 - 1]))["x"]
    assert rows.sum() == rows[1, 1023] == 7


class Opened:
    """An object whose unpickling would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


RECORDS = np.zeros(8, [("a", "i4"), ("b", "f4")])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.float32(1), "holds a single number: an array needs a leading dim"),
        (RECORDS, r"holds records \(a, b\): save an array for each field"),
        (np.array(["one"] * 8), "holds <U3, not numbers"),
        (np.arange(8).astype("M8[s]"), r"holds datetime64\[s\], not numbers|holds <M8\[s\]"),
        (np.zeros(8, np.longdouble), "not numbers"),
        (np.asarray(jnp.zeros(8, jnp.bfloat16)), "as NumPy writes bfloat16: save it as float32"),
        (X[:5], r"y.npy: 8 rows, and .*x.npy has 5: the arrays of a part need one number"),
    ],
)
def test_other_arrays_are_refused_unless_they_are_left_out(
    tmp_path: Path, array: Any, message: str
) -> None:
    np.save(tmp_path / "x.npy", array)
    np.save(tmp_path / "y.npy", Y)
    with pytest.raises(UserError, match=f"{tmp_path}/.*{message}"):
        NumpyFiles(tmp_path)
    np.testing.assert_array_equal(NumpyFiles(tmp_path, ["y"]).rows(np.array([3]))["y"], [3])


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    objects = np.array([Opened(tmp_path / "created")] * 8, object)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=objects)
    for name in ("x.npy", "a.npz"):
        with pytest.raises(UserError, match=f"{name}.*: holds Python objects, which are not unp"):
            NumpyFiles(tmp_path / name)
    assert not (tmp_path / "created").exists()


def test_truncated_and_other_files_are_refused(tmp_path: Path) -> None:
    path, archive = tmp_path / "x.npy", tmp_path / "a.npz"
    np.save(path, X)
    np.savez(archive, x=X)
    for file, message in (
        (path, r"x.npy: (the header says|not an array of NumPy)"),
        (archive, r"a.npz: not a .npz file: File is not a zip file"),
    ):
        whole = file.read_bytes()
        for size in range(0, len(whole), 7):
            file.write_bytes(whole[:size])
            with pytest.raises(UserError, match=message):
                NumpyFiles(file)
        file.write_bytes(whole)
    path.write_bytes(path.read_bytes() + b"0")
    with pytest.raises(UserError, match=r"says float32\[8, 3\], which are 224 bytes, .* are 225:"):
        NumpyFiles(path)


def test_a_compressed_npz_is_read_after_the_command_of_the_message(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=X, y=Y)
    with pytest.raises(UserError, match=r"a.npz: x.npy: compressed, .*write it again") as caught:
        NumpyFiles(path)
    (command,) = re.findall(r"np\.savez\(.*?\)\)", str(caught.value))
    eval(command)
    check(NumpyFiles(path))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "none")
    with pytest.raises(UserError, match=r"a.npz: 'notes.txt' is not the name of an array"):
        NumpyFiles(path)


def test_parts_that_differ_are_refused(tmp_path: Path) -> None:
    for part in "ab":
        (tmp_path / part).mkdir()
        np.save(tmp_path / part / "x.npy", X)
    np.save(tmp_path / "b" / "z.npy", Y)
    with pytest.raises(UserError, match=r"b/z.npy: the field 'z' is not in all parts: fields=\['x"):
        NumpyFiles(tmp_path)
    assert len(NumpyFiles(tmp_path, ["x"])) == 16
    with pytest.raises(UserError, match=r"a/x.npy: its part of .* no array 'z'\. There are: x"):
        NumpyFiles(tmp_path, ["x", "z"])
    for other in (X[:, :2], X.astype(np.float64)):
        np.save(tmp_path / "b" / "x.npy", other)
        with pytest.raises(UserError, match=r"b/x.npy: holds float.*, and .*a/x.npy float32 \(3,"):
            NumpyFiles(tmp_path, ["x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gs://bucket/x.npy",), "mapped into memory, from a local disk: copy them first"),
        ((".", "x"), "fields is 'x': it must be a list of names"),
        ((".", []), r"fields is \[\]"),
        (("none",), "none: no such file"),
        (("empty",), r"empty: the folder holds no NumPy files \(.npy, .npz\)"),
        (("x.bin",), "x.bin: not the name of a NumPy file"),
        (("rows",), "x.npy: the arrays have no rows"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "rows"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "rows" / "x.npy", X[:0])
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(UserError, match=message):
        NumpyFiles(*arguments)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_file_that_changes_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"

    def write(path: Path, array: np.ndarray) -> None:
        np.savez(path, x=array) if kind == "npz" else np.save(path, array)

    write(path, X)
    changes: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: write(path, X + 1), UserError),
        (lambda: os.truncate(path, 10), UserError),
        (lambda: shutil.move(path, tmp_path / "moved"), StorageError),
    ]
    for is_mapped in (True, False):
        for change, error in changes:
            write(path, X)
            dataset = NumpyFiles(path)
            if is_mapped:
                dataset.rows(np.array([0]))
            change()
            with pytest.raises(error, match=f"{path}: the file has been removed|{path}.* changed"):
                dataset.rows(np.array([7]))


@pytest.mark.slow
def test_a_run_trains_as_on_the_arrays(tmp_path: Path) -> None:
    for part in range(2):
        np.savez(tmp_path / f"{part}.npz", x=X[4 * part : 4 * part + 4], y=Y[4 * part :][:4])

    def trained(data: Any, **options: Any) -> float:
        trainer = Trainer(
            model=nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
            objective=lambda model, batch: {"loss": (model(batch["x"])[:, 0] - batch["y"]) ** 2},
            optimizer=optax.sgd(1e-4),
            global_batch_size=3,
            strategy="one_device",
            **options,
            terminal=Terminal(quiet=True),
        )
        return trainer.fit(data, epochs=2).train["loss"]

    expected = trained({"x": X, "y": Y})
    assert trained(NumpyFiles(tmp_path), on_bad_record="skip") == expected
    assert trained(NumpyFiles(tmp_path), data_workers=1) == expected
