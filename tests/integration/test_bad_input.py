"""Bad input of every kind is one short message that names what is wrong, and exit code 2."""

import gzip
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
from helpers import DIGITS, LINEAR, MNIST, contents, run, saved_steps, small_experiment, status

from spmdtrain.run import main


def refused(capsys: pytest.CaptureFixture[str], config: object, *options: object) -> str:
    """What the command says of input that it refuses, in one line."""
    try:
        code: object = main(["--config", *map(str, (config, *options))])
    except SystemExit as end:  # tyro's way
        code = end.code
    message = capsys.readouterr().err
    assert code == 2, message
    assert "Traceback" not in message
    if message.startswith("error: "):
        assert message.count("\n") == 1 and len(message) < 500, message
    else:
        assert message.count("\n") < 25, message  # tyro's box, drawn as the terminal can
    return " ".join(re.sub("[─-╿]|-{3,}", " ", message).split())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # names and types
        ("--lr 0.1", "--lr is not an option. Did you mean --learning-rate?"),
        ("--num-steps=3", "--num-steps is not an option. Did you mean --steps?"),
        ("--compute-dtype float16", "float16 gradients underflow .* bfloat16"),
        ("--compute_dtype=mixed_float16", "float16 gradients underflow .* bfloat16"),
        ("--stepz 3", "Unrecognized options: --stepz, 3 Perhaps you meant: --steps"),
        ("--hiden 3", "Perhaps you meant: --hidden"),
        ("--mesh.dta 2", "Perhaps you meant: --mesh.data"),
        ("7", "Unrecognized options: 7"),
        ("--steps abc", "--steps.*'abc'"),
        ("--steps 1.5", "--steps.*'1.5'"),
        ("--steps", "--steps"),
        ("--learning-rate fast", "--learning-rate.*'fast'"),
        ("--hidden 16 wide", "--hidden.*'wide'"),
        ("--learning-rate-table 64", "--learning-rate-table"),
        ("--mode fly", "'fly' for argument '--mode'"),
        ("--resume perhaps", "'perhaps' for argument '--resume'"),
        ("--strategy psychic", "there is no strategy 'psychic'. There are: default, one_device, "),
        ("--preset huge", "has no preset 'huge'. It has none"),
        ("--preset", "--preset: expected one argument"),
        # sizes
        ("--steps -1", "steps is -1: it must be 0 or more"),
        ("--steps -5", "steps is -5"),
        ("--epochs -1", "epochs is -1"),
        ("--global-batch-size 0", "global_batch_size is 0"),
        ("--global-batch-size -4", "global_batch_size is -4"),
        ("--batch-size-per-device 0", "batch_size_per_device is 0"),
        ("--log-every 0", "log_every is 0"),
        ("--eval-every-steps 0", "eval_every_steps is 0"),
        ("--checkpoint-every-steps -1", "checkpoint_every_steps is -1"),
        ("--checkpoint-every-seconds 0", "checkpoint_every_seconds is 0"),
        ("--checkpoint-every-seconds nan", "checkpoint_every_seconds is nan"),
        ("--keep-latest 0", "keep_latest is 0"),
        ("--keep-best -1", "keep_best is -1: it must be 0 or more"),
        ("--data-threads -1", "data_threads is -1"),
        ("--cpu-devices 0", "cpu_devices is 0"),
        ("--mesh.data 0", "^error: mesh.data is 0: it must be 1 or more, or -1"),
        ("--mesh.tensor -2", "^error: mesh.tensor is -2"),
        ("--sharding.min-size 0", "^error: sharding.min_size is 0: it must be above 0"),
        ("--collectives.timeout nan", "^error: collectives.timeout is nan: it must be above 0"),
        ("--servers.max-shards 0", "^error: servers.max_shards is 0: it must be above 0"),
        ("--hidden 0", "hidden"),
        ("--hidden 16 -3", "hidden"),
        ("--dropout 1.5 --steps 1", "dropout"),
        # learning rates
        ("--learning-rate nan", "learning_rate is nan"),
        ("--learning-rate inf", "learning_rate is inf"),
        ("--learning-rate -0.1", "learning_rate is -0.1"),
        ("--learning-rate-table 64 nan", r"learning_rate_table\[64\] is nan"),
        ("--learning-rate-table 128 0.1", "begins at batch size 128.*global batch of 64"),
        ("--learning-rate-scaling linear", "give learning_rate, and learning_rate_base_batch_size"),
        (
            "--learning-rate-scaling sqrt --learning-rate-table 64 0.1",
            "learning_rate_scaling is sqrt: give one of the two",
        ),
        # what excludes each other
        ("--epochs 1 --steps 2", "--epochs and --steps exclude each other"),
        (
            "--global-batch-size 64 --batch_size_per_device=8",
            "--global-batch-size and --batch-size-per-device exclude each other",
        ),
        # devices: the arithmetic is shown
        ("--global-batch-size 60", r"not divide over 8 devices \(60 = 7 \* 8 \+ 4\); 56 would"),
        ("--global-batch-size 4", r"not divide over 8 devices \(4 = 0 \* 8 \+ 4\); 8 would"),
        ("--mesh.data 3", r"data=3 \* fsdp=1 .* \* tensor=1 = 3 != 8 devices"),
        ("--mesh.fsdp 3", r"fsdp=3 \* .* \* tensor=1 = 3 does not divide 8 devices"),
        ("--mesh.data -1 --mesh.fsdp -1", "data and fsdp are both -1"),
        ("--mesh.devices 0 8", "no device '8'; visible: cpu:0, cpu:1, .*cpu:7"),
        ("--mesh.devices gpu:0", "no device 'gpu:0'; visible of platform gpu: none"),
        ("--mesh.devices 1 1", "names a device twice: 1 1"),
        # the rest
        ("--profile-steps 5:2", "profile_steps is '5:2': write A:B"),
        ("--profile-steps all", "profile_steps is 'all'"),
        ("--steps 3 --profile-steps 2:4", "no more than the run's 3 steps"),
    ],
)
def test_a_wrong_option_is_named(
    options: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, DIGITS, *options.split())
    assert re.search(expected, message), message
    assert not any(tmp_path.iterdir())


def test_the_process_itself_exits_2_and_writes_the_message_to_standard_error() -> None:
    for options in (["--steps", "-1"], ["--steps", "many"]):
        ended = run(DIGITS, *options)
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert "steps" in ended.stderr and "Traceback" not in ended.stderr


# -- the experiment's file ------------------------------------------------------------------------

NO_DECORATOR = ("@dataclass(frozen=True, kw_only=True)\n", "")
RAISES = "    raise KeyError('gone')\n"


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, text = tmp_path / "missing.py", tmp_path / "notes.txt"
    text.write_text("x = 1\n")
    assert f"{missing}: no such file" in refused(capsys, missing)
    named = tmp_path / "not\udcffUTF-8.py"
    named.write_text("")
    assert r"not\udcffUTF-8.py: the path of an experiment must be text" in refused(capsys, named)
    assert f"{tmp_path}: is a folder" in refused(capsys, tmp_path)
    assert f"{text}: --config takes an experiment's .py file" in refused(capsys, text)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x = 1\ndef build(config:\n", r"bad.py:2: '\(' was never closed"),
        (b"x = 1\n  y = 2\n", "bad.py:2: unexpected indent"),
        (b"x = '\xff'\n", "bad.py"),
        (b"x = 1\0\n", "bad.py"),
        (b"", "bad.py: has no dataclass Config"),
    ],
)
def test_a_file_that_does_not_parse_is_named(
    content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.py"
    path.write_bytes(content)
    message = refused(capsys, path)
    assert re.search(expected, message), message
    assert "None" not in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("class Config(RunConfig)", "class Conf(RunConfig)"), "has no dataclass Config"),
        (("class Config(RunConfig)", "class Config"), "has no dataclass Config"),
        (NO_DECORATOR, "dataclass"),
        (("def build(config)", "def make(config)"), r"has no function build\(config\)"),
        (("def build(config)", "build = 3\n\ndef make(config)"), r"has no function build"),
        (("examples: int", "mode: str = 'fast'\n    examples: int"), "field 'mode', which is the"),
        (("examples: int", "json: int = 1\n    examples: int"), "field 'json', which is the"),
        (("examples: int = 64", "examples: int"), "TypeError: .*'examples'"),
        (("examples: int", "examples: 'Number'"), "Number"),
        (("def build", "PRESETS = {'a': 3}\n\ndef build"), "PRESETS must be a dictionary"),
        (("def build(config):\n", "def build(config):\n    return 3\n"), "returned a int: it must"),
        (("def build(config)", "def build()"), "TypeError: build"),
        (("partial(nnx.Linear, 1, 1)", "3"), "model is a builtins.int"),
        (("partial(nnx.Linear, 1, 1)", "lambda rngs: 3"), "returned a int, not an nnx.Module"),
        (("train=data", "train=data, callbacks={'stepp': print}"), "Did you mean 'step'"),
    ],
)
def test_a_part_of_the_file_that_is_missing_or_wrong_is_named(
    change: tuple[str, str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = small_experiment(tmp_path, change)
    message = refused(capsys, path, "--workdir", tmp_path / "run")
    assert re.search(expected, message), message
    assert not re.search(r"small.py:\d", message), message  # no one line of it is wrong


@pytest.mark.parametrize(
    ("change", "line_of", "expected"),
    [
        (("import optax", "import optacks"), "optacks", "ModuleNotFoundError: .*optacks"),
        (("def build", "1 / 0\n\ndef build"), "1 / 0", "ZeroDivisionError"),
        (("    data = ", "    import json; json.loads('{')\n    data = "), "loads", "JSONDecode"),
        (("train=data", "training=data"), "return Experiment", "TypeError: .*'training'"),
        (("    data = ", "    raise KeyError('gone')\n    data = "), "gone", "KeyError: 'gone'"),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_an_exception_in_the_file_is_reported_with_its_line(
    relative: bool,
    change: tuple[str, str],
    line_of: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = small_experiment(tmp_path, change)
    lines = path.read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, start=1) if line_of in text)
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, path.name if relative else path)
    assert re.search(rf"small.py:{line}: {expected}", message), message


def test_the_traceback_of_an_exception_in_the_file_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_experiment(tmp_path, ("    data = ", RAISES + "    data = "))
    monkeypatch.setenv("SPMDTRAIN_TRACEBACK", "1")
    with pytest.raises(KeyError, match="gone"):
        main(["--config", str(path)])


@pytest.mark.parametrize("before", ["def objective", "    x = np", "    x, y = batch"])
def test_a_user_error_is_printed_without_traceback_wherever_it_is_raised(
    before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indent = " " * (len(before) - len(before.lstrip()))
    raising = f"{indent}raise UserError('the moon is too far')\n\n"
    path, workdir = small_experiment(tmp_path, (before, raising + before)), tmp_path / "run"
    assert refused(capsys, path, "--workdir", workdir) == "error: the moon is too far"
    if "batch" in before:  # the run had begun
        assert status(workdir)["status"] == "failed"
        assert "the moon is too far" in status(workdir)["reason"]
        assert saved_steps(workdir) == []
    else:
        assert not workdir.exists()


def test_the_error_for_an_unknown_preset_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    presets = "PRESETS = {'quick': Config(steps=2), 'long': Config(steps=9)}\n\ndef build"
    path = small_experiment(tmp_path, ("def build", presets))
    assert "no preset 'quik'. Did you mean 'quick'?" in refused(capsys, path, "--preset", "quik")


def test_a_script_is_no_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no dataclass Config" in refused(capsys, LINEAR)


# -- what the objective returns, and the data ------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--no-jit"]])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("(model(x) - y) ** 2}", "((model(x) - y) ** 2).mean()}"),
            r"'loss' has shape \(\).*32 ex",
        ),
        (("(model(x) - y) ** 2}", "((model(x) - y) ** 2)[:5]}"), r"'loss' has shape \(5, 1\)"),
        (('"loss":', '"lost":'), r"the objective returned the values 'lost'.*\"loss\" among them"),
        (('return {"loss": (model(x) - y) ** 2}', "return model(x) - y"), '"loss" among them'),
        (("** 2}", "** 2, 'n': (x, x, x)}"), r"'n' is a tuple of 3: return \(values, weights\)"),
        (("** 2}", "** 2, 'n': (x, x[:3])}"), r"'n' has weights of shape \(3, 1\)"),
        (("train=data", "train=iter([data])"), "is not a stream, because it can be read only once"),
        (("validation=data", "validation=zip(x)"), "a zip is not a dataset: a stream"),
        (("train=data", "train=(x, x[1:])"), r"differ in their number .*\(64, 1\).*\(63, 1\)"),
        (("train=data", "train=(x[:0],)"), "train data is empty"),
        (("train=data", "train={'x': np.float32(3)}"), "a leading dim of examples"),
    ],
)
def test_an_objective_or_data_of_the_wrong_kind_is_named(
    options: list[str],
    change: tuple[str, str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = small_experiment(tmp_path, change)
    message = refused(capsys, path, "--workdir", tmp_path / "run", *options)
    assert re.search(expected, message), message
    assert saved_steps(tmp_path / "run") == []


def test_a_best_metric_that_no_evaluation_gives_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_experiment(tmp_path)
    message = refused(capsys, path, "--workdir", tmp_path / "run", "--best-metric", "loss2")
    assert "best_metric is 'loss2', which no evaluation gives. Did you mean 'loss'?" in message
    assert not (tmp_path / "run").exists()  # known before anything is made or trained


def idx(shape: tuple[int, ...], length: int | None = None) -> bytes:
    """An IDX file of zeros, or of as many bytes as said."""
    size = 1
    for dim in shape:
        size *= dim
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(
        size if length is None else length
    )


IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
FEW = {IMAGES: idx((9, 28, 28)), LABELS: idx((9,))}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "holds no t10k-images-idx3-ubyte"),
        ({IMAGES: FEW[IMAGES]}, r"t10k-labels-idx1-ubyte \(with or without .gz\) is missing"),
        (FEW, "t10k holds 9 images"),
        (
            FEW | {IMAGES: idx((9, 28, 28), 700)},
            rf"{IMAGES}: truncated: shape \(9, 28, 28\) needs 7,072 bytes, the file has 716",
        ),
        (FEW | {LABELS: idx((9,), 11)}, rf"{LABELS}: too long: .* needs 17 bytes, .* has 19"),
        (FEW | {LABELS: idx((8,))}, "differ in their number of examples"),
        (FEW | {LABELS: b"\0\0\x08\1\0"}, f"{LABELS}: truncated: 5 bytes"),
        (
            FEW | {LABELS: b"<!DOCTYPE html>"},
            rf"{LABELS}: no IDX file \(it begins with 3c 21 44 4f",
        ),
        (FEW | {LABELS: b""}, rf"{LABELS}: no IDX file \(it begins with nothing"),
        (
            {IMAGES + ".gz": gzip.compress(FEW[IMAGES])[:-9], LABELS: FEW[LABELS]},
            rf"{IMAGES}.gz: cannot be read",
        ),
    ],
)
def test_missing_or_corrupted_data_is_named(
    files: dict[str, bytes],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    workdir = tmp_path / "run"
    message = refused(capsys, MNIST, "--data-dir", tmp_path, "--workdir", workdir)
    assert re.search(expected, message), message
    assert not workdir.exists()


def test_a_data_folder_that_is_not_there_or_not_given_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "mnist_mlp needs --data-dir" in refused(capsys, MNIST)
    absent = tmp_path / "absent"
    assert f"{absent}: holds no" in refused(capsys, MNIST, "--data-dir", absent)


# -- the workdir, and what is in it ----------------------------------------------------------------


def test_a_workdir_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, file, locked = small_experiment(tmp_path), tmp_path / "file", tmp_path / "locked"
    file.write_text("mine")
    for workdir in (file, file / "below"):
        message = refused(capsys, experiment, "--workdir", workdir)
        assert f"workdir {workdir} is not a folder" in message
    assert file.read_text() == "mine"
    locked.mkdir(mode=0o500)
    if not os.access(locked, os.W_OK):  # to root every folder is open
        message = refused(capsys, experiment, "--workdir", locked)
        assert f"workdir {locked} cannot be written" in message


def test_a_workdir_that_cannot_hold_checkpoints_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "checkpoints").touch()
    message = refused(capsys, small_experiment(tmp_path), "--workdir", workdir)
    assert f"{workdir}/checkpoints is a file" in message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, small.py, and a finished run of it, in run/."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(["--config", str(small_experiment(folder)), "--workdir", str(folder / "run")]) == 0
    assert saved_steps(folder / "run") == [4]
    return folder


@pytest.mark.parametrize(
    ("options", "change", "expected"),
    [
        ("--seed 1", None, "trained with seed=0, this run has 1"),
        ("--global-batch-size 16", None, "trained with global_batch_size=32, this run has 16"),
        (
            "--batch-size-per-device 2",
            None,
            "trained with global_batch_size=32, this run has 16",
        ),
        ("--no-shuffle", None, "trained with shuffle=True, this run has False"),
        ("--examples 72", None, "other data: examples was 64, and is 72 now"),
        ("", ("3 * x + 2", "3 * x + 1"), r"other data: crc32 was \d+, and is \d+ now"),
        ("", ("(x, 3 * x + 2)", "(x, np.float64(x))"), "other data: crc32 was"),
        ("", ("1, 1)", "1, 1, use_bias=False)"), r"params/bias is float32\[1\] there and absent"),
        (
            "",
            ("1, 1)", "1, 1, param_dtype=jax.numpy.bfloat16)"),
            r"params/bias is float32\[1\] there and bfloat16\[1\] here",
        ),
        (
            "",
            ("optax.sgd", "optax.adam"),
            "another optimizer: opt_state/.* is absent there .* --init-from",
        ),
        ("--resume never", None, "resume is 'never', and .* holds checkpoints up to step 4"),
    ],
)
def test_a_run_that_must_not_resume_is_refused_and_its_files_stay_unchanged(
    options: str,
    change: tuple[str, str] | None,
    expected: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(folder / "run", workdir)
    before = contents(workdir)
    changes = [("import numpy", "import jax\nimport numpy"), *([change] if change else [])]
    experiment = small_experiment(tmp_path, *changes)
    message = refused(capsys, experiment, "--workdir", workdir, "--steps", 8, *options.split())
    assert re.search(expected, message), message
    assert contents(workdir) == before


def test_a_run_that_must_resume_is_refused_without_a_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    message = refused(capsys, folder / "small.py", "--workdir", workdir, "--resume", "must")
    assert f"resume is 'must', and workdir {workdir} holds no checkpoint" in message


def test_there_must_be_a_split_to_evaluate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = small_experiment(tmp_path, ("        validation=data,\n", ""))
    message = refused(capsys, experiment, "--workdir", folder / "run", "--mode", "evaluate")
    assert f"{experiment} has no test and no validation split" in message


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
def test_there_is_nothing_to_evaluate_or_predict_with_without_a_checkpoint(
    mode: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    message = refused(capsys, folder / "small.py", "--workdir", workdir, "--mode", mode)
    assert f"workdir {workdir} holds no checkpoint" in message
    assert not workdir.exists()


def test_parameters_to_start_from_must_be_there_and_of_this_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent, workdir = tmp_path / "absent", tmp_path / "run"
    options = ("--workdir", workdir, "--init-from")
    message = refused(capsys, folder / "small.py", *options, absent)
    assert f"{absent}: holds no checkpoint" in message
    wider = small_experiment(tmp_path, ("nnx.Linear, 1, 1", "nnx.Linear, 1, 2"))
    message = refused(capsys, wider, *options, folder / "run")
    assert re.search(r"run/checkpoints/4 .*params/bias is float32\[1\] there", message), message
    assert saved_steps(workdir) == []


def test_a_metrics_file_that_is_none_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(folder / "run", workdir)
    (workdir / "metrics.jsonl").write_text("not json\n" + '{"step": 1}\n')
    assert "metrics.jsonl" in refused(capsys, folder / "small.py", "--workdir", workdir)
