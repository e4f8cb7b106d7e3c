"""How the launchers of several machines find each other, and what they refuse."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from spmdtrain.cluster.spec import Address
from spmdtrain.errors import UserError
from spmdtrain.launch.command import main
from spmdtrain.launch.machines import Cluster, Machines, Peer
from spmdtrain.launch.task_env import free_ports, training_tasks

TOKEN = b"the token of the job"


class NoSignals:
    """Stands for the signals of a launcher, which the test's process has only one of."""

    received: signal.Signals | None = None
    wait = staticmethod(time.sleep)


class Found:
    """Launchers in threads, and the leader that each has found; None where it leads itself."""

    def __init__(self, folder: Path, count: int, minimum: int | None) -> None:
        self.addresses = [Address("127.0.0.1", port) for port in free_ports(count)]
        self.folder, self.minimum = folder, minimum
        self.machines: dict[int, Machines] = {}
        self.leaders: dict[int, Peer | None] = {}
        self.errors: dict[int, Exception] = {}
        self.signals = NoSignals()
        self.lines: list[str] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._gone: set[int] = set()

    def start(self, *ranks: int, token: bytes = TOKEN, minimum: int | None = None) -> None:
        for rank in ranks:
            self._gone.discard(rank)
            least = self.minimum if minimum is None else minimum
            cluster = Cluster(
                training_tasks(len(self.addresses)), self.addresses, rank, token, least
            )
            thread = threading.Thread(target=self._run, args=(rank, cluster))
            thread.start()
            self._threads.append(thread)

    def _run(self, rank: int, cluster: Cluster) -> None:
        """Leads or follows, and seeks again when the leader is lost."""
        signals: Any = self.signals
        with Machines(cluster, str(self.folder), self.lines.append, signals) as machines:
            self.machines[rank] = machines
            again = False
            while self._continues(rank):
                try:
                    leader = machines.seek(again=again)
                except Exception as error:
                    self.errors[rank] = error
                    return
                again = True
                self.leaders[rank] = leader
                while self._continues(rank) and (leader.is_open if leader else machines.is_enough):
                    machines.poll()
                    if leader is not None:
                        leader.receive()
                    time.sleep(0.02)
                self.leaders.pop(rank, None)
                if leader is not None:
                    leader.close()
        del self.machines[rank]

    def _continues(self, rank: int) -> bool:
        return not self._ended.is_set() and rank not in self._gone

    def end(self, *ranks: int) -> None:
        self._gone |= {*ranks}

    def stop(self) -> None:
        self._ended.set()
        self.signals.received = signal.SIGTERM
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def wait_for(self, expected: Mapping[int, int | None], seconds: float = 30) -> None:
        """Waits until each launcher follows the expected one."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            leaders = {r: peer.rank if peer else None for r, peer in dict(self.leaders).items()}
            if leaders == expected:
                return
            time.sleep(0.05)
        raise AssertionError((leaders, expected, self.lines, self.errors))


Start = Callable[..., Found]


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def make(count: int, minimum: int | None = None) -> Found:
            found = Found(tmp_path, count, minimum)
            stack.callback(found.stop)
            return found

        yield make


def test_the_lowest_leads_and_a_lost_one_is_replaced_and_follows_when_it_is_back(
    launchers: Start,
) -> None:
    job = launchers(4, 2)
    job.start(3, 1, 2, 0)
    job.wait_for({0: None, 1: 0, 2: 0, 3: 0})
    job.end(0)
    job.wait_for({1: None, 2: 1, 3: 1})
    job.start(0)  # it finds a leader, and takes nothing over
    job.wait_for({0: 1, 1: None, 2: 1, 3: 1})
    job.end(2)
    job.wait_for({0: 1, 1: None, 3: 1})
    assert job.machines[1].names == ["chief", "worker 0", "worker 2"]


def test_a_minority_does_not_continue(launchers: Start) -> None:
    job = launchers(3, 1)
    job.start(0, 1, 2)
    job.wait_for({0: None, 1: 0, 2: 0})
    job.end(1, 2)
    job.wait_for({})  # it seeks
    time.sleep(7)  # longer than it waits for enough others
    job.wait_for({})
    job.start(2)
    job.wait_for({0: None, 2: 0})


@pytest.mark.parametrize(
    ("ranks", "minimum", "enough"),
    [
        ((0, 1, 2, 3), None, True),
        ((0, 1, 2), None, False),
        ((1, 2, 3), 2, True),
        ((0, 3), 2, True),
        ((1, 2), 2, False),  # the other half might continue, too
        ((0, 3), 3, False),
        ((0,), 1, False),
    ],
)
def test_how_many_are_enough(ranks: Sequence[int], minimum: int | None, enough: bool) -> None:
    addresses = [Address("10.0.0.1", 2222 + rank) for rank in range(4)]
    cluster = Cluster(training_tasks(4), addresses, ranks[0], TOKEN, minimum)
    assert cluster.is_enough(ranks) is enough


def test_a_launcher_with_other_options_or_another_token_takes_no_part(launchers: Start) -> None:
    job = launchers(3, 2)
    job.start(0)
    job.start(2, token=b"the token of another job")
    time.sleep(3)
    assert not job.leaders and not job.errors
    job.start(1, minimum=1)
    until = time.monotonic() + 20
    while not job.errors and time.monotonic() < until:
        time.sleep(0.05)
    for refused, error in dict(job.errors).items():  # one of the two, or both
        mine, other = (1, 2) if refused else (2, 1)
        by, name = ("chief", "worker 0") if refused else ("worker 0", "chief")
        wanted = f"the launchers differ: --min-processes is {other} in {by} and {mine} in {name}"
        assert isinstance(error, UserError) and str(error) == wanted
    assert any(line.startswith("refused the launcher of") for line in job.lines), job.lines
    assert 2 not in job.leaders


def test_while_it_waits_a_launcher_says_why_another_does_not_come(
    launchers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdtrain.launch.machines.REPORT_INTERVAL", 1.0)
    job = launchers(3)
    job.addresses[1] = Address("no-such-host.invalid", 2222)
    job.start(0)
    job.start(2, token=b"the token of another job")
    until = time.monotonic() + 20
    wanted = ["no-such-host.invalid cannot be resolved", "it has another job token"]
    while not all(any(text in line for line in job.lines) for text in wanted):
        assert time.monotonic() < until, job.lines
        time.sleep(0.05)


def test_a_second_launcher_of_a_name_is_refused_and_the_first_stays(
    launchers: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdtrain.launch.machines.MOST_REFUSALS", 3)
    job = launchers(3, 2)
    job.start(0, 1, 2)
    job.wait_for({0: None, 1: 0, 2: 0})
    first = job.leaders[1]
    other = [*job.addresses]
    (port,) = free_ports(1)
    cluster = Cluster(training_tasks(3), other, 1, TOKEN, 2)
    own = Cluster(cluster.names, [other[0], Address("127.0.0.1", port), other[2]], 1, TOKEN, 2)
    with Machines(own, str(job.folder), job.lines.append, NoSignals()) as second:  # type: ignore[arg-type]
        second.cluster = cluster  # its address is that of the first, on a machine of its own
        with pytest.raises(UserError, match="another launcher is worker 0 of this job"):
            second.seek(again=False)
    assert first is not None and job.leaders[1] is first and first.is_open


CLUSTER = {"chief": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"]}
SERVERS = {**CLUSTER, "ps": ["127.0.0.1:2224"]}


@pytest.mark.parametrize(
    ("cluster", "kind", "options", "token", "message"),
    [
        (None, "", [], "x" * 16, "--processes is missing, and TF_CONFIG describes no other"),
        (CLUSTER, "worker", ["--processes", "2"], "x" * 16, "unset TF_CONFIG"),
        (CLUSTER, "worker", [], "", "need the job's token"),
        (CLUSTER, "worker", [], "short", "the token has 5 characters"),
        (CLUSTER, "worker", ["--ps", "1"], "x" * 16, "--ps needs --processes"),
        (CLUSTER, "worker", ["--evaluator"], "x" * 16, "--evaluator needs --processes"),
        (CLUSTER, "worker", ["--min-processes", "2"], "x" * 16, "is 2 of the 2 of TF_CONFIG"),
        (CLUSTER, "evaluator", [], "x" * 16, "this is an evaluator"),
        (SERVERS, "worker", [], "x" * 16, "the cluster has parameter servers"),
    ],
)
def test_what_launchers_of_several_machines_refuse(
    cluster: Any,
    kind: str,
    options: list[str],
    token: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if cluster is not None:
        config = {"cluster": cluster, "task": {"type": kind, "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("SPMDTRAIN_JOB_TOKEN", token)
    assert main([*options, "--", "python", "-c", ""]) == 2
    assert message in capsys.readouterr().err
