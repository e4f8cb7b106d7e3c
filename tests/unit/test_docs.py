"""The code that the documentation shows."""

import ast
import importlib
import inspect
import json
import logging
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from helpers import REPOSITORY, saved_steps, status
from report_files import write_run

import spmdtrain
from spmdtrain import RunConfig, load_params
from spmdtrain.config.experiment import EXPERIMENTS
from spmdtrain.replay import command as replay
from spmdtrain.trackers.base import SHIPPED
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


def test_the_mask_of_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("post-training.md"))
    assert found["learned"] == "7\n"


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
    assert saved_steps(tmp_path / "runs" / "model") == [40]


def test_the_page_of_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("callbacks.md"))
    result = found["result"]
    assert result.step < 400 and result.validation["loss"] < 1e-4
    assert result.validation["evaluations"] == found["counter"].count == result.step // 4
    assert saved_steps(tmp_path / "runs" / "callbacks") == [result.step]
    assert (tmp_path / "backup" / str(result.step) / "manifest.json").exists()
    # Every shipped callback of the page is in its table, with its defaults.
    shown = re.findall(r"^\| `(\w+)\((.*?)\)`", (DOCS / "callbacks.md").read_text(), re.M)
    assert len(shown) == 5
    for name, arguments in shown:
        parameters = inspect.signature(getattr(spmdtrain, name)).parameters
        for given in arguments.split(", "):
            argument, _, value = given.partition("=")
            default = parameters[argument].default
            assert value in ("", "...") or ast.literal_eval(value) == default, (name, given)


@pytest.mark.slow
def test_the_page_of_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.training")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    found = run_in(tmp_path, monkeypatch, blocks("embedding.md"))
    # The fits that alternate have the bits of a fit alone; `first` has been trained further.
    alone = found["make_trainer"](seed=1)
    alone.fit(found["data"], epochs=3)
    np.testing.assert_array_equal(alone.model.kernel[...], found["second"].model.kernel[...])
    # The server has answered during the fit and after it, in the order of the rows.
    assert np.shape(found["during"]) == (1, 1)
    expected = found["served"].predict({"x": np.array([[0.5], [1.0]], np.float32)})
    np.testing.assert_allclose(found["after"], expected, rtol=1e-6)
    logged = [record.getMessage() for record in caplog.records if record.name == "service.training"]
    assert [line.partition(":")[0] for line in logged] == ["step 1", "step 8"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    found["pool"].shutdown()


def test_the_page_of_custom_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("loops.md"))
    params = found["state"].params
    np.testing.assert_allclose(params["slope"], 3, atol=0.3)
    np.testing.assert_allclose(params["offset"], 2, atol=0.1)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_page_of_objectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("objectives.md"))
    shown = {"loss", "mlm", "nsp", "perplexity", "f1", "auc", "exact"}
    assert shown == found["result"].validation.keys()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_page_of_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("fine-tuning.md"))
    images = found["images"]
    np.testing.assert_allclose(
        found["merged"](images), found["trainer"].predict({"image": images}), rtol=1e-5, atol=1e-5
    )
    assert found["fork"].step == 8 and saved_steps(tmp_path / "runs" / "fork") == [8]
    before = named_leaves(load_params("runs/pretrained"))
    after = named_leaves(found["layerwise"].state.params)
    moved = {name: np.abs(np.asarray(after[name]) - before[name]).max() for name in before}
    assert moved["layers/2/kernel"] > 10 * moved["layers/1/kernel"] > 0


def test_the_page_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plots(ModuleType):
        """`matplotlib.pyplot` as far as the page needs it."""

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **options: calls.append((name, given, options))

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    plots = Plots("matplotlib")
    vars(plots)["pyplot"] = plots
    monkeypatch.setitem(sys.modules, "matplotlib", plots)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plots)
    for name, seed, rate in (("mine", 0, 0.5), ("a", 1, 0.25), ("b", 2, 0.125)):
        write_run(tmp_path / "runs" / name, seed=seed, learning_rate=rate)
    found = run_in(tmp_path, monkeypatch, blocks("logging.md"))
    assert found["times"].productive == pytest.approx(40 + 40 / 3)
    curves = [(given, options["label"]) for name, given, options in calls if name == "plot"]
    assert [label for _, label in curves] == ["runs/a: 0.25", "runs/b: 0.125"]
    for run, ((steps, losses), _) in zip("ab", curves, strict=True):
        lines = map(json.loads, Path(f"runs/{run}/metrics.jsonl").read_text().splitlines())
        expected = [(x["step"], x["loss"]) for x in lines if x["split"] == "eval"]
        assert len(expected) == 10 and [*zip(steps, losses, strict=True)] == expected
    assert calls[-1] == ("savefig", ("losses.png",), {})
    table = (DOCS / "logging.md").read_text().partition("| of the record |")[2]
    names = re.findall(r"`(\w+)", " ".join(re.findall(r"^\|([^|]*)", table, re.M)))
    assert len(names) == 10 and all(hasattr(spmdtrain.Run, name) for name in names)


@pytest.mark.slow
def test_the_page_of_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("trackers.md"))
    assert found["trainer"].step == 4
    lines = (tmp_path / "lines.txt").read_text().splitlines()
    assert lines[0] == "from step 0, seed 0" and any("'eval/loss'" in line for line in lines)
    logged = [json.loads(x) for x in (tmp_path / "runs/media/media.jsonl").read_text().splitlines()]
    names = {"inputs", "answers", "confidence", "note"}
    assert {(x["name"], x["step"]) for x in logged} == {(n, step) for n in names for step in (2, 4)}
    table = re.findall(r"^\| `(\w+)` \|", (DOCS / "trackers.md").read_text(), re.M)
    hints = get_type_hints(RunConfig)["trackers"]
    listed, other = get_args(get_args(hints)[0])
    assert table == list(get_args(listed)) == list(SHIPPED) and other is str


@pytest.mark.slow
def test_the_page_of_debugging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped: list[str] = []  # `p answer` of the debugger

    def stop() -> None:
        stopped.append(repr(inspect.stack()[1].frame.f_locals["answer"]))

    monkeypatch.setattr(sys, "breakpointhook", stop)
    found = run_in(tmp_path, monkeypatch, blocks("debugging.md"))
    shown, text = capfd.readouterr().out, (DOCS / "debugging.md").read_text()
    # Two steps and the two batches of the evaluation, once each, not on each of the 8 devices.
    printed = [line for line in shown.splitlines() if line.startswith("mean answer")]
    assert len(printed) == 4 and f"```text\n{printed[0]}\n```" in text
    assert len(stopped) == 4 and stopped[0].startswith("GradTracer(primal=[")
    logged = [
        json.loads(x) for x in Path("runs/activations/metrics.jsonl").read_text().splitlines()
    ]
    assert all(0 < line["dead"] < 1 for line in logged)
    (media,) = map(json.loads, Path("runs/activations/media.jsonl").read_text().splitlines())
    assert (media["name"], media["step"]) == ("units", 2)
    statistics = [line for line in shown.splitlines() if re.match(r"\d (outputs|gradients) ", line)]
    assert len(statistics) == 6 and "```text\n" + "\n".join(statistics) + "\n```" in text
    assert found["step"] == 1 and found["names"][0] == "params/hidden/bias"
    assert replay.main(["runs/a", "--against", "runs/b"]) == 5
    against = capfd.readouterr().out
    example = text.partition("    python -m spmdtrain.replay runs/a --against runs/b")[2]
    expected = example.partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert [x for x in expected if x != "..." and x not in against] == [] and len(expected) > 8
    assert re.search(r"```text\n(the objective's 'loss' .*)\n```", text)[1] in shown  # type: ignore[index]
    assert "hidden/kernel (4, 8) replicated" in shown
    first = found["found"].first
    assert (first.step, first.array) == (2, "params/hidden/bias")
    assert found["found"].verdict.replace("5.1e-02", "") in text.replace("5.1e-02", "")


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
        if dotted == EXPERIMENTS:  # entry points of users' packages
            continue
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


def test_the_tables_and_keywords_of_options_are_those_of_the_code() -> None:
    made = runpy.run_path(str(REPOSITORY / ".ci" / "options.py"))
    tables = made["tables"]()
    assert made["keywords"]() == made["KEYWORDS"].read_text(), "run python .ci/options.py"
    assert tables in (DOCS / "running.md").read_text(), "run python .ci/options.py"
    assert "| `--keep-latest INT` | `3` | above 0 | printed |  |" in tables
    assert "| `--data-workers` | `--data-on-device` | the devices hold all examples" in tables


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


@pytest.mark.slow
def test_a_schedule_with_the_rate_of_a_table(tmp_path: Path, monkeypatch: Any) -> None:
    (shown,) = [block for block in blocks("step.md") if "learning_rate_table" in block]
    found = run_in(tmp_path, monkeypatch, [shown])
    for size, rate in ((32, 0.1), (248, 0.1), (256, 0.4), (384, 0.4)):
        config = spmdtrain.resolve_config(found["Config"](global_batch_size=size))
        assert config.learning_rate == rate
    with pytest.raises(spmdtrain.UserError, match="begins at batch size 32"):
        spmdtrain.resolve_config(found["Config"](global_batch_size=24))
    # Two updates of sgd, at the rates 0 and 0.04 of the warmup.
    trainer = found["trainer"]
    trainer.fit({"x": np.ones(384)}, steps=2)
    np.testing.assert_allclose(trainer.state.params["w"], 0.08, rtol=1e-6)


PAGES_THAT_INSTALL = [
    *(REPOSITORY / name for name in ("README.md", "docs/notebooks/local.ipynb")),
    *(REPOSITORY / "docs/notebooks").glob("tpu*.ipynb"),
    *DOCS.glob("*.md"),
    *(REPOSITORY / "spmdtrain").rglob("*.py"),
]


def test_every_command_that_installs_names_extras_that_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = {*project["optional-dependencies"]}
    named: set[str] = set()
    for page in PAGES_THAT_INSTALL:
        for found in re.findall(r"'(?:spmdtrain|\.)\[([a-z0-9,-]+)\]'", page.read_text()):
            named |= {*found.split(",")}
    assert len(named) > 10 and named <= extras
    (listed,) = re.findall(r"The extras are (.*?) for what", (DOCS / "../README.md").read_text())
    assert {*re.findall(r"`([\w-]+)`", listed)} == extras - {"dev", "docs"}


@pytest.mark.slow
def test_an_extra_is_added_where_the_package_is_installed() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    found = subprocess.run(
        [*command, "spmdtrain[keras]"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "spmdtrain[keras] in" in found.stdout and "keras" in found.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_generation_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_in(tmp_path, monkeypatch, blocks("python.md"))
    texts: list[list[int]] = [[], []]
    for row, tokens, *_ in found["pieces"]:
        texts[row] += tokens.tolist()
    assert texts == [text.tolist() for text in found["texts"]]
    assert all(len(text) == 40 or text[-1] == 0 for text in texts)
