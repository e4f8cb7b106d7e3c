"""The terminal of a run."""

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import Terminal


def terminal_of(config: RunConfig) -> Terminal:
    """Returns the terminal of process 0, by the option `quiet`; one without output elsewhere."""
    return Terminal(quiet=not process_group.is_chief(), results_only=config.quiet, optional=True)
