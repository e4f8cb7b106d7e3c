"""A Coordinator with Ray: functions that workers run, lost workers, and the end of a job."""

import importlib.util
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import BOUND
from processes import launching
from server_jobs import Lines, send, text_of, until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)

BEGINNING = """
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from spmdtrain import Coordinator, FixedShards

TRUE = np.arange(4, dtype=np.float32)
lock = threading.Lock()


def batch_of(number):
    x = np.random.default_rng(number).normal(size=(16, 4)).astype(np.float32)
    return x, x @ TRUE


@jax.jit
def value_and_grad(params, batch):
    x, y = batch
    return jax.value_and_grad(lambda params: jnp.mean((x @ params["w"] - y) ** 2))(params)


def raised(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

"""


def script(folder: Path, body: str) -> list[str]:
    """The command line of a script that has a coordinator, and within it this body."""
    path = folder / "script.py"
    path.write_text(
        BEGINNING + "with Coordinator() as coordinator:\n" + textwrap.indent(body, "    ")
    )
    return [sys.executable, "-u", str(path)]


def said(lines: Lines) -> list[str]:
    """What the chief has printed."""
    return [text.removeprefix("[chief] ") for _, text in lines if text.startswith("[chief]")]


UNTIL_BOTH_WORK = """
def where():
    time.sleep(0.05)
    return os.getpid()

there = set()
while len(there) < 2:
    there |= set(coordinator.fetch([coordinator.schedule(where) for _ in range(8)]))
"""
WHOLE = """
shared = coordinator.share(
    {"w": jnp.zeros(4)}, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
)
counter = coordinator.per_worker(lambda: iter(range(10**6)))

def step(number, counter, bias=0.0):
    params = shared.pull()
    loss, gradients = value_and_grad(params, batch_of(number))
    staleness = shared.push(gradients, loss)
    return {"loss": loss + bias, "of": os.getpid(), "made": next(counter), "stale": staleness}

values = [coordinator.schedule(step, number, counter, bias=1.0) for number in range(300)]
print("done at once:", coordinator.done())
coordinator.join()
print("done:", coordinator.done())
found = coordinator.fetch(values)
by_worker = {}
for one in found:
    by_worker.setdefault(one["of"], []).append(int(one["made"]))
print("workers:", len(by_worker), "own iterators:",
      all(sorted(made) == list(range(len(made))) for made in by_worker.values()))
print("devices:", coordinator.fetch(coordinator.schedule(jax.local_device_count)))
print("a value:", type(found[0]["loss"]).__name__, float(found[-1]["loss"]) < 1.1)
print("learned:", np.round(shared.pull()["w"]).astype(int).tolist())
params, opt_state = shared.state()
print("state:", np.round(params["w"]).astype(int).tolist())

again = coordinator.share(params, optax.sgd(0.0, momentum=0.9))
def one_push(number):
    params = again.pull()
    again.push({"w": np.ones(4, np.float32)}, 0.0)
coordinator.fetch([coordinator.schedule(one_push, n) for n in range(5)])
_, opt_state = again.state()
print("momentum:", [f"{x:.3f}" for x in jax.tree.leaves(opt_state)[0]])
asked = []
more = coordinator.share(params, optax.sgd(0.0, momentum=0.9), opt_state=opt_state,
                         partitioner=lambda *of: asked.append(of) or FixedShards(2)(*of))
print("partitioner:", sorted(set(asked)))
print("restored:", [f"{x:.3f}" for x in jax.tree.leaves(more.state()[1])[0]])

def fails(number):
    time.sleep(0.1)
    raise ZeroDivisionError(f"in {number}")

values = [coordinator.schedule(fails, number) for number in range(20)]
print("join:", raised(coordinator.join)[:21])
print("join again:", raised(coordinator.join))
print("fetch:", raised(lambda: coordinator.fetch(values[0])))
print("fetch of the last:", raised(lambda: coordinator.fetch(values[-1]))[:56])
coordinator.schedule(fails, 7)
while not coordinator._is_done:
    time.sleep(0.05)
print("schedule:", raised(lambda: coordinator.schedule(len, [])))
print("and on:", coordinator.fetch({"a": coordinator.schedule(len, [1, 2]), "b": 3}))

def twice(shared):
    gradients = shared.pull()
    shared.push(gradients, 0.0)
    shared.push(gradients, 0.0)

print("twice:", raised(lambda: coordinator.fetch(coordinator.schedule(twice, again))))
raised(coordinator.join)
def again_after_a_pull(shared):
    for _ in range(2):
        shared.push(shared.pull(), 0.0)

print("pulled again:", raised(lambda: coordinator.fetch(
    coordinator.schedule(again_after_a_pull, again))))
raised(coordinator.join)
print("in the chief:", raised(lambda: again.push(params, 0.0)))
print("of a value:", raised(lambda: coordinator.schedule(len, values[0])))
print("no function:", raised(lambda: coordinator.schedule(3)))
print("generator:", raised(lambda: coordinator.fetch(
    coordinator.schedule(lambda: (x for x in [])))))
raised(coordinator.join)
print("exits:", raised(lambda: coordinator.fetch(coordinator.schedule(sys.exit, 3))))
raised(coordinator.join)
print("of the chief:", raised(lambda: coordinator.schedule(lambda: coordinator)))
print("a lock:", raised(lambda: coordinator.schedule(lambda: lock)))
print("integers:", raised(lambda: coordinator.share({"w": np.ones(3, int)}, optax.sgd(1.0))))

def shapeless(shared):
    shared.pull()
    shared.push({"w": np.ones(3)}, 0.0)

print("of another shape:", raised(lambda: coordinator.fetch(
    coordinator.schedule(shapeless, again))))
raised(coordinator.join)
print("clipped after:", raised(lambda: coordinator.share(
    [np.ones(4), np.ones(3)], optax.chain(optax.trace(0.9), optax.clip_by_global_norm(1.0)))))

def spoils(number):
    params = again.pull()
    again.push({"w": np.full(4, np.nan, np.float32)}, 1.0)

coordinator.schedule(spoils, 0)
print("not finite:", raised(coordinator.join))

from spmdtrain import PreemptedExit
print("waits: for a signal")
try:
    while True:
        coordinator.schedule(time.sleep, 0.01)
except PreemptedExit:
    print("saving: what the script likes")
    raise
"""
LINES = [
    "done at once: False",
    "done: True",
    "workers: 2 own iterators: True",
    "devices: 2",  # of a worker
    "a value: ndarray True",
    "learned: [0, 1, 2, 3]",
    "state: [0, 1, 2, 3]",
    "momentum: ['4.095', '4.095', '4.095', '4.095']",  # 1 + 0.9 + ... + 0.9**4
    "partitioner: [((4,), 4)]",
    "restored: ['4.095', '4.095', '4.095', '4.095']",
    "join: ZeroDivisionError: in",
    "join again: nothing",
    "fetch: ZeroDivisionError: in 0",
    "fetch of the last: UserError: not run because another function raised ZeroD",
    "schedule: ZeroDivisionError: in 7",
    "and on: {'a': 2, 'b': 3}",
    "twice: UserError: push() must be called after pull(), and once in a function",
    "pulled again: UserError: push() must be called after pull(), and once in a function",
    "in the chief: UserError: push() was called outside a function that a worker runs: "
    "schedule one",
    "of a value: UserError: a Value cannot be an argument of a scheduled function: fetch it first",
    "no function: UserError: schedule() was given a int: expected a function",
    "generator: UserError: the function returns a generator, which cannot be sent; use a list",
    "exits: RuntimeError: the function called sys.exit(3)",
    "of the chief: UserError: a Coordinator cannot be used in a function that a worker runs",
    "integers: UserError: share() was given w of dtype int64: expected float arrays",
    "of another shape: UserError: push() was given w of shape (3,): the parameter has shape (4,)",
    "saving: what the script likes",
]


def test_a_job_does_what_tensorflows_does_says_what_cannot_be_and_can_save(tmp_path: Path) -> None:
    """One job for all of it, because each takes ten seconds to come together."""
    line = script(tmp_path, UNTIL_BOTH_WORK + WHOLE)
    with launching(line, "--ps", 2, processes=3, devices=2) as (process, lines):
        until(
            lambda: "waits: for a signal" in said(list(lines)) or process.poll() is not None, lines
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 75, text_of(lines)
    names = [line.partition(":")[0] for line in LINES]
    assert [text for text in said(lines) if text.partition(":")[0] in names] == LINES
    output = "\n".join(said(lines))
    assert "clipped after: UserError: strategy parameter_server: the optimizer's clip_by" in output
    (lock,) = [text for text in said(lines) if text.startswith("a lock: ")]
    assert "UserError: " in lock and "cannot be sent to workers: " in lock, lock
    assert "not finite: NonFiniteError: the parameters are not finite after a push" in output


@pytest.mark.nightly
def test_a_job_that_ends_while_workers_start_ends_quietly(tmp_path: Path) -> None:
    body = """
shared = coordinator.share({"w": jnp.zeros(4)}, optax.sgd(0.1))
print("sum", sum(coordinator.fetch([coordinator.schedule(int, n) for n in range(5)])))
"""
    with launching(script(tmp_path, body), "--ps", 1, processes=4) as (process, lines):
        assert process.wait(BOUND) == 0, text_of(lines)
    assert [text for _, text in lines] == ["[chief] sum 10", "[launch] finished"]


@pytest.mark.nightly
def test_a_lost_workers_call_is_made_again_and_pushed_once(tmp_path: Path) -> None:
    body = """
shared = coordinator.share({"w": np.zeros(64, np.float32)}, optax.sgd(1.0))

def step(number):
    shared.pull()
    shared.push({"w": np.full(64, -1.0, np.float32)}, 0.0)
    time.sleep(0.02)  # here it may be killed: its push has been made, and is made again
    return number

values = []
while not os.path.exists(sys.argv[1]):
    if len(values) == 200:  # more than the workers can have run by now
        print("begun")
    values.append(coordinator.schedule(step, len(values)))
coordinator.join()
print("returned:", coordinator.fetch(values) == list(range(len(values))))
print("pushed:", set(shared.pull()["w"].tolist()) == {float(len(values))})
"""
    enough = tmp_path / "enough"
    line = [*script(tmp_path, UNTIL_BOTH_WORK + body), str(enough)]
    with launching(line, "--ps", 2, processes=3) as (process, lines):
        until(lambda: "begun" in said(list(lines)), lines)
        for number in range(3):
            # Of worker 1 it is the whole task, which the launcher starts again.
            send(signal.SIGKILL, f"worker {number % 2}", "" if number == 1 else "ray::WorkerActor")
            until(lambda done=number: text_of(list(lines)).count(" is back") > done, lines)  # type: ignore[misc]
        enough.touch()
        assert process.wait(BOUND) == 0, text_of(lines)
    output = said(lines)
    assert "returned: True" in output and "pushed: True" in output, output
    assert text_of(lines).count("; restart 1 of 3 of worker 1") == 1
    assert re.search(r"worker 0 is lost .*; its call is run again", "\n".join(output))
