"""What was saved comes back: on other devices, without the run's code, as files, or not at all."""

import contextlib
import dataclasses
import functools
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors
from checkpoint_helpers import load_state
from etils import epath
from flax import nnx
from helpers import BOUND, contents, environment, metrics, saved_steps, small_experiment
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.flax import load_file

from spmdtrain import (
    CallbackContext,
    FunctionModel,
    MeshSpec,
    RunConfig,
    StorageError,
    Trainer,
    TrainState,
    UserError,
    export_params,
    load_model,
    load_params,
    load_variables,
    read_manifest,
)
from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.checkpoints import command
from spmdtrain.checkpoints.listing import Retention
from spmdtrain.checkpoints.restore import read_variables
from spmdtrain.checkpoints.run_identity import Identity, describe_leaves, describe_optimizer
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.config.run_config import config_as_json
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP
from spmdtrain.run import main
from spmdtrain.sharding.placement import make_placement
from spmdtrain.sharding.rules import Rule
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.objective import model_output
from spmdtrain.tree import named_leaves

P = PartitionSpec
PyTree = Any
Options = dict[str, Any]

X = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)).astype(np.float32)


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Options of an experiment's own, besides those that all have."""

    global_batch_size: int | None = 8
    hidden: tuple[int, ...] = (8,)
    method: str = "adam"
    half: bool = False


def trainer(workdir: Path, *, devices: int = 8, quiet: bool = True, **options: Any) -> Trainer:
    """A small MLP's trainer, as its options say."""
    names = ("model", "objective", "optimizer", "callbacks")
    objects = {name: options.pop(name) for name in names if name in options}
    config = Config(workdir=str(workdir), mesh=MeshSpec(devices=tuple(range(devices))), **options)
    dtype = jnp.bfloat16 if config.half else jnp.float32
    made: dict[str, Any] = {
        "model": partial(half_mlp, config.hidden, dtype),
        "objective": squared_error,
        "optimizer": getattr(optax, config.method)(0.05),
    }
    return Trainer(**made | objects, config=config, terminal=Terminal(quiet=quiet))


def half_mlp(hidden: tuple[int, ...], dtype: Any, rngs: nnx.Rngs) -> MLP:
    """An MLP whose first layer's parameters have another dtype than the rest."""
    model = MLP(4, hidden, 1, rngs=rngs)
    model.layers[0] = nnx.Linear(4, hidden[0], param_dtype=dtype, rngs=rngs)
    return model


WHOLE = partial(half_mlp, (8,), jnp.float32)
HALF = partial(half_mlp, (8,), jnp.bfloat16)


def arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """Every leaf by its path, keys as the numbers they are made of."""
    return {
        name: np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        for name, leaf in named_leaves(tree).items()
    }


def assert_same_bits(found: PyTree, expected: PyTree) -> None:
    left, right = arrays(found), arrays(expected)
    assert left.keys() == right.keys() and right
    for name, x in right.items():
        y = left[name]
        assert (y.dtype, y.shape, y.tobytes()) == (x.dtype, x.shape, x.tobytes()), name


def structure_of(tree: PyTree) -> Any:
    """How a tree is nested."""
    return jax.tree.structure(tree)


def remove_arrays(workdir: Path) -> int:
    """Delete all files of all checkpoints but their manifests; how many they were."""
    files = [p for p in (workdir / "checkpoints").rglob("*") if p.is_file()]
    gone = [path for path in files if path.name != "manifest.json"]
    for path in gone:
        path.unlink()
    return len(gone)


class Run(NamedTuple):
    """A run that has ended. No test may change its workdir."""

    trainer: Trainer
    workdir: Path
    saved: dict[int, dict[str, PyTree]]
    """The fields of the model, as they were when each checkpoint was saved."""
    model: Callable[..., nnx.Module]

    @property
    def state(self) -> TrainState:
        assert self.trainer.state is not None
        return self.trainer.state


def run_of(folder: Path, steps: int, model: Callable[..., nnx.Module], **options: Any) -> Run:
    """Trains, evaluates and saves a model."""
    saved: dict[int, dict[str, PyTree]] = {}

    def note(event: CallbackContext) -> None:
        state, fields = event.trainer.state, ("params", "averaged", "model_state")
        saved[event.step] = {name: jax.tree.map(np.array, getattr(state, name)) for name in fields}

    callbacks = {"checkpoint": note, **options.pop("callbacks", {})}
    fitted = trainer(folder, model=model, callbacks=callbacks, **options)
    fitted.fit((X, Y), validation=(X, Y), steps=steps)
    return Run(fitted, folder, saved, model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps on eight devices, a checkpoint every two; part of the parameters is bfloat16."""
    options: Options = {"half": True, "checkpoint_every_steps": 2, "eval_every_steps": 2}
    return run_of(tmp_path_factory.mktemp("plain"), 6, HALF, **options)


@pytest.fixture(scope="module")
def averaging(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight steps with an average of the parameters, every one of them saved, and step 0."""
    options: Options = {"checkpoint_every_steps": 1, "keep_latest": 99, "checkpoint_at_start": True}
    options |= {"ema_decay": 0.3, "eval_every_steps": 4}
    return run_of(tmp_path_factory.mktemp("averaging"), 8, WHOLE, **options)


class Normed(nnx.Module):
    """A model that carries batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x))


class Listed(nnx.Module):
    """Layers in a list, one with batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Normed(rngs), nnx.Linear(1, 1, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def rising(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps of a normalized model: step 2 has the best score, step 1 was removed."""

    def score(event: CallbackContext) -> None:
        event.metrics["score"] = [0.5, 0.9, 0.7, 0.6][event.step - 1]

    options: Options = {"checkpoint_every_steps": 1, "eval_every_steps": 1}
    options |= {"best_metric": "score", "best_direction": "max", "callbacks": {"evaluation": score}}
    return run_of(tmp_path_factory.mktemp("rising"), 4, Listed, **options)


@pytest.fixture(scope="module")
def corrupted(rising: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same, and the manifest of the best checkpoint is cut off."""
    workdir = Path(shutil.copytree(rising.workdir, tmp_path_factory.mktemp("corrupted") / "run"))
    manifest = workdir / "checkpoints" / "2" / "manifest.json"
    manifest.write_text(manifest.read_text()[:20])
    return rising._replace(workdir=workdir)


@pytest.fixture(scope="module")
def unevaluated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two checkpoints, their arrays gone, of a run without validation data."""
    workdir = tmp_path_factory.mktemp("unevaluated")
    fitted = trainer(workdir, checkpoint_every_steps=2)
    fitted.fit((X, Y), steps=4)
    assert remove_arrays(workdir) > 20
    return Run(fitted, workdir, {}, WHOLE)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A folder without a run."""
    return Run(trainer(Path()), tmp_path_factory.mktemp("empty"), {}, WHOLE)


@pytest.fixture
def copy(plain: Run, tmp_path: Path) -> Path:
    """A workdir that a test may change."""
    return Path(shutil.copytree(plain.workdir, tmp_path / "copy"))


# -- the whole state, on any devices ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_finished_run_is_restored_to_the_bit_on_any_number_of_devices(
    devices: int, plain: Run, copy: Path
) -> None:
    again = trainer(copy, devices=devices, half=True)
    assert again.fit((X, Y), steps=6).step == 6
    assert_same_bits(again.state, plain.state)
    for leaf in jax.tree.leaves(again.state):
        assert len(leaf.sharding.device_set) == devices and leaf.sharding.is_fully_replicated


KERNELS = {
    "one device": (MeshSpec(devices=(0,)), P()),
    "another device": (MeshSpec(devices=(5,)), P()),
    "replicated on 4": (MeshSpec(devices=(1, 3, 5, 7)), P()),
    "fsdp=8": (MeshSpec(data=1, fsdp=8), P("fsdp")),
    "tensor=8": (MeshSpec(data=1, tensor=8), P(None, "tensor")),
    "fsdp=2 tensor=4": (MeshSpec(data=1, fsdp=2, tensor=4), P("tensor", "fsdp")),
    "both in one dim": (MeshSpec(data=2, fsdp=2, tensor=2), P(None, ("fsdp", "tensor"))),
    "fsdp=2 of 2": (MeshSpec(data=1, fsdp=2, devices=(6, 2)), P("fsdp")),
}


@functools.cache
def steps_for(layout: str) -> RunFunctions:
    """The programs of an MLP whose kernels, and their moments, lie as the layout says."""
    mesh, kernel = KERNELS[layout]
    config = RunConfig(mesh=mesh, ema_decay=0.9)
    return RunFunctions(
        adapter=as_adapter(partial(MLP, 8, (16, 24), 8)),
        objective=squared_error,
        predict=model_output,
        optimizer=optax.adam(0.1),
        placement=make_placement(config),
        rules=[Rule("kernel$", kernel)],
        config=config,
    )


def random_state(steps: RunFunctions) -> TrainState:
    """A state in which no two bits are what they are by default; NaN and -0.0 are among them."""
    random = np.random.default_rng(3)

    def values(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(77), sharding)
        x = random.normal(size=leaf.shape, scale=1e3).astype(leaf.dtype)
        x.reshape(-1)[:1] = {2: -0.0, 3: np.nan}.get(leaf.size % 5, 12)
        return jax.device_put(x, sharding)

    state: TrainState = jax.tree.map(values, steps.abstract_state, steps.shardings)
    return state


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("saved_as", ["one device", "fsdp=8", "fsdp=2 tensor=4", "both in one dim"])
def test_every_layout_of_the_state_is_restored_from_every_other(
    saved_as: str, tmp_path: Path
) -> None:
    steps = steps_for(saved_as)
    state = random_state(steps)
    identity = Identity(
        config_as_json(RunConfig()), {}, describe_leaves(state), describe_optimizer(state.opt_state)
    )
    with contextlib.closing(Checkpoints(epath.Path(tmp_path), Retention())) as saving:
        saving.save(state, 3, identity, None)
    for layout in KERNELS:
        other = steps_for(layout)
        loaded = load_state(tmp_path / "3", other.abstract_state, other.shardings)
        assert_same_bits(loaded, state)
        placed = jax.tree.map(lambda leaf: leaf.sharding, loaded)
        assert placed == other.shardings, layout
    kernel = loaded.averaged["layers"]["1"]["kernel"]  # the last layout's, fsdp=2 of 2
    assert [shard.data.shape for shard in kernel.addressable_shards] == [(8, 24)] * 2


# -- who loads x what is in the run x what is asked for --------------------------------------------


class Load(NamedTuple):
    """A run or one of its checkpoints, what is asked of it, and what comes.

    `loaded` is the step and the field of the state with the parameters, or a refusal.
    """

    run: str
    asked: Options
    loaded: tuple[int, str] | str
    checkpoint: int | None = None


LOADS = {
    "newest": Load("plain", {}, (6, "params")),
    "a folder": Load("plain", {}, (6, "params"), checkpoint=6),
    "an older folder": Load("plain", {}, (4, "params"), checkpoint=4),
    "trained": Load("plain", {"averaged": False}, (6, "params")),
    "no average": Load("plain", {"averaged": True}, "averaged parameters.*ema_decay"),
    "average by default": Load("averaging", {}, (8, "averaged")),
    "average": Load("averaging", {"averaged": True}, (8, "averaged")),
    "trained beside it": Load("averaging", {"averaged": False}, (8, "params")),
    "best": Load("rising", {"which": "best"}, (2, "params")),
    "step 3": Load("rising", {"which": 3}, (3, "params")),
    "latest": Load("rising", {"which": "latest"}, (4, "params")),
    "latest by default": Load("rising", {}, (4, "params")),
    "a folder of several": Load("rising", {}, (3, "params"), checkpoint=3),
    "a removed step": Load("rising", {"which": 1}, r"step 1; .*2, 3, 4"),
    "a misspelled word": Load("rising", {"which": "beste"}, "latest, best"),
    "best of one": Load("rising", {"which": "best"}, "one checkpoint", checkpoint=3),
    # A corrupted best checkpoint is never replaced by the second best.
    "corrupted best": Load("corrupted", {"which": "best"}, r"checkpoints/2: manifest\.json"),
    "step 3 beside it": Load("corrupted", {"which": 3}, (3, "params")),
    "latest beside it": Load("corrupted", {}, (4, "params")),
    "best without metrics": Load("unevaluated", {"which": "best"}, "'loss'"),
    "nothing": Load("empty", {}, "no checkpoint"),
    "no such folder": Load("empty", {}, "no checkpoint", checkpoint=6),
}


class Loaded(NamedTuple):
    """Parameters and model state by name, and the step that they are said to be of."""

    arrays: dict[str, np.ndarray] | None
    step: int | None = None


def of_module(model: nnx.Module) -> dict[str, np.ndarray]:
    return arrays(nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))


def by_load_model(run: Run, path: str, folder: Path, **asked: Any) -> Loaded:
    model = load_model(run.model, path, **asked)
    assert type(model) is type(run.trainer.model)
    return Loaded(of_module(model))


def by_npz(run: Run, path: str, folder: Path, **asked: Any) -> Loaded:
    target = folder / "deep" / "x.npz"
    exported = export_params(path, str(target), **asked)
    assert [file.name for file in target.parent.iterdir()] == ["x.npz"]
    with np.load(target) as file:
        assert {x.dtype.name for x in file.values()} == {"float32"}
        # What is float32 in the file is the very bfloat16 again.
        found = {n.replace(".", "/"): x.astype(exported[n].dtype) for n, x in file.items()}
    return Loaded(found)


def by_safetensors(run: Run, path: str, folder: Path, **asked: Any) -> Loaded:
    target = str(folder / "x.safetensors")
    export_params(path, target, **asked)
    with safetensors.safe_open(target, framework="flax") as file:
        metadata = file.metadata()
    asked.pop("averaged", None)
    assert metadata.keys() == {"step", "saved_at"}
    assert metadata["saved_at"] == read_manifest(path, **asked).saved_at
    found = arrays({n.replace(".", "/"): x for n, x in load_file(target).items()})
    return Loaded(found, int(metadata["step"]))


def by_init_from(run: Run, path: str, folder: Path, which: Any = "latest") -> Loaded:
    options: Options = {"init_from": path, "checkpoint": str(which)}
    begun = trainer(folder / "run", model=run.model, devices=1, **options)
    step = begun.restore()
    return Loaded(of_module(begun.model), step)


def by_restore(run: Run, path: str, folder: Path, **asked: Any) -> Loaded:
    """As an evaluator task does: the field `checkpoint` does not choose among those of a path."""
    options: Options = {"init_from": str(run.workdir), "checkpoint": "best"}
    restored = trainer(folder / "run", model=run.model, devices=1, **options)
    step = restored.restore(path, **asked)
    return Loaded(of_module(restored.model), step)


LOADERS: dict[str, Callable[..., Loaded]] = {  # (run, path, empty folder, **asked)
    "load_params": lambda run, path, _, **asked: Loaded(arrays(load_params(path, **asked))),
    "load_params to devices": lambda run, path, _, **asked: Loaded(
        arrays(load_params(path, sharding=run.trainer.placement.replicated, **asked))
    ),
    "load_variables": lambda run, path, _, **asked: Loaded(
        {n: x for tree in load_variables(path, **asked) for n, x in arrays(tree).items()}
    ),
    "load_model": by_load_model,
    "export to .npz": by_npz,
    "export to .safetensors": by_safetensors,
    "read_manifest": lambda _, path, __, **asked: Loaded(None, read_manifest(path, **asked).step),
    "init_from": by_init_from,
    "restore": by_restore,
}
SLOW = {run: [pytest.mark.slow] for run in ("averaging", "rising", "corrupted", "unevaluated")}
WITHOUT_CHOICE = ("read_manifest", "init_from", "restore")  # between average and trained parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "loader"),
    [
        pytest.param(load, loader, id=f"{name}-{loader}", marks=SLOW.get(load.run, ()))
        for name, load in LOADS.items()
        for loader in LOADERS
        if "averaged" not in load.asked or loader not in WITHOUT_CHOICE
    ],
)
def test_all_who_load_get_the_same(
    load: Load, loader: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(load.run)
    path = run.workdir
    if load.checkpoint is not None:
        path = path / "checkpoints" / str(load.checkpoint)
    load_it = partial(LOADERS[loader], run, str(path), tmp_path, **load.asked)
    if isinstance(load.loaded, str):
        with pytest.raises(UserError, match=load.loaded):
            load_it()
        assert list(tmp_path.iterdir()) == []
        return
    found, (step, field) = load_it(), load.loaded
    assert found.step in (None, step)
    if found.arrays is not None:
        expected = arrays(run.saved[step][field])
        if not loader.startswith("load_params"):
            expected |= arrays(run.saved[step]["model_state"])
        assert_same_bits(found.arrays, expected)


@pytest.mark.slow
def test_the_loads_differ(plain: Run, averaging: Run, rising: Run) -> None:
    """Or the table above would show nothing."""
    kernels = [
        run.saved[step][field]["layers"]["1"]["kernel"].tobytes()
        for run, step, field in [
            *((plain, 4, "params"), (plain, 6, "params")),
            *((averaging, 8, "params"), (averaging, 8, "averaged")),
            *((rising, 2, "params"), (rising, 3, "params"), (rising, 4, "params")),
        ]
    ]
    assert len(set(kernels)) == 7
    dtypes = {str(x.dtype) for x in jax.tree.leaves(plain.saved[6]["params"])}
    assert dtypes == {"bfloat16", "float32"}
    assert {type(x) for x in jax.tree.leaves(load_params(plain.workdir))} == {np.ndarray}


@pytest.mark.slow
def test_a_loaded_model_answers_as_the_trained_one(rising: Run) -> None:
    path, x = str(rising.workdir), jnp.asarray(X)
    newest = load_model(Listed, path)(x)
    best = load_model(Listed(rngs=nnx.Rngs(7)), path, which="best")(x)  # a module, not a function
    np.testing.assert_array_equal(newest, rising.trainer.model(x))
    assert not np.array_equal(best, newest)
    with pytest.raises(UserError, match=r"layers/0/bias: absent .*\(8,\)"):
        load_model(partial(MLP, 4, (8,), 1), path)


# -- the parameters alone --------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_parameters_are_placed_as_asked(devices: int, plain: Run) -> None:
    mesh = Mesh(np.array(jax.devices()[-devices:]), ("x",))
    everywhere = NamedSharding(mesh, P())
    params = load_params(str(plain.workdir), sharding=everywhere)
    assert_same_bits(params, plain.state.params)
    assert {x.sharding for x in jax.tree.leaves(params)} == {everywhere}
    # A tree of shardings, one a leaf: kernels split along what the layers have eight of.
    split = {
        "layers": {
            "0": {"kernel": NamedSharding(mesh, P(None, "x")), "bias": everywhere},
            "1": {"kernel": NamedSharding(mesh, P("x")), "bias": everywhere},
        }
    }
    params = load_params(str(plain.workdir), sharding=split)
    assert_same_bits(params, plain.state.params)
    assert jax.tree.map(lambda x: x.sharding, params) == split
    shards = params["layers"]["1"]["kernel"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(8 // devices, 1)] * devices
    one = SingleDeviceSharding(jax.devices()[devices - 1])
    assert load_params(str(plain.workdir), sharding=one)["layers"]["1"]["bias"].sharding == one


PROGRAM = """
import json, sys
import jax
from spmdtrain import load_params
from spmdtrain.sharding.layout import named_leaves
params = named_leaves(load_params(sys.argv[1]))
print(json.dumps({n: [str(x.dtype), x.tobytes().hex()] for n, x in params.items()}))
on_device = load_params(sys.argv[1], sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
print(len(jax.devices()), sum(int(x.size) for x in jax.tree.leaves(on_device)))
"""


@pytest.mark.nightly
def test_a_program_without_the_runs_code_loads_them_on_one_device(
    plain: Run, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(plain.workdir)],
        cwd=tmp_path,
        env=environment(devices=1),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    found, devices = ended.stdout.splitlines()
    expected = {n: [str(x.dtype), x.tobytes().hex()] for n, x in arrays(plain.state.params).items()}
    assert json.loads(found) == expected
    assert devices == f"1 {4 * 8 + 8 + 8 + 1}"


# -- averaged parameters ---------------------------------------------------------------------------


def averages(workdir: Path, steps: int, decay: float) -> list[dict[str, np.ndarray]]:
    """The moving average after each step, from the parameters that were saved at each."""
    saved = [
        arrays(load_params(str(workdir / "checkpoints" / str(k)), averaged=False))
        for k in range(steps + 1)
    ]
    found = [saved[0]]
    for k in range(1, steps + 1):
        slow = min(decay, (1 + k) / (10 + k))
        found.append({n: slow * old + (1 - slow) * saved[k][n] for n, old in found[-1].items()})
    return found


def mlp(params: dict[str, np.ndarray]) -> np.ndarray:
    """The answers of the MLP with these parameters, by NumPy."""
    hidden = np.maximum(X @ params["layers/0/kernel"] + params["layers/0/bias"], 0)
    answers: np.ndarray = hidden @ params["layers/1/kernel"] + params["layers/1/bias"]
    return answers


def mlp_loss(params: dict[str, np.ndarray]) -> float:
    """The mean squared error of the MLP with these parameters, by NumPy."""
    return float(((mlp(params) - Y).astype(np.float64) ** 2).mean())


@pytest.mark.slow
def test_the_average_is_that_of_every_step_and_what_is_evaluated(averaging: Run) -> None:
    workdir = averaging.workdir
    assert saved_steps(workdir) == list(range(9))
    expected = averages(workdir, 8, 0.3)
    for k in (0, 1, 2, 5, 8):
        found = arrays(load_params(str(workdir / "checkpoints" / str(k))))
        assert found.keys() == expected[k].keys()
        for name, x in expected[k].items():
            np.testing.assert_allclose(found[name], x, rtol=2e-6, atol=1e-7, err_msg=f"{k} {name}")
    lines = metrics(workdir, "eval")
    assert [line["step"] for line in lines] == [4, 8]
    for line in lines:
        path = str(workdir / "checkpoints" / str(line["step"]))
        trained = mlp_loss(arrays(load_params(path, averaged=False)))
        assert line["loss"] == pytest.approx(mlp_loss(expected[line["step"]]), rel=1e-5)
        assert abs(line["loss"] - trained) > 1e-3 * trained
        assert read_manifest(path).metrics == {"loss": line["loss"]}


@pytest.mark.slow
def test_evaluate_repeats_the_number_of_the_run(averaging: Run, tmp_path: Path) -> None:
    path = str(averaging.workdir)
    at_4, at_8 = ({"loss": line["loss"]} for line in metrics(averaging.workdir, "eval"))
    assert averaging.trainer.evaluate((X, Y)) == at_8
    again = trainer(averaging.workdir, ema_decay=0.3)
    assert again.evaluate((X, Y)) == at_8
    assert again.restore(f"{path}/checkpoints/4") == 4
    assert again.evaluate((X, Y)) == at_4
    # Even a trainer that keeps no average takes the one that the run was judged by.
    for strict in ("all", "matching"):
        without = trainer(tmp_path / strict, init_from=path, init_from_strict=strict)
        assert without.evaluate((X, Y)) == at_8
    answers = mlp(arrays(averaging.saved[8]["averaged"]))
    np.testing.assert_allclose(without.predict((X, Y)), answers, rtol=1e-4, atol=1e-5)


STARTS: dict[str, tuple[str, Options, tuple[int, str]]] = {
    "average": ("averaging", {"ema_decay": 0.3}, (8, "averaged")),
    "trained, by a file": ("averaging", {"ema_decay": 0.3}, (8, "params")),
    "best": ("rising", {"checkpoint": "best"}, (2, "params")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_a_run_starts_from_what_it_would_evaluate(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fixture, options, (step, field) = STARTS[name]
    run: Run = request.getfixturevalue(fixture)
    source = run.workdir
    if name == "trained, by a file":
        source = tmp_path / "trained.npz"
        export_params(str(run.workdir), str(source), averaged=False)
    options = {**options, "init_from": str(source), "checkpoint_at_start": True}
    trainer(tmp_path / "run", model=run.model, **options).fit((X, Y), steps=1)
    for averaged in (True, False) if "ema_decay" in options else (None,):
        first = load_variables(str(tmp_path / "run"), which=0, averaged=averaged)
        found = {"params": first.params, "model_state": first.model_state}
        expected = {"params": run.saved[step][field], "model_state": run.saved[step]["model_state"]}
        assert_same_bits(found, expected)


def test_a_run_of_its_own_checkpoints_starts_from_the_newest(rising: Run) -> None:
    again = trainer(rising.workdir, model=Listed, checkpoint="2")
    assert again.restore() == 2 and again.restore(which="latest") == 4
    with pytest.raises(UserError, match="init_from"):
        again.fit((X, Y), steps=5)


@pytest.mark.slow
def test_the_command_evaluates_the_average_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    options = ["--config", str(small_experiment(tmp_path)), "--workdir", str(workdir)]
    options += ["--ema-decay", "0.9", "--steps", "4"]
    assert main(options) == 0
    capsys.readouterr()
    assert main([*options, "--mode", "evaluate"]) == 0
    printed = capsys.readouterr().out
    (line,) = (json.loads(x) for x in printed.splitlines() if x.startswith("{"))
    expected = metrics(workdir, "eval")[-1]
    assert line == {"step": 4, "split": "validation", "loss": expected["loss"]}
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    averaged, trained = (load_params(str(workdir), averaged=choice) for choice in (True, False))
    losses = [np.mean((x @ p["kernel"] + p["bias"] - 3 * x - 2) ** 2) for p in (averaged, trained)]
    assert line["loss"] == pytest.approx(losses[0], rel=1e-5) != pytest.approx(losses[1], rel=1e-2)


# -- models of other shapes ------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_statistics_come_with_the_parameters(tmp_path: Path) -> None:
    fitted = trainer(tmp_path, model=Normed, ema_decay=0.5)
    fitted.fit((X, Y), steps=3)
    assert fitted.state is not None
    variables, manifest = read_variables(str(tmp_path))
    assert manifest.step == 3
    assert_same_bits(variables.params, fitted.state.averaged)
    assert_same_bits(variables.model_state, fitted.state.model_state)
    assert not np.array_equal(variables.model_state["norm"]["mean"], np.zeros(4))
    exported = export_params(str(tmp_path), str(tmp_path / "x.npz"))
    names = ["linear.bias", "linear.kernel", "norm.bias", "norm.mean", "norm.scale", "norm.var"]
    assert sorted(exported) == names
    np.testing.assert_array_equal(exported["norm.var"], fitted.state.model_state["norm"]["var"])
    again = trainer(tmp_path, model=Normed, ema_decay=0.5)
    again.fit((X, Y), steps=3)
    assert_same_bits(again.state, fitted.state)


class Pair(NamedTuple):
    """A node of parameters that is a tuple with names."""

    kernel: Any
    scale: Any


def normal(key: jax.Array, number: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, number), (4, 1))


TREES: dict[str, Any] = {
    "list": lambda key: [normal(key, n) for n in range(12)],
    "tuple": lambda key: (normal(key, 0), (normal(key, 1),)),
    "array": lambda key: normal(key, 0),
    "mixed": lambda key: {"l": [(normal(key, 0), normal(key, 1))], "n": {"x": normal(key, 2)}},
    "named": lambda key: {"n": Pair(normal(key, 0), normal(key, 1))},
    "numbered": lambda key: {0: normal(key, 0), 1: normal(key, 1), 10: normal(key, 2)},
    "empty": lambda key: {"a": {}, "b": (), "c": [], "n": None, "x": normal(key, 0)},
}
LOADED: dict[str, tuple[Any, list[str]]] = {
    "list": ([0] * 12, [str(n) for n in range(12)]),
    "tuple": ([0, [0]], ["0", "1.0"]),
    "array": (0, ["params"]),
    "mixed": ({"l": [[0, 0]], "n": {"x": 0}}, ["l.0.0", "l.0.1", "n.x"]),
    "named": ({"n": {"kernel": 0, "scale": 0}}, ["n.kernel", "n.scale"]),
    "numbered": ({"0": 0, "1": 0, "10": 0}, ["0", "1", "10"]),
    "empty": ({"a": {}, "b": (), "c": [], "n": None, "x": 0}, ["x"]),
}


def of_all_leaves(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    leaves = (leaf.astype(jnp.float32) for leaf in jax.tree.leaves(params) if leaf.size)
    answers = (x @ leaf for leaf in leaves)
    return {"loss": (sum(answers, start=jnp.zeros(())) - y) ** 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.nightly] * (x != "mixed")) for x in TREES]
)
def test_parameters_of_any_structure_are_loaded_resumed_and_exported(
    name: str, tmp_path: Path
) -> None:
    options: Options = {"model": FunctionModel(TREES[name]), "objective": of_all_leaves}
    fitted = trainer(tmp_path / "run", devices=2, **options)
    fitted.fit((X, Y), steps=2)
    assert fitted.state is not None
    params = load_params(str(tmp_path / "run"))
    structure, names = LOADED[name]
    assert structure_of(params) == structure_of(structure)
    assert_same_bits(params, fitted.state.params)
    exported = export_params(str(tmp_path / "run"), str(tmp_path / "x.npz"))
    assert sorted(exported) == sorted(names)
    again = trainer(tmp_path / "run", devices=2, **options)
    again.fit((X, Y), steps=2)
    assert structure_of(again.state) == structure_of(fitted.state)
    assert_same_bits(again.state, fitted.state)
    assert command.main(["verify", str(tmp_path / "run")]) == 0


# -- export ----------------------------------------------------------------------------------------


def test_what_export_cannot_do_is_refused_before_anything_is_written(
    plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x.bin", "x", "x.npz.gz"):
        with pytest.raises(UserError, match=r"\.npz and \.safetensors"):
            export_params(str(plain.workdir), str(tmp_path / name))
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)  # as where it is not installed
    with pytest.raises(UserError, match=r"spmdtrain\[safetensors\]"):
        export_params(str(plain.workdir), str(tmp_path / "x.safetensors"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_target_that_cannot_be_written_leaves_nothing_behind(
    suffix: str, plain: Run, tmp_path: Path
) -> None:
    target = tmp_path / f"x.{suffix}"
    target.mkdir()
    with pytest.raises(StorageError, match=rf"x\.{suffix} cannot be written: .*[Ii]s a directory"):
        export_params(str(plain.workdir), str(target))
    target.rmdir()
    target.write_text("of old")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # as a disk that is full after so many bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, unlimited[1]))
        with pytest.raises(StorageError, match=rf"x\.{suffix} cannot be written: File too large"):
            export_params(str(plain.workdir), str(target))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, ignored)
    assert contents(tmp_path) == {target.name: b"of old"}


# The clean-up fails as the writing did; its error is not to be the one that is raised.
def test_a_target_below_a_file_is_refused_by_name(plain: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/deep/x\.npz cannot be written: Not a directory"):
        export_params(str(plain.workdir), str(tmp_path / "file" / "deep" / "x.npz"))


# float8_e5m2 is of kind "f" like float16, and yet no dtype of NumPy's files.
@pytest.mark.slow
def test_every_dtype_can_be_read_again(tmp_path: Path) -> None:
    dtypes = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32")

    def start(key: jax.Array) -> dict[str, jax.Array]:
        return {name: normal(key, 0).astype(name) for name in dtypes}

    options: Options = {"model": FunctionModel(start), "objective": of_all_leaves, "method": "sgd"}
    options |= {"freeze": ("float8", "^float16")}  # too narrow for gradients
    fitted = trainer(tmp_path / "run", devices=1, **options)
    fitted.fit((X, Y), steps=1)
    assert fitted.state is not None
    assert_same_bits(load_params(str(tmp_path / "run")), fitted.state.params)
    export_params(str(tmp_path / "run"), str(tmp_path / "x.safetensors"))
    # safetensors.flax does not support float8: the file is a header in JSON, and the bytes.
    content = (tmp_path / "x.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    codes = ["F8_E5M2", "F8_E4M3", "BF16", "F16", "F32"]
    assert [header[name]["dtype"] for name in dtypes] == codes
    for name in dtypes:
        first, last = header[name]["data_offsets"]
        written = content[end + first : end + last]
        assert written == arrays(fitted.state.params)[name].tobytes(), name
    export_params(str(tmp_path / "run"), str(tmp_path / "x.npz"))
    expected = arrays(fitted.state.params)
    with np.load(tmp_path / "x.npz") as found:
        kept = {name: str(found[name].dtype) for name in found}
        assert kept == {n: "float16" if n == "float16" else "float32" for n in dtypes}
        for name in dtypes:
            assert found[name].astype(jnp.dtype(name)).tobytes() == expected[name].tobytes()


@pytest.mark.slow
def test_a_dtype_that_safetensors_lack_is_refused_by_name(tmp_path: Path) -> None:
    def start(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": normal(key, 0).astype(jnp.int4), "x": normal(key, 0)}

    options: Options = {"model": FunctionModel(start), "objective": of_all_leaves}
    fitted = trainer(tmp_path / "run", devices=1, freeze=("w",), **options)
    fitted.fit((X, Y), steps=1)
    with pytest.raises(UserError, match=r"w is int4, which \.safetensors files lack: export a"):
        export_params(str(tmp_path / "run"), str(tmp_path / "x.safetensors"))


BOTH = r"would both be saved as params\.a\.b"
UNSAVEABLE: dict[str, tuple[Any, str]] = {
    "dots": (lambda key: {"a": {"b": normal(key, 0)}, "a.b": normal(key, 1)}, BOTH),
    "slashes": (lambda key: {"a": {"b": normal(key, 0)}, "a/b": normal(key, 1)}, BOTH),
    "nothing": (lambda key: {"a": normal(key, 0), "b": jnp.zeros((0, 4))}, r"params/b .*\(0, 4\)"),
}


# Orbax writes arrays called a/b and a.b over one another, and none without elements: the first
# is noticed at a restore, when it is too late, the second at the first save.
@pytest.mark.parametrize("name", UNSAVEABLE)
def test_what_cannot_be_saved_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    start, message = UNSAVEABLE[name]
    options: Options = {"model": FunctionModel(start), "objective": of_all_leaves}
    with pytest.raises(UserError, match=message):
        trainer(tmp_path / "run", devices=1, **options).fit((X, Y), steps=1)
    assert not (tmp_path / "run" / "checkpoints").exists()


# -- looking without loading -----------------------------------------------------------------------


def test_a_manifest_is_read_without_any_array(plain: Run, copy: Path) -> None:
    whole = read_manifest(str(plain.workdir))
    size = sum(
        path.stat().st_size for path in (copy / "checkpoints" / "6").rglob("*") if path.is_file()
    )
    manifest_size = (copy / "checkpoints" / "6" / "manifest.json").stat().st_size
    assert remove_arrays(copy) > 20
    found = read_manifest(str(copy))
    assert found == whole and (found.step, found.stopped) == (6, False)
    assert 0.9 * size < found.size + manifest_size <= size
    leaves = found.identity.leaves
    assert leaves["params/layers/0/kernel"] == "bfloat16[4,8]"
    assert leaves["opt_state/0/nu/layers/1/kernel"] == "float32[8,1]"
    assert (leaves["step"], leaves["key"]) == ("int32[]", "uint32[2]")
    assert set(leaves) == set(found.sums) == set(named_leaves(plain.state))
    loss = metrics(plain.workdir, "eval")[-1]["loss"]
    assert found.metrics == {"loss": loss}
    assert found.identity.dataset["examples"] == 40
    assert "ScaleByAdamState" in found.identity.optimizer
    assert found.identity.config["global_batch_size"] == 8
    assert read_manifest(str(copy / "checkpoints" / "4")).step == 4


def rows(printed: str) -> list[list[str]]:
    """The cells of the tables that were printed."""
    lines = [line for line in printed.splitlines() if line[:1] == "│"]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_show_prints_the_arrays_and_the_facts(
    plain: Run, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_arrays(copy)
    assert command.main(["show", str(copy), "--step", "6"]) == 0
    printed = capsys.readouterr().out
    table = {name: cells for name, *cells in rows(printed)}
    assert list(table) == list(named_leaves(plain.state))
    assert table["params/layers/0/kernel"] == ["bfloat16[4,8]", "64 B"]
    assert table["opt_state/0/mu/layers/1/kernel"] == ["float32[8,1]", "32 B"]
    assert table["step"] == ["int32[]", "4 B"] and table["key"] == ["uint32[2]", "8 B"]
    facts = dict(line.split(": ", 1) for line in printed.splitlines() if ": " in line)
    assert (facts["step"], facts["parameters"]) == ("6", "49")
    assert facts["saved"].endswith(" min ago")
    loss = metrics(plain.workdir, "eval")[-1]["loss"]
    assert facts["metrics"] == str({"loss": loss})
    assert facts["config.keep_latest"] == "3" and "'examples': 40" in facts["dataset"]
    assert command.main(["show", str(copy / "checkpoints" / "4")]) == 0
    assert "\nstep: 4\n" in capsys.readouterr().out


@pytest.mark.slow
def test_show_lists_all_checkpoints_and_marks_the_best(
    rising: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["show", str(rising.workdir)]) == 0
    found = {cells[0]: cells[-2:] for cells in rows(capsys.readouterr().out)}
    assert found == {"4": ["0.6", ""], "3": ["0.7", ""], "2": ["0.9", "best score"]}


@pytest.mark.slow
def test_verify_prints_a_row_a_checkpoint_and_what_is_wrong(
    plain: Run, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy / "checkpoints"
    assert command.main(["verify", str(copy)]) == 0
    found = rows(capsys.readouterr().out)
    assert [[row[0], row[4]] for row in found] == [["6", "valid"], ["4", "valid"], ["2", "valid"]]
    losses = {line["step"]: line["loss"] for line in metrics(plain.workdir, "eval")}
    for step, age, size, metric, _ in found:
        assert age == "0 min ago" or age.endswith("min ago")
        assert size.endswith(" kB") and metric == f"loss {losses[int(step)]:.4g}"

    (folder / "6" / "manifest.json").unlink()
    (folder / "4" / "params" / "_METADATA").unlink()
    (folder / "7.orbax-checkpoint-tmp").mkdir()
    (folder / "8.corrupted").mkdir()
    before = contents(copy)
    assert command.main(["verify", str(copy)]) == 1
    unfinished = "unfinished: being saved now, or to be removed by the next start"
    assert {row[0]: row[4] for row in rows(capsys.readouterr().out)} == {
        "6": "manifest.json is missing: the save was interrupted, or it is not a checkpoint",
        "4": "params/_METADATA is missing",
        "2": "valid",
        "7.orbax-checkpoint-tmp": unfinished,
        "8.corrupted": "quarantined",
    }
    assert contents(copy) == before  # to look changes nothing
    assert command.main(["verify", str(folder / "2")]) == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["2"]
    assert command.main(["verify", str(folder / "4")]) == 1
    (folder / "2" / "manifest.json").write_text("{}")
    capsys.readouterr()
    assert command.main(["verify", str(copy)]) == 1
    row = next(row for row in rows(capsys.readouterr().out) if row[0] == "2")
    assert row[4] == "manifest.json does not match its digest"
    for path in (copy / "nowhere", copy):
        shutil.rmtree(path, ignore_errors=True)
        assert command.main(["verify", str(path)]) == 2
        assert f"{path.name}: holds no checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_the_export_command_says_what_it_wrote_or_why_not(
    plain: Run, averaging: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.npz"
    assert command.main(["export", str(plain.workdir), str(target)]) == 0
    said = capsys.readouterr().out
    assert said == f"4 arrays, {4 * 8 * 2 + 8 * 2 + 8 * 4 + 4} B, in {target}\n"
    for options, field in (([], "averaged"), (["--trained"], "params")):
        assert command.main(["export", str(averaging.workdir), str(target), *options]) == 0
        with np.load(target) as found:
            expected = averaging.saved[8][field]["layers"]["0"]["bias"]
            np.testing.assert_array_equal(found["layers.0.bias"], expected)
    assert command.main(["export", str(plain.workdir), str(tmp_path / "x.bin")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / "folder.npz").mkdir()
    assert command.main(["export", str(plain.workdir), str(tmp_path / "folder.npz")]) == 1
    assert capsys.readouterr().err.startswith("failed: ")


# -- step 0 ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_step_0_is_saved_on_request_and_a_run_begins_from_it(
    averaging: Run, plain: Run, tmp_path: Path
) -> None:
    assert 0 not in saved_steps(plain.workdir)
    zero = read_manifest(str(averaging.workdir / "checkpoints" / "0"))
    assert (zero.step, zero.metrics) == (0, None)
    params = load_params(str(averaging.workdir / "checkpoints" / "0"))
    assert_same_bits(params, trainer(tmp_path / "new").functions.init(0).params)
    workdir = tmp_path / "run"
    shutil.copytree(averaging.workdir / "checkpoints" / "0", workdir / "checkpoints" / "0")
    again = trainer(workdir, ema_decay=0.3, resume="must", eval_every_steps=4)
    again.fit((X, Y), validation=(X, Y), steps=8)
    assert_same_bits(again.state, averaging.state)
    assert saved_steps(workdir) == [0, 8]
    assert metrics(workdir, "eval") == metrics(averaging.workdir, "eval")


# -- refusals --------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """Differences from the run of the checkpoint, and parts of the message."""

    options: Options
    message: str
    data: Any = (X, Y)


REFUSALS = {
    "seed": Refusal({"seed": 5}, "trained with seed=0, this run has 5: give seed=0"),
    "batch": Refusal(
        {"global_batch_size": 16},
        "trained with global_batch_size=8, this run has 16: give global_batch_size=8",
    ),
    "shuffle": Refusal(
        {"shuffle": False}, "trained with shuffle=True, this run has False: give shuffle=True"
    ),
    "examples": Refusal(
        {}, "other data: examples was 40, and is 32 now; give the same", (X[:32], Y[:32])
    ),
    "values": Refusal({}, "other data: crc32 was ", (X + 1, Y)),
    # The folder may have led to it.
    "folder": Refusal({"data_dir": "b"}, "other data: crc32 was  ... data_dir=None", (X + 1, Y)),
    "arrays": Refusal({}, "other data: arrays was {'0': 'float32[4]', ", {"x": X, "y": Y}),
    "model": Refusal(
        {"hidden": (16,)},
        "another model: params/layers/0/bias is float32[8] there and float32[16] here; "
        "give hidden=(8,), or",
    ),
    "deeper": Refusal(
        {"hidden": (8, 8)},
        "another model: params/layers/1/bias is float32[1] there and float32[8] here; "
        "give hidden=(8,), or",
    ),
    "dtype": Refusal(
        {"half": True},
        "another model: params/layers/0/bias is float32[8] there and bfloat16[8] here; "
        "give half=False, or",
    ),
    "optimizer": Refusal(
        {"method": "sgd"},
        "another optimizer: opt_state/0/count is int32[] there and absent here; give "
        "method='adam', or another workdir, or take its parameters alone: init_from=",
    ),
    "transformation": Refusal(
        {"method": "adamw"},
        "another optimizer: opt_state is tuple(ScaleByAdamState(_, _, _), EmptyState()) there and "
        "tuple(ScaleByAdamState(_, _, _), EmptyState(), EmptyState()) here; "
        "give method='adam', or",
    ),
    "average": Refusal(
        {"ema_decay": 0.9},
        "another moving average: averaged/layers/0/bias is absent there and float32[8] here; "
        "give ema_decay=None, or another workdir, or take its parameters alone: init_from=",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_a_checkpoint_of_another_run_is_refused_before_anything_is_loaded(
    name: str, unevaluated: Run
) -> None:
    (options, message, data), workdir = REFUSALS[name], unevaluated.workdir
    before = contents(workdir)
    with pytest.raises(UserError) as caught:
        trainer(workdir, **options).fit(data, steps=6)
    for text in (f"{workdir / 'checkpoints' / '4'} ", "another workdir", *message.split(" ... ")):
        assert text in str(caught.value)
    found = contents(workdir)
    for path in (".lock", "status.json"):  # the run's own, which it may write
        before.pop(path, None), found.pop(path, None)
    assert found == before


@pytest.mark.slow
def test_the_same_run_sees_that_the_arrays_are_gone(unevaluated: Run) -> None:
    with pytest.raises(UserError, match="none of the 2"):
        trainer(unevaluated.workdir).fit((X, Y), steps=6)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_refusal_never_falls_back_to_an_older_checkpoint_that_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    trainer(mine).fit((X, Y), steps=2)
    for name in ("seed", "deeper", "optimizer"):  # what was there is here, the other way round
        options, message, data = REFUSALS[name]
        trainer(other / name, devices=1, **options).fit(data, steps=3)
        shutil.copytree(other / name / "checkpoints" / "3", mine / "checkpoints" / "3")
        with pytest.raises(UserError) as caught:
            trainer(mine, quiet=False).fit((X, Y), steps=6)
        assert "was trained with" in str(caught.value) or "is of another" in str(caught.value)
        assert f"{mine / 'checkpoints' / '3'} " in str(caught.value) and message not in str(
            caught.value
        )
        assert saved_steps(mine) == [2, 3]
        shutil.rmtree(mine / "checkpoints" / "3")
    assert "corrupted" not in capsys.readouterr().out
    assert trainer(mine).fit((X, Y), steps=3).step == 3


# The fields of a class in the configuration have options of more than one word.
NESTED = (
    (
        "@dataclass(frozen=True, kw_only=True)\nclass Config",
        "@dataclass(frozen=True, kw_only=True)\nclass Data:\n    examples: int = 64\n"
        "    flat: bool = False\n\n\n@dataclass(frozen=True, kw_only=True)\nclass Config",
    ),
    ('    examples: int = 64\n    """How many', '    data: Data = Data()\n    """How many'),
    ("config.examples", "config.data.examples"),
)
HINTS: dict[str, tuple[Any, dict[str, str], str]] = {
    # Changes of the experiment, what the command answers to options, and options that would do.
    "fields": (
        (),
        {
            "--examples 32": "other data: examples was 64, and is 32 now; give --examples 64, or",
            "--ema-decay 0.5": "give --ema-decay None, or",
        },
        "--examples 64 --ema-decay None",
    ),
    # Once the message said `--data {'examples': 64, 'flat': False}`.
    "nested fields": (
        NESTED,
        {
            "--data.examples 32": "; give --data.examples 64, or another",
            "--data.examples 32 --data.flat": (
                "; give --data.examples 64 --data.no-flat, or another"
            ),
        },
        "--data.examples 64 --data.no-flat",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "answers", "kept"), HINTS.values(), ids=HINTS)
def test_the_command_refuses_with_the_option_that_would_do(
    changes: Any,
    answers: dict[str, str],
    kept: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experiment = str(small_experiment(tmp_path, *changes))
    options = ["--config", experiment, "--workdir", str(tmp_path / "run")]
    assert main(options) == 0
    for refused, hint in answers.items():
        assert main([*options, "--steps", "6", *refused.split()]) == 2
        assert hint in capsys.readouterr().err
    assert main([*options, "--steps", "6", *kept.split()]) == 0
    assert saved_steps(tmp_path / "run")[-1] == 6


@pytest.mark.slow
def test_parameters_of_another_run_may_start_this_one_but_not_another_model(
    plain: Run, tmp_path: Path
) -> None:
    options: Options = {"half": True, "method": "sgd", "seed": 9, "global_batch_size": 16}
    begun = trainer(tmp_path / "a", **options, devices=4, init_from=str(plain.workdir))
    begun.fit((X, Y), steps=1)
    assert begun.state is not None and begun.step == 1
    with pytest.raises(UserError, match=r"layers/0/bias is bfloat16\[8\]"):
        trainer(tmp_path / "b", init_from=str(plain.workdir)).fit((X, Y), steps=1)
    assert saved_steps(tmp_path / "b") == []


def test_orbax_alone_reads_what_was_saved(plain: Run) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(plain.workdir / "checkpoints" / "6" / "params")
    assert_same_bits(found["params"], plain.state.params)
    assert dataclasses.asdict(read_manifest(str(plain.workdir)))["step"] == 6


@pytest.mark.slow
def test_an_average_of_bfloat16_parameters_moves() -> None:
    # A thousandth of the way from 1.0 to 1.5 is less than bfloat16 can tell from nothing.
    def constant_gradient(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": jnp.sum(model["w"]) * batch[0]}

    trainer = Trainer(
        model=FunctionModel(lambda key: {"w": jnp.ones(3, jnp.bfloat16)}),
        objective=constant_gradient,
        optimizer=optax.sgd(0.0078125),  # an exact step of bfloat16 around 1
        ema_decay=0.999,
        terminal=Terminal(quiet=True),
    )
    trainer.fit((np.ones(64, np.float32),), steps=40, global_batch_size=8)
    assert trainer.state is not None
    average, expected = trainer.state.averaged["w"], np.float64(1)
    for k in range(1, 41):
        decay = min(0.999, (1 + k) / (10 + k))
        expected = decay * expected + (1 - decay) * (1 - 0.0078125 * k)
    assert average.dtype == jnp.float32 and trainer.state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(average, expected, rtol=1e-5)
    assert trainer.model["w"].dtype == jnp.bfloat16
