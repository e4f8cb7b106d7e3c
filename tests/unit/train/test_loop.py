"""Loops of one's own: what they are given, what is done for them, and what is refused."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import events, metrics, saved_steps, small_experiment, status
from jax.sharding import PartitionSpec as P

from spmdtrain import (
    CollectiveOptions,
    FunctionModel,
    Loop,
    MeshSpec,
    NonFiniteError,
    PerReplica,
    Rule,
    ShardingOptions,
    Trainer,
    TrainState,
    UserError,
    current_strategy,
    has_strategy,
    load_params,
    per_replica,
    weighted_mean,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.run import main
from spmdtrain.sharding.rules import parameter_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 16)).astype(np.float32)
Y = (X @ RNG.normal(size=(16, 8))).astype(np.float32)
OPTIMIZER = optax.adam(0.05)
STEPS = 12


def loop(**options: Any) -> Loop:
    defaults: dict[str, Any] = {
        "steps": STEPS,
        "global_batch_size": 16,
        "log_every": 1,
        "terminal": Terminal(quiet=True),
    }
    return Loop(**defaults | options)


def init(key: jax.Array) -> dict[str, Any]:
    params = {"w": 0.1 * jax.random.normal(key, (16, 8)), "b": jnp.zeros(8)}
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def losses(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.square(x @ params["w"] + params["b"] - y).mean(-1)


def step(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, dict[str, Any]]:
    loss, gradients = jax.value_and_grad(lambda p: weighted_mean(losses(p, batch)))(state.params)
    updates, opt_state = OPTIMIZER.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    drawn = jax.random.uniform(key)
    return replace(state, params=params, opt_state=opt_state), {"loss": loss, "drawn": drawn}


def trained(*, stop_before: int | None = None, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The final parameters, and the numbers of each step."""
    outputs = []
    with loop(**options) as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, output = compiled(state, batch)
            own.end_step(state, output)
            outputs.append({name: float(value) for name, value in output.metrics.items()})
            if own.step == stop_before:
                break
        return jax.device_get(state.params), outputs


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_makes_the_steps_that_a_trainer_makes() -> None:
    """The same examples in the same order, the same initial values, the same updates."""
    trainer = Trainer(
        model=FunctionModel(lambda key: init(key)["params"]),
        objective=lambda params, batch: {"loss": losses(params, batch)},
        optimizer=OPTIMIZER,
        terminal=Terminal(quiet=True),
    )
    result = trainer.fit((X, Y), steps=STEPS, global_batch_size=16)
    params, outputs = trained()
    assert trainer.state is not None and len(outputs) == STEPS
    for name, array in jax.device_get(trainer.state.params).items():
        np.testing.assert_allclose(params[name], array, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(outputs[-1]["loss"], result.train["loss"], rtol=1e-6)
    assert len({one["drawn"] for one in outputs}) == STEPS  # a key for each step


SMALL = {"sharding": ShardingOptions(min_size=8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"strategy": name, **SMALL}, id=name, marks=marks)
        for names, marks in (
            (("default", "fully_sharded"), []),
            (("one_device", "zero", "central_storage", "hybrid+fully_sharded"), pytest.mark.slow),
        )
        for name in names
    ],
)
def test_every_strategy_gives_the_same_numbers(options: dict[str, Any]) -> None:
    expected, outputs = trained()
    params, own = trained(**options)
    np.testing.assert_allclose(
        [one["loss"] for one in own], [one["loss"] for one in outputs], rtol=1e-5
    )
    assert [one["drawn"] for one in own] == [one["drawn"] for one in outputs]
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_state_is_where_the_strategy_says_and_the_rules() -> None:
    rules = [Rule("w", P(None, "tensor"))]
    options = {"strategy": "fully_sharded+tensor_parallel", "mesh": MeshSpec(tensor=2), **SMALL}
    with loop(**options) as own:
        state = own.start(init, train=(X, Y), rules=rules)
        compiled = own.compile_step(step)
        assert current_strategy().name == "fully_sharded+tensor_parallel"
        for _ in range(2):
            moments = state.opt_state[0].mu
            for leaf in (state.params["w"], moments["w"]):
                assert leaf.sharding.spec == P("fsdp", "tensor")
            for leaf in (state.params["b"], moments["b"]):
                assert leaf.sharding.spec == P("fsdp")
            state, output = compiled(state, next(own.batches()))
            own.end_step(state, output)
        assert has_strategy()
    assert current_strategy().name == "default" and not has_strategy()


def test_the_optimizers_of_several_models_follow_their_models() -> None:
    def several(key: jax.Array) -> dict[str, Any]:
        params = {name: init(key)["params"] for name in ("actor", "critic")}
        optimizers = {name: OPTIMIZER.init(params[name]) for name in params}
        return {"params": params, "opt_state": optimizers}

    rules = [Rule("actor/w", P("data")), Rule("critic/w", P(None, "data"))]
    with loop() as own:
        state = own.start(several, rules=rules)
        for name, spec in {"actor": P("data"), "critic": P(None, "data")}.items():
            assert state.params[name]["w"].sharding.spec == spec
            assert state.opt_state[name][0].nu["w"].sharding.spec == spec


def test_an_optimizers_leaf_belongs_to_the_parameter_of_the_longest_path() -> None:
    shapes = {"params/actor/w": (4, 3), "params/w": (4, 3), "params/0/w": (3,), "params/1/w": (2,)}
    assert parameter_of("opt_state/actor/0/mu/w", (4, 3), shapes) == "params/actor/w"
    assert parameter_of("opt_state/0/mu/w", (4, 3), shapes) == "params/w"
    assert parameter_of("opt_state/0/mu/1/w", (2,), shapes) == "params/1/w"
    assert (
        parameter_of(
            "opt_state/0/v_row/1/w", (3,), {n: s for n, s in shapes.items() if n != "params/w"}
        )
        == "params/1/w"
    )


@pytest.mark.slow
def test_an_infinity_on_purpose_is_no_failure() -> None:
    def masked(key: jax.Array) -> dict[str, Any]:
        return init(key) | {"model_state": {"mask": jnp.array([0.0, -jnp.inf])}}

    with loop() as own:
        state = own.start(masked, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, output = compiled(state, batch)
            own.end_step(state, output)
    assert own.step == STEPS


@pytest.mark.slow
def test_parameters_may_be_gathered_for_the_model() -> None:
    """Then the examples stay where they are."""

    def gathering(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, Any]:
        def loss_of(params: Any) -> jax.Array:
            return weighted_mean(losses(own.gather_params(params), batch))

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = OPTIMIZER.update(gradients, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return replace(state, params=params, opt_state=opt_state), {"loss": loss}

    _, outputs = trained()
    with loop(strategy="fully_sharded", **SMALL) as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(gathering)
        for batch, one in zip(own.batches(), outputs, strict=True):
            state, output = compiled(state, batch)
            own.end_step(state, output)
            np.testing.assert_allclose(output.metrics["loss"], one["loss"], rtol=1e-5)


@pytest.mark.slow
def test_the_state_rests_in_host_memory_and_other_functions_read_it() -> None:
    with loop(strategy="central_storage") as own:
        state = own.start(init, train=(X, Y))
        assert state.params["w"].sharding.memory_kind == "pinned_host"
        compiled, total = own.compile_step(step), own.compile(lambda p: p["w"].sum())
        before = float(np.asarray(state.params["w"]).sum())
        np.testing.assert_allclose(total(state.params), before, rtol=1e-5)
        state, _ = compiled(state, next(own.batches()))
        assert state.params["w"].sharding.memory_kind == "pinned_host"


# -- interrupted -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_resumes_from_its_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    whole, outputs = trained(workdir=str(tmp_path / "whole"), checkpoint_every_steps=4)
    options: dict[str, Any] = {"workdir": str(tmp_path / "parts"), "checkpoint_every_steps": 4}
    _, first = trained(**options, steps=5)
    params, second = trained(**options)
    assert [*first, *second] == outputs
    for name, array in whole.items():
        np.testing.assert_array_equal(params[name], array)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert status(tmp_path / "parts")["status"] == "finished"
    assert saved_steps(tmp_path / "whole") == [4, 8, 12]
    np.testing.assert_array_equal(load_params(str(tmp_path / "whole"))["w"], whole["w"])


@pytest.mark.slow
def test_a_loop_that_is_left_early_has_saved_and_resumes_from_there(tmp_path: Path) -> None:
    _, outputs = trained(workdir=str(tmp_path), stop_before=7)
    assert len(outputs) == 7 and saved_steps(tmp_path) == [7]
    left = {"status": "preempted", "step": 7, "reason": "the loop was left after 7 of 12 steps"}
    assert status(tmp_path) | left == status(tmp_path)
    assert len(trained(workdir=str(tmp_path))[1]) == STEPS - 7
    assert status(tmp_path)["status"] == "finished"


def test_a_loop_that_is_left_before_its_first_step_has_saved_too(tmp_path: Path) -> None:
    with loop(workdir=str(tmp_path)) as own:
        own.start(init, train=(X, Y))
    assert saved_steps(tmp_path) == [0] and own.stopped_early
    assert "saved" not in status(tmp_path)["reason"]


@pytest.mark.slow
def test_that_no_checkpoint_will_be_the_best_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loop(workdir=str(tmp_path), terminal=Terminal()) as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, output = compiled(state, batch)
            own.end_step(state, output)
            own.log_evaluation({"distance": 1.0})
    words = "best_metric is 'loss', which this evaluation does not give (distance)"
    assert capsys.readouterr().out.count(words) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["epochs", "next"])
def test_what_is_due_is_done_however_batches_are_taken(tmp_path: Path, how: str) -> None:
    with loop(workdir=str(tmp_path), checkpoint_every_steps=5) as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        while own.step < own.total:
            for batch in [next(own.batches())] if how == "next" else own.batches():
                state, output = compiled(state, batch)
                own.end_step(state, output)
                if own.step == 5:
                    own.log_evaluation({"loss": 123.0})
                if own.step % 5 == 0:
                    break
    assert saved_steps(tmp_path) == [5, 10, 12]
    manifests = [tmp_path / "checkpoints" / str(n) / "manifest.json" for n in (5, 10)]
    found = [json.loads(path.read_text())["metrics"] for path in manifests]
    assert found == [{"loss": 123.0}, None]  # an evaluation is of its own step alone


@pytest.mark.slow
def test_a_caught_error_leaves_no_sound_state(tmp_path: Path) -> None:
    def spoiled(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, Any]:
        after, outputs = step(state, batch, key)
        bad = jnp.where(state.step == 3, jnp.nan, 0.0)
        return replace(after, params=jax.tree.map(lambda x: x + bad, after.params)), outputs

    with (
        pytest.raises(NonFiniteError, match="step 4: params"),
        loop(workdir=str(tmp_path), checkpoint_every_steps=4) as own,
    ):
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(spoiled)
        try:
            for batch in own.batches():
                state, output = compiled(state, batch)
                own.end_step(state, output)
        except NonFiniteError:
            pass
    assert saved_steps(tmp_path) == [] and status(tmp_path)["status"] == "failed"


@pytest.mark.slow
def test_each_call_of_the_step_is_recorded_once_and_in_time(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="output of step 2"),
        loop() as own,
    ):
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, _ = compiled(state, batch)
            state, output = compiled(state, batch)
            own.end_step(state, output)
    with pytest.raises(UserError, match="2 times"), loop() as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, output = compiled(state, batch)
            own.end_step(state, output)
            own.end_step(state, output)
    words = r"the state was donated to the compiled step \(step 1 is the last"
    with pytest.raises(UserError, match=words), loop(workdir=str(tmp_path)) as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, output = compiled(state, batch)
            if own.step == 1:
                break
            own.end_step(state, output)
    with pytest.raises(UserError, match="step 0 is the last"), loop() as own:
        begun = own.start(init, train=(X, Y))
        _, output = own.compile_step(step)(begun, next(own.batches()))
        own.end_step(begun, output)
    with pytest.raises(UserError, match="step 1 is the last"), loop() as own:
        begun = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, output = compiled(begun, batch)  # the first state, again and again
            own.end_step(state, output)
    with pytest.raises(UserError, match="is given a dict"), loop() as own:
        state = own.start(init, train=(X, Y))
        state, output = own.compile_step(step)(state, next(own.batches()))
        own.end_step(state, output.metrics)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_loop_that_is_stopped_is_finished(tmp_path: Path) -> None:
    def stopped() -> int:
        with loop(workdir=str(tmp_path), checkpoint_every_steps=7) as own:
            state = own.start(init, train=(X, Y))
            compiled, made = own.compile_step(step), 0
            for batch in own.batches():
                state, output = compiled(state, batch)
                own.end_step(state, output)
                made += 1
                if own.step == 7:
                    own.stop()
                    assert own.should_evaluate()
            return made

    assert stopped() == 7 and saved_steps(tmp_path) == [7]
    assert stopped() == 0  # a longer one resumes
    assert len(trained(workdir=str(tmp_path), steps=STEPS + 1)[1]) == STEPS + 1 - 7


@pytest.mark.slow
def test_an_exception_in_the_loop_ends_the_run_as_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), loop(workdir=str(tmp_path)) as own:
        own.start(init, train=(X, Y))
        raise RuntimeError("mine")
    assert status(tmp_path)["status"] == "failed"
    assert status(tmp_path)["reason"] == "RuntimeError: mine"
    trained(workdir=str(tmp_path))
    assert status(tmp_path)["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a metric", "a parameter"])
def test_numbers_that_are_none_end_the_run(tmp_path: Path, where: str) -> None:
    def spoiled(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, Any]:
        after, outputs = step(state, batch, key)
        bad = jnp.where(state.step == 5, jnp.nan, 0.0)
        if where == "a metric":
            return after, {"critic_loss": outputs["loss"] + bad, "fine": outputs["loss"]}
        params = after.params | {"b": after.params["b"] + bad}
        return replace(after, params=params), {"fine": outputs["loss"]}

    words = {
        "a metric": r"step 6: loss not finite \(critic_loss nan\)",
        "a parameter": r"step 6: params not finite \(params/b is the first such array\)",
    }
    with (
        pytest.raises(NonFiniteError, match=words[where]),
        loop(workdir=str(tmp_path), checkpoint_every_steps=2) as own,
    ):
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(spoiled)
        for batch in own.batches():
            state, output = compiled(state, batch)
            own.end_step(state, output)
    assert saved_steps(tmp_path) == [2, 4]
    assert status(tmp_path)["status"] == "failed"


# -- what is due -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluations_are_written_and_say_which_checkpoint_is_best(tmp_path: Path) -> None:
    scores = {4: 3.0, 8: 1.0, 12: 2.0}
    options = {
        **{"workdir": str(tmp_path), "eval_every_steps": 4, "checkpoint_every_steps": 2},
        **{"keep_latest": 1, "best_metric": "score"},
    }
    with loop(**options) as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch in own.batches():
            state, output = compiled(state, batch)
            own.end_step(state, output)
            if own.should_evaluate():
                own.log_evaluation({"score": jnp.float32(scores[own.step])})
        own.log_evaluation({"score": 0.5}, split="test")
    assert [(m["step"], m["score"]) for m in metrics(tmp_path, "eval")] == list(scores.items())
    assert metrics(tmp_path, "test") == [{"step": 12, "split": "test", "score": 0.5}]
    assert saved_steps(tmp_path) == [8, 12]
    words = "best_metric is 'score', which this evaluation does not give"
    with pytest.raises(UserError, match=words), loop(**options | {"steps": 13}) as own:
        own.start(init, train=(X, Y))
        own.log_evaluation({"loss": 1.0})


@pytest.mark.slow
def test_an_evaluation_that_is_nan_does_not_prevent_the_mark_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with loop(best_metric="score", terminal=Terminal()) as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(step)
        for batch, score in zip(own.batches(), (math.nan, 3.0, 1.0, 2.0), strict=False):
            state, output = compiled(state, batch)
            own.end_step(state, output)
            own.log_evaluation({"score": score})
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("eval at step")]
    assert [line.endswith("best") for line in lines] == [False, False, True, False]


def test_an_evaluation_counts_every_example_once() -> None:
    """40 examples in batches of 16: the last one is filled up."""
    params = jax.device_get(init(jax.random.key(1))["params"])
    with loop() as own:
        sums = own.compile(
            lambda params, rows, mask: ((losses(params, rows) * mask).sum(), mask.sum())
        )
        found = [sums(params, rows, mask) for rows, mask in own.eval_batches((X, Y))]
    total, count = np.sum(found, axis=0)
    assert count == 40 and len(found) == 3
    np.testing.assert_allclose(total / count, np.asarray(losses(params, (X, Y))).mean(), rtol=1e-5)


@pytest.mark.slow
def test_without_a_dataset_the_batches_are_placed_by_hand(tmp_path: Path) -> None:
    with loop(workdir=str(tmp_path), checkpoint_every_steps=5) as own:
        state = own.start(init)
        compiled = own.compile_step(step)
        seen = []
        for number in own.steps():
            batch = own.shard_batch((X[:16] * number, Y[:16]))
            assert batch[0].sharding == own.placement.batch
            np.testing.assert_array_equal(batch[0], X[:16] * number)
            state, output = compiled(state, batch)
            own.end_step(state, output)
            seen.append(number)
        with pytest.raises(UserError, match=r"batches\(\)"):
            next(own.batches())
    assert seen == list(range(1, STEPS + 1)) and saved_steps(tmp_path) == [5, 10, 12]
    words = "without a dataset there are no epochs"
    with pytest.raises(UserError, match=words), loop(steps=None, epochs=1) as own:
        own.start(init)


@pytest.mark.slow
def test_a_batch_of_another_size_is_compiled_again() -> None:
    with loop() as own:
        state = own.start(init)
        compiled = own.compile_step(step)
        for size in (8, 24, 8):
            state, output = compiled(state, own.shard_batch((X[:size], Y[:size])))
            own.end_step(state, output)
        assert int(state.step) == own.step == 3


@pytest.mark.slow
def test_values_of_each_replica_within_a_step() -> None:
    def by_hand(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, Any]:
        own = per_replica(
            lambda rows, p: jax.value_and_grad(lambda p: losses(p, rows).sum())(p),
            batch,
            state.params,
        )
        loss, gradients = jax.tree.map(lambda x: x / 16, own.sum())
        updates, opt_state = OPTIMIZER.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return replace(state, params=params, opt_state=opt_state), {"loss": loss}

    expected, outputs = trained()
    with loop() as own:
        state = own.start(init, train=(X, Y))
        compiled = own.compile_step(by_hand)
        for batch, one in zip(own.batches(), outputs, strict=True):
            state, output = compiled(state, batch)
            own.end_step(state, output)
            np.testing.assert_allclose(output.metrics["loss"], one["loss"], rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-5, atol=1e-6)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 2}, "microbatches is 2, an option of the Trainer's own step"),
        ({"compute_dtype": "bfloat16"}, "compute_dtype is 'bfloat16'"),
        ({"ema_decay": 0.9}, "ema_decay is 0.9"),
        ({"jit": False}, "jit is False"),
        ({"steps_per_dispatch": 2}, "steps_per_dispatch is 2"),
        ({"freeze": ("w",)}, "freeze is"),
        ({"profile_steps": "1:2"}, "profile_steps is"),
        ({"evaluated_by": "evaluator"}, "evaluated_by is"),
        ({"stepss": 3}, "Loop has no option 'stepss'. Did you mean 'steps'"),
        ({"global_batch_size": 12}, "12"),
        (
            {"collectives": CollectiveOptions(combine_threshold_bytes=4)},
            "combine_threshold_bytes is not supported on CPU",
        ),
        ({"collectives": CollectiveOptions(reduction="all_reduce")}, "per_replica"),
    ],
)
def test_options_that_a_loop_would_ignore_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        loop(**options)


def test_one_step_per_dispatch_is_no_option_that_a_loop_ignores() -> None:
    assert loop(steps_per_dispatch=1).config.steps_per_dispatch == 1


def bad_init(*parts: Any) -> Any:
    return lambda key: dict(parts)


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (lambda key: jnp.ones(3), r"init returned float32\[3\]: it must return a dictionary"),
        (bad_init(("opt_state", {})), r"init returned \['opt_state'\]"),
        (bad_init(("params", {}), ("param", {})), "'param', which is no part of the state.*params"),
    ],
)
def test_an_init_says_what_is_wrong(begin: Any, words: str) -> None:
    with pytest.raises(UserError, match=words), loop() as own:
        own.start(begin)


def wrong_step(change: Any) -> Any:
    return lambda state, batch, key: change(*step(state, batch, key))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, m: (s.params, m), "the step returned a dict first: that must be the state"),
        (lambda s, m: None, "the step returned nothing: it must return two things"),
        (lambda s, m: s, "the step returned a TrainState: it must return two things"),
        (
            lambda s, m: (replace(s, params=s.params | {"b": 1.0}), m),
            r"changed params/b of the state from float32\[8\] to a Python float",
        ),
        (
            lambda s, m: (replace(s, params=PerReplica(s.params, 2)), m),
            "the step put PerReplica.*, a value for each replica, into the state",
        ),
        (
            lambda s, m: (replace(s, step=s.step + 5), m),
            "changed state.step or state.key, which only the loop updates",
        ),
        (lambda s, m: (s, {1: m["loss"]}), "metric 1 has a int as its name"),
        (lambda s, m: (s, {"\ud800": m["loss"]}), r"metric '\\ud800' cannot be written as UTF-8"),
        (lambda s, m: (s, {"loss": {"a": m["loss"]}}), "'loss' is a dict: it must be one real"),
        (lambda s, m: (s, {"loss": m["loss"] * 1j}), r"'loss' is complex64\[\]: .* one real"),
        (
            lambda s, m: (replace(s, params=s.params | {"w": s.params["w"].T}), m),
            r"the step changed params/w of the state from float32\[16, 8\] to float32\[8, 16\]",
        ),
        (
            lambda s, m: (replace(s, params={"w": s.params["w"]}), m),
            r"changed params/b of the state from float32\[8\] to nothing",
        ),
        (
            lambda s, m: (replace(s, model_state={"n": jnp.ones(2)}), m),
            r"changed model_state/n of the state from nothing to float32\[2\]",
        ),
        (
            lambda s, m: (s, {"step": m["loss"]}),
            "the step's metric 'step' is a reserved name in the metrics",
        ),
        (lambda s, m: (s, m["loss"]), "metrics are .*: they must be scalars by name"),
        (lambda s, m: (s, {"loss": s.params["b"]}), r"metric 'loss' is .*reduce it to one number"),
        (
            lambda s, m: (s, {"loss": PerReplica(s.params["b"], 2)}),
            r"metric 'loss' is PerReplica\(\(8,\)\): reduce it",
        ),
    ],
)
def test_a_step_says_what_is_wrong(change: Any, words: str) -> None:
    with pytest.raises(UserError, match=words), loop() as own:
        state = own.start(init, train=(X, Y))
        own.compile_step(wrong_step(change))(state, next(own.batches()))


SGD = optax.sgd(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZER)
DECAYED = optax.adamw(0.1)


def made(value: Any, optimizer: Any = OPTIMIZER) -> Any:
    """A step that minimizes value(params, batch, key)."""

    def step(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, dict[str, Any]]:
        loss, gradients = jax.value_and_grad(value)(state.params, batch, key)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return replace(state, params=params, opt_state=opt_state), {"loss": loss}

    return step


def predicted(params: Any, batch: Any, key: Any) -> jax.Array:
    classes = jnp.argmax(batch[0] @ params["w"] + params["b"], -1)
    return weighted_mean(jnp.square(classes - batch[1][:, 0]))


def of_replicas(params: Any, batch: Any, key: Any) -> jax.Array:
    return per_replica(lambda rows: stopped(params, rows, key), batch).sum()


def stopped(params: Any, batch: Any, key: Any) -> jax.Array:
    return jnp.mean(losses(jax.lax.stop_gradient(params), batch))


def in_scan(params: Any, batch: Any, key: Any) -> jax.Array:
    def add(total: Any, row: Any) -> tuple[Any, None]:
        return total + jnp.sign(row @ params["w"]).sum(), None

    return jax.jit(lambda: jax.lax.scan(add, 0.0, batch[0])[0])()


def of_offset(params: Any, batch: Any, key: Any) -> jax.Array:
    """Its gradient is the same for every batch."""
    return stopped(params, batch, key) + jnp.mean(params["b"] - batch[1])


def of_noise(params: Any, batch: Any, key: Any) -> jax.Array:
    noise = jnp.square(params["w"] - jax.random.normal(key, (16, 8))).sum()
    return stopped(params, batch, key) + noise


def of_all_data(params: Any, batch: Any, key: Any) -> jax.Array:
    return stopped(params, batch, key) + losses(params, (jnp.asarray(X), jnp.asarray(Y))).mean()


def copies(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, dict[str, Any]]:
    params = state.params | {"b": 0.9 * state.params["b"] + 0.1 * state.params["w"].mean(0)}
    return replace(state, params=params), {"loss": losses(state.params, batch).mean()}


def only_evaluates(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, dict[str, Any]]:
    return state, {"loss": losses(state.params, batch).mean()}


def counts(step: Any) -> Any:
    def counted(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, dict[str, Any]]:
        after, found = step(state, batch, key)
        return replace(after, model_state={"mean": batch[0].mean()}), found

    return counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "trains", "options"),
    [
        (made(stopped), False, {}),
        (made(stopped), False, {"strategy": "fully_sharded"}),
        (made(stopped), False, {"strategy": "central_storage"}),
        (made(stopped, SGD), False, {"optimizer": SGD}),
        (made(stopped, CLIPPED), False, {"optimizer": CLIPPED}),
        (made(predicted, DECAYED), False, {"optimizer": DECAYED}),
        (made(in_scan), False, {}),
        (made(of_replicas), False, {}),
        (counts(made(stopped)), False, {}),
        (step, True, {}),
        (made(of_offset), True, {}),
        (made(of_noise), True, {}),
        (made(of_all_data), True, {}),
        (copies, True, {}),
        (only_evaluates, True, {}),
        (only_evaluates, True, {"strategy": "central_storage"}),
    ],
)
def test_a_step_whose_parameters_do_not_depend_on_its_data_is_refused(
    function: Any, trains: bool, options: dict[str, Any]
) -> None:
    optimizer = options.get("optimizer", OPTIMIZER)
    options = {name: x for name, x in options.items() if name != "optimizer"}

    def begin(key: jax.Array) -> dict[str, Any]:
        parts = init(key) | {"model_state": {"mean": jnp.zeros(())}}
        return parts | {"opt_state": optimizer.init(parts["params"])}

    words = "new parameters do not depend on the batch, although its loss does, so it learns"
    refused = contextlib.nullcontext() if trains else pytest.raises(UserError, match=words)
    with refused, loop(**options) as own:
        state = own.start(begin, train=(X, Y))
        own.compile_step(function)(state, next(own.batches()))


@pytest.mark.slow
def test_a_loop_says_how_it_is_used() -> None:
    own = loop()
    with pytest.raises(UserError, match="with Loop"):
        own.start(init)
    with loop() as own:
        for call in (
            own.should_evaluate,
            lambda: own.compile_step(step),
            lambda: next(own.steps()),
        ):
            with pytest.raises(UserError, match=r"start\(init\)"):
                call()
        state = own.start(init, train=(X, Y))
        with pytest.raises(UserError, match="called once"):
            own.start(init)
        with pytest.raises(UserError, match="shard_batch: 0"):
            own.shard_batch([1, 2, 3, 4, 5, 6, 7, 8])
        with (
            loop() as other,
            pytest.raises(UserError, match="is given a dict"),
        ):
            other.start({"params": 1})  # type: ignore[arg-type]
        with pytest.raises(UserError, match="'evaluation'"):
            own.log_evaluation({}, split="evaluation")
        with pytest.raises(UserError, match=r"\(12, 16\)"):
            own.shard_batch(X[:12])
        with pytest.raises(UserError, match="int32"):
            own.shard_batch(np.full(8, 2**40))
        with pytest.raises(UserError, match="get the whole result"):
            own.compile(lambda y: per_replica(lambda y: y, y))(own.shard_batch(Y[:8]))
        with pytest.raises(NonFiniteError, match="step 0: the test loss"):
            own.log_evaluation({"loss": np.nan}, split="test")
        for found, words in (
            ({"split": 1.0}, "the evaluation's metric 'split' is a reserved name"),
            ({}, "the evaluation's metrics are empty"),
            (None, "the evaluation's metrics are nothing"),
            ({"loss": "a"}, "metric 'loss' is a str: it must be one real"),
            ({"loss": np.ones(2)}, r"metric 'loss' is float64\[2\]: reduce it"),
        ):
            with pytest.raises(UserError, match=words):
                own.log_evaluation(found)  # type: ignore[arg-type]
        own.log_evaluation({"loss": 1.0})
        with pytest.raises(UserError, match="twice for eval"):
            own.log_evaluation({"distance": 1.0})
        compiled, batches = own.compile_step(step), own.batches()
        state, output = compiled(state, next(batches))
        with pytest.raises(UserError, match="0 times"):
            next(batches)
        own.end_step(state, output)
        for batch in own.batches():
            state, output = compiled(state, batch)
            own.end_step(state, output)
        with pytest.raises(UserError, match="all 12 steps"):
            own.end_step(state, output)
    with pytest.raises(UserError, match="loop is over"):
        next(own.batches())


# -- by the command --------------------------------------------------------------------------------

TRAIN = """
def train(config, loop):
    import jax.numpy as jnp
    from dataclasses import replace
    from spmdtrain import weighted_mean

    def step(state, batch, key):
        x, y = batch
        loss = weighted_mean((x - y) ** 2)
        return replace(state, params=state.params * 0.9), {"loss": loss}

    x = np.linspace(-1, 1, config.examples, dtype=np.float32)
    state = loop.start(lambda key: {"params": jnp.ones(8)}, train=(x, 2 * x))
    compiled = loop.compile_step(step)
    for batch in loop.batches():
        state, output = compiled(state, batch)
        loop.end_step(state, output)
"""


@pytest.fixture
def own_loop(tmp_path: Path) -> Iterator[Path]:
    text = small_experiment(tmp_path).read_text()
    path = tmp_path / "own.py"
    path.write_text(text[: text.index("def build")] + TRAIN)
    yield path


@pytest.mark.slow
def test_the_command_runs_a_loop(
    own_loop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(own_loop), "--workdir", str(tmp_path / "run")]
    assert main([*arguments, "--steps", "3"]) == 0
    assert "step 3/3" in capsys.readouterr().out
    assert main([*arguments, "--strategy", "zero"]) == 0
    out = capsys.readouterr().out
    assert "resumed from step 3" in out and "zero, mesh data=8" in out
    np.testing.assert_allclose(load_params(str(tmp_path / "run")), 0.9**4, rtol=1e-6)
    assert [m["step"] for m in metrics(tmp_path / "run", "train")] == [1, 3, 4]
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["config"]["strategy"] == "zero"


@pytest.mark.parametrize(
    "options",
    [("--mode", "evaluate"), ("--mode", "predict"), ("--show-sharding",), ("--role", "evaluate")],
)
def test_what_a_loop_of_its_own_has_not_is_refused(
    own_loop: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(own_loop), *options]) == 2
    assert "has a loop of its own, train(config, loop), which can only train" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_loop_that_is_left_early_is_to_be_run_again(
    own_loop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(own_loop), "--workdir", str(tmp_path / "run")]
    whole = own_loop.read_text()
    own_loop.write_text(whole + "        if loop.step == 2: break\n")
    assert main([*arguments, "--steps", "3"]) == 75
    assert "left after 2 of 3 steps: saved step 2; run the command again" in capsys.readouterr().out
    own_loop.write_text(whole)
    assert main([*arguments, "--steps", "3"]) == 0
    assert "resumed from step 2" in capsys.readouterr().out


def test_a_value_that_was_not_reduced_is_bad_input(
    own_loop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = own_loop.read_text().replace(
        "loss = weighted_mean((x - y) ** 2)",
        "import spmdtrain; loss = 1 + spmdtrain.per_replica(lambda x: x.sum(), x)",
    )
    own_loop.write_text(text)
    assert main(["--config", str(own_loop), "--workdir", str(tmp_path / "run")]) == 2
    assert "a per-replica value is not a global value: reduce it" in capsys.readouterr().err


def test_a_train_function_that_starts_no_loop_is_refused(
    own_loop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = own_loop.read_text()
    own_loop.write_text(text[: text.index("def train")] + "def train(config, loop): pass\n")
    assert main(["--config", str(own_loop)]) == 2
    assert "train(config, loop) never calls start()" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_called_train_beside_a_build_may_be_something_else(tmp_path: Path) -> None:
    path = small_experiment(tmp_path)
    path.write_text(path.read_text() + "\ntrain, test = (1, 2), (3, 4)\n")
    assert main(["--config", str(path), "--workdir", str(tmp_path / "run")]) == 0


def test_a_file_has_one_of_the_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_experiment(tmp_path)
    path.write_text(path.read_text() + TRAIN)
    assert main(["--config", str(path)]) == 2
    assert "has both build(config) and train(config, loop)" in capsys.readouterr().err


@pytest.mark.slow
def test_the_batch_that_was_placed_is_the_one_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of 16, and a configuration that says 32 by default."""
    with Loop(steps=2, log_every=1, workdir=str(tmp_path)) as own:
        state = own.start(init)
        compiled = own.compile_step(step)
        for _ in own.steps():
            state, output = compiled(state, own.shard_batch((X[:16], Y[:16])))
            own.end_step(state, output)
    assert "global batch 16 (2 per device)" in capsys.readouterr().out
    speeds: dict[str, list[float]] = {}
    for event in events(tmp_path):
        for value in event.summary.value:
            speeds.setdefault(value.tag, []).append(value.simple_value)
    examples, steps = (speeds[f"speed/{name}_per_second"] for name in ("examples", "steps"))
    np.testing.assert_allclose(examples, 16 * np.array(steps), rtol=1e-5)


@pytest.mark.parametrize("name", ["learning_rate", "parameter_norm", "seconds", "gradient_norm"])
def test_only_the_norms_that_a_loop_does_not_know_may_be_metrics_of_its_step(name: str) -> None:
    with loop(steps=1) as own:
        state = own.start(init, train=X)
        step = own.compile_step(lambda state, batch, key: (state, {"loss": 1.0, name: 2.0}))
        if name != "gradient_norm":
            with pytest.raises(UserError, match=f"the step's metric '{name}' is a reserved name"):
                step(state, next(own.batches()))
            return
        for batch in own.batches():
            own.end_step(*step(state, batch))
        assert own.logger.latest["train"][name] == 2.0  # type: ignore[index]


def test_an_evaluation_and_a_callback_may_not_take_a_reserved_name() -> None:
    with loop(steps=1) as own:
        own.start(init, train=X)
        with pytest.raises(UserError, match="the evaluation's metric 'seconds' is a reserved name"):
            own.log_evaluation({"loss": 1.0, "seconds": 2.0})
