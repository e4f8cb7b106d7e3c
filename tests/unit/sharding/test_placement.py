"""The placement of a run, and what library code can query of it."""

import contextlib
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from spmdtrain import (
    CallbackContext,
    FunctionModel,
    MeshSpec,
    RunConfig,
    Trainer,
    UserError,
    has_strategy,
    reduce,
)
from spmdtrain import constrain_sharding as exported_constrain
from spmdtrain import current_strategy as exported_current_strategy
from spmdtrain.config.options import (
    ExpertOptions,
    ParameterServerOptions,
    ShardingOptions,
)
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import Terminal
from spmdtrain.sharding.mesh import BATCH_AXES, resolve
from spmdtrain.sharding.placement import (
    Placement,
    constrain_sharding,
    current_strategy,
    local_config,
    make_placement,
    resolve_config,
    use_placement,
)
from spmdtrain.strategies import DEFAULT

P = PartitionSpec
X = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
DATA = (X, 3 * X + 2)


def placed(strategy: str = "mirrored", **sizes: Any) -> Placement:
    return make_placement(RunConfig(strategy=strategy, mesh=MeshSpec(**sizes)))


def queried() -> str:
    """What library code sees: the strategy, the axes in use, the parts of a batch."""
    now = current_strategy()
    return f"{now.name}: {now.axes}, {now.batch_shards}"


OUTSIDE = "default: none, 1"
MIRRORED = "mirrored: data=8, 8"


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


def trainer(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": partial(nnx.Linear, 1, 1),
        "objective": squared_error,
        "optimizer": optax.sgd(0.1),
        "global_batch_size": 16,
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


# --- The placement that a configuration asks for ---


def test_the_default_strategy_has_no_mesh_and_its_arrays_are_on_the_default_device() -> None:
    found = placed("default")
    assert found == Placement(DEFAULT, None)
    assert (found.name, found.axes, found.batch_shards) == ("default", "none", 1)
    assert found.devices == [jax.devices()[0]]
    assert found.size("data") == found.size("fsdp") == found.size("tensor") == 1
    plain = SingleDeviceSharding(jax.devices()[0])
    assert found.batch == found.replicated == plain
    assert found.sharding(P("data")) == plain
    with jax.default_device(jax.devices()[3]):
        assert found.devices == [jax.devices()[3]]
        assert found.batch == SingleDeviceSharding(jax.devices()[3])


def test_a_placement_over_a_mesh() -> None:
    found = placed("fully_sharded", data=2, tensor=2, devices=(7, 6, 5, 4, 3, 2, 1, 0))
    assert found.mesh is not None
    assert (found.name, found.axes) == ("fully_sharded", "data=2 fsdp=2 tensor=2")
    assert [device.id for device in found.devices] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert found.batch_shards == 4
    assert [found.size(axis) for axis in ("replica", "data", "fsdp", "tensor")] == [1, 2, 2, 2]
    assert found.batch == NamedSharding(found.mesh, P(BATCH_AXES))
    assert found.replicated == NamedSharding(found.mesh, P())
    assert found.sharding(P("fsdp")) == NamedSharding(found.mesh, P("fsdp"))


def test_several_devices_of_one_cpu_are_virtual_and_a_single_one_is_not() -> None:
    assert placed().is_virtual()
    assert placed(devices=(0, 1)).is_virtual()
    assert not placed(devices=(3,)).is_virtual()
    assert not placed("one_device").is_virtual()
    assert not placed("default").is_virtual()


def test_the_maximum_number_of_shards_applies() -> None:
    config = RunConfig(strategy="fully_sharded", sharding=ShardingOptions(max_shards=5))
    assert make_placement(config).axes == "data=2 fsdp=4"


def test_what_is_for_one_process_is_refused_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "count", lambda: 3)
    for name in ("default", "one_device"):
        with pytest.raises(UserError) as caught:
            placed(name)
        message = str(caught.value)
        assert message.startswith(f"strategy {name} is for one process, and there are 3")
        assert "mirrored" in message
    assert placed("mirrored").axes == "data=8"


# --- What code runs under ---


def shared(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    """A loop's body outside of any model: JAX remembers what it has traced."""
    return constrain_sharding(jnp.tanh(x @ w), "batch", None), None


@pytest.mark.slow
def test_a_function_that_trainers_share_is_laid_out_for_each() -> None:
    def objective(params: jax.Array, batch: jax.Array) -> dict[str, jax.Array]:
        return {"loss": (jax.lax.scan(shared, batch, params)[0] ** 2).mean(-1)}

    losses = []
    options: dict[str, Any]
    for options in ({}, {"mesh": MeshSpec(devices=(0, 1))}, {"strategy": "default"}):
        of = Trainer(
            model=FunctionModel(lambda key: jax.random.normal(key, (3, 8, 8))),
            objective=objective,
            optimizer=optax.sgd(0.1),
            terminal=Terminal(quiet=True),
            global_batch_size=16,
            **options,
        )
        losses.append(of.fit(np.ones((16, 8), np.float32), steps=1).train["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_outside_of_a_run_it_is_the_default_strategy() -> None:
    outside = current_strategy()
    assert (outside.name, outside.mesh, outside.batch_shards) == ("default", None, 1)
    assert not has_strategy()
    assert reduce("SUM", np.arange(3.0), axis=0) == reduce("sum", np.arange(3.0), axis=0) == 3
    assert (
        exported_current_strategy is current_strategy and exported_constrain is constrain_sharding
    )


def test_a_data_worker_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmdtrain.sharding.placement.is_data_worker", True)
    with pytest.raises(UserError, match="in a data worker"):
        has_strategy()


@pytest.mark.slow
def test_within_it_is_the_trainers_wherever_user_code_is_called() -> None:
    seen: dict[str, set[str]] = {}

    def note(where: str) -> None:
        seen.setdefault(where, set()).add(queried())

    def model(rngs: nnx.Rngs) -> nnx.Linear:
        note("model")
        return nnx.Linear(1, 1, rngs=rngs)

    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        note("objective")
        return squared_error(model, batch)

    def predict(model: Any, batch: Any) -> jax.Array:
        note("predict")
        return model(batch[0])

    moments = ("fit_start", "step", "log", "evaluation", "fit_end")
    callbacks = {moment: lambda event: note(event.event) for moment in moments}
    using = trainer(model=model, objective=objective, predict=predict, callbacks=callbacks)
    using.fit(DATA, validation=DATA, steps=2)
    using.evaluate(DATA)
    using.predict(DATA)
    assert seen == {name: {MIRRORED} for name in ("model", "objective", "predict", *moments)}
    assert queried() == OUTSIDE


@pytest.mark.slow
def test_a_dataset_sees_it_in_threads_too() -> None:
    seen: set[str] = set()

    class Noting:
        def __len__(self) -> int:
            return len(DATA[0])

        def rows(self, indices: np.ndarray) -> Any:
            if threading.current_thread() is not threading.main_thread():
                seen.add(queried())
            return tuple(x[indices] for x in DATA)

    using = trainer(data_threads=2)
    using.fit(Noting(), steps=2)
    using.evaluate(Noting())
    assert seen == {MIRRORED}


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fit", "evaluate", "predict", "model"])
def test_a_model_is_made_under_the_trainers_strategy_whatever_is_called_first(first: str) -> None:
    seen = set()

    def model(rngs: nnx.Rngs) -> nnx.Linear:
        seen.add(queried())
        return nnx.Linear(1, 1, rngs=rngs)

    using = trainer(model=model, predict=lambda model, batch: model(batch[0]), steps=1)
    if first == "model":
        assert isinstance(using.model, nnx.Linear)
    else:
        getattr(using, first)(DATA)
    assert seen == {MIRRORED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "found", "jit"),
    [
        ("default", "default: none, 1", True),
        ("one_device", "one_device: data=1, 1", True),
        ("one_device", "one_device: data=1, 1", False),
        ("hybrid", "hybrid: replica=2 data=4, 8", True),
        ("fully_sharded", "fully_sharded: fsdp=8, 8", True),
    ],
)
def test_the_objective_sees_the_strategy(strategy: str, found: str, jit: bool) -> None:
    seen = set()

    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        seen.add(queried())
        return squared_error(model, batch)

    trainer(strategy=strategy, objective=objective, jit=jit).fit(DATA, steps=1)
    assert seen == {found}


@pytest.mark.slow
def test_after_an_exception_it_is_the_default_strategy_again() -> None:
    def failing(event: CallbackContext) -> None:
        assert queried() == MIRRORED
        raise RuntimeError("mine")

    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        assert queried() == MIRRORED
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trainer(callbacks={"step": failing}).fit(DATA, steps=3)
    assert queried() == OUTSIDE
    for call in ("fit", "evaluate"):
        with pytest.raises(RuntimeError, match="mine"):
            getattr(trainer(objective=objective, steps=1), call)(DATA)
        assert queried() == OUTSIDE
    with pytest.raises(UserError):
        trainer(model=lambda rngs: None)
    assert queried() == OUTSIDE


@pytest.mark.slow
def test_a_trainer_within_anothers_callback_has_a_strategy_of_its_own() -> None:
    seen = []

    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        seen.append(queried())
        return squared_error(model, batch)

    def within(event: CallbackContext) -> None:
        seen.append("outer, before: " + queried())
        inner = trainer(objective=objective, strategy="one_device", mesh=MeshSpec(devices=(5,)))
        inner.fit(DATA, steps=1)
        seen.append("outer, after: " + queried())

    trainer(callbacks={"step": within}).fit(DATA, steps=1)
    first, *inner, last = seen
    assert (first, last) == (f"outer, before: {MIRRORED}", f"outer, after: {MIRRORED}")
    assert set(inner) == {"one_device: data=1, 1"}
    assert queried() == OUTSIDE


def test_under_ends_with_its_block_and_nests() -> None:
    outer, inner = placed("fully_sharded"), placed("one_device")
    with use_placement(outer):
        with contextlib.suppress(RuntimeError), use_placement(inner):
            assert current_strategy() is inner
            raise RuntimeError
        assert current_strategy() is outer
    assert queried() == OUTSIDE


# --- How an array inside a model lies on the mesh ---


def laid_out(placement: Placement, shape: tuple[int, ...], *spec: Any) -> P:
    """The spec of a computed array whose layout is constrained."""
    with use_placement(placement):
        found = jax.jit(lambda x: constrain_sharding(jnp.sin(x), *spec))(jnp.ones(shape))
    assert isinstance(found.sharding, NamedSharding)
    return found.sharding.spec


@pytest.mark.parametrize("placement", [Placement(DEFAULT, None), placed(devices=(4,))])
def test_without_a_mesh_an_array_stays_as_it_is(placement: Placement) -> None:
    x = jnp.ones((7, 3))
    with use_placement(placement):
        assert constrain_sharding(x, "batch", "tensor") is x
        assert constrain_sharding(jnp.float32(1)).shape == ()
    assert constrain_sharding(x, None, None) is x


@pytest.mark.parametrize(
    ("sizes", "spec", "shard"),
    [
        ({}, ("batch", None), (2, 8)),
        ({}, (None, "data"), (16, 1)),
        ({"replica": 2, "fsdp": 2}, ("batch", None), (2, 8)),
        ({"tensor": 2}, ("batch", "tensor"), (4, 4)),
        ({"tensor": 4}, (None, "tensor"), (16, 2)),
        ({"fsdp": 4}, ("fsdp", "data"), (4, 4)),
        ({"tensor": 2}, (None, None), (16, 8)),
        ({"context": 4, "tensor": 2}, (None, ("context", "tensor")), (16, 1)),
        ({"context": 2, "tensor": 4}, (None, ("tensor", "context")), (16, 1)),
        ({"context": 8}, (("context", "tensor"), "batch"), (2, 8)),
        ({"tensor": 2}, (("batch", "tensor"), None), (2, 8)),
    ],
)
def test_a_dim_lies_along_the_axes_that_are_named(
    sizes: dict[str, Any], spec: tuple[Any, ...], shard: tuple[int, ...]
) -> None:
    placement = placed(**sizes)
    with use_placement(placement):
        found = jax.jit(lambda x: constrain_sharding(jnp.sin(x), *spec))(jnp.ones((16, 8)))
    assert found.sharding.shard_shape((16, 8)) == shard
    with use_placement(placement):  # without jit as well
        assert constrain_sharding(jnp.ones((16, 8)), *spec).sharding.shard_shape((16, 8)) == shard


def test_the_constraint_is_in_the_program() -> None:
    def program(*placements: Placement) -> str:
        with contextlib.ExitStack() as stack:
            for placement in placements:
                stack.enter_context(use_placement(placement))
            return str(
                jax.make_jaxpr(lambda x: constrain_sharding(x, "batch", "tensor"))(jnp.ones((8, 8)))
            )

    assert "sharding_constraint" in program(placed(tensor=2))
    assert "sharding_constraint" not in program()
    assert "sharding_constraint" not in program(placed(tensor=2), Placement(DEFAULT, None))


def test_a_dim_that_does_not_divide_is_left_to_the_compiler() -> None:
    placement = placed(tensor=2)
    with use_placement(placement):
        program = str(
            jax.make_jaxpr(lambda x: constrain_sharding(x, "batch", "tensor", None))(
                jnp.ones((6, 4, 3))
            )
        )
    assert "spec=P(UNCONSTRAINED, 'tensor', None)" in program
    assert laid_out(placement, (6, 4), "batch", "tensor")[1] == "tensor"
    assert laid_out(placement, (4, 3), "batch", "tensor")[0] is not None
    several = placed(context=2, tensor=4)
    assert laid_out(several, (6, 4), ("context", "tensor"), None) == P("context")


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["batch", "tensor", None]))))
@settings(deadline=None, derandomize=True, max_examples=12)
def test_any_array_keeps_its_values(dims: list[tuple[int, str | None]]) -> None:
    dims = dims[:3]
    spec, used = [], set()
    for _, entry in dims:  # an axis may split one dim alone
        spec.append(None if entry in used else entry)
        used.add(entry)
    x = np.arange(np.prod([size for size, _ in dims], dtype=int)).reshape([n for n, _ in dims])
    with use_placement(placed(tensor=2)):
        np.testing.assert_array_equal(constrain_sharding(jnp.asarray(x), *spec), x)


@pytest.mark.parametrize("placement", [Placement(DEFAULT, None), placed()])
def test_another_number_of_entries_than_dims_is_an_error(placement: Placement) -> None:
    x = jnp.ones((16, 4))
    with use_placement(placement):
        for spec in (("batch",), ("batch", None, None), ()):
            with pytest.raises(ValueError, match=rf"{len(spec)} entries for an array of .*16, 4"):
                constrain_sharding(x, *spec)


def test_what_is_no_axis_is_named() -> None:
    with use_placement(placed()), pytest.raises(ValueError, match=r"\['data'\] is not an axis"):
        constrain_sharding(jnp.ones((16, 4)), ["data"], None)  # type: ignore[arg-type]
    for placement in (placed(), Placement(DEFAULT, None)):
        with pytest.raises(
            UserError, match=r"'tensr' is not an axis of a mesh\. Did you mean 'ten"
        ):
            placement.size("tensr")


# --- Configurations ---


def test_a_configuration_is_resolved_for_the_parts_of_its_batch() -> None:
    def batch(strategy: str, **sizes: Any) -> int | None:
        config = RunConfig(batch_size_per_device=4, strategy=strategy, mesh=MeshSpec(**sizes))
        return resolve_config(config).global_batch_size

    assert batch("mirrored") == batch("fully_sharded") == batch("hybrid") == 32
    assert batch("mirrored", tensor=2) == batch("tensor_parallel") == 16
    assert batch("one_device") == batch("default") == 4


def test_another_process_keeps_a_strategy_that_fits_its_devices() -> None:
    config = RunConfig(strategy="fully_sharded", mesh=MeshSpec(data=2))
    queried: list[str] = []
    assert local_config(config, queried.append) == config
    config = RunConfig(learning_rate=0.1, learning_rate_scaling="linear")
    assert local_config(config, queried.append).learning_rate_scaling == "none"
    assert not queried


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(strategy="fully_sharded", mesh=MeshSpec(data=3)),
        RunConfig(strategy="mirrored", mesh=MeshSpec(data=16)),
        RunConfig(strategy="hybrid", mesh=MeshSpec(replica=16)),
        RunConfig(strategy="one_device", mesh=MeshSpec(devices=(11,))),
        RunConfig(
            strategy="fully_sharded",
            mesh=MeshSpec(data=3),
            sharding=ShardingOptions(max_shards=4, min_size=8),
        ),
        RunConfig(
            strategy="central_storage",
            mesh=MeshSpec(data=16),
            sharding=ShardingOptions(offload="optimizer"),
        ),
        RunConfig(mesh=MeshSpec(expert=16), expert=ExpertOptions(capacity_factor=3)),
        RunConfig(
            strategy="parameter_server",
            mesh=MeshSpec(data=3),
            servers=ParameterServerOptions(max_staleness=0),
        ),
    ],
)
def test_where_a_strategy_does_not_fit_all_devices_are_along_the_batch(config: RunConfig) -> None:
    queried: list[str] = []
    found = local_config(config, queried.append)
    (line,) = queried
    assert line.startswith("mirrored over 8 devices, because the run's own placement fails here: ")
    assert (found.strategy, found.mesh) == ("mirrored", MeshSpec())
    assert found.sharding.min_size == config.sharding.min_size
    assert resolve(found, batch_shards=make_placement(found).batch_shards).global_batch_size == 32
