"""Snapshots in memory: complete or not used, for any layout, in a folder of their user alone."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src import distributed as jax_distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from linear_model import trainer

from spmdtrain import UserError
from spmdtrain.checkpoints import snapshot_memory
from spmdtrain.checkpoints.listing import Source
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.restore import whole_state
from spmdtrain.checkpoints.run_identity import Identity, describe_leaves
from spmdtrain.checkpoints.snapshot_memory import (
    FOLDER_VARIABLE,
    HostMemory,
    HostNeeds,
    Hosts,
    KeptParts,
    PartServer,
    PartTable,
    fetch_part,
    kept_bytes,
    open_memory,
    send_copy,
    snapshot_folder,
)
from spmdtrain.checkpoints.snapshots import Snapshots, with_snapshots
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.document.terminal import Terminal
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

P = PartitionSpec
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
SPECS = (P(), P("a"), P("b", "a"), P(None, "b"), P(("a", "b")), P("b"))
RUN, ROUNDS = 40, 8


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the snapshots of this host."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def state_of(spec: PartitionSpec, step: int = 7) -> TrainState:
    """A state with arrays of several dtypes, that of the kernel split by a specification."""
    values = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
    kernel = jax.device_put(values, NamedSharding(MESH, spec))
    everywhere = NamedSharding(MESH, P())
    number, key = jax.device_put((jnp.int32(step), jax.random.key(step)), everywhere)
    moments = jax.device_put(values.astype(jnp.bfloat16), NamedSharding(MESH, P("a")))
    return TrainState(number, {"kernel": kernel}, {"mu": moments}, {}, {}, key)


def as_shapes(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


class Start:
    """One start of a run in a workdir: takes snapshots, and finds those of earlier ones."""

    def __init__(self, workdir: Path, state: TrainState) -> None:
        workdir.mkdir(exist_ok=True)
        self.said: list[str] = []
        shapes = as_shapes(state)
        memory = open_memory(epath.Path(workdir), shapes)
        self.snapshots = Snapshots(memory, shapes, self.said.append)
        self.disk = Source(epath.Path(workdir) / "checkpoints", [])

    def take(self, state: TrainState, *, saved: int = 0, **changes: Any) -> None:
        config = config_as_json(RunConfig(global_batch_size=8))
        identity = Identity(config, {}, describe_leaves(state), "", **changes)
        self.snapshots.take(
            state,
            int(state.step),
            identity,
            {"loss": 0.5},
            epoch={},
            callbacks={},
            positions={},
            saved=saved,
        )
        self.snapshots.wait()

    def newest(self, like: TrainState) -> tuple[Manifest, TrainState]:
        """The newest snapshot, in the shardings of a state."""
        source = with_snapshots(self.disk, self.snapshots, RUN)
        manifest = source.read_manifest(source.steps[-1])
        wanted = whole_state(as_shapes(like), jax.tree.map(lambda x: x.sharding, like))
        fields = source.read_arrays(manifest, wanted.fields)
        empty: dict[str, Any] = {"model_state": {}, "averaged": {}}
        return manifest, TrainState(**empty | dict(fields))

    @property
    def path(self) -> Path:
        """The folder of the only process' snapshots."""
        memory = self.snapshots.memory
        return memory.root / memory.run / "0"

    def end(self, *, keep: bool = True) -> None:
        self.snapshots.keep = keep
        self.snapshots.close()


@contextlib.contextmanager
def started(workdir: Path, state: TrainState, *, keep: bool = True) -> Iterator[Start]:
    start = Start(workdir, state)
    yield start
    start.end(keep=keep)


def bits(state: TrainState) -> dict[str, bytes]:
    leaves = named_leaves(vars(state) | {"key": jax.random.key_data(state.key)})
    return {name: np.asarray(x).tobytes() for name, x in leaves.items()}


@pytest.mark.slow
@settings(max_examples=ROUNDS, deadline=None)
@given(before=st.sampled_from(SPECS), after=st.sampled_from(SPECS))
def test_a_state_is_assembled_from_any_layout_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, before: PartitionSpec, after: PartitionSpec
) -> None:
    state, workdir = state_of(before), tmp_path_factory.mktemp("run")
    with started(workdir, state) as one:
        one.take(state)
    with started(workdir, state, keep=False) as two:
        manifest, found = two.newest(state_of(after, step=1))
    assert (manifest.step, manifest.metrics, two.said) == (7, {"loss": 0.5}, [])
    assert bits(found) == bits(state)
    assert found.params["kernel"].sharding.spec == after


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def without_parts(path: Path) -> None:
    """Leaves out the last parts, as if another process had kept them."""
    table = PartTable.parse(path.read_bytes())
    path.write_bytes(table.prefix(table.size - 64).to_json())
    data = path.with_name("arrays")
    data.write_bytes(data.read_bytes()[:-64])


CORRUPTIONS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a bit of an array": ("arrays", flip, "its checksum is wrong in the memory of the host of"),
    "the end": ("arrays", cut, "arrays has 895 bytes, and had 896"),
    "the table": ("parts.json", flip, "parts.json"),
    "the manifest": ("manifest.json", flip, "manifest.json"),
    "no data": ("arrays", Path.unlink, "arrays is missing"),
    "no table": ("parts.json", Path.unlink, "parts.json is missing"),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json is malformed"),
    "a part": ("parts.json", without_parts, "is on no host any more"),
}


@pytest.mark.parametrize("case", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupted_snapshot_is_named_and_the_one_before_is_used(
    case: tuple[str, Callable[[Path], None], str], tmp_path: Path
) -> None:
    file, corrupt, said = case
    older, newer = state_of(P("a"), step=7), state_of(P("a"), step=8)
    with started(tmp_path / "run", older) as one:
        one.take(older)
        one.take(newer)
    (name,) = (each for each in os.listdir(one.path) if each.startswith("8-"))
    corrupt(one.path / name / file)
    with started(tmp_path / "run", older) as two:
        source = with_snapshots(two.disk, two.snapshots, RUN)
        if file == "arrays" and corrupt is flip:  # found when it is read
            assert source.steps == [7, 8]
            with pytest.raises(CheckpointCorruptedError, match=said):
                two.newest(newer)
        else:
            assert source.steps == [7]
            assert bits(two.newest(older)[1]) == bits(older)
            assert said in two.said[0]


def test_two_generations_are_kept_and_an_interrupted_one_is_none(tmp_path: Path) -> None:
    with started(tmp_path / "run", state_of(P())) as one:
        for step in range(1, 5):
            one.take(state_of(P(), step))
        names = sorted(os.listdir(one.path))
        assert [name.partition("-")[0] for name in names] == ["3", "4"]
        os.rename(one.path / names[1], one.path / ".new")  # not renamed yet
    with started(tmp_path / "run", state_of(P())) as two:
        assert two.newest(state_of(P()))[0].step == 3
        two.snapshots.begin_after(2, None)  # a start that goes back makes step 3 again
        assert sorted(os.listdir(two.path)) == [".new"]


def test_a_run_that_ends_removes_its_snapshots_and_a_killed_one_does_not(tmp_path: Path) -> None:
    for keep in (True, False):
        with started(tmp_path / "run", state_of(P()), keep=keep) as start:
            start.take(state_of(P()))
        assert start.path.parent.exists() is keep


def test_snapshots_of_a_left_trajectory_or_of_no_step_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with started(tmp_path / "run", state_of(P())) as one:
        one.take(state_of(P(), step=7), saved=5)
        (name,) = os.listdir(one.path)
        found = with_snapshots(Source(one.disk.folder, [4]), one.snapshots, RUN)
        assert found.steps == [4]
        assert "it follows checkpoint 5, which the workdir does not have any more" in one.said[0]
        assert with_snapshots(Source(one.disk.folder, [5]), one.snapshots, RUN).steps == [5, 7]
        assert with_snapshots(Source(one.disk.folder, [8]), one.snapshots, RUN).steps == [8]
        assert with_snapshots(Source(one.disk.folder, [5]), one.snapshots, 7).steps == [5]
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    saved = Manifest.parse((one.path / name / "manifest.json").read_bytes(), one.disk.folder)
    other = replace(saved.identity, trajectories={"another": 3})
    replace(saved, step=5, identity=other).write(one.disk.folder / "5")
    with started(tmp_path / "run", state_of(P())) as two:
        assert with_snapshots(Source(two.disk.folder, [5]), two.snapshots, RUN).steps == [5]
        assert (
            "it is of another trajectory than checkpoint 5, which the run has left" in two.said[0]
        )


def test_a_copied_workdir_has_no_snapshots(tmp_path: Path) -> None:
    with started(tmp_path / "run", state_of(P())) as one:
        one.take(state_of(P()))
    (tmp_path / "copy").mkdir()
    content = (tmp_path / "run" / "snapshots.json").read_bytes()
    (tmp_path / "copy" / "snapshots.json").write_bytes(content)
    with started(tmp_path / "copy", state_of(P())) as two:
        assert with_snapshots(two.disk, two.snapshots, RUN).steps == []
        assert two.path != one.path


def test_leftovers_of_runs_that_do_not_continue_are_removed(tmp_path: Path) -> None:
    def left(name: str) -> Path:
        with started(tmp_path / name, state_of(P())) as start:
            start.take(state_of(P()))
        return start.path.parent

    killed, finished, removed, again, old = map(left, ("a", "b", "c", "d", "e"))
    (tmp_path / "a" / "status.json").write_text('{"status": "running", "step": 0}')
    (tmp_path / "b" / "status.json").write_text('{"status": "finished", "step": 9}')
    (tmp_path / "c" / "snapshots.json").unlink()
    (tmp_path / "d" / "status.json").write_text('{"status": "failed", "step": 0}')
    (tmp_path / "d" / "snapshots.json").write_text('{"run": "another"}')
    (tmp_path / "e" / "status.json").write_text('{"status": "failed", "step": 0}')
    for path in (old, *old.iterdir()):
        os.utime(path, (time.time() - 90_000,) * 2)
    running = Start(tmp_path / "f", state_of(P()))
    with started(tmp_path / "g", state_of(P())):
        there = {x: x.exists() for x in (killed, finished, removed, again, old)}
        assert there == {killed: True, finished: False, removed: False, again: False, old: False}
        assert running.path.parent.exists()  # it has no workdir status, and is locked
    running.end()


def test_too_little_memory_is_refused_with_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_memory, "free_memory", lambda: 1000)
    with pytest.raises(UserError) as error:
        Start(tmp_path / "run", state_of(P()))
    text = str(error.value)
    assert "2 x 896 B for 1 process = 1.79 kB in " in text and "896 B while one is taken" in text
    assert "free memory: 1." in text  # and what the run has there already


def test_the_folder_belongs_to_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = snapshot_folder()
    assert (root.parent.stat().st_mode & 0o777, root.parent.parent) == (0o700, tmp_path)
    root.parent.chmod(0o755)
    with pytest.raises(UserError, match=f"mode 0700, .*set {FOLDER_VARIABLE} to a folder"):
        snapshot_folder()
    root.parent.chmod(0o700)
    os.rename(root.parent, tmp_path / "elsewhere")
    root.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="must be a folder of user"):
        snapshot_folder()
    root.parent.unlink()
    root.parent.mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no snapshots can be kept"):
        snapshot_folder()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(UserError, match="there is no folder"):
        snapshot_folder()


def test_a_snapshot_is_written_through_no_link(tmp_path: Path) -> None:
    with started(tmp_path / "run", state_of(P())) as one:
        target = tmp_path / "target"
        target.write_text("kept")
        (one.path / ".new").mkdir(parents=True)
        (one.path / ".new" / "arrays").symlink_to(target)
        one.take(state_of(P()))
        assert "could not be taken" in one.said[0] and target.read_text() == "kept"


# -- which process keeps what, and copies on other hosts -------------------------------------------


def test_copies_go_around_the_hosts() -> None:
    hosts = Hosts([[0, 1, 4], [2], [3, 5]])
    assert [hosts.partner(rank) for rank in range(6)] == [2, 2, 3, 0, 2, 1]
    assert [hosts.senders(rank) for rank in range(6)] == [[3], [5], [0, 1, 4], [2], [], []]
    assert Hosts([[0, 1]]).partner(1) is None


def test_what_another_host_holds_is_not_sent() -> None:
    here = Hosts([[0], [1]])
    replicated = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(MESH, P()))
    # All devices are of process 0: no other host has a part.
    assert KeptParts.of(replicated, here, 0).sent == {(0, 0): True}
    assert kept_bytes({"x": replicated}, here, 0) == (512, 512)
    assert kept_bytes({"x": replicated}, here, 1) == (0, 0)


def test_a_host_needs_two_generations_of_its_parts_and_of_the_copies_of_another() -> None:
    everywhere, split = (
        jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(MESH, spec))
        for spec in (P(), P(("a", "b")))
    )
    hosts = Hosts([[0, 1], [2, 3]])  # of 4 processes with 2 devices each
    leaves = {"x": everywhere, "y": split}
    needs = HostNeeds.of(leaves, hosts, 3, lambda device: device.id // 2)
    assert (needs.kept, needs.copies) == (512 + 4 * 64, 4 * 64)
    assert (needs.at_rest, needs.at_most) == (2 * (768 + 256), 2 * (768 + 256) + 768)


KEY = b"0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def serving(memory: HostMemory, most: int, start: str) -> Iterator[PartServer]:
    server = PartServer(memory, KEY, {0: most}, start)
    yield server
    server.close()


def test_a_partner_keeps_what_processes_of_the_job_send_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_distributed.global_state, "coordinator_address", "127.0.0.1:1")
    one = Start(tmp_path / "run", state_of(P()))
    one.take(state_of(P()))
    (name,) = os.listdir(one.path)
    here, table = one.snapshots.memory, one.snapshots.memory.table(0, name)
    (tmp_path / "other").mkdir()
    there = HostMemory(tmp_path / "other", here.run, here.hosts)
    there.open(None)
    with serving(there, table.size, name.partition("-")[2]) as server:
        size = table.size - 64
        send_copy(here, server.address, KEY, 0, name, size, "")
        assert there.table(0, name) == table.prefix(size)
        content = fetch_part(server.address, KEY, 0, name, 64, 128)
        assert bytes(content) == (one.path / name / "arrays").read_bytes()[64:192]
        with pytest.raises(OSError, match="does not give it"):
            fetch_part(server.address, KEY, 0, name, size, 64)
        with pytest.raises(OSError):
            fetch_part(server.address, KEY[::-1], 0, name, 64, 128)
        with pytest.raises(OSError):
            send_copy(here, server.address, KEY[::-1], 0, name, size, "")
    for most, start, why in (
        (size - 1, name.partition("-")[2], "more than the state"),
        (size, "0" * 16, "keeps no copies of it"),
    ):
        with serving(there, most, start) as server, pytest.raises(OSError, match=why):
            send_copy(here, server.address, KEY, 0, name, size, "")
    assert there.names(0) == [name]
    there.close(remove=[0])
    assert os.listdir(tmp_path / "other") == []
    one.end()


# -- runs ------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


class Fails(Exception):
    pass


def fit(workdir: Path, capsys: Any, *, fails_at: int | None = None, **options: Any) -> str:
    def fail(event: Any) -> None:
        if event.step == fails_at:
            raise Fails

    options = {"snapshot_every_steps": 3, "log_hash_every": 1000, "steps": 12} | options
    one = trainer(
        workdir=str(workdir),
        checkpoint_every_steps=100,
        terminal=Terminal(),
        callbacks={"step": fail} if fails_at else {},
        **options,
    )
    with contextlib.suppress(Fails):
        one.fit((X, X[:, :1]))
    return str(capsys.readouterr().out)


def last_hash(workdir: Path) -> str:
    line = json.loads((workdir / "hashes.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 12
    return str(line["hash"])


@pytest.mark.slow
def test_a_failed_run_continues_from_its_snapshot_with_the_same_bits(
    tmp_path: Path, capsys: Any
) -> None:
    fit(tmp_path / "whole", capsys, snapshot_every_steps=None)
    fit(tmp_path / "run", capsys, fails_at=8)
    assert list((tmp_path / "run" / "checkpoints").glob("[0-9]*")) == []
    with pytest.raises(UserError, match="has a snapshot of step 6 in memory: use another workdir"):
        fit(tmp_path / "run", capsys, resume="never")
    with pytest.raises(UserError, match="was trained with seed=0, this run has 1"):
        fit(tmp_path / "run", capsys, seed=1)
    shown = fit(tmp_path / "run", capsys, resume="must")
    assert f"resumed from step 6 of {tmp_path}/run: snapshot in memory (this process)" in shown
    assert last_hash(tmp_path / "run") == last_hash(tmp_path / "whole")
    lines = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    events = [x for x in lines if x["event"] in ("start", "snapshot")]
    assert [(x["event"], x["step"], x.get("source")) for x in events] == [
        ("start", 0, "initial"),
        ("snapshot", 3, None),
        ("start", 6, "snapshot"),
        ("snapshot", 9, None),
    ]
    assert [*snapshot_folder().iterdir()] == []  # the run has finished


@pytest.mark.slow
def test_a_start_without_checkpoints_and_valid_snapshots_begins_at_step_0(
    tmp_path: Path, capsys: Any
) -> None:
    fit(tmp_path / "run", capsys, fails_at=5)
    (data,) = snapshot_folder().glob("*/0/3-*/arrays")
    flip(data)
    shown = fit(tmp_path / "run", capsys)
    assert "its checksum is wrong in the memory of the host of this process" in shown
    assert "resumed" not in shown and "finished at step 12" in shown


@pytest.mark.slow
def test_auto_chooses_a_cadence_by_the_cost(tmp_path: Path, capsys: Any) -> None:
    shown = fit(tmp_path / "run", capsys, snapshot_every_steps="auto", steps=60)
    found = re.search(
        r"snapshots every (\d+) steps: one costs (\S+) ms, and a step takes (\S+) ms", shown
    )
    assert found is not None, shown
    steps, cost, step = map(float, found.groups())
    assert steps == pytest.approx(100 * cost / step, rel=0.1, abs=1)
