"""Corrupted and forged files in a run's folder: a message each, or quarantined."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from helpers import small_experiment
from test_links import fit

from spmdtrain import UserError, load_params
from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest, sizes
from spmdtrain.checkpoints.run_identity import Identity, changes, check_same_run
from spmdtrain.checkpoints.weights.source import OrbaxWeights
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.record import run_files
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import RunFiles, Split
from spmdtrain.record.validation import Malformed, check, parse_object
from spmdtrain.run import main

# A FIFO must not be waited for.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

LINES = {
    "not UTF-8": b'{"step": 2, "split": "train", "loss": "\xff"}',
    "nested": b"[" * 100_000,
    "a text as step": b'{"step": "x", "split": "train", "loss": 1.0}',
    "a negative step": b'{"step": -1, "split": "train", "loss": 1.0}',
    "a huge step": b'{"step": 1' + b"0" * 400 + b', "split": "train", "loss": 1.0}',
    "another split": b'{"step": 2, "split": {}, "loss": 1.0}',
    "a text as value": b'{"step": 2, "split": "train", "loss": "low"}',
    "a huge value": b'{"step": 2, "split": "train", "loss": 1' + b"0" * 400 + b"}",
    "texts as counts": b'{"step": 2, "split": "train", "n_counts": {"1": "x"}}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_is_none_of_metrics_is_named(line: bytes, tmp_path: Path) -> None:
    good = b'{"step": 1, "split": "eval", "loss": null, "n_counts": {"3": 2}}\n'
    for name in ("metrics.jsonl", "metrics.evaluator.jsonl"):
        (tmp_path / name).write_bytes(good + line + b"\n")
    with contextlib.closing(RunFiles(str(tmp_path))) as files:
        with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
            files.lines()
        with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
            files.rewind(1)
    assert Run(str(tmp_path)).evaluations.keys() == {(1, "")}  # which reads what it can


def status_of(folder: Path) -> object:
    return Run(str(folder)).status


@pytest.mark.parametrize(
    "content",
    [
        b'{"status": "running", "step": "x"}',
        b'{"status": ["running"], "step": 1}',
        b'{"status": "failed", "step": 1, "reason": 3}',
        b'{"status": "running"}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_status_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(UserError, match=r"status\.json"):
        status_of(tmp_path)


def test_what_is_no_regular_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"status\.json .*regular"):
        status_of(tmp_path)
    path.unlink()
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(UserError, match="1,099,511,627,776"):
        status_of(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl .*regular"):
        RunFiles(str(tmp_path))
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("link")
    with pytest.raises(UserError, match=r"metrics\.jsonl .*regular"):
        RunFiles(str(tmp_path))


def test_a_start_parses_the_metrics_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(RunFiles(str(tmp_path))) as files:
        for step in (1, 2, 3):
            files.write_metrics(step, Split.TRAIN, {"loss": 0.5})
    parsed: list[bytes] = []
    parse = run_files.parse_metrics_line

    def counted(line: bytes) -> dict[str, Any] | None:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(run_files, "parse_metrics_line", counted)
    with contextlib.closing(RunFiles(str(tmp_path))) as files:
        files.rewind(2)
        assert sorted(files.history(Split.TRAIN)) == [1, 2]
        assert files.recorded(2)[Split.TRAIN] == {"loss": 0.5}
        assert len(parsed) == 3  # of the file as it was found; rewinding left two of them
        files.write_metrics(3, Split.TRAIN, {"loss": 0.25})
        assert files.recorded(3)[Split.TRAIN] == {"loss": 0.25}


def test_a_workdir_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for workdir in (tmp_path / "file", tmp_path / "file" / "below", "/dev/null"):
        with pytest.raises(UserError, match=f"{workdir} is not a folder"):
            RunFiles(str(workdir))


# -- manifests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 1 and 2."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    fit(workdir, 2)
    return workdir


@pytest.fixture
def workdir(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and seal it again."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content | {"sha256": digest}))


def test_a_leaf_without_an_array_is_missing(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leaf = {"params/ghost": "float32[4]"}
    forge(workdir / "checkpoints" / "2", lambda m: m["identity"]["leaves"].update(leaf))
    assert checkpoints(["verify", str(workdir)]) == 1
    assert "params/ghost is missing" in capsys.readouterr().out


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"x": value}
    return value


HUGE = ",".join(["9" * 18] * 300)

CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "step": lambda m: m.update(step="2"),
    "step negative": lambda m: m.update(step=-2),
    "date": lambda m: m.update(saved_at="yesterday"),
    "date without a zone": lambda m: m.update(saved_at="2026-01-01T00:00:00"),
    "date as number": lambda m: m.update(saved_at=7),
    "metrics": lambda m: m.update(metrics={"loss": "low"}),
    "sums": lambda m: m.update(sums=[1, 2]),
    "NUL": lambda m: m["files"].update({"a\0b": 1}),
    "outside": lambda m: m["files"].update({"../../status.json": 1}),
    "absolute": lambda m: m["files"].update({"/etc/passwd": 1}),
    "size": lambda m: m["files"].update({"a": "1"}),
    "leaves": lambda m: m["identity"]["leaves"].update({"a": "what"}),
    "leaves of no dtype": lambda m: m["identity"]["leaves"].update({"a": "float99[3]"}),
    "leaves of objects": lambda m: m["identity"]["leaves"].update({"a": "object[3]"}),
    "leaves of dates": lambda m: m["identity"]["leaves"].update({"a": "datetime64[3]"}),
    "leaves of any size": lambda m: m["identity"]["leaves"].update({"a": f"float32[{HUGE}]"}),
    "keys of any size": lambda m: m["identity"]["leaves"].update({"params/a": f"key<fry>[{HUGE}]"}),
    "a surrogate": lambda m: m["files"].update({"\ud800": 1}),
    "a sum": lambda m: m["sums"].update({"step": "zz\x1b[31m" + "A" * 3000}),
    "best_direction": lambda m: m["identity"]["config"].update(best_direction="up"),
    "config as list": lambda m: m["identity"].update(config=[]),
    "best_metric": lambda m: m["identity"]["config"].update(best_metric=["loss"]),
    "deep": lambda m: m["identity"]["config"].update(x=nested(200)),
    "classes": lambda m: m["identity"]["dataset"].update(classes=3),
    "epoch": lambda m: m.update(epoch={"steps": 1, "seconds": 0.1, "sums": {"loss": [1]}}),
    "epoch without sums": lambda m: m.update(epoch={"steps": 1}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_forged_manifest_is_corruption(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workdir / "checkpoints" / "2"
    forge(folder, CHANGES[name])
    with pytest.raises(CheckpointCorruptedError, match=r"^manifest\.json") as caught:
        Manifest.read(epath.Path(folder))
    assert len(str(caught.value)) < 1000
    assert checkpoints(["verify", str(workdir)]) == 1
    assert checkpoints(["show", str(workdir)]) == 0
    assert capsys.readouterr().err == ""


def test_a_manifest_of_another_format_is_refused_by_name_and_nothing_is_quarantined(
    workdir: Path,
) -> None:
    folder = workdir / "checkpoints" / "2"
    whole = (folder / "manifest.json").read_text()
    fields = {
        "": [field.name for field in dataclasses.fields(Manifest)],
        "identity.": [field.name for field in dataclasses.fields(Identity)],
        "identity.config.": ["best_metric", "best_direction", "skip_steps", "init_from", "freeze"],
    }
    assert "epoch" in fields[""] and {"settings", "trajectories"} < {*fields["identity."]}

    def without(path: str, name: str) -> Callable[[dict[str, Any]], object]:
        def change(manifest: dict[str, Any]) -> object:
            for part in path.split(".")[:-1]:
                manifest = manifest[part]
            return manifest.pop(name)

        return change

    cases = {
        f"{path}{name} is missing": without(path, name) for path in fields for name in fields[path]
    }
    cases["its format is 2, not 1"] = lambda m: m.update(format=2)
    cases["identity.hashes is unknown"] = lambda m: m["identity"].update(hashes={})
    for problem, change in cases.items():
        forge(folder, change)
        message = (
            f"{folder} was saved by another version of spmdtrain, which this one cannot read "
            f"({problem}): continue with that version, or use another workdir"
        )
        with pytest.raises(UserError) as caught:
            Manifest.read(epath.Path(folder))
        assert not isinstance(caught.value, CheckpointCorruptedError)
        assert str(caught.value) == message
        (folder / "manifest.json").write_text(whole)
    forge(folder, lambda m: m["identity"].pop("trajectories"))
    with pytest.raises(UserError, match=r"another version .*identity\.trajectories is missing"):
        fit(workdir, 3)
    assert {path.name for path in folder.parent.iterdir()} == {"1", "2"}


@pytest.mark.parametrize("name", ["lo\x1b[31mss", "[/x]"])
def test_names_of_metrics_are_shown_escaped(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["metrics"] = {name: 1.0}
        manifest["identity"]["config"]["best_metric"] = name

    for folder in (workdir / "checkpoints").iterdir():
        forge(folder, change)
    for command in ("show", "verify"):
        assert checkpoints([command, str(workdir)]) == 0
        out = capsys.readouterr().out
        assert "\x1b[31m" not in out and name[:3].replace("\x1b", "\\") in out


def socket_at(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # of at most 107 bytes


PLACES: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "socket": socket_at,
    "loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_manifest_is_corruption(
    place: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workdir / "checkpoints" / "2" / "manifest.json"
    path.unlink()
    PLACES[place](path)
    assert checkpoints(["verify", str(workdir)]) == 1
    assert checkpoints(["show", str(workdir)]) == 0
    fit(workdir, 3)
    names = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert names == {"2", "2.corrupted", "3"} or names == {"1", "2.corrupted", "3"}
    assert capsys.readouterr().err == ""


def test_a_manifest_that_may_not_be_read_is_named(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: epath.Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("spmdtrain.checkpoints.manifest.read_bytes", refused)
    assert checkpoints(["verify", str(workdir)]) == 1
    assert checkpoints(["show", str(workdir)]) == 0
    assert capsys.readouterr().out.count("Permission") == 4


def string_in_place_of_an_array(metadata: Path) -> None:
    content = json.loads(metadata.read_text())
    for leaf in content["tree_metadata"].values():
        leaf["value_metadata"]["value_type"] = "string"
    metadata.write_text(json.dumps(content))


OUTSIDE = (
    "/etc",
    "../../1/params",
    "C:\\w",
    "file:///etc/w",
    "gs://b/w",
    "s3://b/w",
    "\\\\host\\w",
    "a\0",
)


def named(place: str) -> Callable[[Path], None]:
    """Names an array by a path out of the checkpoint."""

    def forge_metadata(metadata: Path) -> None:
        content = json.loads(metadata.read_text())
        first = next(iter(content["tree_metadata"].values()))
        first["key_metadata"] = [{"key": place, "key_type": 2}]
        metadata.write_text(json.dumps(content))

    return forge_metadata


def test_an_array_named_by_a_path_of_another_checkpoint_is_not_read(tmp_path: Path) -> None:
    for name in ("own", "secret"):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(tmp_path / name, {"w": np.full(3, len(name), np.float32)})
    for place in (str(tmp_path / "secret" / "w"), "../secret/w"):
        named(place)(tmp_path / "own" / "_METADATA")
        with pytest.raises(UserError, match="a path out of the checkpoint"):
            OrbaxWeights("own", epath.Path(tmp_path / "own"))


METADATA: dict[str, Callable[[Path], object]] = {
    "a string": string_in_place_of_an_array,
    "nested": lambda path: path.write_text("[" * 100_000),
    **{f"array at {place!r}": named(place) for place in OUTSIDE},
}


@pytest.mark.parametrize("name", METADATA)
def test_forged_metadata_of_arrays_is_corruption(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workdir / "checkpoints" / "2"
    METADATA[name](folder / "params" / "_METADATA")
    forge(folder, lambda m: m.update(files=sizes(epath.Path(folder))))
    assert checkpoints(["verify", str(workdir)]) == 1
    if name.startswith("array at"):
        assert "a path out of the checkpoint" in "".join(capsys.readouterr().out.split("\n"))
    fit(workdir, 3)
    assert (workdir / "checkpoints" / "2.corrupted").is_dir()


def make_deep(folder: Path, depth: int = 1500) -> None:
    """Makes folders in one another, more than a path may name."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


@pytest.mark.parametrize("name", ["2", "7.orbax-checkpoint-tmp"])
def test_deeply_nested_folders_end_nothing(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workdir / "checkpoints" / name
    folder.mkdir(exist_ok=True)
    make_deep(folder)
    try:
        assert checkpoints(["verify", str(workdir)]) == (name == "2")
        fit(workdir, 3)
        assert (workdir / "checkpoints" / "2.corrupted").is_dir() == (name == "2")
        assert (workdir / "checkpoints" / "3").is_dir()
    finally:
        subprocess.run(["rm", "-r", str(workdir)], check=True)  # pytest's own removal is recursive


def test_only_what_a_save_left_is_removed(workdir: Path) -> None:
    ours, foreign = "7.orbax-checkpoint-tmp", "mynotes.orbax-checkpoint-tmp-old"
    for name in (ours, foreign):
        (workdir / "checkpoints" / name).mkdir()
    fit(workdir, 3)
    names = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert foreign in names and ours not in names


def test_a_file_in_place_of_the_folder_of_removed_checkpoints_is_named(workdir: Path) -> None:
    (workdir / "checkpoints" / ".removed").touch()
    with pytest.raises(UserError, match=r"checkpoints/\.removed"):
        fit(workdir, 3)


def test_a_json_file_of_millions_of_values_is_not_parsed() -> None:
    with pytest.raises(Malformed, match="1,000,000"):
        parse_object(b'{"a":[' + b"[]," * 1_000_001 + b"1]}")


def test_a_file_of_a_name_that_no_file_has_is_missing(workdir: Path) -> None:
    forge(workdir / "checkpoints" / "2", lambda m: m["files"].update({"x" * 5000: 1}))
    fit(workdir, 3)
    assert (workdir / "checkpoints" / "2.corrupted").is_dir()


def test_names_in_a_manifest_are_not_printed_raw(workdir: Path) -> None:
    folder = workdir / "checkpoints" / "2"
    forge(folder, lambda m: m["sums"].update({"params/\u202eabc" * 200: "00c0ffee"}))
    with pytest.raises(CheckpointCorruptedError, match=r"\\u202eabc") as caught:
        load_params(folder)
    assert "\u202e" not in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "file", ["_CHECKPOINT_METADATA", "params/_METADATA", "params/\x1b[31mextra"]
)
def test_a_fifo_in_a_checkpoint_is_corruption(
    file: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workdir / "checkpoints" / "2" / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert checkpoints(["verify", str(workdir)]) == 1
    assert "is not a regular file" in " ".join(capsys.readouterr().out.split())
    fit(workdir, 3)
    assert "\x1b" not in capsys.readouterr().out
    assert (workdir / "checkpoints" / "2.corrupted").is_dir()


@pytest.mark.parametrize("value", ["", "run\udcff", "run\0"])
def test_a_workdir_that_is_no_name_is_refused(
    value: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["--config", str(small_experiment(tmp_path)), "--workdir", value])
    assert code == 2
    assert {path.name for path in tmp_path.iterdir()} <= {"small.py", "__pycache__"}
    error = capsys.readouterr().err
    assert error.startswith("error: workdir is ") and error.count("\n") == 1


def test_what_a_manifest_says_of_its_run_is_escaped_where_it_is_refused() -> None:
    clear = "\x1b[2J\x1b]0;title\x07"
    config = config_as_json(RunConfig(global_batch_size=8))
    here = Identity(config, {"crc32": 1}, {}, "x")
    for saved in (
        dataclasses.replace(here, dataset={"crc32": clear}),
        dataclasses.replace(here, dataset={"crc32": 1, "components": {clear: {}}}),
        dataclasses.replace(here, dataset={"crc32": 1, "stages": {clear: 1}}),
        dataclasses.replace(here, dataset={"crc32": 1, "stages": {"0": {clear: 1}}}),
        dataclasses.replace(here, leaves={f"params/{clear}": "float32[1]"}),
        dataclasses.replace(here, optimizer=clear),
        dataclasses.replace(here, config={**here.config, "seed": clear}),
    ):
        with pytest.raises(UserError, match=r"\\x1b\[2J") as caught:
            check_same_run(saved, here, "runs/x", 1)
        assert "\x1b" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        check_same_run(dataclasses.replace(here, optimizer="x" * 100_000), here, "runs/x", 1)
    assert len(str(caught.value)) < 5000
    now = dataclasses.replace(here, config={**here.config, "steps": 3})
    before = dataclasses.replace(here, config={**here.config, "steps": clear})
    (change,) = changes(before, now)
    assert "\x1b" not in change and change.startswith("steps: ")


class Nothing(TypedDict):
    """A schema without fields."""


@pytest.mark.parametrize("key", ["\x1b[2J", "x" * 100_000])
def test_what_is_quoted_of_a_malformed_file_is_escaped_and_short(key: str) -> None:
    with pytest.raises(Malformed) as caught:
        check({key: 1}, Nothing, "epoch")
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 600
