"""The traffic of a step, compared with what its strategy must send."""

import pytest

from spmdtrain.plan.time_model import least_sent, traffic_of
from spmdtrain.sharding.layout import MemoryUse, Row
from spmdtrain.xla.collectives import Carried, Collective


def test_sums_and_exchanges_over_the_axis_context_are_necessary() -> None:
    """On a mesh of data=2 and context=4, with one all-reduce over each axis."""
    whole = MemoryUse(device=4096, whole=4096)
    row = Row("w", "(1024,)", "float32", "()", whole, MemoryUse(), MemoryUse(), elements=1024)
    gradient, keys = Carried(("w",), False, 4096, 1024), Carried((), False, 500, 125)
    collectives = [
        Collective("all-reduce", ("context",), 4, 4096, 1, carries=(gradient,)),
        Collective("all-reduce", ("data",), 2, 4096, 1, carries=(gradient,)),
        Collective("collective-permute", ("context",), 4, 500, 1, times=3, carries=(keys,)),
    ]
    least = least_sent(row, 2, context=4, compute_width=4, width=4)
    found = traffic_of(collectives, [row], {"w": least})
    needed = 2 * 7 / 8 * 4096 + 3 * 500
    assert found.least == pytest.approx(needed)
    assert found.bytes == pytest.approx(2 * (3 / 4 + 1 / 2) * 4096 + 3 * 500)
    assert found.excess == pytest.approx(found.bytes - needed)
