"""The lock of a workdir: it waits for a holder that ends, names one that does not, and is alone."""

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from spmdtrain.checkpoints.save import check_shared
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record import run_files
from spmdtrain.record.run_files import RunFiles, WorkdirLock

# Locks the workdir, prints a line, and executes code.
HOLDER = """
import os, sys, time
from etils import epath
from spmdtrain.record.run_files import WorkdirLock
lock = WorkdirLock(epath.Path(sys.argv[1]), ".lock", "run", print)
print("locked", flush=True)
{code}
"""
UNTIL_ASKED = "sys.stdin.readline()"
FORKS = """
if os.fork():
    os._exit(0)
print("forked", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def holder(folder: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked the workdir; it ends when its input is closed."""
    command = [sys.executable, "-c", HOLDER.format(code=code), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process


def take(folder: Path, heard: list[str]) -> WorkdirLock:
    return WorkdirLock(epath.Path(folder), ".lock", "run", heard.append)


@pytest.mark.slow
def test_a_start_waits_for_a_holder_that_ends_and_says_so(tmp_path: Path) -> None:
    heard: list[str] = []
    with holder(tmp_path, UNTIL_ASKED) as process:

        def hear(line: str) -> None:
            heard.append(line)
            assert process.stdin is not None
            process.stdin.close()

        WorkdirLock(epath.Path(tmp_path), ".lock", "run", hear).close()
    (line,) = heard
    by = rf"in use by another run \(process {process.pid} on .+\): waiting up to 30 s for its end"
    assert re.search(by, line), line


@pytest.mark.slow
def test_a_holder_that_stays_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "PATIENCE", 0.3)
    with holder(tmp_path, UNTIL_ASKED) as process:
        with pytest.raises(StorageError, match=rf"process {process.pid} on .*: wait for its end"):
            take(tmp_path, [])
        process.communicate("\n")


@pytest.mark.slow
def test_a_holder_with_the_same_names_in_another_container_is_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "PATIENCE", 0.3)
    with holder(tmp_path, UNTIL_ASKED) as process:
        (tmp_path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
        with pytest.raises(StorageError, match="wait for its end"):
            take(tmp_path, [])
        process.communicate("\n")


@pytest.mark.slow
def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    heard: list[str] = []
    with holder(tmp_path, FORKS) as process:
        assert process.stdout is not None and process.stdout.readline() == "forked\n"
        process.wait()  # its child lives until it reads a line
        take(tmp_path, heard).close()
        process.communicate("\n")
    assert heard == []


def test_a_second_writer_of_this_process_is_refused_at_once(tmp_path: Path) -> None:
    heard: list[str] = []
    one = take(tmp_path, heard)
    with pytest.raises(UserError, match="in use by another run of this process"):
        take(tmp_path, heard)
    one.close()
    assert heard == []


def test_what_a_killed_check_of_a_shared_folder_left_is_removed_by_the_next_one(
    tmp_path: Path,
) -> None:
    (tmp_path / ".shared-00112233").touch()
    check_shared(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageError), (errno.EIO, StorageError), (errno.EACCES, UserError)],
)
def test_a_full_disk_at_the_start_is_no_wrong_use(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher and a scheduler try again after exit code 1, and not after 2."""
    make = os.makedirs

    def fail(path: str, *args: Any, **options: Any) -> None:
        if os.fspath(path) == str(tmp_path / "run"):
            raise OSError(number, os.strerror(number))
        make(path, *args, **options)

    monkeypatch.setattr(os, "makedirs", fail)
    with pytest.raises(kind, match=f"run cannot be written: .*{os.strerror(number)}"):
        RunFiles(str(tmp_path / "run"))
