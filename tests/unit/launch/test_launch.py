"""The launcher, on scripts that take no time: who dies, who is named, who is left."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers import environment

from spmdtrain.distributed.progress import IdleTimer, Phase, ProgressRecord, Reason
from spmdtrain.errors import UserError
from spmdtrain.launch.child import (
    CauseRank,
    Restarts,
    TaskExit,
    cause_rank,
    describe_exit,
    hint,
    lines,
    prefixes,
    root_cause,
)
from spmdtrain.launch.command import main
from spmdtrain.launch.launcher import Outcome, main_stacks
from spmdtrain.launch.task_env import (
    environments_of,
    gpus_of,
    tf_configs,
    training_tasks,
    without_task,
)

# What a script finds: its task, which attempt this is, and a mark that others can wait for.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import Phase, phase
task = os.environ["SPMDTRAIN_TASK"]
log = Path(task.replace(" ", "-") + ".attempts")
attempt = len(log.read_text()) if log.exists() else 0
with log.open("a") as file: file.write("x")
def mark(name): Path(name).touch()
def wait_for(*names):
    while not all(Path(name).exists() for name in names): time.sleep(0.01)
"""
BOUND = 90  # seconds for what takes one or two, on a machine with other work


def launcher(folder: Path, script: str, *options: object) -> list[str]:
    """The command line that launches a script."""
    (folder / "script.py").write_text(PRELUDE + script)
    own = [sys.executable, "-m", "spmdtrain.launch", *map(str, options)]
    return [*own, "--", sys.executable, "script.py"]


def around(folder: Path, **changes: str) -> dict[str, str]:
    """The environment of a launcher, with a folder of its own for temporary files."""
    (folder / "tmp").mkdir(exist_ok=True)
    return environment() | {"TMPDIR": str(folder / "tmp")} | changes


def left_by_launcher(folder: Path) -> list[Path]:
    """The temporary files, without the number of the next port for the launchers of this user."""
    kept = folder / "tmp" / f"spmdtrain-{os.getuid()}"
    return [path for path in (folder / "tmp").rglob("*") if path not in (kept, kept / "next-port")]


def launch(
    folder: Path, script: str, *options: object, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Launch a script and wait for the end; nothing may be left of it."""
    began = time.monotonic()
    ended = subprocess.run(
        launcher(folder, script, *options),
        cwd=folder,
        env=around(folder, **changes),
        capture_output=True,
        text=True,
        timeout=2 * BOUND,
    )
    assert time.monotonic() - began < BOUND, ended.stderr
    assert not left_by_launcher(folder)
    assert processes_in(folder) == []
    return ended


def said(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """What the launcher itself has said."""
    prefix = "[launch] "
    return [x.removeprefix(prefix) for x in ended.stderr.splitlines() if x.startswith(prefix)]


def processes_in(folder: Path) -> list[int]:
    """The processes that work in a folder, with any parent."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def started(
    command: Sequence[str], folder: Path, out: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A launcher that can be sent signals, Ctrl-C among them; `out` is its standard output."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored, as behind &
    with open(folder / "out", "w") as file, open(folder / "err", "w") as err:
        to = file if out is None else out
        process = subprocess.Popen(
            command, cwd=folder, env=around(folder), stdout=to, stderr=err, text=True
        )
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(folder: Path, *names: str) -> None:
    until = time.monotonic() + BOUND
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < until, (folder / "err").read_text()
        time.sleep(0.01)


def attempts(folder: Path, task: str) -> int:
    return len((folder / f"{task.replace(' ', '-')}.attempts").read_text())


# What the tasks see.


@pytest.mark.slow
def test_every_task_has_its_place_in_one_cluster(tmp_path: Path) -> None:
    script = """
print(json.dumps([os.environ.get(name) for name in
    ("TF_CONFIG", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "PYTHONUNBUFFERED")]))
assert sys.stdin.read() == ""
"""
    one = json.dumps({"cluster": {"chief": ["host:1"]}, "task": {"type": "chief", "index": 0}})
    flags = "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2"
    options = ("--processes", 3, "--devices-per-process", 2, "--evaluator")
    ended = launch(tmp_path, script, *options, TF_CONFIG=one, XLA_FLAGS=flags)
    assert ended.returncode == 0, ended.stderr
    seen = {}
    for line in ended.stdout.splitlines():
        name, _, text = line.partition("] ")
        tf_config, *rest = json.loads(text)
        seen[name[1:]] = json.loads(tf_config)
        assert rest == ["2", "--xla_a=1 --xla_b=2", "1"]
    cluster = seen["chief"]["cluster"]
    assert {kind: len(addresses) for kind, addresses in cluster.items()} == {
        "chief": 1,
        "worker": 2,
        "evaluator": 1,
    }
    assert len({address for addresses in cluster.values() for address in addresses}) == 4
    assert {name: (c["task"]["type"], c["task"]["index"]) for name, c in seen.items()} == {
        "chief": ("chief", 0),
        "worker 0": ("worker", 0),
        "worker 1": ("worker", 1),
        "evaluator": ("evaluator", 0),
    }
    assert all(config["cluster"] == cluster for config in seen.values())


def test_one_process_is_a_chief_alone() -> None:
    assert training_tasks(1) == ["chief"]
    config = json.loads(tf_configs(["chief"])["chief"])
    assert list(config["cluster"]) == ["chief"]
    assert config["task"] == {"type": "chief", "index": 0}


def test_gpus_are_shared_out_in_order() -> None:
    names = ["chief", "worker 0", "evaluator"]
    seen = {"CUDA_VISIBLE_DEVICES": "4,5,6,7,GPU-a,GPU-b"}
    gpus = gpus_of(seen)
    assert gpus == ["4", "5", "6", "7", "GPU-a", "GPU-b"]
    shares = environments_of(names, 2, seen, gpus)
    assert [shares[name]["CUDA_VISIBLE_DEVICES"] for name in names] == ["4,5", "6,7", "GPU-a,GPU-b"]
    few = environments_of(names, 2, seen, gpus[:4])["evaluator"]
    assert (few["CUDA_VISIBLE_DEVICES"], few["JAX_PLATFORMS"]) == ("", "cpu")
    with pytest.raises(UserError, match=r"4 GPUs = 8.*\(4,5,6,7,"):
        environments_of(names, 4, seen, gpus)
    with pytest.raises(UserError, match="6 GPUs = 12"):
        environments_of(names, None, seen, gpus)
    alone = environments_of(["chief"], None, seen, gpus)["chief"]
    assert alone["CUDA_VISIBLE_DEVICES"] == seen["CUDA_VISIBLE_DEVICES"]
    assert gpus_of(seen | {"JAX_PLATFORMS": "cpu"}) == []
    assert gpus_of({"CUDA_VISIBLE_DEVICES": ""}) == gpus_of({"CUDA_VISIBLE_DEVICES": "-1"}) == []


# Bad usage.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2"], "no command to start, because there is no --"),
        (["--processes", "2", "--"], "no command to start, because nothing follows the --"),
        (["--processes", "0", "--", "true"], "--processes is 0: it must be at least 1"),
        (["--processes", "2", "--grace", "-1", "--", "true"], "--grace is -1.0: it must be at"),
        (["--processes", "2", "--hang-timeout", "nan", "--", "true"], "--hang-timeout is nan"),
        (["--processes", "2", "--", "no-such"], "'no-such' cannot be run"),
        (["--processes", "2", "--", "./script.py"], "'./script.py' cannot be run"),
    ],
)
def test_bad_usage_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("tf_config", "message"),
    [
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
            "TF_CONFIG makes this process worker 1 of a cluster",
        ),
        ('{"cluster": ', "TF_CONFIG: not JSON"),
        ('["a:1"]', "TF_CONFIG"),
    ],
)
def test_a_cluster_of_the_user_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tf_config: str,
    message: str,
) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config)
    assert main(["--processes", "2", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert len(error.splitlines()) == 1


def test_an_unknown_option_is_bad_usage(tmp_path: Path) -> None:
    ended = launch(tmp_path, "", "--processes", 2, "--max-restart", 1)
    assert ended.returncode == 2
    assert "--max-restarts" in ended.stderr


def test_a_file_that_the_system_cannot_run_ends_it(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"\x00\x01")
    (tmp_path / "broken").chmod(0o755)
    own = [sys.executable, "-m", "spmdtrain.launch", "--processes", "1", "--", "./broken"]
    ended = subprocess.run(
        own, cwd=tmp_path, env=around(tmp_path), capture_output=True, text=True, timeout=BOUND
    )
    assert ended.returncode == 2
    assert said(ended) == ["chief ended (code 2): ./broken cannot be run: Exec format error"]


def test_launching_needs_no_jax() -> None:
    code = "import sys, spmdtrain.launch; print('jax' in sys.modules, 'numpy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["False", "False"]


# Output.


@pytest.mark.slow
def test_every_line_says_whose_it_is(tmp_path: Path) -> None:
    script = r"""
out = sys.stdout.buffer
out.write(b"10%\r20%\r30%\n" + b"x" * 200_000 + b"\n" + b"not \xff UTF-8\n" + b"dos\r\n")
out.write(b"no end"); out.flush()
sys.stderr.write("an error\n")
sys.exit(1 if task == "worker 0" else 0)
"""
    (tmp_path / "script.py").write_text(PRELUDE + script)
    ended = subprocess.run(
        launcher(tmp_path, script, "--processes", 2, "--max-restarts", 0),
        cwd=tmp_path,
        env=around(tmp_path),
        capture_output=True,
        timeout=BOUND,
    )
    assert ended.returncode == 1
    for task in (b"chief", b"worker 0"):
        prefix = b"[" + task + b"] "
        mine = [x.removeprefix(prefix) for x in ended.stdout.split(b"\n") if x.startswith(prefix)]
        assert mine[0] == b"30%"
        assert b"".join(mine[1:-3]) == b"x" * 200_000
        assert mine[-3:] == [b"not \xff UTF-8", b"dos", b"no end"]
        assert prefix + b"an error\n" in ended.stderr
    words = b"[launch] worker 0 failed (code 1); no restarts left of 0"
    assert ended.stderr.strip().split(b"\n")[-1] == words


@pytest.mark.slow
@pytest.mark.parametrize("how", ["read later", "never read", "on a full disk"])
def test_output_that_cannot_be_written_stops_no_task(tmp_path: Path, how: str) -> None:
    script = """
for i in range(40_000): print("x" * 99)
mark("written")
wait_for("read")
print("the last line")
"""
    reader, writer = os.pipe()
    if how == "on a full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with started(launcher(tmp_path, script, "--processes", 1), tmp_path, writer) as process:
        os.close(writer)
        wait_for(tmp_path, "written")
        with open(reader, "rb") as out:
            # More than a pipe holds, so that the launcher has seen that its reader continues.
            read = [next(out) for _ in range(1_000)] if how == "read later" else []
            (tmp_path / "read").touch()
            read += out if how == "read later" else []
            assert process.wait(BOUND) == 0
    said = [x.removeprefix("[launch] ") for x in (tmp_path / "err").read_text().splitlines()]
    if how == "on a full disk":
        why = "standard output cannot be written (No space left on device): its lines are lost"
        assert said == [why, "finished"]
        return
    assert said.pop(0) == "standard output is not read: lines are left out until it is"
    said.remove("finished")
    words = "is read again" if how == "read later" else "is not read"
    (counted,) = said
    found = re.fullmatch(rf"standard output {words}: ([\d,]+) lines were left out", counted)
    assert found is not None, counted
    left_out = int(found[1].replace(",", ""))
    if how == "read later":
        assert read[-1] == b"[chief] the last line\n"
        assert len(read) + left_out == 40_001
    else:
        assert 20_000 < left_out <= 40_001


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([b"a\nb", b"c\n"], [b"a", b"bc"]),
        ([b"a\r", b"\nb\r\n"], [b"a", b"b"]),
        ([b"1%\r2%\r", b"3%\r", b"4%\ndone\n"], [b"4%", b"done"]),
        ([b"\n\n"], [b"", b""]),
        ([b"half"], [b"half"]),
    ],
)
def test_lines_however_they_come(chunks: list[bytes], shown: list[bytes]) -> None:
    reader, writer = os.pipe()
    found = lines(reader)
    got: list[bytes] = []
    for chunk in chunks:
        os.write(writer, chunk)
        for _ in range(chunk.count(b"\n")):
            got.append(next(found))
    os.close(writer)
    got += found
    os.close(reader)
    assert got == shown


def test_lines_of_gloo_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    connected = (
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : "
    )
    script = f"""
print({connected!r} + '1')
print('half a line ' + {connected!r} + '1')
print({connected!r})
print('whole', {connected!r} + '12', file=sys.stderr)
print({connected!r} + '12\\nlast', end='')
"""
    ended = launch(tmp_path, script, "--processes", 1)
    shown = [f"half a line {connected}1", connected, "last"]
    assert [x.removeprefix("[chief] ") for x in ended.stdout.splitlines()] == shown
    assert f"[chief] whole {connected}12" in ended.stderr.splitlines()


@pytest.mark.slow
def test_who_reads_no_more_does_not_end_the_training(tmp_path: Path) -> None:
    script = "for _ in range(2000): print('x' * 100)\nmark(task)"
    command = launcher(tmp_path, script, "--processes", 2)
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=around(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(BOUND) == 0
    assert (tmp_path / "chief").exists()
    assert (tmp_path / "worker 0").exists()


# Ends, and who is named.


def test_all_end_well(tmp_path: Path) -> None:
    ended = launch(tmp_path, "time.sleep(0.3 * (task == 'chief'))", "--processes", 3)
    assert ended.returncode == 0
    assert said(ended) == ["finished"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        pytest.param(
            "if task == 'worker 0': print('error: no such file: x', file=sys.stderr); sys.exit(2)",
            2,
            "worker 0 ended (code 2): no such file: x",
            id="2",
        ),
        pytest.param(
            "progress.begin()\n"
            "with phase(Phase.STEP, 9): pass\n"
            "if task == 'chief': progress.write_exit_reason(3, 'the loss is nan'); sys.exit(3)",
            3,
            "chief ended (code 3) at step 9: the loss is nan",
            id="3",
        ),
    ],
)
def test_a_failure_that_a_restart_does_not_fix(
    tmp_path: Path, script: str, code: int, words: str
) -> None:
    ended = launch(tmp_path, script + "\ntime.sleep(60)", "--processes", 3)
    assert ended.returncode == code
    lines_ = said(ended)
    assert lines_[-1] == words
    assert lines_[0].startswith("killed ")
    assert attempts(tmp_path, "chief") == 1


@pytest.mark.slow
def test_the_cause_is_named_not_its_consequences(tmp_path: Path) -> None:
    script = """
progress.begin()
if task == "chief":
    print("E0000 Terminating process because the JAX distributed service detected fatal errors",
        file=sys.stderr)
    mark("aborted")
    os.abort()
wait_for("aborted")
with phase(Phase.STEP, 12):
    if task == "worker 0":
        progress.write_exit_reason(1, "a peer is gone", own=False)
        sys.exit(1)
    if task == "worker 1":
        time.sleep(0.3)
        raise ValueError("bad row 7")
    time.sleep(60)
"""
    ended = launch(tmp_path, script, "--processes", 4, "--max-restarts", 0)
    assert ended.returncode == 1
    assert sorted(said(ended)[:2]) == [
        "chief aborted (SIGABRT) at its start: JAX lost a peer",
        "worker 0 ended with the job at step 12: a peer is gone",
    ]
    assert said(ended)[2:] == [
        "killed worker 2",
        "worker 1 failed at step 12: ValueError: bad row 7; no restarts left of 0",
    ]


@pytest.mark.slow
def test_one_that_tells_its_reason_and_does_not_end_is_the_cause(tmp_path: Path) -> None:
    script = """
progress.begin()
if task == "chief": progress.write_exit_reason(1, "lost a peer", own=False); sys.exit(1)
if task == "worker 0": progress.write_exit_reason(1, "disk full"); time.sleep(60)
time.sleep(60)
"""
    ended = launch(tmp_path, script, "--processes", 3, "--max-restarts", 0)
    assert said(ended)[-1] == "worker 0 failed at its start: disk full; no restarts left of 0"


@pytest.mark.slow
def test_a_killed_one_is_named_and_all_start_again(tmp_path: Path) -> None:
    script = """
progress.begin()
if attempt: sys.exit(0)
with phase(Phase.STEP, 37):
    if task == "worker 1": os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""
    ended = launch(tmp_path, script, "--processes", 3)
    assert ended.returncode == 0
    killed, memory, restart, finished = said(ended)
    assert killed == "killed chief, worker 0"
    assert "because memory was exhausted" in memory
    assert restart == "worker 1 was killed (SIGKILL) at step 37; restart 1 of 3 in 1 s"
    assert finished == "finished"
    assert [attempts(tmp_path, task) for task in ("chief", "worker 0", "worker 1")] == [2, 2, 2]


@pytest.mark.slow
def test_progress_refills_the_budget_and_nothing_else_does(tmp_path: Path) -> None:
    script = """
progress.begin()
progress.saved([5, 9, 9][attempt])
raise OSError(f"in attempt {attempt}")
"""
    ended = launch(tmp_path, script, "--processes", 1, "--max-restarts", 1)
    assert ended.returncode == 1
    assert said(ended) == [
        "chief failed at its start: OSError: in attempt 0; restart 1 of 1 in 1 s",
        "chief failed at its start: OSError: in attempt 1; restart 1 of 1 in 1 s",
        "chief failed at its start: OSError: in attempt 2; no restarts left of 1",
    ]


@pytest.mark.slow
def test_a_task_is_left_out_only_after_a_device_fault(tmp_path: Path) -> None:
    script = """
if attempt == 0 and task == "chief":
    progress.request_without("worker 0")
    sys.exit(1)
if attempt == 1 and task == "chief":
    sys.exit(4)
"""
    ended = launch(tmp_path, script, "--processes", 2)
    assert ended.returncode == 4
    assert said(ended)[0].endswith("restart 1 of 3 in 1 s")
    assert (tmp_path / "worker-0.attempts").read_text() == "xx"


@pytest.mark.slow
def test_preempted_by_itself_starts_again_once_the_others_have_saved(tmp_path: Path) -> None:
    script = """
if attempt == 0:
    time.sleep(3.5 * (task == "chief"))  # longer than a failure would leave it
    mark(task + " saved")
    sys.exit(75)
"""
    ended = launch(tmp_path, script, "--processes", 2)
    assert ended.returncode == 0
    assert (tmp_path / "chief saved").exists()
    assert said(ended)[0] == ("worker 0 was preempted and saved (code 75); restart 1 of 3 in 1 s")


# Hangs.

HANG = """
mark(task + " here")
wait_for("chief here", "worker 0 here")  # or one that starts late is taken for the one that holds
progress.begin()
if attempt: sys.exit(0)
for step in range(5):
    with phase(Phase.LOAD, step): pass
def read_a_row():
    with phase(Phase.LOAD, 6): time.sleep(60)
"""


@pytest.mark.slow
def test_the_one_that_holds_the_others_is_named_and_shown(tmp_path: Path) -> None:
    script = HANG + "if task == 'worker 0': read_a_row()\nwith phase(Phase.STEP, 5): time.sleep(60)"
    ended = launch(tmp_path, script, "--processes", 2, "--hang-timeout", 1)
    assert ended.returncode == 0, ended.stderr
    sentence = "worker 0 is in load at step 6 and blocks the others"
    assert said(ended) == [
        f"no progress for 1 s: {sentence}",
        "killed chief, worker 0",
        f"hung: {sentence}; restart 1 of 3 in 1 s",
        "finished",
    ]
    for task in ("chief", "worker 0"):
        assert f"[{task}] Current thread" in ended.stderr
    assert "in read_a_row" in ended.stderr


@pytest.mark.slow
def test_a_stopped_one_is_named(tmp_path: Path) -> None:
    script = (
        HANG
        + """
with phase(Phase.STEP, 5):
    if task == "chief": os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
"""
    )
    options = ("--processes", 2, "--hang-timeout", 1, "--max-restarts", 0)
    ended = launch(tmp_path, script, *options)
    assert ended.returncode == 1
    sentence = "chief is stopped by a signal in step 5 and blocks the others"
    assert said(ended) == [
        f"no progress for 1 s: {sentence}",
        "no stacks of chief: it is stopped by a signal",
        "killed chief, worker 0",
        f"hung: {sentence}; no restarts left of 0",
    ]


@pytest.mark.slow
def test_who_moves_is_not_hung_nor_who_does_not_publish(tmp_path: Path) -> None:
    script = """
if task == "chief": progress.begin()
for step in range(25):
    with phase(Phase.STEP, step): time.sleep(0.1)
"""
    ended = launch(tmp_path, script, "--processes", 2, "--hang-timeout", 2)
    assert (ended.returncode, said(ended)) == (0, ["finished"])


def test_stacks_of_the_threads_that_matter() -> None:
    worker, main = "Thread 0x1 (most recent call first):\n  in a", "  in main"
    assert list(
        main_stacks(f"{worker}\n\nCurrent thread 0x2 (most recent call first):\n{main}\n")
    ) == [
        "Current thread 0x2 (most recent call first):",
        "  in main",
        "(and 1 other threads)",
    ]
    dump = f"Current thread 0x1:\n  in a\n\nThread 0x2:\n{main}\n\nCurrent thread's C stack:\n  c\n"
    assert list(main_stacks(dump))[-1] == "  c"
    assert "  in main" in list(main_stacks(dump))
    assert list(main_stacks("")) == []


def test_what_the_launcher_slept_through_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = IdleTimer(max_interval=1.0)
    assert watch.idle("a") == 0
    now = 0.5
    assert watch.idle("a") == 0.5
    now = 100.0
    assert watch.idle("a") == 1.5
    assert watch.idle("b") == 0


# Signals to the launcher.

TREE = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_lets_all_save_and_ends_the_job(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        TREE
        + """
def save(*_):
    time.sleep(0.2); mark(task + " saved"); sys.exit(75)
signal.signal(signal.SIGTERM, save)
mark(task + " ready")
time.sleep(100)
"""
    )
    with started(launcher(tmp_path, script, "--processes", 2), tmp_path) as process:
        wait_for(tmp_path, "chief ready", "worker 0 ready")
        process.send_signal(number)
        time.sleep(0.05)
        process.send_signal(number)  # the same request, as of a wrapper that passes it on
        assert process.wait(BOUND) == 75
    assert not processes_in(tmp_path)
    assert (tmp_path / "chief saved").exists()
    assert (tmp_path / "worker 0 saved").exists()
    first, last = (tmp_path / "err").read_text().splitlines()
    assert first.startswith(f"[launch] {number.name}: asked the tasks to save and exit")
    assert last.endswith("was preempted and saved (code 75)")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the grace ends", "a second signal"])
def test_who_ignores_the_signal_is_killed(tmp_path: Path, how: str) -> None:
    script = (
        TREE
        + """
signal.signal(signal.SIGTERM, lambda *_: mark(task + " asked"))
mark(task + " ready")
while True: time.sleep(100)
"""
    )
    grace = 1 if how == "the grace ends" else 100
    command = launcher(tmp_path, script, "--processes", 2, "--grace", grace)
    with started(command, tmp_path) as process:
        wait_for(tmp_path, "chief ready", "worker 0 ready")
        process.send_signal(signal.SIGTERM)
        wait_for(tmp_path, "chief asked", "worker 0 asked")
        if grace > 1:
            time.sleep(0.5)  # earlier, it would be the same request
            process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == 128 + signal.SIGTERM
    assert not processes_in(tmp_path)
    last = (tmp_path / "err").read_text().splitlines()[-1]
    assert last == "[launch] SIGTERM: killed before saving: chief, worker 0"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT, signal.SIGSEGV])
def test_no_process_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        TREE
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark(task + " ready")
while True: time.sleep(100)
"""
    )
    command = launcher(tmp_path, script, "--processes", 2, "--evaluator")
    with started(command, tmp_path) as process:
        wait_for(tmp_path, "chief ready", "worker 0 ready", "evaluator ready")
        assert len(processes_in(tmp_path)) == 1 + 2 * 3
        process.send_signal(number)
        assert process.wait(BOUND) == -number
        until = time.monotonic() + BOUND
        while processes_in(tmp_path) or left_by_launcher(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.slow
def test_no_task_outlives_the_launcher_and_its_guardian(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark(task + ' ready'); time.sleep(100)"
    with started(launcher(tmp_path, script, "--processes", 2), tmp_path) as process:
        wait_for(tmp_path, "chief ready", "worker 0 ready")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (guardian,) = set(map(int, children)) - set(processes_in(tmp_path))
        os.kill(guardian, signal.SIGKILL)
        process.kill()
        process.wait()
        until = time.monotonic() + BOUND
        while processes_in(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.slow
def test_a_guardian_that_does_not_end_does_not_hold_the_launcher(tmp_path: Path) -> None:
    with started(
        launcher(tmp_path, "mark('ready'); wait_for('go')", "--processes", 1), tmp_path
    ) as process:
        wait_for(tmp_path, "ready")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (guardian,) = set(map(int, children)) - set(processes_in(tmp_path))
        os.kill(guardian, signal.SIGSTOP)
        (tmp_path / "go").touch()
        try:
            assert process.wait(BOUND) == 0
        finally:
            os.kill(guardian, signal.SIGKILL)


@pytest.mark.slow
def test_no_restart_after_a_signal_in_the_wait_for_it(tmp_path: Path) -> None:
    command = launcher(tmp_path, "sys.exit(1)", "--processes", 1)
    with started(command, tmp_path) as process:
        until = time.monotonic() + BOUND
        while "restart 1 of 3" not in (tmp_path / "err").read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 1
    assert attempts(tmp_path, "chief") == 1
    assert (tmp_path / "err").read_text().endswith("SIGTERM: not restarted\n")


@pytest.mark.slow
def test_an_attempt_leaves_the_next_nothing(tmp_path: Path) -> None:
    script = """
assert not list(Path(os.environ["SPMDTRAIN_LAUNCH"]).glob("chief.*"))
progress.begin()
Path(f"config {attempt}").write_text(os.environ["TF_CONFIG"])
if attempt == 0:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    Path("child").write_text(str(child.pid))
    sys.exit(1)
print("alive:", Path(f"/proc/{Path('child').read_text()}/cwd").exists())
"""
    ended = launch(tmp_path, script, "--processes", 1)
    assert (ended.returncode, ended.stdout) == (0, "[chief] alive: False\n")
    assert (tmp_path / "config 0").read_text() != (tmp_path / "config 1").read_text()  # its ports


# Of parameter servers: who ends with the chief, and after how long.
SERVED = ("--processes", 2, "--ps", 1, "--max-restarts", 1)
ENDED_WITH = 'progress.write_exit_reason(1, "the job: the chief is gone", own=False); sys.exit(1)'


@pytest.mark.slow
def test_a_finished_chief_ends_the_job_although_a_worker_is_just_starting(tmp_path: Path) -> None:
    script = f"""
if task != "chief":
    wait_for("done")
    {ENDED_WITH}
mark("done")
"""
    ended = launch(tmp_path, script, *SERVED)
    assert (ended.returncode, said(ended)) == (0, ["finished"]), ended.stderr


@pytest.mark.slow
def test_a_chief_tells_why_though_all_have_ended_before(tmp_path: Path) -> None:
    script = f"""
if task != "chief":
    {ENDED_WITH}
time.sleep(12)  # for those that never come
progress.write_exit_reason(2, "the seed is another")
sys.exit(2)
"""
    ended = launch(tmp_path, script, *SERVED)
    assert ended.returncode == 2 and "the seed is another" in said(ended)[-1], ended.stderr


@pytest.mark.slow
def test_of_parameter_servers_a_hang_is_the_chiefs(tmp_path: Path) -> None:
    script = """
progress.begin()
with phase(Phase.STEP, 37) if task == "chief" else progress.phase(Phase.START, 0):
    time.sleep(60)
"""
    ended = launch(tmp_path, script, *SERVED, "--max-restarts", 0, "--hang-timeout", 2)
    assert "no progress for 2 s: chief is in step 37" in said(ended), ended.stderr


@pytest.mark.slow
def test_a_shell_between_does_not_hide_the_process(tmp_path: Path) -> None:
    inner = """
progress.begin()
def save(*_): progress.write_exit_reason(75, "SIGTERM"); sys.exit(75)
signal.signal(signal.SIGTERM, save)
with phase(Phase.STEP, 4):
    mark("ready")
    time.sleep(100)
"""
    command = launcher(tmp_path, inner, "--processes", 1)
    shell = ["/bin/sh", "-c", f"{sys.executable} script.py; exit $?"]
    with started([*command[: command.index("--") + 1], *shell], tmp_path) as process:
        wait_for(tmp_path, "ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 75
    last = (tmp_path / "err").read_text().splitlines()[-1]
    assert last == "[launch] chief was preempted and saved (code 75) at step 4"


# The evaluator.


@pytest.mark.slow
def test_the_evaluator_ends_after_the_training_and_does_not_end_it(tmp_path: Path) -> None:
    script = """
if task == "evaluator":
    folder = Path("folder")
    if attempt == 0: folder.write_text(os.environ["SPMDTRAIN_LAUNCH"]); sys.exit(1)
    assert folder.read_text() == os.environ["SPMDTRAIN_LAUNCH"]
    mark("evaluator again")
    while progress.job_ended() is None: time.sleep(0.01)
    print("ended:", progress.job_ended())
    sys.exit(0)
wait_for("evaluator again")
sys.exit(attempt == 0)
"""
    ended = launch(tmp_path, script, "--processes", 2, "--evaluator")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[evaluator] ended: finished\n"
    assert said(ended)[0] == "evaluator failed (code 1); restart 1 of 3 in 1 s"
    assert said(ended)[-1] == "evaluator ended (code 0)"
    assert attempts(tmp_path, "evaluator") == 2
    assert attempts(tmp_path, "chief") == 2


@pytest.mark.slow
def test_the_evaluator_hears_of_a_failure(tmp_path: Path) -> None:
    script = """
if task == "chief": sys.exit(5)
while progress.job_ended() is None: time.sleep(0.01)
print(progress.job_ended())
"""
    options = ("--processes", 1, "--evaluator", "--max-restarts", 0)
    ended = launch(tmp_path, script, *options)
    assert ended.returncode == 5
    assert ended.stdout == "[evaluator] failed: chief failed (code 5)\n"


@pytest.mark.slow
def test_an_evaluator_that_fails_for_good_is_the_exit_code(tmp_path: Path) -> None:
    script = "if task == 'evaluator': sys.exit(9)\ntime.sleep(4)"
    options = ("--processes", 1, "--evaluator", "--max-restarts", 0)
    ended = launch(tmp_path, script, *options)
    assert ended.returncode == 9
    assert said(ended) == [
        "evaluator failed (code 9); no restarts left of 0",
        "finished",
        "the training has finished, but the evaluator failed: exit code 9",
    ]


@pytest.mark.slow
def test_an_evaluator_without_progress_is_killed_as_hung(tmp_path: Path) -> None:
    script = """
if task == "chief": wait_for("ready"); sys.exit(0)
mark("ready")
progress.begin()
for step in range(15):
    with phase(Phase.EVALUATE, step): time.sleep(0.1)
mark("evaluated")
time.sleep(100)
"""
    ended = launch(tmp_path, script, "--processes", 1, "--evaluator", "--hang-timeout", 1)
    assert ended.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "evaluated").exists()
    assert "the evaluator has made no progress for 1 s: killed" in said(ended)


@pytest.mark.slow
def test_a_signal_reaches_the_evaluator_once_the_training_has_saved(tmp_path: Path) -> None:
    script = """
def end(*_):
    if task == "evaluator": print(progress.job_ended(), Path("saved").exists())
    else: time.sleep(0.3); mark("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
mark(task + " ready")
time.sleep(100)
"""
    command = launcher(tmp_path, script, "--processes", 1, "--evaluator")
    with started(command, tmp_path) as process:
        wait_for(tmp_path, "chief ready", "evaluator ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 75
    assert (tmp_path / "out").read_text() == "[evaluator] preempted True\n"
    assert not processes_in(tmp_path)


# Words and choices.


def test_in_a_terminal_lines_are_aligned_and_colored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = os.openpty()
    try:
        with open(os.devnull, "w") as file:
            plain = prefixes(["chief", "worker 10"], file.fileno())
        shown = prefixes(["chief", "worker 10"], writer)
        assert plain == {"chief": b"[chief] ", "worker 10": b"[worker 10] "}
        assert shown["chief"] == b"\x1b[36m[chief]     \x1b[0m"
        assert shown["worker 10"] == b"\x1b[33m[worker 10] \x1b[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        assert prefixes(["chief", "worker 10"], writer)["chief"] == b"[chief]     "
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
def test_a_task_that_ends_with_code_0_before_its_work_is_done_has_failed(tmp_path: Path) -> None:
    script = """
from spmdtrain.distributed.progress import working
with working("training"):
    if task == "worker 0" and attempt == 0: os._exit(0)
    if attempt == 0: time.sleep(60)
"""
    ended = launch(tmp_path, script, "--processes", 2)
    assert ended.returncode == 0, ended.stderr
    early, *_, last = [text for text in said(ended) if not text.startswith("killed")]
    assert early.startswith("worker 0 ended (code 0) during the training, without an error")
    assert early.endswith("restart 1 of 3 in 1 s") and last == "finished"


AT_37 = ProgressRecord("worker 2", 37, Phase.STEP, 30, 9, 0.0)
GLOO = "RuntimeError: [external/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"


@pytest.mark.parametrize(
    ("ended", "words", "ranked"),
    [
        (TaskExit("chief", 0), "chief ended (code 0)", CauseRank.NONE),
        (
            TaskExit("worker 2", 0, record=AT_37, work="training"),
            "worker 2 ended (code 0) at step 37 during the training, without an error: by "
            "os._exit, or in native code",
            CauseRank.OWN,
        ),
        (
            TaskExit("worker 2", 3, errors="stopped: step 35: loss not finite", record=AT_37),
            "worker 2 ended (code 3): step 35: loss not finite",
            CauseRank.OWN,
        ),
        (
            TaskExit("worker 2", -9, record=AT_37),
            "worker 2 was killed (SIGKILL) at step 37",
            CauseRank.OWN,
        ),
        (TaskExit("chief", 137), "chief was killed (SIGKILL)", CauseRank.OWN),
        (TaskExit("chief", -9, ours=True), "chief was killed (SIGKILL)", CauseRank.NONE),
        (TaskExit("chief", -11), "chief crashed (SIGSEGV)", CauseRank.OWN),
        (TaskExit("chief", -15), "chief was terminated (SIGTERM)", CauseRank.OWN),
        (TaskExit("chief", -6), "chief aborted (SIGABRT)", CauseRank.OWN),
        (
            TaskExit(
                "chief", -6, errors="F0 UNAVAILABLE: The following task is missing its heartbeats"
            ),
            "chief aborted (SIGABRT): JAX lost a peer",
            CauseRank.CONSEQUENCE,
        ),
        (
            TaskExit(
                "chief", -6, errors="DEADLINE_EXCEEDED: ...\n CoordinationService/RegisterTask"
            ),
            "chief aborted (SIGABRT): JAX timed out waiting for a peer",
            CauseRank.CONSEQUENCE,
        ),
        (
            TaskExit("chief", 1, errors=f"Traceback (most recent call last):\n  File x\n{GLOO}"),
            f"chief failed: it lost a peer: {GLOO}",
            CauseRank.CONSEQUENCE,
        ),
        (
            TaskExit(
                "worker 2",
                1,
                record=AT_37,
                errors="Traceback (most recent call last):\n  a\nOSError: no\n\nDuring it\n\n"
                "Traceback (most recent call last):\n  File x\n    y\nKeyError: 'row'\na note",
            ),
            "worker 2 failed at step 37: KeyError: 'row'",
            CauseRank.OWN,
        ),
        (
            TaskExit(
                "chief",
                -6,
                errors="Traceback (most recent call last):\n  File x\nValueError: bad row\n"
                "E0 Polled an error from coordination service\n*** Check failure stack trace: ***",
            ),
            "chief aborted (SIGABRT): ValueError: bad row",
            CauseRank.OWN,
        ),
        (
            TaskExit(
                "chief", -6, errors=f"Traceback (most recent call last):\n  File x\n{GLOO}\nF0"
            ),
            "chief aborted (SIGABRT): JAX lost a peer",
            CauseRank.CONSEQUENCE,
        ),
        (TaskExit("chief", 1), "chief failed (code 1)", CauseRank.FAILED),
        (TaskExit("chief", 75), "chief was preempted and saved (code 75)", CauseRank.PREEMPTED),
        (
            TaskExit("chief", 75, reason=Reason(75, "SIGTERM", True)),
            "chief was preempted and saved (code 75)",
            CauseRank.PREEMPTED,
        ),
        (
            TaskExit("chief", 1, reason=Reason(1, "the disk is full\nmore", True)),
            "chief failed: the disk is full",
            CauseRank.OWN,
        ),
        (
            TaskExit("chief", 1, reason=Reason(1, "chief is gone", False)),
            "chief ended with the job: chief is gone",
            CauseRank.CONSEQUENCE,
        ),
    ],
)
def test_deaths_in_words(ended: TaskExit, words: str, ranked: CauseRank) -> None:
    assert describe_exit(ended) == words
    assert cause_rank(ended) is ranked


def test_the_best_explanation_is_the_cause_and_of_equals_the_first() -> None:
    abort = TaskExit("chief", -6, errors="heartbeat")
    preempted, failed = TaskExit("worker 0", 75), TaskExit("worker 1", 1)
    own, later = TaskExit("worker 2", -9), TaskExit("worker 3", 3)
    deaths = [abort, preempted, failed, own, later]
    for expected in (own, later, failed, preempted, abort):
        assert root_cause(deaths) is expected
        deaths.remove(expected)
    assert root_cause([TaskExit("chief", 0), TaskExit("worker 0", -9, ours=True)]) is None


def test_hints_are_for_signals_of_others() -> None:
    assert "memory" in (hint(TaskExit("chief", -9)) or "")
    assert "/dev/shm" in (hint(TaskExit("chief", -7)) or "")
    assert hint(TaskExit("chief", -9, ours=True)) is None
    assert hint(TaskExit("chief", 1)) is None


def test_waits_double_up_to_a_minute_and_reset_with_progress() -> None:
    restarts = Restarts(8)
    assert [restarts.next(-1) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]
    assert [restarts.next(10), restarts.next(10), restarts.next(9)] == [1, 2, 4]
    assert restarts.next(11) == 1
    assert Restarts(0).next(5) is None
    assert [restarts.next(20, after_rollback=True), restarts.next(15), restarts.next(15)] == [
        1,
        1,
        2,
    ]


def test_a_job_with_a_faulty_device_restarts_only_without_its_process() -> None:
    """The other processes keep their devices, whatever they are called then."""
    assert not Outcome(4, "a lasting fault").may_restart
    assert Outcome(4, "a lasting fault", without="worker 0").may_restart
    tasks = environments_of(training_tasks(3), 1, {}, ["0", "1", "2"])
    for faulty, devices in {"chief": ["1", "2"], "worker 0": ["0", "2"]}.items():
        left = without_task(tasks, faulty, training_tasks(2))
        assert [env["SPMDTRAIN_TASK"] for env in left.values()] == ["chief", "worker 0"]
        assert [env["CUDA_VISIBLE_DEVICES"] for env in left.values()] == devices
