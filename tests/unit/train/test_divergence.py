"""Steps that diverge: how they are found, and runs that go back and leave their batches out."""

import json
from pathlib import Path
from typing import Any

import grain
import jax
import linear_model
import numpy as np
import optax
import pytest
from helpers import metrics
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain import NonFiniteError, Stream, Trainer, UserError, read_manifest
from spmdtrain.train.divergence import DivergenceWatch

STEPS = 24
X = np.random.default_rng(1).normal(size=(320, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)


def poisoned(*examples: int, value: float = 1e30) -> tuple[np.ndarray, np.ndarray]:
    y = Y.copy()
    y[list(examples)] = value
    return X, y


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
        {"microbatches": 2, "global_batch_size": 16, "ema_decay": 0.9},
        {"exact": 16, "global_batch_size": 16},
        {"strategy": "fully_sharded"},
        {"snapshot_every_steps": 2},
        {"epochs": None, "shuffle": False},
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
        ({"divergence_window": 8}, "divergence_window is 8, and divergence_sigma is not given"),
        ({"divergence_sigma": 0.0}, "divergence_sigma is 0.0: it must be above 0"),
    ],
)
def test_options_that_need_others_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        linear_model.trainer(steps=2, **options).fit((X, Y))


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
