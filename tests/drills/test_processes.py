"""A job of several real processes: the numbers, the checkpoints and the ends of one process."""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BOUND, REPOSITORY, environment, metrics, run, saved_steps, status
from processes import (
    STEPS,
    as_task,
    codes,
    differing,
    drill,
    free_port,
    job,
    launch,
    run_line,
    show,
    steps_in,
    sums,
    tf_config,
)

from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.testing import ProcessResult, run_processes

# -- the same numbers ------------------------------------------------------------------------------

# A script of a user's own, which calls initialize() and Trainer: from the state before each of some
# steps, one step more, whose gradient is left in the optimizer's state.
SCRIPT = """
import json, sys
from functools import partial
from pathlib import Path

import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather

from spmdtrain.distributed.initialize import initialize
from spmdtrain.distributed.process_group import count, rank

initialize(timeout=400)

sys.path.insert(0, EXPERIMENTS)
from digits_mlp import load_digits, objective
from spmdtrain import MeshSpec, Trainer
from spmdtrain.models import MLP, mlp_rules
from spmdtrain.sharding.layout import named_leaves


class Rows:
    def __init__(self, data, folder):
        self.data, self.folder = data, folder

    def __len__(self):
        return len(self.data)

    def rows(self, indices):
        if len(indices) not in (1, 16):  # one tells the shapes, and 16 are the fingerprint's
            with (self.folder / f"rows.{rank()}").open("a") as file:
                print(*indices, file=file)
        return self.data.rows(indices)


def keep(folder, event):
    arrays = process_allgather(named_leaves(event.trainer.state.opt_state[0].trace), tiled=True)
    if rank() == 0:
        np.savez(folder / f"gradient.{event.step}.npz", **arrays)


tensor, *runs = json.loads(sys.argv[1])
train, validation, _ = load_digits()
for name, steps in runs:
    folder = Path(name)
    result = Trainer(
        model=partial(MLP, 64, (32,), 10, dropout=0.1),
        objective=objective,
        optimizer=optax.chain(optax.trace(decay=0.0), optax.scale(-0.1)),
        callbacks={"step": partial(keep, folder)},
        rules=mlp_rules(2) if tensor > 1 else (),
        mesh=MeshSpec(tensor=tensor),
        workdir=name,
        global_batch_size=48,
        log_every=1,
        checkpoint_at_start=True,
        checkpoint_every_steps=10,
        keep_latest=99,
    ).fit(Rows(train, folder), validation=validation, steps=steps)
    print("step", result.step, "of", count(), json.dumps(result.validation), flush=True)
"""
POINTS = (0, 10, 20)  # steps made before the one that is compared: at the start, later, at the end
FLOOR = 5e-6  # as in test_same_numbers


def trained_by_script(
    folder: Path, tensor: int, runs: Sequence[tuple[Path, int]], devices: int | Sequence[int] = 8
) -> list[ProcessResult]:
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("EXPERIMENTS", repr(str(REPOSITORY / "experiments"))))
    message = json.dumps([tensor, *((str(name), steps) for name, steps in runs)])
    counts = [devices] if isinstance(devices, int) else list(devices)
    return run_processes(
        [sys.executable, str(script), message],
        processes=len(counts),
        devices_per_process=counts,
        timeout=BOUND,
    )


def rows_of(folder: Path, rank: int) -> list[list[int]]:
    """The examples that a process loaded, by batch."""
    lines = (folder / f"rows.{rank}").read_text().splitlines()
    return [list(map(int, line.split())) for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    workdir = folder / "run"
    workdir.mkdir()
    trained_by_script(folder, 1, [(workdir, POINTS[-1] + 1)])
    losses = [line["loss"] for line in metrics(workdir, "train")]
    assert len(losses) == 21 and losses[20] < losses[0]
    return workdir


TOPOLOGIES = {
    # devices of each process, the tensor axis, and which processes hold the parts of a batch
    "2x4": ((4, 4), 1, [[0], [1]]),
    "4x2": ((2, 2, 2, 2), 1, [[0], [1], [2], [3]]),
    "1+3": ((1, 3), 1, [[0], [1]]),
    "4x2-tensor": ((2, 2, 2, 2), 4, [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize(
    "name",
    [
        "2x4",
        *(
            pytest.param(name, marks=[pytest.mark.drill, pytest.mark.nightly])
            for name in ("1+3", "4x2", "4x2-tensor")
        ),
    ],
)
def test_from_a_common_state_several_processes_compute_the_values_of_one(
    tmp_path: Path, alone: Path, name: str
) -> None:
    devices, tensor, holders = TOPOLOGIES[name]
    workdirs = {point: tmp_path / f"from-{point}" for point in POINTS}
    for point, workdir in workdirs.items():
        source = alone / "checkpoints" / str(point)
        shutil.copytree(source, workdir / "checkpoints" / str(point))
    runs = [(workdir, point + 1) for point, workdir in workdirs.items()]
    chief, *others = trained_by_script(tmp_path, tensor, runs, devices)
    assert re.findall(r"step (\d+) of (\d+)", chief.output) == [
        (str(point + 1), str(len(devices))) for point in POINTS
    ]
    assert all("loss" not in re.sub(r"step \d+ of .*", "", one.output) for one in others)  # chief's

    losses = {line["step"]: line["loss"] for line in metrics(alone, "train")}
    whole = rows_of(alone, 0)
    for point, workdir in workdirs.items():
        assert f"resumed from step {point} of {workdir}" in chief.output or point == 0
        # The same examples, in the same places of the batch, and no process loads others.
        found = {rank: rows_of(workdir, rank) for rank in range(len(devices))}
        for parts in holders:
            assert all(found[rank] == found[parts[0]] for rank in parts)
        assert list(itertools.chain(*(found[parts[0]][0] for parts in holders))) == whole[point]
        assert all(len(batches) == 1 for batches in found.values())
        if name == "1+3":
            assert [len(found[rank][0]) for rank in (0, 1)] == [12, 36]

        (line,) = metrics(workdir, "train")
        np.testing.assert_allclose(line["loss"], losses[point + 1], rtol=1e-5)
        expected = np.load(alone / f"gradient.{point + 1}.npz")
        gradient = np.load(workdir / f"gradient.{point + 1}.npz")
        assert set(gradient) == set(expected) and len(expected) == 4
        for leaf in expected:
            largest = np.abs(expected[leaf]).max()
            assert largest > 0
            np.testing.assert_allclose(
                gradient[leaf], expected[leaf], rtol=1e-5, atol=FLOOR * largest, err_msg=leaf
            )
        assert checkpoints(["verify", str(workdir)]) == 0


# -- an interrupted life ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of two processes that nothing has happened to."""
    folder = tmp_path_factory.mktemp("whole")
    chief, worker = job(drill(folder), "--workdir", folder / "run")
    assert steps_in(chief.output) == list(range(1, STEPS + 1)) and steps_in(worker.output) == []
    assert status(folder / "run")["status"] == "finished"
    return folder / "run"


def lines_of(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics, without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if k in ("step", "split", "loss")}
        for line in metrics(workdir)
    ]


@pytest.mark.drill
def test_sigterm_to_one_saves_in_all_and_the_restarted_job_ends_with_the_same_bits(
    tmp_path: Path, whole: Path
) -> None:
    workdir = tmp_path / "run"
    launched = launch(
        drill(tmp_path),
        *("--workdir", workdir, "--pause", 0.5, "--fault", "SIGTERM"),
        own=["--max-restarts", 1],
        mark=tmp_path / "mark",
    )
    assert launched.code == 0, launched.output
    saved = re.search(r"\[chief\] SIGTERM: saved step (\d+); run the command", launched.output)
    resumed = re.search(r"\[chief\] resumed from step (\d+) of", launched.output)
    assert saved is not None and resumed is not None, launched.output
    assert saved[1] == resumed[1] and 10 <= int(saved[1]) < STEPS
    (message,) = [text for text in launched.said if "restart" in text]
    assert re.fullmatch(
        r"(chief|worker 0) was preempted and saved \(code 75\).*; restart 1 of 1 in 1 s", message
    ), message
    assert launched.times()["noticed"] < 60 and launched.times()["lost"] == 0
    assert steps_in(launched.output) == list(range(1, STEPS + 1))  # none twice, none left out
    assert sums(workdir) == sums(whole)
    assert lines_of(workdir) == lines_of(whole)
    assert checkpoints(["verify", str(workdir)]) == 0


# -- checkpoints on other processes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps on 2 x 2."""
    folder = tmp_path_factory.mktemp("by-two")
    job(drill(folder), "--workdir", folder / "run", "--steps", 12, devices=2)
    return folder / "run"


@pytest.mark.drill
@pytest.mark.nightly  # the next test restores one with four processes too
def test_a_checkpoint_of_two_processes_is_restored_by_four_with_equal_values(
    tmp_path: Path, by_two: Path
) -> None:
    assert checkpoints(["verify", str(by_two)]) == 0
    workdir = tmp_path / "run"
    shutil.copytree(by_two, workdir)
    # One step more, which at this learning rate leaves the parameters as they are.
    options = ("--workdir", workdir, "--steps", 13, "--learning-rate", 0)
    (chief, *_) = job(drill(tmp_path), *options, processes=4, devices=1)
    assert "resumed from step 12 of" in chief.output
    before, after = sums(workdir, 12), sums(workdir, 13)
    changed = {name.split("/")[0] for name in before if before[name] != after[name]}
    assert changed == {"opt_state", "step"}, show([chief])
    moments = [name for name in before if "/mu/" in name]
    assert moments and all(before[name] != after[name] for name in moments)
    assert checkpoints(["verify", str(workdir)]) == 0


@pytest.mark.drill
def test_a_run_resumes_on_another_number_of_processes_as_on_one(
    tmp_path: Path, by_two: Path
) -> None:
    workdirs = {n: tmp_path / f"run{n}" for n in (1, 4)}
    for processes, workdir in workdirs.items():
        shutil.copytree(by_two, workdir)
        options = ("--workdir", workdir, "--steps", 16)
        job(drill(tmp_path), *options, processes=processes, devices=4 // processes)
    one, four = ([line["loss"] for line in metrics(w, "train")] for w in workdirs.values())
    assert len(one) == 16
    np.testing.assert_allclose(four, one, rtol=1e-4)
    np.testing.assert_allclose(four[12], one[12], rtol=1e-5)


def flip_bits(checkpoint: Path) -> None:
    """Spoil every file of array data: what is small is also held in one that merges the others."""
    files = [path for path in checkpoint.rglob("d/*") if path.is_file()]
    assert len(files) >= 4
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.drill
def test_all_processes_pass_over_the_same_corrupted_checkpoint(tmp_path: Path, whole: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    flip_bits(workdir / "checkpoints" / str(STEPS))
    chief, worker = job(drill(tmp_path), "--workdir", workdir)
    assert f"checkpoints/{STEPS} is corrupted: " in chief.output
    assert f"checkpoint {STEPS} is quarantined as {STEPS}.corrupted" in chief.output
    assert "resumed from step 20 of" in chief.output and "corrupted" not in worker.output
    assert steps_in(chief.output) == list(range(21, STEPS + 1))
    assert sums(workdir) == sums(whole)


@pytest.mark.drill
def test_where_no_checkpoint_is_valid_all_refuse(tmp_path: Path, whole: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    for step in saved_steps(workdir):
        flip_bits(workdir / "checkpoints" / str(step))
    ended = job(drill(tmp_path), "--workdir", workdir, check=False)
    assert codes(ended) == [2, 2], show(ended)
    assert all("checkpoints in" in x.output and "is valid" in x.output for x in ended), show(ended)
    assert saved_steps(workdir) == saved_steps(whole)


# -- cadences and callbacks ------------------------------------------------------------------------


@pytest.mark.drill
def test_checkpoints_by_the_clock_are_of_one_step_in_all(tmp_path: Path) -> None:
    config = drill(tmp_path, ("checkpoint_every_steps: int | None = 5", ""))
    options = ("--checkpoint-every-seconds", 1.5, "--pause", 0.1, "--steps", 60)
    job(config, "--workdir", tmp_path / "run", *options, "--keep-latest", 99)
    found = saved_steps(tmp_path / "run")
    # At least 6 s in all, and more where the machine is busy; not a save at each step.
    assert found[-1] == 60 and 2 <= len(found) - 1 < 40, found
    assert checkpoints(["verify", str(tmp_path / "run")]) == 0


@pytest.mark.drill
def test_a_callback_of_process_0_ends_the_run_in_all(tmp_path: Path) -> None:
    options = ("--workdir", tmp_path / "run", "--stop-at", 7)
    chief, _ = job(drill(tmp_path), *options)
    assert "finished at step 7" in chief.output and saved_steps(tmp_path / "run")[-1] == 7
    assert status(tmp_path / "run") == {"status": "finished", "step": 7}


@pytest.mark.drill
def test_a_callback_of_another_process_decides_nothing(tmp_path: Path) -> None:
    options = ("--workdir", tmp_path / "run", "--stop-at", 7, "--stop-rank", 1)
    job(drill(tmp_path), *options)
    assert saved_steps(tmp_path / "run")[-1] == STEPS


# -- evaluate and predict --------------------------------------------------------------------------


@pytest.mark.drill
def test_evaluation_and_predictions_of_four_processes_are_those_of_one(
    tmp_path: Path, whole: Path
) -> None:
    config, found, predicted = drill(tmp_path), [], []
    for number in (1, 4):
        workdir = tmp_path / f"run{number}"
        shutil.copytree(whole, workdir)
        options = ("--workdir", workdir)
        # 50 examples in batches of 24: the last is not full.
        chief, *others = job(config, *options, "--mode", "evaluate", processes=number)
        (line,) = [x for x in chief.output.splitlines() if x.startswith("{")]
        found.append(json.loads(line))
        assert not any("loss" in one.output for one in others)
        job(config, *options, "--mode", "predict", processes=number)
        (file,) = workdir.glob("predictions*")
        content = np.load(file)
        predicted.append(content[content.files[0]] if hasattr(content, "files") else content)
    assert found[0]["step"] == found[1]["step"] == STEPS and found[0]["split"] == "validation"
    np.testing.assert_allclose(found[1]["loss"], found[0]["loss"], rtol=1e-5)
    assert predicted[0].shape == (50, 1)
    np.testing.assert_allclose(predicted[1], predicted[0], rtol=1e-5, atol=1e-6)
    (message,) = [x for x in metrics(whole, "eval") if x["step"] == STEPS]
    np.testing.assert_allclose(found[1]["loss"], message["loss"], rtol=1e-5)


# -- what processes must agree on ------------------------------------------------------------------


@pytest.mark.drill
def test_processes_started_with_other_options_are_named(tmp_path: Path) -> None:
    config, common = drill(tmp_path), ("--workdir", tmp_path / "run")
    ended = differing(lambda rank: run_line(config, *common, "--seed", 1 + rank))
    assert codes(ended) == [2, 2], show(ended)
    difference = r"config\.seed is 2 in worker 0 and 1 in chief"
    for one in ended:
        assert re.search(rf"worker 0 and chief differ: {difference};", one.output), show(ended)
    assert not (tmp_path / "run").exists()


@pytest.mark.drill
def test_a_process_with_other_contents_of_its_data_is_named(tmp_path: Path) -> None:
    config = drill(tmp_path, ("default_rng(0)", 'default_rng(int(os.environ["MORE"]))'))
    ended = differing(
        lambda rank: ["env", f"MORE={rank}", *run_line(config, "--workdir", tmp_path / "run")]
    )
    assert codes(ended) == [2, 2], show(ended)
    for one in ended:
        assert re.search(r"worker 0 and chief differ: dataset\.crc32 is \d+ in", one.output)
        assert "; give every process the whole dataset, in the same order" in one.output


@pytest.mark.drill
def test_a_process_with_another_version_of_the_experiment_is_named(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    files = [drill(tmp_path), drill(tmp_path / "there", ("** 2 / 8", "** 2 / 9"))]
    ended = differing(lambda rank: run_line(files[rank], "--workdir", tmp_path / "run"))
    assert codes(ended) == [2, 2], show(ended)
    for one in ended:
        assert re.search(
            r"worker 0 and chief differ: the file\.drill\.py is \w{12} in "
            r"worker 0 and \w{12} in chief",
            one.output,
        )


@pytest.mark.drill
def test_a_process_with_another_version_of_a_module_of_the_experiment_is_named(
    tmp_path: Path,
) -> None:
    """The experiment's file is the same everywhere; what it imports from its folder is not."""
    files = []
    for name, scale in (("here", 3.0), ("there", 300.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"SCALE = {scale}")
        scaled = "from helper import SCALE\n\ndef objective(model, batch):"
        files.append(drill(tmp_path / name, ("def objective(model, batch):", scaled)))
    ended = differing(lambda rank: run_line(files[rank], "--workdir", tmp_path / "run"))
    assert codes(ended) == [2, 2], show(ended)
    for one in ended:
        assert "worker 0 and chief differ: module helper is helper.py " in one.output


@pytest.mark.drill
def test_a_process_with_another_workdir_gets_an_error(tmp_path: Path) -> None:
    config = drill(tmp_path)
    ended = differing(lambda rank: run_line(config, "--workdir", tmp_path / f"run{rank}"))
    assert codes(ended) == [2, 2], show(ended)
    for one in ended:
        assert "worker 0 and chief differ: config.workdir is" in one.output, show(ended)


@pytest.mark.drill
def test_a_mesh_that_does_not_fit_is_refused_with_the_counts(tmp_path: Path) -> None:
    options = ("--workdir", tmp_path / "run", "--mesh.data", 3)
    ended = job(drill(tmp_path), *options, devices=[1, 3], check=False)
    assert codes(ended) == [2, 2], show(ended)
    assert all("= 3 != 4 devices (1 + 3 of 2 processes)" in one.output for one in ended)


@pytest.mark.drill
def test_several_processes_need_a_workdir_that_all_can_see(tmp_path: Path) -> None:
    ended = job(drill(tmp_path), check=False)
    assert codes(ended) == [2, 2], show(ended)
    for one in ended:
        assert "--workdir must be given with several processes" in one.output, show(ended)


# -- tasks that do not train -----------------------------------------------------------------------


@pytest.mark.drill
def test_the_error_for_a_parameter_server_names_what_to_use_instead(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    text = json.dumps(
        {
            "cluster": {"chief": [addresses[0]], "ps": [addresses[1]]},
            "task": {"type": "ps", "index": 0},
        }
    )
    line = as_task(text, run_line(drill(tmp_path), "--workdir", tmp_path / "run"))
    (ended,) = differing(lambda _: line, processes=1)
    assert ended.code == 2
    assert re.search(r"ps 0, a parameter server, .* start only the chief", ended.output)


@pytest.mark.drill
def test_beside_parameter_servers_the_training_is_synchronous_and_says_so(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    config = drill(tmp_path)
    chief, worker = differing(
        lambda rank: as_task(
            tf_config(addresses, rank, ps=["10.1.2.3:2222"]),
            run_line(config, "--workdir", tmp_path / "run", "--steps", 3),
        )
    )
    assert [chief.code, worker.code] == [0, 0], show([chief, worker])
    assert "TF_CONFIG lists ps tasks: not used, the training is synchronous" in chief.output
    assert "of 2 processes" in chief.output


# -- other ways to say where the others are --------------------------------------------------------


@pytest.mark.drill
def test_they_train_at_addresses_of_another_kind(tmp_path: Path) -> None:
    addresses = [f"{host}:{free_port()}" for host in ("localhost", "[::1]")]
    config = drill(tmp_path)
    options = ("--workdir", tmp_path / "run", "--steps", 3)
    ended = differing(lambda rank: as_task(tf_config(addresses, rank), run_line(config, *options)))
    assert codes(ended) == [0, 0], show(ended)


@pytest.mark.drill
def test_they_meet_by_the_three_options(tmp_path: Path, whole: Path) -> None:
    config, port = drill(tmp_path), free_port()
    options = ("--workdir", tmp_path / "run", "--coordinator", f"127.0.0.1:{port}")
    ended = differing(
        lambda rank: as_task("", run_line(config, *options, "--processes", 2, "--process-id", rank))
    )
    assert codes(ended) == [0, 0], show(ended)
    assert sums(tmp_path / "run") == sums(whole)


@pytest.mark.drill
def test_one_process_has_the_bits_of_itself_under_tf_config(tmp_path: Path) -> None:
    """A cluster of a single task is a plain local run."""
    config = drill(tmp_path)
    job(config, "--workdir", tmp_path / "one", processes=1)
    assert "TF_CONFIG" not in environment()
    assert run(config, "--workdir", tmp_path / "plain", devices=1).returncode == 0
    assert sums(tmp_path / "one") == sums(tmp_path / "plain")
