"""The launcher, on scripts that take no time: who dies, who is named, who is left."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import BOUND, environment

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


def wait_until(is_so: Callable[[], bool], folder: Path) -> None:
    until = time.monotonic() + BOUND
    while not is_so():
        assert time.monotonic() < until, (folder / "err").read_text()
        time.sleep(0.01)


def wait_for(folder: Path, *names: str) -> None:
    wait_until(lambda: all((folder / name).exists() for name in names), folder)


def guardian_of(process: subprocess.Popen[str], folder: Path) -> int:
    """The child of a launcher that is no task."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (guardian,) = set(map(int, children)) - set(processes_in(folder))
    return guardian


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


TWO = ["--processes", "2", "--", "true"]
IN_CLUSTER = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


@pytest.mark.parametrize(
    ("arguments", "tf_config", "message"),
    [
        (["--processes", "2"], None, "no command to start, because there is no --"),
        (["--processes", "2", "--"], None, "no command to start, because nothing follows the --"),
        (["--processes", "0", "--", "true"], None, "--processes is 0: it must be at least 1"),
        (["--grace", "-1", *TWO], None, "--grace is -1.0: it must be at"),
        (["--hang-timeout", "nan", *TWO], None, "--hang-timeout is nan"),
        (["--processes", "2", "--", "no-such"], None, "'no-such' cannot be run"),
        (["--processes", "2", "--", "./script.py"], None, "'./script.py' cannot be run"),
        (TWO, IN_CLUSTER, "TF_CONFIG makes this process worker 1 of a cluster"),
        (TWO, '{"cluster": ', "TF_CONFIG: not JSON"),
        (TWO, '["a:1"]', "TF_CONFIG"),
    ],
)
def test_bad_usage_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    tf_config: str | None,
    message: str,
) -> None:
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    if tf_config is not None:
        monkeypatch.setenv("TF_CONFIG", tf_config)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_an_unknown_option_is_bad_usage(tmp_path: Path) -> None:
    ended = launch(tmp_path, "", "--processes", 2, "--max-restart", 1)
    assert ended.returncode == 2
    assert "--max-restarts" in ended.stderr


@pytest.mark.slow
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
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND
    )
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


@pytest.mark.slow
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


# The order of lines, where standard output and standard error are the same pipe.

WRITE = """
with open(1 if {stream!r} == "stdout" else 2, "wb", closefd=False) as out:
    out.write(b"x" * 99 + b"\\n")
    mark("begun")
    for _ in range({count}): out.write(b"x" * 99 + b"\\n")
    out.write(b"the last line\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stream", "count", "end", "message"),
    [
        ("stdout", 5_000, "", "finished"),
        ("stdout", 5_000, "os._exit(7)", "chief failed (code 7); no restarts left of 0"),
        ("stdout", 5_000, "os.kill(os.getpid(), 9)", None),
        # More than waits in the launcher for a reader: it has not read all when the task exits.
        ("stdout", 10_700, "", "finished"),
    ],
    ids=["finished", "failed", "killed", "slow reader"],
)
def test_what_a_task_has_printed_stands_before_the_line_about_its_end(
    stream: str, count: int, end: str, message: str | None, tmp_path: Path
) -> None:
    script = WRITE.format(stream=stream, count=count) + end
    command = launcher(tmp_path, script, "--processes", 1, "--max-restarts", 0)
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=around(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        wait_for(tmp_path, "begun")
        wait_until(lambda: not [p for p in processes_in(tmp_path) if p != process.pid], tmp_path)
        time.sleep(1.5)  # the launcher could say now that the task has ended
        assert process.stdout is not None
        read = process.stdout.read().decode().splitlines()
    assert len(read) >= count + 2
    about = [n for n, line in enumerate(read) if line.startswith("[launch] ")]
    assert about[0] == count + 2 and read[count + 1] == "[chief] the last line"
    if message:
        assert read[-1] == f"[launch] {message}"


@pytest.mark.slow
def test_what_tasks_print_at_a_signal_stands_behind_the_line_that_they_were_asked(
    tmp_path: Path,
) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: (os.write(2, b"asked\\n"), os._exit(75)))
mark(task + " ready")
while True: time.sleep(100)
"""
    names = ["chief", *(f"worker {n}" for n in range(7))]
    with started(launcher(tmp_path, script, "--processes", 8), tmp_path) as process:
        wait_for(tmp_path, *(f"{name} ready" for name in names))
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == 75
    first, *read = (tmp_path / "err").read_text().splitlines()
    assert first.startswith("[launch] SIGINT: asked the tasks to save and exit")
    assert sorted(read[:8]) == [f"[{name}] asked" for name in names]


# Ends, and who is named.


class Job(NamedTuple):
    """A script of all tasks, options of the launcher, and how the job ends.

    `said` are the lines of the launcher: * is any text in a line, and ... any lines. `attempts` are
    the starts of tasks, `left` files that they leave, `errors` further texts of standard error.
    """

    script: str
    options: str
    code: int
    said: list[str]
    attempts: dict[str, int] | None = None
    left: str = ""
    out: str = ""
    errors: tuple[str, ...] = ()


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
# Of parameter servers: who ends with the chief, and after how long.
SERVED = "--processes 2 --ps 1 --max-restarts 1"
ENDED_WITH = 'progress.write_exit_reason(1, "the job: the chief is gone", own=False); sys.exit(1)'
JOBS = {
    "all end well": Job("time.sleep(0.3 * (task == 'chief'))", "--processes 3", 0, ["finished"]),
    # Failures that a restart does not fix.
    "code 2": Job(
        """
if task == 'worker 0': print('error: no such file: x', file=sys.stderr); sys.exit(2)
time.sleep(60)
""",
        "--processes 3",
        2,
        ["killed *", "...", "worker 0 ended (code 2): no such file: x"],
        {"chief": 1},
    ),
    "code 3": Job(
        """
progress.begin()
with phase(Phase.STEP, 9): pass
if task == 'chief': progress.write_exit_reason(3, 'the loss is nan'); sys.exit(3)
time.sleep(60)
""",
        "--processes 3",
        3,
        ["killed *", "...", "chief ended (code 3) at step 9: the loss is nan"],
        {"chief": 1},
    ),
    "the cause tells its reason and does not end": Job(
        """
progress.begin()
if task == "chief": progress.write_exit_reason(1, "lost a peer", own=False); sys.exit(1)
if task == "worker 0": progress.write_exit_reason(1, "disk full"); time.sleep(60)
time.sleep(60)
""",
        "--processes 3 --max-restarts 0",
        1,
        ["...", "worker 0 failed at its start: disk full; no restarts left of 0"],
    ),
    "one is killed, and all start again": Job(
        """
progress.begin()
if attempt: sys.exit(0)
with phase(Phase.STEP, 37):
    if task == "worker 1": os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
""",
        "--processes 3",
        0,
        [
            "killed chief, worker 0",
            "*because memory was exhausted*",
            "worker 1 was killed (SIGKILL) at step 37; restart 1 of 3 in 1 s",
            "finished",
        ],
        {"chief": 2, "worker 0": 2, "worker 1": 2},
    ),
    "code 0 before the work is done": Job(
        """
from spmdtrain.distributed.progress import working
with working("training"):
    if task == "worker 0" and attempt == 0: os._exit(0)
    if attempt == 0: time.sleep(60)
""",
        "--processes 2",
        0,
        [
            "killed chief",
            "worker 0 ended (code 0) during the training, without an error*restart 1 of 3 in 1 s",
            "finished",
        ],
    ),
    # Progress refills the budget, and nothing else does.
    "two restarts of one": Job(
        """
progress.begin()
progress.saved([5, 9, 9][attempt])
raise OSError(f"in attempt {attempt}")
""",
        "--processes 1 --max-restarts 1",
        1,
        [
            "chief failed at its start: OSError: in attempt 0; restart 1 of 1 in 1 s",
            "chief failed at its start: OSError: in attempt 1; restart 1 of 1 in 1 s",
            "chief failed at its start: OSError: in attempt 2; no restarts left of 1",
        ],
    ),
    # A task is left out only after a fault of a device.
    "left out without a fault": Job(
        """
if attempt == 0 and task == "chief":
    progress.request_without("worker 0")
    sys.exit(1)
if attempt == 1 and task == "chief":
    sys.exit(4)
""",
        "--processes 2",
        4,
        ["*restart 1 of 3 in 1 s", "..."],
        {"worker 0": 2},
    ),
    "preempted by itself, once the others have saved": Job(
        """
if attempt == 0:
    time.sleep(3.5 * (task == "chief"))  # longer than a failure would leave it
    mark(task + " saved")
    sys.exit(75)
""",
        "--processes 2",
        0,
        ["worker 0 was preempted and saved (code 75); restart 1 of 3 in 1 s", "..."],
        left="chief saved",
    ),
    # Hangs: the one that holds the others is named and shown.
    "one hangs": Job(
        HANG + "if task == 'worker 0': read_a_row()\nwith phase(Phase.STEP, 5): time.sleep(60)",
        "--processes 2 --hang-timeout 1",
        0,
        [
            "no progress for 1 s: worker 0 is in load at step 6 and blocks the others",
            "killed chief, worker 0",
            "hung: worker 0 is in load at step 6 and blocks the others; restart 1 of 3 in 1 s",
            "finished",
        ],
        errors=("[chief] Current thread", "[worker 0] Current thread", "in read_a_row"),
    ),
    "one is stopped": Job(
        HANG
        + """
with phase(Phase.STEP, 5):
    if task == "chief": os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
""",
        "--processes 2 --hang-timeout 1 --max-restarts 0",
        1,
        [
            "no progress for 1 s: chief is stopped by a signal in step 5 and blocks the others",
            "no stacks of chief: it is stopped by a signal",
            "killed chief, worker 0",
            "hung: chief is stopped by a signal in step 5 and blocks the others; "
            "no restarts left of 0",
        ],
    ),
    "one moves, and one publishes nothing": Job(
        """
if task == "chief": progress.begin()
for step in range(25):
    with phase(Phase.STEP, step): time.sleep(0.1)
""",
        "--processes 2 --hang-timeout 2",
        0,
        ["finished"],
    ),
    "of parameter servers a hang is the chief's": Job(
        """
progress.begin()
with phase(Phase.STEP, 37) if task == "chief" else progress.phase(Phase.START, 0):
    time.sleep(60)
""",
        f"{SERVED} --max-restarts 0 --hang-timeout 2",
        1,
        ["...", "no progress for 2 s: chief is in step 37", "..."],
    ),
    "a chief finishes while a worker is just starting": Job(
        f"""
if task != "chief":
    wait_for("done")
    {ENDED_WITH}
mark("done")
""",
        SERVED,
        0,
        ["finished"],
    ),
    "a chief tells why though all have ended before": Job(
        f"""
if task != "chief":
    {ENDED_WITH}
time.sleep(12)  # for those that never come
progress.write_exit_reason(2, "the seed is another")
sys.exit(2)
""",
        SERVED,
        2,
        ["...", "*the seed is another*"],
    ),
    # The evaluator ends after the training and does not end it.
    "an evaluator starts again": Job(
        """
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
""",
        "--processes 2 --evaluator",
        0,
        [
            "evaluator failed (code 1); restart 1 of 3 in 1 s",
            "...",
            "evaluator ended (code 0)",
        ],
        {"evaluator": 2, "chief": 2},
        out="[evaluator] ended: finished\n",
    ),
    "an evaluator hears of a failure": Job(
        """
if task == "chief": sys.exit(5)
while progress.job_ended() is None: time.sleep(0.01)
print(progress.job_ended())
""",
        "--processes 1 --evaluator --max-restarts 0",
        5,
        ["..."],
        out="[evaluator] failed: chief failed (code 5)\n",
    ),
    "an evaluator fails for good": Job(
        "if task == 'evaluator': sys.exit(9)\ntime.sleep(4)",
        "--processes 1 --evaluator --max-restarts 0",
        9,
        [
            "evaluator failed (code 9); no restarts left of 0",
            "finished",
            "the training has finished, but the evaluator failed: exit code 9",
        ],
    ),
    "an evaluator hangs": Job(
        """
if task == "chief": wait_for("ready"); sys.exit(0)
mark("ready")
progress.begin()
for step in range(15):
    with phase(Phase.EVALUATE, step): time.sleep(0.1)
mark("evaluated")
time.sleep(100)
""",
        "--processes 1 --evaluator --hang-timeout 1",
        128 + signal.SIGKILL,
        ["...", "the evaluator has made no progress for 1 s: killed", "..."],
        left="evaluated",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_job_ends_as_it_should_and_the_launcher_says_why(job: Job, tmp_path: Path) -> None:
    ended = launch(tmp_path, job.script, *job.options.split())
    assert ended.returncode == job.code, ended.stderr
    patterns = (re.escape(line).replace(r"\*", ".*") + "\n" for line in job.said)
    expected = "".join(patterns).replace(re.escape("...") + "\n", "(.*\n)*")
    assert re.fullmatch(expected, "".join(f"{line}\n" for line in said(ended))), said(ended)
    for task, count in (job.attempts or {}).items():
        assert attempts(tmp_path, task) == count, task
    assert (tmp_path / job.left).exists()
    assert ended.stdout == job.out
    assert all(text in ended.stderr for text in job.errors)


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


# Hangs.


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
        wait_until(lambda: not (processes_in(tmp_path) or left_by_launcher(tmp_path)), tmp_path)


@pytest.mark.slow
def test_no_task_outlives_the_launcher_and_its_guardian(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark(task + ' ready'); time.sleep(100)"
    with started(launcher(tmp_path, script, "--processes", 2), tmp_path) as process:
        wait_for(tmp_path, "chief ready", "worker 0 ready")
        os.kill(guardian_of(process, tmp_path), signal.SIGKILL)
        process.kill()
        process.wait()
        wait_until(lambda: not processes_in(tmp_path), tmp_path)


@pytest.mark.slow
def test_a_guardian_that_does_not_end_does_not_hold_the_launcher(tmp_path: Path) -> None:
    with started(
        launcher(tmp_path, "mark('ready'); wait_for('go')", "--processes", 1), tmp_path
    ) as process:
        wait_for(tmp_path, "ready")
        guardian = guardian_of(process, tmp_path)
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
        wait_until(lambda: "restart 1 of 3" in (tmp_path / "err").read_text(), tmp_path)
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
    assert not Outcome(4, "a lasting fault").may_restart
    assert Outcome(4, "a lasting fault", without="worker 0").may_restart
