"""The log of a run: its performance, waits and phases, its events, media and profile."""

import contextlib
import gc
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import REPOSITORY, events, metrics, status

from spmdtrain import (
    CallbackContext,
    Experiment,
    Figure,
    FunctionModel,
    Histogram,
    Image,
    Loop,
    MeshSpec,
    RunConfig,
    Table,
    Text,
    Tracker,
    Trainer,
    UserError,
)
from spmdtrain.config.overrides import with_trackers
from spmdtrain.distributed.progress import CONTEXT, Phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError
from spmdtrain.record.lines import RunTimes, run_times
from spmdtrain.record.run import Run
from spmdtrain.train.executor import ProfiledSteps
from spmdtrain.train.run_logger import StepTimer, TimeAccount, goodput_line
from spmdtrain.xla import chips

TOKENS = np.random.default_rng(0).integers(0, 32, (64, 9)).astype(np.int32)
WEIGHTS = np.ones((64, 8), np.float32)
WEIGHTS[:, :2] = 0  # of eight tokens, six are trained on


def objective(params: Any, batch: Any) -> dict[str, Any]:
    tokens, weights = batch
    logits = params["embed"][tokens[:, :-1]] @ params["out"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return {"loss": (loss, weights)}


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"embed": jax.random.normal(key, (32, 16)), "out": jnp.zeros((16, 32))}


def fit(workdir: Path | None, steps: int, **options: Any) -> None:
    given: dict[str, Any] = {
        "model": FunctionModel(init),
        "objective": objective,
        "optimizer": optax.sgd(0.1),
        "strategy": "mirrored",
        "global_batch_size": 16,
        "log_every": 2,
        "checkpoint_every_steps": 4,
        "workdir": str(workdir) if workdir else None,
        "terminal": Terminal(quiet=True),
    }
    Trainer(**given | options).fit((TOKENS, WEIGHTS), steps=steps)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Values(Tracker):
    """Keeps the values that it receives."""

    name = "values"

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.found |= values


@pytest.mark.slow
def test_trackers_receive_the_performance_of_a_run_without_files() -> None:
    tracker = Values()
    fit(None, 6, checkpoint_every_steps=None, trackers=[tracker])
    speed = {"examples_per_second", "steps_per_second", "tokens_per_second", "input_wait"}
    assert {f"speed/{name}" for name in speed} | {"time/goodput"} <= set(tracker.found)
    steps, tokens = (tracker.found[f"speed/{name}_per_second"] for name in ("steps", "tokens"))
    assert tokens == pytest.approx(steps * 16 * 6)


def test_a_part_of_a_gpu_has_the_memory_in_its_name_and_no_known_peak() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert chips.peak_flops(name) == chips.CHIPS["h100"].flops
    assert chips.peak_flops(f"{name} MIG 1g.10gb") is None
    assert chips.memory_of(f"{name} MIG 1g.10gb") == 10 * chips.GB


@pytest.mark.slow
def test_a_run_of_two_starts_writes_its_speed_its_events_and_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "KINDS", (("cpu", "v3"), *chips.KINDS))
    monkeypatch.chdir(tmp_path)
    tmp_path = tmp_path / "runs" / "mine"
    fit(tmp_path, 4)
    fit(tmp_path, 8)

    program = json.loads((tmp_path / "program.json").read_text())
    # Products of 16 x 8 tokens: one forward, two backward; no gradient is one of a table's lookup.
    assert program["flops_per_step"] == 3 * 2 * (16 * 8) * 16 * 32
    assert program["parameters"] == 2 * 32 * 16 and program["mesh"] == {"data": 8}
    assert program["peak_flops_per_device"] == chips.CHIPS["v3"].flops / 2
    assert [(c["kind"], c["axes"], c["count"]) for c in program["collectives"]] == [
        ("all-reduce", ["data"], 1)
    ]
    assert program["sharding"][0] == {
        "path": "embed",
        "shape": [32, 16],
        "dtype": "float32",
        "spec": "replicated",
        "bytes_per_device": 2048,
    }

    of_speed = lines(tmp_path / "performance.jsonl")
    assert [line["step"] for line in of_speed] == [1, 2, 4, 6, 8]
    assert all(0 <= line["goodput"] <= 1 for line in of_speed)
    assert not any("device_memory_bytes" in line for line in of_speed)
    for line in of_speed:
        if (steps := line.get("steps_per_second")) is None:
            continue
        assert line["examples_per_second"] == pytest.approx(16 * steps)
        assert line["tokens_per_second"] == pytest.approx(16 * 6 * steps)
        peak = 8 * program["peak_flops_per_device"]
        if (share := line.get("model_flops_utilization")) is not None:
            assert share == pytest.approx(program["flops_per_step"] * steps / peak)
    assert "model_flops_utilization" in of_speed[-1]

    events = Run(str(tmp_path)).events
    kinds = [event["event"] for event in events if event["event"] != "phases"]
    one = ["start", "checkpoint", "end"]
    assert kinds == one + one
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 4]
    times = run_times(events)
    assert times.lost["repeated"] == 0 and times.lost["compile"] > 0
    assert times.productive + sum(times.lost.values()) == pytest.approx(times.wall, rel=0.05)
    shown = goodput_line(times)
    assert shown.startswith("goodput ") and len(shown) <= 80

    # The page describes every key, and its code reads these files.
    page = (REPOSITORY / "docs" / "logging.md").read_text()
    described = set(re.findall(r"`(\w+)`", page))
    of_events = {key for event in events for key in event.get("seconds", {})}
    cells = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert of_events <= cells
    assert {*of_speed[-1], *program} <= described | {"step", "time"}
    assert {"gradient_norm", "parameter_norm", "update_norm"} <= cells & {*metrics(tmp_path)[0]}
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["times"] == times


def test_the_goodput_line_has_the_largest_losses_in_at_most_80_characters() -> None:
    lost = {"compile": 351.9, "save": 156.4, "down": 117.3, "host": 3.0}
    times = RunTimes(3910.0, 3245.3, lost)
    assert goodput_line(times) == "goodput 83 % of 1:05:10: compile 9 %, save 4 %, down 3 %"
    many = RunTimes(100.0, 0.0, {f"a phase with a long name {n}": 10.0 for n in range(10)})
    assert len(goodput_line(many)) <= 80


def test_the_memory_is_that_of_the_fullest_device() -> None:
    class Device:
        def __init__(self, peak: int | None) -> None:
            self._peak = peak

        def memory_stats(self) -> dict[str, int] | None:
            return None if self._peak is None else {"peak_bytes_in_use": self._peak}

    assert chips.device_memory([Device(3), Device(7), Device(None)]).peak == 7
    assert chips.device_memory(jax.devices()) == (None, None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),  # slower than the one in the table
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_a_device_is_recognized_by_the_name_that_jax_gives_it(kind: str, name: str | None) -> None:
    found = chips.chip_of(kind)
    assert (found and found.name) == name


def test_a_failed_run_has_its_status_although_its_events_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise StorageError("events.jsonl: no space left on device")

    def fail(event: CallbackContext) -> None:
        raise RuntimeError("the callback fails")

    monkeypatch.setattr(TimeAccount, "end", full)
    with pytest.raises(RuntimeError, match="the callback fails"):
        fit(tmp_path, 2, callbacks={"step": fail})
    assert status(tmp_path)["status"] == "failed"


# -- input_wait: the share of the training time in which the devices waited for batches ------------

ROWS = np.ones((80, 4), np.float32)
READ = 0.01  # seconds


class Slow:
    """A dataset whose batches take `READ` seconds each."""

    def __len__(self) -> int:
        return len(ROWS)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(READ)
        return {"x": ROWS[indices]}


def linear_objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"loss": model(batch["x"])}


def slow_step(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Takes longer than the reading of a batch."""
    product = jax.lax.fori_loop(0, 60, lambda _, x: x @ x / 400, jnp.ones((400, 400)))
    return {"loss": model(batch["x"]) * product[0, 0]}


def share_of_epoch(workdir: Path, data: Any, of: Any, steps: int = 80) -> float:
    model = FunctionModel(lambda key: jnp.ones(4), lambda params, x: x @ params)
    fitted = Trainer(
        model=model,
        objective=of,
        optimizer=optax.sgd(0.0),
        global_batch_size=8,
        terminal=Terminal(),
        mesh=MeshSpec(devices=(0,)),
        workdir=str(workdir),
    )
    fitted.fit(data, steps=steps)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["input_wait"] for line in lines if line["split"] == "epoch"]
    return float(np.mean(epochs))


@pytest.mark.slow
def test_steps_wait_for_a_slow_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert share_of_epoch(tmp_path, Slow(), linear_objective) > 0.7
    out = capsys.readouterr().out
    shown = [float(x) for x in re.findall(r"^step .* steps/s  input_wait (\S+)%  ", out, re.M)]
    written = [
        value.simple_value
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag == "speed/input_wait"
    ]
    np.testing.assert_allclose(shown, 100 * np.array(written), atol=0.051)
    assert np.median(written) > 0.7
    assert re.search(r"^epoch 1 .* examples/s  input_wait \d\d\.\d%$", out, re.M)


@pytest.mark.slow
def test_a_read_that_ends_before_the_steps_do_is_no_wait(tmp_path: Path) -> None:
    assert share_of_epoch(tmp_path / "memory", {"x": ROWS}, slow_step, steps=20) < 0.05
    assert share_of_epoch(tmp_path / "reads", Slow(), slow_step, steps=20) < 0.1


def test_a_loop_measures_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with Loop(steps=30, global_batch_size=8, terminal=Terminal()) as loop:
        state = loop.start(lambda key: {"params": jnp.ones(4)}, train=Slow())
        step = loop.compile_step(lambda state, batch, key: (state, {"loss": jnp.mean(batch["x"])}))
        for batch in loop.batches():
            state, output = step(state, batch)
            loop.end_step(state, output)
    shown = re.findall(r"input_wait (\S+)%", capsys.readouterr().out)
    assert max(map(float, shown)) > 40  # a busy machine is slow at the rest, too


def test_the_share_is_of_the_time_since_the_last_reading() -> None:
    now = [10.0]
    timer = StepTimer(lambda: now[0])

    def share(step: int, seconds: float) -> float | None:
        now[0] = seconds
        return timer.read(step)[1]

    timer.restart(0)
    assert share(3, 11.0) is None  # not counted, as with parameter servers
    timer.count_wait(1.0)
    timer.count_wait(0.5)
    assert share(4, 15.0) == 0.3
    timer.count_wait(0.5)
    assert share(4, 16.0) == 0.3  # no step since: the last reading
    assert share(5, 17.0) == 0.25
    timer.count_wait(9.0)
    assert share(6, 18.0) == 1.0
    now[0] = 20.0
    timer.restart(6)
    assert share(6, 21.0) is None and timer.waited == 11.0


# -- the shares of a run's time: waiting for the devices counts as steps, also on the host ---------

EXAMPLES = {"x": np.ones((32, 4), np.float32)}
STEPS = 8
OPTIONS: dict[str, Any] = {
    "steps": STEPS,
    "global_batch_size": 8,
    "mesh": MeshSpec(devices=(0,)),
    "terminal": Terminal(quiet=True),
}


def product(x: jax.Array) -> jax.Array:
    """A product that takes far longer than the host needs for a step."""
    whole = jax.lax.fori_loop(0, 60, lambda _, a: a @ a / 500, jnp.ones((500, 500)) + x.sum() * 0)
    return whole[0, 0]


def train(callbacks: Any = (), validation: Any = None, **options: Any) -> None:
    Trainer(
        model=FunctionModel(lambda key: jnp.ones(4), lambda params, x: x @ params),
        objective=lambda model, batch: {"loss": model(batch["x"]) * product(batch["x"])},
        optimizer=optax.sgd(0.0),
        callbacks=callbacks,
        **OPTIONS | options,
    ).fit(EXAMPLES, validation=validation)


def loop_of_steps(with_batches: bool) -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        return state, {"loss": product(batch["x"])}

    with Loop(**OPTIONS) as loop:
        state = loop.start(lambda key: {"params": {"w": jnp.zeros(())}}, train=EXAMPLES)
        compiled = loop.compile_step(step)
        batch = loop.shard_batch({"x": EXAMPLES["x"][:8]})
        for given in loop.batches() if with_batches else loop.steps():
            state, output = compiled(state, given if with_batches else batch)
            loop.end_step(state, output)


def busy(event: Any) -> None:
    """The host works while the devices do, and for a shorter time."""
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass


RUNS: dict[str, Callable[[], None]] = {
    "trainer": train,
    "several steps a dispatch": lambda: train(steps_per_dispatch=4),
    "callbacks beside the steps": lambda: train({"step": busy}),
    "loop": lambda: loop_of_steps(True),
    "loop without data": lambda: loop_of_steps(False),
}


def seconds_of(run: Callable[[], None]) -> dict[str, float]:
    gc.disable()  # a full collection among the objects of all tests takes longer than a step
    try:
        run()
    finally:
        gc.enable()
    assert CONTEXT.clock is not None
    found = CONTEXT.clock.read()
    return {phase: found.get(phase, 0.0) for phase in Phase}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_time_of_the_devices_counts_as_steps(name: str) -> None:
    found = seconds_of(RUNS[name])
    assert found["step"] > 3 * (found["host"] + found["load"]), found


@pytest.mark.slow
def test_the_time_of_an_evaluation_is_its_own() -> None:
    validation = {"x": np.ones((8 * STEPS, 4), np.float32)}
    found = seconds_of(lambda: train(validation=validation, eval_batch_size=8, steps=1))
    assert found["evaluate"] > 3 * (found["host"] + found["load"] + found["step"]), found


# -- media: declared for evaluations, and logged by callbacks and loops ----------------------------

X = np.arange(32, dtype=np.float32).reshape(32, 1) / 32
Y = 3 * X


def trainer(**options: Any) -> Trainer:
    return Trainer(
        model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        objective=lambda model, batch: {"loss": ((model(batch[0]) - batch[1]) ** 2)[:, 0]},
        optimizer=optax.sgd(0.1),
        **options,
    )


def media_lines(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "media.jsonl").read_text().splitlines()]


def declared(model: Any, batch: Any) -> dict[str, Any]:
    """The whole batch, and a value that mixes its examples, which padding rows would change."""
    x = batch[0][:, 0]
    return {"rows": Table({"x": x, "mean": jnp.full_like(x, x.mean())})}


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 13])
def test_declared_media_see_the_first_batch_without_padding(size: int, tmp_path: Path) -> None:
    for devices in (8, 1):
        workdir = tmp_path / str(devices)
        options: dict[str, Any] = {"strategy": "one_device"} if devices == 1 else {}
        trainer(workdir=str(workdir), media=declared, eval_batch_size=size, **options).fit(
            (X, Y), validation=(X[::-1], Y[::-1]), epochs=1
        )
        (line,) = media_lines(workdir)
        assert (line["step"], line["split"], line["name"]) == (1, "eval", "rows")
        x = X[::-1][:size, 0]
        assert [row[0] for row in line["rows"]] == x.tolist()
        np.testing.assert_allclose([row[1] for row in line["rows"]], x.mean(), rtol=1e-6)


def test_wrong_declared_media_end_the_run_before_its_first_step(tmp_path: Path) -> None:
    cases = {
        r"media: 'a'.*65 images": lambda model, batch: {"a": Image(jnp.zeros((65, 2, 2, 1)))},
        "media: 'a' is a Figure, which has no arrays": lambda model, batch: {
            "a": Figure("<svg></svg>")
        },
        "media got a list": lambda model, batch: [Text("a")],
    }
    for number, (message, media) in enumerate(cases.items()):
        workdir = tmp_path / str(number)
        with pytest.raises(UserError, match=message):
            trainer(workdir=str(workdir), media=media).fit((X, Y), validation=(X, Y), steps=1)
        assert not (workdir / "metrics.jsonl").exists()
    with pytest.raises(UserError, match="media is a dict: it must be a function"):
        trainer(media={"a": Text("a")})


@pytest.mark.slow
def test_callbacks_log_for_their_step_and_a_resume_removes_later_media(tmp_path: Path) -> None:
    def log(event: Any) -> None:
        event.log({event.event: Text(f"at {event.step}")})
        if event.event == "step":  # the next step is given the memory of these arrays
            event.log({"weights": Histogram(event.trainer.state.params["kernel"], bins=1)})

    def run(steps: int, **more: Any) -> None:
        options: dict[str, Any] = {"checkpoint_every_steps": 2, "log_every": 1}
        trainer(workdir=str(tmp_path), callbacks=callbacks | more, **options).fit(
            (X, Y), validation=(X, Y), test=(X, Y), steps=steps
        )

    def stop(event: Any) -> None:
        if event.step == 3:
            raise RuntimeError("killed")

    callbacks: dict[str, Any] = dict.fromkeys(["step", "log", "evaluation", "fit_end"], log)
    with pytest.raises(RuntimeError, match="killed"):
        run(4, checkpoint=lambda event: None, step=[log, stop])
    assert max(line["step"] for line in media_lines(tmp_path)) == 3
    run(4)
    found = [(line["step"], line["split"], line["name"]) for line in media_lines(tmp_path)]
    assert sorted(found) == sorted(
        [
            *(
                (step, "train", name)
                for step in (1, 2, 3, 4)
                for name in ("step", "log", "weights")
            ),
            *((step, "eval", "evaluation") for step in (1, 2, 3, 4)),
            (4, "test", "fit_end"),
        ]
    )
    weights = [line["edges"] for line in media_lines(tmp_path) if line["name"] == "weights"]
    assert len({tuple(edges) for edges in weights}) == 4  # of each step its own


def test_a_loop_logs_for_its_last_step(tmp_path: Path) -> None:
    with Loop(workdir=str(tmp_path), steps=2, strategy="mirrored") as loop:
        state = loop.start(lambda key: {"params": {"w": jnp.zeros(8)}})
        step = loop.compile_step(
            lambda state, batch, key: (state, {"loss": state.params["w"].sum()})
        )
        for number in loop.steps():
            state, output = step(state, None)
            loop.end_step(state, output)
            loop.log({"w": Histogram(state.params["w"] + number, bins=1)}, split="eval")
    assert [(line["step"], line["edges"]) for line in media_lines(tmp_path)] == [
        (1, [0.5, 1.5]),
        (2, [1.5, 2.5]),
    ]
    with pytest.raises(UserError, match="the loop is over"):
        loop.log({"w": Text("x")})


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    def refused(event: Any) -> None:
        cases: dict[str, Callable[[], object]] = {
            "there is no split 'evl'.*'eval'": lambda: event.trainer.log({}, split="evl"),
            "step is -1": lambda: event.trainer.log({}, -1),
            "0.5|is a float": lambda: event.log({"a": 0.5}),
            "nothing.txt is not a file": lambda: event.trainer.log_artifact("nothing.txt"),
        }
        for message, call in cases.items():
            with pytest.raises(UserError, match=message):
                call()
        called.append(event.step)

    called: list[int] = []
    own = trainer(callbacks={"step": refused})
    own.fit((X, Y), steps=1)
    assert called == [1]
    with pytest.raises(UserError, match=r"outside of fit: call event\.log"):
        own.log({"a": Text("b")})


def test_trackers_are_given_by_name_and_as_objects(tmp_path: Path) -> None:
    mine, default = Tracker(), RunConfig()
    assert with_trackers(default, None) == (default, [])
    assert with_trackers(default, [mine]) == (default, [mine])
    assert with_trackers(default, [])[0].trackers == ()
    config, own = with_trackers(default, ["wandb", mine])
    assert config.trackers == ("wandb",) and own == [mine]
    parts: dict[str, Any] = {"model": nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "train": (X, Y)}
    parts |= {"objective": lambda model, batch: {"loss": batch[0]}, "optimizer": optax.sgd(0.1)}
    for own in ([], [mine]):  # those of the experiment are next to those of the configuration
        made = Trainer.from_experiment(Experiment(**parts, trackers=own), config)
        assert made.config.trackers == ("wandb",)
    trainer(workdir=str(tmp_path), trackers=[]).fit((X, Y), steps=1)
    assert not (tmp_path / "tensorboard").exists()


def test_artifacts_reach_the_trackers(tmp_path: Path) -> None:
    class Files(Tracker):
        def artifact(self, path: str, name: str) -> None:
            found.append((Path(path).read_text(), name))

    found: list[tuple[str, str]] = []
    (tmp_path / "notes.txt").write_text("kept")
    keep = {"fit_end": lambda event: event.trainer.log_artifact(tmp_path / "notes.txt")}
    trainer(trackers=[Files()], callbacks=keep).fit((X, Y), steps=1)
    assert found == [("kept", "notes.txt")]


# -- profiled steps, and the workdir in which they are ---------------------------------------------


def markers(trace: Path) -> list[tuple[str, Any]]:
    """The names and numbers of the steps that a trace marks."""
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    stats = [(event.name, dict(event.stats)) for event in events]
    return [(name, each["step_num"]) for name, each in stats if "step_num" in each]


def test_a_trace_is_in_the_workdir_of_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "run").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with contextlib.closing(ProfiledSteps("~/run", (1, 1), print)) as profile:
        profile.before(1)
        profile.after(1, jnp.ones(1))
    assert list((tmp_path / "home" / "run").rglob("*.xplane.pb"))
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.slow
def test_a_relative_workdir_stays_if_a_callback_changes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (other := tmp_path / "other").mkdir()
    options: dict[str, Any] = {"log_every": 1, "log_hash_every": 2, "profile_steps": "3:3"}
    leaves = {"log": lambda _: os.chdir(other)}
    trained = linear_model.trainer(workdir="run", callbacks=leaves, **options)
    data = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    trained.fit(data, steps=4)
    assert trained.fit(data, steps=6).step == 6
    assert not any(other.iterdir())
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "hashes.jsonl", "plugins", "checkpoints", "tensorboard"} <= written
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["workdir"] == "run"
    (trace,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert markers(trace) == [("train", 3)]
