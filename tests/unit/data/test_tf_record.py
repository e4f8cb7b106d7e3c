"""TFRecord files as sources: files that TensorFlow wrote, framing, features, corrupted records."""

import base64
import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_helpers import tf_record as record

from spmdtrain import Packed, RecordFeature, SkipBadRecords, TFRecordSource, Trainer, UserError
from spmdtrain.data.sources.tf_record import RecordScanner
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import BadRecordError

# Written by `tf.io.TFRecordWriter` of TensorFlow 2.21, records i = 0, 1, 2, 3: `Example`s with
# x = [i + 0.5, -i, 1e-30], y = -i, tokens = [(-3) ** k for k in range(10 * i)] and
# raw = bytes(range(i)) ...
EXAMPLES = """
QAAAAAAAAAAoF/SVCj4KCwoDcmF3EgQKAgoACgwKBnRva2VucxICGgAKFQoBeBIQEg4KDAAAAD8AAAAAYEKiDQoKCgF5EgUaAw
oBAJ7O/hKGAAAAAAAAAHABHVwKgwEKDAoDcmF3EgUKAwoBAApHCgZ0b2tlbnMSPRo7CjkB/f//////////AQnl//////////8B
UY3+/////////wHZBfXu/////////wGhM53m/v///////wEKFQoBeBIQEg4KDAAAwD8AAIC/YEKiDQoTCgF5Eg4aDAoK//////
//////AWSPIlzPAAAAAAAAAG8fh34KzAEKDQoDcmF3EgYKBAoCAAEKjgEKBnRva2VucxKDARqAAQp+Af3//////////wEJ5f//
////////AVGN/v////////8B2QX17v////////8BoTOd5v7///////8Bqc0DhZj1////////AfG3IK3Ynv///////wH59qMClZ
uU+f//////AcGuwxS99LXC//////8ByaLeuAGlmOXV+/////8BChUKAXgSEBIOCgwAACBAAAAAwGBCog0KEwoBeRIOGgwKCv7/
/////////wFMceB1IAEAAAAAAAAvvTqaCp0CCg4KA3JhdxIHCgUKAwABAgreAQoGdG9rZW5zEtMBGtABCs0BAf3//////////w
EJ5f//////////AVGN/v////////8B2QX17v////////8BoTOd5v7///////8Bqc0DhZj1////////AfG3IK3Ynv///////wH5
9qMClZuU+f//////AcGuwxS99LXC//////8ByaLeuAGlmOXV+/////8BkbfQ/gzN2o6E2f////8BmfDT83S1r4Slof3///8B4f
HykJwI3aqnzavn////Aen/iZj9ScWA4reIov7//wGx/tnY5pkF7YTy9cuy8P//AQoVCgF4EhASDgoMAABgQAAAQMBgQqINChMK
AXkSDhoMCgr9//////////8BqqPaHg==
"""
# ... and `SequenceExample`s with the context y = i and the list
# frames = [[t, i] for t in range(i)].
SEQUENCES = """
HAAAAAAAAADIwZUdCgwKCgoBeRIFGgMKAQASDAoKCgZmcmFtZXMSAJ+ESagqAAAAAAAAAK6NkfUKDAoKCgF5EgUaAwoBARIaCh
gKBmZyYW1lcxIOCgwSCgoIAAAAAAAAgD94Gs7IOAAAAAAAAACjeX1XCgwKCgoBeRIFGgMKAQISKAomCgZmcmFtZXMSHAoMEgoK
CAAAAAAAAABACgwSCgoIAACAPwAAAEC60yRbRgAAAAAAAAByNbmlCgwKCgoBeRIFGgMKAQMSNgo0CgZmcmFtZXMSKgoMEgoKCA
AAAAAAAEBACgwSCgoIAACAPwAAQEAKDBIKCggAAABAAABAQAhhevk=
"""
FEATURES = {
    "x": RecordFeature(np.float32, (3,)),
    "y": np.int64,
    "tokens": RecordFeature(np.int64, (None,)),
    "raw": bytes,
}
VALUES = RecordFeature("float32", (2,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def by_tensorflow(folder: Path, name: str = "a.tfrecord", content: str = EXAMPLES) -> Path:
    data = base64.b64decode(content)
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def written(path: Path, contents: Sequence[bytes]) -> Path:
    path.write_bytes(b"".join(map(record, contents)))
    return path


@pytest.mark.parametrize("name", ["a.tfrecord", "b.tfrecord.gz", "c.tfrecord-00000-of-00001"])
def test_the_examples_are_those_that_tensorflow_wrote(tmp_path: Path, name: str) -> None:
    by_tensorflow(tmp_path, name)
    source = TFRecordSource(tmp_path, FEATURES)  # in a folder
    assert len(source) == 4
    for i, example in enumerate(source.__getitems__(range(4))):
        np.testing.assert_array_equal(example["x"], np.array([i + 0.5, -i, 1e-30], np.float32))
        assert (example["y"], example["raw"]) == (-i, bytes(range(i)))
        assert (example["x"].dtype, example["y"].dtype) == (np.float32, np.int64)
        assert example["tokens"].tolist() == [(-3) ** k for k in range(10 * i)]
    assert source[2]["y"] == -2
    decoded = TFRecordSource(tmp_path, FEATURES, lambda found: len(found["raw"]))
    assert [decoded[i] for i in (3, 0)] == [3, 0]
    raw = TFRecordSource(tmp_path)
    assert record(raw[1]) == base64.b64decode(EXAMPLES)[len(record(raw[0])) :][: len(raw[1]) + 16]


def test_sequences_have_a_dim_of_their_steps(tmp_path: Path) -> None:
    path = by_tensorflow(tmp_path, content=SEQUENCES)
    source = TFRecordSource(path, {"y": np.int64}, sequences={"frames": VALUES})
    for i in range(4):
        assert source[i]["y"] == i and source[i]["frames"].shape == (i, 2)
        assert source[i]["frames"].tolist() == [[t, i] for t in range(i)]
    with pytest.raises(BadRecordError, match=r"record 0: there is no list of features 'frame'\."):
        TFRecordSource(path, sequences={"frame": VALUES})[0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12), st.integers(1, 30))
def test_records_are_found_however_the_file_is_cut_into_pieces(
    contents: list[bytes], piece: int
) -> None:
    whole, scanner = b"".join(map(record, contents)), RecordScanner()
    found = [scanner.feed(whole[i : i + piece]) for i in range(0, len(whole), piece)]
    starts = np.concatenate([*found, scanner.finish()]).tolist()
    parts = itertools.pairwise([*starts, len(whole)])
    assert [whole[start:stop] for start, stop in parts] == [*map(record, contents)]


def test_no_changed_byte_goes_unnoticed(tmp_path: Path) -> None:
    contents = [b"first", b"", b"the third"]
    whole = written(tmp_path / "a.tfrecord", contents).read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        (tmp_path / f"{at}.tfrecord").write_bytes(changed)
        found: list[Any] = []
        try:
            source = TFRecordSource(tmp_path / f"{at}.tfrecord")
            for index in range(3):
                try:
                    found.append(source[index])
                except BadRecordError as error:
                    assert f"{at}.tfrecord: record {index}: corrupted" in str(error)
        except UserError as error:
            assert f"{at}.tfrecord: " in str(error)
            assert "does not begin with a length and its checksum" in str(error)
        assert len(found) < 3 and all(each in contents for each in found)


def test_a_file_that_ends_early_names_the_record(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.tfrecord", [b"first", b"second"]).read_bytes()
    ends = len(record(b"first"))
    for size in range(1, len(whole)):
        (tmp_path / f"{size}.tfrecord").write_bytes(whole[:size])
        if size == ends:
            assert len(TFRecordSource(tmp_path / f"{size}.tfrecord")) == 1
            continue
        number, start = (0, 0) if size < ends else (1, ends)
        of = "the length of " if size - start < 12 else ""
        with pytest.raises(
            UserError, match=rf"{size}.tfrecord: it ends within {of}record {number}\."
        ):
            TFRecordSource(tmp_path / f"{size}.tfrecord")


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"z": np.int64}, r"record 1: there is no feature 'z'\."),
        ({"token": RecordFeature(np.int64, (None,))}, "no feature 'token'. Did you mean 'tokens'"),
        ({"y": np.float32}, "record 1: feature 'y' has int64, not float32"),
        ({"x": np.float32}, r"feature 'x' has 3 values, and its shape is \(\)"),
        (
            {"x": RecordFeature(np.float32, (None, 2))},
            r"has 3 values, and its shape is \(None, 2\)",
        ),
        ({"raw": np.int64}, "feature 'raw' has bytes, not int64"),
    ],
)
def test_a_record_that_is_not_as_the_features_say_is_named(
    tmp_path: Path, features: dict[str, Any], message: str
) -> None:
    source = TFRecordSource(by_tensorflow(tmp_path), features)
    with pytest.raises(BadRecordError, match=f"a.tfrecord: .*{message}"):
        source[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["x"]}, r"features is \['x'\]: it must be a dictionary such as"),
        ({"features": {}}, "features is {}"),
        ({"features": {"x": np.uint8}}, "'x' has the dtype .*uint8.*: a record stores np.float32"),
        ({"features": {"x": "many"}}, "'x' has the dtype 'many'"),
        ({"features": {"x": RecordFeature(np.int64, (2, None))}}, r"has the shape \(2, None\)"),
        ({"features": {"x": RecordFeature(np.int64, 3)}}, "'x' has the shape 3"),  # type: ignore[arg-type]
        ({"sequences": {"x": RecordFeature(np.int64, (None,))}}, r"has the shape \(None,\)"),
        ({"decode": "jpeg"}, "decode is 'jpeg': it must be a function of a record"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TFRecordSource(by_tensorflow(tmp_path), **options)


def test_a_default_stands_for_a_feature_that_a_record_lacks(tmp_path: Path) -> None:
    path = by_tensorflow(tmp_path)
    source = TFRecordSource(path, {"z": RecordFeature(np.int64, default=7), "y": np.int64})
    assert [source[i] for i in (0, 3)] == [{"z": 7, "y": 0}, {"z": 7, "y": -3}]


def test_other_files_and_records_are_no_examples(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"PAR1 and other content")
    with pytest.raises(UserError, match=r"record 0, at byte 0, does not begin .* another format"):
        TFRecordSource(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="no records in it"):
        TFRecordSource(path)
    written(path, [b"\xff not a message"])
    with pytest.raises(BadRecordError, match=r"record 0: not a tf\.train\.Example"):
        TFRecordSource(path, {"x": np.int64})[0]
    failing = TFRecordSource(path, decode=lambda content: content.index(b"?"))
    with pytest.raises(BadRecordError, match=r"record 0 \(15 bytes\) cannot be decoded: .*test_tf"):
        failing[0]


@pytest.mark.slow
def test_a_run_trains_on_them_and_leaves_a_corrupted_record_out(tmp_path: Path) -> None:
    whole = bytearray(base64.b64decode(EXAMPLES))
    whole[20] ^= 1  # in the content of record 0
    (tmp_path / "a.tfrecord").write_bytes(whole)
    features = {"x": RecordFeature(np.float32, (3,)), "y": np.int64}
    source = TFRecordSource(tmp_path, features)

    def trained(data: Any) -> float:
        trainer = Trainer(
            model=nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
            objective=lambda model, batch: {"loss": (model(batch["x"])[:, 0] - batch["y"]) ** 2},
            optimizer=optax.sgd(0.01),
            global_batch_size=3,
            shuffle=False,
            strategy="one_device",
            terminal=Terminal(quiet=True),
        )
        return trainer.fit(data, epochs=2).train["loss"]

    with pytest.raises(UserError, match=r"a.tfrecord: record 0: corrupted"):
        trained(source)
    rows = [source[i] for i in (1, 2, 3)]
    assert trained(SkipBadRecords(source)) == trained(rows)
    features = {"tokens": RecordFeature(np.int64, (None,))}
    tokens = TFRecordSource(tmp_path, features, lambda found: {"tokens": found["tokens"] % 100})
    packed = Packed(SkipBadRecords(tokens), 8, field="tokens")
    assert packed.rows(np.array([0]))["tokens"][0].tolist()[:3] == [1, 97, 9]
