"""A page about one or several runs: one HTML file, without network access."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from etils import epath

from spmdtrain.document.blocks import Page
from spmdtrain.document.html import PageServer, render_page
from spmdtrain.document.terminal import Terminal, byte_size
from spmdtrain.errors import (
    ExitCode,
    StorageError,
    UserError,
    exit_code_of,
    exit_if_output_is_closed,
    import_extra,
)
from spmdtrain.record import no_follow
from spmdtrain.record.storage import failures, folder_of, one_line
from spmdtrain.report.run_page import run_names, run_page
from spmdtrain.report.sections import RunReader

FILE_NAME = "report.html"


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """The workdirs of the runs: folders or URLs."""
    output: str | None = None
    """The file to write. Default: report.html in the workdir, or in the current folder for several
    runs."""
    follow: bool = False
    """Serve the page on 127.0.0.1 until Ctrl-C and refresh it when the runs write.
    No file is written."""
    port: int = 0
    """The port of --follow; 0 chooses a free one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the arguments of the process, and returns its exit code."""
    with exit_if_output_is_closed():
        options = tyro.cli(
            Options,
            args=arguments,
            prog="python -m spmdtrain.report",
            description=__doc__,
        )
        return exit_code_of(lambda: execute(options, Terminal()))


def execute(options: Options, terminal: Terminal) -> int:
    """Executes the parsed command and returns its exit code.

    Raises:
      UserError: If an option or a workdir is not valid, or a library is missing.
      StorageError: If a file cannot be read or written.
    """
    if not options.runs:
        raise UserError("no run is given: write python -m spmdtrain.report WORKDIR [WORKDIR ...]")
    for module in ("altair", "vl_convert"):  # before the files are read
        import_extra(module, "report", "pages with charts")
    report = RunReport(options.runs)
    if options.follow:
        if options.output is not None:
            raise UserError("--follow serves the page and writes no file: leave out --output")
        return follow_runs(report, options.port, terminal)
    if options.port:
        raise UserError("--port is for --follow, which serves the page: add it or remove --port")
    target = page_file(options.output, options.runs)
    began = time.monotonic()
    report.refresh(terminal)
    html = render_page(report.page())
    write_page(html, target)
    seconds = time.monotonic() - began
    terminal.line(f"{target}: {byte_size(len(html.encode()))}, written in {seconds:.1f} s")
    return ExitCode.DONE


class RunReport:
    """The page of runs, which is made again if their files have changed.

    Args:
      workdirs: The folders or URLs.

    Raises:
      UserError: If one is not the workdir of a run.
      StorageError: If one cannot be accessed.
    """

    def __init__(self, workdirs: Sequence[str]) -> None:
        names = run_names(workdirs)
        self._readers = [RunReader(d, n) for d, n in zip(workdirs, names, strict=True)]
        self._page: Page | None = None
        self._version = 0

    def refresh(self, terminal: Terminal | None = None) -> None:
        """Reads what has changed; shows the progress on `terminal` if it is a terminal."""
        if terminal is None:
            changed = [reader.refresh() for reader in self._readers]
        else:
            total = sum(reader.unread() for reader in self._readers)
            done = 0

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                terminal.advance(done // 1000)

            with terminal.progress("reading, kB", done=0, total=max(1, total // 1000)):
                changed = [reader.refresh(on_bytes) for reader in self._readers]
        if any(changed) or self._page is None:
            self._page = run_page([reader.data for reader in self._readers])
            self._version += 1

    def page(self) -> Page:
        """Returns the page of the last refresh."""
        assert self._page is not None
        return self._page

    def read(self) -> tuple[Page, str]:
        """Reads what has changed; returns the page and its version."""
        self.refresh()
        return self.page(), f"{id(self)}-{self._version}"


def follow_runs(report: RunReport, port: int, terminal: Terminal) -> int:
    """Serves the page until Ctrl-C and returns the exit code 0.

    Args:
      port: 0 chooses a free port.
      terminal: Receives the address.

    Raises:
      UserError: If the port cannot be used.
    """
    report.refresh(terminal)
    server = PageServer(report.read, port)
    terminal.line(f"{server.url} (only from this machine; Ctrl-C ends it)")
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
    return ExitCode.DONE


def page_file(output: str | None, workdirs: Sequence[str]) -> epath.Path:
    """Returns the file to write; raises `UserError` if `output` is a folder."""
    if output is None:
        return folder_of(workdirs[0] if len(workdirs) == 1 else ".") / FILE_NAME
    path = folder_of(output)
    if path.name in ("", "..") or path.is_dir():
        raise UserError(f"--output {output} is not a file: give the name of a file to write")
    return path


def write_page(html: str, path: epath.Path) -> None:
    """Writes a page; raises `StorageError` if the file cannot be written."""
    try:
        no_follow.write(path.parent, path.name, lambda file: file.write(html.encode()))
    except failures(path) as error:
        raise StorageError(f"{path} cannot be written: {one_line(error)}") from error
