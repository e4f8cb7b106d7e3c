"""The experiment and the configuration of a run, from its `config.json`."""

import dataclasses
import os
import stat
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.command_line import EXCLUSIVE, Command, parse_command_line
from spmdtrain.config.experiment import ExperimentFile, load_experiment
from spmdtrain.config.options import MeshSpec
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError, foreign
from spmdtrain.record.storage import is_url
from spmdtrain.replay.recorded_run import RecordedRun
from spmdtrain.sharding.placement import configure_backend, make_placement, mirrored_config
from spmdtrain.strategies import strategy

# Fields of the place of a run, which a replay sets itself, and those that are resolved already.
_OWN = {
    *("workdir", "cpu_devices", "resume"),
    *("learning_rate_scaling", "learning_rate_base_batch_size", "learning_rate_table"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of the run command that are needed to parse a configuration."""

    config: str
    preset: str | None = None


def restore_config(
    run: RecordedRun, file: str | None, terminal: Terminal
) -> tuple[ExperimentFile, RunConfig]:
    """Executes the experiment of a run and returns it with the run's resolved configuration.

    Args:
      file: The experiment's file; None for the file that the run has recorded, which the terminal
        then names.

    Raises:
      UserError: If the file or the configuration is not known, or they do not belong together, or
        the file that the run names may be another user's.
    """
    path = file or run.experiment
    if path is None or not run.config:
        raise UserError(
            f"{run.workdir} does not record its experiment, because its config.json is missing, is "
            "of an older version, or its run was not started by the run command: give the "
            "experiment's file: --config FILE"
            if path is None
            else f"{run.workdir} has no config.json, so its configuration is not known"
        )
    if not Path(path).is_file():
        raise UserError(
            f"{foreign(path)}, the experiment of {run.workdir}, does not exist: give the place of "
            "the file: --config FILE"
        )
    if file is None:
        if why := _distrust(path, run.workdir):
            raise UserError(
                f"config.json of {run.workdir} names {foreign(path)} as its experiment, and {why}. "
                "A replay executes that file: read it, and give --config FILE if you trust it"
            )
        terminal.line(f"executing {foreign(path)}, as config.json of the run says")
    experiment = load_experiment(path, frozenset())
    default = experiment.preset(None)
    arguments = list(_arguments(run.config, default, path))
    command: Command = parse_command_line(["--config", path, *arguments], _Options, "replay")
    config = dataclasses.replace(
        command.config,
        workdir=run.workdir,
        cpu_devices=run.config.get("cpu_devices"),
        learning_rate_scaling="none",
        learning_rate_base_batch_size=None,
        learning_rate_table={},
    )
    return command.experiment, config


def _distrust(path: str, workdir: str) -> str | None:
    """Returns why a file that a run names is not executed without `--config`; None if it is."""
    status = os.stat(path)
    if not os.path.isabs(path):
        return "that is no absolute path"
    if not is_url(workdir) and Path(path).resolve().is_relative_to(Path(workdir).resolve()):
        return "the file lies inside the run, which may come from someone else"
    if status.st_uid not in (os.geteuid(), 0):
        return f"the file belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "every user can write to the file"
    return None


def config_on_devices(config: RunConfig, devices: int | None, terminal: Terminal) -> RunConfig:
    """Returns a run's configuration on other devices; strategy and mesh are kept if they fit.

    Args:
      devices: Number of devices; None for the devices that the configuration asks for.
      terminal: Receives a warning if strategy and mesh are replaced.

    Raises:
      UserError: If there are not as many devices.
    """
    if devices is None:
        configure_backend(config)
        return config
    if devices < 1:
        raise UserError(f"--devices is {devices}: it must be 1 or more")
    config = dataclasses.replace(config, cpu_devices=devices)
    configure_backend(config)
    first = tuple(range(devices))
    if strategy(config.strategy).has_mesh:
        mesh = dataclasses.replace(config.mesh, devices=first)
        chosen = dataclasses.replace(config, mesh=mesh)
        try:
            make_placement(chosen)
            return chosen
        except UserError as error:
            terminal.warning(f"mirrored, because the run's own placement does not fit: {error}")
    elif devices == 1:
        return config
    return mirrored_config(config, MeshSpec(devices=first))


def _arguments(
    saved: Mapping[str, Any], default: Any, path: str, prefix: str = ""
) -> Iterator[str]:
    """Yields the arguments of the run command that turn the defaults into a saved configuration."""
    before = config_as_json(default)
    hints = typing.get_type_hints(type(default))
    exclusive = {name: other for pair in EXCLUSIVE for name, other in (pair, pair[::-1])}
    for name, value in saved.items():
        if not prefix and name in _OWN:
            continue
        if name not in before:
            raise UserError(
                f"the run was trained with {foreign(prefix + name)}={foreign(value)}, and the "
                f"configuration of {path} has no such field: give the file of that time: --config "
                "FILE"
            )
        if value == before[name]:
            continue
        if value is None and not prefix and saved.get(exclusive.get(name, "")) is not None:
            continue  # the other one of the pair clears it
        own = getattr(default, name)
        if dataclasses.is_dataclass(own) and isinstance(value, dict):
            yield from _arguments(value, own, path, f"{prefix}{name}.")
            continue
        flag = f"--{prefix}{name}".replace("_", "-")
        if hints[name] is bool:
            group, _, last = f"{prefix}{name}".replace("_", "-").rpartition(".")
            inside = f"{group}." if group else ""
            yield f"--{inside}{last}" if value else f"--{inside}no-{last}"
        elif isinstance(value, (list, dict)):
            yield from (flag, *map(str, _flat(value)))
        else:
            yield f"{flag}={value}"


def _flat(value: Any) -> Iterator[Any]:
    """Yields the values in nested lists and objects, in order."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _flat(each)
    elif isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value
