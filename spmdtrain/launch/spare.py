"""Spare processes, which have imported what a task imports and take the place of a lost one."""

import ast
import contextlib
import json
import os
import re
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmdtrain.distributed.progress import TASK
from spmdtrain.errors import UserError
from spmdtrain.launch import hold
from spmdtrain.launch.child import Child, LineWriter, Reaper

# -- What a command will import, as far as its files show ------------------------------------------

# What every run imports, in the order in which it does.
_BEFORE = ("spmdtrain.config.command_line",)
_AFTER = (
    *("spmdtrain.train.command", "spmdtrain.checkpoints.orbax", "spmdtrain.adapters.nnx"),
    *("flax.nnx", "optax", "jaxlib.mlir.dialects.mhlo", "jaxlib.mlir.dialects.builtin"),
    "typeguard",  # of tyro
    "spmdtrain.trackers.tensorboard:import_writer",
)
_SERVERS = ("ray", "spmdtrain.parameter_server.executor")
_FLAGS = re.compile(r"-[uBOvbqdPs]+")  # options of Python that leave its start as it is
_NEEDS = (
    "--warm-spares needs a command of the form `python -m MODULE ...` or `python SCRIPT.py ...`, "
    "whose imports a spare can make ahead"
)


@dataclass(frozen=True)
class Imports:
    """The modules that a spare of a command imports, and how."""

    modules: Sequence[str]
    path: str
    """The folder that Python puts first in `sys.path` for the command."""
    keeps_memory: bool
    """Whether the command calls `keep_freed_memory` before its imports."""

    @classmethod
    def of_command(
        cls, command: Sequence[str], environment: Mapping[str, str], *, with_servers: bool = False
    ) -> "Imports":
        """Finds the modules that a command imports.

        These are the modules that each run imports, and the libraries that the user's files import
        at their top. The user's own modules are left to the task: they may depend on it.

        Args:
          command: A Python, its options, and a script or `-m` and a module.
          environment: The environment of the tasks.
          with_servers: Whether the job has parameter servers.

        Raises:
          UserError: If the command is not of that form, or if one of the user's files changes the
            environment, which the imports of the spare would not have seen.
        """
        module, rest = _target(command)
        is_run = module == "spmdtrain.run" or (module == "spmdtrain" and rest[:1] == ["run"])
        if module is None:
            script = Path(rest[0])
            found = _Scan(environment, [script.resolve().parent])
            found.read(script)
        else:
            found = _Scan(environment, [Path.cwd()])
            found.add(_option(rest, "--config") if is_run else module)
        names = [*_BEFORE, *found.libraries] if is_run else [*found.libraries, *_BEFORE]
        names += [*_AFTER, *(_SERVERS if with_servers else ())]
        path = os.getcwd() if module is not None else str(Path(rest[0]).resolve().parent)
        return cls(list(dict.fromkeys(names)), path, is_run)


def _target(command: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the module of a command and its arguments; or None, and the script before them."""
    program, *rest = command
    if not re.fullmatch(r"python[\d.]*(\.exe)?", Path(program).name):
        raise UserError(f"{_NEEDS}; {program} is no Python: leave --warm-spares out")
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        takes_value = rest[0] in ("-W", "-X")
        if not takes_value and not _FLAGS.fullmatch(rest[0]) and rest[0][:2] not in ("-W", "-X"):
            raise UserError(f"{_NEEDS}; it has {rest[0]}: leave out that or --warm-spares")
        del rest[: 1 + takes_value]
    if rest[:1] == ["-m"]:
        del rest[0]
        if rest:
            return rest[0], rest[1:]
    if not rest or not Path(rest[0]).is_file():
        what = f"{rest[0]} is no file" if rest else "it has no module and no script"
        raise UserError(f"{_NEEDS}; {what}: leave --warm-spares out")
    return None, rest


def _option(arguments: Sequence[str], name: str) -> str:
    """Returns the value of an option; empty if it is not given."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == name:
            return following
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return ""


@dataclass
class _Scan:
    """Collects the libraries that files of the user import, without running the files."""

    environment: Mapping[str, str]
    roots: list[Path]
    libraries: list[str] = field(default_factory=list)
    _seen: set[Path] = field(default_factory=set)

    def add(self, name: str) -> None:
        """Adds a file or a module, and what it imports."""
        if name.endswith(".py"):
            folder = (file := Path(name).resolve()).parent
            while (init := folder / "__init__.py").is_file():
                folder = folder.parent
                self.read(init)
            self.roots += [file.parent, folder]
            self.read(file)
        elif files := self._files(name.split(".")):
            for file in files:
                self.read(file)
        elif name:
            self.libraries.append(name)

    def _files(self, parts: Sequence[str]) -> list[Path]:
        """Returns the user's files that an import of a module runs; none for a library."""
        for root in self.roots if parts[0] != "spmdtrain" else ():
            packages = [root.joinpath(*parts[: n + 1]) for n in range(len(parts))]
            inits = [package / "__init__.py" for package in packages]
            files = [file for file in (*inits, packages[-1].with_suffix(".py")) if file.is_file()]
            if files:
                return files
        return []

    def read(self, file: Path) -> None:
        """Adds what a file imports at its top."""
        if (file := file.resolve()) in self._seen:
            return
        self._seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return  # the task reports it
        for node in _statements(tree.body):
            self._refuse_change(node, file)
        for node in tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.add(alias.name)
            elif isinstance(node, ast.ImportFrom):
                self._add_names(node, file)

    def _add_names(self, node: ast.ImportFrom, file: Path) -> None:
        if node.level:
            folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [folder, *(folder / alias.name for alias in node.names)]
            for path in names:
                for found in (path / "__init__.py", path.with_suffix(".py")):
                    if found.is_file():
                        self.read(found)
        elif node.module and node.module != "__future__":
            self.add(node.module)
            for alias in node.names:  # each may be a module
                self.add(f"{node.module}.{alias.name}")

    def _refuse_change(self, node: ast.stmt, file: Path) -> None:
        """Raises `UserError` if a statement may give a variable another value than it has."""
        for name, value, is_default in _changes(node):
            has = self.environment.get(name) if name is not None else None
            if has is None or not (is_default or has == value):
                what = name or "environment variables"
                setting = f"{name}={value}" if name and value else f"{name or 'NAME'}=VALUE"
                raise UserError(
                    f"{file}:{node.lineno} sets {what}, which the imports of a spare would not "
                    f"see: set it for the launcher ({setting} python -m spmdtrain.launch ...), or "
                    "leave --warm-spares out"
                )


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that an import of a module runs, apart from those in functions."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, inner, []))


def _changes(node: ast.stmt) -> Iterator[tuple[str | None, str | None, bool]]:
    """Yields the name and value of each variable that a statement sets; None if not constant.

    The third value is whether it sets only a variable that is absent.
    """
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environment(target.value):
                yield _constant(target.slice), _constant(node.value), False
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        method, arguments = call.func.attr, [*map(_constant, call.args), None, None]
        if method == "putenv" or (method == "update" and _is_environment(call.func.value)):
            yield None, None, False
        elif method == "setdefault" and _is_environment(call.func.value):
            yield arguments[0], arguments[1], True


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _constant(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# -- The spares of a job ---------------------------------------------------------------------------

_READY_TIMEOUT = 600.0  # seconds for the imports, which sleep most of the time
_TAKE_TIMEOUT = 3.0  # seconds for a spare to take a task
_END_TIMEOUT = 1.0  # seconds for killed spares to be gone
_MOST_FAILURES = 3  # spares in a row that end before they are ready
_OF_TASK = {"TF_CONFIG", TASK, "CUDA_VISIBLE_DEVICES"}
"""Variables that no import reads, so that a spare may have other values than its task."""


class _HeldOutput:
    """Keeps the lines of a spare in its pipes until it has a task."""

    def __init__(self, output: LineWriter) -> None:
        self._output, self._released = output, threading.Event()
        self._name: str | None = None

    def release(self, name: str | None) -> None:
        """Lets the lines through as those of a task; of a spare that ends they are left out."""
        self._name = name
        self._released.set()

    def line(self, name: str, stream: str, text: bytes) -> None:
        self._released.wait()
        if self._name is not None:
            self._output.line(self._name, stream, text)


class _Spare:
    """A spare process."""

    def __init__(self, pool: "Spares") -> None:
        self.ready = False
        self.began = time.monotonic()
        self.environment = dict(pool.environment)
        self._line, other = socket.socketpair()
        request = {
            "socket": other.fileno(),
            "folder": pool.folder,
            "modules": pool.imports.modules,
            "path": pool.imports.path,
            "keeps_memory": pool.imports.keeps_memory,
        }
        paths = [pool.folder, *filter(None, [self.environment.get("PYTHONPATH")])]
        self.environment["PYTHONPATH"] = os.pathsep.join(paths)
        self.output = _HeldOutput(pool.output)
        with contextlib.closing(other):
            self.child = Child(
                "spare",
                pool.command,
                {
                    **self.environment,
                    hold.SPARE: json.dumps(request),
                    "TF_CONFIG": hold.UNHELD,
                },
                self.output,
                pool.reaper,
                (other.fileno(),),
            )

    def message(self, seconds: float) -> dict[str, Any] | None:
        """Returns a message of the spare, empty if it has ended; None after some seconds."""
        text = b""
        until = time.monotonic() + seconds
        while not text.endswith(b"\n"):
            if not select.select([self._line], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            try:
                piece = self._line.recv(1 << 12)
            except OSError:
                piece = b""
            if not piece:
                return {}
            text += piece
        found: dict[str, Any] = json.loads(text)
        return found

    def give(self, name: str, environment: Mapping[str, str]) -> dict[str, Any] | None:
        """Makes it a task; returns its answer: `taken`, `changed`, or none."""
        names = {*environment, *self.environment}
        changes = {
            variable: environment.get(variable)
            for variable in names
            if environment.get(variable) != self.environment.get(variable)
        }
        self._line.settimeout(_TAKE_TIMEOUT)
        try:
            self._line.sendall(json.dumps(changes).encode() + b"\n")
        except OSError:
            return {}
        answer = self.message(_TAKE_TIMEOUT)
        if answer and "taken" in answer:
            self.child.name = name
            self.output.release(name)
            self._line.close()
        return answer

    def end(self) -> None:
        """Kills it."""
        self._line.close()
        self.output.release(None)
        self.child.kill()


class Spares:
    """The spare processes of a job: `count` of them, or none.

    Args:
      count: Number of spares.
      command: The command of the tasks.
      environment: The environment of a training task, without TF_CONFIG.
      imports: What a spare imports; None without spares.
      folder: A folder of the job, for the file that Python runs at its start.
      output: Receives the lines of spares that have become tasks.
      reaper: Kills the spares when the launcher ends.
      log: Prints a line of the launcher.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        imports: Imports,
        folder: Path,
        output: LineWriter,
        reaper: Reaper,
        log: Callable[[str], None],
    ) -> None:
        self.command, self.imports, self.folder = command, imports, str(folder)
        self.environment = {n: v for n, v in environment.items() if n not in _OF_TASK}
        self.output, self.reaper = output, reaper
        self._count, self._log = count, log
        self._spares: list[_Spare] = []
        self._ended: list[_Spare] = []
        self._failures, self._was_filled = 0, False
        folder.mkdir()
        shutil.copyfile(hold.__file__, folder / "sitecustomize.py")

    @property
    def ready(self) -> int:
        """Number of spares that can become a task at once."""
        return sum(spare.ready for spare in self._spares)

    @property
    def is_full(self) -> bool:
        """Whether all spares are ready, or no more are started."""
        return self.ready >= self._count

    def fill(self) -> None:
        """Replaces spares that have ended or hang, and starts those that are missing.

        It starts one at a time, so that their imports take little from the job. Call it often.
        """
        self._ended = [spare for spare in self._ended if not spare.child.poll()]
        for spare in list(self._spares):
            self._check(spare)
        if len(self._spares) < self._count and all(spare.ready for spare in self._spares):
            self._spares.append(_Spare(self))
            self._was_filled = True

    def _check(self, spare: _Spare) -> None:
        """Notes that a spare is ready, or gives it up."""
        answer = spare.message(0)
        if answer and "ready" in answer:
            spare.ready = True
            self._failures = 0
            ready = sum(spare.ready for spare in self._spares)
            if ready == self._count:
                spares = "1 spare process is" if ready == 1 else f"{ready} spare processes are"
                self._log(f"{spares} ready")
        elif answer is None and (spare.ready or time.monotonic() - spare.began < _READY_TIMEOUT):
            return  # it waits, or imports
        else:
            self._spares.remove(spare)
            self._end(spare)
            self._failures += not spare.ready
            why = answer.get("never") if answer else None
            if why is not None or self._failures >= _MOST_FAILURES:
                self._count = 0
                self.close()
                self._log(f"no spares from now on: {why or 'they end before they are ready'}")

    def take(self, name: str, environment: Mapping[str, str]) -> Child | None:
        """Makes a spare the process of a task, and returns it; None if the task must start cold.

        `environment` is the one of the task, complete. The line that says why a task starts cold is
        left out before there are spares.
        """
        own = {n: v for n, v in environment.items() if n not in _OF_TASK}
        differing = sorted(
            n for n in {*own, *self.environment} if own.get(n) != self.environment.get(n)
        )
        why = "no spare is ready"
        if differing:
            why = f"its {differing[0]} is not that of the spares"
        while not differing and (ready := [spare for spare in self._spares if spare.ready]):
            spare = ready[0]
            self._spares.remove(spare)
            answer = spare.give(name, environment)
            if answer and "taken" in answer:
                self._log(f"{name} starts in a spare process")
                return spare.child
            self._end(spare)
            if answer and "changed" in answer:
                why = f"{answer['changed']} has changed since the spares imported it"
                self.close()  # the others have imported it, too
        if self._was_filled:
            self._log(f"{name} starts cold: {why}")
        return None

    def _end(self, spare: _Spare) -> None:
        spare.end()
        self._ended.append(spare)

    def close(self) -> None:
        """Ends all spares."""
        for spare in self._spares:
            self._end(spare)
        self._spares.clear()
        until = time.monotonic() + _END_TIMEOUT
        while self._ended and time.monotonic() < until:
            self._ended = [spare for spare in self._ended if not spare.child.poll()]
            time.sleep(0.01)
