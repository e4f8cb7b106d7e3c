"""Steps that diverge: how they are found, and runs that go back and leave their batches out."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import metrics
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain import CallbackContext, NonFiniteError, Stream, Trainer, UserError, read_manifest
from spmdtrain.config.options import CollectiveOptions
from spmdtrain.step.divergence import DivergenceWatch

STEPS = 24
X = np.random.default_rng(1).normal(size=(320, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)


def poisoned(*examples: int, value: float = 1e30) -> tuple[np.ndarray, np.ndarray]:
    y = Y.copy()
    y[list(examples)] = value
    return X, y


def with_batch_norm(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x * jnp.abs(y)).sum(1, keepdims=True) - 1) ** 2}


@jax.custom_jvp
def steep(loss: jax.Array, marked: jax.Array) -> jax.Array:
    """The loss, with a gradient that is a thousand times too large in marked examples."""
    return loss


@steep.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    loss, marked = primals
    return loss, tangents[0] * jnp.where(marked, 1e3, 1.0)


def trainer(folder: Path, **options: Any) -> Trainer:
    given = {"optimizer": optax.adam(0.05), "global_batch_size": 8, "steps": STEPS}
    given |= {"checkpoint_every_steps": 5, "workdir": str(folder)}
    return linear_model.trainer(**{**given, **options})


def state_of(folder: Path, step: int = STEPS) -> Any:
    return read_manifest(str(folder / "checkpoints" / str(step))).sums


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def step_of_example(folder: Path, example: int, **options: Any) -> int:
    """The step that meets an example, as a run without this option says."""
    with pytest.raises(NonFiniteError) as caught:
        trainer(folder, **options).fit(poisoned(example))
    assert caught.value.step is not None
    return caught.value.step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_dispatch": 4, "checkpoint_every_steps": 8},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"microbatches": 2, "global_batch_size": 16, "ema_decay": 0.9},
                {"exact": 16, "global_batch_size": 16},
                {"strategy": "fully_sharded"},
                {"snapshot_every_steps": 2},
                {"epochs": None, "shuffle": False},
            )
        ),
    ],
    ids=str,
)
def test_a_run_goes_back_and_ends_as_one_that_left_the_batch_out(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    example = 77
    step = step_of_example(tmp_path / "stopped", example, **options)
    batch = step - 1
    trainer(tmp_path / "known", skip_steps=(batch,), **options).fit(poisoned(example))
    run = tmp_path / "run"
    result = trainer(run, on_divergence="rewind", **options).fit(poisoned(example))
    assert result.step == STEPS
    assert state_of(run) == state_of(tmp_path / "known")
    assert [x["loss"] for x in metrics(run)] == [x["loss"] for x in metrics(tmp_path / "known")]
    (went_back,) = [e for e in events(run) if e.get("status") == "rewound"]
    assert went_back["step"] == step and f"step {step}: loss" in went_back["reason"]
    starts = [e["step"] for e in events(run) if e["event"] == "start"]
    assert len(starts) == 2 and starts[0] == 0 and starts[1] < step
    manifest = read_manifest(str(run / "checkpoints" / str(STEPS)))
    assert manifest.identity.config["skip_steps"] == [f"{batch}:{batch + 1}"]


def test_a_run_on_a_stream_goes_back_as_well(tmp_path: Path) -> None:
    x, y = poisoned(77)

    def shard(index: int, count: int) -> grain.IterDataset:
        rows = [(x[n], y[n]) for n in range(index, 320, count)]
        return grain.MapDataset.source(rows).to_iter_dataset()

    options: dict[str, Any] = {"steps": 20, "stream_shards": 1}
    with pytest.raises(NonFiniteError, match="step 10: loss"):
        trainer(tmp_path / "stopped", **options).fit(Stream(shard))
    trainer(tmp_path / "known", skip_steps=(9,), **options).fit(Stream(shard))
    trainer(tmp_path / "run", on_divergence="rewind", **options).fit(Stream(shard))
    assert state_of(tmp_path / "run", 20) == state_of(tmp_path / "known", 20)


def test_it_goes_back_at_most_max_rewinds_times_and_then_names_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = poisoned(*range(0, 320, 11))
    run = trainer(tmp_path, on_divergence="rewind", max_rewinds=2)
    with pytest.raises(NonFiniteError) as caught:
        run.fit(data)
    assert "The run has gone back 2 of 2 times (max_rewinds)" in str(caught.value)
    ends = [e["status"] for e in events(tmp_path) if e["event"] == "end"]
    assert ends == ["rewound", "rewound", "failed"]
    # So does a later start, which reads how often the earlier ones went back.
    with pytest.raises(NonFiniteError, match="gone back 2 of 2 times"):
        trainer(tmp_path, on_divergence="rewind", max_rewinds=2).fit(data)


def test_a_start_that_ends_before_it_saves_goes_back_again_and_counts_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shuffle": False, "checkpoint_every_steps": 8}
    goes_back: dict[str, Any] = {"on_divergence": "rewind", "max_rewinds": 1, **options}
    run, known = tmp_path / "run", tmp_path / "known"

    def fail(event: CallbackContext) -> None:
        if event.step == 12:  # after the run went back from step 10 to step 8
            raise RuntimeError("killed")

    first = trainer(run, callbacks={"log": fail}, log_every=4, **goes_back)
    with pytest.raises(RuntimeError, match="killed"):
        first.fit(poisoned(77))
    trainer(run, **goes_back).fit(poisoned(77))
    trainer(known, skip_steps=(9,), **options).fit(poisoned(77))
    assert state_of(run) == state_of(known)
    ends = [(e["status"], e.get("skip_steps")) for e in events(run) if e["event"] == "end"]
    again = ("rewound", ["9:10"])
    assert ends == [again, ("failed", None), again, ("finished", None)]
    # It counts once, and still counts: one more batch that diverges is one too many.
    with pytest.raises(NonFiniteError, match="gone back 1 of 1 times"):
        trainer(run, **{**goes_back, "steps": 40}).fit(poisoned(77, 250))


def test_a_loss_that_is_only_far_too_large_counts_too_and_a_resumed_run_finds_the_same(
    tmp_path: Path,
) -> None:
    data, options = poisoned(200, value=1e4), {"shuffle": False, "steps": 40}
    watch = {"divergence_sigma": 12.0, "divergence_window": 16}
    with pytest.raises(NonFiniteError, match=r"step 26: loss .* robust standard deviations above"):
        trainer(tmp_path / "stopped", **options, **watch).fit(data)
    trainer(tmp_path / "known", skip_steps=(25,), **options).fit(data)
    # The window is part of the checkpoint: after a stop, too few steps would be left for a verdict.
    trainer(tmp_path / "run", **{**options, "steps": 20}, **watch).fit(data)
    trainer(tmp_path / "run", on_divergence="rewind", **options, **watch).fit(data)
    assert state_of(tmp_path / "run", 40) == state_of(tmp_path / "known", 40)
    assert [e["status"] for e in events(tmp_path / "run") if e["event"] == "end"] == [
        *("finished", "rewound", "finished")
    ]


def test_a_state_that_was_never_saved_is_not_replaced_by_another(tmp_path: Path) -> None:
    run = trainer(tmp_path, on_divergence="rewind", checkpoint_every_steps=100, shuffle=False)
    run.state = run.init()  # which only this trainer has
    with pytest.raises(NonFiniteError, match="step 3: loss"):
        run.fit(poisoned(17))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_divergence": "rewind"}, "on_divergence is rewind, and workdir is not given"),
        ({"max_rewinds": 2}, "max_rewinds is 2, and on_divergence is not given"),
        (
            {"max_rewinds": 2, "on_divergence": "skip"},
            "max_rewinds is 2 and on_divergence is skip: a run that leaves updates out does not",
        ),
        ({"divergence_window": 8}, "divergence_window is 8, and divergence_sigma is not given"),
        ({"divergence_sigma": 0.0}, "divergence_sigma is 0.0: it must be above 0"),
    ],
)
def test_options_that_need_others_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        linear_model.trainer(steps=2, **options).fit((X, Y))


# -- steps that leave their update out -------------------------------------------------------------

LEFT_OUT = "its update is left out, 1 so far"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"steps_per_dispatch": 4, "checkpoint_every_steps": 8}, id="dispatch"),
        pytest.param({"strategy": "fully_sharded"}, id="fully_sharded"),
        *(
            pytest.param(options, id=name, marks=pytest.mark.slow)
            for name, options in {
                "microbatches": {"microbatches": 2, "global_batch_size": 16},
                "exact": {"exact": 16, "global_batch_size": 16},
                "central_storage": {"strategy": "central_storage"},
                "all_reduce": {"collectives": CollectiveOptions(reduction="all_reduce")},
                "eager": {"jit": False, "strategy": "one_device"},
                "batch_norm": {
                    "model": partial(nnx.BatchNorm, 4),
                    "objective": with_batch_norm,
                },
            }.items()
        ),
    ],
)
def test_a_step_leaves_its_update_out_and_the_state_is_that_of_a_run_without_its_batch(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    step = step_of_example(tmp_path / "stopped", 77, **options)
    known = trainer(tmp_path / "known", skip_steps=(step - 1,), **options)
    known.fit(poisoned(77), steps=STEPS - 1)
    run = trainer(tmp_path / "run", on_divergence="skip", log_every=1, **options)
    assert run.fit(poisoned(77)).step == STEPS
    for field in ("params", "opt_state", "model_state"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(run.state, field), getattr(known.state, field)
        )
    (event,) = [e for e in events(tmp_path / "run") if e["event"] == "skipped"]
    assert event["step"] == step and event["reason"].startswith(f"step {step}: loss")
    assert event["reason"].endswith(LEFT_OUT)
    lines = metrics(tmp_path / "run", "train")
    assert [x["updates_left_out"] for x in lines] == [0] * (step - 1) + [1] * (STEPS - step + 1)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_a_resumed_run_leaves_the_same_updates_out(tmp_path: Path, steps_per_dispatch: int) -> None:
    data, found = poisoned(200, 250, value=1e4), []
    options: dict[str, Any] = {"shuffle": False, "steps_per_dispatch": steps_per_dispatch}
    options |= {"divergence_sigma": 12.0, "divergence_window": 16, "on_divergence": "skip"}
    options |= {"checkpoint_every_steps": 4, "ema_decay": 0.9, "log_every": 1}
    for name, stops in (("whole", (40,)), ("resumed", (20, 28, 40))):
        for steps in stops:  # the window and the count are part of the checkpoint
            trainer(tmp_path / name, **options, steps=steps).fit(data)
        skipped = [e for e in events(tmp_path / name) if e["event"] == "skipped"]
        found.append([(e["step"], e["reason"]) for e in skipped])
    assert [step for step, _ in found[0]] == [26, 32] and found[0] == found[1]
    assert "is more than 12 robust standard deviations (divergence_sigma) above" in found[0][0][1]
    assert state_of(tmp_path / "whole", 40) == state_of(tmp_path / "resumed", 40)
    # The mean of the epoch is that of the other steps.
    (epoch, again) = (metrics(tmp_path / name, "epoch") for name in ("whole", "resumed"))
    losses = [x["loss"] for x in metrics(tmp_path / "whole", "train")]
    others = [loss for step, loss in enumerate(losses, 1) if step not in (26, 32)]
    assert epoch[0]["loss"] == pytest.approx(np.mean(others)) and epoch == again


def test_a_gradient_that_is_far_too_large_leaves_the_update_out_as_well(tmp_path: Path) -> None:
    def objective(model: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": steep((model(x) - y) ** 2, x[:, :1] > 5)}

    x = X.copy()
    x[200, 0] = 6.0
    run = trainer(
        tmp_path,
        objective=objective,
        shuffle=False,
        log_every=1,
        steps=40,
        on_divergence="skip",
        divergence_sigma=50.0,
    )
    run.fit((x, np.zeros_like(Y)))
    (event,) = [e for e in events(tmp_path) if e["event"] == "skipped"]
    assert event["step"] == 26 and "gradient_norm" in event["reason"]


def test_a_run_that_only_leaves_updates_out_ends(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as caught:
        trainer(tmp_path, on_divergence="skip").fit((X, np.full_like(Y, np.nan)))
    message = "step 10: loss and params and opt_state not finite (loss nan). on_divergence is skip"
    assert str(caught.value).startswith(message)
    assert caught.value.step == 10


SKIP = {"on_divergence": "skip"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, SKIP),
        (SKIP, {}),
        (SKIP, {**SKIP, "divergence_sigma": 9.0}),
        (
            {**SKIP, "divergence_sigma": 9.0},
            {**SKIP, "divergence_sigma": 8.0, "divergence_window": 9},
        ),
    ],
    ids=str,
)
def test_a_resume_may_change_what_a_step_that_diverges_does(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    trainer(tmp_path / "known", log_every=1).fit((X, Y))
    trainer(tmp_path / "run", **before, steps=10, log_every=1).fit((X, Y))
    trainer(tmp_path / "run", **after, log_every=1).fit((X, Y))
    losses = [[x["loss"] for x in metrics(tmp_path / n, "train")] for n in ("known", "run")]
    assert losses[0] == losses[1]


# -- the verdict -----------------------------------------------------------------------------------

LOSSES = st.lists(st.floats(0.5, 2.0), min_size=16, max_size=300)


@given(LOSSES)
def test_no_verdict_within_the_range_of_the_steps_before(losses: list[float]) -> None:
    watch = DivergenceWatch(6.0, 128)
    watch.verdict({"loss": 2.0})
    assert all(watch.verdict({"loss": loss}) is None for loss in losses)


@given(LOSSES, st.floats(100.0, 1e30))
def test_a_far_larger_value_is_found_and_not_kept(losses: list[float], far: float) -> None:
    watch = DivergenceWatch(6.0, 128)
    losses = [loss for loss in losses if watch.verdict({"loss": loss}) is None]
    kept = watch.to_json()
    assert "robust standard deviations above" in (watch.verdict({"loss": far}) or "")
    assert watch.to_json() == kept == {"loss": losses[-128:]}
    again = DivergenceWatch(6.0, 128)
    again.restore(kept)
    assert again.verdict({"loss": far}) == watch.verdict({"loss": far})


def test_the_gradient_norm_counts_as_well_where_a_step_has_it() -> None:
    watch = DivergenceWatch(6.0, 128)
    draw = np.random.default_rng(0)
    for step in range(200):
        norm = {"gradient_norm": float(draw.normal(3, 0.1))} if step % 10 == 0 else {}
        assert watch.verdict({"loss": float(draw.normal(2, 0.1)), **norm}) is None
    found = watch.verdict({"loss": 2.0, "gradient_norm": 30.0})
    assert found is not None and found.startswith("gradient_norm 30 is ")


# -- optimizers that leave out updates which are not finite ----------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: optax.apply_if_finite(inner, 3),
        lambda inner: optax.MultiSteps(inner, 2, should_skip_update_fn=optax.skip_not_finite),
        lambda inner: optax.chain(optax.zero_nans(), optax.apply_if_finite(inner, 3)),
    ],
    ids=["apply_if_finite", "MultiSteps", "zero_nans"],
)
def test_the_optimizers_of_optax_leave_a_step_out_as_in_a_loop_of_its_own(
    tmp_path: Path, wrap: Any, value: float
) -> None:
    x, y = poisoned(20, value=value)
    params = {"kernel": np.ones((4, 1), np.float32), "bias": np.zeros(1, np.float32)}
    optimizer = wrap(optax.adam(0.05))
    options = {"shuffle": False, "steps": 12, "log_every": 1, "strategy": "one_device"}
    run = trainer(tmp_path, optimizer=optimizer, **options)
    run.init(params)
    result = run.fit((x, y))

    def loss(values: Any, rows: Any) -> Any:
        return (((rows[0] @ values["kernel"] + values["bias"]) - rows[1]) ** 2).mean()

    state = optimizer.init(params)
    losses = []
    for step in range(12):
        rows = x[step * 8 : step * 8 + 8], y[step * 8 : step * 8 + 8]
        found, gradients = jax.value_and_grad(loss)(params, rows)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(found))
    assert not np.isfinite(losses[2]) and np.isfinite(losses).sum() == 11
    logged = [line["loss"] for line in metrics(tmp_path, "train")]
    logged = [np.nan if found is None else found for found in logged]  # JSON has neither of them
    losses[2] = np.nan
    np.testing.assert_allclose(logged, losses, rtol=1e-5)
    np.testing.assert_allclose(run.variables.params["kernel"], params["kernel"], rtol=1e-4)
    assert result.step == 12
