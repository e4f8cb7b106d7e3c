"""Operations on elements of compiled programs, and their time."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from spmdtrain.plan.instruction_work import ElementKind, bytes_moved, element_operations
from spmdtrain.plan.measurement import ELEMENT_LOOPS
from spmdtrain.plan.time_model import Overlap, Times, element_seconds
from spmdtrain.xla.chips import CHIPS
from spmdtrain.xla.hlo import Module

# Three of the five write elements in another order.
COPIES = """\
ENTRY %main (a: f32[1,16,8]) -> f32[8,1,16] {
  %a = f32[1,16,8]{2,1,0} parameter(0)
  %same = f32[1,16,8]{2,0,1} copy(%a)
  %other = f32[1,16,8]{1,2,0} copy(%same)
  %view = f32[1,8,16]{2,1,0} transpose(%other), dimensions={0,2,1}
  %moved = f32[1,16,8]{2,1,0} transpose(%view), dimensions={0,2,1}
  ROOT %again = f32[8,1,16]{2,1,0} transpose(%moved), dimensions={2,0,1}
}
"""
WINDOW = """\
ENTRY %main (a: f32[8,8]) -> f32[7,6] {
  %a = f32[8,8]{1,0} parameter(0)
  %z = f32[] constant(0)
  ROOT %sums = f32[7,6]{1,0} reduce-window(%a, %z), window={size=2x3}, to_apply=%add
}
"""


def five_times(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.exp(-x), x)


@pytest.mark.parametrize(
    ("function", "kind", "count"),
    [
        (lambda x: jnp.exp(x) * 2 + x, "arithmetic", 2 * 2048),
        (lambda x: jnp.exp(x) * 2 + x, "functions", 2048),
        (lambda x: jnp.sqrt(x) / (x + 1), "divisions", 2 * 2048),
        (lambda x: (x * 2).sum(-1), "reductions", 2048),
        (five_times, "functions", 5 * 2048),
        (lambda x: x.swapaxes(0, 1) + 0, "transposes", 2048),
    ],
)
def test_operations_within_fusions_and_loops_count_for_each_element(
    function: Callable[[jax.Array], jax.Array], kind: str, count: int
) -> None:
    program = jax.jit(function).lower(jax.ShapeDtypeStruct((64, 32), jnp.float32)).compile()
    assert element_operations(Module(program.as_text() or ""))[kind] == count


@pytest.mark.parametrize(
    ("text", "found"),
    [(COPIES, {"transposes": 3 * 128}), (WINDOW, {"reductions": 7 * 6 * 2 * 3})],
)
def test_copies_count_if_elements_move_and_windows_in_full(
    text: str, found: dict[str, float]
) -> None:
    assert element_operations(Module(text)) == found


@pytest.mark.parametrize("kind", ElementKind)
def test_a_measured_loop_has_the_operations_and_copies_that_it_declares(kind: ElementKind) -> None:
    loop, iterations, elements = ELEMENT_LOOPS[kind], 20, 128 * 64
    body = functools.partial(jax.lax.fori_loop, 0, iterations, lambda _, x: loop.body(x))
    program = jax.jit(body).lower(jax.ShapeDtypeStruct((1, 128, 64), jnp.float32)).compile()
    module = Module(program.as_text() or "")
    declared = loop.operations * iterations * elements  # without those of the loop's counter
    assert element_operations(module)[kind] == pytest.approx(declared, rel=1e-4)
    copies = bytes_moved(module) / (iterations * 8 * elements)
    assert copies == pytest.approx(loop.copies, abs=0.1)


def test_the_time_of_operations_on_elements_is_added_to_a_step_on_cpu() -> None:
    operations = {"arithmetic": 3e6, "functions": 1e6}
    assert element_seconds(operations, CHIPS["h100"]) == 0  # no rates
    chip = dataclasses.replace(CHIPS["h100"], element_rates={"arithmetic": 1e9, "functions": 1e8})
    seconds = element_seconds(operations, chip)
    assert seconds == pytest.approx(0.013)
    times = Times(
        *(0.004, 0.004, 0.002, 0.001, 0.0, 0.0, 0.0), overlap=Overlap.NOTHING, elements=seconds
    )
    assert times.estimate == pytest.approx(0.004 + 0.002 + 0.001 + 0.013)
    assert times.bottleneck == "operations on elements"
