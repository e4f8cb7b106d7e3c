"""The log of a run: lines on the terminal and files in the workdir."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from spmdtrain.config.run_config import RunConfig, config_as_json, file_of_config
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import LineColor, Rate, Terminal, duration, metric_texts, number
from spmdtrain.errors import StorageError
from spmdtrain.record.lines import HASHES_FILE, LinesFile, ResumedAt, StateHash
from spmdtrain.record.run_files import COUNTS_SUFFIX, RunFiles, Split, Status
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.metrics import LEARNING_RATE, NORMS
from spmdtrain.trackers.run_trackers import RunTrackers
from spmdtrain.train.input_wait import InputWait
from spmdtrain.train.performance import PerformanceLog
from spmdtrain.train.time_account import TimeAccount, goodput_line

Metrics = dict[str, float]
_NO_CURVES: Mapping[str, float] = {}
_NO_COUNTS: Mapping[str, Mapping[int, int]] = {}


def no_metrics() -> dict[Split, dict[int, Metrics]]:
    """Returns empty metrics of the splits whose metrics are kept."""
    return {Split.EPOCH: {}, Split.EVAL: {}}


class RunLogger:
    """Writes the log of one run.

    Args:
      files: The files of the workdir; None without a workdir, and in all processes but process 0.
      skipped_records: Numbers of bad records that are left out of the data, by split.
      trackers: Receive the metrics, in process 0; by default there are none.
    """

    def __init__(
        self,
        terminal: Terminal,
        files: RunFiles | None,
        config: RunConfig,
        skipped_records: Mapping[str, int] | None = None,
        trackers: RunTrackers | None = None,
    ) -> None:
        self.terminal, self.files, self.config = terminal, files, config
        self._skipped_records = skipped_records or {}
        self.trackers = RunTrackers.none() if trackers is None else trackers
        self.latest: dict[Split, Metrics] = {split: {} for split in Split}
        self.batch_size = config.global_batch_size
        """Examples in one step; in a `Loop`, the examples of the batch that the user passes."""
        self.written = no_metrics()
        """The metrics that were written for epochs and evaluations, by split and step."""
        self._rate, self._input_wait = Rate(), InputWait()
        self.performance, self.times = PerformanceLog(files), TimeAccount(files)
        self._hashes: LinesFile | None = None  # opened by the first hash
        self._devices: list[jax.Device] = []  # of this process
        self._seconds = 0.0  # of training, up to the last pause
        self._since: float | None = None  # when the timer was restarted
        self._counts: dict[str, Counter[int]] = {}  # since the last line of training

    def begin(
        self, step: int, placement: Placement, note: str = "", *, is_new: bool = False
    ) -> None:
        """Starts the log after `step`; removes the lines of later steps.

        Args:
          step: The step from which the run resumes.
          placement: Is written to the configuration file.
          note: Is printed, unless it is "".
          is_new: Whether nothing of the workdir is continued: all lines are of other runs.
        """
        last = -1 if is_new else step  # the last step whose lines are of this run
        was_used = bool(self.files and self.files.lines())
        if note:
            self.terminal.line(note)
        self.times.begin(step, len(placement.devices))
        rank = jax.process_index()
        self._devices = [device for device in placement.devices if device.process_index == rank]
        if self.files:
            self.files.rewind(last)
            if (self.files.folder / HASHES_FILE).exists():
                self._append_hash(ResumedAt(last))
            self.files.write_config(
                config_as_json(self.config),
                mesh=placement.axes,
                devices=placement.devices,
                skipped_records=self._skipped_records,
                experiment=file_of_config(self.config),
            )
            self.files.write_status(Status.RUNNING, step)
        self.trackers.start(step, config_as_json(self.config))  # now, during the compilation
        if is_new and was_used:
            self.trackers.rewind(last)
        if self.config.workdir is not None:
            for split in self.written:
                found = list(self.files.history(split).items()) if self.files else []
                # Only process 0 has files.
                self.written[split] = dict(process_group.broadcast(found))

    def log_header(
        self, placement: Placement, params: Any, program: str, trained: Any = None
    ) -> None:
        """Prints what is about to run: devices, mesh, batch, program, and bad records if any.

        Args:
          program: The description of the program; parts are separated by "; ".
          trained: The parameters that are not frozen; by default all.
        """
        batch, rate = self.batch_size, self.config.learning_rate
        devices = placement.devices
        rows = batch or 0
        if batch == self.config.global_batch_size is not None:
            rows = self.config.padded_batch_size(placement.batch_shards)
        padded = f" padded to {rows}" if rows != batch else ""
        facts = (
            []
            if batch is None
            else [f"global batch {batch}{padded} ({rows // placement.batch_shards} per device)"]
        )
        facts += [] if rate is None else [f"learning rate {rate:g}"]
        compiled, *reasons = program.split("; ")
        total = _size(params)
        count = total if trained is None else _size(trained)
        frozen = f", {count:,} trained" if count != total else ""
        lines = [
            f"{len(devices)} x {devices[0].device_kind}{_processes()}, {placement.description}",
            ", ".join(facts),
            f"{total:,} parameters{frozen}; {compiled}",
            *reasons,
        ]
        self.terminal.lines([line for line in lines if line])
        if any(self._skipped_records.values()):
            counts = (f"{split} {count:,}" for split, count in self._skipped_records.items())
            self.terminal.warning(f"bad records left out: {', '.join(counts)}")

    def restart_timer(self, step: int) -> None:
        """Counts the time from here on as training."""
        self._rate.restart(step)
        self.pause_timer()
        self._since = time.perf_counter()
        self._input_wait.restart(step, self._seconds)

    def pause_timer(self) -> None:
        """Stops counting the time as training until `restart_timer`."""
        self._seconds, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without evaluations, saves and compilation."""
        now = time.perf_counter()
        return self._seconds + (0.0 if self._since is None else now - self._since)

    @property
    def input_wait(self) -> float | None:
        """Seconds of training in which the devices waited for batches; None if not measured."""
        return self._input_wait.waited

    def count_input_wait(self, seconds: float) -> None:
        """Counts time in which the devices waited for a batch; 0 while the timer is paused."""
        self._input_wait.count(0.0 if self._since is None else seconds)

    def count_value(self, name: str, value: int) -> None:
        """Counts a value that a step had; the next line of training has the counts by value."""
        self._counts.setdefault(name, Counter())[value] += 1

    def log_train_step(self, step: int, total: int, metrics: Metrics, *, done: int) -> None:
        """Logs the metrics of a train step.

        Args:
          total: Number of steps of the run.
          done: The last step that is known to be done, for the speed.
        """
        self.latest[Split.TRAIN] = metrics
        rate = self._rate.read(done)
        speed: Metrics = {}
        if rate is not None:
            speed = {} if self.batch_size is None else {"examples/s": rate * self.batch_size}
            speed["steps/s"] = rate
        wait = self._input_wait.read(done, self.seconds)
        is_chief = process_group.is_chief()  # others have neither files nor trackers
        curves = self._log_performance(step, done, speed, wait) if is_chief else {}
        self._write(step, Split.TRAIN, metrics, curves, self._counts)
        self._counts = {}
        texts = metric_texts(self._shown(metrics))
        texts += [f"{number(v)} {unit}" for unit, v in speed.items()]
        texts += [] if wait is None else [f"input_wait {wait:.1%}"]
        if self.terminal.has_bar:
            self.terminal.advance(step, texts)
        else:
            texts += [] if rate is None else [f"{duration((total - step) / rate)} left"]
            self.terminal.line("  ".join([f"step {step}/{total}", *texts]))

    def _log_performance(self, step: int, done: int, speed: Metrics, wait: float | None) -> Metrics:
        """Writes a line of performance; returns its values as curves."""
        times = self.times.measure(done)
        goodput = None if times is None else times.goodput
        examples, steps = speed.get("examples/s"), speed.get("steps/s")
        return self.performance.record(step, examples, steps, wait, goodput, self._devices)

    def _shown(self, metrics: Metrics) -> Metrics:
        """Returns the metrics for the terminal: without norms, and without a constant rate."""
        hidden = {*NORMS} | (
            {LEARNING_RATE} if metrics.get(LEARNING_RATE) == self.config.learning_rate else set()
        )
        return {name: value for name, value in metrics.items() if name not in hidden}

    def log_hash(self, found: StateHash) -> None:
        """Writes the hash of the state after a step."""
        self._append_hash(found)

    def _append_hash(self, line: StateHash | ResumedAt) -> None:
        if self.files:
            if self._hashes is None:
                self._hashes = self.files.lines_file(HASHES_FILE)
            self._hashes.append(line.to_json())

    def log_checkpoint(self, step: int) -> None:
        """Logs that the state after `step` is being saved."""
        self.times.log("checkpoint", step)

    def log_fault(self, step: int, message: str) -> None:
        """Logs that in a step a device has computed other gradients than the other devices."""
        self.terminal.warning(message)
        self.times.log_fault(step, message)

    def log_evaluation(
        self,
        split: Split,
        step: int,
        metrics: Metrics,
        *,
        is_written: bool = False,
        trajectory: str | None = None,
    ) -> None:
        """Logs the metrics of an evaluation of the state after `step`, unless they are written.

        Args:
          is_written: Whether an earlier start has written them.
          trajectory: The trajectory of the state, if an evaluator calls. Its line of metrics says
            that a checkpoint is evaluated, so the line is written after everything else.
        """
        self.latest[split] = metrics
        if not is_written:
            self._write(step, split, metrics, trajectory=trajectory)
            self.times.log("evaluation", step)
        best = split is Split.EVAL and self._is_best(metrics)
        if split in self.written:
            self.written[split][step] = metrics
        texts = metric_texts(metrics) + (["best"] if best else [])
        color = LineColor.SUCCESS if best else LineColor.PLAIN
        self.terminal.line(f"{split} at step {step}: {'  '.join(texts)}", color)

    def _is_best(self, metrics: Metrics) -> bool:
        """Returns whether an evaluation is better than all earlier ones; there must be some."""
        name, sign = self.config.best_metric, 1 if self.config.best_direction == "min" else -1
        earlier = [m[name] * sign for m in self.written[Split.EVAL].values() if name in m]
        earlier = [value for value in earlier if not math.isnan(value)]
        return bool(earlier) and name in metrics and metrics[name] * sign < min(earlier)

    def log_epoch(self, step: int, metrics: Metrics) -> None:
        """Logs the means of the epoch that ends at `step`; "epoch" among them is its number."""
        self.written[Split.EPOCH][step] = metrics
        self._write(step, Split.EPOCH, metrics)
        units = {"seconds": "s", "examples_per_second": "examples/s"}
        apart = {"epoch", "input_wait", *units}
        shown = {k: x for k, x in self._shown(metrics).items() if k not in apart}
        speed = [f"{number(metrics[name])} {of}" for name, of in units.items() if name in metrics]
        speed += [f"input_wait {metrics['input_wait']:.1%}"] if "input_wait" in metrics else []
        text = "  ".join([*metric_texts(shown), *speed])
        self.terminal.line(f"epoch {metrics['epoch']:.0f} at step {step}: {text}")

    def _write(
        self,
        step: int,
        split: Split,
        metrics: Metrics,
        curves: Mapping[str, float] = _NO_CURVES,
        counts: Mapping[str, Mapping[int, int]] = _NO_COUNTS,
        trajectory: str | None = None,
    ) -> None:
        """Writes a line of metrics, and passes it to the trackers.

        Args:
          curves: Further values, only for the trackers: tag to value.
          counts: Name to the count of each integer.
          trajectory: As for `log_evaluation`.
        """
        values = {f"{split}/{name}": value for name, value in metrics.items()}
        tagged = {f"{split}/{name}{COUNTS_SUFFIX}": count for name, count in counts.items()}
        self.trackers.scalars(step, values | dict(curves), tagged)
        if trajectory is not None:
            self.trackers.flush()()
        if self.files:
            self.files.write_metrics(step, split, metrics, counts, trajectory or "")

    def read_metrics(self, split: Split, step: int) -> Metrics:
        """Returns the metrics of a split at a step that this or an earlier start has written."""
        found: Metrics = self.files.recorded(split, step) if self.files else {}
        found = process_group.broadcast(found)  # only process 0 has files
        if found:
            self.latest[split] = found
        return found

    def log_save(self, step: int) -> None:
        """Writes the step of the newest complete checkpoint to the status file."""
        if self.files:
            self.files.write_status(Status.RUNNING, step)

    def log_end(
        self,
        status: Status,
        step: int,
        reason: str | None = None,
        *,
        saved: bool = True,
        at: int | None = None,
    ) -> None:
        """Logs the end of the run.

        Args:
          status: How it ended.
          step: The last step; for a failed run, the step of its newest checkpoint.
          reason: Why it ended early.
          saved: Whether the state after `step` is saved.
          at: The step that failed; None if that is not known.

        Raises:
          StorageError: If the files of a finished run cannot be written.
        """
        self.trackers.status = status
        if self.files:
            # The status is written last: a finished run has all of its files.
            for write in (
                partial(self.performance.write_program, wait=status is Status.FINISHED),
                partial(self.times.end, status, reason, at),
                partial(self.files.write_status, status, step, reason),
            ):
                try:
                    write()
                except StorageError as error:
                    if status is Status.FINISHED:
                        raise
                    self.terminal.warning(str(error))  # the reason of the end matters more
        if status is Status.PREEMPTED:
            done = f"saved step {step:,}; run the command again to resume"
            if not (self.config.workdir and saved):
                done = "nothing saved" + (" (no workdir)" if not self.config.workdir else "")
            self.terminal.result(f"{reason}: {done}", LineColor.WARNING)
        if status is Status.FINISHED:
            where = f"; files in {self.config.workdir}" if self.files else ""
            self.terminal.line(f"finished at step {step:,}{where}", LineColor.SUCCESS)
            if times := self.times.measure(step):
                self.terminal.line(goodput_line(times))
            rows = {str(s): self._shown(found) for s, found in self.latest.items() if found}
            self.terminal.results(rows, step)


def _processes() -> str:
    count = process_group.count()
    return f" of {count} processes" if count > 1 else ""


def _size(arrays: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(arrays))
