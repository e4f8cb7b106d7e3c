"""The sentinel: finds devices that compute wrong gradients without an error."""

import collections
import dataclasses
import enum
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.checksums import traced_sum
from spmdtrain.checkpoints.listing import list_for_all
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import IndexedBatch, examples_of
from spmdtrain.distributed import process_group, progress
from spmdtrain.distributed.first_call import Together
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import DeviceFaultError, ReplicaError, StorageError, UserError
from spmdtrain.record.run_files import FoundFault
from spmdtrain.sharding.mesh import BATCH_AXES, resolve
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.gradients import ON_ONE_DEVICE, Inputs, SumOrder
from spmdtrain.step.state import TrainState
from spmdtrain.train.session import RunSession
from spmdtrain.train.slowness import SlowDevices
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import constrains_sharding

# -- The verdict of the sentinel: the devices that computed other gradients than others ------------


class FaultKind(enum.StrEnum):
    """The frequency with which a device computed other gradients."""

    TRANSIENT = "transient"
    """In one run."""
    LASTING = "lasting"
    """In several runs."""
    UNCLEAR = "unclear"
    """No single device explains the differences: the program is not deterministic, several devices
    are faulty, or one of two is faulty and may be wrong once or always."""


@dataclass(frozen=True)
class Verdict:
    """Devices whose results differ, by three runs of the same shards.

    Attributes:
      devices: Their numbers, ascending. If there are only two devices and both repeat their
        results, either may be faulty, and both are listed. If the kind is unclear, all devices
        whose results differ.
      runs: For each of `devices`, in how many of the three runs its results differed; empty if
        that is not known. If either of two devices may be faulty, each number is valid if its
        device is the faulty one.
      parameter: Number of the first parameter whose gradients differ.
    """

    kind: FaultKind
    devices: list[int]
    runs: list[int]
    parameter: int


def differs(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether the checksums of a shard differ between the first two runs.

    Checksums have shape (devices, parameters). Device i has computed shard i in the first run, and
    device i + 1 in the second.
    """
    return bool((first != np.roll(second, -1, axis=0)).any())


def third_roll(devices: int) -> int:
    """Returns by how many devices the third run is rolled: a third device for each shard."""
    return 2 % devices


def find_faulty(runs: Sequence[np.ndarray]) -> Verdict:
    """Finds the devices whose results two other devices do not reproduce.

    With three devices or more, three of them have computed each shard, and the one with another
    result than the two others is faulty. Two devices give only two results, so the third run
    repeats the first: a device is accused if it does not repeat its result. If both repeat it,
    either may be wrong.

    Args:
      runs: The checksums (devices, parameters) of three runs, by device, at least one of which
        differs. In run r, device i has computed shard i - r; with two devices, in run 2 shard i.
    """
    count = len(runs[0])
    rolls = (0, 1, third_roll(count))
    by_shard = [np.roll(sums, -roll, axis=0) for sums, roll in zip(runs, rolls, strict=True)]
    unequal = (by_shard[0] != by_shard[1]) | (by_shard[0] != by_shard[2])
    parameter = int(np.flatnonzero(unequal.any(0))[0])
    results = {
        int(shard): [sums[shard].tobytes() for sums in by_shard]
        for shard in np.flatnonzero(unequal.any(1))
    }
    if count == 2:
        return _of_two(results, parameter)
    accused: collections.Counter[int] = collections.Counter()
    suspects: set[int] = set()
    for shard, of_shard in results.items():
        devices = [(shard + roll) % count for roll in rolls]
        suspects |= set(devices)
        odd = [run for run in range(3) if of_shard.count(of_shard[run]) == 1]
        if len(odd) == 1:
            accused[devices[odd[0]]] += 1
    if not accused or 2 * len(accused) > count:
        return Verdict(FaultKind.UNCLEAR, sorted(suspects), [], parameter)
    found = sorted(accused)
    lasting = max(accused.values()) > 1
    kind = FaultKind.LASTING if lasting else FaultKind.TRANSIENT
    return Verdict(kind, found, [accused[device] for device in found], parameter)


def _of_two(results: Mapping[int, Sequence[bytes]], parameter: int) -> Verdict:
    """Returns the verdict on two devices.

    Args:
      results: The three results of each shard with different results: device i has computed shard i
        in the first and in the third run, and the other device in the second.
      parameter: Number of the first parameter that differs.
    """
    unrepeated = [shard for shard, (first, _, again) in results.items() if first != again]
    if len(unrepeated) == 2:
        return Verdict(FaultKind.UNCLEAR, [0, 1], [], parameter)
    if unrepeated:
        (device,) = unrepeated
        # A third result of its own shard is wrong twice; of the other's shard it has computed one.
        times = len(set(results[device])) - 1 + len(results) - 1
        kind = FaultKind.LASTING if times > 1 else FaultKind.TRANSIENT
        return Verdict(kind, [device], [times], parameter)
    if len(results) == 2:  # one of the devices was wrong in all runs
        return Verdict(FaultKind.LASTING, [0, 1], [], parameter)
    # Either the device of the shard was wrong twice, or the other one once.
    return Verdict(FaultKind.UNCLEAR, [0, 1], [2, 1] if 0 in results else [1, 2], parameter)


# -- The sentinel: finds devices that compute wrong gradients without an error ---------------------

PyTree = Any
_KEPT = 20  # faults in the status
_POLL = 0.0002  # seconds


class Sentinel:
    """Checks every `sentinel_every` steps that the devices compute the same bits as each other.

    Before such a step it computes the gradients of each device's shard of the batch twice, the
    second time with each shard on the next device, and compares their checksums. If they differ, a
    third run on a third device decides which of them is wrong. The state does not change.

    All processes call it at the same steps; process 0 decides for all.

    Args:
      first: The step from which this start continues.

    Raises:
      UserError: If the devices do not allow it (see `GradientSums`).
    """

    def __init__(
        self, functions: RunFunctions, placement: Placement, run: RunSession, first: int
    ) -> None:
        self._sums, self._order = GradientSums(functions, placement), functions.order
        self._run, self._has_run = run, False
        self._hosts = process_group.gather(socket.gethostname())
        files = run.logger.files
        status = files.sentinel if files is not None else None
        passed: int = process_group.broadcast(0 if status is None else status["passed"])
        self._passed = min(passed, first)
        self._speeds = SlowDevices([self._name(number) for number in range(self._sums.count)])
        self._warn_of_restarts()

    def is_due(self, steps: Sequence[int]) -> bool:
        """Returns whether to check the devices before these steps; a step that is due is alone."""
        return self._run.config.checks_devices_at(steps[-1])

    def inspect(self, steps: Sequence[int], state: TrainState, batch: PyTree) -> None:
        """Checks the devices with the batch of a step and the state before it.

        Raises:
          DeviceFaultError: If devices differ and `sentinel_action` is stop or rollback.
        """
        step = steps[-1]
        with phase(Phase.STEP):
            verdict = self._sums.compare(state, batch)
        if not self._has_run:  # it was compiled
            self._run.logger.timer.restart(step - 1)
            self._has_run = True
        else:
            self._compare_speeds(step)
        files = self._run.logger.files
        if verdict is None:
            self._passed = step
            if files is not None:
                files.sentinel = {"passed": step, "faults": self._faults()}
            return
        fault = self._describe(step, verdict)
        message = f"step {step}: {_sentence(fault, verdict, self._sums.count)}"
        self._run.logger.log_fault(step, message)
        if files is not None:
            faults = [*self._faults(), fault][-_KEPT:]
            files.sentinel = {"passed": self._passed, "faults": faults}
        action = self._run.config.sentinel_action
        if action == "warn":
            return
        if action == "rollback":
            message += self._go_back(fault)
        raise DeviceFaultError(message)

    def _compare_speeds(self, step: int) -> None:
        """Names devices that took longer than the others for the computations of a check."""
        own = self._sums.seconds
        if self._sums.shares_processors or process_group.count() == 1:
            return
        of_all = process_group.collect({str(number): x for number, x in own.items()})
        by_device = {int(number): x for found in of_all for number, x in found.items()}
        if len(by_device) == self._sums.count:  # in process 0
            for slow in self._speeds.judge([x for _, x in sorted(by_device.items())]):
                self._run.logger.log_slow(step, slow)

    def _name(self, number: int) -> str:
        device = self._sums.devices[number]
        process = process_group.names()[device.process_index]
        return f"device {number} ({device}) of {process} on {self._hosts[device.process_index]}"

    def _faults(self) -> list[FoundFault]:
        files = self._run.logger.files
        return [] if files is None or files.sentinel is None else files.sentinel["faults"]

    def _describe(self, step: int, verdict: Verdict) -> FoundFault:
        devices = {number: self._sums.devices[number] for number in verdict.devices}
        ranks = sorted({device.process_index for device in devices.values()})
        return {
            "step": step,
            "kind": verdict.kind,
            "devices": [f"device {number} ({device})" for number, device in devices.items()],
            "processes": [process_group.names()[rank] for rank in ranks],
            "hosts": [self._hosts[rank] for rank in ranks],
            "parameter": self._sums.names[verdict.parameter],
        }

    def _warn_of_restarts(self) -> None:
        """Warns if the launcher could not restart the job without one of the processes."""
        is_restarted = progress.launched() and process_group.count() > 1
        if self._run.config.sentinel_action != "rollback" or not is_restarted:
            return
        for rank, name in enumerate(process_group.names()):
            if (why := self._why_not_without(rank)) is not None:
                self._run.logger.terminal.warning(
                    f"sentinel_action is rollback, but the job cannot be restarted without {name} "
                    f"after a fault, and would stop: {why}"
                )
                return

    def _why_not_without(self, rank: int) -> str | None:
        left = [device for device in self._sums.devices if device.process_index != rank]
        return why_not_on(len(left), self._run.config, self._order)

    def _go_back(self, fault: FoundFault) -> str:
        """Renames the checkpoints since the last check that passed, and requests the restart.

        Returns what was done, for the message. An error of a save, of the listing or of the
        renaming becomes part of the message, because it must not replace the fault: after a fault,
        the launcher does not use the same devices again.
        """
        run, last = self._run, self._passed
        assert run.config.workdir is not None and run.checkpoints is not None
        saving = ""
        try:
            run.wait_for_save()
        except (ReplicaError, StorageError) as error:
            saving = f"; the pending save has failed: {error}"
        if run.snapshots is not None:
            run.snapshots.discard(last)
        try:
            source = list_for_all(run.config.workdir)
        except StorageError as error:
            return f"{saving}; {error}"
        suspect = [step for step in source.steps if step > last]
        if suspect and len(suspect) == len(source.steps):
            return (
                f"{saving}; all checkpoints are newer than step {last}, the last one whose check "
                "passed, so none is known to be good and none was renamed"
            )
        if suspect:
            try:
                names = run.checkpoints.quarantine(suspect, "suspect")
            except StorageError as error:
                return f"{saving}; {error}"
            kept = max(source.steps[: -len(suspect)])
            text = f"{saving}; checkpoints renamed: {', '.join(names)}; the newest left is {kept}"
        else:
            text = (
                f"{saving}; no checkpoint is newer than step {last}, the last one whose check "
                "passed"
            )
        is_known = fault["kind"] != FaultKind.UNCLEAR and len(fault["processes"]) == 1
        if not is_known or process_group.count() == 1:
            return text
        task = fault["processes"][0]
        why = self._why_not_without(process_group.names().index(task))
        if why is not None:
            return f"{text}; not restarted without {task}: {why}"
        if process_group.is_chief():
            progress.request_without(task)
        return text


def why_not_on(devices: int, config: RunConfig, order: SumOrder) -> str | None:
    """Returns why a run with a sentinel cannot continue on fewer devices; None if it can."""
    if devices < 2:
        return f"{devices} device(s) would remain, and the sentinel needs 2 or more"
    if config.mesh.devices:
        return "mesh.devices names devices of all processes"
    sizes = {axis: size for axis, size in config.mesh.given().items() if size not in (None, -1)}
    if devices % math.prod(sizes.values()):
        product = " * ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        return f"{devices} devices would remain, which do not divide over {product}"
    try:
        resolve(config, batch_shards=devices)  # the sentinel refuses devices that share examples
        order.check_devices(devices)
    except UserError as error:
        return str(error)
    return None


def _sentence(fault: FoundFault, verdict: Verdict, count: int) -> str:
    where = _where(fault)
    first = f"first in {fault['parameter']}"
    missing = (
        f"{where} compute different gradients from the same examples, and a third device that "
        "could decide which is wrong is missing"
    )
    if verdict.kind is FaultKind.UNCLEAR and verdict.runs:
        return f"a transient or a lasting fault: {missing} ({first})"
    if verdict.kind is FaultKind.UNCLEAR:
        return (
            f"{len(verdict.devices)} of {count} devices ({where}) do not reproduce each other's "
            f"gradients, {first}: the program is not deterministic (on GPU, set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true), or several devices are faulty"
        )
    if len(verdict.devices) > 1 and not verdict.runs:
        return f"a lasting fault: {missing} ({first})"
    times = " and ".join(f"{n} of 3" for n in verdict.runs)
    return (
        f"a {verdict.kind} fault: {where} computed other gradients than two other devices from "
        f"the same examples in {times} runs ({first})"
        if count > 2
        else f"a {verdict.kind} fault: {where} computed other gradients from the same examples "
        f"when it computed them again ({first})"
    )


def _where(fault: FoundFault) -> str:
    """Returns the devices, processes and hosts of a fault as text."""
    devices = " and ".join(fault["devices"])
    return f"{devices} of {' and '.join(fault['processes'])} on {', '.join(fault['hosts'])}"


# -- The programs of the sentinel: checksums of each device's gradients, and moves of its examples


class GradientSums:
    """Checksums of the gradients that each device computes of one shard of a batch.

    A shard is the part of the batch that one device computes in a step. Each device runs the same
    program, which does not depend on the device: the random key of a shard derives from the number
    of the shard, which moves with its examples. Sharded parameters are gathered first, and nothing
    is reduced. So a shard has the same checksums on every device that computes correctly. The
    computation is the same as in the step, but the gradients differ from the ones that update the
    parameters: batch statistics are computed over the shard, and dropout masks are others.

    A check uses half of the examples of each shard, alternately the first and the second half, so
    its two runs cost as much as the gradients of one step. It uses all examples if they or their
    microbatches cannot be halved.

    Attributes:
      count: Number of shards, and of devices.
      names: Paths of the trained parameters.
      devices: The devices in the order of the shards.
      seconds: The time that each device of this process took in the last check for one run, by its
        number.
      shares_processors: Whether devices share processors, so that their times say nothing.

    Raises:
      UserError: If fewer than two devices split the batch, or a device does not compute whole
        examples.
    """

    def __init__(self, functions: RunFunctions, placement: Placement) -> None:
        mesh = placement.mesh
        if mesh is None or placement.batch_shards < 2:
            raise UserError(
                f"sentinel_every: strategy {placement.name} on {len(placement.devices)} device(s) "
                "has no second device that could compute the same examples: use 2 or more"
            )
        for axis in placement.shared_axes:
            raise UserError(
                f"sentinel_every: mesh.{axis.name} is {placement.size(axis.name)}, so several "
                "devices compute an example together, which the sentinel does not support: leave "
                "one of the two out"
            )
        self.count: int = placement.batch_shards
        trained, _ = functions.update.partition(functions.abstract_state.params)
        self.names = list(named_leaves(trained))
        self.devices: list[jax.Device] = list(mesh.devices.ravel())
        self.seconds: dict[int, float] = {}
        local = [device for device in self.devices if device.process_index == jax.process_index()]
        self.shares_processors = len(local) > 1 and placement.is_virtual()
        self._functions, self._placement = functions, placement
        self._sums: dict[bool, Together] = {}  # by whether batches are `IndexedBatch`
        self._turn = 1  # the half of the examples of the last check
        rows = PartitionSpec(BATCH_AXES)
        move = jax.shard_map(self._move, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        split = placement.batch
        self._roll = Together(jax.jit(move, in_shardings=split, out_shardings=split))
        whole = placement.replicated
        self._gather = Together(jax.jit(lambda x: x, in_shardings=split, out_shardings=whole))

    def first(self) -> jax.Array:
        """Returns the numbers of the shards, int32 (count,): device i has shard i."""
        numbers = np.arange(self.count, dtype=np.int32)
        place = self._placement.batch
        return jax.make_array_from_callback(numbers.shape, place, lambda index: numbers[index])

    def rolled(self, batch: PyTree, shards: jax.Array) -> tuple[PyTree, jax.Array]:
        """Moves each shard of a batch, and its number, to the next device."""
        if isinstance(batch, IndexedBatch):
            indices, shards = self._roll((batch.indices, shards))
            return IndexedBatch(indices, batch.arrays), shards
        moved: tuple[PyTree, jax.Array] = self._roll((batch, shards))
        return moved

    def __call__(self, state: TrainState, batch: PyTree, shards: jax.Array) -> np.ndarray:
        """Returns the checksums, uint32 (count, parameters), by device. Waits for them.

        Args:
          state: The state before the step.
          batch: The batch of the step, or a rolled one.
          shards: The numbers of the shards on the devices.
        """
        by_index = isinstance(batch, IndexedBatch)
        if by_index not in self._sums:
            with use_placement(self._placement):
                self._check(state, batch)
            self._sums[by_index] = Together(self._compile(by_index=by_index))
        key = jax.random.key_data(state.step_key)
        given = state.variables, batch, key, shards, np.int32(self._turn)
        jax.block_until_ready(given)  # devices may still run the last step
        process_group.barrier()
        began = time.perf_counter()
        sums = self._sums[by_index](*given)
        self.seconds = self._times(sums, began)
        return np.asarray(self._gather(sums))

    def _times(self, sums: jax.Array, began: float) -> dict[int, float]:
        """Waits for the shards of this process; returns the seconds until each was there."""
        numbers = {device: number for number, device in enumerate(self.devices)}
        pending = {numbers[shard.device]: shard.data for shard in sums.addressable_shards}
        found: dict[int, float] = {}
        while pending:
            for number in [number for number, data in pending.items() if data.is_ready()]:
                found[number] = time.perf_counter() - began
                del pending[number]
            time.sleep(_POLL if pending else 0.0)
        return found

    def compare(self, state: TrainState, batch: PyTree) -> Verdict | None:
        """Computes each shard on two devices, and on a third one if their results differ.

        Returns the devices that differ; None if all results are equal. All processes call it
        together; process 0 decides. `state` is the state before the step of `batch`.
        """
        self._turn = 1 - self._turn
        shards = self.first()
        runs = [self(state, batch, shards)]
        rolled, numbers = self.rolled(batch, shards)
        runs.append(self(state, rolled, numbers))
        # A faulty device may pass its process other numbers than the other processes have.
        if not process_group.broadcast(differs(*runs)):
            return None
        if third_roll(self.count):
            rolled, numbers = self.rolled(rolled, numbers)
        else:
            rolled, numbers = batch, shards
        runs.append(self(state, rolled, numbers))
        found = find_faulty(runs) if process_group.is_chief() else None
        agreed = process_group.broadcast({} if found is None else dataclasses.asdict(found))
        return Verdict(**agreed | {"kind": FaultKind(agreed["kind"])})

    def _compile(self, *, by_index: bool) -> Any:
        layout, split = self._functions.layout, self._placement.batch
        whole, rows = PartitionSpec(), PartitionSpec(BATCH_AXES)

        def sums(
            variables: Variables,
            batch: PyTree,
            key: jax.Array,
            shards: jax.Array,
            turn: jax.Array,
        ) -> jax.Array:
            variables = layout.to_device(variables, lambda shardings: shardings.variables)
            by_shard: jax.Array = jax.shard_map(
                self._local,
                mesh=self._placement.mesh,
                in_specs=(whole, rows, whole, rows, whole),
                out_specs=rows,
                check_vma=False,  # each device computes alone
            )(variables, examples_of(batch), key, shards, turn)
            return by_shard

        replicated = self._placement.replicated
        of_batch: Any = IndexedBatch(split, replicated) if by_index else split
        return jax.jit(
            sums,
            in_shardings=(layout.shardings.variables, of_batch, replicated, split, replicated),
            out_shardings=split,
            compiler_options=self._functions.compiler_options or None,
        )

    def _local(
        self,
        variables: Variables,
        batch: PyTree,
        key: jax.Array,
        shards: jax.Array,
        turn: jax.Array,
    ) -> jax.Array:
        """Returns the checksums of this device's gradients, (1, parameters)."""
        functions, size = self._functions, jax.tree.leaves(batch)[0].shape[0]
        parts = functions.loss.microbatches
        parts = parts if parts % 2 else parts // 2  # an even number keeps the size of a part
        half = size if size % (2 * parts) else size // 2
        batch = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, turn * (size - half), half), batch
        )
        alone = dataclasses.replace(functions.loss, microbatches=parts, placement=ON_ONE_DEVICE)
        trained, frozen = functions.update.partition(variables.params)
        own_key = jax.random.fold_in(jax.random.wrap_key_data(key), shards[0])
        with use_placement(ON_ONE_DEVICE):
            output = alone.gradients(Inputs(trained, frozen, variables.model_state, batch, own_key))
        return jnp.stack([traced_sum(x) for x in jax.tree.leaves(output.gradients)])[None]

    def _move(self, part: PyTree) -> PyTree:
        """Returns the part of the previous device; the first device gets the part of the last."""
        pairs = [(i, (i + 1) % self.count) for i in range(self.count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, BATCH_AXES, pairs), part)

    def _check(self, state: TrainState, batch: PyTree) -> None:
        """Raises `UserError` if the objective itself places arrays on the mesh."""

        def shard(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] // self.count, *x.shape[1:]), x.dtype)

        rows = jax.tree.map(shard, jax.eval_shape(examples_of, batch))
        shards, turn = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((1,), ()))
        shapes = jax.eval_shape(lambda state: (state.variables, state.key), state)
        jaxpr = jax.make_jaxpr(self._local)(shapes[0], rows, shapes[1], shards, turn)
        if constrains_sharding(jaxpr.jaxpr):
            raise UserError(
                "sentinel_every: the objective constrains the sharding of arrays itself, so a "
                "device cannot compute its examples alone: leave sentinel_every out"
            )
