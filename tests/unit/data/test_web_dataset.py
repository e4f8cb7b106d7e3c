"""WebDataset's tar files as sources: samples, decoding by extension, links, corrupted files."""

import bz2
import gzip
import io
import json
import pickle
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spmdtrain import ImageFolder, SampleField, SkipBadRecords, Trainer, UserError, WebDatasetSource
from spmdtrain.data.sources.web_dataset import SampleScanner
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import BadRecordError

Files = Sequence[tuple[str, Any]]  # bytes or a header


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def packed(files: Files, form: int = tarfile.GNU_FORMAT) -> bytes:
    """Returns a tar of files, given by name and content or by a header."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w", format=form) as tar:
        for name, content in files:
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.name = name
            if isinstance(content, bytes):
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return found.getvalue()


def other(kind: bytes, to: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo()
    member.type, member.linkname = kind, to
    return member


def png(value: int) -> bytes:
    found = io.BytesIO()
    noise = np.random.default_rng(value).integers(0, 255, (9, 8, 3), np.uint8)
    Image.fromarray(noise).save(found, "PNG")
    return found.getvalue()


def npy(array: Any, **options: Any) -> bytes:
    found = io.BytesIO()
    np.save(found, array, **options)
    return found.getvalue()


def sample(i: int, key: str = "") -> Files:
    key = key or f"a.b/{i:04}"
    values = {"id": i, "tokens": [1] * i, "nested": {"x": None}}
    contents: Mapping[str, bytes] = {
        **{"PNG": png(i), "cls": f"{i}\n".encode(), "txt": f"Text {i} é".encode()},
        **{"json": json.dumps(values).encode(), "seg.npy": npy(np.full((2, 3), i, ">f4"))},
        **{"bin": bytes(i)},
    }
    return [(f"{key}.{extension}", content) for extension, content in contents.items()]


LONG = f"{'d' * 120}/{'e' * 150}é"
SAMPLES: Files = [
    *[("folder.x", other(tarfile.DIRTYPE)), ("__meta__/a.json", b"{}"), ("README", b"none")],
    *sample(0),
    *sample(1)[:2],
    *[("folder.x", other(tarfile.DIRTYPE)), ("._a.png", b"none"), ("no-extension", b"")],
    *[*sample(1)[2:], *sample(2, LONG), *sample(3), *sample(0)],
]
FIELDS: dict[str, str | SampleField] = {
    "image": SampleField("jpg;png", size=(9, 8)),
    **{"label": "cls", "text": "txt", "values": "json", "mask": "seg.npy", "raw": "bin"},
    "key": "__key__",
}


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "b.tar"])
def test_samples_are_read_by_index_and_decoded_by_extension(tmp_path: Path, name: str) -> None:
    content = packed(SAMPLES, tarfile.PAX_FORMAT if name == "b.tar" else tarfile.GNU_FORMAT)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    source = WebDatasetSource(tmp_path, FIELDS)  # in a folder
    assert len(source) == 5
    keys = ["a.b/0000", "a.b/0001", LONG, "a.b/0003", "a.b/0000"]
    indices = [3, 0, 4, 2, 1]
    for index, example in zip(indices, source.__getitems__(indices), strict=True):
        i = index % 4
        with Image.open(io.BytesIO(png(i))) as image:
            np.testing.assert_array_equal(example["image"], np.asarray(image))
        assert (example["label"], example["label"].dtype) == (i, np.int64)
        assert (example["text"], example["key"]) == (f"Text {i} é", keys[index])
        assert (example["values"]["id"], example["values"]["nested"]) == (i, {"x": None})
        assert list(example["values"]["tokens"]) == [1] * i
        np.testing.assert_array_equal(example["mask"], np.full((2, 3), i, np.float32))
        assert example["raw"] == bytes(i)
    raw = pickle.loads(pickle.dumps(WebDatasetSource(tmp_path / name)))
    assert raw[2] == {"__key__": LONG} | {
        n.removeprefix(f"{LONG}.").lower(): x for n, x in sample(2, LONG)
    }
    own = WebDatasetSource(
        tmp_path, {"x": SampleField("bin", decode=len), "y": SampleField("png", decode=bytes)}
    )
    assert own[3] == {"x": 3, "y": png(3)}
    decoded = WebDatasetSource(tmp_path, {"x": "cls"}, lambda fields: fields["x"] + 1)
    assert decoded.__getitems__(range(5)) == [1, 2, 3, 4, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_the_webdataset_package(tmp_path: Path, form: int) -> None:
    webdataset = pytest.importorskip("webdataset", reason="needs the package webdataset")
    files = [x for x in SAMPLES if form != tarfile.USTAR_FORMAT or not x[0].startswith("ddd")]
    (tmp_path / "a.tar").write_bytes(packed(files, form))
    source = WebDatasetSource(tmp_path)
    found = [dict(x) for x in webdataset.WebDataset(f"{tmp_path}/a.tar", shardshuffle=False)]
    for each in found:
        for name in ("__url__", "__local_path__"):
            each.pop(name, None)
    assert source.__getitems__(range(len(source))) == found
    assert len(found) == (4 if form == tarfile.USTAR_FORMAT else 5)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1500)), min_size=1, max_size=6),
    st.integers(100, 3000),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_samples_are_found_however_the_file_is_cut_into_pieces(
    sizes: list[tuple[int, int]], piece: int, form: int
) -> None:
    names = [f"{'é' * 150 * long}{number}" for number, (long, _) in enumerate(sizes)]
    files: Files = [
        (f"{name}.{extension}", bytes([1]) * size)
        for name, (_, size) in zip(names, sizes, strict=True)
        for extension in ("a", "b")
    ]
    whole, scanner = packed(files, form), SampleScanner()
    found = [scanner.feed(whole[i : i + piece]) for i in range(0, len(whole), piece)]
    starts = np.concatenate([*found, scanner.finish()]).tolist()
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        assert starts == [member.offset for member in tar][::2]


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: ") as caught:
        WebDatasetSource(path)
    return str(caught.value)


def test_a_tar_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = packed([("a.cls", b"1"), ("b.cls", b"x" * 600)])
    path = tmp_path / "a.tar"
    for size, message in {
        0: "it is empty",
        300: "it ends within the header at byte 0",
        512: "it ends within a.cls",
        1023: "it ends within a.cls",
        1024: "it ends after a.cls, without the 1,024 zero bytes",
        1100: "it ends within the header at byte 1,024",
        2000: "it ends within b.cls",
        2560: "it ends after b.cls, without",
        2570: "it ends within the header at byte 2,560",
    }.items():
        assert message in refused(path, whole[:size])
    path.write_bytes(whole[:2560])
    subprocess.run(["truncate", "-s", "+1024", path], check=True)  # as the message says
    assert len(WebDatasetSource(path)) == 2


def test_corrupted_and_other_content_does_not_end_a_tar_silently(tmp_path: Path) -> None:
    files: Files = [(f"{i}.cls", b"1") for i in range(4)]
    whole, path = packed(files), tmp_path / "a.tar"
    for at in (0, 1024, 3 * 1024):
        changed = bytearray(whole)
        changed[at + 3] ^= 1
        message = refused(path, bytes(changed))
        assert f"the header at byte {at:,} is not one of a tar" in message
    end = 4 * 1024
    assert f"other content follows the end of the tar at byte {end:,}" in refused(path, whole * 2)
    assert "other content follows" in refused(path, whole + b"\0" * 2**20 + b"x")
    assert "compressed by bzip2: decompress it by bunzip2" in refused(path, bz2.compress(whole))
    assert "the header at byte 0 is not one of a tar" in refused(path, b"PAR1" * 500)
    assert "no samples in it" in refused(path, packed([("README", b"none")]))


SPARSE = other(tarfile.GNUTYPE_SPARSE)


@pytest.mark.parametrize(
    ("files", "field", "message"),
    [
        ([("b.txt", b"")], "cls", r"'b': there is no file 'cls' for 'x'\. There are: txt"),
        ([("b.cls2", b"1")], "cls", "no file 'cls' for 'x'. Did you mean 'cls2'"),
        (
            [("b.cls", b"1"), ("b.CLS", b"2")],
            "cls",
            "two files have .* 'cls': b.cls and b.CLS",
        ),
        ([("b.cls", b"dog")], "cls", r"'cls' \(3 bytes\) cannot be decoded: ValueError"),
        ([("b.cls", b"9" * 30)], "cls", "cannot be decoded: OverflowError"),
        ([("b.json", b"{")], "json", "cannot be decoded: JSONDecodeError"),
        ([("b.txt", b"\xff")], "txt", "cannot be decoded: UnicodeDecodeError"),
        ([("b.npy", npy(np.array([{}]), allow_pickle=True))], "npy", "not unpickled"),
        ([("b.npy", npy(np.arange(9))[:-1])], "npy", "cannot be decoded: ValueError"),
        ([("b.png", b"none")], SampleField("png", 2), "'png' is a broken image: it begins with"),
        ([("b.png", png(0)[:-30])], SampleField("png", 2), "'png' is a broken image: .*truncated"),
        ([("b.cls", other(tarfile.SYMTYPE, "a.cls"))], "cls", "b.cls is a link to a.cls, without"),
        ([("b.cls", other(tarfile.LNKTYPE, "a.cls"))], "cls", "b.cls is a link to a.cls, without"),
        (
            [("b.cls", SPARSE)],
            "cls",
            "b.cls is a sparse file: .* without tar's option S",
        ),
    ],
)
def test_a_bad_sample_is_named_and_skipped(
    tmp_path: Path, files: Files, field: Any, message: str
) -> None:
    extension = field if isinstance(field, str) else "png"
    good = {"cls": b"1", "json": b"1", "txt": b"1", "npy": npy(np.arange(2)), "png": png(0)}
    around: Files = [(f"{key}.{extension}", good[extension]) for key in "ac"]
    path = tmp_path / "a.tar"
    path.write_bytes(packed([around[0], *files, around[1]]))
    source = WebDatasetSource(path, {"x": field})
    assert len(source) == 3
    with pytest.raises(BadRecordError, match=f"a.tar: record 1.*{message}"):
        source[1]
    assert SkipBadRecords(source).skipped.tolist() == [1]


def test_a_default_stands_for_a_file_that_a_sample_lacks(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(packed([("a.cls", b"1"), ("b.txt", b"")]))
    source = WebDatasetSource(tmp_path, {"x": SampleField("cls", default=7)})
    assert source.__getitems__([0, 1]) == [{"x": 1}, {"x": 7}]


def test_braces_name_shards(tmp_path: Path) -> None:
    for number in range(8, 11):
        (tmp_path / f"s-{number:03}.tar").write_bytes(packed([("a.cls", f"{number}".encode())]))
        (tmp_path / f"t{number}.tar").write_bytes(packed([("a.cls", f"{-number}".encode())]))
    (tmp_path / "u{1..2}.tar").write_bytes(packed([("a.cls", b"0")]))

    def values(*names: str) -> list[int]:
        source = WebDatasetSource([tmp_path / name for name in names], {"x": "cls"})
        return [source[i]["x"] for i in range(len(source))]

    assert values("s-{008..010}.tar", "t{8..9}.tar", "u{1..2}.tar") == [8, 9, 10, -8, -9, 0]
    assert values("{s-0,t}10.tar") == [10, -10]
    with pytest.raises(UserError, match=r"s-011\.tar: no such file"):
        values("s-{008..012}.tar")
    with pytest.raises(UserError, match=r"\{9\.\.8\} counts down"):
        values("t{9..8}.tar")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ["cls"]}, r"fields is \['cls'\]: it must be a dictionary such as"),
        ({"fields": {}}, "fields is {}"),
        ({"fields": {"x": 3}}, "'x' is 3: it must be an extension"),
        ({"fields": {"x": ".cls"}}, "'x' has the extension '.cls': write it without the dot"),
        ({"fields": {"x": "jpg;png"}}, r"'x' is an image, .*SampleField\('jpg;png', size=224\)"),
        ({"fields": {"x": SampleField("jpg", 0)}}, "size is 0: it must be one number of pixels"),
        ({"fields": {"x": SampleField("cls", 8)}}, "'x' has a size, which is only for images"),
        ({"fields": {"x": SampleField("jpg", decode="rgb")}}, "decode='rgb': it must be a func"),  # type: ignore[arg-type]
        ({"decode": "rgb"}, "decode is 'rgb': it must be a function of a sample"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "a.tar").write_bytes(packed([("a.cls", b"1")]))
    with pytest.raises(UserError, match=message):
        WebDatasetSource(tmp_path, **options)


@pytest.mark.slow
def test_a_run_trains_as_on_a_folder_of_the_same_images(tmp_path: Path) -> None:
    for i in range(6):
        path = tmp_path / "images" / f"{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    folder = ImageFolder(tmp_path / "images", 4)
    files: list[tuple[str, bytes]] = []
    for name in (*folder.files[:4], "bad", *folder.files[4:]):
        content = b"none" if name == "bad" else (tmp_path / "images" / name).read_bytes()
        key = name.removesuffix(".png")
        files += [(f"{key}.png", content), (f"{key}.cls", name[:1].replace("b", "0").encode())]
    for number, part in enumerate((files[:6], files[6:])):
        (tmp_path / f"{number}.tar").write_bytes(packed(part))
    fields: Any = {"image": SampleField("png", size=4), "label": "cls"}
    source = WebDatasetSource(f"{tmp_path}/{{0..1}}.tar", fields)

    def trained(data: Any, **options: Any) -> float:
        def objective(model: Any, batch: Any) -> Any:
            found = model(batch["image"].reshape(-1, 48) / 255)[:, 0]
            return {"loss": (found - batch["label"]) ** 2}

        trainer = Trainer(
            model=nnx.Linear(48, 1, rngs=nnx.Rngs(0)),
            objective=objective,
            optimizer=optax.sgd(0.01),
            global_batch_size=4,
            strategy="one_device",
            **options,
            terminal=Terminal(quiet=True),
        )
        return trainer.fit(data, epochs=2).train["loss"]

    with pytest.raises(UserError, match=r"1\.tar: record 1, sample 'bad': 'png' is a broken"):
        trained(source)
    expected = trained(folder)
    assert trained(source, on_bad_record="skip") == expected
    assert trained(SkipBadRecords(source), data_workers=1, data_threads=2) == expected
