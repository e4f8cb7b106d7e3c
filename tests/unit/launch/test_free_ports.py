"""Ports of launched tasks: free until the tasks listen at them."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spmdtrain.errors import UserError
from spmdtrain.launch import task_env
from spmdtrain.launch.task_env import candidate_ports, free_ports
from spmdtrain.record import user_folders
from spmdtrain.record.user_folders import private_folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_no_connection_and_no_other_launcher_is_given_the_ports() -> None:
    (private_folder() / "next-port").write_text("100")
    with ThreadPoolExecutor(8) as pool:  # each opens the file by itself, as a process does
        ports = [port for ports in pool.map(free_ports, [3] * 40) for port in ports]
    assert len(set(ports)) == 120
    in_turn = candidate_ports()[100:250]  # something may listen at a few of them
    assert set(ports) <= set(in_turn)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = [socket.create_connection(server.getsockname()) for _ in range(20)]
        ephemeral = [connection.getsockname()[1] for connection in connections]
        for connection in connections:
            connection.close()
    assert max(ports) < min(ephemeral)


def test_a_port_that_something_listens_at_is_passed_over_and_the_turn_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = free_ports(1)[0]
    monkeypatch.setattr(task_env, "candidate_ports", lambda: range(first, first + 4))
    (private_folder() / "next-port").write_text("no number")
    with socket.create_server(("127.0.0.1", first + 2)):
        assert {*free_ports(3), *free_ports(3)} == {first, first + 1, first + 3}
        expected = f"4 free ports are needed.* only 3 of {first} to {first + 3} are free"
        with pytest.raises(UserError, match=expected):
            free_ports(4)


def test_all_high_ports_are_taken_where_the_ephemeral_ones_leave_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(task_env, "PORT_RANGE_FILE", setting)
    for text, last in (("32768\t60999\n", 32767), ("1024\t65535\n", 65535)):
        setting.write_text(text)
        assert task_env.candidate_ports()[-1] == last


@pytest.mark.timeout(30)
def test_a_file_of_the_turn_that_is_no_regular_file_is_named(tmp_path: Path) -> None:
    path = private_folder() / "next-port"
    makers: list[tuple[Callable[[Path], None], Callable[[Path], None]]] = [
        (os.mkfifo, os.unlink),
        (os.mkdir, os.rmdir),
        (lambda path: path.symlink_to(tmp_path / "target"), os.unlink),
    ]
    for make, remove in makers:
        make(path)
        with pytest.raises(UserError, match=r"next-port .*: remove it"):
            free_ports(1)
        remove(path)
    assert not (tmp_path / "target").exists()


def test_the_wait_for_another_process_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_folders, "_SECONDS_FOR_OTHERS", 0.2)
    with (
        user_folders.exclusive_file("next-port"),
        pytest.raises(UserError, match="another process has locked it"),
    ):
        free_ports(1)
    assert free_ports(1)
