"""What happens to checkpoints, injected for real: flips, cuts, kills, full and lost disks.

The table of faults and outcomes in docs/checkpoints.md is what these tests assert.
"""

import os
import random
import re
import shutil
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_helpers import load_state
from etils import epath
from helpers import (
    BOUND,
    DIGITS,
    command,
    contents,
    environment,
    metrics,
    read_until,
    run,
    saved_steps,
    small_experiment,
    start,
    status,
    together,
)

from spmdtrain import CallbackContext, StorageError, Trainer, UserError, load_params
from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.models import MLP
from spmdtrain.record.storage import is_corruption, silence_tensorstore_shutdown
from spmdtrain.step.state import TrainState

FLIPS = 200


def trainer(workdir: Path, **options: Any) -> Trainer:
    """A small network with Adam; its kernels are large enough to be files of their own."""

    def objective(model: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": optax.softmax_cross_entropy_with_integer_labels(model(x), y)}

    return Trainer(
        model=lambda rngs: MLP(64, (128,), 8, rngs=rngs),
        objective=objective,
        optimizer=optax.adam(1e-2),
        workdir=str(workdir),
        global_batch_size=16,
        **options,
    )


def examples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(64, 64)).astype(np.float32), generator.integers(0, 8, 64)


def bits(state: Any) -> dict[str, bytes]:
    """Every array of a state by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): raw(leaf).tobytes() for path, leaf in leaves}


def raw(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


# -- corruption ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir with checkpoints 2 and 4."""
    workdir = tmp_path_factory.mktemp("saved") / "run"
    trainer(workdir, steps=4, checkpoint_every_steps=2).fit(examples())
    assert saved_steps(workdir) == [2, 4]
    return workdir


@pytest.fixture(scope="module")
def load(saved: Path) -> Callable[[Path], TrainState]:
    """Loads a checkpoint's whole state, as a resume does."""
    steps = trainer(saved, steps=4).functions

    def load(folder: Path) -> TrainState:
        return load_state(folder, steps.abstract_state, steps.shardings)

    return load


def files(folder: Path) -> list[Path]:
    """Every file of a checkpoint, in an order that is always the same."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.nightly
@pytest.mark.slow
def test_a_flipped_bit_is_harmless_or_noticed(
    saved: Path, load: Callable[[Path], TrainState], tmp_path: Path
) -> None:
    folder = tmp_path / "4"
    shutil.copytree(saved / "checkpoints" / "4", folder)
    expected, generator = bits(load(folder)), random.Random(0)
    outcomes: Counter[str] = Counter()
    for number in range(FLIPS):
        path = files(folder)[number % len(files(folder))]
        whole = path.read_bytes()
        at = generator.randrange(len(whole))
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << generator.randrange(8)]) + whole[at + 1 :]
        )
        try:
            assert bits(load(folder)) == expected, f"{path.name}, byte {at}: other values"
            outcomes["harmless"] += 1
        except CheckpointCorruptedError as error:
            # Only the sums know: Orbax read the file, and gave wrong numbers.
            outcomes["wrong numbers" if "checksum" in str(error) else "unreadable"] += 1
        path.write_bytes(whole)
    assert bits(load(folder)) == expected
    assert outcomes.total() == FLIPS and min(outcomes.values()) >= 10 and len(outcomes) == 3


@pytest.mark.parametrize("fault", ["cut", "removed"])
def test_a_file_that_is_cut_or_missing_is_named(
    fault: str, saved: Path, load: Callable[[Path], TrainState], tmp_path: Path
) -> None:
    folder = tmp_path / "4"
    shutil.copytree(saved / "checkpoints" / "4", folder)
    known = Manifest.read(epath.Path(folder)).files.keys() | {"manifest.json"}
    names = {str(path.relative_to(folder)) for path in files(folder)}
    # What Orbax writes when all is done holds nothing of the state, and nothing here reads it. Its
    # lowest version writes no commit_success.txt.
    assert names - known - {"commit_success.txt"} == {"_CHECKPOINT_METADATA"} and known <= names
    for name in sorted(known):
        path = folder / name
        whole = path.read_bytes()
        if fault == "removed":
            path.unlink()
        else:
            path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointCorruptedError, match=re.escape(name)):
            load(folder)
        path.write_bytes(whole)
    load(folder)


@pytest.mark.parametrize(
    ("item", "name", "before", "after"),
    [
        # Orbax raises NotImplementedError for the first, AssertionError for the second.
        ("params", "_sharding", "NamedSharding", "NAmedSharding"),
        (
            "training",
            "_METADATA",
            '"opt_state", "key_type": 2}, {"key"',
            '"opt_3tate", "key_type": 2}, {"key"',
        ),
    ],
)
def test_an_error_of_orbax_about_its_metadata_is_corruption(
    item: str,
    name: str,
    before: str,
    after: str,
    saved: Path,
    load: Callable[[Path], TrainState],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "4"
    shutil.copytree(saved / "checkpoints" / "4", folder)
    path = folder / item / name
    head, found, tail = path.read_text().partition(before)
    assert found
    path.write_text(head + after + tail)
    with pytest.raises(CheckpointCorruptedError, match=f"{item} cannot be read"):
        load(folder)


# Orbax compresses what it writes: a flipped bit makes other numbers, which only the sums know, or
# what cannot be decompressed. Which of them depends on the array's position in the file.
WRONG_ARRAY = r"(params|opt_state)/\S+ (is not what was saved: its checksum is|cannot be read)"


def corrupt(workdir: Path, step: int) -> None:
    """Flip one bit in the largest file of a checkpoint: it holds an array."""
    path = max(files(workdir / "checkpoints" / str(step)), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same experiment's run of six steps, and one of four with checkpoints 2, 3 and 4."""
    folder = tmp_path_factory.mktemp("small")
    for name, steps in (("six", 6), ("four", 4)):
        trainer(folder / name, steps=steps, checkpoint_every_steps=1).fit(examples())
    return folder


@pytest.mark.slow
def test_a_corrupted_newest_checkpoint_falls_back_to_the_previous_one_with_the_same_bits(
    small_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(small_runs / "four", workdir)
    corrupt(workdir, 4)
    (workdir / "checkpoints" / "3" / "manifest.json").unlink()
    trainer(workdir, steps=6, checkpoint_every_steps=1).fit(examples())
    output = capsys.readouterr().out
    first, second = re.findall(
        r"checkpoint \S+/(\d) is corrupted: (.*); trying the one before", output
    )
    assert first[0] == "4" and re.match(WRONG_ARRAY, first[1])
    assert second == (
        "3",
        "manifest.json is missing: the save was interrupted, or it is not a checkpoint",
    )
    assert "resumed from step 2 of" in output and "quarantined as 4.corrupted" in output
    assert saved_steps(workdir) == [4, 5, 6]
    expected = bits(load_params(str(small_runs / "six")))
    assert bits(load_params(str(workdir))) == expected
    assert [line["step"] for line in metrics(workdir, "train")] == [1, 6]
    # What was corrupted is kept for a look, and counts no more.
    names = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert names == {"3.corrupted", "4.corrupted", "4", "5", "6"}


@pytest.mark.slow
def test_without_a_valid_checkpoint_the_run_stops_and_changes_nothing(
    small_runs: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(small_runs / "four", workdir)
    for step in saved_steps(workdir):
        corrupt(workdir, step)
    before = contents(workdir)
    for resume in ("auto", "must"):
        with pytest.raises(UserError, match=r"none of the 3 .* 4"):
            trainer(workdir, steps=6, resume=resume).fit(examples())
    with pytest.raises(UserError, match=r"resume is 'never'.* step 4"):
        trainer(workdir, steps=6, resume="never").fit(examples())
    assert contents(workdir) == before


@pytest.mark.slow
def test_verify_says_of_each_checkpoint_what_is_wrong(
    small_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(small_runs / "four", workdir)
    assert checkpoints(["verify", str(workdir)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [(row.split()[1], row.split()[-2]) for row in rows] == [
        ("4", "valid"),
        ("3", "valid"),
        ("2", "valid"),
    ]
    corrupt(workdir, 4)
    cut = files(workdir / "checkpoints" / "3")[-1]
    cut.write_bytes(cut.read_bytes()[:-1])
    assert checkpoints(["verify", str(workdir)]) == 1
    four, three, two = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("│")
    )
    assert re.search(WRONG_ARRAY, four)
    assert re.search(rf"{cut.name} has [\d,]+ bytes, and had", three)
    assert two.split()[-2] == "valid"


@pytest.mark.parametrize(
    ("error", "corrupted"),
    [
        (ValueError("DATA_LOSS: Error decoding manifest: CRC-32C checksum"), True),
        (FileNotFoundError(2, "No such file or directory"), True),
        (KeyError("chunk_shape"), True),
        (ValueError("RESOURCE_EXHAUSTED: Error opening: Too many open files"), False),
        (ValueError("PERMISSION_DENIED: Error reading local file"), False),
        (PermissionError(13, "Permission denied"), False),
        (OSError(5, "Input/output error"), False),
        (TimeoutError(), False),
        (MemoryError(), False),
        (RuntimeError("a fault of ours"), False),
    ],
    ids=str,
)
def test_what_cannot_be_got_at_now_is_not_taken_for_corruption(
    error: Exception, corrupted: bool
) -> None:
    assert is_corruption(error) is corrupted
    wrapped = Exception("Encountered error while reading array index")
    wrapped.__cause__ = error
    if not isinstance(error, KeyError):
        assert is_corruption(wrapped) is corrupted


@pytest.mark.slow
def test_a_checkpoint_out_of_reach_ends_the_run_and_is_not_quarantined(
    small_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(small_runs / "four", workdir)
    before, stat = contents(workdir), os.stat

    def stale(path: Any, *args: Any, **keywords: Any) -> os.stat_result:
        if "4/params" in str(path):
            raise OSError(116, "Stale file handle", str(path))
        return stat(path, *args, **keywords)

    monkeypatch.setattr(os, "stat", stale)
    with pytest.raises(StorageError, match=r"4 .*Stale file handle"):
        trainer(workdir, steps=6).fit(examples())
    monkeypatch.undo()
    assert contents(workdir) == before


@pytest.mark.slow
def test_a_checkpoint_under_another_name_is_not_taken_for_it(
    small_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(small_runs / "four", folder.parent)
    shutil.copytree(folder / "2", folder / "9")
    trainer(folder.parent, steps=6).fit(examples())
    output = capsys.readouterr().out
    assert "9 is corrupted: it is the checkpoint of step 2 under another name; trying" in output
    assert "resumed from step 4 of" in output
    assert bits(load_params(str(folder.parent))) == bits(load_params(str(small_runs / "six")))


@pytest.mark.nightly
def test_reading_during_a_run_always_finds_a_valid_checkpoint(tmp_path: Path) -> None:
    """With one checkpoint kept, what a reader has just listed is gone the next moment."""
    options = ("--checkpoint-every-steps", 1, "--keep-latest", 1, "--keep-best", 0)
    process = start(DIGITS, "--steps", 100_000, *options, "--workdir", tmp_path)
    try:
        read_until(process, "step 10/")
        # The rest of what it prints is not to fill the pipe and stop it.
        threading.Thread(target=process.communicate, daemon=True).start()
        found = [len(bits(load_params(str(tmp_path)))) for _ in range(60)]
    finally:
        process.kill()
        process.wait()
    assert found == [6] * 60


@pytest.mark.slow
def test_other_folders_beside_the_checkpoints_are_left_alone(
    small_runs: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(small_runs / "four", workdir)
    others = ("best_7", "007", "12abc", "9.orbax-checkpoint-tmp")
    for name in others:
        shutil.copytree(workdir / "checkpoints" / "4", workdir / "checkpoints" / name)
    # What a run was removing when it was killed.
    shutil.copytree(workdir / "checkpoints" / "2", workdir / "checkpoints" / ".removed" / "1")
    trainer(workdir, steps=6, checkpoint_every_steps=1).fit(examples())
    assert bits(load_params(str(workdir))) == bits(load_params(str(small_runs / "six")))
    names = {path.name for path in (workdir / "checkpoints").iterdir()}
    assert names == {"best_7", "007", "12abc", "4", "5", "6"}


# -- a save and the steps beside it ----------------------------------------------------------------


@pytest.mark.slow
def test_steps_taken_while_a_save_is_written_never_leak_into_it(tmp_path: Path) -> None:
    """The state is donated to the next step at once; each checkpoint holds what it was then."""
    expected: dict[int, dict[str, bytes]] = {}
    unfinished: list[int] = []

    def remember(event: CallbackContext) -> None:
        expected[event.step] = bits(event.trainer.state)

    def look(event: CallbackContext) -> None:
        # A step after a save has been dispatched: is that save still pending?
        if (
            event.step - 1 in expected
            and not (tmp_path / "checkpoints" / f"{event.step - 1}").exists()
        ):
            unfinished.append(event.step - 1)

    made = trainer(
        tmp_path,
        steps=12,
        checkpoint_every_steps=2,
        keep_latest=99,
        callbacks={"checkpoint": remember, "step": look},
    )
    made.fit(examples())
    assert sorted(expected) == saved_steps(tmp_path) == list(range(2, 13, 2))
    assert len(unfinished) >= 3  # else nothing was put to the test
    for step, state in expected.items():
        folder, steps = tmp_path / "checkpoints" / str(step), made.functions
        found = load_state(folder, steps.abstract_state, steps.shardings)
        assert bits(found) == state, step


@pytest.mark.slow
def test_a_save_that_fails_for_another_reason_is_not_reported_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = ocp.CheckpointManager.save

    def fails_at_four(self: Any, step: int, *args: Any, **keywords: Any) -> bool:
        if step == 4:
            raise RuntimeError("a fault of ours")
        return bool(save(self, step, *args, **keywords))

    monkeypatch.setattr(ocp.CheckpointManager, "save", fails_at_four)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        trainer(tmp_path, steps=6, checkpoint_every_steps=2).fit(examples())
    found = status(tmp_path)
    assert found == {"status": "failed", "step": 2, "reason": "RuntimeError: a fault of ours"}
    assert saved_steps(tmp_path) == [2]


@pytest.mark.slow
def test_an_older_checkpoint_that_cannot_be_removed_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def not_removed(source: Any, target: Any, **folders: Any) -> None:
        if ".removed" in str(target):
            raise PermissionError(13, "Permission denied", str(source))
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", not_removed)
    options = {"checkpoint_every_steps": 1, "keep_latest": 1, "keep_best": 0}
    message = "step 2 is saved, but an older one could not be removed, in .*: Permission denied"
    with pytest.raises(StorageError, match=message):
        trainer(tmp_path, steps=6, **options).fit(examples())
    assert status(tmp_path)["step"] == 2 and saved_steps(tmp_path) == [1, 2]


# -- kills -----------------------------------------------------------------------------------------

STEPS = 60
KILLED = (
    *("--steps", STEPS, "--checkpoint-every-steps", 1, "--log-every", 1),
    *("--eval-every-steps", STEPS),
)
# A megabyte beside the line, so that to save takes longer than to train.
WIDE = """class Wide(nnx.Module):
    def __init__(self, rngs):
        self.line = nnx.Linear(1, 1, rngs=rngs)
        self.ballast = nnx.Linear(512, 512, rngs=rngs)

    def __call__(self, x):
        return self.line(x)


def objective("""


def killed_again_and_again(experiment: Path, workdir: Path, seed: int, kills: int) -> None:
    """Kill a run at random moments while it saves, start it again each time, and let it end."""
    generator, reached = random.Random(seed), 0
    for _ in range(kills):
        process = start(experiment, *KILLED, "--workdir", workdir, devices=2)
        # A save waits for the one before it, so that after three steps the first of them is saved,
        # however slow the machine; by time alone a busy one may be killed before every save.
        seen = read_until(process, f"step {reached + generator.randint(3, 6)}/")
        time.sleep(generator.uniform(0, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        if reached:
            assert f"resumed from step {reached} of" in seen and "corrupted" not in seen, seen
        whole = saved_steps(workdir)
        assert max(whole, default=0) >= reached
        for step in whole:  # whatever has a name is whole
            Manifest.read(epath.Path(workdir / "checkpoints" / str(step)))
        reached = max(whole, default=0)
    assert 0 < reached < STEPS
    ended = run(experiment, *KILLED, "--workdir", workdir, devices=2)
    assert ended.returncode == 0 and f"resumed from step {reached} of" in ended.stdout, ended.stderr


@pytest.mark.nightly  # `test_resume.py` kills a run once
@pytest.mark.parametrize("kills", [1, 3])
def test_a_run_that_is_killed_resumes_from_its_newest_checkpoint_with_the_same_bits(
    tmp_path: Path, kills: int
) -> None:
    whole, one, other = (tmp_path / name for name in ("whole", "one", "other"))
    experiment = small_experiment(
        tmp_path, ("partial(nnx.Linear, 1, 1)", "Wide"), ("def objective(", WIDE)
    )
    together(
        lambda: killed_again_and_again(experiment, one, 1, kills),
        lambda: killed_again_and_again(experiment, other, 2, kills),
    )
    assert run(experiment, *KILLED, "--workdir", whole, devices=2).returncode == 0
    expected = bits(load_params(str(whole)))
    for workdir in (one, other):
        assert {path.name for path in (workdir / "checkpoints").iterdir()} == {
            str(step) for step in (STEPS - 2, STEPS - 1, STEPS)
        }
        assert metrics(workdir) == metrics(whole)
        assert bits(load_params(str(workdir))) == expected
        assert checkpoints(["verify", str(workdir)]) == 0


# -- storage that fails ----------------------------------------------------------------------------


def ended_for(ended: subprocess.CompletedProcess[str], workdir: Path, reason: str) -> None:
    """Assert that a run failed in one line, which its status holds too."""
    assert ended.returncode == 1, (ended.stdout, ended.stderr)
    (line,) = ended.stderr.splitlines()
    assert re.fullmatch(f"failed: {reason}", line), line
    found = status(workdir)
    assert found["status"] == "failed" and found["reason"] == line.replace("failed", "StorageError")


def in_own_mounts(script: str, *options: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount; `$@` is the command of the run. Skips where it may not."""
    may = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], check=False)
    if may.returncode != 0:
        pytest.skip("no mounts of its own: unshare -rm is not allowed here")
    return subprocess.run(
        ["unshare", "-rm", "sh", "-euc", script, "sh", *command(DIGITS, *options)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


SAVING = ("--hidden", 128, "--steps", 40, "--checkpoint-every-steps", 10, "--keep-latest", 99)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_which_resumes_after_space_is_freed(tmp_path: Path) -> None:
    disk, copy, workdir = tmp_path / "disk", tmp_path / "copy", tmp_path / "disk" / "run"
    disk.mkdir()
    ended = in_own_mounts(
        f"""
        mount -t tmpfs -o size=512k none {disk}
        code=0; "$@" || code=$?
        cp -r {workdir} {copy}
        mount -o remount,size=64m {disk}
        "$@" > {tmp_path}/again.out
        cp -r {workdir} {tmp_path}/again
        exit $code
        """,
        *SAVING,
        "--workdir",
        workdir,
    )
    full = re.escape(f"{workdir}/checkpoints")
    ended_for(ended, copy, rf"step (20|30) could not be saved in {full}: No space left on device.*")
    failed = int(re.findall(r"step (\d+)", ended.stderr)[0])
    assert saved_steps(copy) == list(range(10, failed, 10)) and status(copy)["step"] == failed - 10
    # Where a thread that was still writing has left something behind, the next start removes it.
    names = {path.name for path in (tmp_path / "again" / "checkpoints").iterdir()}
    assert names == {"10", "20", "30", "40"}
    assert checkpoints(["verify", str(copy)]) == 0
    assert f"resumed from step {failed - 10} of" in (tmp_path / "again.out").read_text()


@pytest.mark.slow
def test_a_folder_that_becomes_read_only_ends_the_run(tmp_path: Path) -> None:
    workdir, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    ended = in_own_mounts(
        f"""
        mount -t tmpfs none {folder}
        "$@" & run=$!
        until [ -d {folder}/20 ]; do kill -0 $run; sleep 0.05; done
        until mount -o remount,ro {folder} 2> /dev/null; do sleep 0.01; done
        code=0; wait $run || code=$?
        cp -r {folder} {tmp_path}/kept
        exit $code
        """,
        *(
            "--hidden",
            128,
            "--steps",
            100_000,
            "--checkpoint-every-steps",
            10,
            "--workdir",
            workdir,
        ),
    )
    reason = rf"step \d+ could not be saved in {re.escape(str(folder))}: Read-only file system.*"
    ended_for(ended, workdir, reason)
    steps = saved_steps_of(tmp_path / "kept")
    assert len(steps) >= 2 and status(workdir)["step"] == steps[-1]


def saved_steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


@pytest.mark.nightly
def test_a_lost_folder_ends_the_run(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    process = start(
        DIGITS, "--steps", 100_000, "--checkpoint-every-steps", 10, "--workdir", workdir
    )
    read_until(process, "step 50/")
    (workdir / "checkpoints").rename(tmp_path / "elsewhere")
    rest = process.communicate(timeout=BOUND)[0]
    assert process.returncode == 1
    last = rest.splitlines()[-1]
    assert re.match(r"failed: step \d+ could not be saved in \S+/checkpoints: ", last), rest
    assert "Traceback" not in rest
    assert status(workdir)["status"] == "failed"
    assert len(saved_steps_of(tmp_path / "elsewhere")) >= 3


def test_after_a_failure_unawaited_coroutines_of_orbax_cause_no_warning() -> None:
    """Which of its coroutines that are differs from run to run."""

    def save_many() -> Any:
        async def write_fragment() -> None: ...

        return write_fragment()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_tensorstore_shutdown.__wrapped__()
        save_many()  # released at once, never awaited
        warnings.warn("others are heard", RuntimeWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["others are heard"]


@pytest.mark.nightly
def test_a_file_that_may_not_be_written_ends_the_run_within_the_next_save(tmp_path: Path) -> None:
    """A limit on the size of files: what a save cannot write is known when it is waited for."""
    workdir = tmp_path / "run"
    small_files = ("sh", "-c", 'ulimit -f 512; exec "$@"', "sh")  # 256 kB
    ended = subprocess.run(
        [*small_files, *command(DIGITS, *SAVING, "--hidden", 512, 512, "--workdir", workdir)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    ended_for(ended, workdir, r"step 10 could not be saved in \S+: File too large")
    assert "step 20/40" in ended.stdout and "step 30/40" not in ended.stdout
    assert list((workdir / "checkpoints").iterdir()) == [] and status(workdir)["step"] == 0
