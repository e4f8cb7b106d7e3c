"""Texts of programs that XLA has not written so far: one message, and no end of a run."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from spmdtrain.errors import UserError
from spmdtrain.plan.instruction_work import bytes_moved
from spmdtrain.xla.collectives import collectives, describe_found, find_collectives
from spmdtrain.xla.hlo import Module

CALLED = """
%fused (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} negate(%a)
}
"""
MAIN = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
}
"""


def eight() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (MAIN, lambda text: bytes_moved(Module(text))),  # what is called is missing
        (CALLED.replace("ROOT ", "") + MAIN, lambda text: bytes_moved(Module(text))),
        (
            MAIN.replace("fusion(%x), kind=kLoop, calls=%fused", "while(%x), condition=%c"),
            Module,
        ),
    ],
)
def test_a_program_that_cannot_be_read_is_one_message(
    text: str, read: Callable[[str], object]
) -> None:
    with pytest.raises(UserError, match="version of XLA"):
        read(text)


def test_a_report_says_that_it_cannot_tell() -> None:
    text = "ENTRY %main {\n  %y = (f32[8]) while(%x), condition=%c\n}\n"
    assert describe_found(find_collectives(text, eight()), eight()).startswith(
        "collectives unknown: this version of XLA"
    )


@pytest.mark.timeout(20)
def test_copies_of_each_other_and_frames_in_a_circle_end() -> None:
    text = """
StackFrames
1 {file_location_id=1 parent_frame_id=3}
2 {file_location_id=1 parent_frame_id=2}

%c (p: s32[]) -> pred[] {
  %a = s32[] copy(%b)
  %b = s32[] copy(%a)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (x: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  ROOT %w = s32[] while(%x), condition=%c, body=%c, metadata={stack_frame_id=1}
}
"""
    module = Module(text)
    (loop,) = (one for one, _, _ in module.instructions() if one.opcode == "while")
    assert module.unknown_loops == [loop] and module.line_of(loop)


def test_groups_of_more_devices_than_there_are_take_no_memory() -> None:
    line = "%r = f32[128] all-reduce(%p), replica_groups=[1,30000000000]<=[30000000000]"
    (found,) = collectives(f"ENTRY %main {{\n  {line}\n}}\n", eight())
    assert (found.axes, found.group_size) == ((), 0)


@pytest.mark.timeout(20)
def test_computations_that_call_each_other_twice_take_linear_time() -> None:
    """Of 60 that each call the one before twice, the first would be read 2^60 times."""
    body = "%p = f32[2] parameter(0)\n  ROOT %r = f32[2] add(%p, %p)"
    text = f"%c0 (p: f32[2]) -> f32[2] {{\n  {body}\n}}\n"
    for n in range(1, 60):
        calls = f"%a = f32[2] call(%p), to_apply=%c{n - 1}\n  "
        again = f"ROOT %b = f32[2] call(%a), to_apply=%c{n - 1}"
        text += (
            f"%c{n} (p: f32[2]) -> f32[2] {{\n  %p = f32[2] parameter(0)\n  {calls}{again}\n}}\n"
        )
    main = "%p = f32[2] parameter(0)\n  ROOT %b = f32[2] call(%p), to_apply=%c59"
    Module(text + f"ENTRY %main (p: f32[2]) -> f32[2] {{\n  {main}\n}}\n")
