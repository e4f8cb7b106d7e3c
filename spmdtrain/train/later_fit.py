"""Checks of a second `fit` of a trainer, which continues the first one or starts again."""

from spmdtrain.checkpoints.run_identity import Identity, check_same_run
from spmdtrain.errors import UserError
from spmdtrain.train.session import RunSession


def check_no_checkpoints(run: RunSession) -> None:
    """Raises `UserError` if the workdir has checkpoints: a restart would repeat their steps."""
    if run.checkpoints is not None and (run.saved_step or run.checkpoints.holds(0)):
        where = run.config.workdir
        raise UserError(
            f"restart=True counts steps from 0, and workdir {where} holds checkpoints up to "
            f"step {run.saved_step}: use a Trainer without a workdir, or a new Trainer "
            f"with another workdir and init_from={where!r} (its optimizer state is new)"
        )


def check_continues(run: RunSession, earlier: Identity, step: int) -> None:
    """Checks that a run continues an earlier run of the same trainer, and no other trainer has.

    Args:
      run: The run that is about to begin.
      step: Number of steps that the earlier run has made.

    Raises:
      UserError: If this is another run, or the workdir has a checkpoint of a later step.
    """
    try:
        check_same_run(
            earlier,
            run.identity,
            f"this trainer at step {step}",
            step,
            same_program=not run.config.resume_anyway,
        )
    except UserError as error:
        raise UserError(
            f"{error}. To keep the model and the optimizer's state and count steps from 0, "
            "call fit(..., restart=True)"
        ) from None
    if run.saved_step > step:
        raise UserError(
            f"workdir {run.config.workdir} holds step {run.saved_step}, and this trainer has "
            f"run {step}: another trainer has continued the run; use a new Trainer, which "
            "resumes from that checkpoint"
        )
