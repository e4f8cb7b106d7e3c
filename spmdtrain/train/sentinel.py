"""The sentinel: finds devices that compute wrong gradients without an error."""

import math
import socket
from typing import Any

from spmdtrain.checkpoints.listing import list_for_all
from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group, progress
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import DeviceFaultError, ReplicaError, StorageError, UserError
from spmdtrain.record.run_files import FoundFault
from spmdtrain.sharding.mesh import resolve
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.exact import check_exact_shards
from spmdtrain.step.functions import StepFunctions
from spmdtrain.step.state import TrainState
from spmdtrain.train.sentinel_program import GradientSums
from spmdtrain.train.sentinel_verdict import FaultKind, Verdict
from spmdtrain.train.session import RunSession

PyTree = Any
_KEPT = 20  # faults in the status


class Sentinel:
    """Checks every `sentinel_every` steps that the devices compute the same bits as each other.

    Before such a step it computes the gradients of each device's shard of the batch twice, the
    second time with each shard on the next device, and compares their checksums. If they differ, a
    third run on a third device decides which of them is wrong. The state does not change.

    All processes call it at the same steps; process 0 decides for all.

    Args:
      first: The step from which this start continues.

    Raises:
      UserError: If the devices do not allow it (see `GradientSums`), or there are no checkpoints to
        go back to.
    """

    def __init__(
        self, functions: StepFunctions, placement: Placement, run: RunSession, first: int
    ) -> None:
        if run.config.sentinel_action == "rollback" and run.checkpoints is None:
            raise UserError("sentinel_action is rollback, which needs a workdir with checkpoints")
        self._sums = GradientSums(functions, placement)
        self._run, self._has_run = run, False
        self._hosts = process_group.gather(socket.gethostname())
        files = run.logger.files
        status = files.sentinel if files is not None else None
        passed: int = process_group.broadcast(0 if status is None else status["passed"])
        self._passed = min(passed, first)
        self._warn_of_restarts()

    def check(self, step: int, state: TrainState, batch: PyTree) -> None:
        """Checks the devices with the batch of a step and the state before it.

        Raises:
          DeviceFaultError: If devices differ and `sentinel_action` is stop or rollback.
        """
        with phase(Phase.STEP):
            verdict = self._sums.compare(state, batch)
        if not self._has_run:  # it was compiled
            self._run.logger.restart_timer(step - 1)
            self._has_run = True
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
        return why_not_on(len(left), self._run.config)

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


def why_not_on(devices: int, config: RunConfig) -> str | None:
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
        if config.exact is not None:
            check_exact_shards(config.exact, devices)
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
