"""`fork_from`: a run that starts from the full state of another one."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from spmdtrain import FunctionModel, Trainer, UserError
from spmdtrain.document.terminal import Terminal
from spmdtrain.step.optimizer import Update
from spmdtrain.train.starting_state import names_step
from spmdtrain.tree import named_leaves

X = {"x": np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)}


def trainer(workdir: Path | None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "optimizer": optax.adam(0.1),
        "global_batch_size": 16,
        "trackers": (),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(
        model=FunctionModel(lambda key: {"w": np.zeros(3, np.float32)}),
        objective=lambda model, batch: {"loss": ((batch["x"] - model["w"]) ** 2).mean(-1)},
        workdir=None if workdir is None else str(workdir),
        **defaults | options,
    )


def values(of: Trainer) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in named_leaves(of.state).items()}


@pytest.mark.slow
def test_a_fork_continues_from_the_whole_state_and_prints_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, fork = tmp_path / "run@1", tmp_path / "fork"  # the name of a folder may have an @
    first = trainer(run, checkpoint_every_steps=2, keep_latest=9)
    first.fit(X, steps=5)
    second = trainer(fork, fork_from=f"{run}@2", checkpoint_every_steps=1)
    second.fit(X, steps=5)
    for name, array in values(first).items():
        np.testing.assert_array_equal(values(second)[name], array, err_msg=name)
    assert sorted(int(p.name) for p in (fork / "checkpoints").glob("[0-9]*")) == [3, 4, 5]

    other = trainer(None, fork_from=f"{run}@latest", log_every=5, terminal=Terminal())
    other.fit(X, steps=6)
    printed = "".join(capsys.readouterr().out.split())  # long lines are wrapped
    assert f"forkedfromstep5of{run}/checkpoints/5" in printed
    assert "changed:log_every:10->5" in printed
    assert values(other)["opt_state/0/count"] == 6

    own = trainer(fork, fork_from=f"{run}@4")  # its own checkpoint wins
    own.fit(X, steps=6)
    assert own.step == 6 and sorted(p.name for p in (run / "checkpoints").glob("[0-9]*")) == [
        *"245"
    ]


@pytest.mark.slow
def test_what_a_fork_cannot_keep_is_refused_by_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run).fit(X, steps=2)
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"seed": 1}, X, "seed=0, this run has 1: .*or take its parameters alone: init_from="),
        ({"global_batch_size": 8}, X, "global_batch_size=16, this run has 8"),
        ({}, {"x": X["x"][:32]}, "other data.*or take its parameters alone: init_from="),
        ({"init_from": str(run)}, X, "fork_from is .* and init_from is"),
        ({"fork_from": f"{run}@7"}, X, "7"),
        ({"fork_from": str(tmp_path / "nothing")}, X, "holds no checkpoint"),
        ({"steps": 2}, X, "checkpoints/2 is of step 2, and this run ends at step 2"),
    ]
    for options, data, message in cases:
        with pytest.raises(UserError, match=message):
            trainer(None, **{"fork_from": str(run), "steps": 4} | options).fit(data)
    with pytest.raises(UserError, match="names this run's own workdir"):
        trainer(run, fork_from=f"{run}@1").fit(X, steps=4)
    fork = trainer(None, fork_from=f"{run}@2")
    assert fork.evaluate(X)["loss"] == trainer(run).evaluate(X)["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "lacked"),
    [
        ({"optimizer": optax.contrib.schedule_free_sgd(0.1)}, "averaged/w"),
        ({"ema_decay": 0.9}, "averaged_before"),
    ],
)
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_that_lacks_a_part_of_its_average_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    lacked: str,
    resumes: bool,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as without:
        without.setattr("spmdtrain.step.optimizer.is_schedule_free", lambda state: False)
        without.setattr(Update, "averaged_before", {})
        old = trainer(run, **options)
        old.fit(X, steps=3)
        assert lacked not in values(old)
    later = trainer(run, **options) if resumes else trainer(None, fork_from=str(run), **options)
    message = (
        f"another moving average: {lacked} is absent there .* its parameters alone: init_from="
    )
    with pytest.raises(UserError, match=message):
        later.fit(X, steps=5)


@pytest.mark.parametrize(
    ("fork_from", "expected"),
    [
        ("runs/a@40", True),
        ("runs/a/checkpoints/40/", True),
        ("runs/a@latest", False),
        ("runs/a@best", False),
        ("/home/me@corp/runs/a", False),
        ("runs/a", False),
    ],
)
def test_a_fork_names_its_step_or_takes_what_is_there(fork_from: str, expected: bool) -> None:
    assert names_step(fork_from) is expected
