"""The role of a process in a job, as TF_CONFIG and the strategy decide it."""

from spmdtrain.cluster.spec import Role, from_environment
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import configure_backend, local_config
from spmdtrain.strategies import strategy
from spmdtrain.train.executor import backend_of
from spmdtrain.train.terminal_of_run import terminal_of


def is_evaluator() -> bool:
    """Returns whether TF_CONFIG makes this process the evaluator of a job."""
    return from_environment().role is Role.EVALUATE


def join_job(config: RunConfig, timeout: float, terminal: Terminal | None) -> RunConfig:
    """Takes the role of this process in the job; returns the configuration for this process.

    A process that trains joins the others. A worker or parameter server of strategy
    parameter_server serves the chief and exits with the job. An evaluator has separate devices, and
    so another configuration.

    Args:
      timeout: Seconds to wait for the chief of parameter servers.
      terminal: Receives the reason if an evaluator uses another placement.

    Raises:
      UserError: If the strategy has no use for this task.
      SystemExit: In a worker or parameter server, when the job has ended.
    """
    if is_evaluator():
        return local_config(config, (terminal or terminal_of(config)).line)
    backend_of(strategy(config.strategy)).join(timeout)
    configure_backend(config)
    return config


def refuse_evaluator(what: str) -> None:
    """Raises `UserError` in an evaluator task, for what only trains."""
    if is_evaluator():
        name = from_environment().name
        raise UserError(
            f"{what} in task {name} of TF_CONFIG: only Trainer.fit and python -m spmdtrain.run "
            "evaluate checkpoints there; leave the evaluator out of the cluster"
        )
