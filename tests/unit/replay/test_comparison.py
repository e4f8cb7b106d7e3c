"""Comparison of what two runs have recorded of a step."""

import math

import numpy as np

from spmdtrain.replay.recorded_run import RecordedStep, compare_step, difference_of

SUMS = {"step": "1", "opt_state/mu": "2", "params/a": "3", "params/b": "4"}


def test_a_step_is_equal_in_all_that_both_have_recorded() -> None:
    logged = RecordedStep({"accuracy": 0.5, "gradient_norm": 2.0, "loss": math.nan}, SUMS)
    same = compare_step(7, logged, RecordedStep(dict(logged.metrics), dict(SUMS)))
    assert same.is_equal and list(same.metrics) == ["loss", "gradient_norm", "accuracy"]
    assert compare_step(7, logged, RecordedStep({"loss": math.nan})).is_equal
    assert not compare_step(7, RecordedStep({"loss": 1.0}), RecordedStep({}, SUMS)).is_comparable
    other = SUMS | {"opt_state/mu": "9", "params/b": "9"}
    found = compare_step(7, logged, RecordedStep(dict(logged.metrics), other))
    assert not found.is_equal and found.different_arrays == ["params/b", "opt_state/mu"]


def test_loss_and_gradient_norm_decide_whether_a_difference_is_that_of_rounding() -> None:
    def within(loss: float, norm: float, accuracy: float = 0.5) -> bool:
        logged = RecordedStep({"loss": 2.0, "gradient_norm": 4.0, "accuracy": 0.5})
        again = RecordedStep({"loss": loss, "gradient_norm": norm, "accuracy": accuracy})
        return compare_step(1, logged, again).is_within_tolerance

    assert within(2.0, 4.0) and within(2.0 + 1.9e-5, 4.0 - 3.9e-5, accuracy=0.25)
    assert not within(2.0 + 2.1e-5, 4.0) and not within(2.0, 4.0 + 4.1e-5)
    assert not within(math.nan, 4.0)
    assert not compare_step(1, RecordedStep({}, SUMS), RecordedStep({}, SUMS)).is_within_tolerance


def test_how_far_two_arrays_differ() -> None:
    a, b = np.array([1.0, -4.0, math.nan], np.float32), np.array([1.0, -3.0, math.nan], np.float32)
    found = difference_of(a, b)
    assert (found.absolute, found.elements, found.size) == (1.0, 1, 3)
    assert math.isnan(difference_of(a, np.array([1.0, -4.0, 2.0], np.float32)).absolute)
    whole = difference_of(np.array([0, 0]), np.array([0, 3]))
    assert (whole.absolute, whole.relative) == (3.0, math.inf)
    assert difference_of(np.array([2.0, 1.0]), np.array([2.0, 2.0])).relative == 0.5
