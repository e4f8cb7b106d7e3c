"""The whole text of one message of each family of errors.

Other tests match only the name or value that identifies the cause, so a message can be reworded
here alone.
"""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import optax
import pytest
from flax import linen, nnx

from spmdtrain import (
    CollectiveOptions,
    Loop,
    MeshSpec,
    NonFiniteError,
    RunConfig,
    StorageError,
    UserError,
    export_params,
    load_params,
    reduce,
)
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.cluster import job_token
from spmdtrain.cluster.spec import Address, from_tf_config
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.images import ImageFolder, read_idx
from spmdtrain.distributed.initialize import ClusterOptions, find_party
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MobileNetV2
from spmdtrain.plan import topologies
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import RunFiles

X, Y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)


def fit(data: Any = (X, Y), steps: int | None = 1, **options: Any) -> None:
    split = options.pop("validation", None)
    linear_model.trainer(**options).fit(data, validation=split, steps=steps)


def losses(values: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Returns an objective of the model's output, x and y."""
    return lambda model, batch: values(model(batch[0]), *batch)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def run_twice(folder: Path, **options: Any) -> None:
    """Trains for two steps, and then for more with other options."""
    fit(steps=2, workdir=str(folder))
    defaults: dict[str, Any] = {"steps": 4, "workdir": str(folder)}
    fit(**defaults | options)


TASK_3 = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 3}})


def use_twice(folder: Path) -> None:
    with contextlib.closing(RunFiles(str(folder))):
        fit(workdir=str(folder))


def read_corrupted(folder: Path) -> None:
    fit(steps=1, workdir=str(folder))
    step = folder / "checkpoints" / "1"
    (step / "manifest.json").write_text("{")
    Manifest.read(step)


def export_to_folder(folder: Path) -> None:
    fit(steps=1, workdir=str(folder))
    (folder / "x.npz").mkdir()
    export_params(str(folder), str(folder / "x.npz"))


def record_twice() -> None:
    with Loop(steps=2, global_batch_size=8, terminal=Terminal(quiet=True)) as loop:
        state = loop.start(lambda key: {"params": jnp.ones(4)}, train=(X, Y))
        step = loop.compile_step(lambda state, batch, key: (state, {"loss": batch[0].mean()}))
        for batch in loop.batches():
            state, output = step(state, batch)
            loop.end_step(state, output)
            loop.end_step(state, output)


def call_outside_with() -> None:
    list(Loop(steps=2).batches())


def without_jit() -> None:
    with jax.disable_jit():
        fit(jit=False)
        fit()


class Kept(nnx.Variable[Any]):
    """A kind of sown values."""


class Sowing(nnx.Linear):
    """A model with a variable that its first call makes."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(4, 1, rngs=rngs)

    def __call__(self, x: Any, out_sharding: Any = None) -> Any:
        self.sown = Kept(x.mean())
        return super().__call__(x)


class Case(NamedTuple):
    """A family of errors: its name, a call that raises one, its type and its text."""

    family: str
    call: Callable[[Path], object]
    kind: type[Exception]
    text: str
    """With FOLDER for the path of a temporary folder."""


CASES = [
    Case(
        "unknown option",
        lambda _: linear_model.trainer(log_evry=1),
        UserError,
        "Trainer has no option 'log_evry'. Did you mean 'log_every'?",
    ),
    Case(
        "unknown name",
        lambda _: linear_model.trainer(strategy="mirored"),
        UserError,
        "there is no strategy 'mirored'. Did you mean 'mirrored'?",
    ),
    Case(
        "unknown event",
        lambda _: linear_model.trainer(callbacks={"on_step": print}),
        UserError,
        "there is no event 'on_step' for callbacks. Did you mean 'step'?",
    ),
    Case(
        "unknown choice",
        lambda _: fit(uneven_batch="error"),
        UserError,
        "uneven_batch is 'error'. There are: refuse, pad.",
    ),
    Case(
        "value out of range",
        lambda _: RunConfig(log_every=0),
        UserError,
        "log_every is 0: it must be above 0",
    ),
    Case(
        "value of another form",
        lambda _: RunConfig(profile_steps="10"),
        UserError,
        "profile_steps is '10': write A:B, two step numbers with 1 <= A <= B",
    ),
    Case(
        "size of a mesh axis",
        lambda _: RunConfig(mesh=MeshSpec(data=0)),
        UserError,
        "mesh.data is 0: it must be 1 or more, or -1 for the remaining devices",
    ),
    Case(
        "sizes that do not fit",
        lambda _: linear_model.trainer(mesh=MeshSpec(data=3)),
        UserError,
        (
            "mesh: replica=1 * data=3 * fsdp=1 * expert=1 * context=1 * tensor=1 = 3 != 8 "
            "devices; set one axis to -1, or name the devices to use in mesh.devices"
        ),
    ),
    Case(
        "batch that does not divide",
        lambda _: fit(microbatches=3),
        UserError,
        (
            "global_batch_size is 8: it does not divide over 8 devices and 3 microbatches (8 = 0 "
            "* 24 + 8); 24 would; uneven_batch=pad pads the batch, with rows that devices compute "
            "for nothing (not supported by Loop)"
        ),
    ),
    Case(
        "missing option",
        lambda _: fit(steps=None),
        UserError,
        "the length of the training is not set: give epochs or steps",
    ),
    Case(
        "options that exclude each other",
        lambda _: linear_model.trainer().fit((X, Y), epochs=1, steps=2),
        UserError,
        "epochs is 1 and steps is 2: give one of the two",
    ),
    Case(
        "option without effect",
        lambda _: linear_model.trainer(collectives=CollectiveOptions(reduce_dtype="bfloat16")),
        UserError,
        (
            "collectives.reduce_dtype=bfloat16 has no effect on CPU, where XLA reduces bfloat16 "
            "in float32: use float16, which CPU, GPU and TPU all reduce directly"
        ),
    ),
    Case(
        "option of another option",
        lambda _: fit(jit=False, steps_per_dispatch=2),
        UserError,
        (
            "steps_per_dispatch is 2 and jit is False: several steps per dispatch are one "
            "compiled program; leave one of the two out"
        ),
    ),
    Case(
        "kind of dataset",
        lambda _: as_dataset(3),
        UserError,
        "a int is not a dataset. Give arrays, or an object with __len__ and rows(indices)",
    ),
    Case(
        "lengths of arrays",
        lambda _: as_dataset({"x": np.ones((5, 2)), "y": np.ones(4)}),
        UserError,
        "the arrays of a dataset differ in their number of examples: {'x': (5, 2), 'y': (4,)}",
    ),
    Case(
        "empty dataset",
        lambda _: as_dataset(np.ones((0, 2))),
        UserError,
        "the dataset is empty: it needs at least one example",
    ),
    Case(
        "dtype of data",
        lambda _: fit({"name": np.array(["a"] * 8)}),
        UserError,
        "array 'name' of a dataset holds <U1, not numbers",
    ),
    Case(
        "integers of data",
        lambda _: fit((np.full((8, 4), 2**40), Y)),
        UserError,
        (
            "the data holds integers from 1099511627776 to 1099511627776, which do not fit int32,"
            " to which JAX converts int64 unless jax_enable_x64 is set"
        ),
    ),
    Case(
        "kind of model",
        lambda _: linear_model.trainer(model=3),
        UserError,
        (
            "model is a builtins.int. It must be an nnx module, a function of rngs that returns "
            "one, an Equinox module, or a LinenModel, EquinoxModel, KerasModel or, for any other "
            "library, FunctionModel(init, apply)"
        ),
    ),
    Case(
        "model without adapter",
        lambda _: linear_model.trainer(model=linen.Dense(1)),
        UserError,
        (
            "model is a flax.linen.linear.Dense: wrap it in LinenModel(module, example_input). It"
            " must be an nnx module, a function of rngs that returns one, an Equinox module, or a "
            "LinenModel, EquinoxModel, KerasModel or, for any other library, FunctionModel(init, "
            "apply)"
        ),
    ),
    Case(
        "missing loss",
        lambda _: fit(objective=losses(lambda z, x, y: {"cost": z})),
        UserError,
        (
            "the objective returned the values 'cost': it must return a dictionary of per-example "
            'values with "loss" among them, such as {"loss": values}'
        ),
    ),
    Case(
        "values without names",
        lambda _: fit(objective=losses(lambda z, x, y: jnp.square(z - y)[:, 0])),
        UserError,
        (
            "the objective returned an array of shape (8,): it must return a dictionary of "
            'per-example values with "loss" among them, such as {"loss": values}'
        ),
    ),
    Case(
        "reserved name",
        lambda _: fit(objective=losses(lambda z, x, y: {"loss": (z - y) ** 2, "step": z})),
        UserError,
        "the objective's 'step' is a reserved name in the metrics file: rename it",
    ),
    Case(
        "shape of a value",
        lambda _: fit(objective=losses(lambda z, x, y: {"loss": z - y[:, 0]})),
        UserError,
        (
            "the objective's 'loss' has shape (8, 8), a value for each pair of examples: it seems"
            " that (8, 1) and (8,) were combined. Reshape one of them; if pairs are intended, "
            "return (values, weights)"
        ),
    ),
    Case(
        "precision of the loss",
        lambda _: fit(objective=losses(lambda z, x, y: {"loss": z}), compute_dtype="bfloat16"),
        UserError,
        (
            "the objective's loss is bfloat16, which is not precise enough for a loss: cast the "
            "model's output to float32 first: model(...).astype(jnp.float32)"
        ),
    ),
    Case(
        "input that is not cast",
        lambda _: linear_model.trainer(
            objective=lambda model, batch: {
                "loss": (model(batch["image"] / 255) - batch["y"]).astype(np.float32) ** 2
            },
            compute_dtype="bfloat16",
        ).fit({"image": X.astype(np.uint8), "y": Y}, steps=1),
        UserError,
        (
            "compute_dtype is bfloat16, and none of the model's 1 products is computed in it, "
            "because its input is wider. Float32 entries of a batch named image, inputs, x, tokens"
            " are cast (of a tuple, the first element), and this batch has image of uint8, y of "
            "float32: cast the model's input in the objective"
        ),
    ),
    Case(
        "variables that a model makes while it runs",
        lambda _: fit(model=Sowing),
        UserError,
        (
            "the model made variables while it ran, which the next step would not have: sown of "
            "Kept. Make them in __init__; take values from `sow` out in the objective, after the "
            "call: nnx.pop(model, Kept)"
        ),
    ),
    Case(
        "JAX without compilation",
        lambda _: without_jit(),
        UserError,
        (
            "JAX_DISABLE_JIT (or jax.disable_jit) is on, and without compilation JAX ignores on "
            "which of the 8 devices arrays belong: leave it out. jit=False runs the steps "
            "operation by operation"
        ),
    ),
    Case(
        "unsupported optimizer",
        lambda _: fit(optimizer=optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))),
        UserError,
        (
            "optax.contrib.sam has opaque_mode=False: between its updates the parameters are "
            "displaced, and an evaluation or a checkpoint would use them. Set opaque_mode=True"
        ),
    ),
    Case(
        "unknown metric",
        lambda folder: fit(
            validation=(X, Y),
            eval_every_steps=1,
            workdir=str(folder),
            best_metric="acuracy",
            best_direction="max",
        ),
        UserError,
        "best_metric is 'acuracy', which no evaluation gives. There are: loss.",
    ),
    Case(
        "large replicated leaf",
        lambda _: fit(
            np.ones((8, 1001), np.float32),
            model=partial(nnx.Linear, 1001, 1001),
            strategy="fully_sharded",
            objective=lambda model, x: {"loss": model(x).mean(1)},
        ),
        UserError,
        (
            "params/kernel, shape (1001, 1001), would be replicated, 4.01 MB: strategy "
            "fully_sharded splits over fsdp=8, no rule splits it, and no dim divides (1001 = 125 "
            "* 8 + 1, 1001 = 125 * 8 + 1). Make a dim divide, or give a rule for it: "
            "PartitionSpec() replicates it (or raise sharding.replicated_limit)"
        ),
    ),
    Case(
        "NaN",
        lambda _: fit((X * np.nan, Y)),
        NonFiniteError,
        (
            "step 1: loss and params and opt_state not finite (loss nan; params/bias is the first"
            " such array). JAX_DEBUG_NANS=1 with jit=False names the operation"
        ),
    ),
    Case(
        "no checkpoint",
        lambda folder: load_params(str(folder)),
        UserError,
        "FOLDER: holds no checkpoint (neither a workdir nor a checkpoints/STEP)",
    ),
    Case(
        "checkpoint of another name",
        lambda folder: load_params(str(folder), which="newest"),
        UserError,
        "checkpoint is 'newest': it must be latest, best or a step number such as 500",
    ),
    Case(
        "corrupted checkpoint",
        lambda folder: read_corrupted(folder),
        CheckpointCorruptedError,
        "manifest.json is malformed: not JSON: JSONDecodeError",
    ),
    Case(
        "other data",
        lambda folder: run_twice(folder, data=(np.tile(X, (2, 1)), np.tile(Y, (2, 1)))),
        UserError,
        (
            "FOLDER/checkpoints/2 was trained on other data: examples was 8, and is 16 now; give "
            "the same, or another workdir"
        ),
    ),
    Case(
        "other model",
        lambda folder: run_twice(folder, model=partial(nnx.Linear, 4, 1, use_bias=False)),
        UserError,
        (
            "FOLDER/checkpoints/2 is of another model: params/bias is float32[1] there and absent"
            " here; give the same, or another workdir"
        ),
    ),
    Case(
        "run that must not resume",
        lambda folder: run_twice(folder, resume="never"),
        UserError,
        (
            "resume is 'never', and workdir FOLDER holds checkpoints up to step 2: use another "
            "workdir, or remove them"
        ),
    ),
    Case(
        "format of an export",
        lambda folder: export_params(str(folder), str(folder / "x.txt")),
        UserError,
        "FOLDER/x.txt: export writes .npz and .safetensors files",
    ),
    Case(
        "folder in use",
        lambda folder: use_twice(folder),
        UserError,
        "workdir FOLDER is in use by another run of this process",
    ),
    Case(
        "malformed file",
        lambda folder: Run(str(written(folder / "status.json", "[]").parent)).status,
        UserError,
        "FOLDER/status.json: not the status of a run: '[]'",
    ),
    Case(
        "field of another version",
        lambda folder: Run(str(written(folder / "status.json", '{"stap": 1}').parent)).status,
        UserError,
        (
            "FOLDER/status.json: stap is unknown. Did you mean 'step'? Another version of "
            "spmdtrain may have written it"
        ),
    ),
    Case(
        "file of another format",
        lambda folder: read_idx(written(folder / "labels", "no IDX")),
        UserError,
        "FOLDER/labels: no IDX file (it begins with 6e 6f 20 49)",
    ),
    Case(
        "missing folder",
        lambda folder: ImageFolder(folder / "absent", 2),
        UserError,
        "FOLDER/absent: no such folder",
    ),
    Case(
        "no JSON",
        lambda _: from_tf_config('{"cluster":'),
        UserError,
        "TF_CONFIG: not JSON: Expecting value at line 1, column 12, near '{\"cluster\":'",
    ),
    Case(
        "task that does not exist",
        lambda _: from_tf_config(TASK_3),
        UserError,
        "TF_CONFIG: task.index is 3: cluster.worker has 1 tasks, the last is 0",
    ),
    Case(
        "address",
        lambda _: Address.parse("host", "--coordinator"),
        UserError,
        "--coordinator is 'host': it has no port; write host:port",
    ),
    Case(
        "incomplete description",
        lambda _: find_party(from_tf_config(None), False, ClusterOptions(processes=2)),
        UserError,
        ("coordinator is missing: coordinator, processes and process_id must be given together"),
    ),
    Case(
        "secret",
        lambda _: job_token.read({"SPMDTRAIN_JOB_TOKEN": "short!"}, warn=print),
        UserError,
        (
            "SPMDTRAIN_JOB_TOKEN: the token has 6 characters; expected 16 to 4096; create a token"
            " with: openssl rand -hex 32"
        ),
    ),
    Case(
        "topology",
        lambda _: topologies.parse("v9:8"),
        UserError,
        (
            "--topology 'v9:8': unknown chip 'v9'. There are: v3, v4, v5e, v5p, v6e, tpu7x. a "
            "topology is TPU:SHAPE (v5e:4x4, v5p:8x8x8; v5e:16x16@2 is two slices), "
            "gpu:MODEL:HOSTSxGPUS (gpu:h100:2x8) or cpu:DEVICES"
        ),
    ),
    Case(
        "argument of a model",
        lambda _: MobileNetV2(0, rngs=nnx.Rngs(0)),
        UserError,
        "classes is 0: it must be 1 or more",
    ),
    Case(
        "file that cannot be written",
        lambda folder: export_to_folder(folder),
        StorageError,
        "FOLDER/x.npz cannot be written: Is a directory: FOLDER/x.npz",
    ),
    Case(
        "values of replicas",
        lambda _: reduce("sum", X, axis=1),  # type: ignore[arg-type]
        UserError,
        "reduce: axis is 1: it must be None (replicas) or 0 (examples)",
    ),
    Case(
        "recording of a step",
        lambda _: record_twice(),
        UserError,
        "step 1 was recorded 2 times: call end_step(state, output) once for each batch",
    ),
    Case(
        "order of calls",
        lambda _: call_outside_with(),
        UserError,
        "the loop has not begun: call start(init) first",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family.replace(" ", "_"))
def test_the_message_of_each_family(case: Case, tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught:
        case.call(tmp_path)
    assert isinstance(caught.value, case.kind)
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == case.text
