"""The whole state of a checkpoint, for tests of checkpoints."""

from pathlib import Path

from etils import epath

from spmdtrain.checkpoints.listing import Source
from spmdtrain.checkpoints.restore import load, whole_state
from spmdtrain.step.state import TrainState


def load_state(folder: Path, abstract: TrainState, shardings: TrainState) -> TrainState:
    """Loads the state of a checkpoint, as a resume does."""
    source = Source(epath.Path(folder).parent, [int(folder.name)], whole_workdir=False)
    return load(source, lambda *_: whole_state(abstract, shardings), print).state
