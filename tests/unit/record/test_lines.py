"""Files of lines: the times of a run from hand-made events, and lines that are appended."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from spmdtrain.record import no_follow
from spmdtrain.record.lines import (
    EVENTS_FILE,
    LinesFile,
    RunEvent,
    last_step,
    run_times,
    what_is_lost,
)
from spmdtrain.record.run import Run

# Killed between steps 20 and 30, down for 50 s, resumed from step 10: 10 steps are repeated.
KILLED: list[dict[str, Any]] = [
    {"time": 1000.0, "event": "start", "step": 0, "processes": 1, "devices": 8},
    {"time": 1040.0, "event": "phases", "step": 10, "seconds": {"compile": 20.0, "step": 20.0}},
    {"time": 1040.0, "event": "checkpoint", "step": 10},
    {"time": 1060.0, "event": "phases", "step": 20, "seconds": {"compile": 20.0, "step": 40.0}},
    {"time": 1110.0, "event": "start", "step": 10, "processes": 1, "devices": 8},
    {
        "time": 1170.0,
        "event": "phases",
        "step": 30,
        "seconds": {"restore": 10.0, "step": 44.0, "save": 6.0},
    },
    {"time": 1200.0, "event": "end", "status": "finished", "reason": ""},
]


def written(workdir: Path, *lines: str | dict[str, object]) -> Run:
    text = "".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines)
    (workdir / EVENTS_FILE).write_text(text)
    return Run(str(workdir))


def test_the_goodput_of_a_killed_and_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    events = written(tmp_path, *KILLED).events
    times = run_times(events)
    # Of the second start's 44 s for 20 steps, the first 10 were repeated.
    assert times.wall == 200 and times.productive == 40 + 22
    assert times.goodput == pytest.approx(62 / 200)
    lost = {kind: seconds for kind, seconds in times.lost.items() if seconds}
    assert lost == {"compile": 20, "repeated": 22, "down": 50, "restore": 10, "save": 6}
    assert last_step(events) == 30
    # As seen 100 s later, while no start runs.
    assert run_times(events, now=1300.0).goodput == pytest.approx(62 / 300)


@pytest.mark.parametrize(
    ("events", "processes", "logged", "found"),
    [
        ([], 2, None, {}),
        # The last event of the start before is of step 20 at 1060, the last line of step 24.
        (KILLED[:4], 1, None, {"lost_steps": 10, "lost_seconds": 90.0}),
        (KILLED[:4], 1, (24, 1070.0), {"lost_steps": 14, "lost_seconds": 80.0}),
        (KILLED[:4], 2, None, {"change": "rejoin", "lost_steps": 10, "lost_seconds": 90.0}),
        ([{**KILLED[0], "processes": 4}], 3, None, {"change": "loss", "lost_seconds": 150.0}),
        # A fault is found before its step; a line of an earlier start says nothing of this one.
        (
            [*KILLED[:5], {"time": 1112.0, "event": "fault", "step": 17, "reason": ""}],
            1,
            (24, 1070.0),
            {"lost_seconds": 40.0},
        ),
        (KILLED, 1, None, {"lost_steps": 20}),  # after its end no time is lost
    ],
)
def test_a_start_tells_what_is_lost_of_the_one_before(
    events: list[Any], processes: int, logged: tuple[int, float] | None, found: dict[str, Any]
) -> None:
    start: RunEvent = {"time": 1140.0, "event": "start", "step": 10, "processes": processes}
    nothing = {"lost_steps": 0} if events else {}
    assert what_is_lost(events, start, 1150.0, logged) == start | nothing | found


def test_fields_of_another_version_are_left_out(tmp_path: Path) -> None:
    assert written(tmp_path, *[line | {"host": "a"} for line in KILLED]).events == KILLED


def test_corrupted_and_forged_lines_are_left_out(tmp_path: Path) -> None:
    forged = [
        '{"time": 1e999, "event": "start", "step": 0}',
        '{"time": -5, "event": "start", "step": 0}',
        '{"time": 1.0, "event": "explode"}',
        '{"time": 1001.0, "event": "start", "lost_steps": -1}',
        '{"time": 1001.0, "event": "start", "lost_seconds": "1"}',
        '{"time": 1001.0, "event": "start", "change": 5}',
        '{"time": 1001.0, "event": "phases", "step": "x", "seconds": {}}',
        '{"time": 1001.0, "event": "phases", "step": 1, "seconds": {"step": NaN}}',
        '{"time": 1001.0, "event": "slow", "step": 1, "process": "chief", "share": "x"}',
        '{"time": 1001.0, "event": "slow", "step": 1, "process": ["chief"], "share": 0.5}',
        '{"time": 1001.0, "event": "phases", "st',
        "[" * 1000,
        '"start"',
    ]
    whole: list[str | dict[str, object]] = [KILLED[0], *forged, *KILLED[1:]]
    assert written(tmp_path, *whole).events == KILLED
    assert run_times([]).goodput == 0
    overlapping = [KILLED[0], {**KILLED[1], "seconds": {"step": 1e9}}]
    assert run_times(written(tmp_path, *overlapping).events).goodput == 1


def free() -> None:
    """The check of a lock that no other run has taken."""


def test_an_incomplete_last_line_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder = epath.Path(tmp_path)
    LinesFile(tmp_path, "lines.jsonl", folder, free).append({"a": 1})
    with (tmp_path / "lines.jsonl").open("a") as file:
        file.write('{"a": ')  # a kill within a write
    LinesFile(tmp_path, "lines.jsonl", folder, free).append({"a": 2})
    assert (tmp_path / "lines.jsonl").read_text() == '{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize("change", ["renamed", "removed"])
def test_a_file_that_another_program_moves_is_created_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "lines.jsonl"
    lines = LinesFile(tmp_path, path.name, epath.Path(tmp_path), free)
    lines.append({"a": 1})
    lines.append({"a": 2})  # the file stays open
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
    path.replace(tmp_path / "old.jsonl") if change == "renamed" else path.unlink()
    lines.append({"a": 3})
    lines.close()
    assert path.read_bytes() == b'{"a": 3}\n'


def test_lines_in_quick_succession_open_the_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, now, open_file = [], [0.0], no_follow.open_file

    def counting_open(*arguments: Any) -> int:
        opened.append(now[0])
        return open_file(*arguments)

    monkeypatch.setattr(no_follow, "open_file", counting_open)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = LinesFile(tmp_path, "lines.jsonl", epath.Path(tmp_path), free)
    for now[0] in (10.0, 10.5, 11.0, 11.5, 20.0, 30.0, 30.1):
        lines.append({"a": 1})
    # Closed after the first line of each burst, and open until the burst has ended.
    assert opened == [10.0, 10.5, 30.0, 30.1]
    assert (tmp_path / "lines.jsonl").read_bytes() == b'{"a": 1}\n' * 7
    lines.close()
