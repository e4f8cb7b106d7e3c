"""Trajectories: the identities of the sequences of states that a run goes through.

A run that goes back to an earlier checkpoint, or starts again from step 0, makes other states of
the same steps. What is known of a state, such as its evaluation, is therefore found by the name of
its trajectory and its step.
"""

import secrets
from collections.abc import Mapping

Trajectories = Mapping[str, int]
"""Names of the trajectories of a run, each with the step after which it began. The last of them
that began before a step has made its state."""


def branched(trajectories: Trajectories, after: int) -> dict[str, int]:
    """Returns the trajectories of a run that goes another way from a step on.

    Args:
      trajectories: Those of the run up to that step.
      after: The step; -1 for a run that continues nothing.
    """
    kept = {name: start for name, start in trajectories.items() if start < after}
    return {**kept, secrets.token_hex(4): after}


def name_at(trajectories: Trajectories, step: int) -> str:
    """Returns the name of the trajectory of the state of a step; "" if it has none.

    Args:
      trajectories: Those of the run that has made the state.
      step: The step.
    """
    began = [(start, name) for name, start in trajectories.items() if start < step]
    return max(began, default=(0, ""))[1]
