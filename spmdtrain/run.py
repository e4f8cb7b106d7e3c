"""`python -m spmdtrain.run --config experiments/NAME.py`: train, evaluate or predict."""

import signal

_INTERRUPT = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and _INTERRUPT is signal.default_int_handler:
    # During the import of JAX there is nothing to save: Ctrl-C ends the process at once, without a
    # traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import hashlib
import json
import sys
from collections.abc import Sequence

import jax

from spmdtrain.cluster.spec import ClusterSpec, Role, from_environment
from spmdtrain.config import RunConfig
from spmdtrain.config_checks import resolve
from spmdtrain.distributed import failures, initialize, process_group, progress
from spmdtrain.errors import ExitCode, PreemptedExit, UserError, exit_code_of
from spmdtrain.files.predictions import write_predictions
from spmdtrain.parameter_server.executor import server_partition
from spmdtrain.parameter_server.roles import run_task_role
from spmdtrain.parameter_server.state_partition import print_partition
from spmdtrain.sharding import table
from spmdtrain.sharding.placement import local_config, resolve_config
from spmdtrain.strategies import strategy
from spmdtrain.terminal import Terminal
from spmdtrain.train import evaluator
from spmdtrain.train.command_line import JOB_OPTIONS, Command, parse
from spmdtrain.train.experiment import Experiment, ExperimentFile
from spmdtrain.train.loop import Loop
from spmdtrain.train.trainer import Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        progress.begin()
        code = exit_code_of(lambda: execute(parse(given)), failures.fail_with_message)
        initialize.leave()
        return code
    except PreemptedExit:
        initialize.leave()
        raise
    except SystemExit as stop:
        failures.check_exit(stop)
        raise
    except KeyboardInterrupt as stop:
        why = "interrupted: what was saved last stays"
        return failures.fail(ExitCode.INTERRUPTED, why, stop, lambda: print(why, file=sys.stderr))


def execute(command: Command) -> int:
    """Builds the experiment, then trains, evaluates or predicts; returns the exit code."""
    options, file, config = command.options, command.experiment, command.config
    spec = from_environment()
    _check_options(command, spec)
    if options.role == "evaluate" or (options.role is None and spec.role is Role.EVALUATE):
        return run_evaluator(command)
    by_servers = strategy(config.strategy).by_servers
    if not by_servers:
        join(command, spec)
    elif options.mode == "train":
        run_task_role(options.init_timeout)
    if process_group.count() > 1 and not command.own_workdir:
        raise UserError("--workdir must be given with several processes: a folder that all can see")
    # Resolved before `build`, which sees the batch size and the learning rate of the run.
    config = resolve_config(config)
    terminal = Terminal(quiet=not process_group.is_chief())
    if spec.has_ps and not by_servers:
        terminal.line("TF_CONFIG lists ps tasks: not used, the training is synchronous")
    if file.has_own_loop and options.mode == "train" and not options.show_sharding:
        return _train_by_loop(file, config, terminal)
    experiment = file.build(config)
    trainer = Trainer.from_experiment(
        experiment, config, terminal=terminal, init_timeout=options.init_timeout
    )
    if options.show_sharding:
        _print_sharding(trainer, spec)
    if options.mode == "train":
        trainer.fit(experiment.train, validation=experiment.validation, test=experiment.test)
    else:
        _evaluate_or_predict(command, experiment, trainer)
    return ExitCode.DONE


def _check_options(command: Command, spec: ClusterSpec) -> None:
    """Raises `UserError` if options contradict each other or TF_CONFIG."""
    options, config = command.options, command.config
    evaluates = options.mode in ("evaluate", "predict")
    if options.split is not None and not evaluates:
        raise UserError(f"--split is for --mode evaluate and predict, and --mode is {options.mode}")
    if config.checkpoint != "latest" and not (evaluates or config.init_from):
        raise UserError(
            f"--checkpoint {config.checkpoint} is for --mode evaluate and predict, and for the run "
            "that --init-from names"
        )
    if options.role == "train" and spec.role is Role.EVALUATE:
        raise UserError(f"--role is train, but the task of TF_CONFIG is {spec.name}: remove one")
    evaluator_role = options.role == "evaluate" or spec.role is Role.EVALUATE
    if evaluator_role or not strategy(config.strategy).by_servers:
        return
    if options.mode == "train":
        for field, default in (("cluster", "tf_config"), ("hang_timeout", None), *JOB_OPTIONS):
            if getattr(options, field) != default:
                option = f"--{field}".replace("_", "-")
                raise UserError(
                    f"{option} is for synchronous processes: TF_CONFIG describes those of "
                    "parameter servers, and the launcher watches them"
                )
    elif len(spec.tasks) > 1:
        raise UserError(
            f"--mode {options.mode} under parameter_server is for one process, and TF_CONFIG lists "
            f"{len(spec.tasks)} tasks: start it without TF_CONFIG"
        )


def _train_by_loop(file: ExperimentFile, config: RunConfig, terminal: Terminal) -> int:
    """Runs the experiment's own training loop; returns the exit code."""
    with Loop(config, terminal=terminal) as loop:
        file.module.train(config, loop)
        if not loop.started:
            raise UserError(f"{file.path}: train(config, loop) never calls start()")
    return ExitCode.PREEMPTED if loop.stopped_early else ExitCode.DONE


def _print_sharding(trainer: Trainer, spec: ClusterSpec) -> None:
    """Prints the sharding of the state, or its partition over parameter servers."""
    if not strategy(trainer.config.strategy).by_servers:
        table.show(trainer.terminal, trainer.sharding_table())
        return
    servers = max(1, len(spec.jobs.get("ps", ())))
    partition = server_partition(trainer.functions, trainer.config.servers, servers)
    print_partition(trainer.terminal, partition)


def _evaluate_or_predict(command: Command, experiment: Experiment, trainer: Trainer) -> None:
    """Evaluates a split, or predicts for it, with the parameters of a checkpoint."""
    options, path = command.options, command.experiment.path
    splits = {"test": experiment.test, "validation": experiment.validation}
    if options.split is not None:
        splits = {options.split: getattr(experiment, options.split)}
    elif options.mode == "predict":
        splits = {"prompts": experiment.prompts, **splits}
    name = next((name for name, data in splits.items() if data is not None), None)
    if name is None:
        raise UserError(f"{path} has no {options.split or 'test and no validation'} split")
    step = trainer.restore(command.source, which=trainer.config.checkpoint)
    if options.mode == "evaluate":
        metrics = trainer.evaluate(splits[name])
        trainer.terminal.line(json.dumps({"step": step, "split": name, **metrics}))
        trainer.terminal.results({f"{name} at step {step}": metrics})
        return
    predictions = trainer.predict(splits[name])
    if not process_group.is_chief():
        return
    # Written before they are printed, so that an error of `format_predictions` loses nothing.
    file = write_predictions(trainer.config.workdir, predictions)
    if experiment.format_predictions is not None:
        for line in experiment.format_predictions(predictions):
            trainer.terminal.line(line)
    rows = jax.tree.leaves(predictions)[0].shape[0]
    trainer.terminal.line(f"predictions for the {rows:,} examples of {name}: {file}")


def join(command: Command, spec: ClusterSpec) -> None:
    """Joins the job; checks that all its processes run the same experiment file."""
    options, experiment = command.options, command.experiment
    initialize.initialize(
        spec,
        strategy=command.config.strategy,
        auto_detect=options.cluster == "auto",
        explicit=initialize.ClusterOptions(
            coordinator=options.coordinator,
            processes=options.processes,
            process_id=options.process_id,
        ),
        timeout=options.init_timeout,
        hang_timeout=options.hang_timeout,
    )
    digest = hashlib.sha256(experiment.path.read_bytes()).hexdigest()[:12]
    process_group.check_same({"the file": {experiment.path.name: digest}})


def run_evaluator(command: Command) -> int:
    """Evaluates the checkpoints of a training that other processes run; returns the exit code."""
    if command.options.mode != "train":
        raise UserError(
            f"--mode {command.options.mode} in an evaluator, which waits for checkpoints and "
            "evaluates them: leave --mode out, or run this in another process"
        )
    for name, _ in JOB_OPTIONS:
        if getattr(command.options, name) is not None:
            option = f"--{name}".replace("_", "-")
            raise UserError(f"{option} does not apply to an evaluator: it does not join the job")
    initialize.set_single_process()
    config = local_config(command.config, Terminal().line)
    experiment = command.experiment.build(resolve(config, batch_shards=1))
    return evaluator.follow(
        Trainer.from_experiment(experiment, config),
        config,
        experiment.train,
        experiment.validation,
        which=command.options.evaluate_which,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _INTERRUPT)
    sys.exit(main())
