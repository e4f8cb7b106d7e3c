"""Files and commands that a page shows, and comparison of what it shows with what they print."""

import io
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from helpers import BOUND, environment

FENCE = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.M | re.S)
# Measured values, which differ between runs.
MEASURED = re.compile(
    # A step that was compiled before is read from the cache.
    r"step (?:traced|compiled) in [\d.]+ s(?:, read from the cache in [\d.]+ s)?|"
    r"[\d,.]+ (?:examples|steps|tokens)/s|[\d:]+ left|\b[\d.]+ s\b|"
    r"goodput \d+ % of .*|"
    # Which checkpoint is complete when a process is killed depends on the speed of the disk.
    r"peak host memory of [\w ]+ was [\d.]+ \w+|resumed from step \d+"
)
OCCASIONAL = re.compile(r"\s+input_wait [\d.]+%")
# A line that is too long continues below, where its measured values decide.
CONTINUATION = re.compile(r"\n(?:\[[\w ]+\] )?  (?=\S)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def files_of(page: Path) -> dict[str, str]:
    """Returns the files that a page shows, by name."""
    return {name: text for _, name, text in FENCE.findall(page.read_text()) if name}


def commands_of(page: Path) -> dict[str, str]:
    """Returns the output that a page shows for each of its commands."""
    shown = {}
    for language, _, text in FENCE.findall(page.read_text()):
        if language == "console":
            line, _, output = text.removeprefix("$ ").partition("\n")
            assert text.startswith("$ ") and line not in shown, line
            shown[line] = output
    return shown


def printed_here(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs `python FILE` in this process, without the start of another one."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    output = io.StringIO()
    modules = {*sys.modules}
    with redirect_stdout(output):
        runpy.run_path(str(folder / command.rpartition(" ")[2]), run_name="__main__")
    for name in {*sys.modules} - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
            del sys.modules[name]
    return output.getvalue()


def printed(command: str, folder: Path) -> str:
    """Returns what a command prints, as in a shell with this Python; it must succeed."""
    words = shlex.split(command)
    env = environment()
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    words = [sys.executable if word == "python" else word for word in words]
    ended = subprocess.run(
        words,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def agree(shown: str, line: str) -> bool:
    """Returns whether two lines are equal, up to measured values and 2 % of numbers."""
    shown, line = (
        " ".join(MEASURED.sub("<>", OCCASIONAL.sub("", text)).split()) for text in (shown, line)
    )
    if NUMBER.sub("0", shown) != NUMBER.sub("0", line):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(line), strict=True)
    return all(
        math.isclose(float(a.replace(",", "")), float(b.replace(",", "")), rel_tol=0.02)
        for a, b in pairs
    )


def missing(shown: str, output: str) -> list[str]:
    """Returns the shown lines that a command did not print, or not in this order."""
    lines = iter(CONTINUATION.sub(" ", output).splitlines())
    return [
        wanted
        for wanted in CONTINUATION.sub(" ", shown).splitlines()
        if wanted != "..." and not any(agree(wanted, line) for line in lines)
    ]


def update(page: Path, outputs: dict[str, str]) -> None:
    """Writes outputs into a page.

    Where it shows `...`, as many lines before the first and after the last one as it has now; the
    lines between two of them stay.
    """

    def block(match: re.Match[str]) -> str:
        if match[1] != "console":
            return match[0]
        command, _, old = match[3].removeprefix("$ ").partition("\n")
        # gloo sometimes reports its connections.
        lines = [x.rstrip() for x in outputs[command].splitlines() if "peer ranks" not in x]
        shown = old.splitlines()
        if "..." in shown:
            first, last = (shown.index("..."), len(shown) - shown[::-1].index("..."))
            lines = [*lines[:first], *shown[first:last], *lines[last - len(shown) :]]
        return "\n".join(["```console", f"$ {command}", *lines, "```"])

    page.write_text(FENCE.sub(block, page.read_text()))


UPDATE = bool(os.environ.get("UPDATE_DOCS"))
"""Whether a test writes the outputs into the page instead of comparing them."""
