"""The evaluator beside a training: what it evaluates, what it survives, and when it ends."""

import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from etils import epath
from fake_gcs import fake_gcs
from flax import nnx
from helpers import BOUND, command, environment, events, metrics, run, saved_steps, small_experiment

from spmdtrain import MeshSpec, RunConfig, StorageError, Trainer, UserError
from spmdtrain.checkpoints.listing import Listing
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.config.options import Which
from spmdtrain.distributed import progress
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import RunFiles, Split, Status, Writer
from spmdtrain.train.evaluator import best_and_last, watch

X = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
DATA = (X, 3 * X + 2)


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


def trainer(workdir: Path | None, **options: Any) -> Trainer:
    """A line to be fitted: the loss goes down with each of its steps."""
    parts: dict[str, Any] = {
        "model": partial(nnx.Linear, 1, 1),
        "objective": squared_error,
        "optimizer": optax.sgd(0.1),
    }
    return Trainer(**parts | {"workdir": workdir and str(workdir), "steps": 4} | options)


def one_device(workdir: Path, **options: Any) -> Trainer:
    """The evaluator's trainer, on one device of the eight that the training had."""
    return trainer(workdir, mesh=MeshSpec(data=1, devices=(0,)), **options)


def trained(workdir: Path, **options: Any) -> Path:
    often = {"eval_every_steps": 1, "checkpoint_every_steps": 1, "keep_latest": 9}
    trainer(workdir, **often, **options).fit(DATA, validation=DATA)
    assert saved_steps(workdir) == [1, 2, 3, 4]
    return workdir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of four steps on eight devices that evaluated and saved each of them."""
    return trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with another learning rate: as many checkpoints of the same model, all different."""
    return trained(tmp_path_factory.mktemp("other") / "run", optimizer=optax.sgd(0.3))


def losses(workdir: Path) -> dict[int, float]:
    """What the training itself found, by step."""
    return {line["step"]: line["loss"] for line in metrics(workdir, "eval")}


def logged(workdir: Path) -> list[dict[str, Any]]:
    """The lines that the evaluator wrote."""
    path = workdir / "metrics.evaluator.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def logged_steps(workdir: Path) -> list[int]:
    return [line["step"] for line in logged(workdir)]


Act = Callable[[], None]


class Stage:
    """The training that an evaluator is beside, played in the evaluator's pauses of a second.

    Each act is played in a pause of its own. When none is left, pauses continue until `until`.
    """

    def __init__(self, whole: Path, folder: Path, until: float = 100.0) -> None:
        self.whole, self.folder, self.workdir, self.until = whole, folder, folder / "run", until
        self.now = 0.0
        self.acts: Iterator[Act] = iter(())

    def play(
        self, *script: str | Act, which: Which = Which.EACH, using: Trainer | None = None
    ) -> int:
        """Starts an evaluator; acts of a script are separated by |."""
        self.acts = chain.from_iterable(map(self.read, script))
        using = using or one_device(self.workdir)
        return watch(
            using, DATA, which=which, total_steps=4, clock=lambda: self.now, sleep=self.sleep
        )

    def sleep(self, seconds: float) -> None:
        assert seconds == 1.0
        self.now += seconds
        assert self.now < self.until, "it waits for ever"
        next(self.acts, lambda: None)()

    def read(self, script: str | Act) -> Iterator[Act]:
        """Yields the acts of a script, one for each pause."""
        if not isinstance(script, str):
            yield script
            return
        for act in filter(None, map(str.strip, script.split("|"))):
            verb, _, rest = act.partition(" ")
            if verb == "pause":
                yield from [lambda: None] * int(rest)
            else:
                yield partial(self.perform, act)

    def perform(self, acts: str) -> None:
        """Plays acts at once, separated by +."""
        for act in filter(None, map(str.strip, acts.split("+"))):
            verb, _, rest = act.partition(" ")
            if verb == "save":  # the checkpoints of these steps
                self.save(*map(int, rest.split()))
            elif verb == "remove":
                for step in rest.split():
                    shutil.rmtree(self.workdir / "checkpoints" / step)
            elif verb == "log":  # a metric of this step
                with contextlib.closing(RunFiles(str(self.workdir))) as files:
                    files.write_metrics(int(rest), Split.TRAIN, {"loss": 1.0})
            elif verb == "suspend":  # the job, for so many seconds
                self.now += float(rest)
            elif verb == "launcher":  # it says how the training ended
                progress.write_ended(self.folder, rest)
            else:  # a status, its step, and perhaps a reason
                step, _, reason = rest.partition(" ")
                with contextlib.closing(RunFiles(str(self.workdir))) as files:
                    files.write_status(Status(verb), int(step), reason or None)

    def save(self, *steps: int, of: Path | None = None) -> None:
        for step in steps:
            unfinished = self.workdir / "checkpoints" / f"{step}.orbax-checkpoint-tmp"
            shutil.copytree((of or self.whole) / "checkpoints" / str(step), unfinished)
            unfinished.rename(unfinished.with_name(str(step)))


@pytest.fixture
def stage(whole: Path, tmp_path: Path) -> Stage:
    return Stage(whole, tmp_path)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the checkpoints that were begun to be read, in order."""
    steps: list[int] = []
    restore = Trainer.restore

    def counted(self: Trainer, path: str | None = None) -> int:
        steps.append(int(Path(str(path)).name))
        assert len(steps) < 20, "it reads for ever"
        return restore(self, path)

    monkeypatch.setattr(Trainer, "restore", counted)
    return steps


# -- what it evaluates -----------------------------------------------------------------------------


@pytest.mark.slow
def test_it_finds_what_the_training_found(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = shutil.copytree(whole, tmp_path / "run")
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    using = one_device(workdir)
    assert using.mesh is not None and using.mesh.size == 1 and jax.device_count() == 8
    assert watch(using, DATA, total_steps=4, sleep=lambda _: pytest.fail("it waits")) == 0

    assert all(path.read_bytes() == content for path, content in before.items())
    added = {path.relative_to(workdir).parts[0] for path in workdir.rglob("*")} - {
        path.relative_to(workdir).parts[0] for path in before
    }
    assert added == {".lock.evaluator", "metrics.evaluator.jsonl", "tensorboard.evaluator"}

    assert logged_steps(workdir) == [1, 2, 3, 4]
    for line in logged(workdir):
        assert list(line) == ["step", "split", "trajectory", "loss"] and line["split"] == "eval"
        assert line["loss"] == pytest.approx(losses(whole)[line["step"]], rel=1e-6)
        again = one_device(workdir)
        again.restore(f"{workdir}/checkpoints/{line['step']}")
        assert again.evaluate(DATA) == {"loss": line["loss"]}
    assert len({line["loss"] for line in logged(workdir)}) == 4
    expected = {line["step"]: float(np.float32(line["loss"])) for line in logged(workdir)}
    assert curve(workdir) == expected
    output = capsys.readouterr().out
    assert f"evaluator: waiting for checkpoints in {workdir}\n" in output
    assert f"eval at step 3: loss {losses(whole)[3]:.4g}  best\n" in output
    assert "evaluator: the training has finished at step 4\n" in output
    assert "best: step 4" in output and "last: step 4" in output


def test_a_kill_after_a_line_of_metrics_loses_no_point_of_the_curves(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = shutil.copytree(whole, tmp_path / "run")
    steps: list[list[int]] = []
    write = RunFiles.write_metrics

    def write_metrics(files: RunFiles, *args: Any) -> None:
        steps.append(sorted(curve(workdir)))
        write(files, *args)

    monkeypatch.setattr(RunFiles, "write_metrics", write_metrics)
    assert watch(one_device(workdir), DATA, total_steps=4) == 0
    assert steps == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def curve(workdir: Path) -> dict[int, float]:
    """The evaluator's loss as TensorBoard shows it: points after a restart replace earlier ones."""
    points: dict[int, float] = {}
    for event in events(workdir, "tensorboard.evaluator"):
        if event.HasField("session_log"):
            points = {step: value for step, value in points.items() if step < event.step}
        for value in event.summary.value:
            assert value.tag == "eval/loss"
            points[event.step] = value.simple_value
    return points


@pytest.mark.parametrize(("which", "left"), [(Which.EACH, [1, 2, 4]), (Which.NEWEST, [4])], ids=str)
def test_started_again_it_does_not_evaluate_twice(
    which: Which, left: list[int], stage: Stage, read: list[int]
) -> None:
    stage.save(1, 2, 3)
    metrics_file = stage.workdir / "metrics.evaluator.jsonl"

    def kill() -> None:
        raise ConnectionError("killed")

    # It dies after it has logged 3; 1 and 2 are not logged.
    newest_first = Stage(stage.whole, stage.folder)
    with pytest.raises(ConnectionError):
        newest_first.play(kill, which=Which.NEWEST)
    assert logged_steps(stage.workdir) == read == [3]
    with metrics_file.open("a") as file:
        file.write('{"step": 1, "spl')  # as a kill leaves it
    stage.perform("save 4 + finished 4")
    assert stage.play(which=which) == 0
    assert read == [3, *left]
    assert logged_steps(stage.workdir) == [3, *left]


# -- what it survives ------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["read", "check_files"])
def test_a_checkpoint_removed_while_it_is_read_is_skipped(
    moment: str,
    stage: Stage,
    read: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before its manifest is read, and between that and its arrays."""
    original: Any = getattr(Manifest, moment)

    def removed_meanwhile(*arguments: Any) -> Any:
        if read and read[-1] == 2 and 2 in saved_steps(stage.workdir):
            stage.perform("remove 2")
        return original(*arguments)

    monkeypatch.setattr(Manifest, moment, removed_meanwhile)
    stage.perform("save 1 2 3 4 + finished 4")
    assert stage.play() == 0
    assert read == [1, 2, 3, 4] and logged_steps(stage.workdir) == [1, 3, 4]
    assert (
        capsys.readouterr().out.count("checkpoint 2 was removed before it was read: skipped") == 1
    )


def flip(folder: Path) -> None:
    """Flips every bit of every file below a folder, and changes no size."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))


@pytest.mark.parametrize("part", ["params", ""])
@pytest.mark.parametrize(("which", "steps"), [("each", [1, 2, 3]), ("newest", [3])])
def test_a_corrupted_checkpoint_is_skipped_once_and_hides_no_other(
    part: str,
    which: Which,
    steps: list[int],
    stage: Stage,
    read: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage.save(1, 2, 3, 4)
    corrupted = stage.workdir / "checkpoints" / "4"
    if part:
        flip(corrupted / part)
    else:
        (corrupted / "manifest.json").write_text("{}")
    assert stage.play("pause 5 | finished 4", which=which) == 0
    assert sorted(read) == [*steps, 4] and logged_steps(stage.workdir) == steps
    output = capsys.readouterr().out
    assert output.count("skipped") == 1
    assert f"checkpoint {corrupted} is corrupted: " in output


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("every", "steps"), [(1, [3, 4, 5, 6]), (5, [5, 6])])
def test_evaluations_of_states_that_the_training_has_left_count_for_nothing(
    every: int, steps: list[int], tmp_path: Path
) -> None:
    """The training goes back to step 2 while no evaluator runs, and on with a rate that is bad."""
    workdir = tmp_path / "run"
    often: dict[str, Any] = {"evaluated_by": "evaluator"}
    trainer(workdir, **often, checkpoint_every_steps=1, keep_latest=9).fit(DATA, validation=DATA)
    assert watch(one_device(workdir), DATA, total_steps=4) == 0
    before = {line["step"]: line for line in logged(workdir)}
    assert sorted(before) == [1, 2, 3, 4]  # the loss goes down with each step

    for step in (3, 4):
        flip(workdir / "checkpoints" / str(step) / "params")
    worse = {"optimizer": optax.sgd(-0.1), "steps": 6, "checkpoint_every_steps": every, **often}
    trainer(workdir, **worse, keep_latest=1).fit(DATA, validation=DATA)
    assert {"3.corrupted", "4.corrupted"} <= {p.name for p in (workdir / "checkpoints").iterdir()}
    # The later ones are not known to be worse, and 2 is the best that is known.
    assert saved_steps(workdir) == [2, *steps]
    for _ in range(2):  # the second one has nothing to do
        assert watch(one_device(workdir), DATA, total_steps=6) == 0
        after = {line["step"]: line for line in logged(workdir)}
        assert list(after) == [1, 2, *steps]
    assert (after[1], after[2]) == (before[1], before[2])
    assert after[2]["loss"] < after[5]["loss"] < after[6]["loss"]
    assert sorted(curve(workdir)) == [1, 2, *steps]
    listed = Listing.of(epath.Path(workdir / "checkpoints"), saved_steps(workdir))
    assert listed.best == 2 and listed.metrics[5]["loss"] == after[5]["loss"]


@pytest.mark.slow
def test_a_running_evaluator_forgets_states_that_the_training_has_left(
    stage: Stage, tmp_path: Path
) -> None:
    """The training goes back to step 2 and saves no step again."""
    workdir = stage.workdir
    often: dict[str, Any] = {"evaluated_by": "evaluator", "keep_latest": 9}

    def train(steps: int, every: int) -> Act:
        def act() -> None:
            options = {"steps": steps, "checkpoint_every_steps": every, **often}
            trainer(workdir, **options).fit(DATA, validation=DATA)
            if steps < 4:
                stage.perform(f"running {steps}")

        return act

    def corrupt() -> None:
        assert logged_steps(workdir) == [1, 2, 3]
        flip(workdir / "checkpoints" / "3" / "params")
        train(4, 9)()

    assert stage.play(train(3, 1), "pause 5", corrupt) == 0
    assert logged_steps(workdir) == [1, 2, 4]


def back(stage: Stage, other: Path) -> None:
    """The training goes back to step 1, and on with another learning rate."""
    stage.perform("remove 2 3")
    stage.save(2, of=other)


def test_a_checkpoint_saved_again_is_evaluated_again(stage: Stage, other: Path) -> None:
    stage.save(1, 2, 3)
    acts = partial(back, stage, other), "pause 1", partial(stage.save, 3, of=other)
    assert stage.play("pause 1", *acts, "finished 4") == 0
    expected = {1: losses(stage.whole)[1], 2: losses(other)[2], 3: losses(other)[3]}
    assert expected[2] != pytest.approx(losses(stage.whole)[2], rel=1e-2)
    assert {line["step"]: line["loss"] for line in logged(stage.workdir)} == pytest.approx(
        expected, rel=1e-6
    )
    assert logged_steps(stage.workdir) == [1, 2, 3]
    assert curve(stage.workdir) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_going_back_takes_back_what_comes_after(stage: Stage, other: Path) -> None:
    """Nothing is logged of steps that the restarted training has not reached again."""
    stage.save(1, 2, 3)
    assert stage.play(partial(back, stage, other), "failed 2 boom", which=Which.NEWEST) == 0
    assert logged_steps(stage.workdir) == [2] == list(curve(stage.workdir))


def test_a_checkpoint_of_another_model_ends_it(stage: Stage) -> None:
    stage.save(1)
    wider = one_device(stage.workdir, model=partial(nnx.Linear, 1, 2))
    with pytest.raises(UserError, match=r"params/.*float32"):
        stage.play(using=wider)
    assert logged(stage.workdir) == []


@pytest.mark.parametrize("where", ["list_checkpoints", "restore", "status"])
@pytest.mark.parametrize("seconds", [30, 1000])
def test_storage_that_does_not_answer_is_asked_for_a_minute(
    where: str,
    seconds: int,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    owners = {"restore": Trainer, "status": Run}
    owner: Any = owners.get(where, sys.modules["spmdtrain.train.evaluator"])
    original = vars(Run)["status"].fget if where == "status" else getattr(owner, where)

    def answer(*arguments: Any) -> Any:
        if 0 <= stage.now < seconds:
            raise StorageError("no route to host")
        return original(*arguments)

    monkeypatch.setattr(owner, where, property(answer) if where == "status" else answer)
    stage.perform("save 1 2 3 4 + finished 4")
    if seconds == 30:
        assert stage.play() == 0
        assert stage.now == 30.0 and logged_steps(stage.workdir) == [1, 2, 3, 4]
    else:
        with pytest.raises(StorageError, match="no route"):
            stage.play()
        assert stage.now == 60.0 and logged_steps(stage.workdir) == []
    assert capsys.readouterr().out.count("no route to host; trying again for 60 s\n") == 1


# -- when it ends ----------------------------------------------------------------------------------


class Play(NamedTuple):
    """Acts of a training beside an evaluator, and the outcome of the evaluator.

    `acts` are as `Stage` reads them, `before` what had happened when the evaluator started, and
    `now` the seconds until it ends. `silence` is how long a training may be silent, in place of an
    hour, and `launched` whether a launcher started the job.
    """

    acts: str
    now: float
    steps: list[int]
    code: int = 0
    says: str = ""
    before: str = ""
    which: Which = Which.EACH
    silence: float = 3600.0
    launched: bool = False


ENDS = {  # with the exit code of the evaluator and what it says
    "failed 2 ValueError: boom": (0, "the training has failed at step 2: ValueError: boom"),
    "preempted 2 SIGTERM": (75, "the training was preempted at step 2: SIGTERM"),
    "finished 2": (0, "the training has finished at step 2"),  # a callback stopped it
}
SILENT = "the training has failed at step {}: nothing has been heard of it for {} minutes"
FOLLOWED = "running 0 | save 1 | save 2 3 | save 4 | finished 4"
ALL = [1, 2, 3, 4]
PLAYS = {
    "begins later": Play(f"pause 1 | {FOLLOWED}", 6, ALL),
    "begins later, newest": Play(f"pause 1 | {FOLLOWED}", 6, [1, 3, 4], which=Which.NEWEST),
    "what is left at the end": Play("running 0 | save 1 2 3 4 + finished 4", 2, ALL),
    "what is left at the end, newest": Play(
        "running 0 | save 1 2 3 4 + finished 4", 2, [4], which=Which.NEWEST
    ),
    # At once where that was meant; else schedulers may start it again, within a minute.
    **{
        f"ends before its time, {end}": Play(
            f"running 0 | save 1 2 + {end}", 2 if "finished" in end else 62, [1, 2], code, says
        )
        for end, (code, says) in ENDS.items()
    },
    **{
        f"{end} twice, and a scheduler starts it again": Play(
            f"running 0 | save 1 | {end} 1 boom | pause 55 | running 0 | {end} 1 boom | pause 55 | "
            "running 1 | pause 70 | save 2 3 4 | finished 4",
            now=188,
            steps=ALL,
        )
        for end in ("failed", "preempted")
    },
    # How an earlier training ended does not end it.
    **{
        f"{end}, and another follows": Play(
            "pause 50 | running 2 | pause 80 | save 3 | save 4 | finished 4",
            now=134,
            steps=ALL,
            before=f"save 1 2 + {end}",
        )
        for end in ENDS
    },
    **{
        f"{end}, and none follows": Play("", 60, [1, 2], *codes, before=f"save 1 2 + {end}")
        for end, codes in ENDS.items()
    },
    "over before": Play("", 0, [4], before="save 4 + finished 4"),
    # A training that was killed has failed when it is silent.
    "killed": Play(
        "save 1 | running 1 | pause 98 | save 2", 221, [1, 2], 0, SILENT.format(1, 2), silence=120
    ),
    "killed at the start": Play(
        "save 1 | pause 99 | save 2", 221, [1, 2], 0, SILENT.format(0, 2), silence=120
    ),
    "never begins": Play("", 3600, [], 0, SILENT.format(0, 60)),
    **{
        f"{sign} breaks the silence": Play(
            f"pause 49 | {sign}", now, steps, before="running 2 + save 1 2", silence=60
        )
        for sign, now, steps in (
            ("running 3", 110, [1, 2]),
            ("log 1", 110, [1, 2]),
            ("save 3", 110, [1, 2, 3]),
            ("remove 1", 111, [1, 2]),
        )
    },
    "breaks the silence at its end": Play(
        "pause 59 | save 1 | pause 50 | save 4 | finished 4",
        now=112,
        steps=[1, 4],
        before="running 0",
        silence=60,
    ),
    # A scheduler that suspends a job does so with the training and the evaluator.
    "suspended": Play("running 0 | suspend 10000 | pause 60 | save 4 | finished 4", 10_064, [4]),
    # A launcher knows the end of a training that was killed.
    **{
        f"launcher says {how}": Play(
            f"running 1 | save 1 | pause 20 | launcher {how}", 23, [1], code, says, launched=True
        )
        for how, code, says in (
            ("finished", 0, "the training has finished at step 1"),
            ("preempted", 75, "the training was preempted at step 1"),
            ("failed: lost", 0, "the training has failed at step 1: lost"),
        )
    },
    "failed, and a launcher starts it again": Play(
        "save 1 | failed 1 boom | pause 100 | running 1 | save 2 3 4 | finished 4",
        now=105,
        steps=ALL,
        launched=True,
    ),
    "failed, and its launcher is gone": Play("running 0 | failed 0 boom", 602, [], launched=True),
}


def is_slow(play: Play) -> bool:
    """True if the evaluator reads the list of checkpoints over a hundred times."""
    return bool(play.steps) and 100 < play.now < 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "play",
    [
        pytest.param(play, id=name, marks=[pytest.mark.slow] * is_slow(play))
        for name, play in PLAYS.items()
    ],
)
def test_it_follows_a_training_to_its_end(
    play: Play, stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spmdtrain.train.evaluator.MAX_SILENCE", play.silence)
    if play.launched:
        monkeypatch.setenv(progress.LAUNCH, str(stage.folder))
    stage.perform(play.before)
    assert stage.workdir.exists() == bool(play.before)
    stage.until = play.now + 100
    assert stage.play(play.acts, which=play.which) == play.code
    assert (stage.now, logged_steps(stage.workdir)) == (play.now, play.steps)
    evaluations = Run(str(stage.workdir)).evaluations
    trajectories = {name for _, name in evaluations}
    assert "" not in trajectories and len(trajectories) <= 1
    assert {step: found for (step, _), found in evaluations.items()} == {
        step: {"loss": pytest.approx(losses(stage.whole)[step], rel=1e-6)} for step in play.steps
    }
    if play.says:
        assert f"evaluator: {play.says}\n" in capsys.readouterr().out


def test_metrics_that_cannot_be_got_at_are_asked_for_again(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.perform("save 4 + finished 4")
    path = stage.workdir / "metrics.jsonl"
    path.symlink_to(path)
    assert stage.play("pause 4", path.unlink) == 0
    assert stage.now == 5.0 and logged_steps(stage.workdir) == [4]
    assert f"{path} cannot be read: " in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
def test_silence_is_broken_every_five_minutes(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.until = 1000.0
    assert stage.play("running 1 | save 1 | pause 700 | finished 4") == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if "nothing new" in x]
    assert lines == 2 * [
        "evaluator: nothing new; the training is running at step 1; "
        f"still waiting for checkpoints in {stage.workdir}"
    ]


@pytest.mark.slow
def test_a_signal_ends_it_and_it_continues_when_started_again(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.save(1, 2)
    assert stage.play(partial(signal.raise_signal, signal.SIGTERM)) == 75
    assert "evaluator: SIGTERM; run the command again to resume\n" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    stage.perform("save 3 4 + finished 4")
    assert stage.play() == 0
    assert logged_steps(stage.workdir) == [1, 2, 3, 4]


def test_a_signal_ends_the_waiting_for_storage(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(workdir: str) -> Any:
        raise StorageError("no route to host")

    monkeypatch.setattr("spmdtrain.train.evaluator.list_checkpoints", answer)
    assert stage.play(partial(signal.raise_signal, signal.SIGTERM)) == 75
    assert stage.now == 1.0


@pytest.mark.slow
def test_a_signal_during_an_evaluation_loses_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.save(1, 2)
    using = one_device(stage.workdir, eval_batch_size=8)
    batches: list[int] = []

    def advance(done: int) -> None:
        batches.append(done)
        if len(batches) == 11:  # the third of the eight batches of the second checkpoint
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(using.terminal, "advance", advance)
        assert stage.play(using=using) == 75
    assert batches == [*range(1, 9), 1, 2, 3] and logged_steps(stage.workdir) == [1]
    using.evaluate(DATA)  # by itself it knows nothing of that signal
    stage.perform("finished 4")
    assert stage.play(using=using) == 0
    assert logged_steps(stage.workdir) == [1, 2]


def test_an_evaluator_whose_lock_was_removed_writes_nothing_more(stage: Stage) -> None:
    def take() -> None:
        (stage.workdir / ".lock.evaluator").unlink()
        stage.save(1)

    with pytest.raises(StorageError, match=r"\.lock\.evaluator"):
        stage.play(take)
    assert logged_steps(stage.workdir) == []


# -- what it refuses -------------------------------------------------------------------------------


def test_a_second_evaluator_is_refused_and_a_training_is_not(stage: Stage) -> None:
    def second() -> None:
        with pytest.raises(UserError, match=f"{stage.workdir} is in use"):
            watch(one_device(stage.workdir), DATA, total_steps=4)
        RunFiles(str(stage.workdir)).close()

    assert stage.play(second, "save 4 | finished 4") == 0
    assert logged_steps(stage.workdir) == [4]


def test_without_a_workdir_or_a_validation_split_there_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a workdir"):
        watch(trainer(None), DATA, total_steps=4)
    with pytest.raises(UserError, match="validation split"):
        watch(trainer(tmp_path / "run"), None, total_steps=4)
    assert list(tmp_path.iterdir()) == []


# -- what it shows and what others read ------------------------------------------------------------


def test_best_is_by_the_metric_and_direction_of_the_configuration() -> None:
    found = {
        1: {"loss": 2.0, "accuracy": 0.5},
        2: {"loss": 1.0, "accuracy": 0.5},
        3: {"loss": 1.0, "accuracy": 0.25},
        4: {"loss": math.nan, "accuracy": math.nan},
    }
    assert list(best_and_last(found, RunConfig())) == ["best: step 3", "last: step 4"]
    highest = RunConfig(best_metric="accuracy", best_direction="max")
    assert list(best_and_last(found, highest)) == ["best: step 2", "last: step 4"]
    assert list(best_and_last(found, RunConfig(best_metric="absent"))) == ["last: step 4"]
    assert best_and_last({}, RunConfig()) == {}


def test_what_an_evaluator_found_can_be_read_at_any_time(tmp_path: Path) -> None:
    assert Run(str(tmp_path / "absent")).evaluations == {}
    files = RunFiles(str(tmp_path), Writer.EVALUATOR)
    files.write_metrics(1, Split.EVAL, {"loss": 3.0})
    files.write_metrics(2, Split.EVAL, {"loss": math.inf, "accuracy": 0.5})
    files.write_metrics(1, Split.EVAL, {"loss": 2.5})
    files.write_metrics(1, Split.EVAL, {"loss": 4.5}, trajectory="other")
    files.close()
    with (tmp_path / "metrics.evaluator.jsonl").open("ab") as file:
        file.write(b"\x00\xff\n" + b'{"step": 3, "split": "eval", "loss": 1.0')
    found = Run(str(tmp_path)).evaluations
    assert found.keys() == {(1, ""), (2, ""), (1, "other")} and found[1, ""] == {"loss": 2.5}
    assert math.isnan(found[2, ""]["loss"]) and found[2, ""]["accuracy"] == 0.5
    RunFiles(str(tmp_path)).close()
    assert not (tmp_path / "metrics.jsonl").exists()


def status_of(folder: Path) -> object:
    return Run(str(folder)).status


def test_the_status_of_a_run_can_be_read_before_there_is_one(tmp_path: Path) -> None:
    assert status_of(tmp_path) is None
    with contextlib.closing(RunFiles(str(tmp_path))) as files:
        files.write_status(Status.FAILED, 3, "boom")
    assert status_of(tmp_path) == {"status": "failed", "step": 3, "reason": "boom"}
    path = tmp_path / "status.json"
    for text in ("", "[]", '{"status": "odd", "step": 1}', '{"status": ["finished"], "step": 1}'):
        path.write_text(text)
        with pytest.raises(UserError, match="not the status"):
            status_of(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"status\.json .*regular"):
        status_of(tmp_path)


# -- for real --------------------------------------------------------------------------------------


EVALUATOR = """
import importlib.util, sys
from spmdtrain import Trainer
from spmdtrain.train.evaluator import watch

path, workdir, which, total = sys.argv[1:]
spec = importlib.util.spec_from_file_location("small", path)
small = importlib.util.module_from_spec(spec)
sys.modules["small"] = small
spec.loader.exec_module(small)
config = small.Config(workdir=workdir)
experiment = small.build(config)
trainer = Trainer.from_experiment(experiment, config)
options = {"which": which, "total_steps": int(total), "poll_seconds": 0.02}
sys.exit(watch(trainer, experiment.validation, **options))
"""


def evaluator(
    config: Path, workdir: str, which: str, total: int, **variables: str
) -> subprocess.Popen[str]:
    """An evaluator on one device, as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", EVALUATOR, str(config), workdir, which, str(total)],
        env=environment(1) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_beside_a_training_that_keeps_but_one_checkpoint(tmp_path: Path) -> None:
    config, workdir = small_experiment(tmp_path), tmp_path / "run"
    options = ("--steps", 40, "--checkpoint-every-steps", 1, "--eval-every-steps", 1)
    beside = evaluator(config, str(workdir), "each", 40)
    try:
        training = run(config, "--workdir", workdir, *options, "--keep-latest", 1)
        output = beside.communicate(timeout=BOUND)[0]
    finally:
        beside.kill()
    assert training.returncode == 0, training.stderr
    assert beside.returncode == 0 and "Traceback" not in output, output
    found = logged_steps(workdir)
    assert found[-1] == 40 and found == sorted(set(found))
    for line in logged(workdir):
        assert line["loss"] == pytest.approx(losses(workdir)[line["step"]], rel=1e-6), output


@pytest.mark.nightly
def test_a_workdir_in_a_bucket(tmp_path: Path) -> None:
    config, workdir = small_experiment(tmp_path), "gs://bucket/deep/run"
    with fake_gcs() as storage:
        training = subprocess.run(
            command(config, "--workdir", workdir, "--checkpoint-every-steps", 2),
            env=environment() | storage.environment(),
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
        assert training.returncode == 0, training.stderr
        beside = evaluator(config, workdir, "each", 4, **storage.environment())
        try:
            output = beside.communicate(timeout=BOUND)[0]
        finally:
            beside.kill()
        assert beside.returncode == 0 and storage.unknown == [], output
        found = storage.under("deep/run/")
    lines, own = (
        [json.loads(line) for line in found[name].decode().splitlines()]
        for name in ("metrics.evaluator.jsonl", "metrics.jsonl")
    )
    assert [line["step"] for line in lines] == [2, 4]
    assert all(line.pop("trajectory") for line in lines)
    assert lines == [
        line | {"loss": pytest.approx(line["loss"], rel=1e-6)}
        for line in own
        if line["split"] == "eval"
    ]
    (curves,) = (name for name in found if name.startswith("tensorboard.evaluator/"))
    assert found[curves].count(b"eval/loss") == 2
