"""`python -m spmdtrain.run --config experiments/NAME.py`: train, evaluate or predict."""

import signal

_INTERRUPT = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and _INTERRUPT is signal.default_int_handler:
    # Ctrl-C while JAX is imported ends at once: there is nothing to save, and no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import tyro

from spmdtrain.checkpoints import verify
from spmdtrain.config import RunConfig, check
from spmdtrain.errors import ExitCode, UserError, exit_code_of
from spmdtrain.experiment import ExperimentFile, load_experiment
from spmdtrain.mesh import cpu_devices_in_environment, resolve_on_devices
from spmdtrain.terminal import Terminal
from spmdtrain.trainer import Trainer
from spmdtrain.writers import write_predictions

# Pairs of fields that say the same thing: to give one replaces a default of the other.
_EXCLUSIVE = (("epochs", "steps"), ("global_batch_size", "batch_size_per_device"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options; an experiment's Config may not have fields of these names."""

    config: str
    """The experiment: a Python file with a Config and a build(config)."""
    preset: str | None = None
    """One of the experiment's PRESETS, whose values the other options then change."""
    mode: Literal["train", "evaluate", "predict", "verify"] = "train"
    """What to do; evaluate and predict take the model from a checkpoint, verify checks them all."""


RESERVED = frozenset({f.name for f in dataclasses.fields(Options)} | {"topology", "json", "help"})


@dataclass(frozen=True)
class Command:
    """A command line, understood."""

    options: Options
    experiment: ExperimentFile
    config: RunConfig
    source: str | None
    """What to evaluate or predict from, where --init-from names it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        return exit_code_of(lambda: execute(parse(given)))
    except KeyboardInterrupt:
        print("interrupted before there was anything to save", file=sys.stderr)
        return ExitCode.INTERRUPTED


def parse(arguments: Sequence[str]) -> Command:
    """The command line, read in two steps: the experiment's file says what options there are."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    first.add_argument("--preset")
    try:
        known, _ = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if known.config is None:
        tyro.cli(_command(RunConfig(), __doc__), args=arguments, prog="python -m spmdtrain.run")
        raise AssertionError("tyro ends where --config is missing")
    experiment = load_experiment(known.config, RESERVED)
    default = experiment.preset(known.preset)
    given = {a.split("=")[0].lstrip("-").replace("-", "_") for a in arguments if a[:2] == "--"}
    default = _without_replaced(default, given)
    command: Any = tyro.cli(
        _command(default, experiment.doc), args=arguments, prog="python -m spmdtrain.run"
    )
    config = command.experiment
    check(config)
    if "cpu_devices" in given and (setting := cpu_devices_in_environment()):
        raise UserError(f"--cpu-devices and {setting} in the environment exclude each other")
    if config.workdir is None:
        config = dataclasses.replace(config, workdir=f"runs/{experiment.name}")
    source = config.init_from if "init_from" in given else None
    return Command(command, experiment, config, source)


def _command(default: RunConfig, description: str | None) -> Any:
    """The command's options and the experiment's as one flat dataclass for tyro."""
    config: Any = Annotated[type(default), tyro.conf.arg(name="")]
    return dataclasses.make_dataclass(
        "Command",
        [("experiment", config, dataclasses.field(default=default))],
        bases=(Options,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": description},
    )


def _without_replaced(default: RunConfig, given: set[str]) -> RunConfig:
    """The defaults less those that an option given in their stead replaces."""
    for one, other in _EXCLUSIVE:
        if one in given and other in given:
            raise UserError(f"--{one} and --{other} exclude each other".replace("_", "-"))
        for chosen, replaced in ((one, other), (other, one)):
            if chosen in given:
                cleared: dict[str, Any] = {replaced: None}
                default = dataclasses.replace(default, **cleared)
    return default


def execute(command: Command) -> int:
    """Build the experiment and call the one method that `mode` names; returns the exit code."""
    options, experiment_file, config = command.options, command.experiment, command.config
    if options.mode == "verify":
        assert config.workdir is not None
        return verify(command.source or config.workdir, Terminal())
    # Resolved before build: it is to see the batch size and the learning rate that will be used.
    config = resolve_on_devices(config)
    experiment = experiment_file.build(config)
    trainer = Trainer.of(experiment, config)
    if options.mode == "train":
        trainer.fit(experiment.train, validation=experiment.validation, test=experiment.test)
        return ExitCode.DONE
    splits = {"test": experiment.test, "validation": experiment.validation}
    name = next((name for name, data in splits.items() if data is not None), None)
    if name is None:
        raise UserError(f"{experiment_file.path} has no test and no validation split")
    step = trainer.restore(command.source)
    if options.mode == "evaluate":
        found = trainer.evaluate(splits[name])
        trainer.terminal.line(json.dumps({"step": step, "split": name, **found}))
        trainer.terminal.results({f"{name} at step {step}": found})
        return ExitCode.DONE
    predictions = trainer.predict(splits[name])
    path = write_predictions(config.workdir, predictions)
    rows = jax.tree.leaves(predictions)[0].shape[0]
    trainer.terminal.line(f"predictions for the {rows:,} examples of {name}: {path}")
    return ExitCode.DONE


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _INTERRUPT)
    sys.exit(main())
