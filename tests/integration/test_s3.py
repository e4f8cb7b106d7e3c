"""Workdirs, checkpoints, exports and data at `s3://` URLs, with a server of S3 and its faults."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from helpers import command, environment, small_experiment
from s3_server import SECRET, S3Server, s3_server

from spmdtrain import (
    ArrayRecordSource,
    ImageFolder,
    TextSource,
    TokenFile,
    load_params,
    open_run,
)
from spmdtrain.checkpoints.listing import Retention
from spmdtrain.checkpoints.manifest import steps_in
from spmdtrain.checkpoints.restore import export_params
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.data.sources.files import find_files
from spmdtrain.errors import StorageError, UserError, without_credentials
from spmdtrain.record.run_files import RunFiles, Split, Status
from spmdtrain.record.storage import folder_of
from spmdtrain.run import main
from spmdtrain.train.shipped_callbacks import copy_checkpoint

pytestmark = pytest.mark.slow  # every request takes its time

WORKDIR = "s3://bucket/deep/run"
OFTEN = ("--checkpoint-every-steps", "2", "--keep-latest", "2", "--log-every", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    # One for the process: s3fs keeps the address of its first request.
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def storage(server: S3Server) -> Iterator[S3Server]:
    yield server
    server.allow()
    server.clear()


def message(call: Callable[[], object], kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def test_a_killed_save_and_a_corrupted_array_cost_only_their_checkpoint(
    storage: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_experiment(tmp_path)

    def under_checkpoints() -> set[str]:
        return {name.split("/", 3)[3] for name in storage.names("deep/run/checkpoints/")}

    def steps(pattern: str) -> set[int]:
        return {int(name.split("/")[0]) for name in under_checkpoints() if pattern in name}

    # It saves without a pause, so one of the first signals comes within a save.
    process = subprocess.Popen(
        command(config, "--workdir", WORKDIR, "--steps", 4000, *OFTEN), env=environment()
    )
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        committed = steps("/commit_success.txt")
        if committed and steps("/params/") - committed:
            process.kill()
            process.wait()
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    assert process.returncode == -signal.SIGKILL

    older = max(committed)
    last = older + 2
    options = ("--config", config, "--workdir", WORKDIR, "--steps", last, *OFTEN)
    assert main([*map(str, options)]) == 0
    printed = capsys.readouterr()
    assert f"resumed from step {older} of {WORKDIR}" in printed.out
    assert SECRET not in printed.out + printed.err
    assert steps("/commit_success.txt") == {older, last}
    assert json.loads(storage.under("deep/run/")["status.json"])["step"] == last
    exported = export_params(WORKDIR, "s3://bucket/exported.npz")
    with np.load(io.BytesIO(storage.under("exported")[".npz"])) as file:
        assert {name: file[name].tolist() for name in file} == {
            name: array.tolist() for name, array in exported.items()
        }
    down, up = epath.Path(tmp_path / str(last)), epath.Path(f"s3://bucket/copies/{last}")
    copy_checkpoint(epath.Path(WORKDIR) / "checkpoints" / str(last), down)
    copy_checkpoint(down, up)
    for place in (str(down), str(up)):
        assert load_params(place)["kernel"].tolist() == exported["kernel"].tolist()
    assert open_run(WORKDIR).metrics("train")["step"].tolist() == [*range(1, last + 1)]
    assert not any(SECRET.encode() in content for content in storage.under("").values())

    array = next(name for name in under_checkpoints() if name.startswith(f"{last}/params/d/"))
    storage.put(f"deep/run/checkpoints/{array}", b"")
    lines = list[str]()
    export_params(WORKDIR, str(tmp_path / "older.npz"), log=lines.append)
    assert f"checkpoint {WORKDIR}/checkpoints/{last} is corrupted: params" in "".join(lines)
    before = {name for name in under_checkpoints() if name.startswith(f"{last}/")}
    folder = folder_of(WORKDIR) / "checkpoints"
    with contextlib.closing(Checkpoints(folder, Retention())) as checkpoints:
        assert checkpoints.quarantine([last]) == [f"{last}.corrupted"]
    assert steps_in(folder) == [older]
    assert {name.replace("/", ".corrupted/", 1) for name in before} <= under_checkpoints()


def test_faults_of_a_bucket_are_one_line(
    storage: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    absent = message(lambda: RunFiles("s3://absent/run"))
    assert absent == "workdir s3://absent/run cannot be written: there is no such bucket"
    files = RunFiles("s3://bucket/run")
    files.write_metrics(1, Split.TRAIN, {"loss": 2.0})
    storage.deny()
    denied = message(lambda: RunFiles("s3://bucket/run"))
    assert denied == "s3://bucket/run cannot be read: Forbidden"
    refused = message(lambda: files.write_status(Status.RUNNING, 1), StorageError)
    assert refused.startswith("s3://bucket/run/status.json") and "Access Key Id" in refused
    storage.allow()
    with storage.down():
        gone = message(lambda: files.write_status(Status.RUNNING, 1), StorageError)
        assert "s3://bucket/run/status.json" in gone and "Could not connect" in gone
    files.write_status(Status.RUNNING, 1)
    files.close()
    assert b'"step": 1' in storage.under("run/")["metrics.jsonl"]
    assert SECRET not in absent + denied + refused + gone + caplog.text


def test_data_in_a_bucket(storage: S3Server) -> None:
    def lines(path: str) -> list[object]:
        source = TextSource(path)
        return [source[k] for k in range(len(source))]

    storage.put("data/a.txt", b"one\ntwo\n")
    first = lines("s3://bucket/data")
    storage.put("data/deep/b.txt", b"three\n")
    assert len(first) == 2 and len(lines("s3://bucket/data")) == 3
    assert lines("s3://bucket/data/*.txt") == first
    (file,) = find_files("s3://bucket/data/a.txt", (".txt",), "text files")
    storage.put("data/a.txt", b"one\ntwo\n")
    file.check_unchanged()  # the same content
    storage.put("data/a.txt", b"one\nTWO\n")
    changed = message(file.check_unchanged)
    assert changed.startswith("s3://bucket/data/a.txt: the file has changed since")
    storage.delete("data/a.txt")
    removed = message(file.check_unchanged, StorageError)
    assert removed.startswith("s3://bucket/data/a.txt: the file has been removed")
    none = message(lambda: TextSource("s3://bucket/none"))
    assert none == "s3://bucket/none: no such file or folder"
    absent = message(lambda: TextSource("s3://absent/data"), StorageError)
    assert absent == "s3://absent/data: cannot be read: there is no such bucket"
    storage.deny()
    denied = message(lambda: TextSource("s3://bucket/data"), StorageError)
    assert denied.startswith("s3://bucket/data: cannot be read: ")


SIGNED = "https://host/run?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=hidden&x=1"


@pytest.mark.parametrize("url", ["s3://me:hidden@bucket/run", "s3://hidden@bucket/run", SIGNED])
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    uses: list[Callable[[str], object]] = [
        *(RunFiles, open_run, load_params, TextSource, ArrayRecordSource),
    ]
    for use in [*uses, lambda path: ImageFolder(path, 8), lambda path: TokenFile(path, 4)]:
        shown = message(partial(use, url))
        assert "***" in shown and "hidden" not in shown and "AKIA" not in shown


def test_credentials_in_an_error_are_not_shown() -> None:
    shown = without_credentials(f"no answer from http://me:hidden@host/a?b=1 or {SIGNED!r}")
    assert shown == (
        "no answer from http://***@host/a?b=1 or "
        "'https://host/run?X-Amz-Credential=***&X-Amz-Signature=***&x=1'"
    )
    assert without_credentials("s3://bucket/part-?.txt a@b") == "s3://bucket/part-?.txt a@b"


def test_tensorflow_is_not_asked_for_s3(storage: S3Server, tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('it was asked')")
    code = (
        "from spmdtrain.record.storage import folder_of as f; f('s3://bucket/run').write_text('')"
    )
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env.get('PYTHONPATH', '')}"
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert storage.names("") == ["run"]
