"""The terminal of a run."""

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.terminal import Terminal


def terminal_of(config: RunConfig) -> Terminal:
    """Returns the standard output of process 0, as the option `quiet` wants it.

    Args:
      config: The configuration of the run.

    Returns:
      A terminal that writes nothing in all processes but process 0.
    """
    return Terminal(quiet=not process_group.is_chief(), results_only=config.quiet, optional=True)
