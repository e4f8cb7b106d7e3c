"""Subprocesses that send messages: a result counts, whatever its process does after it."""

import time

import pytest

from spmdtrain.plan.command import EndedError, run_child

SENDS = """
import time
from spmdtrain.plan import command as json_subprocess
json_subprocess.send("progress", 1)
json_subprocess.send("result", 2)
json_subprocess.end_messages()
"""


def test_a_process_that_does_not_end_after_its_result_is_killed() -> None:
    began, heard = time.monotonic(), list[tuple[str, int]]()
    result = run_child(
        ["-c", SENDS + "time.sleep(100)"], {}, lambda *said: heard.append(said), seconds_to_end=0.5
    )
    assert tuple(result) == ("result", 2) and heard == [("progress", 1), ("result", 2)]
    assert time.monotonic() - began < 50


def test_one_that_fails_after_its_result_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EndedError, match="ended with code 3, see above"):
        run_child(["-c", SENDS + "print('why'); exit(3)"], {}, lambda *said: None)
    assert capsys.readouterr().err == "why\n"
