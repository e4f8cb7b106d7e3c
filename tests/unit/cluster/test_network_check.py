"""The doctor against real sockets, and its command as it ships."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import BOUND

from spmdtrain.cluster import network_check
from spmdtrain.cluster.command import Finding, check_network
from spmdtrain.cluster.spec import from_tf_config

NO_HOST = "no-such-host.invalid"
needs_ipv6 = pytest.mark.skipif(not network_check.is_here("::1"), reason="this machine has no IPv6")
ELSEWHERE = "203.0.113"  # addresses for documentation: no host has them


@contextlib.contextmanager
def listening(host: str = "127.0.0.1", backlog: int = 5) -> Iterator[int]:
    """A port that something listens on."""
    with socket.create_server((host, 0), backlog=backlog) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free() -> int:
    """A port that was free a moment ago."""
    with listening() as port:
        return port


@pytest.fixture
def all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host answers, and nothing listens there."""
    monkeypatch.setattr(network_check, "connect", lambda address: network_check.REFUSES)


def text(kind: str, index: int, /, **jobs: list[str]) -> str:
    return json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})


def findings(kind: str, index: int, /, **jobs: list[str]) -> list[Finding]:
    return check_network(from_tf_config(text(kind, index, **jobs)))


def errors(found: list[Finding]) -> dict[str, str]:
    return {one.what: one.text for one in found if one.level == "error"}


def warnings(found: list[Finding]) -> dict[str, str]:
    return {one.what: one.text for one in found if one.level == "warning"}


def fine(found: list[Finding]) -> dict[str, str]:
    return {one.what: one.text for one in found if one.level == "ok"}


# --- Ports ---


def test_a_cluster_on_this_machine_that_has_not_started_is_fine(free: int) -> None:
    found = findings("worker", 0, worker=[f"127.0.0.1:{free}", f"127.0.0.2:{free}"])
    assert not errors(found)
    assert not warnings(found)
    assert fine(found) == {
        "names": "all host names resolve (2)",
        "worker 0": f"127.0.0.1 is this machine, and port {free} is free",
        "machines": "the hosts of all other tasks answer (1)",
        "firewall": f"all training tasks connect to port {free} of 127.0.0.1 (worker 0); "
        "gloo and NCCL choose further ports: open all ports between these machines",
    }


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.2", "0.0.0.0", pytest.param("::1", marks=needs_ipv6)]
)
def test_a_taken_port_of_rank_0_is_an_error_whichever_address_holds_it(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        found = findings("chief", 0, chief=[f"127.0.0.1:{port}"], worker=["127.0.0.1:9"])
    assert errors(found) == {
        "chief": f"port {port} of this machine is not free: Address already in use; "
        "the other tasks must connect to it"
    }


def test_a_port_that_is_held_with_reuse_of_ports_counts_as_taken() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        assert network_check.why_not_free(server.getsockname()[1]) == "Address already in use"


def test_a_port_that_a_run_has_just_left_is_free() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        port = server.getsockname()[1]
        accepted, _ = server.accept()
        accepted.close()  # first, so that this side's half lingers, and without SO_REUSEADDR
        assert client.recv(1) == b""  # the port could not be bound
    assert network_check.why_not_free(port) is None


def test_a_taken_port_of_another_rank_is_a_warning_for_nothing_is_to_listen_there(
    free: int,
) -> None:
    with listening() as port:
        found = findings("worker", 1, worker=[f"127.0.0.1:{free}", f"127.0.0.1:{port}"])
    assert not errors(found)
    assert warnings(found)["worker 1"].startswith(f"port {port} of this machine is not free")


def test_a_coordinator_is_reached_or_has_not_started() -> None:
    with listening() as port:
        workers = [f"127.0.0.1:{port}", "127.0.0.1:9"]
        assert fine(findings("worker", 1, worker=workers))["worker 0"] == (
            f"accepts connections on port {port} of 127.0.0.1"
        )
    found = findings("worker", 1, worker=workers)
    assert not errors(found)
    assert warnings(found) == {
        "worker 0": f"127.0.0.1 answers, but nothing listens on port {port} yet: it may not have "
        "started"
    }


def test_a_machine_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_check, "CONNECT_SECONDS", 0.3)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening(backlog=0))
        for _ in range(3):  # its queue is full: to one more it says nothing, as a firewall would
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        began = time.monotonic()
        workers = [f"127.0.0.1:{port}", "127.0.0.1:9", "127.0.0.2:9"]
        found = findings("worker", 1, worker=workers)
        assert time.monotonic() - began < 3
    assert errors(found)["worker 0"].startswith(f"127.0.0.1, port {port}, cannot be reached (")
    assert set(errors(found)) == {"worker 0"}
    assert "machines" not in fine(found)  # of the two others, one answers


def test_tasks_that_do_not_train_contact_no_other_task(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(network_check, "connect", lambda address: pytest.fail("asked"))
    jobs = {"worker": [f"127.0.0.1:{free}"], "ps": ["127.0.0.2:9"], "evaluator": ["127.0.0.3:9"]}
    for kind in ("worker", "ps", "evaluator"):
        assert "firewall" not in fine(findings(kind, 0, **jobs))
    found = findings("evaluator", 5, worker=jobs["worker"])
    assert [one.what for one in found] == ["names"]


def test_a_run_without_a_cluster_needs_no_network() -> None:
    assert check_network(from_tf_config(None)) == [
        Finding("ok", "network", "a local run needs none")
    ]


# --- Names and addresses ---


def test_a_name_that_does_not_resolve_is_an_error_for_each_task_that_has_it(free: int) -> None:
    began = time.monotonic()
    found = findings(
        "worker",
        0,
        worker=[f"127.0.0.1:{free}", f"{NO_HOST}:1", f"{'a' * 70}.b:1", "a..b:1"],
        ps=[f"{NO_HOST}:2"],
    )
    assert time.monotonic() - began < 5
    broken = {what: why for what, why in errors(found).items() if "does not resolve" in why}
    assert set(broken) == {"worker 1", "worker 2", "worker 3", "ps 0"}
    assert broken["worker 1"].startswith(
        f"the host name {NO_HOST} does not resolve on this machine: "
    )
    assert broken["worker 2"].endswith("it is not a host name")
    assert "names" not in fine(found)


def test_a_slow_resolver_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    def resolve_host(host: str) -> list[str] | str:
        if host == "slow":
            time.sleep(6)
        return ["127.0.0.1"]

    monkeypatch.setattr(network_check, "resolve_host", resolve_host)
    monkeypatch.setattr(network_check, "RESOLVE_SECONDS", 0.2)
    began = time.monotonic()
    found = findings("worker", 0, worker=[f"quick:{free}", "slow:1"])
    assert time.monotonic() - began < 4
    assert errors(found) == {
        "worker 1": "the host name slow does not resolve on this machine: no answer in 0.2 s"
    }
    assert "worker 0" in warnings(found) | fine(found)


def test_names_are_asked_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_host(host: str) -> list[str] | str:
        time.sleep(0.3)
        return [host]

    monkeypatch.setattr(network_check, "resolve_host", resolve_host)
    began = time.monotonic()
    found = findings("worker", 0, worker=[f"127.0.1.{i}:1" for i in range(1, 41)])
    assert time.monotonic() - began < 3  # one after the other they take 12 seconds
    assert fine(found)["names"] == "all host names resolve (40)"


@pytest.mark.usefixtures("all_refuse")
def test_an_address_of_another_machine_is_a_warning() -> None:
    found = findings("worker", 1, worker=[f"{ELSEWHERE}.7:2222", f"{ELSEWHERE}.8:2222"])
    assert not errors(found)
    assert warnings(found)["worker 1"] == (
        f"{ELSEWHERE}.8 is not this machine, {socket.gethostname()}: is task.index right?"
    )


@pytest.mark.usefixtures("all_refuse")
@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "my.localhost", "127.0.0.1", "127.1.2.3", "[::1]", "0.0.0.0"]
)
def test_a_loopback_address_beside_another_host_is_an_error(host: str) -> None:
    elsewhere = f"{ELSEWHERE}.7:2222"
    found = findings("worker", 0, worker=[elsewhere, f"{host}:2222"])
    assert "means a different machine on each host" in errors(found)["worker 1"]
    assert "worker 0" not in errors(found)


def test_loopback_addresses_alone_are_fine(free: int) -> None:
    found = findings(
        "worker", 0, worker=[f"localhost:{free}", "127.0.0.1:9"], evaluator=["[::1]:9"]
    )
    assert not errors(found)


@pytest.mark.usefixtures("all_refuse")
@pytest.mark.parametrize(("ip", "warned"), [("127.0.1.1", True), (f"{ELSEWHERE}.9", False)])
def test_a_machine_whose_own_name_is_loopback_is_warned_of_gloo(
    monkeypatch: pytest.MonkeyPatch, free: int, ip: str, warned: bool
) -> None:
    ips = {f"{ELSEWHERE}.{n}": [f"{ELSEWHERE}.{n}"] for n in (7, 8)} | {"me": [ip]}
    monkeypatch.setattr(network_check, "resolve_host", ips.__getitem__)
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    found = findings("worker", 0, worker=[f"{ELSEWHERE}.7:{free}", f"{ELSEWHERE}.8:2222"])
    assert ("this machine" in warnings(found)) == warned
    assert not warned or f"its host name, me, resolves to {ip}" in warnings(found)["this machine"]


@pytest.mark.usefixtures("all_refuse")
def test_a_name_that_is_loopback_here_alone_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    ips = {
        "one": ["127.0.1.1"],
        "two": [f"{ELSEWHERE}.7"],
        socket.gethostname(): [],
    }  # as in Debian's /etc/hosts
    monkeypatch.setattr(network_check, "resolve_host", ips.__getitem__)
    found = findings("worker", 0, worker=[f"one:{free}", "two:2222"])
    assert not errors(found)
    assert warnings(found)["worker 0"].startswith(
        "one resolves on this machine to 127.0.1.1, which other"
    )


def test_two_names_of_one_address_and_port_are_an_error(free: int) -> None:
    workers = [f"127.0.0.1:{free}", f"localhost:{free}", "127.0.0.1:9", "127.0.0.2:9"]
    found = findings("worker", 0, worker=workers)
    assert errors(found) == {
        "worker 1": "localhost and 127.0.0.1 (worker 0) are the same address, 127.0.0.1, with "
        f"the same port, {free}: give each task its own"
    }


# --- The command ---


def command(
    config: str | None, *options: str, prelude: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the doctor as a user does, or after a prelude in the same interpreter."""
    how = ["-m", "spmdtrain.cluster"]
    if prelude is not None:
        how = [
            "-c",
            f"{prelude}\nimport sys; from spmdtrain.cluster.command import main; sys.exit(main())",
        ]
    hidden = ("TF_CONFIG", "SLURM_", "OMPI_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    env |= {} if config is None else {"TF_CONFIG": config}
    return subprocess.run(
        [sys.executable, *how, *options], env=env, capture_output=True, text=True, timeout=BOUND
    )


def printed(process: subprocess.CompletedProcess[str]) -> Any:
    """The one JSON object on standard output."""
    assert process.stdout.count("\n") == 1
    return json.loads(process.stdout)


@needs_ipv6
def test_the_command_prints_the_cluster_and_what_it_found(free: int) -> None:
    done = command(text("worker", 1, chief=["[::1]:9"], worker=["127.0.0.1:9", f"[::1]:{free}"]))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "role train, worker 1, rank 2 of 3"
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert rows == [
        ["chief", "[::1]:9", "0", ""],
        ["worker 0", "127.0.0.1:9", "1", ""],
        ["worker 1", f"[::1]:{free}", "2", "this one"],
    ]
    assert f"ok      worker 1: ::1 is this machine, and port {free} is free" in lines
    assert any(line.startswith("warning chief: ::1 answers, but nothing listens") for line in lines)


def test_the_command_prints_one_json_object_with_the_findings(free: int) -> None:
    config = text("worker", 0, worker=[f"127.0.0.1:{free}", f"{NO_HOST}:1"])
    done = command(config, "--json")
    assert done.returncode == 2
    assert done.stderr == "error: checks failed: worker 1, worker 0\n"
    output = printed(done)
    found = output.pop("findings")
    assert output == from_tf_config(config).as_json()
    assert {"level", "what", "text"} == {key for finding in found for key in finding}
    assert next(one["level"] for one in found if NO_HOST in one["text"]) == "error"


@pytest.mark.slow
def test_without_the_network_nothing_is_asked() -> None:
    config = text("chief", 0, chief=[f"{NO_HOST}:1"], worker=["localhost:1"])
    done = command(config, "--json", "--no-network")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done) == from_tf_config(config).as_json()
    shown = command(config, "--no-network")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert NO_HOST in shown.stdout
    assert "resolve" not in shown.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_broken_cluster_is_one_line_and_exit_code_2(options: tuple[str, ...]) -> None:
    done = command(text("worker", 3, worker=["a:1", "b:1"]), *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: TF_CONFIG: task.index is 3: cluster.worker has 2 tasks, the last is 1\n"
    )


@pytest.mark.slow
def test_no_cluster_at_all_is_a_local_run() -> None:
    done = command(None)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "role local, rank 0 of 1",
        "ok      network: a local run needs none",
    ]


@pytest.mark.slow
def test_an_unknown_option_is_exit_code_2() -> None:
    done = command(None, "--jsn")
    assert done.returncode == 2
    assert "--json" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_command_ends_while_a_resolver_still_hangs() -> None:
    hang = (
        "import time; from spmdtrain.cluster import network_check; "
        "network_check.resolve_host = lambda host: time.sleep(50)"
    )
    began = time.monotonic()
    done = command(text("worker", 0, worker=["a:1", "b:1"]), "--json", prelude=hang)
    assert time.monotonic() - began < 20
    assert done.returncode == 2
    assert (
        "a does not resolve on this machine: no answer in 2.5 s"
        in printed(done)["findings"][0]["text"]
    )
