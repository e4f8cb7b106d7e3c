"""Faults of a job, for real: what is said, with which code, how soon, and the bits after it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import BOUND, command, metrics, saved_steps, status
from processes import (
    STEPS,
    Launched,
    as_task,
    codes,
    differing,
    drill,
    free_port,
    job,
    launch,
    launching,
    report,
    run_line,
    show,
    spread,
    start_job,
    steps_in,
    sums,
    tf_config,
)

from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.testing import start_processes

pytestmark = pytest.mark.drill

SLOWLY = ("--pause", 0.1)
# Of runs that a signal stops: all processes agree on the step within seconds, not at once.
STOPPABLE = ("--pause", 0.5)
SOON = 60  # seconds until a process has started and has noticed a fault, on a busy machine
ROW = "ValueError: there is no such row"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of two processes that nothing has happened to."""
    folder = tmp_path_factory.mktemp("whole")
    job(drill(folder), "--workdir", folder / "run")
    return folder / "run"


def losses(workdir: Path) -> list[tuple[int, str, float]]:
    """The lines of metrics, in order."""
    return [(line["step"], line["split"], line["loss"]) for line in metrics(workdir)]


def left_over(workdir: Path) -> list[str]:
    """The command lines of processes that still work for a workdir."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(workdir) in text and int(entry.name) != os.getpid():
                found.append(text)
    return found


def assert_resumes(config: Path, workdir: Path, whole: Path, step: int) -> None:
    """Starts the job again: it resumes from `step` and ends with the bits of the other."""
    chief, _ = job(config, "--workdir", workdir)
    assert f"resumed from step {step} of" in chief.output, show([chief])
    assert steps_in(chief.output) == list(range(step + 1, STEPS + 1))
    assert sums(workdir) == sums(whole)
    assert losses(workdir) == losses(whole)
    assert checkpoints(["verify", str(workdir)]) == 0


# -- without a launcher ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1], ids=["chief", "worker"])
def test_an_exception_in_one_ends_all_with_it_as_the_reason(tmp_path: Path, rank: int) -> None:
    workdir = tmp_path / "run"
    options = ("--workdir", workdir, *SLOWLY, "--fault", "exception", "--fault-rank", rank)
    ended = job(drill(tmp_path), *options, check=False)
    assert codes(ended) == [1, 1], show(ended)
    assert spread(ended) < 30, show(ended)
    failed, other = ended[rank], ended[1 - rank]
    assert failed.output.count(ROW) == 1 and 'raise ValueError("there is no such' in failed.output
    assert f"{other.task} exits because {failed.task} failed: {ROW}" in other.output.splitlines()
    assert "Traceback" not in other.output, show(ended)
    found = status(workdir)
    reason = ROW if rank == 0 else f"worker 0 failed: {ROW}"
    assert (found["status"], found["reason"]) == ("failed", reason)
    # Whether the save before is complete had not been checked yet.
    assert found["step"] in (5, 10) and saved_steps(workdir)[-1] >= found["step"]


def test_an_exception_before_the_training_ends_all(tmp_path: Path) -> None:
    config = drill(
        tmp_path,
        (
            "    rows = Rows(config)\n",
            "    rows = Rows(config)\n    assert not process_group.rank()\n",
        ),
    )
    ended = job(config, "--workdir", tmp_path / "run", check=False)
    assert ended[1].code != 0 and codes(ended)[0] == ended[1].code, show(ended)
    assert "chief exits because worker 0 failed: " in ended[0].output, show(ended)
    assert "AssertionError" in ended[1].output and spread(ended) < 30


def test_a_script_that_gives_up_in_one_process_ends_all(tmp_path: Path) -> None:
    """`sys.exit` is no exception that a hook sees, and the others wait for this process."""
    old = 'raise ValueError("there is no such row")'
    leaves = '__import__("sys").exit("no data here")'
    options = ("--workdir", tmp_path / "run", "--fault", "exception")
    ended = job(drill(tmp_path, (old, leaves)), *options, check=False)
    assert codes(ended) == [1, 1], show(ended)
    assert spread(ended) < 30, show(ended)
    assert all("no data here" in one.output for one in ended), show(ended)


def test_a_signal_to_one_also_ends_an_evaluation(tmp_path: Path) -> None:
    """There is nothing to save, but JAX has taken the signal for itself."""
    config = drill(tmp_path, ("validation=(rows.x[:50], rows.y[:50])", "validation=rows"))
    options = ("--workdir", tmp_path / "run")
    job(config, *options, "--steps", 2)
    with start_job(config, *options, "--mode", "evaluate", "--pause", 6) as going:
        going[0].wait_for("parameters of step 2 from", timeout=BOUND)
        going[1].wait_for("[Gloo] Rank 1 is connected", timeout=BOUND)
        going[1].send(signal.SIGTERM)
        ended = going.wait(check=False)
    assert all(code != 0 for code in codes(ended)), show(ended)


def test_bad_data_that_one_process_meets_is_exit_2_in_all(tmp_path: Path) -> None:
    options = ("--workdir", tmp_path / "run", *SLOWLY, "--fault", "refusal")
    ended = job(drill(tmp_path), *options, check=False)
    assert codes(ended) == [2, 2], show(ended)
    assert "error: row 7 holds no number" in ended[1].output.splitlines()
    assert "row 7 holds no number" in ended[0].output
    assert not any("Traceback" in one.output for one in ended), show(ended)
    assert "row 7 holds no number" in status(tmp_path / "run")["reason"]


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGINT), (1, signal.SIGUSR1)],  # SIGTERM: test_processes.py
    ids=["SIGINT-chief", "SIGUSR1-worker"],
)
def test_a_signal_to_one_saves_at_one_step_in_all(
    tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    workdir = tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored, as behind &
    try:
        with start_job(drill(tmp_path), "--workdir", workdir, *STOPPABLE) as going:
            going[0].wait_for("step 8/", timeout=BOUND)
            going[rank].send(number)
            ended = going.wait(check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert codes(ended) == [75, 75], show(ended)
    step = saved_steps(workdir)[-1]
    assert 8 <= step < STEPS, show(ended)
    assert f"saved step {step}; run the command again to resume" in ended[0].output
    expected = {"status": "preempted", "step": step, "reason": number.name}
    assert status(workdir) == expected
    assert checkpoints(["verify", str(workdir)]) == 0


@pytest.mark.parametrize("rank", [0, 1], ids=["chief", "worker"])
def test_when_one_is_killed_the_other_ends_by_itself(tmp_path: Path, rank: int) -> None:
    workdir = tmp_path / "run"
    # No save is near: in its barrier a process has no connection to the others that could break,
    # so that JAX's heartbeat ends it, and it cannot say why.
    options = ("--checkpoint-every-steps", 12)
    with start_job(drill(tmp_path), "--workdir", workdir, *STOPPABLE, *options) as going:
        going[0].wait_for("step 14/", timeout=BOUND)
        killed = time.monotonic()
        going[rank].send(signal.SIGKILL)
        ended = going.wait(check=False)
        assert time.monotonic() - killed < SOON, show(ended)
    assert codes(ended)[rank] == -signal.SIGKILL and ended[1 - rank].code not in (0, 2, 3, 75)
    if rank == 1:  # the chief is there to say it
        assert "lost the connection to worker 0, which ended" in ended[0].output, show(ended)
        found = status(workdir)
        assert found["status"] == "failed" and "lost the connection" in found["reason"]


@pytest.mark.nightly  # the test before kills one of two
def test_one_of_four_that_is_killed_ends_all(tmp_path: Path) -> None:
    options = ("--workdir", tmp_path / "run", *SLOWLY, "--fault", "SIGKILL", "--fault-rank", 3)
    ended = job(drill(tmp_path), *options, processes=4, check=False)
    assert codes(ended)[3] == -signal.SIGKILL, show(ended)
    assert all(one.code not in (0, 2, 3, 75) for one in ended[:3]), show(ended)


# -- those who do not come -------------------------------------------------------------------------


def test_a_missing_process_is_named_in_all_the_others(tmp_path: Path) -> None:
    config, addresses = drill(tmp_path), [f"127.0.0.1:{free_port()}" for _ in range(3)]

    def line(rank: int) -> list[str]:
        options = ("--workdir", tmp_path / "run", "--init-timeout", 20)
        return (
            ["true"]
            if rank == 2
            else as_task(tf_config(addresses, rank), run_line(config, *options))
        )

    ended = differing(line, processes=3)
    assert codes(ended) == [1, 1, 0], show(ended)
    assert all(one.seconds < SOON for one in ended), show(ended)
    for one in ended[:2]:
        missing = f"2 of 3 processes have joined; missing: worker 1 at {addresses[2]}"
        assert f"failed: gave up after 20 s: {missing}" in one.output.splitlines(), show(ended)
        assert f"waiting: {missing}" in one.output and "Traceback" not in one.output


def test_a_missing_chief_is_named(tmp_path: Path) -> None:
    config, addresses = drill(tmp_path), [f"127.0.0.1:{free_port()}" for _ in range(2)]
    options = ("--workdir", tmp_path / "run", "--init-timeout", 3)
    line = as_task(tf_config(addresses, 1), run_line(config, *options))
    (ended,) = differing(lambda _: line, processes=1)
    assert ended.code == 1 and ended.seconds < SOON, show([ended])
    assert f"failed: worker 0 could not reach chief at {addresses[0]} for 3 s" in ended.output


def test_a_taken_port_is_exit_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"]
        options = ("--workdir", tmp_path / "run")
        line = as_task(tf_config(addresses, 0), run_line(drill(tmp_path), *options))
        (ended,) = differing(lambda _: line, processes=1)
    assert ended.code == 2 and ended.seconds < SOON, show([ended])
    last = ended.output.splitlines()[-1]
    assert last.startswith(f"error: port {port} of this machine cannot be used by chief: Address")


def test_two_of_one_index_are_exit_2_in_all(tmp_path: Path) -> None:
    config, addresses = drill(tmp_path), [f"127.0.0.1:{free_port()}" for _ in range(3)]
    ended = differing(
        lambda rank: as_task(
            tf_config(addresses, min(rank, 1)),
            run_line(config, "--workdir", tmp_path / "run", "--init-timeout", 30),
        ),
        processes=3,
    )
    assert codes(ended) == [2, 2, 2], show(ended)
    assert spread(ended) < 30, show(ended)
    for one in ended:
        assert re.search(r"error: two processes are worker 0: .*, process \d+ and ", one.output)


def test_a_late_process_with_a_taken_index_is_refused_and_the_job_continues(
    tmp_path: Path, whole: Path
) -> None:
    workdir, refused = tmp_path / "run", tmp_path / "refused"
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    # The others wait in batch 10 until the third process has ended.
    waits = f"while self.batches >= 10 and not os.path.exists({str(refused)!r}): time.sleep(0.05)"
    config = drill(tmp_path, ("time.sleep(config.pause)", waits))
    late = (
        'until [ -d "$0/checkpoints/5" ]; do sleep 0.1; done; '
        'refused=$1; shift; "$@"; code=$?; touch "$refused"; exit $code'
    )

    def line(rank: int) -> list[str]:
        mine = run_line(config, "--workdir", workdir)
        wait = ["sh", "-c", late, str(workdir), str(refused)]
        return as_task(tf_config(addresses, min(rank, 1)), [*wait, *mine] if rank == 2 else mine)

    ended = differing(line, processes=3, grace=120)
    assert codes(ended) == [0, 0, 1], show(ended)
    assert "the job has started with another worker 0" in ended[2].output
    assert sums(workdir) == sums(whole)


@pytest.mark.usefixtures("root")
def test_a_workdir_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    """Each process would write its part of every checkpoint into a folder of its own."""
    workdir = tmp_path / "run"
    python, *_, config, _, _ = command(drill(tmp_path), "--workdir", workdir)
    hurried = (
        "import sys; from spmdtrain import run; from spmdtrain.checkpoints import save; "
        "assert save._VISIBLE_WITHIN; save._VISIBLE_WITHIN = 3.0; "
        "sys.exit(run.main(sys.argv[1:]))"
    )
    line = [python, "-uc", hurried, "--config", config, "--workdir", str(workdir)]
    mount = f'mount -t tmpfs none {workdir} && mkdir {workdir}/checkpoints && exec "$@"'
    workdir.mkdir()

    def line_of(rank: int) -> list[str]:
        return ["unshare", "-m", "sh", "-c", mount, "sh", *line] if rank else line

    with start_processes(line_of, processes=2, timeout=BOUND, grace=60) as running:
        ended = running.wait(check=False)
    assert codes(ended) == [2, 2], show(ended)
    for one in ended:
        assert "/checkpoints in worker 0 is not the folder that chief has there" in one.output
    assert saved_steps(workdir) == []


def test_a_signal_is_heard_though_a_callback_evaluates(tmp_path: Path, whole: Path) -> None:
    """The loop saves and stops: not the evaluation in progress."""
    look = "lambda event: event.trainer.evaluate((rows.x[:50], rows.y[:50]))"
    given = '{"step": stop} if config.stop_at else {}'
    config = drill(tmp_path, (given, f'{{"step": {look}}}'))
    with start_job(config, "--workdir", tmp_path / "run", *STOPPABLE) as running:
        running[0].wait_for("step 6/", timeout=BOUND)
        running[1].send(signal.SIGTERM)
        ended = running.wait(check=False)
    assert codes(ended) == [75, 75], show(ended)
    (step,) = saved_steps(tmp_path / "run")[-1:]
    assert status(tmp_path / "run")["step"] == step > 5
    assert f"SIGTERM: saved step {step}" in ended[0].output
    assert_resumes(config, tmp_path / "run", whole, step)


def test_a_name_that_does_not_resolve_is_exit_2(tmp_path: Path) -> None:
    addresses = ["no-such-host.invalid:4567", f"127.0.0.1:{free_port()}"]
    line = run_line(drill(tmp_path), "--workdir", tmp_path / "run")
    (ended,) = differing(lambda _: as_task(tf_config(addresses, 1), line), processes=1)
    assert ended.code == 2 and ended.seconds < SOON, show([ended])
    assert "error: no-such-host.invalid, the host of chief, cannot be resolved" in ended.output


# -- through the launcher --------------------------------------------------------------------------

HANG = 30  # seconds, more than it takes to compile
STOPPED = (
    r"chief aborted \(SIGABRT\) at step 1[0-3]: JAX lost a peer \(worker 0: stopped by a signal\)"
)

FAULTS = {
    # name: fault, rank, the launcher's options, what it says, seconds until it says it
    "kill -9 of the chief": (
        *("SIGKILL", 0, ()),
        (r"chief was killed \(SIGKILL\) in load at step 1[0-3]; restart 1 of 3 in 1 s", 10),
    ),
    "an exception in the chief": (
        *("exception", 0, ()),
        (rf"chief failed at step 1[0-3]: {ROW}; restart 1 of 3 in 1 s", 15),
    ),
    # JAX notices its silence 10 to 20 seconds after it was stopped.
    "a worker that is stopped, no --hang-timeout": (
        *("SIGSTOP", 1, ("--hang-timeout", 0)),
        (rf"{STOPPED}; restart 1 of 3 in 1 s", 45),
    ),
    "a data loader that hangs in a worker": (
        *("hang", 1, ("--hang-timeout", HANG)),
        (
            r"hung: worker 0 is in load at step 1[0-3] and blocks the others; "
            r"restart 1 of 3 in 1 s",
            HANG + 10,
        ),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name == "an exception in the chief"))
        for name in FAULTS
    ],
)
def test_after_a_fault_the_job_restarts_and_ends_with_the_same_bits(
    tmp_path: Path, whole: Path, name: str
) -> None:
    fault, rank, own, (message, bound) = FAULTS[name]
    workdir = tmp_path / "run"
    launched = launch(
        drill(tmp_path),
        *("--workdir", workdir, *SLOWLY),
        *("--fault", fault, "--fault-rank", rank),
        *("--fault-after", workdir / "checkpoints" / "10"),
        own=own,
        mark=tmp_path / "mark",
    )
    assert launched.code == 0, launched.output
    restarts = [text for text in launched.said if "; restart " in text]
    assert len(restarts) == 1 and re.fullmatch(message, restarts[0]), launched.output
    assert launched.said[-1] == "finished", launched.output
    assert sums(workdir) == sums(whole)
    assert losses(workdir) == losses(whole)
    assert checkpoints(["verify", str(workdir)]) == 0
    assert left_over(workdir) == []
    measured = report(name, launched)
    assert measured["noticed"] < bound + SOON, launched.output
    assert measured["next_step"] < bound + 3 * SOON, launched.output
    assert 0 <= measured["lost"] <= 5
    if fault == "hang":  # where it hangs can be seen
        stacks = launched.output.partition("no progress for")[2]
        assert f"[{'worker 0' if rank else 'chief'}]" in stacks and "in fail" in stacks


def test_a_restart_continues_in_warm_spares_and_ends_with_the_same_bits(
    tmp_path: Path, whole: Path
) -> None:
    workdir, ready, mark = tmp_path / "run", tmp_path / "ready", tmp_path / "mark"
    options = ("--workdir", workdir, "--fault", "SIGKILL", "--fault-after", ready, "--mark", mark)
    own = ("--warm-spares", 2, "--hang-timeout", 0)
    with launching(command(drill(tmp_path), *options), *own) as (process, lines):
        until = time.monotonic() + 2 * BOUND
        while not any("2 spare processes are ready" in text for _, text in lines):
            assert time.monotonic() < until, lines
            time.sleep(0.1)
        ready.touch()
        process.wait(BOUND)
    launched = Launched(process.returncode, lines, mark)
    assert launched.code == 0, launched.output
    started = launched.said.index("chief starts in a spare process")
    killed = r"worker 0 was killed \(SIGKILL\) in load at step 1[0-3]; restart 1 of 3 at once"
    assert re.fullmatch(killed, launched.said[started - 1]), launched.output
    assert launched.said[started + 1] == "worker 0 starts in a spare process", launched.output
    assert launched.said[-1] == "finished", launched.output
    assert sums(workdir) == sums(whole)
    assert losses(workdir) == losses(whole)
    assert left_over(workdir) == []
    report("kill -9 of a worker, warm spares", launched)


def test_a_nan_loss_is_not_retried(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    launched = launch(drill(tmp_path), "--workdir", workdir, "--fault", "nan")
    assert launched.code == 3, launched.output
    found = status(workdir)
    assert found["status"] == "failed" and found["step"] == saved_steps(workdir)[-1] == 10
    # Both find it; the chief may receive the other's report before it has printed its own.
    assert re.match(r"(NonFiniteError|worker 0 failed): step 13: loss", found["reason"])
    assert not any("restart" in text for text in launched.said)
    assert re.search(r"ended \(code 3\).*step 13: loss and params", launched.said[-1])
    assert "[Gloo]" not in launched.output
    assert left_over(workdir) == []


def test_wrong_usage_is_not_tried_again(tmp_path: Path) -> None:
    launched = launch(drill(tmp_path), "--workdir", tmp_path / "run", "--global-batch-size", 25)
    assert launched.code == 2, launched.output
    assert not any("restart" in text for text in launched.said)


def test_a_fault_that_comes_again_and_again_ends_the_job_with_its_code(tmp_path: Path) -> None:
    options = ("--workdir", tmp_path / "run", "--fault", "exception", "--fault-at", 3)
    launched = launch(drill(tmp_path), *options, own=["--max-restarts", 1])
    assert launched.code == 1, launched.output
    restarted = rf"worker 0 failed at step [1-3]: {ROW}; restart 1 of 1 in 1 s"
    assert any(re.fullmatch(restarted, text) for text in launched.said), launched.output
    assert f"{ROW}; no restarts left of 1" in launched.said[-1], launched.output


def test_a_job_that_has_failed_for_good_says_so_in_its_status(tmp_path: Path) -> None:
    """Also where process 0 is busy when another one fails, and is killed soon after."""
    slow_chief = ("time.sleep(config.pause)", "time.sleep(0 if rank else config.pause)")
    options = ("--workdir", tmp_path / "run", "--pause", 4, "--fault", "exception", "--fault-at", 3)
    launched = launch(drill(tmp_path, slow_chief), *options, own=["--max-restarts", 0])
    assert launched.code == 1 and ROW in launched.said[-1], launched.output
    found = status(tmp_path / "run")
    assert found["status"] == "failed" and ROW in found["reason"], f"{found}\n{launched.output}"


def test_a_signal_to_the_launcher_saves_and_ends_and_another_launch_resumes(
    tmp_path: Path, whole: Path
) -> None:
    config, workdir = drill(tmp_path), tmp_path / "run"
    with launching(command(config, "--workdir", workdir, *STOPPABLE)) as (process, lines):
        until = time.monotonic() + BOUND
        while not any("step 8/" in text for _, text in lines):
            assert process.poll() is None and time.monotonic() < until, lines
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 75, lines
    assert left_over(workdir) == []
    step = saved_steps(workdir)[-1]
    assert 8 <= step < STEPS and status(workdir)["status"] == "preempted"
    launched = launch(config, "--workdir", workdir)
    assert launched.code == 0 and f"resumed from step {step} of" in launched.output
    assert sums(workdir) == sums(whole)


@pytest.mark.nightly  # tests/unit/launch has how a budget is counted
def test_a_job_that_makes_progress_between_kills_is_restarted_beyond_its_budget(
    tmp_path: Path, whole: Path
) -> None:
    """Each attempt dies with its thirteenth batch, after a second save, which awaits the first."""
    workdir = tmp_path / "run"
    options = ("--workdir", workdir, *SLOWLY, "--fault", "SIGKILL", "--fault-at", 13)
    launched = launch(drill(tmp_path), *options, own=["--max-restarts", 1], timeout=2 * BOUND)
    assert launched.code == 0, launched.output
    restarts = [text for text in launched.said if "restart 1 of 1" in text]
    assert len(restarts) >= 2, launched.output
    assert sums(workdir) == sums(whole) and losses(workdir) == losses(whole)


def test_an_evaluator_beside_a_job_that_dies_once_sees_the_last_checkpoint(
    tmp_path: Path, whole: Path
) -> None:
    workdir = tmp_path / "run"
    options = ("--workdir", workdir, *SLOWLY, "--evaluated-by", "evaluator")
    launched = launch(
        drill(tmp_path),
        *options,
        *("--fault", "SIGKILL"),
        own=["--evaluator"],
        mark=tmp_path / "mark",
        timeout=2 * BOUND,
    )
    assert launched.code == 0, launched.output
    killed = r"worker 0 was killed \(SIGKILL\) in load at step 1[0-3]; restart 1 of 3 in 1 s"
    assert any(re.fullmatch(killed, text) for text in launched.said), launched.output
    assert sums(workdir) == sums(whole)
    text = (workdir / "metrics.evaluator.jsonl").read_text()
    found = {line["step"]: line["loss"] for line in map(json.loads, text.splitlines())}
    (expected,) = [x["loss"] for x in metrics(whole, "eval") if x["step"] == STEPS]
    assert found[STEPS] == pytest.approx(expected, rel=1e-5)
    assert not any(line["split"] == "eval" for line in metrics(workdir))
    assert left_over(workdir) == []


# -- two hosts -------------------------------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2."""
    names = f"spmd{os.getpid()}a", f"spmd{os.getpid()}b"
    cables = f"va{os.getpid() % 10**6}", f"vb{os.getpid() % 10**6}"
    steps = [
        *(f"netns add {name}" for name in names),
        f"link add {cables[0]} type veth peer name {cables[1]}",
        *(f"link set {cable} netns {name}" for cable, name in zip(cables, names, strict=True)),
        *(
            step
            for number, (cable, name) in enumerate(zip(cables, names, strict=True), start=1)
            for step in (
                f"-n {name} addr add 10.77.0.{number}/24 dev {cable}",
                f"-n {name} link set {cable} up",
                f"-n {name} link set lo up",
            )
        ),
    ]
    try:
        for step in steps:
            done = subprocess.run(
                ["ip", *step.split()], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"no network namespaces here: ip {step}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def on_host(name: str, number: int, folder: Path, line: list[str]) -> list[str]:
    """A command line in a namespace, where the machine's name means the address on the cable.

    Gloo, which carries the collectives of CPUs, listens at what the own host's name resolves to.
    """
    hosts = folder / f"hosts.{number}"
    hosts.write_text(f"127.0.0.1 localhost\n10.77.0.{number} {socket.gethostname()}\n")
    bound = f'mount --bind {hosts} /etc/hosts && exec "$@"'  # of this command alone
    return ["ip", "netns", "exec", name, "sh", "-c", bound, "sh", *line]


@pytest.mark.skipif(shutil.which("ip") is None, reason="no network namespaces: there is no ip")
def test_two_hosts_train_as_one(tmp_path: Path, whole: Path, hosts: tuple[str, str]) -> None:
    config, workdir = drill(tmp_path), tmp_path / "run"
    addresses = ["10.77.0.1:3456", "10.77.0.2:3456"]  # the same port, as on machines of their own

    def line(rank: int) -> list[str]:
        mine = as_task(tf_config(addresses, rank), run_line(config, "--workdir", workdir))
        return on_host(hosts[rank], rank + 1, tmp_path, mine)

    ended = differing(line)
    assert codes(ended) == [0, 0], show(ended)
    assert "2 x cpu of 2 processes" in ended[0].output
    assert sums(workdir) == sums(whole)


@pytest.mark.skipif(shutil.which("ip") is None, reason="no network namespaces: there is no ip")
def test_two_hosts_of_which_one_loses_its_cable_end_by_themselves(
    tmp_path: Path, hosts: tuple[str, str]
) -> None:
    """Nothing says that the other has gone: neither an end of its connections nor a reset."""
    config, workdir = drill(tmp_path), tmp_path / "run"
    addresses = ["10.77.0.1:3456", "10.77.0.2:3456"]

    def line(rank: int) -> list[str]:
        options = ("--workdir", workdir, "--pause", 0.2, "--steps", 400)
        mine = as_task(tf_config(addresses, rank), run_line(config, *options))
        return on_host(hosts[rank], rank + 1, tmp_path, mine)

    with start_processes(line, processes=2, timeout=BOUND, grace=60) as under:
        under[0].wait_for("step 8/", timeout=BOUND)
        cable = f"va{os.getpid() % 10**6}"
        subprocess.run(["ip", "-n", hosts[0], "link", "set", cable, "down"], check=True)
        cut = time.monotonic()
        ended = under.wait(check=False)
        assert time.monotonic() - cut < 150, show(ended)
    assert all(code not in (0, 2, 3, 75) for code in codes(ended)), show(ended)


def test_two_processes_go_back_from_a_nan_of_one_and_leave_its_batch_out(tmp_path: Path) -> None:
    config, mark = drill(tmp_path), tmp_path / "mark"
    job(config, "--workdir", tmp_path / "known", "--skip-steps", 12)
    options = ("--workdir", tmp_path / "run", "--on-divergence", "rewind", "--mark", mark)
    ended = job(config, *options, "--fault", "nan")
    (line,) = [text for text in ended[0].output.splitlines() if "goes back" in text]
    assert line.startswith("step 13: loss"), ended[0].output
    assert line.endswith("goes back and leaves out batch 12, rewind 1 of 3"), ended[0].output
    assert "resumed from step 10 of" in ended[0].output
    assert "goes back" not in ended[1].output  # process 0 alone prints
    assert sums(tmp_path / "run") == sums(tmp_path / "known")


def test_two_processes_leave_out_the_update_of_a_step_that_is_nan_in_one(tmp_path: Path) -> None:
    config = drill(tmp_path, ("dropout=0.1", "dropout=0.0"))  # whose keys follow the step
    known, run = tmp_path / "known", tmp_path / "run"
    job(config, "--workdir", known, "--skip-steps", 12, "--steps", STEPS - 1)
    options = ("--on-divergence", "skip", "--divergence-sigma", 50, "--fault", "nan")
    ended = job(config, "--workdir", run, *options, "--mark", tmp_path / "mark")
    (line,) = [text for text in ended[0].output.splitlines() if "left out" in text]
    assert line.startswith("step 13: loss"), ended[0].output
    assert line.endswith("its update is left out, 1 so far"), ended[0].output
    assert "left out" not in ended[1].output  # process 0 alone prints
    found = sums(run)
    for name, value in sums(known, STEPS - 1).items():
        if name.startswith(("params/", "opt_state/")):
            assert found[name] == value, name
