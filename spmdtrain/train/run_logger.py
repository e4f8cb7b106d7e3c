"""What a run tells as it goes: to the person at the terminal, and to the files in its workdir."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from spmdtrain.config import RunConfig, as_json
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError
from spmdtrain.files.run_files import RunFiles, Split, Status
from spmdtrain.sharding.placement import Placement
from spmdtrain.terminal import Rate, Terminal, duration, number

Metrics = dict[str, float]


def nothing_told() -> dict[Split, dict[int, Metrics]]:
    """Returns the splits whose metrics are kept, without any."""
    return {Split.EPOCH: {}, Split.EVAL: {}}


class RunLogger:
    """Tells one run's story. Without `files` only the terminal hears it."""

    def __init__(self, terminal: Terminal, files: RunFiles | None, config: RunConfig) -> None:
        self.terminal, self.files, self.config = terminal, files, config
        self.latest: dict[Split, Metrics] = {split: {} for split in Split}
        self.batch_size = config.global_batch_size
        """Examples of a step; a `Loop` may place others than the configuration says."""
        self.told = nothing_told()
        """All that was written of these splits, by step."""
        self._rate = Rate()
        self._seconds = 0.0  # of training
        self._since: float | None = None  # when it went on last
        self._counts: dict[str, Counter[int]] = {}  # since the last line of training

    def begin(self, step: int, placement: Placement) -> None:
        """The run goes on from `step`: what was written of later steps is taken back."""
        if self.files:
            self.files.prepare_curves()  # beside the compilation, and not at the first write
            self.files.rewind(step)
            self.files.write_config(
                as_json(self.config), mesh=placement.axes, devices=placement.devices
            )
            self.files.write_status(Status.RUNNING, step)
        if self.config.workdir is not None:
            for split in self.told:
                found = list(self.files.history(split).items()) if self.files else []
                # Process 0 alone has files.
                self.told[split] = dict(process_group.broadcast(found))

    def log_header(self, placement: Placement, params: Any, program: str) -> None:
        """The one line that says what is about to run."""
        batch, rate = self.batch_size, self.config.learning_rate
        devices = placement.devices
        rows = batch or 0
        if batch == self.config.global_batch_size is not None:
            rows = self.config.padded_batch_size(placement.batch_shards)
        padded = f" padded to {rows}" if rows != batch else ""
        self.terminal.line(
            f"{len(devices)} x {devices[0].device_kind}{_processes()}, {placement.name}, "
            f"mesh {placement.axes}; "
            + (
                ""
                if batch is None
                else f"global batch {batch}{padded} ({rows // placement.batch_shards} per device); "
            )
            + ("" if rate is None else f"learning rate {rate:g}; ")
            + f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters; {program}"
        )

    def restart_timer(self, step: int) -> None:
        """From here on the time counts as training's."""
        self._rate.restart(step)
        self.train_pauses()
        self._since = time.perf_counter()

    def train_pauses(self) -> None:
        """Until `restart_timer`, the time does not count as training's."""
        self._seconds, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds of training up to now, without evaluations, saves and compilation."""
        now = time.perf_counter()
        return self._seconds + (0.0 if self._since is None else now - self._since)

    def count(self, name: str, value: int) -> None:
        """One more of a number that each step has: lines of training tell how many had which."""
        self._counts.setdefault(name, Counter())[value] += 1

    def trained(self, step: int, total: int, metrics: Metrics, *, made: int) -> None:
        """The numbers of one train step; `made` are known to be done, which may be more."""
        self.latest[Split.TRAIN] = metrics
        rate = self._rate.read(made)
        speed: Metrics = {}
        if rate is not None:
            speed = {} if self.batch_size is None else {"examples/s": rate * self.batch_size}
            speed["steps/s"] = rate
        if self.files:
            curves = {f"speed/{unit.replace('/s', '_per_second')}": v for unit, v in speed.items()}
            self.files.write_metrics(step, Split.TRAIN, metrics, curves, self._counts)
        self._counts = {}
        text = "  ".join([_words(metrics), *(f"{number(v)} {unit}" for unit, v in speed.items())])
        if self.terminal.has_bar:
            self.terminal.advance(step, text)
        else:
            left = "" if rate is None else f"  {duration((total - step) / rate)} left"
            self.terminal.line(f"step {step}/{total}  {text}{left}")

    def log_evaluation(self, split: Split, step: int, metrics: Metrics) -> None:
        """The numbers of an evaluation of the state after `step`."""
        self.latest[split] = metrics
        if self.files:
            self.files.write_metrics(step, split, metrics)
        if split in self.told:
            self.told[split][step] = metrics
        self.terminal.line(f"{split} at step {step}: {_words(metrics)}")

    def epoch_ended(self, step: int, metrics: Metrics) -> None:
        """Write the means of the epoch that ends at `step`; "epoch" among them is its number."""
        self.told[Split.EPOCH][step] = metrics
        if self.files:
            self.files.write_metrics(step, Split.EPOCH, metrics)
        units = {"seconds": "s", "examples_per_second": "examples/s"}
        shown = {k: x for k, x in metrics.items() if k != "epoch" and k not in units}
        speed = [f"{number(metrics[name])} {of}" for name, of in units.items() if name in metrics]
        text = "  ".join([_words(shown), *speed])
        self.terminal.line(f"epoch {metrics['epoch']:.0f} at step {step}: {text}")

    def read_metrics(self, split: Split, step: int) -> Metrics:
        """What has already been written of a split at a step, by this or an earlier start."""
        found: Metrics = self.files.recorded(split, step) if self.files else {}
        found = process_group.broadcast(found)  # process 0 alone has files
        if found:
            self.latest[split] = found
        return found

    def saved(self, step: int) -> None:
        """A checkpoint is on its way."""
        if self.files:
            self.files.write_status(Status.RUNNING, step)

    def end(
        self, status: Status, step: int, reason: str | None = None, *, saved: bool = True
    ) -> None:
        """What has become of the run; `step` is the last one, which may have been `saved`."""
        if self.files:
            try:
                self.files.write_status(status, step, reason)
            except StorageError as error:
                if status is Status.FINISHED:
                    raise
                self.terminal.line(str(error))  # and on with what ended the run
        if status is Status.PREEMPTED:
            done = f"saved step {step:,}; start again to go on from there"
            if not (self.config.workdir and saved):
                done = "nothing saved" + (", as no workdir" if not self.config.workdir else "")
            self.terminal.line(f"{reason}: {done}")
        if status is Status.FINISHED:
            where = f"; files in {self.config.workdir}" if self.files else ""
            self.terminal.line(f"finished at step {step:,}{where}")
            self.terminal.results({str(s): found for s, found in self.latest.items() if found})


def _processes() -> str:
    count = process_group.count()
    return f" of {count} processes" if count > 1 else ""


def _words(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in metrics.items())
