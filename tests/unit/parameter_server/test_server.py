"""Parameter servers without their messages: cut, divided, pushed to, and put together again."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

from spmdtrain.errors import UserError
from spmdtrain.parameter_server.partition import (
    FixedShards,
    TreePartition,
    partition_tree,
    split_optimizer,
)
from spmdtrain.parameter_server.server import Counts, Push, PushResult, Server, ServerState
from spmdtrain.step.gradients import difference, with_difference
from spmdtrain.step.optimizer import ExtraArguments, Update
from spmdtrain.step.optimizer_record import name_of, parts_of

PARAMS = {
    "kernel": jnp.arange(70.0).reshape(10, 7) / 70,
    "bias": jnp.arange(7.0),
    "scale": jnp.float32(2.0),
}
STATE = {"mean": jnp.zeros(3), "count": jnp.uint32(0)}


def cuts(servers: int, tree: Any = PARAMS) -> TreePartition:
    return partition_tree(jax.eval_shape(lambda: tree), servers, FixedShards(servers))


def equal(x: Any, y: Any, rtol: float = 0.0) -> None:
    assert str(jax.tree.structure(x)) == str(jax.tree.structure(y))
    for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol)


@pytest.mark.parametrize("servers", [1, 2, 3, 11])
def test_what_is_cut_can_be_joined(servers: int) -> None:
    found = cuts(servers)
    equal(found.join([found.cut(PARAMS, server) for server in range(servers)]), PARAMS)
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(PARAMS)
    of_state = found.map(optimizer.init)
    equal(of_state.join([of_state.cut(state, server) for server in range(servers)]), state)
    # Each has a part of it, and all of the counter.
    assert sum(of_state.bytes_of(server) for server in range(servers)) == (
        2 * 4 * (70 + 7 + 1) + servers * 4
    )


def step_on_servers(
    optimizer: optax.GradientTransformation, servers: int, gradients: list[Any]
) -> tuple[Any, Any]:
    """What servers make of gradients, each from the newest parameters."""
    of_params, of_model = cuts(servers), cuts(servers, STATE)
    on_worker, on_server = split_optimizer(optimizer, of_params)
    update = Update(on_server)
    of_state = of_params.map(update.init)
    state = update.init(PARAMS)
    made = [
        Server(
            update,
            ServerState(
                of_params.cut(PARAMS, n), of_state.cut(state, n), {}, of_model.cut(STATE, n)
            ),
            step=0,
        )
        for n in range(servers)
    ]
    for number, gradient in enumerate(gradients):
        params = of_params.join([server.pull().params for server in made])
        clipped, _ = on_worker.update(gradient, on_worker.init(params), params)
        for n, server in enumerate(made):
            more = of_model.cut(jax.tree.map(jnp.ones_like, STATE), n)
            pushed = Push(number, number, of_params.cut(clipped, n), more, 1.0)
            assert server.push(pushed) == PushResult(True, False, 0, (True,) * 4)
    held = [server.held() for server in made]
    model_state = of_model.join([one.model_state for one in held])
    equal(model_state, jax.tree.map(lambda x: x + len(gradients), STATE))
    return of_params.join([x.params for x in held]), of_state.join([x.opt_state for x in held])


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
        optax.chain(optax.clip_by_global_norm(100.0), optax.adam(0.1)),
        optax.chain(
            optax.add_decayed_weights(
                0.01, mask=lambda params: jax.tree.map(lambda x: x.ndim == 2, params)
            ),
            optax.clip_by_global_norm(1.0),
            optax.sgd(0.1),
        ),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    ],
    ids=["sgd", "adamw", "clipped", "seldom clipped", "masked", "injected"],
)
def test_servers_make_what_one_device_makes(
    optimizer: optax.GradientTransformation, servers: int
) -> None:
    generator = np.random.default_rng(1)
    gradients = [
        jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), PARAMS)
        for _ in range(3)
    ]
    gradients[1] = jax.tree.map(lambda x: 1000 * x, gradients[1])  # one that is worth a clip
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    found, found_state = step_on_servers(optimizer, servers, gradients)
    equal(found, params, rtol=1e-5)
    equal(found_state, state, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "name", "keeps"),
    [
        (optax.lamb(1e-3), "scale_by_trust_ratio", "scale_by_adam"),
        (
            optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
            "clip_by_global_norm",
            "chain(scale_by_adam, scale)",
        ),
        (optax.adafactor(1e-3), "scale_by_param_block_rms", "scale_by_factored_rms"),
        (optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, 0)), "add_noise", "add_noise"),
        (optax.apply_if_finite(optax.adam(1e-3), 3), "apply_if_finite", "apply_if_finite"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    optimizer: optax.GradientTransformation, name: str, keeps: str
) -> None:
    with pytest.raises(UserError) as refused:
        split_optimizer(optimizer, cuts(2))
    who = "keeps" if keeps == name else f"{keeps} keeps"
    message = f"the optimizer's {name} needs the whole gradient, and {who} a state"
    assert message in str(refused.value)
    if name != "add_noise":  # its state is no numbers
        split_optimizer(optimizer, cuts(1))  # one server has the whole


def test_an_optimizer_that_evaluates_the_loss_is_refused() -> None:
    with pytest.raises(UserError, match=r"scale_by_zoom_linesearch.* evaluates the loss"):
        split_optimizer(optax.lbfgs(), cuts(2))


@pytest.mark.slow
def test_the_average_of_a_schedule_free_optimizer_is_that_of_the_servers_parameters() -> None:
    update = Update(optax.contrib.schedule_free_sgd(0.1))
    of_params = cuts(2)
    averages = of_params.map(update.first_average)
    gradients = jax.tree.map(jnp.ones_like, PARAMS)
    whole = update(PARAMS, update.init(PARAMS), gradients, ExtraArguments(jnp.ones(()), gradients))
    expected = optax.contrib.schedule_free_eval_params(whole.opt_state, whole.params)
    state = of_params.map(update.init)
    parts = []
    for n in range(2):
        part = ServerState(
            of_params.cut(PARAMS, n),
            state.cut(update.init(PARAMS), n),
            averages.cut(update.first_average(PARAMS), n),
            {},
        )
        server = Server(update, part, step=0)
        assert server.push(Push(0, 0, of_params.cut(gradients, n), {}, 1.0)).is_new
        parts.append(server.held().averaged)
    equal(averages.join(parts), expected, rtol=1e-5)


def test_the_parts_of_a_chain_have_names() -> None:
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    names = ["clip_by_global_norm", "chain(identity, scale)"]
    assert [name_of(part) for part in parts_of(chain)] == names


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=6))
def test_each_push_is_added_once_in_any_order(order: list[int], again: list[int]) -> None:
    update = Update(optax.sgd(1.0))
    server = Server(
        update, ServerState({"w": jnp.zeros(2)}, update.init({"w": jnp.zeros(2)}), {}, {}), 0
    )
    for number in [*order, *again]:
        push = Push(number, 0, {"w": np.full(2, 2.0**number, np.float32)}, {}, 0.0)
        is_new = number not in server.applied
        assert server.push(push).is_new == is_new
    np.testing.assert_array_equal(server.pull().params["w"], -np.full(2, 2.0**6 - 1))
    assert (server.pull().version, server.applied.complete) == (6, 6)


def test_what_is_too_stale_is_refused() -> None:
    update = Update(optax.sgd(1.0))
    held = ServerState({"w": jnp.zeros(2)}, update.init({"w": jnp.zeros(2)}), {}, {})
    server = Server(update, held, step=4, max_staleness=1)
    one = Push(4, 4, {"w": np.ones(2, np.float32)}, {}, 0.0)
    pushed = [server.push(dataclasses.replace(one, number=number)) for number in (4, 6, 5)]
    assert [(x.is_new, x.is_stale, x.staleness) for x in pushed] == [
        (True, False, 0),
        (True, False, 1),
        (False, True, 2),
    ]
    assert server.push(dataclasses.replace(one, number=5, version=6)).is_new


def test_a_non_finite_push_is_reported() -> None:
    update = Update(optax.sgd(1.0))
    held = ServerState({"w": jnp.zeros(2)}, update.init({"w": jnp.zeros(2)}), {}, {})
    push = Push(0, 0, {"w": np.array([1, np.inf], np.float32)}, {}, 0.0)
    server = Server(update, held, 0)
    assert server.push(push).finite == (True, False, True, True)
    # The first sender may have died before it reported: the second one gets the error, too.
    again = server.push(push)
    assert not again.is_new and again.finite == (True, False, True, True)
    assert server.counts == Counts(added=1, repeated=1)


def test_numbers_that_come_no_more_are_forgotten() -> None:
    update = Update(optax.sgd(1.0))
    held = ServerState({"w": jnp.zeros(2)}, update.init({"w": jnp.zeros(2)}), {}, {})
    server = Server(update, held, 0)
    push = Push(0, 0, {"w": np.ones(2, np.float32)}, {}, 0.0)
    for number in range(0, 300, 3):  # the others push nothing
        server.push(dataclasses.replace(push, number=number, floor=max(0, number - 6)))
    assert len(server.applied.beyond) <= 3
    assert server.pull().version == server.counts.added == 100
    assert not server.push(dataclasses.replace(push, number=5)).is_new
    np.testing.assert_array_equal(server.pull().params["w"], np.full(2, -100.0))


def test_what_batches_add_to_the_model_state_comes_together() -> None:
    before = {"mean": jnp.float32(1.0), "key": jnp.uint32(2**32 - 1), "seen": jnp.array(False)}
    after = {"mean": jnp.float32(3.0), "key": jnp.uint32(1), "seen": jnp.array(True)}
    more = difference(after, before)
    assert {name: x.item() for name, x in more.items()} == {"mean": 2.0, "key": 2, "seen": True}
    once = with_difference(before, more, jnp.int32(0))
    assert {name: x.item() for name, x in once.items()} == {"mean": 3.0, "key": 1, "seen": True}
    late = with_difference(once, more, jnp.int32(3))
    assert {name: x.item() for name, x in late.items()} == {"mean": 3.5, "key": 3, "seen": True}


def test_a_mask_in_the_model_state_keeps_its_infinities() -> None:
    mask = {"mask": jnp.array([0.0, -jnp.inf])}
    more = difference(mask, mask)
    equal(with_difference(mask, more, jnp.int32(0)), mask)


@pytest.mark.parametrize("workers", [1, 20, 200])
def test_what_many_workers_make_of_a_statistic_does_not_overshoot(workers: int) -> None:
    update = Update(optax.sgd(1.0))
    held = ServerState(
        {"w": jnp.zeros(1)}, update.init({"w": jnp.zeros(1)}), {}, {"var": jnp.ones(1)}
    )
    server = Server(update, held, 0)
    for number in range(workers):  # all have pulled 1, and seen a variance of 0.01
        more = {"var": np.full(1, 0.1 * (0.01 - 1), np.float32)}
        server.push(Push(number, 0, {"w": np.zeros(1, np.float32)}, more, 0.0))
    (found,) = server.pull().model_state["var"]
    assert 0.01 < found <= 1 - 0.099


def test_without_staleness_a_batch_that_one_server_has_is_computed_from_the_same_again() -> None:
    update = Update(optax.sgd(1.0))
    held = ServerState(
        {"w": jnp.zeros(1)}, update.init({"w": jnp.zeros(1)}), {}, {"n": jnp.int32(0)}
    )
    server = Server(update, held, 7, max_staleness=0)
    before = server.pull(7)
    push = Push(7, before.version, {"w": np.ones(1, np.float32)}, {"n": np.int32(1)}, 0.0)
    assert server.push(push).is_new
    equal(dataclasses.astuple(server.pull(7)), dataclasses.astuple(before))
    for number in (8, None):  # for the next batch, and for the chief
        found = server.pull(number)
        assert (found.version, found.params["w"].item(), found.model_state["n"]) == (8, -1.0, 1)
