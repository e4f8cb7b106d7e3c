"""Random keys, and dtypes beyond float32, in parameters and state: in all that reads a state."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import (
    CollectiveOptions,
    FunctionModel,
    Loop,
    LoraModel,
    MeshSpec,
    ShardingOptions,
    Trainer,
    UserError,
    export_params,
    load_model,
    load_params,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.tree import is_key, named_leaves

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(16, 4)).astype(np.float32) for _ in range(2))
KEYS = {
    "key": lambda: jax.random.key(7),
    "keys": lambda: jax.random.split(jax.random.key(8, impl="rbg"), 4),
}
NUMBERS = {
    name: partial(jnp.ones, 8, getattr(jnp, name))
    for name in (
        *("bool", "int4", "uint8", "bfloat16", "complex64"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}
SPLIT = {"sharding": ShardingOptions(min_size=1)}
SCATTERED = {"collectives": CollectiveOptions(reduction="reduce_scatter"), **SPLIT}
PLACES: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "zero": {"strategy": "zero", **SPLIT},
    "fully_sharded": {"strategy": "fully_sharded", **SPLIT},
    "scattered": {"strategy": "fully_sharded", **SCATTERED},
    "central_storage": {"strategy": "central_storage"},
    "dispatches": {"steps_per_dispatch": 2},
    "bfloat16": {"compute_dtype": "bfloat16"},
}


def advanced(value: Any) -> Any:
    """The value of a leaf after a call of the model."""
    if is_key(value):
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(value.reshape(-1))
        return keys.reshape(value.shape)
    if value.dtype == jnp.bool_:
        return ~value
    factor = 1j if value.dtype == jnp.complex64 else 1
    return (value.astype(jnp.complex64) * factor + 1).real.astype(value.dtype)


class Model(nnx.Module):
    def __init__(self, names: tuple[str, ...], rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.kept = nnx.data({name: nnx.Variable((KEYS | NUMBERS)[name]()) for name in names})

    def __call__(self, x: jax.Array) -> jax.Array:
        for variable in self.kept.values():
            variable[...] = advanced(variable[...])
        return self.layer(x)


def squares(model: Any, batch: Any) -> Any:
    return {"loss": ((model(batch[0]).astype(jnp.float32) - batch[1]) ** 2).mean(1)}


def make_trainer(model: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "objective": squares,
        "optimizer": optax.adam(0.1),
        "global_batch_size": 8,
        "mesh": MeshSpec(devices=(0, 1, 2, 3)),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(model=model, **defaults | options)


def as_numbers(tree: Any) -> dict[str, Any]:
    """The leaves by path, in dtypes of NumPy."""
    return {
        name: np.asarray(jax.random.key_data(x) if is_key(x) else x.astype(jnp.complex64))
        for name, x in named_leaves(tree).items()
    }


def after_calls(names: tuple[str, ...], calls: int) -> list[Any]:
    """The reference: the values of the state in the order of their names."""
    values = [(KEYS | NUMBERS)[name]() for name in sorted(names)]
    for _ in range(calls):
        values = list(map(advanced, values))
    return list(as_numbers(values).values())


def assert_state(trainer: Trainer, names: tuple[str, ...], calls: int) -> None:
    assert trainer.state is not None
    found = list(as_numbers(trainer.state.model_state).values())
    np.testing.assert_equal(found, after_calls(names, calls))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "mirrored",
        *(
            pytest.param(place, marks=pytest.mark.nightly)
            for place in PLACES
            if place not in ("mirrored", "scattered")  # which refuses a model with state
        ),
    ],
)
def test_a_state_of_any_dtype_is_trained_hashed_saved_restored_and_exported(
    place: str, tmp_path: Path
) -> None:
    names, workdir = (*KEYS, *NUMBERS), str(tmp_path / "run")
    options = {"workdir": workdir, "log_hash_every": 1, "ema_decay": 0.9, **PLACES[place]}
    whole = make_trainer(partial(Model, names), **options | {"workdir": str(tmp_path / "whole")})
    whole.fit((X, Y), validation=(X, Y), steps=3)
    assert_state(whole, names, 3)

    make_trainer(partial(Model, names), **options).fit((X, Y), steps=2)
    resumed = make_trainer(partial(Model, names), **options)
    resumed.fit((X, Y), validation=(X, Y), steps=3)
    assert_state(resumed, names, 3)
    states = [as_numbers((each.state.params, each.state.averaged)) for each in (whole, resumed)]  # type: ignore[union-attr]
    np.testing.assert_equal(states[0], states[1])
    hashes = [(tmp_path / run / "hashes.jsonl").read_text() for run in ("whole", "run")]
    assert hashes[0].splitlines()[-1] == hashes[1].splitlines()[-1]

    assert load_params(workdir)["layer"]["kernel"].shape == (4, 4)
    model = load_model(Model(names, nnx.Rngs(1)), workdir)
    found = {name: x[...] for name, x in model.kept.items()}
    np.testing.assert_equal(list(as_numbers(found).values()), after_calls(names, 3))
    exported = export_params(workdir, str(tmp_path / "model.npz"))
    np.testing.assert_array_equal(exported["kept.float8_e5m2"].astype(np.float32), 4)
    started = make_trainer(partial(Model, names), init_from=workdir)
    started.fit((X, Y), steps=1)
    assert_state(started, names, 4)


@pytest.mark.nightly
def test_numbers_of_any_dtype_are_kept_by_replicas_and_in_exact_runs() -> None:
    names = tuple(NUMBERS)
    for options in ({"batch_statistics": "replica"}, {"exact": 8}):
        trainer = make_trainer(partial(Model, names), **options)
        trainer.fit((X, Y), validation=(X, Y), steps=2)
        assert_state(trainer, names, 2)
        for name in KEYS:
            with pytest.raises(UserError, match=f"a random key in its state .*{name}"):
                make_trainer(partial(Model, (name,)), **options)


def apply(params: Any, x: jax.Array) -> jax.Array:
    x = x @ params["kernel"].astype(x.dtype)
    noise = jax.random.normal(params["keys"][0], (4,), x.dtype)
    numbers = [params[name][:4].real.astype(x.dtype) for name in NUMBERS]
    return jnp.where(params["bool"][:4], x * sum(numbers, start=noise), -x)


def trained_alone(init: Any, names: tuple[str, ...]) -> Any:
    """The reference: two steps in plain JAX, without the data's shuffling."""
    params, optimizer = init(jax.random.key(0)), optax.adam(0.1)
    frozen = {name: params[name] for name in names}
    kernel = params["kernel"]
    state = optimizer.init(kernel)
    for rows in (slice(8), slice(8, 16)):

        def loss(kernel: Any, rows: slice = rows) -> jax.Array:
            model = partial(apply, {"kernel": kernel, **frozen})
            return squares(model, (X[rows], Y[rows]))["loss"].mean()

        updates, state = optimizer.update(jax.grad(loss)(kernel), state, kernel)
        kernel = optax.apply_updates(kernel, updates)
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 0.9},
        *(
            pytest.param(
                {"exact": 8} if place == "bfloat16" else options, marks=pytest.mark.nightly
            )
            for place, options in PLACES.items()
        ),
    ],
    ids=str,
)
def test_frozen_parameters_may_have_any_dtype(options: dict[str, Any]) -> None:
    names = ("keys", *NUMBERS)

    def init(key: jax.Array) -> Any:
        return {"kernel": jnp.eye(4), **{name: (KEYS | NUMBERS)[name]() for name in names}}

    patterns = tuple(f"^{name}$" for name in names)
    model = FunctionModel(init, apply)
    trainer = make_trainer(model, freeze=patterns, shuffle=False, **options)
    trainer.fit((X, Y), validation=(X, Y), steps=2)
    assert trainer.state is not None
    expected = trained_alone(init, names)
    np.testing.assert_allclose(trainer.state.params["kernel"], expected, rtol=1e-4, atol=1e-5)
    found = {name: trainer.state.params[name] for name in names}
    np.testing.assert_equal(
        as_numbers(found), as_numbers({n: (KEYS | NUMBERS)[n]() for n in names})
    )
    assert trainer.model(X).shape == (16, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [*PLACES.values(), {"exact": 8}, {"microbatches": 2}], ids=str)
def test_complex_parameters_are_trained_as_in_plain_jax(options: dict[str, Any]) -> None:
    def init(key: jax.Array) -> Any:
        return {"kernel": (jnp.eye(4) + 0.1j).astype(jnp.complex64)}

    def objective(params: Any, batch: Any) -> Any:
        return {"loss": (jnp.abs(batch[0] @ params["kernel"] - batch[1]) ** 2).mean(1)}

    options = {name: x for name, x in options.items() if name != "compute_dtype"}
    trainer = make_trainer(FunctionModel(init), objective=objective, shuffle=False, **options)
    trainer.fit((X, Y), validation=(X, Y), steps=2)
    params, optimizer = init(jax.random.key(0)), optax.adam(0.1)
    state = optimizer.init(params)
    for rows in (slice(8), slice(8, 16)):
        batch = X[rows], Y[rows]
        slope = jax.grad(lambda p, batch=batch: objective(p, batch)["loss"].mean())(params)
        updates, state = optimizer.update(slope, state, params)
        params = optax.apply_updates(params, updates)
    assert trainer.state is not None
    np.testing.assert_allclose(
        trainer.state.params["kernel"], params["kernel"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_a_base_model_of_factors_has_frozen_arrays_of_any_dtype(tmp_path: Path) -> None:
    names = ("keys", *NUMBERS)
    frozen = {"kernel": jnp.eye(4), **{name: (KEYS | NUMBERS)[name]() for name in names}}

    def make() -> Trainer:
        model = LoraModel(FunctionModel(lambda key: frozen, apply), "^kernel$", rank=2, alpha=2.0)
        return make_trainer(model, shuffle=False, workdir=str(tmp_path), ema_decay=0.9)

    make().fit((X, Y), steps=1)
    trainer, optimizer = make(), optax.adam(0.1)
    trainer.fit((X, Y), validation=(X, Y), steps=2)  # resumed
    factors = trainer.functions.init(0).params["lora"]["kernel"]
    state = optimizer.init(factors)
    for rows in (slice(8), slice(8, 16)):

        def loss(factors: Any, rows: slice = rows) -> jax.Array:
            kernel = frozen["kernel"] + factors["a"] @ factors["b"]
            model = partial(apply, {**frozen, "kernel": kernel})
            return squares(model, (X[rows], Y[rows]))["loss"].mean()

        updates, state = optimizer.update(jax.grad(loss)(factors), state, factors)
        factors = optax.apply_updates(factors, updates)
    assert trainer.state is not None
    found = dict(trainer.state.params)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found.pop("lora")["kernel"],
        factors,
    )
    np.testing.assert_equal(as_numbers(found), as_numbers(frozen))
    assert load_params(str(tmp_path))["int4"].dtype == jnp.int4


NOTHING = np.zeros(3, jax.dtypes.float0)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no values": (
        FunctionModel(lambda key: {"kernel": jnp.eye(4), "none": NOTHING}, apply),
        {"freeze": ("none",)},
        "params/none is float0",
    ),
    "no values beside factors": (
        LoraModel(
            FunctionModel(lambda key: {"kernel": jnp.eye(4), "none": NOTHING}, apply), "kernel"
        ),
        {},
        "params/none is float0",
    ),
    "a key beside factors": (
        LoraModel(partial(Model, ("key",)), "kernel"),
        {},
        "LoraModel freezes the state of its base model, which keeps a random key .kept/key",
    ),
    "a key on servers": (
        FunctionModel(lambda key: {"kernel": jnp.eye(4), "keys": KEYS["keys"]()}, apply),
        {"freeze": ("keys",), "strategy": "parameter_server", "mesh": MeshSpec()},
        "parameter keys is a random key, which servers cannot send",
    ),
}


def test_a_loop_names_an_array_without_values() -> None:
    loop = Loop(steps=1, terminal=Terminal(quiet=True))
    with pytest.raises(UserError, match="q is float0"), loop as own:
        own.start(lambda key: {"params": jnp.ones(3), "model_state": {"q": NOTHING}})


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_cannot_be_placed_are_named(name: str) -> None:
    model, options, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        make_trainer(model, **options).fit((X, Y), steps=1)
