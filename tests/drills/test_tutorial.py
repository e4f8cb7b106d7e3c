"""The tutorial: its files and commands, and what it says that they print.

`UPDATE_DOCS=1 pytest tests/drills/test_tutorial.py -m drill` writes the outputs into the page.
"""

from pathlib import Path

import pytest
from helpers import REPOSITORY
from shown_output import UPDATE, commands_of, files_of, missing, printed, printed_here, update

PAGE = REPOSITORY / "docs" / "tutorial.md"


def test_the_commands_of_the_tutorial_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the page shows a first run
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text)
    shown = commands_of(PAGE)
    plain, one, eight, run, resumed, two, killed, plan = shown
    if UPDATE:
        update(PAGE, {command: printed(command, tmp_path) for command in shown})
        return
    # The first scripts run in this process, whose eight devices they use.
    for command in (plain, eight):
        output = printed_here(command, tmp_path, monkeypatch)
        assert missing(shown[command], output) == [], output
    # On one device and on two processes everything after the start is printed alike: the losses
    # of `output`, and those of the job whose worker is killed.
    after_start = shown[one][shown[one].index("step 1/") :]
    assert missing(after_start, output) == [], output
    for command in (run, resumed, killed, plan):
        output = printed(command, tmp_path)
        assert missing(shown[command], output) == [], output
        if command == killed:
            two_processes = shown[two].replace("runs/two", "runs/killed")
            assert missing(two_processes, output) == [], output
            assert (tmp_path / "runs" / "killed" / "killed").exists()
