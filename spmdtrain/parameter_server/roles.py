"""Roles of the processes of a job with parameter servers."""

from spmdtrain.cluster.spec import Role, from_environment
from spmdtrain.distributed import initialize, progress
from spmdtrain.errors import ExitCode, OwnExit, UserError
from spmdtrain.parameter_server import ray_nodes


def run_task_role(timeout: float) -> None:
    """Takes the role that TF_CONFIG gives this process in a job of parameter servers.

    The chief, or worker 0 of a cluster without one, returns. Workers and servers wait at most
    `timeout` seconds for it, serve it and exit.

    Raises:
      UserError: If the cluster lacks tasks, or this is its evaluator.
      OwnExit: In a worker or a server, when the job has ended.
    """
    spec = from_environment()
    if spec.role is Role.EVALUATE:
        raise UserError(
            f"TF_CONFIG makes this process {spec.name}, which does not train: only Trainer.fit and "
            "python -m spmdtrain.run evaluate there"
        )
    if missing := spec.why_no_servers:
        given = f" (this one has {missing})" if spec.jobs else ""
        raise UserError(
            f"parameter servers need a TF_CONFIG with a chief, workers and ps tasks{given}: start "
            "one with python -m spmdtrain.launch --processes 3 --ps 2 -- ..."
        )
    initialize.set_single_process()
    if spec.is_chief:
        return
    how = ray_nodes.serve(spec, timeout)
    if how not in ray_nodes.ENDS:
        progress.write_exit_reason(
            ExitCode.FAILED, f"the job: {how}", own=how == ray_nodes.NODE_DIED
        )
    raise OwnExit(ray_nodes.ENDS.get(how, ExitCode.FAILED))


def run_if_worker_or_server(timeout: float) -> None:
    """Takes the role of a worker or a parameter server, if this process is one, and then exits.

    Call before devices are used, because the actors of the task use them. For `timeout` and errors
    see `run_task_role`.
    """
    spec = from_environment()
    if spec.task_type in ("worker", "ps") and not spec.is_chief:
        run_task_role(timeout)
