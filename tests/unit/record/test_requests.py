"""Files of requests: which ones a run takes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from other_user import UID

from spmdtrain.errors import StorageError
from spmdtrain.record.requests import (
    PREFIX,
    Request,
    State,
    read_answer,
    send_request,
    take_requests,
    withdraw,
    write_answer,
)


def test_a_run_takes_the_requests_to_its_start_once_oldest_first(tmp_path: Path) -> None:
    sent = [Request("save", "s"), Request("profile", "s", steps=5), Request("stop", "s")]
    for number, request in enumerate(sent):
        send_request(tmp_path, request)
        os.utime(tmp_path / f"{PREFIX}{request.id}", ns=(0, 9 - number))
    mode = (tmp_path / f"{PREFIX}{sent[0].id}").stat().st_mode
    assert mode & 0o777 == 0o600
    assert [*take_requests(tmp_path, "s", set())] == sent[::-1]
    assert not [*tmp_path.iterdir()] and not [*take_requests(tmp_path, "s", set())]


def test_the_newest_answer_is_read_and_removed(tmp_path: Path) -> None:
    request = Request("save", "s")
    assert read_answer(tmp_path, request) is None
    write_answer(tmp_path, request, State.ACCEPTED, "later")
    write_answer(tmp_path, request, State.DONE, "saved")
    assert read_answer(tmp_path, request) == ("done", "saved")
    assert not [*take_requests(tmp_path, "s", set())]  # an answer is no request
    withdraw(tmp_path, request)
    assert not [*tmp_path.iterdir()]


def by_another_user(path: Path) -> None:
    os.chown(path, UID, UID)


def writable_by_a_group(path: Path) -> None:
    path.chmod(0o660)


def with_a_second_name(path: Path) -> None:
    (path.parent / "second").hardlink_to(path)


def behind_a_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def of_another_name(path: Path) -> None:
    path.rename(path.with_name(f"{PREFIX}0"))


def with_another_start(path: Path) -> None:
    path.write_text(path.read_text().replace('"s"', '"t"'))


def with_another_action(path: Path) -> None:
    path.write_text(path.read_text().replace('"stop"', '"pickle"'))


def with_a_further_field(path: Path) -> None:
    path.write_text(path.read_text().replace("{", '{"code": 1, ', 1))


def too_large(path: Path) -> None:
    path.write_text(path.read_text() + " " * 20_000)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(
            by_another_user,
            f"it belongs to user {UID}",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
        (writable_by_a_group, "others can write to it"),
        (with_a_second_name, "it has a second name"),
        (behind_a_link, "symbolic link"),
        (of_another_name, "for another start"),
        (with_another_start, "for another start"),
        (with_another_action, "not a request to a run"),
        (with_a_further_field, "not a request to a run"),
        (too_large, "more than 16,384 bytes"),
    ],
)
def test_a_run_names_other_requests_once_and_ignores_them(
    tmp_path: Path, change: Callable[[Path], None], why: str
) -> None:
    request, refused = Request("stop", "s"), set[str]()
    send_request(tmp_path, request)
    change(tmp_path / f"{PREFIX}{request.id}")
    with pytest.raises(StorageError, match=f"is ignored: .*{why}"):
        list(take_requests(tmp_path, "s", refused))
    valid = Request("save", "s")
    send_request(tmp_path, valid)
    assert [*take_requests(tmp_path, "s", refused)] == [valid]
