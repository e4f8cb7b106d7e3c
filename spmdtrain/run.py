"""`python -m spmdtrain.run --config experiments/NAME.py`: train, evaluate or predict."""

import signal

_INTERRUPT = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and _INTERRUPT is signal.default_int_handler:
    # Ctrl-C while JAX is imported ends at once: there is nothing to save, and no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import tyro

from spmdtrain import (
    distributed,
    division_table,
    evaluator,
    failing,
    phases,
    processes,
    sharding_table,
)
from spmdtrain.checkpoints import verify
from spmdtrain.config import RunConfig, check, check_compute_dtype, resolve
from spmdtrain.errors import ExitCode, Preempted, UserError, exit_code_of, field_meant
from spmdtrain.experiment import ExperimentFile, load_experiment
from spmdtrain.loop import Loop
from spmdtrain.mesh import cpu_devices_in_environment
from spmdtrain.parameter_server import take_part
from spmdtrain.placement import on_own_devices, resolve_on_devices
from spmdtrain.spec import ClusterSpec, Role, from_environment
from spmdtrain.strategies import strategy
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
    split: Literal["train", "validation", "test"] | None = None
    """The split to evaluate or predict; by default the test split, or else the validation split."""
    role: Literal["train", "evaluate"] | None = None
    """What this process is for, where TF_CONFIG does not say so: evaluate looks at the checkpoints
    of a training that goes on elsewhere, outside its job."""
    evaluate_which: evaluator.Which = evaluator.Which.EACH
    """The checkpoints that such an evaluator looks at."""
    cluster: Literal["tf_config", "auto"] = "tf_config"
    """Where the other processes are described; auto also finds TPU pods, Slurm, Open MPI and
    Kubernetes."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where there is no TF_CONFIG; the same in all processes."""
    processes: int | None = None
    """How many processes there are, with coordinator."""
    process_id: int | None = None
    """Which of them this one is, from 0, with coordinator."""
    show_sharding: bool = False
    """First print where each parameter lives, and what it and its optimizer state take of a
    device."""
    init_timeout: float = 300.0
    """Seconds in which all processes have to come."""
    hang_timeout: float | None = None
    """Seconds without any progress in any process after which a job counts as hung, and ends; 0 is
    never. 1800 where nothing is said; under the launcher its own --hang-timeout counts."""


_BY_HAND = (("coordinator", None), ("processes", None), ("process_id", None))
_OF_PLANS = {"topology", "json", "advice", "measure"}
RESERVED = frozenset({f.name for f in dataclasses.fields(Options)} | _OF_PLANS | {"help"})


@dataclass(frozen=True)
class Command:
    """A command line, understood."""

    options: Any
    """The command's own."""
    experiment: ExperimentFile
    config: RunConfig
    source: str | None
    """What to evaluate or predict from, where --init-from names it."""
    own_workdir: bool
    """Whether anybody has said where the run's files go."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        phases.begin()
        code = exit_code_of(lambda: execute(parse(given)), failing.fail_in_words)
        distributed.leave()
        return code
    except Preempted:
        distributed.leave()
        raise
    except SystemExit as stop:
        failing.check_exit(stop)
        raise
    except KeyboardInterrupt as stop:
        why = "interrupted before there was anything to save"
        return failing.fail(ExitCode.INTERRUPTED, why, stop, lambda: print(why, file=sys.stderr))


def parse(
    arguments: Sequence[str],
    of: type = Options,
    prog: str = "python -m spmdtrain.run",
    description: str | None = __doc__,
) -> Command:
    """A command line, read in two steps: the experiment's file says what options there are.

    `of` are the command's own, `config` and `preset` among them; `description` is what its help
    begins with where no experiment is given.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    first.add_argument("--preset")
    try:
        known, _ = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if known.config is None:
        tyro.cli(_command(RunConfig(), description, of), args=arguments, prog=prog)
        raise AssertionError("tyro ends where --config is missing")
    experiment = load_experiment(known.config, RESERVED)
    default = experiment.preset(known.preset)
    given = {a.split("=")[0].lstrip("-").replace("-", "_") for a in arguments if a[:2] == "--"}
    default = _without_replaced(default, given)
    _check_words(arguments, default, of)
    arguments = _together(arguments)
    command: Any = tyro.cli(_command(default, experiment.doc, of), args=arguments, prog=prog)
    config = command.experiment
    check(config)
    if "cpu_devices" in given and (setting := cpu_devices_in_environment()):
        raise UserError(f"--cpu-devices and {setting} in the environment exclude each other")
    own_workdir = config.workdir is not None
    if not own_workdir:
        config = dataclasses.replace(config, workdir=f"runs/{experiment.name}")
    source = config.init_from if "init_from" in given else None
    return Command(command, experiment, config, source, own_workdir)


def _command(default: RunConfig, description: str | None, of: type) -> Any:
    """The command's options and the experiment's as one flat dataclass for tyro."""
    config: Any = Annotated[type(default), tyro.conf.arg(name="")]
    return dataclasses.make_dataclass(
        "Command",
        [("experiment", config, dataclasses.field(default=default))],
        bases=(of,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": description},
    )


def _check_words(arguments: Sequence[str], default: RunConfig, of: type) -> None:
    """Raises `UserError` for options and values of other frameworks that have a name here."""
    known = [field.name for fields in (default, of) for field in dataclasses.fields(fields)]
    for number, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--"):
            continue
        if name == "compute_dtype":
            check_compute_dtype(value or "".join(arguments[number + 1 : number + 2]))
        if name not in known and (meant := field_meant(name, known)) is not None:
            raise UserError(f"{option} is not an option. Did you mean --{meant.replace('_', '-')}?")


_LISTS = ("compiler_option", "frozen")  # in no order, so that they may be given one by one


def _together(arguments: Sequence[str]) -> list[str]:
    """All values of such an option after its first mention: else those of the last alone count.

    So `--frozen a --frozen b` is `--frozen a b`.
    """
    found: list[list[str]] = []  # an option with its values, or one argument
    places: dict[str, list[str]] = {}
    values: list[str] | None = None  # of the option that was mentioned last
    for argument in arguments:
        option, has_value, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in _LISTS:
            if name not in places:
                places[name] = [option]
                found.append(places[name])
            values = places[name]
            values += [value] if has_value else []
        elif values is not None and not argument.startswith("--"):
            values.append(argument)
        else:
            values = None
            found.append([argument])
    return [argument for part in found for argument in part]


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
    if options.split is not None and options.mode not in ("evaluate", "predict"):
        raise UserError(f"--split is for --mode evaluate and predict, and --mode is {options.mode}")
    evaluates = options.mode in ("evaluate", "predict")
    if config.checkpoint != "latest" and not (evaluates or config.init_from):
        raise UserError(
            f"--checkpoint {config.checkpoint} is for --mode evaluate and predict, and for the run "
            "that --init-from names"
        )
    if options.mode == "verify":
        assert config.workdir is not None
        return verify(command.source or config.workdir, Terminal())
    spec = from_environment()
    if options.role == "train" and spec.role is Role.EVALUATE:
        raise UserError(f"--role train, and by TF_CONFIG this is {spec.name}: give one")
    if options.role == "evaluate" or (options.role is None and spec.role is Role.EVALUATE):
        return evaluate_beside(command)
    by_servers = strategy(config.strategy).by_servers
    if by_servers and options.mode == "train":
        for field, default in (("cluster", "tf_config"), ("hang_timeout", None), *_BY_HAND):
            if getattr(options, field) != default:
                option = f"--{field}".replace("_", "-")
                raise UserError(
                    f"{option} is for processes in lockstep: those of parameter servers are told "
                    "by TF_CONFIG, and watched by the launcher"
                )
        take_part(options.init_timeout)
    elif by_servers and len(spec.tasks) > 1:
        raise UserError(
            f"--mode {options.mode} under parameter_server is for one process, and TF_CONFIG lists "
            f"{len(spec.tasks)} tasks: start it without TF_CONFIG"
        )
    if not by_servers:
        join(command, spec)
    if processes.count() > 1 and not command.own_workdir:
        raise UserError("--workdir must be given with several processes: a folder that all can see")
    # Resolved before build: it is to see the batch size and the learning rate that will be used.
    config = resolve_on_devices(config)
    terminal = Terminal(quiet=not processes.is_chief())
    if spec.has_ps and not by_servers:
        terminal.line("TF_CONFIG lists ps tasks: not used, the training is synchronous")
    if experiment_file.has_own_loop and options.mode == "train" and not options.show_sharding:
        with Loop(config, terminal=terminal) as loop:
            experiment_file.module.train(config, loop)
            if not loop.has_begun:
                raise UserError(f"{experiment_file.path}: train(config, loop) never calls start()")
        return ExitCode.PREEMPTED if loop.left_early else ExitCode.DONE
    experiment = experiment_file.build(config)
    trainer = Trainer.of(experiment, config, terminal=terminal, init_timeout=options.init_timeout)
    if options.show_sharding:
        if by_servers:
            division_table.show(terminal, trainer.division(max(1, len(spec.jobs.get("ps", ())))))
        else:
            sharding_table.show(terminal, trainer.sharding_table())
    if options.mode == "train":
        trainer.fit(experiment.train, validation=experiment.validation, test=experiment.test)
        return ExitCode.DONE
    splits = {"test": experiment.test, "validation": experiment.validation}
    if options.split is not None:
        splits = {options.split: getattr(experiment, options.split)}
    elif options.mode == "predict":
        splits = {"prompts": experiment.prompts, **splits}
    name = next((name for name, data in splits.items() if data is not None), None)
    if name is None:
        wanted = options.split or "test and no validation"
        raise UserError(f"{experiment_file.path} has no {wanted} split")
    step = trainer.restore(command.source, which=config.checkpoint)
    if options.mode == "evaluate":
        found = trainer.evaluate(splits[name])
        trainer.terminal.line(json.dumps({"step": step, "split": name, **found}))
        trainer.terminal.results({f"{name} at step {step}": found})
        return ExitCode.DONE
    predictions = trainer.predict(splits[name])
    if not processes.is_chief():  # who alone writes
        return ExitCode.DONE
    path = write_predictions(config.workdir, predictions)  # first: what it costs is not to be lost
    if experiment.present is not None:
        for line in experiment.present(predictions):
            trainer.terminal.line(line)
    rows = jax.tree.leaves(predictions)[0].shape[0]
    trainer.terminal.line(f"predictions for the {rows:,} examples of {name}: {path}")
    return ExitCode.DONE


def join(command: Command, spec: ClusterSpec) -> None:
    """Joins the job that is described; all its processes must run the same experiment."""
    options, experiment = command.options, command.experiment
    distributed.initialize(
        spec,
        strategy=command.config.strategy,
        detect=options.cluster == "auto",
        explicit=distributed.Explicit(
            coordinator=options.coordinator,
            processes=options.processes,
            process_id=options.process_id,
        ),
        timeout=options.init_timeout,
        hang_timeout=options.hang_timeout,
    )
    digest = hashlib.sha256(experiment.path.read_bytes()).hexdigest()[:12]
    processes.check_same({"the file": {experiment.path.name: digest}})


def evaluate_beside(command: Command) -> int:
    """Evaluates the checkpoints of a training that runs elsewhere; returns the exit code."""
    if command.options.mode != "train":
        raise UserError(
            f"--mode {command.options.mode} in an evaluator, which waits for checkpoints to "
            "evaluate by itself: give it no --mode, or start this elsewhere"
        )
    for name, _ in _BY_HAND:
        if getattr(command.options, name) is not None:
            option = f"--{name}".replace("_", "-")
            raise UserError(f"{option} in an evaluator, which is none of the job's processes")
    distributed.stay_alone()
    config = on_own_devices(command.config, Terminal().line)
    experiment = command.experiment.build(resolve(config, batch_shards=1))
    return evaluator.follow(
        Trainer.of(experiment, config),
        config,
        experiment.train,
        experiment.validation,
        which=command.options.evaluate_which,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _INTERRUPT)
    sys.exit(main())
