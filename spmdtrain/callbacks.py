"""Functions that a run calls at named moments."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmdtrain.errors import UserError, did_you_mean


class Moment(enum.StrEnum):
    """When callbacks are called."""

    FIT_START = "fit_start"
    STEP = "step"  # an update has been dispatched; its numbers are not known yet
    LOG = "log"  # with the train metrics of that step
    EVALUATION = "evaluation"  # with the validation metrics
    CHECKPOINT = "checkpoint"
    FIT_END = "fit_end"  # with the test metrics, where there is a test split


@dataclass(frozen=True)
class Event:
    """What a callback is told. `trainer.stop()` ends the run after this step."""

    trainer: Any  # the Trainer, which stands above this module
    moment: Moment
    step: int
    metrics: Mapping[str, float]


Callback = Callable[[Event], None]
Callbacks = Mapping[str, Callback | list[Callback]]
"""One function or several, by the name of their `Moment`."""


def by_moment(callbacks: Callbacks) -> dict[Moment, list[Callback]]:
    """Returns the functions of every moment.

    Raises:
      UserError: If there is no such moment, or what is given for it is no function.
    """
    if not isinstance(callbacks, Mapping):
        raise UserError(
            f"callbacks is a {type(callbacks).__name__}: it must be a dictionary of moments, for "
            f'example {{"log": f}}. The moments are: {", ".join(Moment)}'
        )
    found: dict[Moment, list[Callback]] = {moment: [] for moment in Moment}
    for name, functions in callbacks.items():
        if name not in found:
            raise UserError(
                f"there is no moment {name!r} for callbacks.{did_you_mean(name, found)}"
            )
        given = functions if isinstance(functions, list) else [functions]
        for function in given:
            if not callable(function):
                raise UserError(
                    f"callbacks[{name!r}] is a {type(function).__name__}: it must be a function of "
                    "the event, or a list of such functions"
                )
        found[Moment(name)] += given
    return found
