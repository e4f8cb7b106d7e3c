"""The content of a workdir, and its incremental reading."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdtrain.checkpoints.listing import Listing, list_checkpoints
from spmdtrain.errors import UserError, foreign
from spmdtrain.record.readers import (
    MOST_COLUMNS,
    EventLog,
    FileState,
    GrowingFile,
    MediaLog,
    MetricColumns,
    PerformanceColumns,
    file_state,
    read_object,
    take_objects,
)
from spmdtrain.record.run_files import FIELDS, Writer
from spmdtrain.record.storage import folder_of

# The logs: file name to attribute of `RunData`, and the class that collects its lines.
_LOGS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "metrics.jsonl": ("metrics", MetricColumns),
    Writer.EVALUATOR.file("metrics", ".jsonl"): ("evaluator", MetricColumns),
    "performance.jsonl": ("performance", PerformanceColumns),
    "events.jsonl": ("events", EventLog),
    "media.jsonl": ("media", MediaLog),
}


@dataclass
class RunData:
    """The content of a workdir. Objects that are missing or malformed are empty.

    Attributes:
      workdir: The path as the user gave it.
      name: The name of the run in the page.
      config_file: The content of `config.json`.
      status: The content of `status.json`.
      program: The content of `program.json`.
      evaluator: The lines of `metrics.evaluator.jsonl`.
      checkpoints: The checkpoints; None if they cannot be listed.
      faults: A sentence for each file that could not be read.
    """

    workdir: str
    name: str
    config_file: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    program: Mapping[str, Any] = field(default_factory=dict)
    metrics: MetricColumns = field(default_factory=MetricColumns)
    evaluator: MetricColumns = field(default_factory=MetricColumns)
    performance: PerformanceColumns = field(default_factory=PerformanceColumns)
    events: EventLog = field(default_factory=EventLog)
    media: MediaLog = field(default_factory=MediaLog)
    checkpoints: Listing | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def config(self) -> Mapping[str, Any]:
        return object_in(self.config_file, "config")

    @property
    def status_name(self) -> str:
        """The status, such as `finished`; empty if it is not known."""
        return foreign(self.status.get("status") or "", 40)

    @property
    def step(self) -> int:
        """The last step that is known; 0 without one."""
        saved = self.status.get("step")
        steps = [saved] if type(saved) is int else []
        return max(*steps, self.metrics.last_step(), *(s.last_step for s in self.events.starts), 0)


def object_in(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns an object inside a JSON object; `{}` if there is none."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


class RunReader:
    """Reads the workdir of a run, a folder or `gs://` URL, and later only what has grown.

    Raises:
      UserError: If it is not the workdir of a run.
      StorageError: If it cannot be accessed.
    """

    def __init__(self, workdir: str, name: str) -> None:
        self.folder = folder_of(workdir)
        self.data = RunData(workdir, name)
        self._logs = {name: GrowingFile(self.folder / name) for name in _LOGS}
        self._state: tuple[object, ...] | None = None
        names = (*FIELDS, "metrics.jsonl", "checkpoints")
        if not any(file_state(self.folder / name) for name in names):
            raise UserError(
                f"{workdir} is not the workdir of a run: it has no {', no '.join(names[:2])} and "
                f"no {names[3]}"
            )

    def unread(self) -> int:
        """Returns the bytes of the logs that the next `refresh` reads."""
        return sum(log.unread() for log in self._logs.values())

    def refresh(self, on_bytes: Callable[[int], None] = lambda done: None) -> bool:
        """Reads what has changed since the last call; returns whether anything has.

        `on_bytes` receives the number of bytes of the logs since its last call. Raises
        `StorageError` if a file cannot be accessed.
        """
        state = self._states()
        if state == self._state:
            return False
        data, faults = self.data, list[str]()
        objects = []
        for name in FIELDS:
            content, fault = read_object(self.folder / name)
            objects.append(content or {})
            faults += [fault] if fault else []
        data.config_file, data.status, data.program = objects
        for name, (attribute, new) in _LOGS.items():
            log = self._logs[name]
            while (found := log.read()) is not None:
                replaced, lines = found
                if replaced:
                    setattr(data, attribute, new())
                take_objects(lines, getattr(data, attribute).add, on_bytes)
            if log.fault:
                faults.append(log.fault)
            if invalid := getattr(data, attribute).invalid:
                lines_are = "line is" if invalid == 1 else "lines are"
                faults.append(f"{name}: {invalid:,} {lines_are} not valid and left out")
            if len(getattr(getattr(data, attribute), "columns", ())) == MOST_COLUMNS:
                faults.append(f"{name}: metrics after the first {MOST_COLUMNS:,} are left out")
        times = data.performance.times
        data.events.extend(
            (time, step) for step, time in zip(*times.by_step(), strict=True) if time is not None
        )
        try:
            source = list_checkpoints(str(self.folder))
            data.checkpoints = Listing.of(source.folder, source.steps)
        except UserError as error:
            data.checkpoints = None
            faults.append(str(error))
        data.faults = [foreign(fault, 500) for fault in faults]
        self._state = state  # only now, so that after an error the next call reads all of it
        return True

    def _states(self) -> tuple[FileState | None, ...]:
        names = (*FIELDS, *_LOGS, "checkpoints")
        return tuple(file_state(self.folder / name) for name in names)
