"""The table of the trials that run."""

import pytest

from spmdtrain.document.terminal import Terminal
from spmdtrain.sweep.runner import LiveTable, RunningRow
from spmdtrain.sweep.trials import TrialState


def test_a_narrow_terminal_wraps_names_and_cuts_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    name = "learning_rate=1e-3,seed=0,dropout=0.1"
    rows = [RunningRow(name, "evaluate", 12_000, 200_000, 0.1234, 3723)]
    with LiveTable(Terminal(), "loss") as table:
        table.line("above")
        table.show(rows, {TrialState.WAITING: 3, TrialState.RUNNING: 1, TrialState.FAILED: 2})
    shown = capsys.readouterr().out
    for text in ("above", "evaluate", "12,000/200,000", "0.1234", "1:02:03", "seed=0"):
        assert text in shown
    assert "3 waiting, 2 failed" in shown


def test_a_log_file_has_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveTable(Terminal(), "loss") as table:
        table.line("started")
        table.show([RunningRow("a", "step", 1, 2, None, None)], {})
    assert capsys.readouterr().out == "started\n"
