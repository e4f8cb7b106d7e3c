"""The code that the documentation shows."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np
import optax
import pytest
from helpers import REPOSITORY, saved_steps, status

import spmdtrain
from spmdtrain import (
    CallbackContext,
    CollectiveOptions,
    Coordinator,
    Experiment,
    Loop,
    MeshSpec,
    ParameterServerOptions,
    PerReplica,
    RunConfig,
    ShardingOptions,
    Trainer,
    load_params,
)
from spmdtrain.errors import field_meant
from spmdtrain.parameter_server.shared_params import Shared
from spmdtrain.strategies import AXES, STRATEGIES
from spmdtrain.train.command_line import Options
from spmdtrain.tree import named_leaves

DOCS = REPOSITORY / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)


def run_in(folder: Path, monkeypatch: pytest.MonkeyPatch, code: list[str]) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {"__name__": "shown"}
    for number, block in enumerate(code):
        exec(compile(block, f"block {number}", "exec"), found)
    return found


def test_ten_lines_of_python_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = blocks("../README.md")
    assert len([line for line in shown.splitlines() if line]) == 10
    found = run_in(tmp_path, monkeypatch, [shown])
    np.testing.assert_allclose(found["trainer"].model.kernel[...], [[3]], atol=0.01)


@pytest.mark.slow
def test_the_way_over_from_tf_distribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = blocks("coming-from-tf-distribute.md")
    before = [block for block in shown if block.startswith("# tf.distribute\n")]
    after = [block for block in shown if block.startswith("# spmdtrain\n")]
    # Side by side: each has its counterpart, just behind it.
    assert shown == [block for pair in zip(before, after, strict=True) for block in pair]
    assert len(after) == 5
    for block in before:
        ast.parse(block)
    found = run_in(tmp_path, monkeypatch, after)
    assert found["found"]["accuracy"] > 0.8 and found["predictions"].shape == (100, 3)
    assert int(found["state"].step) == 4 * 400 // 64
    # Its loop makes the very steps that the first trainer made.
    first, own = (named_leaves(load_params(f"runs/{run}")) for run in ("first", "own"))
    for name, array in first.items():
        np.testing.assert_allclose(own[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    assert status(tmp_path / "runs" / "best")["status"] == "finished"
    assert len(found["losses"]) <= 20
    assert saved_steps(tmp_path / "runs" / "model") == [40]


def test_a_loop_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("loops.md"))
    params = found["state"].params
    np.testing.assert_allclose(params["slope"], 3, atol=0.3)
    np.testing.assert_allclose(params["offset"], 2, atol=0.1)


NAMES = """
scope run reduce get_strategy experimental_distribute_dataset experimental_local_results
make_experimental_numpy_dataset compute_average_loss num_replicas_in_sync
CommunicationImplementation
NcclAllReduce HierarchicalCopyAllReduce ReductionToOneDevice TPUClusterResolver
initialize_tpu_system ModelCheckpoint BackupAndRestore load_model TrainSpec EvalSpec
cache prefetch shuffle AutoShardPolicy ClusterCoordinator MirroredStrategy
MultiWorkerMirroredStrategy TPUStrategy OneDeviceStrategy CentralStorageStrategy
ParameterServerStrategy variable_partitioner
model_dir tf_random_seed save_summary_steps save_checkpoints_steps save_checkpoints_secs
session_config keep_checkpoint_max keep_checkpoint_every_n_hours log_step_count_steps
train_distribute device_fn protocol eval_distribute experimental_distribute
experimental_max_worker_delay_secs session_creation_timeout_secs checkpoint_save_graph_def
"""


def test_every_name_is_mapped() -> None:
    rows = [
        line.split("|")[1]
        for line in (DOCS / "coming-from-tf-distribute.md").read_text().splitlines()
        if line.startswith("|")
    ]
    known = " ".join(rows)
    assert [name for name in NAMES.split() if not re.search(rf"\b{name}\b", known)] == []


# -- the cells of its tables -----------------------------------------------------------------------


def names_of(*things: Any) -> set[str]:
    """The fields of classes and the parameters of functions."""
    found: set[str] = set()
    for thing in things:
        if dataclasses.is_dataclass(thing):
            found |= {field.name for field in dataclasses.fields(thing)}
        found |= set(inspect.signature(thing).parameters)
    return found


def values_of(*classes: type) -> set[str]:
    """The words that fields of these classes may have as values."""
    hints = [hint for one in classes for hint in get_type_hints(one).values()]
    parts = [part for hint in hints for part in (hint, *get_args(hint))]
    return {str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)}


CONFIGS: tuple[type, ...] = (
    RunConfig,
    MeshSpec,
    ShardingOptions,
    ParameterServerOptions,
    CollectiveOptions,
)
KEYWORDS = names_of(RunConfig, Experiment, Trainer, Trainer.fit)
OPTIONS = names_of(RunConfig, Options)
NAMES_HERE = KEYWORDS | names_of(*CONFIGS)
WORDS = values_of(*CONFIGS) | {*STRATEGIES, *AXES, "disk", "memory", "best"}
ROOTS: dict[str, Any] = {
    "v": PerReplica,
    "loop": Loop,
    "trainer": Trainer,
    "event": CallbackContext,
    "coordinator": Coordinator,
    "jax": jax,
    "np": np,
    "optax": optax,
    "spmdtrain": spmdtrain,
    **{name: getattr(Trainer, name) for name in ("fit", "evaluate", "predict")},
    **{name: getattr(Shared, name) for name in ("pull", "push")},
    **{name: getattr(Coordinator, name) for name in ("schedule", "join", "done", "fetch")},
    **{name: getattr(PerReplica, name) for name in ("stack",)},
    **{name: getattr(jax.lax, name) for name in ("all_gather", "axis_index", "psum")},
    "rows": spmdtrain.Dataset.rows,
    "__len__": spmdtrain.Dataset.__len__,
    "TF_CONFIG": None,
    "next": next,
    # Names of TensorFlow and optax that a cell speaks of, and a value left out.
    **dict.fromkeys(("f", "_", "mixed_float16", "ReduceOp", "CommunicationOptions")),
    **dict.fromkeys(("ps", "chief", "worker", "evaluator", "accumulation_size")),
}
FILES = {"tensorboard/", "metrics.jsonl", "checkpoints/STEP", ".npz", ".safetensors"}


def has(owner: Any, name: str) -> bool:
    """Whether an object, or an instance of a class, has an attribute."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    fields = names_of(owner) if dataclasses.is_dataclass(owner) else set()
    bases = [base for base in owner.__mro__ if base.__module__.startswith("spmdtrain.")]
    source = "".join(inspect.getsource(base) for base in bases)
    return name in fields or bool(re.search(rf"self\.{name}(:[^=\n]*)? =", source))


def resolve(node: ast.expr) -> Any:
    """What an expression names; None if that is not known before it runs. Raises `LookupError`."""
    if isinstance(node, ast.Name):
        if node.id in ROOTS:
            return ROOTS[node.id]
        if node.id in spmdtrain.__all__:
            return getattr(spmdtrain, node.id)
        if node.id in NAMES_HERE | WORDS:
            return None
        raise LookupError(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        if owner is None:
            return None
        if not has(owner, node.attr):
            raise LookupError(node.attr)
        return getattr(owner, node.attr, None) if not isinstance(owner, type) else None
    return None


def faults_of(span: str) -> list[str]:
    """What in an inline code of a right-hand cell there is not."""
    if span in FILES or (span.startswith('"') and span.strip('"') in WORDS | {"10:20"}):
        return []
    if span.startswith("python -m "):
        module = span.split()[2]
        return [] if importlib.util.find_spec(module) else [module]
    if span.startswith("--"):
        name = span.split()[0].removeprefix("--").split(".")[0].replace("-", "_")
        return [] if name in OPTIONS else [span]
    try:
        valued = re.sub(r"=(?=[,)]|$)", "=_", span)  # `fit(validation=)`
        tree = ast.parse(f"_({valued})", mode="eval").body
    except SyntaxError:
        return [f"not Python: {span}"]
    assert isinstance(tree, ast.Call)
    found = [keyword.arg for keyword in tree.keywords if keyword.arg not in KEYWORDS]
    for node in ast.walk(tree):
        if node is tree or not isinstance(node, ast.Call):
            continue
        try:
            called = resolve(node.func)
        except LookupError as error:
            found.append(str(error))
            continue
        if called is not None and node.keywords:
            takes = names_of(called)
            options = KEYWORDS if "options" in takes else set()
            found += [k.arg for k in node.keywords if k.arg not in takes | options]
    for argument in tree.args:
        try:
            resolve(argument)
        except LookupError as error:
            found.append(str(error))
    return [str(fault) for fault in found]


def rows() -> list[tuple[int, str, str]]:
    """The first and the last cell of each row of the tables, with its line."""
    lines = (DOCS / "coming-from-tf-distribute.md").read_text().splitlines()
    parts = [(n, line.split(" | ")) for n, line in enumerate(lines, 1) if line.startswith("| `")]
    return [(number, columns[0], columns[-1].removesuffix(" |")) for number, columns in parts]


def test_every_name_in_a_right_hand_cell_is_there() -> None:
    faults = [
        (number, fault)
        for number, _, cell in rows()
        for span in re.findall(r"`([^`]+)`", cell)
        for fault in faults_of(span)
    ]
    assert len(rows()) > 80 and faults == []


def test_a_name_that_a_field_answers_has_it_in_its_right_hand_cell() -> None:
    """What `--lr` is answered with is what the table says."""
    pairs = [
        (number, name, field_meant(name, KEYWORDS), cell)
        for number, before, cell in rows()
        for name in re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", before)))
    ]
    meant = [(number, name, field, cell) for number, name, field, cell in pairs if field]
    assert len(meant) >= 8
    assert [(n, name, field) for n, name, field, cell in meant if field not in cell] == []


@pytest.mark.parametrize(
    ("span", "fault"),
    [
        ("steps_per_execution=n", "steps_per_execution"),
        ('collectives=CollectiveOptions(pack="all")', "pack"),
        ("fit(x, epoch=2)", "epoch"),
        ("v.total()", "total"),
        ("loop.scatter(batch)", "scatter"),
        ("load_weights(path)", "load_weights"),
        ("--checkpoint-secs", "--checkpoint-secs"),
        ("python -m spmdtrain.clusters", "spmdtrain.clusters"),
        ("keep_newest", "keep_newest"),
    ],
)
def test_a_name_that_is_not_there_is_noticed(span: str, fault: str) -> None:
    assert faults_of(span) == [fault]


# -- what the pages refer to -----------------------------------------------------------------------

PAGES = sorted([*DOCS.glob("*.md"), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_module_and_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    missing = []
    for name in re.findall(r"\b(?:spmdtrain|tests|experiments|benchmarks)/[\w/.-]*\w\.\w+", text):
        if "NAME" not in name and not (REPOSITORY / name).exists():
            missing.append(name)
    for dotted in re.findall(r"\bspmdtrain(?:\.\w+)+", text):
        first, *rest = dotted.removeprefix("spmdtrain.").split(".")
        path = REPOSITORY / "spmdtrain" / first
        if not (path.is_dir() or path.with_suffix(".py").exists() or first in spmdtrain.__all__):
            missing.append(dotted)
        elif rest and path.is_dir():
            names = f"{(path / '__init__.py').read_text()}"
            if not (path / f"{rest[0]}.py").exists() and rest[0] not in names:
                missing.append(dotted)
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target and not (page.parent / target).exists():
            missing.append(target)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_from_the_package_exists(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spmdtrain"):
                module = importlib.import_module(node.module or "")
                assert [x.name for x in node.names if not hasattr(module, x.name)] == []


def test_every_invariant_names_its_tests() -> None:
    text = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    rows = [line for line in text.partition("## Invariants")[2].splitlines() if "tests/" in line]
    assert len(named) >= len(rows) >= 20 and all("::" in row for row in rows)
    missing = [
        (file, test)
        for file, test in named
        if f"def {test}(" not in (REPOSITORY / file).read_text()
    ]
    assert missing == []
