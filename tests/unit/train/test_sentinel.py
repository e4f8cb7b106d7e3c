"""The sentinel: every injected fault is found, and its device is named."""

import functools
import re
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from gradient_faults import NONE, SIGN, WIDTH, examples, fault, model, objective, with_fault
from helpers import saved_steps, status
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain import (
    CallbackContext,
    DeviceFaultError,
    MeshSpec,
    ReplicaError,
    RunConfig,
    ShardingOptions,
    StorageError,
    Trainer,
    TrainState,
    UserError,
    read_manifest,
)
from spmdtrain.checkpoints import checksums
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP
from spmdtrain.record.run import Run
from spmdtrain.sharding.mesh import resolve
from spmdtrain.sharding.placement import Placement, make_placement, use_placement
from spmdtrain.step.dispatch import Dispatch, Repeat
from spmdtrain.step.exact import FixedOrder
from spmdtrain.step.gradients import ANY_ORDER
from spmdtrain.strategies import DEFAULT
from spmdtrain.train import sentinel
from spmdtrain.train.schedule import Schedule
from spmdtrain.train.sentinel import FaultKind, GradientSums, Verdict, find_faulty, why_not_on

X, Y = examples()


def trainer(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": model(),
        "objective": objective,
        "optimizer": optax.adam(1e-3),
        "freeze": ("^fault",),
        "global_batch_size": 16,
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


class Checked:
    """The devices of a trainer, with a fault in some of the runs of a check."""

    def __init__(self, **options: Any) -> None:
        self.trainer = trainer(**options)
        self.state = self.trainer.functions.init(0)
        of, runs = NONE, range(0)

        class Sums(GradientSums):
            run = 0

            def __call__(self, state: TrainState, *given: Any) -> np.ndarray:
                self.run += 1
                of_run = with_fault(state, of if self.run in runs else NONE)
                self.last = super().__call__(of_run, *given)
                return self.last

        self.sums = sums = Sums(self.trainer.functions, self.trainer.placement)

        def compare(fault: np.ndarray, in_runs: range, first: int) -> Verdict | None:
            nonlocal of, runs
            of, runs, sums.run = fault, in_runs, 0
            with use_placement(self.trainer.placement):
                rows = slice(first, first + 16)
                batch = jax.device_put((X[rows], Y[rows]), self.trainer.placement.batch)
                return sums.compare(self.state, batch)

        self._compare = compare

    def verdict(
        self, of: np.ndarray = NONE, runs: range = range(1, 4), first: int = 0
    ) -> Verdict | None:
        """Returns the result of a check of 16 examples, with a fault in these runs."""
        return self._compare(of, runs, first)

    def old_value(self, leaf: int, element: int) -> float:
        """An element of the gradients of earlier examples, which a device may leave there."""
        params = {k: v for k, v in jax.device_get(self.state.params).items() if k != "fault"}

        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            return ((jnp.tanh(X[-2:] @ weights["first"]) @ weights["second"] - Y[-2:]) ** 2).sum()

        flat = jax.tree.leaves(jax.grad(loss)(params))[leaf].ravel()
        return float(flat[element % flat.size])


@functools.cache
def checked(*, strategy: str = "mirrored", devices: int = 8) -> Checked:
    mesh = MeshSpec(devices=tuple(range(devices)))
    return Checked(strategy=strategy, mesh=mesh, sharding=ShardingOptions(min_size=1))


@dataclass(frozen=True)
class Injected:
    """A fault, and the runs of a check in which it happens."""

    device: int
    leaf: int
    element: int
    bit: int  # -1: a stale value
    is_lasting: bool
    run: int  # of a transient fault


FAULTS = st.builds(
    Injected,
    device=st.integers(0, 7),
    leaf=st.integers(0, 1),
    element=st.integers(0, 95),
    bit=st.one_of(st.integers(0, 22), st.just(SIGN), st.just(-1)),
    is_lasting=st.booleans(),
    run=st.integers(1, 2),
)


def check_found(injected: Injected) -> None:
    devices = checked()
    place = {"leaf": injected.leaf, "element": injected.element}
    stale = devices.old_value(**place) if injected.bit < 0 else 0.0
    of = fault(injected.device, **place, bit=injected.bit, stale=stale)
    runs = range(1, 4) if injected.is_lasting else range(injected.run, injected.run + 1)
    found = devices.verdict(of, runs)
    kind, times = (FaultKind.LASTING, 3) if injected.is_lasting else (FaultKind.TRANSIENT, 1)
    assert found == Verdict(kind, [injected.device], [times], injected.leaf)


@pytest.mark.slow
@given(FAULTS)
@settings(max_examples=15)
def test_a_fault_is_found_and_its_device_is_named(injected: Injected) -> None:
    check_found(injected)


@pytest.mark.nightly
@given(FAULTS)
@settings(max_examples=200)
def test_200_faults_are_found_and_their_devices_are_named(injected: Injected) -> None:
    check_found(injected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fully_sharded", "zero"])
def test_devices_are_compared_under_other_strategies(strategy: str) -> None:
    devices = checked(strategy=strategy)
    assert devices.verdict() is None
    assert devices.verdict(fault(5, leaf=1, element=3, bit=0)) == Verdict(
        FaultKind.LASTING, [5], [3], 1
    )


@pytest.mark.slow
def test_of_two_devices_one_is_named_only_if_it_does_not_repeat_its_own_result() -> None:
    devices, flip = checked(devices=2), fault(1, leaf=0, element=7, bit=3)
    assert devices.verdict() is None
    assert devices.verdict(flip, range(1, 2)) == Verdict(FaultKind.TRANSIENT, [1], [1], 0)
    # Device 0 has repeated its result of this shard, but the same bit may have been wrong twice.
    assert devices.verdict(flip, range(2, 3)) == Verdict(FaultKind.UNCLEAR, [0, 1], [2, 1], 0)
    assert devices.verdict(flip, range(2, 4)) == Verdict(FaultKind.LASTING, [1], [2], 0)
    assert devices.verdict(flip) == Verdict(FaultKind.LASTING, [0, 1], [], 0)


@pytest.mark.slow
def test_a_device_with_another_copy_of_the_parameters_is_named() -> None:
    of = trainer()
    state = of.functions.init(0)
    whole, odd = state.params["first"], of.placement.devices[2]
    copies = []
    for shard in whole.addressable_shards:
        copy = np.array(shard.data)
        copy[0, 0] += 0.25 * (shard.device == odd)
        copies.append(jax.device_put(copy, shard.device))
    state.params["first"] = jax.make_array_from_single_device_arrays(
        whole.shape, whole.sharding, copies
    )
    with use_placement(of.placement):
        batch = jax.device_put((X[:16], Y[:16]), of.placement.batch)
        found = GradientSums(of.functions, of.placement).compare(state, batch)
    assert found == Verdict(FaultKind.LASTING, [2], [3], 0)


def test_checks_use_one_half_of_the_examples_and_the_other_in_turns() -> None:
    devices, sums = checked(), []
    for _ in range(3):
        assert devices.verdict() is None
        sums.append(devices.sums.last)
    assert (sums[0] != sums[1]).all() and (sums[0] == sums[2]).all()


def test_no_device_is_named_if_more_than_half_of_them_are_odd() -> None:
    """Of three devices, two have other results in the first run."""
    runs = [np.roll(np.arange(3, dtype=np.uint32)[:, None], roll, axis=0) for roll in range(3)]
    runs[0][:2] += 7
    assert find_faulty(runs) == Verdict(FaultKind.UNCLEAR, [0, 1, 2], [], 0)


def test_a_program_that_is_not_deterministic_accuses_no_device() -> None:
    draw = np.random.default_rng(0)
    runs = [draw.integers(0, 2**32, size=(8, 2), dtype=np.uint32) for _ in range(3)]
    assert find_faulty(runs).kind is FaultKind.UNCLEAR


# -- runs ------------------------------------------------------------------------------------------


def failing_from(step: int, of: np.ndarray) -> dict[str, Any]:
    """A callback: after a step, the model has the fault."""

    def inject(event: CallbackContext) -> None:
        if event.step == step:
            event.trainer.state = with_fault(event.trainer.state, of)

    return {"step": inject}


FLIP = fault(6, leaf=1, element=2, bit=4)


@pytest.mark.slow
def test_a_run_stops_at_the_next_check_and_writes_what_was_found(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    failing = trainer(
        callbacks=failing_from(5, FLIP), sentinel_every=4, workdir=str(workdir), steps=20
    )
    with pytest.raises(DeviceFaultError, match=r"^step 8: a lasting fault: device 6 \("):
        failing.fit((X, Y))
    found = status(workdir)
    assert (found["status"], found["sentinel"]["passed"]) == ("failed", 4)
    (recorded,) = found["sentinel"]["faults"]
    host, kind = socket.gethostname(), "lasting"
    assert recorded == {
        "step": 8,
        "kind": kind,
        "devices": [f"device 6 ({jax.devices()[6]})"],
        "processes": ["this process"],
        "hosts": [host],
        "parameter": "second",
    }
    (event,) = [event for event in Run(str(workdir)).events if event["event"] == "fault"]
    assert event["step"] == 8 and "device 6" in event["reason"]


@pytest.mark.slow
def test_a_rollback_renames_what_was_saved_since_the_last_check_that_passed(
    tmp_path: Path,
) -> None:
    workdir = tmp_path / "run"
    options = {"sentinel_every": 4, "sentinel_action": "rollback", "checkpoint_every_steps": 2}
    options |= {"workdir": str(workdir), "steps": 10, "keep_latest": 5}
    failing = trainer(callbacks=failing_from(5, FLIP), **options)
    with pytest.raises(DeviceFaultError, match=r"6\.suspect; the newest left is 4"):
        failing.fit((X, Y))
    assert saved_steps(workdir) == [2, 4]
    trainer(**options).fit((X, Y))
    assert status(workdir)["sentinel"]["passed"] == 8
    clean = trainer(steps=10)
    clean.fit((X, Y))
    assert clean.state is not None
    saved = read_manifest(workdir / "checkpoints" / "10").sums
    for name, total in checksums.sums({"params": clean.state.params}).items():
        assert saved[name] == total, name


@pytest.mark.slow
def test_a_rollback_that_is_killed_between_two_renames_is_completed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"workdir": str(tmp_path), "checkpoint_every_steps": 1}
    options |= {"sentinel_every": 4, "sentinel_action": "rollback", "keep_latest": 9}
    rename = type(epath.Path(tmp_path)).rename
    renamed: list[Path] = []

    def killed(path: Any, target: Any) -> Any:
        if str(target).endswith(".suspect"):
            renamed.append(path)
            if len(renamed) > 1:
                raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(epath.Path(tmp_path)), "rename", killed)
        trainer(callbacks=failing_from(5, FLIP), **options).fit((X, Y), steps=10)
    assert len(saved_steps(tmp_path)) == 6  # of 4 checkpoints since the check of step 4, one less
    trainer(**options).fit((X, Y), steps=4)
    assert saved_steps(tmp_path) == [1, 2, 3, 4]
    assert {path.name for path in tmp_path.rglob("*.suspect")} == {
        f"{step}.suspect" for step in (5, 6, 7)
    }
    assert not (tmp_path / "checkpoints" / "quarantine.json").exists()


@pytest.mark.slow
def test_a_rollback_keeps_the_checkpoints_if_none_is_older_than_the_last_check(
    tmp_path: Path,
) -> None:
    options = {"sentinel_every": 6, "sentinel_action": "rollback", "checkpoint_every_steps": 2}
    failing = trainer(callbacks=failing_from(1, FLIP), workdir=str(tmp_path), **options)
    with pytest.raises(DeviceFaultError, match=r"all checkpoints are newer than step 0, .* none"):
        failing.fit((X, Y), steps=8)
    assert saved_steps(tmp_path) and not list(tmp_path.rglob("*.suspect"))


@pytest.mark.slow
def test_checkpoints_that_cannot_be_listed_do_not_replace_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(workdir: str) -> None:
        raise StorageError(f"{workdir} cannot be read")

    monkeypatch.setattr(sentinel, "list_for_all", fail)
    options = {"sentinel_every": 4, "sentinel_action": "rollback", "checkpoint_every_steps": 2}
    failing = trainer(callbacks=failing_from(1, FLIP), workdir=str(tmp_path), **options)
    with pytest.raises(DeviceFaultError, match=r"^step 4: a lasting .* cannot be read$"):
        failing.fit((X, Y), steps=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("stop", r"^step 12: a lasting fault: device 6 \([^;]*$"),
        (
            "rollback",
            r"save has failed: copies differ; checkpoints renamed: 8\.suspect; .* left is 6$",
        ),
    ],
)
def test_the_error_of_a_pending_save_does_not_replace_the_fault(
    action: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_equal(sums: Any, step: int, sequence: Any) -> None:
        if step == 10:
            raise ReplicaError("copies differ")

    monkeypatch.setattr(checksums, "check_equal", check_equal)
    workdir = tmp_path / "run"
    options = {"sentinel_every": 6, "checkpoint_every_steps": 2, "keep_latest": 9}
    failing = trainer(
        callbacks=failing_from(7, FLIP), sentinel_action=action, workdir=str(workdir), **options
    )
    with pytest.raises(DeviceFaultError, match=message):
        failing.fit((X, Y), steps=20)
    assert saved_steps(workdir) == [2, 4, 6, 8][: 4 if action == "stop" else 3]
    assert "step 12: a lasting fault" in status(workdir)["reason"]


@pytest.mark.parametrize(
    ("devices", "options", "why"),
    [
        (4, {}, None),
        (6, {}, "global_batch_size is 32: it does not divide over 6 devices"),
        (4, {"microbatches": 16}, "over 4 devices and 16 microbatches"),
        (6, {"uneven_batch": "pad"}, None),
        (1, {}, "1 device.s. would remain"),
        (6, {"mesh": MeshSpec(data=8), "uneven_batch": "pad"}, "not divide over mesh.data=8"),
        (4, {"mesh": MeshSpec(devices=(0, 1))}, "mesh.devices names"),
        (6, {"exact": 16, "global_batch_size": 96}, "exact is 16 on 6 devices"),
    ],
)
def test_a_job_is_restarted_only_on_devices_that_its_configuration_fits(
    devices: int, options: dict[str, Any], why: str | None
) -> None:
    config = resolve(RunConfig(**{"global_batch_size": 32} | options), batch_shards=2)
    placement = Placement(DEFAULT, None)
    order = ANY_ORDER if config.exact is None else FixedOrder(placement, config.exact)
    found = why_not_on(devices, config, order)
    assert found is None if why is None else re.search(why, found or "")


def test_steps_of_one_dispatch_are_refused_if_a_check_comes_before_each() -> None:
    config = RunConfig(sentinel_every=1, steps_per_dispatch=2)
    schedule = Schedule(config, 8, 80, evaluates=False, saves=False, clock=lambda: 0.0)
    with pytest.raises(UserError, match=r"check of the devices \(sentinel_every\)") as refused:
        schedule.set_dispatch(Dispatch(2, Repeat.SCAN))
    assert "log_hash_every" in str(refused.value)


@pytest.mark.slow
def test_a_warning_ends_nothing_and_a_check_does_not_change_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal(results_only=True)
    options = {"steps": 6, "callbacks": failing_from(1, FLIP), "terminal": terminal}
    plain = trainer(**options)
    checked = trainer(**options, sentinel_every=2, sentinel_action="warn")
    plain.fit((X, Y))
    checked.fit((X, Y))
    assert capsys.readouterr().err.count(": a lasting fault: device 6 (") == 3
    for one, other in zip(*map(jax.tree.leaves, (plain.state, checked.state)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_steps_of_one_dispatch_and_examples_on_the_devices_are_checked(tmp_path: Path) -> None:
    options = {"steps_per_dispatch": 3, "data_on_device": True, "microbatches": 2}
    workdir = str(tmp_path / "run")
    trainer(steps=11, sentinel_every=5, workdir=workdir, **options).fit((X, Y))
    assert status(tmp_path / "run")["sentinel"] == {"passed": 10, "faults": []}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [
        *("mirrored", "zero", "fully_sharded", "central_storage", "hybrid"),
        *("hybrid+zero", "hybrid+fully_sharded", "central_storage+fully_sharded"),
    ],
)
def test_2000_checks_of_devices_without_a_fault_find_none(strategy: str, tmp_path: Path) -> None:
    of = trainer(
        model=partial(MLP, WIDTH, (64, 64), 1, dropout=0.1),
        objective=lambda model, batch: {"loss": (model(batch[0])[:, 0] - batch[1]) ** 2},
        freeze=(),
        strategy=strategy,
        mesh=MeshSpec(devices=(0, 1, 2, 3), replica=2 if "hybrid" in strategy else None),
        sharding=ShardingOptions(min_size=1024),
        sentinel_every=1,
        workdir=str(tmp_path / "run"),
    )
    of.fit((X, Y), steps=2000)
    assert status(tmp_path / "run")["sentinel"] == {"passed": 2000, "faults": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "tensor_parallel"},
            "strategy is tensor_parallel: the sentinel needs devices",
        ),
        ({"strategy": "default"}, "strategy is default: the sentinel needs devices"),
        (
            {"strategy": "parameter_server"},
            "strategy is parameter_server: the sentinel needs devices",
        ),
        ({"jit": False}, "jit is False"),
        ({"sentinel_every": None, "sentinel_action": "warn"}, "give both"),
        ({"sentinel_every": 0}, "must be above 0"),
    ],
)
def test_options_that_it_cannot_work_with_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        RunConfig(**{"sentinel_every": 4} | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": MeshSpec(devices=(0,))}, "no second device"),
        ({"sentinel_action": "rollback"}, "and workdir is not given: give a folder"),
    ],
)
def test_a_fit_that_it_cannot_check_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(**options, sentinel_every=1, steps=1).fit((X, Y))


@pytest.mark.parametrize("axis", ["expert", "context", "tensor"])
def test_devices_that_compute_an_example_together_are_refused(axis: str) -> None:
    size: dict[str, Any] = {axis: 2}
    placement = make_placement(RunConfig(mesh=MeshSpec(**size)))
    message = f"mesh.{axis} is 2, so several devices compute an example together"
    with pytest.raises(UserError, match=message):
        GradientSums(checked().trainer.functions, placement)


def test_an_objective_that_places_arrays_itself_is_refused() -> None:
    def placing(model: Any, batch: Any) -> dict[str, jax.Array]:
        x, y = batch
        place = placed.placement.batch if placed.placement.batch_shards else None
        return objective(model, (jax.lax.with_sharding_constraint(x, place), y))

    placed = trainer(objective=placing, sentinel_every=1, steps=1)
    with pytest.raises(UserError, match="constrains the sharding"):
        placed.fit((X, Y))
