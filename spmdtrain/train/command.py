"""Execution of the run command: training, evaluation and prediction with an experiment."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import jax

from spmdtrain.checkpoints.restore import read_manifest
from spmdtrain.checkpoints.weights.source import is_weights_file
from spmdtrain.cluster.spec import ClusterSpec, Role, from_environment
from spmdtrain.config.command_line import JOB_OPTIONS, Command
from spmdtrain.config.experiment import Experiment, ExperimentFile
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sources import files
from spmdtrain.distributed import failures, initialize, process_group
from spmdtrain.distributed.code_digest import file_digest, source_digests
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import ExitCode, UserError
from spmdtrain.record.lines import finite_or_null
from spmdtrain.record.run_files import write_predictions
from spmdtrain.sharding.mesh import resolve
from spmdtrain.sharding.placement import local_config, resolve_config
from spmdtrain.strategies import strategy
from spmdtrain.train import evaluator
from spmdtrain.train.executor import backend_of
from spmdtrain.train.loop import Loop
from spmdtrain.train.session import terminal_of
from spmdtrain.train.trainer import Trainer


def execute(command: Command) -> int:
    """Builds the experiment, then trains, evaluates or predicts; returns the exit code."""
    options, file, config = command.options, command.experiment, command.config
    spec = from_environment()
    _check_options(command, spec)
    if options.role == "evaluate" or (options.role is None and spec.role is Role.EVALUATE):
        return run_evaluator(command)
    backend = backend_of(strategy(config.strategy))
    backend.join_command(command)
    process_group.agree("the file", {file.path.name: file_digest(file.path)})
    process_group.agree("", source_digests())
    writes = not options.show_sharding
    if writes and process_group.count() > 1 and not command.own_workdir:
        raise UserError("--workdir must be given with several processes: a folder that all can see")
    # Resolved before `build`, which sees the batch size and the learning rate of the run.
    config = resolve_config(config)
    terminal = terminal_of(config)
    files.hides_progress = config.quiet
    if spec.has_ps and backend.runs_steps:
        terminal.line("TF_CONFIG lists ps tasks: not used, the training is synchronous")
    if file.has_own_loop and options.mode == "train" and not options.show_sharding:
        return _train_by_loop(file, config, terminal)
    experiment = file.build(config)
    trainer = Trainer.from_experiment(
        experiment, config, terminal=terminal, init_timeout=options.init_timeout
    )
    if options.show_sharding:
        backend.print_sharding(trainer.functions, trainer.config, trainer.terminal)
        return ExitCode.DONE
    if options.mode == "train":
        trainer.fit(experiment.train, validation=experiment.validation, test=experiment.test)
    else:
        is_evaluation = options.mode == "evaluate"
        with failures.work_in_progress(
            failures.EVALUATION if is_evaluation else failures.PREDICTION
        ):
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


def _train_by_loop(file: ExperimentFile, config: RunConfig, terminal: Terminal) -> int:
    """Runs the experiment's own training loop; returns the exit code."""
    with Loop(config, terminal=terminal) as loop:
        file.module.train(config, loop)
        if not loop.started:
            raise UserError(f"{file.path}: train(config, loop) never calls start()")
    return ExitCode.PREEMPTED if loop.stopped_early else ExitCode.DONE


def _evaluate_or_predict(command: Command, experiment: Experiment, trainer: Trainer) -> None:
    """Evaluates a split, or predicts for it, with the parameters of a checkpoint."""
    options, path = command.options, command.experiment.path
    if options.mode == "predict" and options.split is None and experiment.generate is not None:
        trainer.restore(_evaluated_run(command, trainer), which=trainer.config.checkpoint)
        with phase(Phase.EVALUATE):
            texts = experiment.generate(trainer.model, trainer.terminal.piece)
        if process_group.is_chief():
            _write_predictions(trainer, texts, "prompts")
        return
    splits = {"test": experiment.test, "validation": experiment.validation}
    if options.split is not None:
        splits = {options.split: getattr(experiment, options.split)}
    elif options.mode == "predict":
        splits = {"prompts": experiment.prompts, **splits}
    name = next((name for name, data in splits.items() if data is not None), None)
    if name is None:
        raise UserError(f"{path} has no {options.split or 'test and no validation'} split")
    step = trainer.restore(_evaluated_run(command, trainer), which=trainer.config.checkpoint)
    if options.mode == "evaluate":
        metrics = trainer.evaluate(splits[name])
        trainer.terminal.result(
            json.dumps({"step": step, "split": name, **finite_or_null(metrics)})
        )
        if not trainer.terminal.results_only:
            trainer.terminal.results({f"{name} at step {step}": metrics})
        return
    predictions = trainer.predict(splits[name])
    if process_group.is_chief():
        _write_predictions(trainer, predictions, name, experiment.format_predictions)


def _evaluated_run(command: Command, trainer: Trainer) -> str | None:
    """Returns the run that `--init-from` names; None leaves the choice to `Trainer.restore`."""
    source = command.source
    if source is None or trainer.functions.base is None:
        return source

    def has_factors(path: str) -> bool:
        return not is_weights_file(path) and bool(read_manifest(path).identity.lora.alpha)

    # Otherwise it names the base weights, and the factors are in the workdir.
    return source if process_group.run_on_all(lambda: has_factors(source), UserError) else None


def _write_predictions(
    trainer: Trainer,
    predictions: Any,
    name: str,
    format_predictions: Callable[[Any], Iterable[str]] | None = None,
) -> None:
    """Writes predictions for a split, then prints the lines that `format_predictions` returns."""
    # Written before they are printed, so that an error of `format_predictions` loses nothing.
    file = write_predictions(trainer.config.workdir, predictions)
    rows = jax.tree.leaves(predictions)[0].shape[0]  # first: the function may take arrays out
    for line in format_predictions(predictions) if format_predictions else ():
        trainer.terminal.result(line)
    examples = "1 example" if rows == 1 else f"{rows:,} examples"
    trainer.terminal.result(f"predictions for the {examples} of {name}: {file}")


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
    if command.options.hang_timeout:
        failures.watch_alone(command.options.hang_timeout)
    config = local_config(command.config, terminal_of(command.config).line)
    experiment = command.experiment.build(resolve(config, batch_shards=1))
    return evaluator.follow(
        Trainer.from_experiment(experiment, config),
        config,
        experiment.train,
        experiment.validation,
        which=command.options.evaluate_which,
    )
