"""The log of a run: lines on the terminal, files in the workdir, times and media."""

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import jax

from spmdtrain.adapters.base import Function
from spmdtrain.config.run_config import RunConfig, config_as_json, file_of_config
from spmdtrain.distributed import out_of_memory, process_group, progress
from spmdtrain.distributed.process_group import Job
from spmdtrain.distributed.progress import Phase, end_interval, phase
from spmdtrain.document.terminal import (
    LineColor,
    Point,
    Terminal,
    duration,
    metric_texts,
    number,
)
from spmdtrain.errors import StorageError, UserError, is_interactive
from spmdtrain.record.lines import (
    EVENTS_FILE,
    HASHES_FILE,
    LinesFile,
    ResumedAt,
    RunEvent,
    RunTimes,
    StateHash,
    last_step,
    run_times,
    what_is_lost,
)
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import COUNTS_SUFFIX, PERFORMANCE_FILE, RunFiles, Split, Status
from spmdtrain.record.storage import storage_errors
from spmdtrain.record.validation import is_number, parse_objects
from spmdtrain.sharding.placement import Placement
from spmdtrain.sharding.rules import describe_sharding
from spmdtrain.step.compile import Program, ProgramMemory
from spmdtrain.step.flops import CONVENTION, model_flops
from spmdtrain.step.metrics import LEARNING_RATE, NORMS
from spmdtrain.step.state import TrainState
from spmdtrain.trackers.base import Figure, Histogram, Media
from spmdtrain.trackers.run_trackers import RunTrackers, check_items
from spmdtrain.train.live_arrays import live_array_bytes, why_nearly_full
from spmdtrain.train.slowness import Slow, SlownessWatch
from spmdtrain.tree import named_leaves
from spmdtrain.xla.chips import device_memory, peak_flops
from spmdtrain.xla.collectives import Collective

# -- The log of a run: lines on the terminal and files in the workdir ------------------------------

Metrics = dict[str, float]
Written = dict[Split, dict[int, Metrics]]
"""Metrics by split and step."""
_NO_CURVES: Mapping[str, float] = {}
_NO_COUNTS: Mapping[str, Mapping[int, int]] = {}


class RunLogger:
    """Writes the log of one run.

    Args:
      files: The files of the workdir; None without a workdir, and in all processes but process 0.
      skipped_records: Numbers of bad records that are left out of the data, by split.
      trackers: Receive the metrics, in process 0; by default there are none.
      job: The job whose slow processes are named; None if there is one process, or none waits for
        another.
    """

    def __init__(
        self,
        terminal: Terminal,
        files: RunFiles | None,
        config: RunConfig,
        skipped_records: Mapping[str, int] | None = None,
        trackers: RunTrackers | None = None,
        job: Job | None = None,
    ) -> None:
        self.terminal, self.files, self.config = terminal, files, config
        self._skipped_records = skipped_records or {}
        self.trackers = RunTrackers.none() if trackers is None else trackers
        self.latest: dict[Split, Metrics] = {split: {} for split in Split}
        self.batch_size = config.global_batch_size
        """Examples in one step; in a `Loop`, the examples of the batch that the user passes."""
        self.written: Written = {Split.EPOCH: {}, Split.EVAL: {}}
        """The metrics that were written for epochs and evaluations."""
        self.performance, self.times = PerformanceLog(files), TimeAccount(files)
        self.slowness = None if job is None else SlownessWatch(job, self.times.phases)
        """Names slow processes of the job. Its user closes it."""
        self._hashes: LinesFile | None = None  # opened by the first hash
        self.timer = StepTimer()
        self.program_memory: ProgramMemory | None = None
        """Of the program that `log_header` has described."""
        self._devices: list[jax.Device] = []  # of this process
        # The step from which this start continues, and what earlier ones have written for it.
        self._earlier: tuple[int, Mapping[str, Metrics]] = 0, {}
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
        logged = self.performance.last_line() if was_used else None
        self.times.begin(step, len(placement.devices), logged)
        rank = jax.process_index()
        self._devices = [device for device in placement.devices if device.process_index == rank]
        if self.files:
            self.files.rewind(last)
            if (self.files.folder / HASHES_FILE).exists():
                self.log_hash(ResumedAt(last))
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
        # A start that is lost before its first line has this value, too.
        self.trackers.scalars(step, {f"{_TAGS[PROCESSES]}/{PROCESSES}": process_group.count()})
        if self.config.workdir is not None:
            for split in self.written:
                found = list(self.files.history(split).items()) if self.files else []
                # Only process 0 has files.
                self.written[split] = dict(process_group.broadcast(found))
            at_step = self.files.recorded(step) if self.files else {}
            self._earlier = step, process_group.broadcast(at_step)

    def log_header(
        self, placement: Placement, params: Any, program: Program, trained: Any = None
    ) -> None:
        """Prints what is about to run: devices, mesh, batch, program, and bad records if any.

        `trained` are the parameters that are not frozen; by default all.
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
        compiled, *others = program.summary.split("; ")
        total = _size(params)
        count = total if trained is None else _size(trained)
        frozen = f", {count:,} trained" if count != total else ""
        processes = process_group.count()
        of = f" of {processes} processes" if processes > 1 else ""
        lines = [
            f"{len(devices)} x {devices[0].device_kind}{of}, {placement.description}",
            ", ".join(facts),
            f"{total:,} parameters{frozen}; {compiled}",
            *others,
            *program.decisions,
        ]
        self.terminal.lines([line for line in lines if line])
        self.program_memory = memory = program.memory
        limit = device_memory(self._devices).limit
        if memory and limit and (why := why_nearly_full(memory, limit)):
            self.terminal.warning(why)
        if any(self._skipped_records.values()):
            counts = (f"{split} {count:,}" for split, count in self._skipped_records.items())
            self.terminal.warning(f"bad records left out: {', '.join(counts)}")

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
        rate, wait = self.timer.read(done)
        batch = self.batch_size
        examples = None if rate is None or batch is None else rate * batch
        curves = _NO_CURVES
        if process_group.is_chief():  # others have neither files nor trackers
            times = self.times.measure(done)
            goodput = None if times is None else times.goodput
            more = {} if self.slowness is None else self.slowness.figures
            if self.config.memory_profile:
                more = {**more, **self._profile_memory()}
            curves = self.performance.record(
                step, examples, rate, wait, goodput, self._devices, more
            )
            if self.slowness is not None:
                self._log_slow(self.slowness, step)
        self._write(step, Split.TRAIN, metrics, curves, self._counts)
        self._counts = {}
        shown = self._shown(metrics)
        texts = metric_texts(shown)
        texts += [] if examples is None else [f"{number(examples)} examples/s"]
        texts += [] if rate is None else [f"{number(rate)} steps/s"]
        texts += [f"input_wait {wait:.1%}"] if (wait or 0.0) >= _NOTABLE_WAIT else []
        if self.terminal.has_bar:
            self.terminal.advance(step, texts, shown)
        else:
            texts += [] if rate is None else [f"{duration((total - step) / rate)} left"]
            self.terminal.line("  ".join([f"step {step}/{total}", *texts]))

    def _profile_memory(self) -> Mapping[str, float]:
        """Returns the bytes of this process and of the arrays on its fullest device.

        Replaces the profile of these arrays in the workdir.
        """
        if self.files:
            self.files.write_bytes(MEMORY_PROFILE, jax.profiler.device_memory_profile())
        found = {"live_array_bytes": live_array_bytes()}
        resident = out_of_memory.resident_memory()
        return found if resident is None else {"host_memory_bytes": resident, **found}

    def _shown(self, metrics: Metrics) -> Metrics:
        """Returns the metrics for the terminal: without norms, and without a constant rate."""
        hidden = {*NORMS} | (
            {LEARNING_RATE} if metrics.get(LEARNING_RATE) == self.config.learning_rate else set()
        )
        return {name: value for name, value in metrics.items() if name not in hidden}

    def log_hash(self, line: StateHash | ResumedAt) -> None:
        """Writes the hash of the state after a step, or from where hashes are written again."""
        if self.files:
            if self._hashes is None:
                self._hashes = self.files.lines_file(HASHES_FILE)
            self._hashes.append(line.to_json())

    def log_save(self, step: int, complete: int) -> None:
        """Logs that the state after `step` is being saved.

        `complete` is the step of the newest complete checkpoint, for the status file.
        """
        self.times.log("checkpoint", step)
        if self.files:
            self.files.write_status(Status.RUNNING, complete)

    def log_fault(self, step: int, message: str) -> None:
        """Logs that in a step a device has computed other gradients than the other devices."""
        self.terminal.warning(message)
        self.times.note("fault", step, message)

    def log_skipped(self, step: int, message: str) -> None:
        """Logs that a step has left its update out."""
        self.terminal.warning(message)
        self.times.note("skipped", step, message)

    def _log_slow(self, slowness: SlownessWatch, step: int) -> None:
        """Logs which processes have become slow or are no longer, up to a step."""
        for slow in slowness.take():
            self.log_slow(step, slow)

    def log_slow(self, step: int, slow: Slow) -> None:
        """Logs up to a step that a process or a device has become slow, or is no longer."""
        say = self.terminal.warning if slow.share else self.terminal.line
        say(f"step {step}: {slow.text}")
        self.times.log_slow(step, slow)

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
        best, name = False, self.config.best_metric
        if split is Split.EVAL and name in metrics:
            sign = 1 if self.config.best_direction == "min" else -1
            earlier = [m[name] * sign for m in self.written[split].values() if name in m]
            earlier = [value for value in earlier if not math.isnan(value)]
            best = bool(earlier) and metrics[name] * sign < min(earlier)
        if split in self.written:
            self.written[split][step] = metrics
        texts = metric_texts(metrics) + (["best"] if best else [])
        color = LineColor.SUCCESS if best else LineColor.PLAIN
        line = f"{split} at step {step}: {'  '.join(texts)}"
        self.terminal.line(line, color, point=Point(split, step, metrics))

    def log_epoch(self, step: int, metrics: Metrics) -> None:
        """Logs the means of the epoch that ends at `step`; "epoch" among them is its number."""
        self.written[Split.EPOCH][step] = metrics
        self._write(step, Split.EPOCH, metrics)
        units = {"seconds": "s", "examples_per_second": "examples/s"}
        apart = {"epoch", "input_wait", *units}
        shown = {k: x for k, x in self._shown(metrics).items() if k not in apart}
        speed = [f"{number(metrics[name])} {of}" for name, of in units.items() if name in metrics]
        wait = metrics.get("input_wait", 0.0)
        speed += [f"input_wait {wait:.1%}"] if wait >= _NOTABLE_WAIT else []
        text = "  ".join([*metric_texts(shown), *speed])
        line = f"epoch {metrics['epoch']:.0f} at step {step}: {text}"
        self.terminal.line(line, point=Point("epoch", step, shown))

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
        tagged = {
            f"{split}/{name}{COUNTS_SUFFIX}": Histogram.of_integers(count)
            for name, count in counts.items()
        }
        self.trackers.scalars(step, values | dict(curves), tagged)
        if trajectory is not None:
            self.trackers.flush()()
        if self.files:
            self.files.write_metrics(step, split, metrics, counts, trajectory or "")

    def earlier_metrics(self, split: Split, step: int) -> Metrics:
        """Returns the metrics of a split at a step that an earlier start has written.

        They can only be of the step from which this start continues, because `begin` removes the
        lines of later steps. They become the latest ones of the split.
        """
        first, by_split = self._earlier
        found = by_split.get(split, {}) if step == first else {}
        if found:
            self.latest[split] = found
        return found

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
        if status is Status.FINISHED and self.slowness is not None:
            self._log_slow(self.slowness, step)
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
            again = "run it again" if is_interactive() else "run the command again"
            done = f"saved step {step:,}; {again} to resume"
            if not (self.config.workdir and saved):
                done = "nothing saved" + (" (no workdir)" if not self.config.workdir else "")
                done += "; a Trainer keeps its state: call fit again" if is_interactive() else ""
            self.terminal.result(f"{reason}: {done}", LineColor.WARNING)
        if status is Status.FINISHED:
            where = f"; files in {self.config.workdir}" if self.files else ""
            self.terminal.line(f"finished at step {step:,}{where}", LineColor.SUCCESS)
            if (times := self.times.measure(step)) and times.is_meaningful:
                self.terminal.line(goodput_line(times))
            rows = {str(s): self._shown(found) for s, found in self.latest.items() if found}
            self.terminal.results(rows, step)


def _size(arrays: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(arrays))


# -- The report `program.json` of a run: its parameters, the operations and collectives of a step

PyTree = Any


def program_report(
    program: Program, params: PyTree, places: PyTree | None, placement: Placement
) -> dict[str, Any]:
    """Returns the content of `program.json`; arguments as for `PerformanceLog.describe`."""
    leaves, found = named_leaves(params), program.collectives
    axes = {} if placement.mesh is None else placement.mesh.shape
    content: dict[str, Any] = {
        "parameters": sum(math.prod(leaf.shape) for leaf in leaves.values()),
        "flops_per_step": None,
        "flops_convention": CONVENTION,
        "peak_flops_per_device": peak_flops(placement.devices[0].device_kind),
        "devices": len(placement.devices),
        "mesh": {str(name): size for name, size in axes.items() if size > 1},
        "decisions": list(program.decisions),
        "collectives": [] if isinstance(found, str) else _totals(found),
        "sharding": [] if places is None else _table(leaves, places),
    }
    if isinstance(found, str):
        content["collectives_unknown"] = found
    try:
        if program.jaxpr is not None and program.retrace is not None:
            flops = model_flops(program.jaxpr, program.retrace).once
            content["flops_per_step"] = flops / program.steps
    except Exception as error:  # of an unusual program; a report must not end a run
        content["flops_unknown"] = f"{type(error).__name__}: {error}"
    return content


def _totals(found: Sequence[Collective]) -> list[dict[str, Any]]:
    """Returns the number and the bytes of the collectives by kind and axes."""
    totals: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for each in found:
        total = totals.setdefault((each.kind, each.axes), [0, 0])
        total[0] += 1
        total[1] += each.bytes
    return [
        {"kind": kind, "axes": list(axes), "count": count, "bytes": size}
        for (kind, axes), (count, size) in sorted(totals.items(), key=lambda x: -x[1][1])
    ]


def _table(leaves: dict[str, Any], places: PyTree) -> list[dict[str, Any]]:
    """Returns the sharding of each parameter, and its bytes on a device."""
    where = named_leaves(places)
    return [
        {
            "path": name,
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "spec": describe_sharding(where[name]),
            "bytes_per_device": math.prod(where[name].shard_shape(tuple(leaf.shape)))
            * leaf.dtype.itemsize,
        }
        for name, leaf in leaves.items()
    ]


# -- The file `performance.jsonl`: speed, utilization, memory and goodput during a run -------------

PROGRAM_REPORT = "program"
PROCESSES = "processes"
_MEMORIES = ("device_memory_bytes", "live_array_bytes", "host_memory_bytes")
_TAGS = {"goodput": "time", PROCESSES: "job"} | dict.fromkeys(_MEMORIES, "memory")
"""Groups of curves; others are "speed"."""
MEMORY_PROFILE = "memory.pprof"
"""The file with the arrays that were alive at the last logged step, and the code that made them."""


class PerformanceLog:
    """Writes a line of `performance.jsonl` for each logged step of training, and `program.json`.

    Args:
      files: The files of the workdir; None without one, and in all processes but process 0.
    """

    def __init__(self, files: RunFiles | None) -> None:
        self._files = files
        self._lines: LinesFile | None = None
        self._counts_tokens = False
        self._weight, self._steps = 0.0, 0  # of the loss, since the last line
        self._report: Future[dict[str, Any]] | None = None
        self._program: Mapping[str, Any] = {}  # the content of `program.json`, once it is written

    def count_weights(self, weights: Sequence[float]) -> None:
        """Counts the loss's weights, given as a sum for each of several steps."""
        self._weight += sum(weights)
        self._steps += len(weights)

    def describe(
        self,
        program: Program,
        params: PyTree,
        places: PyTree | None,
        placement: Placement,
        *,
        counts_tokens: bool = False,
    ) -> None:
        """Computes the report of the run's first program, in a thread: the steps do not wait.

        Args:
          params: The parameters, or their shapes.
          places: Their shardings; None if they are on parameter servers.
          counts_tokens: Whether each weight of the loss belongs to a token, so that their sum
            counts tokens.
        """
        self._counts_tokens = counts_tokens
        if self._files is None or self._report is not None:
            return
        executor = ThreadPoolExecutor(1, thread_name_prefix="program-report")
        self._report = executor.submit(program_report, program, params, places, placement)
        executor.shutdown(wait=False)

    def write_program(self, *, wait: bool = False) -> None:
        """Writes `program.json` once it is computed; waits for that if `wait`."""
        if self._program or self._report is None or self._files is None:
            return
        if wait or self._report.done():
            self._program = self._report.result()
            self._files.write_report(PROGRAM_REPORT, self._program)

    def last_line(self) -> tuple[int, float] | None:
        """Returns the step and the time of the last line of earlier starts; None without one.

        Call it before `record`.
        """
        if self._files is None:
            return None
        self._lines = self._files.lines_file(PERFORMANCE_FILE)
        for line in parse_objects(self._lines.read()[-1:]):
            step, at = line.get("step"), line.get("time")
            if type(step) is int and is_number(at):
                return step, at
        return None

    def record(
        self,
        step: int,
        examples_per_second: float | None,
        steps_per_second: float | None,
        input_wait: float | None,
        goodput: float | None,
        devices: Any,
        more: Mapping[str, float],
    ) -> dict[str, float]:
        """Writes a line; returns the values for curves, by tag. None is a value that is not known.

        Args:
          steps_per_second: Speed since the last line.
          input_wait: Share of the time in which the devices waited for batches, from 0 to 1.
          goodput: Share of the time since the first start that was spent on steps, from 0 to 1.
          devices: The devices of this process.
          more: Further values by name.
        """
        self.write_program()
        tokens = utilization = None
        if steps_per_second is not None:
            if self._counts_tokens and self._steps:
                tokens = steps_per_second * self._weight / self._steps
            flops, peak = (
                self._program.get(x) for x in ("flops_per_step", "peak_flops_per_device")
            )
            if flops and peak:
                utilization = flops * steps_per_second / (peak * self._program["devices"])
        known = {
            "examples_per_second": examples_per_second,
            "steps_per_second": steps_per_second,
            "tokens_per_second": tokens,
            "model_flops_utilization": utilization,
            "input_wait": input_wait,
            "device_memory_bytes": device_memory(devices).peak,
            "goodput": goodput,
            PROCESSES: process_group.count(),
            **more,
        }
        self._weight, self._steps = 0.0, 0
        values = {name: value for name, value in known.items() if value is not None}
        if self._files is not None:
            if self._lines is None:
                self._lines = self._files.lines_file(PERFORMANCE_FILE)
            self._lines.append({"step": step, "time": time.time()} | values)
        return {f"{_TAGS.get(name, 'speed')}/{name}": value for name, value in values.items()}


# -- The time account of a run: `events.jsonl`, and the goodput over all of its starts -------------

_BETWEEN_SNAPSHOTS = 10.0  # seconds between two lines of snapshots
_INTERVAL = 30.0  # seconds between two lines of phases with lines of training
_WIDTH = 80  # of the summary


class TimeAccount:
    """Writes the events of one start of a run, and computes the goodput of the run.

    Args:
      files: The files of the workdir; None without one, and in all processes but process 0.
      clock: Returns seconds since the epoch.
    """

    def __init__(self, files: RunFiles | None, clock: Callable[[], float] = time.time) -> None:
        self._files, self._clock = files, clock
        self.phases = progress.take_clock()
        """The clock of the thread that trains."""
        self._lines: LinesFile | None = None
        self._earlier = RunTimes(0.0, 0.0, {})  # of the earlier starts
        self._began = self.phases.began  # when the first start began
        self._done = 0  # the last step that an earlier start has reached
        self._own: list[RunEvent] = []  # of this start, as far as `run_times` needs them
        self._step, self._written_at, self._ended = 0, 0.0, False
        self._snapshot_at = 0.0
        self.rewinds: list[list[str]] = []
        """The batches that were left out after each time that an earlier start went back."""
        self.source = ""
        """Where the state of this start came from: `source` of `RunEvent`."""

    @functools.cached_property
    def earlier_events(self) -> Sequence[RunEvent]:
        """The events of earlier starts, until `begin`; none in a process without files."""
        if self._files is None:
            return []
        with storage_errors(self._files.folder):
            exists = (self._files.folder / EVENTS_FILE).exists()
        return Run(str(self._files.folder)).events if exists else []

    def begin(self, step: int, devices: int, logged: tuple[int, float] | None = None) -> None:
        """Reads the events of earlier starts, and writes the start from `step`.

        Args:
          devices: Number of devices of all processes.
          logged: As for `what_is_lost`.
        """
        began = self.phases.began
        start: RunEvent = {"time": began, "event": "start", "step": step}
        start |= {"processes": process_group.count(), "devices": devices}
        start |= {"source": self.source} if self.source else {}
        if self._files is not None:
            events = self.earlier_events
            del self.earlier_events  # a long run has many
            self._earlier, self._done = run_times(events), last_step(events)
            for event in events:
                left_out = event.get("skip_steps")
                if left_out is not None and left_out not in self.rewinds:
                    self.rewinds.append(left_out)
            starts = [event["time"] for event in events if event["event"] == "start"]
            self._began = min([began, *starts[:1]])
            lost = self._earlier.lost
            gap = max(0.0, began - self._began - self._earlier.wall) if starts else 0.0
            lost["down"] = lost.get("down", 0.0) + gap
            self._lines = self._files.lines_file(EVENTS_FILE)
            if starts:
                start = what_is_lost(events, start, self._clock(), logged)
        self._own, self._step = [start], step
        self._write(start)

    def measure(self, step: int) -> RunTimes | None:
        """Returns the seconds of the run so far by use; None before `begin`.

        `step` is the last step that is known to be done.
        """
        if not self._own:
            return None
        self._step = max(self._step, step)
        event = self._now()
        # Points before the last step of an earlier start tell how long its steps took again.
        if len(self._own) > 1 and self._own[-1].get("step", 0) > self._done:
            self._own.pop()
        self._own.append(event)
        own, lost = run_times(self._own, done=self._done), dict(self._earlier.lost)
        for kind, seconds in own.lost.items():
            lost[kind] = lost.get(kind, 0.0) + seconds
        productive = self._earlier.productive + own.productive
        if event["time"] - self._written_at >= _INTERVAL:
            self._write(event)
        return RunTimes(max(0.0, event["time"] - self._began), productive, lost)

    def log(self, event: Literal["checkpoint", "evaluation"], step: int) -> None:
        """Writes that a checkpoint is being saved or an evaluation is done, and the phases."""
        if self._own:
            self._step = max(self._step, step)
            self._write({"time": self._clock(), "event": event, "step": step})
            self._write(self._now())

    def log_snapshot(self, step: int) -> None:
        """Writes that a snapshot is taken, at most every few seconds: a run may take many."""
        if self._own:
            self._step = max(self._step, step)
            if (now := self._clock()) - self._snapshot_at >= _BETWEEN_SNAPSHOTS:
                self._snapshot_at = now
                self._write({"time": now, "event": "snapshot", "step": step})
                self._write(self._now())

    def note(self, event: Literal["fault", "skipped"], step: int, reason: str) -> None:
        """Writes what a step was found to do, and why."""
        if self._own:
            self._write({"time": self._clock(), "event": event, "step": step, "reason": reason})

    def log_slow(self, step: int, slow: Slow) -> None:
        """Writes that a process or a device has become slow, or is no longer."""
        if not self._own:
            return
        event: RunEvent = {"time": self._clock(), "event": "slow", "step": step}
        event |= {"process": slow.name, "share": round(slow.share, 4), "cause": slow.cause}
        self._write(event | {"reason": slow.text} if slow.share else event)

    def end(
        self,
        status: str,
        reason: str | None,
        step: int | None = None,
        skip_steps: Sequence[str] | None = None,
    ) -> None:
        """Writes how this start ended; further calls do nothing.

        Args:
          status: "finished", "failed", "preempted" or "rewound".
          reason: Why it ended early.
          step: The step that failed; None if that is not known.
          skip_steps: The batches that the next start leaves out, if the run goes back.
        """
        if not self._own or self._ended:
            return
        self._ended = True
        self._write(self._now())
        end: RunEvent = {"time": self._clock(), "event": "end", "status": status}
        end |= {"reason": reason or ""}
        end |= {} if step is None else {"step": step}
        self._write(end if skip_steps is None else end | {"skip_steps": list(skip_steps)})

    def _now(self) -> RunEvent:
        seconds = self.phases.read()
        # Waiting for the compilation in other processes is compilation, too.
        seconds[Phase.COMPILE] = seconds.get(Phase.COMPILE, 0.0) + seconds.pop(Phase.COMPILED, 0.0)
        seconds[Phase.HOST] = seconds.get(Phase.HOST, 0.0) + seconds.pop(Phase.END, 0.0)
        plain = {str(phase): round(seconds.get(phase, 0.0), 6) for phase in _PHASES}
        return {"time": self._clock(), "event": "phases", "step": self._step, "seconds": plain}

    def _write(self, event: RunEvent) -> None:
        if event["event"] == "phases":
            self._written_at = event["time"]
        if self._lines is not None:
            self._lines.append(event)


_NOTABLE_WAIT = 0.05  # of the time; a smaller share is not shown
_PHASES = (
    *(Phase.START, Phase.COMPILE, Phase.RESTORE, Phase.STEP),
    *(Phase.LOAD, Phase.EVALUATE, Phase.SAVE, Phase.HOST),
)


def goodput_line(times: RunTimes) -> str:
    """Returns a line of at most 80 characters: the goodput and the largest other uses of time."""
    line = f"goodput {times.goodput:.0%} of {duration(times.wall)}".replace("%", " %")
    shares = {kind: seconds / times.wall for kind, seconds in times.lost.items() if times.wall > 0}
    separator = ": "
    for kind, share in sorted(shares.items(), key=lambda item: -item[1]):
        part = f"{separator}{kind} {share:.0%}".replace("%", " %")
        if share < 0.005 or len(line) + len(part) > _WIDTH:
            break
        line, separator = line + part, ", "
    return line


# -- The time of the steps, and the part of it in which the devices wait for batches ---------------


class StepTimer:
    """The seconds of training without evaluations, saves and compilation, and the speed of steps.

    It is paused until the first `restart`. The speed of rich's `Progress` includes evaluations and
    saves, and exists on a terminal only.

    Args:
      clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._before = 0.0  # seconds of training up to the last pause
        self._since: float | None = None  # when it was restarted; None while it is paused
        self.waited: float | None = None
        """Seconds of training in which the devices waited for batches; None if not counted."""
        self._read_from(0)

    def _read_from(self, step: int) -> None:
        """Lets the next reading begin with `step`."""
        self._rate: float | None = None
        self._share: float | None = None
        self._rate_from = step, self._clock()
        self._share_from = step, self._before, self.waited or 0.0

    def restart(self, step: int) -> None:
        """Counts the time from here on as training; the next reading begins with `step`."""
        self.pause()
        self._read_from(step)
        self._since = self._clock()

    def pause(self) -> None:
        """Stops counting the time as training until `restart`."""
        self._before, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._before + (0.0 if self._since is None else self._clock() - self._since)

    def count_wait(self, seconds: float) -> None:
        """Counts time in which the devices waited for a batch; 0 while the timer is paused."""
        self.waited = (self.waited or 0.0) + (0.0 if self._since is None else seconds)

    def read(self, step: int) -> tuple[float | None, float | None]:
        """Returns the steps per second and the share of waits, from 0 to 1, since the last reading.

        If `step`, the number of steps so far, has not changed, they are those of the last reading
        (None at first). The share is None if waits are not counted.
        """
        now, seconds = self._clock(), self.seconds
        first, began = self._rate_from
        if step > first and now > began:
            self._rate, self._rate_from = (step - first) / (now - began), (step, now)
        first, spent, waited = self._share_from
        if self.waited is not None and step > first and seconds > spent:
            self._share = min((self.waited - waited) / (seconds - spent), 1.0)
            self._share_from = step, seconds, self.waited
        return self._rate, self._share


def next_batch(
    batches: Iterator[PyTree],
    state: TrainState,
    count: Callable[[float], None],
    step: int | None = None,
) -> PyTree:
    """Returns the next batch, and counts the time in which the devices waited for it.

    If the devices have finished all dispatched steps when the batch is there, they have waited for
    as long as the call took. If steps are still running, the batch was ready in time, and the wait
    is 0. The check does not block.

    Args:
      batches: The batches, placed on the devices.
      state: The state that the last dispatched step returns; it may be pending.
      count: Receives the seconds.
      step: The step that uses the batch.
    """
    began = time.perf_counter()
    with phase(Phase.LOAD, step):
        batch = next(batches)
    pending = is_pending(state)
    seconds = time.perf_counter() - began
    end_interval(overlapped=pending)
    count(0.0 if pending else seconds)
    return batch


def is_pending(state: TrainState) -> bool:
    """Returns, without blocking, whether the devices still run the step that returns a state."""
    step: Any = state.step
    return not step.is_deleted() and not step.is_ready()


# -- Media that a run logs at its evaluations ------------------------------------------------------


def checked_media(function: Function | None) -> Function | None:
    """Returns a function of (model, batch) that checks the media that it returns by name.

    It is traced by JAX. Raises `UserError` if it is no function.
    """
    if function is None:
        return None
    if not callable(function):
        raise UserError(
            f"media is a {type(function).__name__}: it must be a function (model, batch) -> media "
            "by name"
        )

    @functools.wraps(function)
    def checked(*args: Any, **declared: Any) -> dict[str, Media]:
        found = function(*args, **declared)
        check_items(found, "media")
        for name, item in found.items():
            if isinstance(item, Figure):
                raise UserError(
                    f"media: {name!r} is a Figure, which has no arrays: log it in a callback"
                )
        return dict(found)

    return checked
