"""Media of runs: declared for evaluations, and logged by callbacks and loops."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import (
    Experiment,
    Figure,
    Histogram,
    Image,
    Loop,
    RunConfig,
    Table,
    Text,
    Tracker,
    Trainer,
    UserError,
)
from spmdtrain.config.overrides import with_trackers

X = np.arange(32, dtype=np.float32).reshape(32, 1) / 32
Y = 3 * X


def trainer(**options: Any) -> Trainer:
    return Trainer(
        model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        objective=lambda model, batch: {"loss": ((model(batch[0]) - batch[1]) ** 2)[:, 0]},
        optimizer=optax.sgd(0.1),
        **options,
    )


def lines(workdir: Path) -> list[dict[str, Any]]:
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
        (line,) = lines(workdir)
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
    assert max(line["step"] for line in lines(tmp_path)) == 3
    run(4)
    found = [(line["step"], line["split"], line["name"]) for line in lines(tmp_path)]
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
    weights = [line["edges"] for line in lines(tmp_path) if line["name"] == "weights"]
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
    assert [(line["step"], line["edges"]) for line in lines(tmp_path)] == [
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
