"""Corrupted and forged input of every kind: each ends in an error that is meant for users.

`make fuzz` gives it ten minutes and a new seed, `make drill` half a minute. A finding is printed as
the smallest input that shows it; add that input to the tests of its module.
"""

import contextlib
import copy
import dataclasses
import functools
import gzip
import io
import json
import os
import re
import socket
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py  # type: ignore[import-untyped]
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from etils import epath
from helpers import small_experiment
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from PIL import Image
from plan_helpers import FOUND

from spmdtrain import StorageError, UserError, load_params
from spmdtrain.checkpoints import manifest
from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.read_arrays import examine
from spmdtrain.checkpoints.run_identity import Identity, changes, check_same_run
from spmdtrain.checkpoints.weights.source import open_weights
from spmdtrain.cluster import job_token, rendezvous
from spmdtrain.cluster.job_token import Line, Side
from spmdtrain.cluster.spec import parse_tf_config
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.data.image_decoding import Decoding, UndecodableError, decode
from spmdtrain.data.images import read_idx
from spmdtrain.data.sources.token_files import TokenFile
from spmdtrain.launch.task_env import free_ports
from spmdtrain.plan.instruction_work import bytes_moved, products
from spmdtrain.plan.summary import read_summary, sealed
from spmdtrain.record.lines import run_times
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import RunFiles, Split
from spmdtrain.record.user_folders import private_folder
from spmdtrain.report.command import RunReport
from spmdtrain.report.command import main as report
from spmdtrain.run import main as run
from spmdtrain.xla.collectives import collectives
from spmdtrain.xla.hlo import Module

SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
LEAST = 20  # examples, however busy the machine is
SEED = int(os.environ.get("FUZZ_SEED", "0"))

# -- what is corrupted, and how --------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\0", "\ud800", "../..", "[::1]:1", "host:0", 10**400, 2**63, "1e999"])
    | st.sampled_from(["object[3]", f"float32[{'9' * 18},{'9' * 18}]", "key<fry>[2]", "[/x]\x1b"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
# Controls, line separators, changes of direction, surrogates; new lines are ours.
HARMFUL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
DEEP = "[" * 100_000
ODD_NAMES = st.sampled_from(
    ["\ud800", "x" * 300, "x" * 5000, "\u202ea", "a\x1b[31m", "[/x]", "params/[red]", "../a"]
)


@st.composite
def changed_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """Content with parts cut out, repeated, flipped or put in."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        part = draw(
            st.just(b"")
            | st.binary(max_size=6)
            | st.just(bytes(content[start:end] * 2))
            | st.sampled_from([b"0", b"-1", b"999999999999", b"()", b"{", b"}", b'"', b"[", b","])
        )
        content[start:end] = part
    return bytes(content)


def containers(value: Any) -> list[Any]:
    """All dictionaries and lists in a document that are not empty."""
    if not isinstance(value, (dict, list)) or not value:
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(found for one in inner for found in containers(one))]


@st.composite
def changed_json(draw: st.DrawFn, whole: Any) -> Any:
    """A document of which some values are others, missing, or in other places."""
    document = copy.deepcopy(whole)
    for _ in range(draw(st.integers(0, 3))):
        if not (places := containers(document)):
            break
        place = draw(st.sampled_from(places))
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        how = draw(st.sampled_from(["other", "missing", "new", "whole"]))
        if how == "missing":
            del place[key]
        elif how == "new" and isinstance(place, dict):
            place[draw(st.text(max_size=6) | ODD_NAMES)] = draw(VALUES)
        else:
            place[key] = copy.deepcopy(whole) if how == "whole" else draw(VALUES)
    return document


def changed_text(whole: Any) -> st.SearchStrategy[bytes]:
    """JSON of a changed document, or changed bytes of the whole one, or nested deeply."""
    text = json.dumps(whole)
    return (
        changed_json(whole).map(lambda found: json.dumps(found).encode())
        | changed_bytes(text.encode())
        | st.sampled_from([DEEP, text.replace(":", f":{DEEP}", 1)]).map(str.encode)
    )


# -- what reads it ---------------------------------------------------------------------------------


class Target(NamedTuple):
    sound: Any
    """What is read without an error."""
    inputs: st.SearchStrategy[Any]
    read: Callable[[Any, Path], object]


def tf_config_text() -> Target:
    whole = {
        "cluster": {
            "chief": ["a:1"],
            "worker": ["10.0.0.1:2", "[::1]:3"],
            "ps": {"0": "b:4", "1": "c:5"},
            "evaluator": ["d:6"],
        },
        "task": {"type": "worker", "index": 1},
        "environment": "cloud",
    }
    return Target(
        json.dumps(whole).encode(),
        changed_text(whole),
        lambda text, _: parse_tf_config(text.decode(errors="surrogateescape")),
    )


def rendezvous_message() -> Target:
    names = ["worker 0", "worker 1", "worker 2"]
    hello = {
        "spmdtrain": "hello",
        **{"rank": 1, "name": "worker 1", "size": 3, "names": ", ".join(names), "where": "host"},
        "about": {"jax": "0.10"},
    }
    party = rendezvous.Party("localhost", 1, names, 0, {"jax": "0.10"})

    def read(content: bytes, _: Path) -> object:
        here, there = socket.socketpair()
        with here, there:
            text = content[:100_000]
            mac = authenticated(there, "worker").mac("worker", text)
            there.sendall(text + b" " + mac + b"\n")
            there.close()
            line = authenticated(here, "chief")
            found = []
            while line.read():
                found += list(line.messages())
            for message in found:
                if message is not None and rendezvous.is_hello(message):
                    rendezvous.add_member(party, line, message, {})
            return found

    text = changed_text(hello)
    encodings = st.sampled_from(["utf-16", "utf-16-le", "utf-32-be"])
    other = st.tuples(text, encodings).map(
        lambda pair: pair[0].decode(errors="replace").replace("host", "\u2200").encode(pair[1])
    )
    deep = encodings.map(lambda name: ('{"\u2200":' + DEEP[:40_000]).encode(name))
    return Target(json.dumps(hello).encode(), text | other | deep, read)


def authenticated(connection: socket.socket, side: Side) -> Line:
    """Returns one end of a connection, without a token, after the exchange of nonces."""
    line = Line(connection, side)
    line.authenticate(b"", worker_nonce="1" * 32, chief_nonce="2" * 32)
    return line


def idx() -> Target:
    plain = b"\0\0\x0c\2" + np.array([3, 2], ">u4").tobytes() + np.arange(6, dtype=">i4").tobytes()

    def read(content: bytes, folder: Path) -> object:
        (folder / "idx").write_bytes(content)
        return read_idx(folder / "idx")

    packed = gzip.compress(plain)
    corrupted = changed_bytes(plain)
    return Target(packed, corrupted | corrupted.map(gzip.compress) | changed_bytes(packed), read)


def hlo_text() -> Target:
    # Without most of the tables of source lines.
    texts = [re.sub(r"(?m)^[4-9]\d* .*\n|^\d\d+ .*\n", "", text) for text in programs()]

    def read(text: str, _: Path) -> object:
        module = Module(text)
        found = [products(module), bytes_moved(module), collectives(text, devices())]
        for computation in module.computations.values():
            found += [module.line_of(one) for one in computation.instructions.values()]
        return found

    tokens = [re.split(r"(\W)", text) for text in texts]

    @st.composite
    def changed_tokens(draw: st.DrawFn) -> str:
        found = list(draw(st.sampled_from(tokens)))
        for _ in range(draw(st.integers(1, 6))):
            place, other = (draw(st.integers(0, len(found) - 1)) for _ in range(2))
            odd = st.sampled_from([found[other], "", "-1", "999999999999", "while", "(", ")", "{"])
            found[place] = draw(odd)
        return "".join(found)

    broken = st.sampled_from(texts).flatmap(lambda text: changed_bytes(text.encode()))
    return Target(texts[0], changed_tokens() | broken.map(lambda x: x.decode("latin-1")), read)


def devices() -> Mesh:
    grid = np.array(jax.devices()).reshape(4, 2)
    return Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def programs() -> list[str]:
    """Compiled programs with loops, fusions, products and collectives."""
    split = NamedSharding(devices(), PartitionSpec("data", "tensor"))

    def step(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(carry @ carry.T @ carry), None

        x, _ = jax.lax.scan(body, x, None, length=3)
        return jax.lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: jnp.sort(y), x).mean(0)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)
    return [jax.jit(step).lower(x).compile().as_text() or ""]


def manifest_file() -> Target:
    config = config_as_json(RunConfig(global_batch_size=8, steps=9))
    identity: dict[str, Any] = {
        "config": config,
        "dataset": {"examples": 9, "arrays": {"image": "uint8[8]"}, "crc32": 1, "classes": ["a"]},
        "leaves": {"params/w": "float32[2,3]", "step": "int32[]"},
        "optimizer": "tuple(ScaleByAdamState())",
        "hyperparameters": {},
    }
    saved = Manifest(
        step=3,
        saved_at="2026-01-01T00:00:00+00:00",
        identity=Identity(**identity),
        metrics={"loss": 0.5},
        stopped=False,
        sums={"params/w": "00c0ffee"},
        files={"params/d/0": 12},
    )
    whole = {"format": 1} | dataclasses.asdict(saved)

    def forged(text: bytes) -> bytes:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(text)
            if isinstance(content, dict):
                return json.dumps(content | {"sha256": manifest.digest(content)}).encode()
        return text

    def read(content: bytes, folder: Path) -> object:
        step = folder / "checkpoints" / "3"
        step.mkdir(exist_ok=True, parents=True)
        (step / "manifest.json").write_bytes(content)
        for command in (["verify", str(folder)], ["show", str(folder)], ["show", str(step)]):
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                checkpoints(command)
            assert not HARMFUL.search(out.getvalue())
        found = Manifest.read(epath.Path(step))
        with contextlib.suppress(CheckpointCorruptedError):
            found.check_files(epath.Path(step))
        here = Identity(**identity)
        reported = changes(found.identity, here)
        assert not any(HARMFUL.search(line) for line in reported)
        check_same_run(found.identity, here, "x", 1)
        return found.size, found.identity.classes

    text = changed_text(whole)
    renamed = ODD_NAMES.map(lambda name: json.dumps(whole).replace('"loss"', json.dumps(name)))
    text = text | renamed.map(str.encode)
    return Target(forged(json.dumps(whole).encode()), text | text.map(forged), read)


def array_metadata() -> Target:
    """Orbax' description of the arrays of a checkpoint."""
    folder = Path(tempfile.mkdtemp())
    run(["--config", str(small_experiment(folder)), "--workdir", str(folder / "run"), "--steps=1"])
    step = folder / "run" / "checkpoints" / "1"
    (file,) = step.glob("params/_METADATA")
    whole = json.loads(file.read_text())

    def read(content: bytes, _: Path) -> object:
        file.write_bytes(content)
        found = dataclasses.replace(Manifest.read(epath.Path(step)), files={})
        (step / "manifest.json").unlink()
        found.write(epath.Path(step))
        list(examine(epath.Path(step), found))
        return load_params(step)

    return Target(file.read_bytes(), changed_text(whole), read)


def run_status() -> Target:
    def read(content: bytes, folder: Path) -> object:
        (folder / "status.json").write_bytes(content)
        return Run(str(folder)).status

    whole = {"status": "failed", "step": 3, "reason": "ValueError"}
    return Target(json.dumps(whole).encode(), changed_text(whole), read)


def image() -> Target:
    how = Decoding((4, 4))
    made = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    files = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
        made.save(file := io.BytesIO(), kind)
        files.append(file.getvalue())

    def read(content: bytes, _: Path) -> object:
        try:
            return decode(content, how)
        except UndecodableError as error:
            raise UserError(str(error)) from error

    return Target(files[0], st.sampled_from(files).flatmap(changed_bytes), read)


def metrics_lines() -> Target:
    train = {"step": 1, "split": "train", "loss": 0.5, "learning_rate": 0.1}
    eval_ = {"step": 2, "split": "eval", "loss": None, "accuracy": 1.0, "ignored": {"a": 1}}
    lines = b"\n".join(json.dumps(line).encode() for line in (train, eval_)) + b"\n"
    one = changed_text(train) | changed_text(eval_)
    several = st.lists(one, max_size=3).map(lambda some: lines + b"\n".join(some) + b"\n")

    def read(content: bytes, folder: Path) -> object:
        for name in ("metrics.jsonl", "metrics.evaluator.jsonl"):
            (folder / name).write_bytes(content)
        found = Run(str(folder)).evaluations
        with closing(RunFiles(str(folder))) as files:
            return found, [files.history(split) for split in Split]

    return Target(lines, several | changed_bytes(lines), read)


def weights_file() -> Target:
    """The weights of another program, in each format of one file."""
    arrays: dict[str, Any] = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.zeros((), np.int8),
    }
    np.savez(npz := io.BytesIO(), **arrays)
    np.savez_compressed(compressed := io.BytesIO(), **arrays)
    with h5py.File(hdf5 := io.BytesIO(), "w") as file:
        file.update(arrays)
    with zipfile.ZipFile(archive := io.BytesIO(), "w") as keras:
        keras.writestr("model.weights.h5", hdf5.getvalue())
    files = [
        ("w.safetensors", safetensors.numpy.save(arrays)),
        *(("w.npz", file.getvalue()) for file in (npz, compressed)),
        ("w.keras", archive.getvalue()),
    ]

    def read(file: tuple[str, bytes], folder: Path) -> object:
        name, content = file
        (folder / name).write_bytes(content)
        source = open_weights(str(folder / name))
        return [
            source.read(name, tuple((0, size) for size in header.shape))
            for name, header in source.headers.items()
            if header.nbytes < 2**20  # a header may state an array as large as the memory
        ]

    return Target(
        files[0],
        st.sampled_from(files).flatmap(lambda f: changed_bytes(f[1]).map(lambda b: (f[0], b))),
        read,
    )


def numpy_header() -> Target:
    """Files of tokens, and members of `.npz` files, with any text as their header."""
    file = io.BytesIO()
    np.save(file, np.arange(64, dtype=np.int32))
    sound = file.getvalue()
    pieces = [
        "'" * 3,
        "(",
        "{",
        "shape",
        "descr",
        "[1]",
        "9" * 5000,
        "<i4",
        ",",
        "None",
        "\\N{",
        "#",
    ]

    def with_header(text: str) -> bytes:
        header = text.encode("latin1", "replace")[:9000]
        return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header

    headers = st.lists(st.sampled_from(pieces) | st.text(max_size=6), max_size=8).map("".join)

    def read(content: bytes, folder: Path) -> object:
        (folder / "a.npy").write_bytes(content)
        with zipfile.ZipFile(folder / "w.npz", "w") as archive:
            archive.writestr("w.npy", content)
        with contextlib.suppress(UserError, StorageError):
            _ = open_weights(str(folder / "w.npz")).headers
        return TokenFile(str(folder / "a.npy"), 2)

    return Target(sound, changed_bytes(sound) | headers.map(with_header), read)


def token_of_a_job() -> Target:
    def read(content: bytes, folder: Path) -> object:
        (folder / "token").write_bytes(content)
        (folder / "token").chmod(0o600)
        environment = {job_token.TOKEN_FILE: str(folder / "token")}
        return job_token.read(environment, warn=lambda text: None)

    sound = b"0123456789abcdef"
    return Target(sound, changed_bytes(sound) | st.binary(max_size=5000), read)


def next_port() -> Target:
    """The file with the next port of a launcher, and what may stand in its place."""

    def read(given: bytes | str, folder: Path) -> object:
        place = Path(tempfile.mkdtemp(dir=folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tempfile.tempdir", str(place))
            path = private_folder() / "next-port"
            if isinstance(given, bytes):
                path.write_bytes(given)
            elif given == "fifo":
                os.mkfifo(path)
            elif given == "folder":
                path.mkdir()
            else:
                path.symlink_to("next-port")
            return free_ports(2)

    kinds = st.sampled_from(["fifo", "folder", "link to itself"])
    return Target(b"12", kinds | changed_bytes(b"12") | st.binary(max_size=50), read)


def logs_of_a_run() -> Target:
    """The files from which the page and the record of a run are read."""
    lines: dict[str, Any] = {
        "metrics.jsonl": {"step": 1, "split": "train", "loss": 0.5, "gradient_norm": 1.0},
        "metrics.evaluator.jsonl": {"step": 1, "split": "eval", "trajectory": "a1", "loss": 0.5},
        "performance.jsonl": {"time": 9.0, "step": 1, "steps_per_second": 2.0, "input_wait": 0.1},
        "events.jsonl": {"time": 1.0, "event": "phases", "step": 1, "seconds": {"step": 2.0}},
        "hashes.jsonl": {"step": 2, "hash": "x", "loss": 1.0, "arrays": {"a": "01"}},
        "media.jsonl": {"step": 1, "split": "eval", "name": "a", "kind": "text", "text": "b"},
        "config.json": {"config": {"steps": 3, "mesh": {"data": 2}}, "mesh": "data=2"},
    }
    sound = [(name, json.dumps(line).encode() + b"\n") for name, line in lines.items()]

    def changed(name: str) -> st.SearchStrategy[list[tuple[str, bytes]]]:
        text = changed_text(lines[name]).map(lambda text: [(name, text + b"\n" + text)])
        odd = ODD_NAMES.map(lambda odd: json.dumps(lines[name]).replace('"loss"', json.dumps(odd)))
        return text | odd.map(lambda text: [(name, text.encode() + b"\n")])

    def read(given: list[tuple[str, bytes]], folder: Path) -> object:
        for name, content in [*sound, *given]:
            (folder / name).write_bytes(content)
        page = RunReport([str(folder)])
        page.refresh()
        run = Run(str(folder))
        reads: list[Callable[[], object]] = [
            *(functools.partial(run.metrics, split) for split in (*Split, "evaluator")),
            *(run.performance, lambda: run_times(run.events), lambda: run.hashes),
            *(lambda: run.config_file, lambda: run.program),
        ]
        for each in reads:
            with suppress(UserError):
                each()
        return page.page()

    return Target([], st.sampled_from(list(lines)).flatmap(changed), read)


def name_of_a_file() -> Target:
    """A path that a user gives, of any bytes, which may exist as a file, a folder or a FIFO."""

    def read(given: tuple[bytes, str], folder: Path) -> object:
        name, kind = given
        path = Path(tempfile.mkdtemp(dir=folder)) / os.fsdecode(name.replace(b"/", b"_"))
        with contextlib.suppress(OSError, ValueError):  # not a name on this file system
            make = {"folder": os.mkdir, "fifo": os.mkfifo, "file": os.mknod}.get(kind)
            if make is not None:
                make(path)
        text = str(path)
        commands: list[Callable[[], int]] = [
            lambda: run(["--config", text]),
            lambda: checkpoints(["verify", text]),
            lambda: report(["--output", str(folder / "page.html"), text]),
        ]
        for command in commands:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                assert command() in (1, 2)
            assert not HARMFUL.search(out.getvalue())
        return None

    odd = ODD_NAMES.map(lambda name: name.encode("utf-8", "surrogatepass"))
    names = st.binary(min_size=1, max_size=8) | odd
    names = names.map(lambda name: name.replace(b"\0", b"x"))  # no shell can pass a NUL
    kinds = st.sampled_from(["file", "folder", "fifo", "absent"])
    return Target((b"a.py", "absent"), st.tuples(names, kinds), read)


def plan_summary() -> Target:
    def read(content: bytes, folder: Path) -> object:
        (folder / "x.json").write_bytes(content)
        found = read_summary(folder / "x.json")
        assert found is None or dataclasses.asdict(found).keys() == whole.keys()
        return found

    whole = dataclasses.asdict(FOUND)
    text = changed_text(whole)
    sound = forged(json.dumps(whole).encode())
    return Target(sound, changed_bytes(sound) | text.map(forged), read)


def forged(content: bytes) -> bytes:
    """Content with the digest that it must have."""
    return sealed("x", content)


TARGETS = [
    tf_config_text,
    rendezvous_message,
    idx,
    manifest_file,
    array_metadata,
    run_status,
    image,
    metrics_lines,
    weights_file,
    numpy_header,
    token_of_a_job,
    next_port,
    logs_of_a_run,
    name_of_a_file,
    hlo_text,
    plan_summary,
]


def read_or_refuse(target: Target, given: Any, folder: Path) -> None:
    try:
        target.read(given, folder)
    except (UserError, StorageError) as error:
        assert len(str(error)) < 2000 and not HARMFUL.search(str(error))


@pytest.mark.drill
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_no_input_ends_in_a_traceback(make: Callable[[], Target], tmp_path: Path) -> None:
    target = make()
    target.read(target.sound, tmp_path)
    end = time.monotonic() + SECONDS / len(TARGETS)
    rounds = examples = 0
    found = False
    while time.monotonic() < end or examples < LEAST:

        @hypothesis.seed(SEED + rounds)
        @settings(
            max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @hypothesis.given(target.inputs)
        def read(given: Any) -> None:
            nonlocal examples, found
            # Once one is found, the smallest input is looked for.
            if time.monotonic() > end and examples >= LEAST and not found:
                return
            examples += 1
            try:
                read_or_refuse(target, given, tmp_path)
            except BaseException:
                found = True
                raise

        read()
        rounds += 1
    print(f"{make.__name__}: {examples} examples, seeds {SEED} to {SEED + rounds - 1}")
    assert examples >= LEAST
