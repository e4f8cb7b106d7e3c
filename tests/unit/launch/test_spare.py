"""Spare processes: a task that starts in one does what a task that starts cold does."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from helpers import BOUND, environment

from spmdtrain.distributed import progress
from spmdtrain.errors import UserError
from spmdtrain.launch.child import Child, Reaper, Restarts
from spmdtrain.launch.command import main
from spmdtrain.launch.spare import Imports, Spares

SCRIPT = """
import os, signal, sys
spec = __spec__ and __spec__.name
print(sys.argv, sys.path, sys.flags, sys.stdin.read(), __name__, __file__, spec)
print(sorted(item for item in os.environ.items() if item[0] != "_"), os.getcwd())
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
print(sys.modules["__main__"].__dict__ is globals(), len(os.listdir("/proc/self/fd")))
def end():
    if sys.argv[1] == "error": raise ValueError("no")
    if sys.argv[1] == "exit": sys.exit(3)
    if sys.argv[1] == "ctrl-c": raise KeyboardInterrupt
    if sys.argv[1] == "kill": os.kill(os.getpid(), 9)
print("colorsys" in sys.modules, file=sys.stdout if sys.argv[2:] else open(os.devnull, "w"))
sys.stdout.flush()
end()
"""
TASK = {"TF_CONFIG": "{}", progress.TASK: "worker 0"}


class Lines:
    """Receives the lines of children."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self.names: set[str] = set()
        self.said: list[str] = []

    def line(self, name: str, stream: str, text: bytes) -> None:
        self.names.add(name)
        self.found[stream].append(text.decode())


class Pool:
    """A pool of spares with few imports, in a folder with a script."""

    def __init__(self, folder: Path, reaper: Reaper) -> None:
        self.folder, self.lines, self._reaper, self._pools = folder, Lines(), reaper, 0
        (folder / "script.py").write_text(SCRIPT)
        self.environment = environment() | {"LOCALE": "x"}

    def spares(
        self, *command: str, modules: Sequence[str] = ("colorsys",), count: int = 1
    ) -> Spares:
        self._pools += 1
        return Spares(
            count,
            [sys.executable, *command],
            self.environment,
            Imports(modules, str(self.folder), keeps_memory=False),
            self.folder / f"spare{self._pools}",
            self.lines,
            self._reaper,
            self.lines.said.append,
        )

    def cold(self, *command: str) -> Child:
        line = [sys.executable, *command]
        return Child("worker 0", line, self.environment | TASK, self.lines, self._reaper)

    def warm(self, spares: Spares) -> Child:
        self.fill(spares)
        child = spares.take("worker 0", self.environment | TASK)
        assert child is not None, self.lines.said
        return child

    def fill(self, spares: Spares, said: str = "ready") -> None:
        before = len(self.lines.said)

        def is_filled() -> bool:
            spares.fill()
            return any(said in line for line in self.lines.said[before:])

        wait_until(is_filled)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    (tmp_path / "reaped").mkdir()
    monkeypatch.chdir(tmp_path)
    reaper = Reaper(str(tmp_path / "reaped"))
    yield Pool(tmp_path, reaper)
    reaper.close()


def ended(child: Child, lines: Lines) -> tuple[int | None, dict[str, list[str]]]:
    """The exit status of a child and its lines."""
    wait_until(child.poll)
    found, lines.found = lines.found, {"stdout": [], "stderr": []}
    return child.status, found


@pytest.mark.parametrize("how", ["return", "error", "exit", "ctrl-c", "kill"])
def test_a_task_in_a_spare_sees_and_says_what_one_that_starts_cold_does(
    pool: Pool, how: str
) -> None:
    by_module = how in ("error", "exit")
    command = ("-m", "script", how) if by_module else ("-u", "-X", "dev", "script.py", how)
    cold = ended(pool.cold(*command), pool.lines)
    warm = ended(pool.warm(pool.spares(*command)), pool.lines)
    assert warm == cold
    status = {"return": 0, "error": 1, "exit": 3, "ctrl-c": -2, "kill": -9}
    assert (cold[0], pool.lines.names) == (status[how], {"worker 0"})
    assert len(cold[1]["stdout"]) == 4, cold
    assert ("Traceback (most recent call last):" in cold[1]["stderr"]) == (
        how in ("error", "ctrl-c")
    )


def test_a_spare_has_imported_the_modules_and_says_so(pool: Pool) -> None:
    for modules in (["colorsys"], ["no_such_module", "json:no_such"]):
        spares = pool.spares("script.py", "return", "shows imports", modules=modules)
        _, found = ended(pool.warm(spares), pool.lines)
        assert found["stdout"][-1] == str(modules == ["colorsys"])
        assert found["stderr"] == []
    assert pool.lines.said[:2] == ["1 spare process is ready", "worker 0 starts in a spare process"]


def test_a_sitecustomize_of_the_user_is_run_too(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('customized', __file__)")
    pool.environment["PYTHONPATH"] = os.pathsep.join(
        [str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")]
    )
    time.sleep(0.2)
    cold = ended(pool.cold("script.py", "return"), pool.lines)
    assert ended(pool.warm(pool.spares("script.py", "return")), pool.lines) == cold
    assert cold[1]["stdout"][0] == f"customized {tmp_path / 'own' / 'sitecustomize.py'}"


def test_code_that_has_changed_starts_cold(pool: Pool, tmp_path: Path) -> None:
    library = tmp_path / "library.py"
    library.write_text("x = 1")
    os.utime(library, (1e9, 1e9))
    time.sleep(0.2)  # a file that is written while the spare imports it counts as changed
    spares = pool.spares("script.py", "return", modules=["library"], count=2)
    pool.fill(spares, "2 spare processes are ready")
    library.write_text("x = 2")
    os.utime(library, (1e9, 1e9))
    assert spares.take("chief", pool.environment) is None
    assert pool.lines.said[1:] == [
        f"chief starts cold: {library} has changed since the spares imported it"
    ]
    pool.fill(spares, "2 spare processes are ready")  # new ones, with the new code
    spares.close()


def test_another_environment_starts_cold(pool: Pool) -> None:
    spares = pool.spares("script.py", "return")
    pool.fill(spares)
    other = pool.environment | TASK | {"JAX_ENABLE_X64": "1"}
    assert spares.take("evaluator", other) is None
    said = "evaluator starts cold: its JAX_ENABLE_X64 is not that of the spares"
    assert pool.lines.said[-1] == said
    own = pool.environment | TASK | {"CUDA_VISIBLE_DEVICES": "3"}
    child = spares.take("worker 1", own)
    assert child is not None
    _, found = ended(child, pool.lines)
    assert "('CUDA_VISIBLE_DEVICES', '3')" in found["stdout"][1]
    assert spares.take("worker 2", own) is None
    assert pool.lines.said[-1] == "worker 2 starts cold: no spare is ready"


def test_dead_and_stopped_spares_are_replaced(pool: Pool) -> None:
    spares = pool.spares("script.py", "return", count=2)
    pool.fill(spares, "2 spare")
    dead, stopped = children()
    os.kill(dead, signal.SIGKILL)
    pool.fill(spares, "2 spare")
    (new,) = children() - {dead, stopped}
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: "T" in Path(f"/proc/{stopped}/stat").read_text().split()[2])
    child = spares.take("worker 0", pool.environment | TASK)  # after some seconds
    assert child is not None and child.pid == new
    assert ended(child, pool.lines)[0] == 0
    spares.close()


def children() -> set[int]:
    """The children of this process that hold spares."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {n for n in map(int, text.split()) if b"SPMDTRAIN_SPARE" in environment_of(n)}


def environment_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def test_spares_that_cannot_start_are_given_up(pool: Pool) -> None:
    (pool.folder / "sitecustomize.py").write_text("raise SystemExit(1)")
    pool.environment["PYTHONPATH"] = str(pool.folder)
    spares = pool.spares("script.py", "return")
    pool.fill(spares, "no spares from now on: they end before they are ready")
    assert pool.lines.found == {"stdout": [], "stderr": []}
    assert children() == set()


@pytest.mark.slow
def test_a_module_that_starts_a_backend_is_not_imported_ahead(pool: Pool) -> None:
    (pool.folder / "eager.py").write_text("import jax\njax.devices()\n")
    spares = pool.spares("script.py", "return", modules=["eager"])
    pool.fill(spares, "no spares from now on: the import of eager starts a JAX backend")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_spares_end_with_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """Also without the guardian, which a reaper is."""
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    code = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from spmdtrain.launch.child import Reaper
from spmdtrain.launch.spare import Imports, Spares
class Lines:
    def line(self, name, stream, text): print(text)
imports = Imports(["json"], ".", keeps_memory=False)
reaper = Reaper("reaped")
reaper._process.kill()
command = [sys.executable, "script.py"]
own = dict(os.environ)
spares = Spares(2, command, own, imports, Path("spare"), Lines(), reaper, print)
while True:
    spares.fill()
    sys.stdout.flush()
    time.sleep(0.01)
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parents[3])],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "2 spare processes are ready\n"
    found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    held = [int(n) for n in found if b"SPMDTRAIN_SPARE" in environment_of(int(n))]
    assert len(held) == 2
    launcher.send_signal(number)
    launcher.wait(BOUND)
    launcher.stdout.close()
    wait_until(lambda: not any(environment_of(n) for n in held))
    assert not (tmp_path / "ran").exists()


# What a spare imports.


def imports_of(folder: Path, files: Mapping[str, str], *command: str, **variables: str) -> Imports:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return Imports.of_command([sys.executable, *command], variables)


FILES = {
    "main.py": "import numpy, helper\nfrom flax import nnx\nfrom parts import b\n"
    "def later(): import ray",
    "helper.py": "import optax\nimport main\n",
    "parts/__init__.py": "from . import a\n",
    "parts/a.py": "from ..parts.c import x\nimport PIL.Image",
    "parts/b.py": "import keras",
    "parts/c.py": "from spmdtrain.models import MLP\nx: int = 1",
}


def test_libraries_are_imported_ahead_and_modules_of_the_user_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    libraries = ["numpy", "optax", "flax", "flax.nnx", "spmdtrain.models", "PIL.Image", "keras"]
    for command in (["main.py", "--x"], ["-u", "-W", "error", "-m", "main"]):
        found = imports_of(tmp_path, FILES, *command)
        own = [name for name in found.modules if name in (*libraries, "ray", "main", "helper")]
        assert [name for name in own if name != "spmdtrain.models.MLP"] == libraries
        assert found.path == str(tmp_path) and not found.keeps_memory
        assert "spmdtrain.train.command" in found.modules
    for command in (["-m", "spmdtrain.run"], ["-m", "spmdtrain", "run"]):
        found = imports_of(tmp_path, FILES, *command, "--seed", "1", "--config", "parts/b.py")
        assert {"keras", "optax", "spmdtrain.models"} <= {*found.modules} and found.keeps_memory
        assert found.modules[0] == "spmdtrain.config.command_line"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "import os\nos.environ['KERAS_BACKEND'] = 'jax'",
            r":2 sets KERAS_BACKEND, .*\(KERAS_BACKEND=jax p",
        ),
        ("if x:\n  os.environ.setdefault('A', 'b')", ":2 sets A, "),
        ("os.environ[x] = 'b'", ":1 sets environment variables, .*NAME=VALUE"),
        ("from os import environ\nenviron.update(a=1)", ":2 sets environment variables"),
    ],
)
def test_a_file_that_changes_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"main.py": "import helper", "helper.py": line}
    with pytest.raises(UserError, match=f"helper.py{says}"):
        imports_of(tmp_path, files, "main.py")


def test_a_file_that_sets_what_is_set_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import os\nos.environ['A'] = 'b'\nos.environ.setdefault('C', 'd')"
    assert imports_of(tmp_path, {"main.py": text}, "main.py", A="b", C="other").modules
    inside = "import os\ndef f(): os.environ['A'] = 'b'"
    assert imports_of(tmp_path, {"main.py": inside}, "main.py").modules


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["true"], r"; true is no Python: leave --warm-spares out"),
        (["python", "-c", "pass"], r"; it has -c: leave out that or --warm-spares"),
        (["python", "-I", "script.py"], r"; it has -I: leave out that or --warm-spares"),
        (["python", "no-such.py"], r"; no-such.py is no file: leave --warm-spares out"),
        (["python", "-m"], r"; it has no module and no script: leave --warm-spares out"),
    ],
)
def test_commands_without_imports_are_refused(
    capsys: pytest.CaptureFixture[str], command: list[str], says: str
) -> None:
    assert main(["--processes", "1", "--warm-spares", "1", "--", *command]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"^error: --warm-spares needs a command of the form .*{says}\n$", error)


def test_the_first_restart_after_progress_is_at_once() -> None:
    restarts = Restarts(3, first_at_once=True)
    assert [restarts.next(5), restarts.next(5), restarts.next(5)] == [0, 1, 2]
    assert restarts.next(5) is None
    assert restarts.next(6) == 0
    assert restarts.note(0.0) == "restart 1 of 3 at once"
    assert restarts.note(2.0, "worker 1") == "restart 1 of 3 of worker 1 in 2 s"
