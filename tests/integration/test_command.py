"""The command as it ships: what it prints, what it leaves behind, what it exits with."""

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import (
    BOUND,
    DIGITS,
    LINEAR,
    MNIST,
    command,
    contents,
    environment,
    events,
    metrics,
    run,
    saved_steps,
    small_experiment,
    status,
    together,
)

from spmdtrain import load_params
from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.run import main
from spmdtrain.step.metrics import NORMS
from spmdtrain.tree import named_leaves

TRAIN, TEST, BATCH = 1297, 300, 64  # of digits_mlp: its splits, its default batch
PARAMETERS = 64 * 16 + 16 + 16 * 10 + 10  # with one hidden layer of 16
SMALL_MODEL = ("--hidden", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ended")


@pytest.fixture(scope="module")
def ended(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two epochs of digits with all other defaults, the workdir's too, started in `folder`."""
    process = run(DIGITS, *SMALL_MODEL, "--epochs", 2, "--log-every", 5, cwd=folder)
    assert process.returncode == 0, process.stderr
    return process


@pytest.fixture(scope="module")
def finished(ended: subprocess.CompletedProcess[str], folder: Path) -> Path:
    """The workdir of that run. Not to be written to: see `copied`."""
    return folder / "runs" / "digits_mlp"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run's workdir."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def resolved(workdir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((workdir / "config.json").read_text())["config"]
    return config


def shown(number: float) -> str:
    """As the tables on the terminal show a number below 10,000."""
    return f"{number:.4g}"


# -- a run from beginning to end -------------------------------------------------------------------


def test_the_start_up_lines_say_what_runs(ended: subprocess.CompletedProcess[str]) -> None:
    assert re.search(
        r"^8 x cpu, mirrored, mesh data=8\n"
        rf"global batch {BATCH} \(8 per device\), learning rate 0.002\n"
        rf"{PARAMETERS:,} parameters; step (traced|compiled) in [\d.]+ s"
        r"(, read from the cache in [\d.]+ s)?: 1 all-reduce, "
        # the gradients and two numbers, loss and accuracy
        rf"{4 * (PARAMETERS + 2) / 1000:.2f} kB, over data=8\n"
        r"reduced by XLA, because the model or the objective draws random numbers "
        r"\(dropout\), which would differ between devices$",
        ended.stdout.replace("\n  ", " "),  # where a long line is broken
        re.MULTILINE,
    ), ended.stdout
    assert ended.stderr == ""


def test_the_log_has_a_line_an_interval_and_a_table_at_the_end(
    ended: subprocess.CompletedProcess[str], finished: Path
) -> None:
    for line in metrics(finished, "train"):
        found = re.search(
            rf"^step {line['step']}/41  loss (\S+)  accuracy (\S+)  \S+ examples/s  \S+ steps/s  "
            r"(?:input_wait \S+%  )?\d:\d\d left$",
            ended.stdout,
            re.MULTILINE,
        )
        assert found, (line, ended.stdout)
        assert found.groups() == (shown(line["loss"]), shown(line["accuracy"]))
    assert len(re.findall(r"^step ", ended.stdout, re.MULTILINE)) == len(metrics(finished, "train"))
    assert f"eval at step 21: loss {shown(metrics(finished, 'eval')[0]['loss'])}" in ended.stdout
    for split in ("train", "eval", "test"):
        last = metrics(finished, split)[-1]
        row = rf"{split}\W+{re.escape(shown(last['loss']))}\W+{shown(last['accuracy'])}\W"
        assert re.search(row, ended.stdout[ended.stdout.index("finished at step 41") :])


def test_config_json_holds_the_resolved_configuration_and_what_it_ran_on(finished: Path) -> None:
    content = json.loads((finished / "config.json").read_text())
    for package in ("jax", "flax", "optax", "orbax-checkpoint"):
        assert content["versions"][package] == importlib.metadata.version(package)
    assert (content["mesh"], content["devices"], content["device_kind"]) == ("data=8", 8, "cpu")
    expected = {
        "workdir": "runs/digits_mlp",
        "seed": 0,
        "epochs": 2,
        "steps": None,
        "global_batch_size": BATCH,
        "batch_size_per_device": None,
        "learning_rate": 2e-3,
        "cpu_devices": 8,
        "resume": "auto",
        "log_every": 5,
        "hidden": [16],
        "dropout": 0.1,
    }
    assert {name: content["config"][name] for name in expected} == expected


def test_metrics_jsonl_holds_the_first_the_last_and_every_fifth_step_and_each_epochs_end(
    finished: Path,
) -> None:
    lines = metrics(finished)
    steps = {s: [line["step"] for line in lines if line["split"] == s] for s in SPLITS}
    assert steps == {
        "train": [1, 5, 10, 15, 20, 25, 30, 35, 40, 41],
        "eval": [-(-TRAIN // BATCH), -(-2 * TRAIN // BATCH)],
        "test": [41],
        "epoch": [21, 41],
    }
    assert len(lines) == 15 and [line["step"] for line in lines] == sorted(
        line["step"] for line in lines
    )
    for line in lines:
        more = ["learning_rate"] if line["split"] in ("epoch", "train") else []
        # Step 41 is logged because it is the last one.
        has_norms = line["split"] == "train" and line["step"] != 41
        more += ["gradient_norm", "parameter_norm", "update_norm"] if has_norms else []
        names = [name for name in line if name != "epoch"]
        assert names == ["step", "split", "loss", "accuracy", *more]
    first, last = metrics(finished, "train")[0], metrics(finished, "train")[-1]
    assert abs(first["loss"] - np.log(10)) < 0.5  # ten classes, and nothing known of them
    assert last["loss"] < 0.95 * first["loss"]
    correct = metrics(finished, "test")[0]["accuracy"] * TEST
    assert abs(correct - round(correct)) < 1e-6  # counted over exactly the test's 300


SPLITS = ("train", "eval", "test", "epoch")


def test_the_workdir_holds_what_other_tools_rely_on(finished: Path) -> None:
    assert status(finished) == {"status": "finished", "step": 41}
    assert saved_steps(finished) == [21, 41]
    assert sorted(path.name for path in finished.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.json",
        "events.jsonl",
        "metrics.jsonl",
        "performance.jsonl",
        "program.json",
        "status.json",
        "tensorboard",
    ]


def curves(workdir: Path) -> dict[tuple[str, int], float]:
    """Every point of the TensorBoard event files, by tag and step."""
    return {
        (value.tag, event.step): value.simple_value
        for event in events(workdir)
        for value in event.summary.value
    }


def test_the_curves_are_the_metrics(finished: Path) -> None:
    points = curves(finished)
    for line in metrics(finished):
        for name in line.keys() & {"loss", "accuracy", "learning_rate", *NORMS}:
            point = points.pop((f"{line['split']}/{name}", line["step"]))
            assert point == np.float32(line[name])
    points = {tag: point for tag, point in points.items() if not tag[0].startswith("epoch/")}
    speeds = {tag for tag, _ in points}
    of_speed = {f"speed/{x}" for x in ("examples_per_second", "steps_per_second", "input_wait")}
    assert speeds == {*of_speed, "time/goodput", "job/processes"}
    assert all(value > 0 or tag == "speed/input_wait" for (tag, _), value in points.items())


# -- a finished run, again -------------------------------------------------------------------------


def test_a_finished_run_started_again_repeats_its_test_and_adds_nothing(
    finished: Path, tmp_path: Path
) -> None:
    whole, untested = (Path(shutil.copytree(finished, tmp_path / n)) for n in ("whole", "untested"))
    before = contents(whole)
    # The other one was stopped before its last evaluation and its test.
    lines = before["metrics.jsonl"].decode().splitlines(keepends=True)
    assert [json.loads(line)["split"] for line in lines[-2:]] == ["eval", "test"]
    (untested / "metrics.jsonl").write_text("".join(lines[:-2]))

    options = (*SMALL_MODEL, "--epochs", 2, "--log-every", 5, "--resume", "must", "--workdir")
    for again in together(
        lambda: run(DIGITS, *options, whole), lambda: run(DIGITS, *options, untested)
    ):
        assert again.returncode == 0, again.stderr
        assert "resumed from step 41" in again.stdout and "step 41/41" not in again.stdout
        for split in ("train", "eval", "test"):
            last = metrics(finished, split)[-1]
            assert re.search(rf"{split}\W+{re.escape(shown(last['loss']))}\W", again.stdout)
    for workdir in (whole, untested):
        after = contents(workdir)
        for name, content in before.items():
            if name == "events.jsonl":  # has the second start, too
                assert after.pop(name).startswith(content)
            elif name not in ("config.json", ".lock"):  # workdir and resume, process are others
                assert after.pop(name) == content, name
        known = ("config.json", ".lock", "tensorboard")
        assert all(name.split("/")[0] in known for name in after)


def test_evaluate_and_predict_agree_with_the_recorded_test(copied: Path) -> None:
    before = contents(copied)
    (recorded,) = metrics(copied, "test")
    options = (*SMALL_MODEL, "--workdir", copied, "--mode")
    evaluated, predicted = together(
        lambda: run(DIGITS, *options, "evaluate"),
        # batches of another size, and the last one a part of one
        lambda: run(DIGITS, *options, "predict", "--global-batch-size", 56),
    )
    assert evaluated.returncode == 0, evaluated.stderr
    (line,) = (line for line in evaluated.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line) == recorded  # to the bit
    row = rf"test at step 41\W+{re.escape(shown(recorded['loss']))}\W+{shown(recorded['accuracy'])}"
    assert re.search(rf"{row}\W", evaluated.stdout), evaluated.stdout

    assert predicted.returncode == 0, predicted.stderr
    assert f"300 examples of test: {copied / 'predictions.npz'}" in predicted.stdout
    with np.load(copied / "predictions.npz") as file:
        logits = file["predictions"]
    assert logits.shape == (TEST, 10) and logits.dtype == np.float32
    labels = labels_of_the_test()
    assert (logits.argmax(-1) == labels).mean() == pytest.approx(recorded["accuracy"], abs=1e-9)
    wide = logits.astype(np.float64)
    losses = np.log(np.exp(wide).sum(-1)) - wide[np.arange(TEST), labels]
    assert losses.mean() == pytest.approx(recorded["loss"], rel=1e-6)
    (copied / "predictions.npz").unlink()
    assert contents(copied) == before  # to look changes nothing


def labels_of_the_test() -> np.ndarray:
    """The labels of the 300 digits of the test, in their order."""
    from sklearn import datasets

    digits: Any = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return np.asarray(digits.target[order[-TEST:]])


def test_init_from_starts_with_the_other_runs_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--config", str(small_experiment(tmp_path)), "--workdir"]
    assert main([*options, str(first)]) == 0
    # At a learning rate of 0 a run ends with what it began with.
    frozen = ["--learning-rate", "0", "--steps", "1", "--seed", "7"]
    assert main([*options, str(second), *frozen, "--init-from", str(first)]) == 0
    out = capsys.readouterr().out
    assert f"parameters of step 4 from {first / 'checkpoints' / '4'}" in out
    (evaluated,) = metrics(second, "eval")
    assert evaluated == metrics(first, "eval")[-1] | {"step": 1}
    assert saved_steps(second) == [1] and saved_steps(first) == [4]
    # One checkpoint of it is named like the whole.
    again = ["--init-from", str(first / "checkpoints" / "4"), "--mode", "evaluate"]
    assert main([*options, str(tmp_path / "third"), *again]) == 0
    row = rf"validation at step 4\W+{re.escape(shown(evaluated['loss']))}\W"
    assert re.search(row, capsys.readouterr().out)


def test_commands_take_the_split_and_the_checkpoint_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    options = ["--config", str(small_experiment(tmp_path)), "--workdir", str(workdir)]
    every = ["--checkpoint-every-steps", "1", "--eval-every-steps", "1"]
    assert main([*options, *every, "--best-direction", "max"]) == 0
    losses = {line["step"]: line["loss"] for line in metrics(workdir, "eval")}
    best = max(losses, key=lambda step: losses[step])
    assert best == 1 and len(losses) == 4
    chosen = ["--mode", "evaluate", "--split", "validation", "--checkpoint"]
    for which, step in (("best", best), ("3", 3), ("latest", 4)):
        capsys.readouterr()
        assert main([*options, *chosen, which]) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("{"))
        assert json.loads(line) == {"step": step, "split": "validation", "loss": losses[step]}
    best_params = load_params(str(workdir), which=str(best))
    capsys.readouterr()
    assert main([*options, "--mode", "predict", "--split", "validation", *chosen[-1:], "best"]) == 0
    assert f"parameters of step {best} from " in capsys.readouterr().out
    # At a learning rate of 0 a run ends with the parameters that it begins with.
    started = ["--learning-rate", "0", "--steps", "1", "--init-from", str(workdir)]
    other = [*options[:2], "--workdir", str(tmp_path / "other"), *started]
    assert main([*other, "--checkpoint", "best"]) == 0
    jax.tree.map(np.testing.assert_array_equal, load_params(str(tmp_path / "other")), best_params)
    file = tmp_path / "best.npz"
    assert checkpoints([*("export", str(workdir), str(file)), "--checkpoint", "best"]) == 0
    exported, leaves = np.load(file), named_leaves(best_params)
    assert len(exported.files) == len(leaves)
    for name, array in leaves.items():
        np.testing.assert_array_equal(exported[name.replace("/", ".")], array)
    assert main([*options, "--mode", "evaluate", "--split", "train"]) == 0
    assert '"split": "train"' in capsys.readouterr().out
    assert main([*options, "--mode", "evaluate", "--split", "test"]) == 2
    assert "has no test split" in capsys.readouterr().err
    assert main([*options, "--split", "train"]) == 2
    assert main([*options, "--checkpoint", "best"]) == 2
    assert main([*options, "--checkpoint", "beste", "--mode", "evaluate"]) == 2


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_and_a_per_device_batch_replace_their_defaults_and_are_stored_resolved(
    tmp_path: Path,
) -> None:
    ended = run(
        DIGITS,
        *SMALL_MODEL,
        *("--steps=3", "--batch_size_per_device", 4, "--workdir", tmp_path),
        *("--learning-rate-scaling", "linear", "--learning-rate-base-batch-size", 128),
        *("--profile-steps", "2:3"),
        devices=4,
    )
    assert ended.returncode == 0, ended.stderr
    # the environment's number of devices comes before the experiment's own
    assert (
        "4 x cpu, mirrored, mesh data=4\nglobal batch 16 (4 per device), learning rate 0.00025\n"
        in ended.stdout
    )
    config = resolved(tmp_path)
    assert (config["steps"], config["epochs"]) == (3, None)
    assert (config["global_batch_size"], config["batch_size_per_device"]) == (16, None)
    assert (config["learning_rate"], config["learning_rate_scaling"]) == (2.5e-4, "none")
    assert [line["step"] for line in metrics(tmp_path, "train")] == [1, 3]
    assert status(tmp_path) == {"status": "finished", "step": 3}
    traces = [path for path in tmp_path.rglob("*.xplane.pb") if path.stat().st_size > 0]
    assert len(traces) == 1, "no profiler trace"
    said = f"profile from step 2: {traces[0].parents[1]}; to open it: pip install xprof"
    assert said in " ".join(ended.stdout.split())


def test_a_preset_is_the_default_that_other_options_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    presets = """PRESETS = {
    "quick": Config(steps=2, examples=40, global_batch_size=8, learning_rate_table={8: 0.25}),
}


def build"""
    path, workdir = small_experiment(tmp_path, ("def build", presets)), tmp_path / "run"
    options = ["--preset", "quick", "--examples", "48", "--epochs", "1"]
    assert main(["--config", str(path), "--workdir", str(workdir), *options]) == 0
    line = "global batch 8 (1 per device), learning rate 0.25\n2 parameters;"
    assert line in capsys.readouterr().out
    config = resolved(workdir)
    assert (config["examples"], config["learning_rate"]) == (48, 0.25)
    assert (config["epochs"], config["steps"]) == (1, None)
    assert status(workdir) == {"status": "finished", "step": 6}


def test_a_table_gives_the_learning_rate_of_the_largest_batch_not_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ["--learning-rate-table", "8", "0.5", "32", "0.125", "64", "0.75"]
    options = ["--config", str(small_experiment(tmp_path)), "--workdir", str(tmp_path / "run")]
    assert main([*options, *table, "--global-batch-size", "48"]) == 0
    assert "learning rate 0.125\n" in capsys.readouterr().out
    assert resolved(tmp_path / "run")["learning_rate"] == 0.125


@pytest.mark.nightly
def test_eager_steps_give_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_experiment(tmp_path, ("        validation=data,\n", ""))
    losses = []
    for options in (["--jit"], ["--no-jit", "--mesh.devices", "0"]):
        workdir = tmp_path / options[0]
        every = ["--config", str(path), "--workdir", str(workdir), "--log-every", "1"]
        assert main([*every, *options]) == 0
        losses.append([line["loss"] for line in metrics(workdir, "train")])
    assert "steps are not compiled" in capsys.readouterr().out
    jitted, eager = losses
    assert len(jitted) == 4 and min(jitted) < 0.9 * jitted[0]
    np.testing.assert_allclose(eager, jitted, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_newest_and_the_best_checkpoints_are_kept_also_by_a_resumed_run(
    tmp_path: Path,
) -> None:
    options = (
        *("--workdir", tmp_path, "--keep-latest", 2, "--keep-best", 1),
        *("--eval-every-steps", 2, "--checkpoint-every-steps", 2, "--log-every", 100),
    )
    path = small_experiment(tmp_path, ("optax.sgd(config.learning_rate)", SWINGING))
    assert main(["--config", str(path), *map(str, options), "--steps", "8"]) == 0
    assert saved_steps(tmp_path) == [4, 6, 8]
    ended = run(path, *options, "--steps", 12, devices=8)
    assert ended.returncode == 0, ended.stderr
    losses = {line["step"]: line["loss"] for line in metrics(tmp_path, "eval")}
    assert list(losses) == [2, 4, 6, 8, 10, 12]
    assert min(losses, key=losses.__getitem__) == 4  # or this would show nothing
    assert saved_steps(tmp_path) == [4, 10, 12]
    assert "resumed from step 8" in ended.stdout and "changed since: steps: 8 -> 12" in ended.stdout
    assert [line["step"] for line in metrics(tmp_path, "train")] == [1, 8, 12]
    assert status(tmp_path) == {"status": "finished", "step": 12}


# Down for four steps, then up.
SWINGING = "optax.sgd(lambda step: np.float32(0.2) * (1 - 2 * (step >= 4)))"


def test_help_lists_the_options_of_every_run_and_the_experiments_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main([f"--config={DIGITS}", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in ("--mode", "--preset", "--steps", "--mesh.data", "--keep-best", "--init-from"):
        assert option in text
    assert "A small multi-layer perceptron on 1,797 real handwritten digits" in text
    assert re.search(r"--hidden INT .*Widths of the hidden layers.*\[default: 128 128\]", text)
    assert re.search(r"--dropout FLOAT .*\[default: 0.1\]", text)
    assert text.index("--hidden") < text.index("--mode")


def test_quiet_commands_print_only_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", str(small_experiment(tmp_path)), "--workdir", str(tmp_path / "run")]
    assert main([*options, "--quiet"]) == 0
    line = metrics(tmp_path / "run", "eval")[-1]
    assert capsys.readouterr().out == f"eval at step 4: loss {shown(line['loss'])}\n"
    assert main([*options, "--mode", "evaluate", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"step": 4, "split": "validation", "loss": line["loss"]}
    assert printed.err == ""


# -- a loss that is none ---------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run_and_is_never_saved(tmp_path: Path) -> None:
    diverging = small_experiment(tmp_path, name="diverging")
    # One example's loss is infinite: the one whose x is 0, number 32 counted from 0.
    spoilt = small_experiment(
        tmp_path, ("    x, y = batch\n", "    x, y = batch\n    y = y / (x != 0)\n"), name="spoilt"
    )
    in_order = ("--examples", 65, "--no-shuffle", "--global-batch-size", 8)
    each = ("--steps", 20, "--checkpoint-every-steps", 1, "--log-every", 1, "--keep-latest", 99)
    ended = together(
        lambda: run(diverging, *each, "--learning-rate", 1e30, cwd=tmp_path),
        lambda: run(spoilt, *each, *in_order, cwd=tmp_path, devices=8),
    )
    # The update of step 1 is finite, and what it makes of the loss is not; 32 is in the 5th batch.
    for name, process, step in zip(("diverging", "spoilt"), ended, (2, 5), strict=True):
        assert process.returncode == 3, (process.stdout, process.stderr)
        message = f"step {step}: loss and params not finite (loss inf; params/"
        assert process.stderr.startswith(f"stopped: {message}")
        assert process.stderr.count("\n") == 1
        workdir = tmp_path / "runs" / name
        assert saved_steps(workdir) == list(range(1, step))
        assert [line["step"] for line in metrics(workdir, "train")] == list(range(1, step))
        found = status(workdir)
        assert (found["status"], found["step"]) == ("failed", step - 1)
        assert message in found["reason"]


@pytest.mark.nightly
def test_what_the_message_of_a_loss_that_is_not_finite_advises_works(tmp_path: Path) -> None:
    line = "    y = jax.numpy.log(y)"  # of 3 * x + 2, which is negative for some x
    changes = ("import numpy", "import jax\nimport numpy"), ("= batch\n", f"= batch\n{line}\n")
    spoilt = small_experiment(tmp_path, *changes, name="log")
    given = ("--steps", 20, "--no-shuffle", "--workdir", "runs/of a log")
    ended = run(spoilt, *given, cwd=tmp_path)
    found = re.fullmatch(
        r"stopped: step 1: loss .*such array\)\. (python -m .*) names the operation and .*\n",
        ended.stderr,
    )
    assert ended.returncode == 3 and found is not None, ended.stderr
    printed = subprocess.run(
        [sys.executable, *shlex.split(found[1])[1:]],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert "operation: log\n" in printed.stdout, printed.stderr
    assert f"source: {line.strip()}\n" in printed.stdout
    # In a script, or without a workdir, JAX finds the line of an operation that runs alone.
    again = subprocess.run(
        command(spoilt, *given, "--no-jit"),
        cwd=tmp_path,
        env=environment() | {"JAX_DEBUG_NANS": "1"},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert "FloatingPointError: invalid value (nan) encountered in log" in again.stderr
    assert f"in objective\n{line}\n" in again.stderr


def test_any_other_exception_keeps_its_traceback_and_fails_the_run(tmp_path: Path) -> None:
    path = small_experiment(tmp_path, ("x, y = batch", "x, y = batch['image']"))
    with pytest.raises(TypeError, match="indices must be integers"):
        main(["--config", str(path), "--workdir", str(tmp_path / "run")])
    found = status(tmp_path / "run")
    assert (found["status"], found["step"]) == ("failed", 0)
    where = f"TypeError: {path}:"  # the line of the objective that raises
    assert found["reason"].startswith(where), found["reason"]
    assert "tuple indices must be integers" in found["reason"]


# -- the other experiments -------------------------------------------------------------------------


def test_linear_regression_finds_slope_and_offset() -> None:
    ended = subprocess.run(
        [sys.executable, str(LINEAR)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"slope: (\S+) offset: (\S+)", ended.stdout)
    assert found, ended.stdout
    assert [float(number) for number in found.groups()] == pytest.approx([3, 2], abs=0.05)
    error = re.search(r"mean squared error on new data: (\S+)", ended.stdout)
    assert error and 0.005 < float(error[1]) < 0.015


@pytest.mark.nightly
def test_mnist_learns_in_one_epoch(mnist: Path, tmp_path: Path) -> None:
    ended = run(MNIST, "--data-dir", mnist, "--workdir", tmp_path, "--epochs", 1)
    assert ended.returncode == 0, ended.stderr
    (tested,) = metrics(tmp_path, "test")
    assert tested["step"] == 250 and tested["accuracy"] > 0.85
