"""A workdir that is a URL: a run in a bucket is what it is in a folder."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from fake_gcs import FakeGcs, Stored, fake_gcs
from helpers import (
    BOUND,
    command,
    environment,
    events,
    metrics,
    run,
    saved_steps,
    small_experiment,
    status,
)

from spmdtrain import Figure, RunInfo, Text, Tracker, open_run
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record import changing_files
from spmdtrain.record.changing_files import GrowingFile
from spmdtrain.record.run_files import RunFiles, Split, Status
from spmdtrain.record.storage import folder_of
from spmdtrain.run import main
from spmdtrain.trackers.run_trackers import RunTrackers
from spmdtrain.trackers.tensorboard import TensorBoardTracker

pytestmark = pytest.mark.slow  # to a bucket, simulated, every file takes its time

WORKDIR = "gs://bucket/deep/run"
OFTEN = ("--checkpoint-every-steps", 2, "--keep-latest", 2, "--log-every", 1)


class Bucket:
    """Runs the command with its workdir in a bucket, and shows what is in it afterward."""

    def __init__(self, storage: FakeGcs, folder: Path) -> None:
        self.storage, self.folder = storage, folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.config = small_experiment(folder)
        self.printed = ""

    def run(self, *options: object) -> "Bucket":
        ended = subprocess.run(
            command(self.config, "--workdir", WORKDIR, *options),
            env=environment() | self.storage.environment() | {"TMPDIR": str(self.temporary)},
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
        assert ended.returncode == 0, (ended.stdout, ended.stderr, self.storage.unknown)
        assert not list(self.temporary.glob("spmdtrain-*"))
        self.printed = ended.stdout
        return self

    def copy(self, name: str) -> Path:
        """What the bucket holds now, as a local folder."""
        copied = self.folder / name
        for path, content in self.storage.under(WORKDIR.removeprefix("gs://bucket/") + "/").items():
            (copied / path).parent.mkdir(parents=True, exist_ok=True)
            (copied / path).write_bytes(content)
        return copied


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A run of four steps and its continuation to eight, each as a folder; what was printed."""
    with fake_gcs() as storage:
        bucket = Bucket(storage, tmp_path_factory.mktemp("bucket"))
        found: dict[str, Any] = {"config": bucket.config}
        for name, options in {
            "four": ("--steps", 4, *OFTEN),
            "eight": ("--steps", 8, *OFTEN),
            "evaluated": ("--mode", "evaluate"),
            "predicted": ("--mode", "predict"),
        }.items():
            found[f"{name} printed"] = bucket.run(*options).printed
            found[name] = bucket.copy(name)
        in_it = "deep/run/checkpoints/8/params/d/"
        corrupted = next(name for name in storage.objects if name.startswith(in_it))
        storage.objects[corrupted] = Stored(b"", 10**9)
        found["ten printed"] = bucket.run("--steps", 10, *OFTEN).printed
        found["ten"] = bucket.copy("ten")
        assert storage.unknown == []
        yield found


@pytest.fixture(scope="module")
def local(copies: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same eight steps in a local folder, at one go."""
    workdir = tmp_path_factory.mktemp("local") / "run"
    ended = run(copies["config"], "--workdir", workdir, "--steps", 8, *OFTEN)
    assert ended.returncode == 0, ended.stderr
    return workdir


def test_a_bucket_holds_the_files_of_a_run(copies: dict[str, Any]) -> None:
    four = copies["four"]
    assert status(four) == {"status": "finished", "step": 4}
    assert json.loads((four / "config.json").read_text())["config"]["workdir"] == WORKDIR
    assert [line["step"] for line in metrics(four, "train")] == [1, 2, 3, 4]
    assert [line["step"] for line in metrics(four, "eval")] == [2, 4]
    assert saved_steps(four) == [2, 4]
    assert curve(four, "train/loss") == [1, 2, 3, 4]


def test_a_second_process_resumes_from_the_bucket(copies: dict[str, Any], local: Path) -> None:
    eight = copies["eight"]
    assert f"resumed from step 4 of {WORKDIR}" in copies["eight printed"]
    assert status(eight) == status(local) == {"status": "finished", "step": 8}
    assert metrics(eight) == metrics(local)
    assert saved_steps(eight) == saved_steps(local)
    assert curve(eight, "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(list((eight / "tensorboard").iterdir())) == 2


def test_the_bits_are_those_of_a_local_run(copies: dict[str, Any], local: Path) -> None:
    here, there = (arrays(folder, 8) for folder in (local, copies["eight"]))
    assert here.keys() == there.keys() and here
    assert all(np.array_equal(here[name], there[name]) for name in here)


def test_a_model_in_a_bucket_is_evaluated(copies: dict[str, Any], local: Path) -> None:
    ended = run(copies["config"], "--workdir", local, "--mode", "evaluate")
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("{"))
    assert line in copies["evaluated printed"].splitlines()


def test_predictions_go_to_the_bucket(copies: dict[str, Any]) -> None:
    assert f"{WORKDIR}/predictions.npz" in copies["predicted printed"]
    with np.load(copies["predicted"] / "predictions.npz") as file:
        assert file["predictions"].shape == (64, 1)


def test_a_corrupted_checkpoint_in_a_bucket_hides_no_older_one(copies: dict[str, Any]) -> None:
    assert f"resumed from step 6 of {WORKDIR}" in copies["ten printed"]
    assert saved_steps(copies["ten"]) == [8, 10]
    assert (copies["ten"] / "checkpoints" / "8.corrupted" / "params").is_dir()
    assert [line["step"] for line in metrics(copies["ten"], "train")] == list(range(1, 11))


def curve(workdir: Path, name: str) -> list[int]:
    return [e.step for e in events(workdir) for value in e.summary.value if value.tag == name]


def arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as checkpointer:
        model = checkpointer.restore(workdir / "checkpoints" / str(step) / "params")
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


# -- the files of a run, without a run -------------------------------------------------------------


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs() as storage:
        for name, value in storage.environment().items():
            monkeypatch.setenv(name, value)
        yield storage


def test_lines_reach_a_bucket_from_time_to_time(storage: FakeGcs) -> None:
    def there() -> list[int]:
        text = storage.under("run/").get("metrics.jsonl", b"").decode()
        return [json.loads(line)["step"] for line in text.splitlines()]

    now = 0.0
    files = RunFiles("gs://bucket/run", clock=lambda: now)

    def written(split: Split, step: int, at: float) -> list[int]:
        nonlocal now
        now = at
        files.write_metrics(step, split, {"loss": 2.0})
        return there()

    assert written(Split.TRAIN, 1, at=29.9) == []
    assert written(Split.TRAIN, 2, at=30.0) == [1, 2]
    assert written(Split.EVAL, 2, at=30.9) == [1, 2]
    assert written(Split.EVAL, 3, at=31.0) == [1, 2, 2, 3]
    assert written(Split.TRAIN, 4, at=31.0) == [1, 2, 2, 3]
    files.write_status(Status.RUNNING, 4)
    assert there() == [1, 2, 2, 3, 4]
    written(Split.TRAIN, 5, at=31.0)
    files.close()
    assert there() == [1, 2, 2, 3, 4, 5]


def test_a_growing_log_in_a_bucket_is_read_by_pieces_and_from_where_it_ended(
    storage: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing_files, "PIECE", 10_000)
    log, sent = GrowingFile(epath.Path("gs://bucket/run/metrics.jsonl")), list[int]()

    def put(lines: Sequence[bytes]) -> None:
        storage.store("run/metrics.jsonl", b"".join(line + b"\n" for line in lines), {})

    def read() -> tuple[bool, list[bytes]]:
        was_replaced, found = False, list[bytes]()
        while (piece := log.read()) is not None:
            was_replaced, found = was_replaced or piece[0], [*found, *piece[1]]
            sent.append(sum(len(line) + 1 for line in piece[1]))
        return was_replaced, found

    lines = [b"%d%s" % (number, b"x" * 100) for number in range(500)]
    put(lines)
    assert read() == (True, lines) and len(sent) > 5 and max(sent) <= 10_000
    assert log.read() is None and log.unread() == 0
    for new in ([b"new"], [b"newer"] * 200):
        lines += new
        put(lines)
        assert log.unread() == sum(len(line) + 1 for line in new)
        assert read() == (False, new)
    resumed = lines[:400] + [b"again"] * 700  # longer than what was read
    put(resumed)
    assert read() == (True, resumed) and not log.fault
    put(lines[:3])
    assert read() == (True, lines[:3])
    put([*lines[:3], b"x" * 20_000])
    assert read() == (False, []) and "a line of more than 10,000 bytes" in log.fault
    storage.objects.clear()
    assert read() == (True, []) and not log.fault
    assert storage.unknown == []


def test_the_record_of_a_run_in_a_bucket_is_read_while_it_grows(storage: FakeGcs) -> None:
    with pytest.raises(UserError, match="gs://bucket/run is not the workdir of a run"):
        open_run("gs://bucket/run")
    files = RunFiles("gs://bucket/run")
    for step in (1, 2, 3):
        files.write_metrics(step, Split.EVAL, {"loss": step / 2})
    files.write_status(Status.RUNNING, 2)
    run = open_run("gs://bucket/run")
    assert run.metrics("eval")["loss"].tolist() == [0.5, 1.0, 1.5]
    assert run.status == {"status": "running", "step": 2}
    files.rewind(2)
    files.write_metrics(4, Split.EVAL, {"loss": 8.0})
    files.write_status(Status.FINISHED, 4)
    files.close()
    assert run.metrics("eval")["step"].tolist() == [1, 2, 4]
    assert run.status == {"status": "finished", "step": 4}
    assert storage.unknown == []


def test_a_bucket_keeps_the_lines_of_a_run_before(storage: FakeGcs) -> None:
    files = RunFiles("gs://bucket/run")
    for step in (1, 2, 3):
        files.write_metrics(step, Split.EVAL, {"loss": 2.0})
    files.close()
    files = RunFiles("gs://bucket/run")
    assert files.recorded(2)[Split.EVAL] == {"loss": 2.0}
    files.rewind(2)
    files.write_status(Status.RUNNING, 2)
    files.close()
    lines = storage.under("run/")["metrics.jsonl"].decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_media_and_ids_of_trackers_reach_a_bucket_and_are_continued(storage: FakeGcs) -> None:
    class Kept(Tracker):
        def start(self, run: RunInfo) -> str:
            earlier.append(run.earlier)
            return "one"

    earlier: list[str | None] = []
    for first, last in ((0, 3), (2, 2)):
        files = RunFiles("gs://bucket/run")
        trackers = RunTrackers([Kept(), TensorBoardTracker()], files, print, writes_media=True)
        trackers.start(first, {})
        for step in range(first + 1, last + 1):
            figure = Figure(f"<svg>{step}</svg>")
            trackers.media(step, Split.EVAL, {"drawn": figure, "said": Text("yes")})
        trackers.close()
        files.close()
        if last == 3:
            assert storage.under("run/")["media/eval-drawn-00000003.svg"] == b"<svg>3</svg>"
    lines = storage.under("run/")["media.jsonl"].decode().splitlines()
    assert [(line["step"], line["kind"]) for line in map(json.loads, lines)] == [
        *((1, "figure"), (1, "text"), (2, "figure"), (2, "text"))
    ]
    assert earlier == [None, "one"]
    assert any(name.startswith("tensorboard/") for name in storage.under("run/"))


def test_what_others_write_into_a_bucket_is_seen(storage: FakeGcs) -> None:
    def there() -> list[str]:
        return [path.name for path in folder_of("gs://bucket/run").iterdir()]

    RunFiles("gs://bucket/run").close()
    assert there() == [".lock"]
    storage.objects["run/checkpoints/1/model/d"] = Stored(b"", 1000)
    assert there() == [".lock", "checkpoints"]
    assert (folder_of("gs://bucket/run") / "checkpoints" / "1").is_dir()


def test_a_bucket_that_takes_no_more_ends_a_run(storage: FakeGcs) -> None:
    files = RunFiles("gs://bucket/run")
    files.write_metrics(1, Split.TRAIN, {"loss": 2.0})
    storage.down = True
    with pytest.raises(StorageError, match=r"/status\.json .*no more"):
        files.write_status(Status.RUNNING, 1)
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        files.sync()
    storage.down = False
    files.close()
    assert b'"step": 1' in storage.under("run/")["metrics.jsonl"]


def test_a_bucket_that_cannot_be_written_is_one_line(
    storage: FakeGcs, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="gs://absent/run"):
        RunFiles("gs://absent/run")
    storage.down = True
    with pytest.raises(UserError, match=r"gs://bucket/run .*no more"):
        RunFiles("gs://bucket/run")
    assert not caplog.text


@pytest.mark.parametrize("workdir", ["az://bucket/run", "foo://x", "memory://x"])
def test_other_urls_are_refused(
    workdir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(small_experiment(tmp_path)), "--workdir", workdir]) == 2
    scheme = workdir.split("/")[0] + "//"
    assert capsys.readouterr().err == (
        f"error: {workdir}: the folder of a run must be a local path or a gs:// or s3:// URL, "
        f"not {scheme}\n"
    )


def test_without_its_library_a_url_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "gcsfs.py").write_text("raise ImportError('it is not there')")
    ended = subprocess.run(
        command(small_experiment(tmp_path), "--workdir", WORKDIR),
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {WORKDIR}: ")
    assert ended.stderr.endswith("(pip install 'spmdtrain[gcs]')\n")
    assert ended.stderr.count("\n") == 1


# -- a disk that is full ---------------------------------------------------------------------------


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path) -> None:
    files = RunFiles(str(tmp_path))
    files.write_metrics(1, Split.TRAIN, {"loss": 3.0})
    path = tmp_path / "metrics.jsonl"
    whole, limits = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 9, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"metrics\.jsonl .*too large"):
            files.write_metrics(2, Split.TRAIN, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == whole + '{"step": '
    files.write_metrics(3, Split.TRAIN, {"loss": 1.0})
    files.close()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 3]


@pytest.mark.nightly
def test_checkpoints_of_a_local_run_are_uploaded(tmp_path: Path) -> None:
    uploads = "callbacks=[UploadCheckpoints('gs://bucket/copies')],\n        model="
    config = small_experiment(
        tmp_path,
        ("        model=", f"        {uploads}"),
        ("import Experiment, RunConfig", "import Experiment, RunConfig, UploadCheckpoints"),
    )
    with fake_gcs() as storage:
        env = environment() | storage.environment()
        options = ("--workdir", tmp_path / "run", "--steps", 4, *OFTEN)
        ended = subprocess.run(
            command(config, *options), env=env, capture_output=True, text=True, timeout=BOUND
        )
        assert ended.returncode == 0 and "not uploaded" not in ended.stdout, ended
        verify = (sys.executable, "-m", "spmdtrain.checkpoints", "verify", "gs://bucket/copies/2")
        verified = subprocess.run(verify, env=env, capture_output=True, text=True, timeout=BOUND)
        assert verified.returncode == 0, verified
        assert len(storage.under("copies/4/")) > 3
