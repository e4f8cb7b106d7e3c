"""The steps of a run as its workdir records them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spmdtrain.checkpoints.listing import Source, list_checkpoints
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.read_arrays import storage_errors
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record.lines import RunEvent, hash_of_sums, last_step, read_events, read_hashes
from spmdtrain.record.run_files import FIELDS, Split, Writer, status_of, written_metrics
from spmdtrain.record.storage import failures, folder_of, one_line
from spmdtrain.record.validation import (
    Malformed,
    OtherFields,
    check,
    check_fields,
    parse_object,
    read_bytes,
)

_NOTHING: Mapping[str, float] = {}
_NO_SUMS: Mapping[str, str] = {}


@dataclass(frozen=True)
class RecordedStep:
    """The record of a step.

    Attributes:
      metrics: The metrics of its line of training; only the loss if only a hash was logged.
      sums: The checksum of each array of the state after the step by path, in the order of the
        state.
    """

    metrics: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    sums: Mapping[str, str] = field(default_factory=lambda: _NO_SUMS)

    @property
    def hash(self) -> str | None:
        """The hash of the state after the step; None if it is not known."""
        return hash_of_sums(self.sums) if self.sums else None


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run in its workdir.

    Attributes:
      config: The configuration as JSON values; {} if `config.json` is missing.
      experiment: The experiment's file; None if it is not known.
      experiment_sha256: The SHA-256 of that file at the last start; "" if unknown.
      versions: Versions of libraries by name.
      device_kind: "" if it is not known.
      devices: The number of devices of each start, by the step from which it began.
      processes: The number of processes of each start, by the step from which it began.
      steps: The recorded steps by number, ascending.
      first_step: The step from which the run began: above 0 for a fork.
      last_step: The last step that the run is known to have made.
      failed: The reason of each failed step.
    """

    workdir: str
    config: Mapping[str, Any]
    experiment: str | None
    experiment_sha256: str
    versions: Mapping[str, str]
    device_kind: str
    devices: Mapping[int, int]
    processes: Mapping[int, int]
    steps: Mapping[int, RecordedStep]
    checkpoints: Source
    first_step: int
    last_step: int
    failed: Mapping[int, str]

    def devices_of(self, step: int) -> int | None:
        """Returns the number of devices that made a step; None if it is not known."""
        return _made_by(self.devices, step)

    def processes_of(self, step: int) -> int | None:
        """Returns the number of processes that made a step; None if it is not known."""
        return _made_by(self.processes, step)


def _made_by(starts: Mapping[int, int], step: int) -> int | None:
    """Returns the value of the start that made a step; `starts` has the first steps as keys."""
    before = [first for first in starts if first < step]
    return starts[max(before)] if before else None


def read_run(workdir: str) -> RecordedRun:
    """Reads the record of a run from its workdir, a folder or URL.

    Raises:
      UserError: If it is not the workdir of a run.
      StorageError: If a file cannot be read.
    """
    content = _read_config(workdir)
    metrics = written_metrics(workdir, Writer.TRAINING, Split.TRAIN)
    hashes, events, checkpoints = (
        read_hashes(workdir),
        read_events(workdir),
        list_checkpoints(workdir),
    )
    if not (content or metrics or checkpoints.steps):
        raise UserError(
            f"{workdir} is not the workdir of a run: it has no config.json, metrics.jsonl and "
            "checkpoints"
        )
    sums = {step: found for step in checkpoints.steps if (found := _saved_sums(checkpoints, step))}
    sums |= {step: each.sums for step, each in hashes.items()}
    losses = {s: {"loss": x.loss} for s, x in hashes.items() if x.loss is not None}
    known: dict[int, Mapping[str, float]] = {**losses, **metrics}
    steps = {s: RecordedStep(known.get(s, {}), sums.get(s, {})) for s in sorted({*known, *sums})}
    config = content.get("config", {})
    began = [event.get("step", 0) for event in events if event["event"] == "start"]
    failed = {
        event["step"]: event.get("reason", "")
        for event in events
        if event["event"] == "end" and "step" in event
    }
    return RecordedRun(
        workdir=workdir,
        config=config,
        experiment=content.get("experiment"),
        experiment_sha256=content.get("experiment_sha256", ""),
        versions=content.get("versions", {}),
        device_kind=content.get("device_kind", ""),
        devices=_by_start(events, "devices"),
        processes=_by_start(events, "processes"),
        steps=steps,
        checkpoints=checkpoints,
        first_step=min(began, default=0) if config.get("fork_from") else 0,
        last_step=max([_saved_step(workdir), last_step(events), *steps, *failed]),
        failed=failed,
    )


def _by_start(events: Sequence[RunEvent], name: Literal["devices", "processes"]) -> dict[int, int]:
    """Returns a number of each start by the step from which the start began."""
    found: dict[int, int] = {}
    for event in events:
        if event["event"] == "start" and name in event:
            first = event.get("step", 0)
            # A later start replaces what earlier ones have recorded of the same steps.
            found = {step: n for step, n in found.items() if step < first}
            found[first] = event[name]
    return found


def _saved_step(workdir: str) -> int:
    """Returns the step in `status.json`, the last one that was saved; 0 if unknown."""
    try:
        status = status_of(workdir)
    except UserError:
        return 0
    return int((status or {}).get("step", 0))


def manifest_at(source: Source, step: int) -> Manifest | None:
    """Returns the manifest of the checkpoint of a step; None if it is missing or corrupted."""
    if step not in source.steps:
        return None
    folder = source.path(step)
    try:
        with storage_errors(folder):
            return Manifest.read(folder)
    except CheckpointCorruptedError:
        return None


def _saved_sums(source: Source, step: int) -> Mapping[str, str]:
    """Returns the checksums in the manifest of a checkpoint; {} if it lacks a part of the state."""
    manifest = manifest_at(source, step)
    if manifest is None or manifest.identity.lora.source:  # the base model is not part of it
        return {}
    return manifest.sums


_CONFIG_FILE = {"config": dict[str, Any], "versions": dict[str, str]} | dict.fromkeys(
    ("experiment", "experiment_sha256", "device_kind"), str
)


def _read_config(workdir: str) -> dict[str, Any]:
    """Returns the content of `config.json`; {} if there is no such file."""
    path = folder_of(workdir) / "config.json"
    try:
        content = parse_object(read_bytes(path))
        check_fields(content, FIELDS[path.name])
        for name, kind in _CONFIG_FILE.items():
            if name in content:
                check(content[name], kind, name)
    except FileNotFoundError:
        return {}
    except OtherFields as error:
        raise error.of_file(path) from error
    except Malformed as error:
        raise UserError(f"{path}: not the configuration of a run: {error}") from error
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error
    return content
