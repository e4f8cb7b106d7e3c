"""Files of weights: what is read of them, and what is refused."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from spmdtrain import UserError
from spmdtrain.checkpoints.weights.source import is_weights_file, open_weights

ARRAYS: dict[str, np.ndarray] = {
    "wide": np.arange(24, dtype=np.float32).reshape(4, 6),
    "scalar": np.array(3, np.float32),
    "half": np.arange(4, dtype=np.float16),
}
NARROW = {"narrow": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)}

EIGHT_BITS = {
    "wide": np.arange(24).astype(ml_dtypes.float8_e5m2).reshape(4, 6),
    "scalar": np.array(3, ml_dtypes.float8_e4m3fn),
    "empty": np.zeros((0, 2), ml_dtypes.float8_e4m3fn),
}


def safetensors_file(folder: Path) -> Path:
    safetensors.numpy.save_file(ARRAYS | NARROW, folder / "w.safetensors")
    return folder / "w.safetensors"


def sharded(folder: Path) -> Path:
    names = {"wide": "a.safetensors", "scalar": "b.safetensors"}
    names |= {"half": "b.safetensors", "narrow": "b.safetensors"}
    for file in sorted(set(names.values())):
        part = {n: x for n, x in (ARRAYS | NARROW).items() if names[n] == file}
        safetensors.numpy.save_file(part, folder / file)
    (folder / "w.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def of_8_bits(folder: Path) -> Path:
    safetensors.numpy.save_file(EIGHT_BITS, folder / "w.safetensors")
    return folder / "w.safetensors"


def npz(folder: Path) -> Path:
    np.savez(folder / "w.npz", **ARRAYS)  # type: ignore[arg-type]
    return folder / "w.npz"


def compressed_npz(folder: Path) -> Path:
    arrays: dict[str, Any] = ARRAYS | {"wide": np.asfortranarray(ARRAYS["wide"])}
    np.savez_compressed(folder / "w.npz", **arrays)
    return folder / "w.npz"


def orbax(folder: Path) -> Path:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", ARRAYS | NARROW)
    return folder / "saved"


def keras_file(folder: Path) -> Path:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(folder / "model.weights.h5", "w") as weights:
        for name, array in ARRAYS.items():
            weights[name] = array
    with zipfile.ZipFile(folder / "w.keras", "w") as archive:
        archive.write(folder / "model.weights.h5", "model.weights.h5")
    return folder / "w.keras"


@pytest.mark.parametrize(
    "write", [safetensors_file, of_8_bits, sharded, npz, compressed_npz, orbax, keras_file]
)
def test_names_headers_and_parts_are_those_of_the_arrays(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = str(write(tmp_path))
    assert is_weights_file(path)
    source = open_weights(path)
    expected = ARRAYS | (NARROW if write in (safetensors_file, sharded, orbax) else {})
    expected = EIGHT_BITS if write is of_8_bits else expected
    assert {name: str(header) for name, header in source.headers.items()} == {
        name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in expected.items()
    }
    for name, array in expected.items():
        found = source.read(name, tuple((0, length) for length in array.shape))
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
    wide = expected["wide"]
    np.testing.assert_array_equal(source.read("wide", ((1, 3), (2, 5))), wide[1:3, 2:5])
    np.testing.assert_array_equal(source.read("wide", ((1, 3), (0, 6))), wide[1:3])


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        open_weights(str(path))
    return str(error.value)


def test_a_missing_part_without_an_index_and_another_format_are_named(tmp_path: Path) -> None:
    for part in (1, 3):
        safetensors.numpy.save_file(
            {f"w{part}": ARRAYS["half"]}, tmp_path / f"model-0000{part}-of-00003.safetensors"
        )
    assert refused(tmp_path).endswith("part 2 of 3 of model is missing")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "w-1-of-2.safetensors").hardlink_to(
        tmp_path / "model-00001-of-00003.safetensors"
    )
    assert refused(tmp_path / "alone").endswith("part 2 of 2 of w is missing")
    one = open_weights(str(tmp_path / "model-00001-of-00003.safetensors"))
    assert list(one.headers) == ["w1"]
    (tmp_path / "model-00003-of-00003.safetensors").rename(tmp_path / "m-0-of-2.safetensors")
    (tmp_path / "model-00001-of-00003.safetensors").rename(tmp_path / "m-1-of-2.safetensors")
    assert set(open_weights(str(tmp_path)).headers) == {"w1", "w3"}
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert is_weights_file(str(tmp_path / "pytorch_model.bin"))
    assert "init_from takes a .safetensors, .npz, .keras, .weights.h5 or .eqx" in refused(
        tmp_path / "pytorch_model.bin"
    )


def test_missing_and_contradictory_shards_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = folder / "w.safetensors.index.json"
    (folder / "a.safetensors").rename(folder / "gone")
    assert "a.safetensors" in (text := refused(folder)) and "1 of 2" in text
    (folder / "gone").rename(folder / "a.safetensors")
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "wide": "b.safetensors"}}))
    assert "wide is not in b.safetensors" in refused(folder)
    index.write_text(json.dumps({"weight_map": {"wide": "../a.safetensors"}}))
    assert "../a.safetensors" in refused(folder)
    index.write_text("{")
    assert "not JSON" in refused(folder)
    index.unlink()
    (folder / "c.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    assert "wide is both in a.safetensors and in c.safetensors" in refused(folder)


@pytest.mark.parametrize("write", [safetensors_file, npz, keras_file])
def test_a_truncated_file_is_refused(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    assert str(path) in refused(path)


def test_a_fifo_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.npz")
    assert "not a regular file" in refused(tmp_path / "w.npz")
    saved = orbax(tmp_path)
    os.mkfifo(saved / "fifo")
    assert "fifo is not a regular file" in refused(saved)


def test_no_array_is_unpickled_or_larger_than_its_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", a=np.array([{}], dtype=object))
    assert "w.npz: a has Python objects" in refused(tmp_path / "w.npz")
    np.savez(tmp_path / "w.npz", narrow=NARROW["narrow"])
    assert "narrow has Python objects, records, or a dtype that NumPy's format lacks" in refused(
        tmp_path / "w.npz"
    )
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9999999,)}"
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("a.npy", header.ljust(127) + b"\n")
    assert "float32[9999999] by its header, and has 0 bytes" in refused(tmp_path / "w.npz")


def test_arrays_of_other_files_are_not_followed(tmp_path: Path) -> None:
    import h5py

    for name in ("link", "external"):
        with h5py.File(tmp_path / "model.weights.h5", "w") as weights:
            if name == "link":
                weights["a"] = h5py.ExternalLink("/etc/passwd", "x")
            else:
                weights.create_dataset("a", (4,), "f4", external=[("/etc/passwd", 0, 16)])
        with zipfile.ZipFile(tmp_path / "w.keras", "w") as archive:
            archive.write(tmp_path / "model.weights.h5", "model.weights.h5")
        assert "a is " in refused(tmp_path / "w.keras")
