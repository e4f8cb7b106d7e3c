"""Cached summaries of compiled programs: read again, or computed again if corrupted."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from plan_helpers import FOUND

from spmdtrain.plan.summary import read_summary, sealed


def keep(folder: Path, name: str = "a") -> Path:
    path = folder / f"{name}.json"
    path.write_bytes(sealed(name, json.dumps(dataclasses.asdict(FOUND)).encode()))
    return path


def test_a_summary_is_read_as_it_was_kept(tmp_path: Path) -> None:
    assert read_summary(keep(tmp_path)) == FOUND


def test_a_summary_with_one_other_digit_is_not_used(tmp_path: Path) -> None:
    path = keep(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"123456", b"123457"))
    assert read_summary(path) is None


def test_a_summary_of_another_program_is_not_used(tmp_path: Path) -> None:
    assert read_summary(keep(tmp_path).rename(tmp_path / "b.json")) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"\xff\n{}",
        sealed("x", b"[" * 100_000),
        sealed("x", b"null"),
        sealed("x", b"{}"),
        sealed("x", b'{"collectives": 1}'),
    ],
)
def test_what_is_no_summary_is_not_used(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert read_summary(tmp_path / "x.json") is None


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert read_summary(tmp_path / "pipe.json") is None
