"""What instructions read and write in a device's main memory."""

import pytest

from spmdtrain.plan.instruction_work import bytes_moved
from spmdtrain.xla.hlo import Module

FUSED = """\
%copied (a: f32[16,8]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  ROOT %b = f32[16,8]{1,0} copy(%a)
}

%rows (a: f32[16,8], i: s32[]) -> f32[2,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %part = f32[2,8]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={2,8}
  ROOT %twice = f32[2,8]{1,0} add(%part, %part)
}

%placed (a: f32[16,8], b: f32[2,8], i: s32[]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[2,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %all = f32[16,8]{1,0} dynamic-update-slice(%a, %b, %i, %z)
}

%nested_rows (a: f32[8,16], i: s32[]) -> f32[2,8] {
  %a = f32[8,16]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %same = f32[16,8]{1,0} bitcast(%a)
  ROOT %part = f32[2,8]{1,0} fusion(%same, %i), kind=kLoop, calls=%rows
}

%two (a: f32[16,8], b: f32[16,8]) -> (f32[16,8], f32[16,8], f32[16,8], f32[16,8]) {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[16,8]{1,0} parameter(1)
  %c = f32[16,8]{1,0} negate(%a)
  %d = f32[16,8]{1,0} exponential(%a)
  %e = f32[16,8]{1,0} all-gather(%b), dimensions={0}
  ROOT %all = (f32[16,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}) \
tuple(%c, %d, %b, %e)
}

%nested_placed (a: f32[16,8], b: f32[2,8], i: s32[]) -> f32[8,16] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[2,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %all = f32[16,8]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%placed
  ROOT %same = f32[8,16]{1,0} bitcast(%all)
}
"""
WHOLE, PART, NUMBER = 4 * 16 * 8, 4 * 2 * 8, 4

LINES = {
    "an operand is read and a result written": ("f32[16,8]{1,0} negate(%a)", 2 * WHOLE),
    "what is in a TPU's vector memory is not": ("f32[16,8]{1,0:S(1)} negate(%a)", WHOLE),
    "nor what only names it": ("f32[8,16]{1,0} bitcast(%a)", 0),
    "of a slice the part": ("f32[2,8]{1,0} slice(%a), slice={[0:2], [0:8]}", 2 * PART),
    "also where the rest of it is read aside": (
        "((f32[16,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), "
        "slice={[0:2], [0:8]}",
        PART,
    ),
    "of an update the part": (
        "f32[16,8]{1,0} dynamic-update-slice(%a, %b, %i, %i)",
        2 * PART,
    ),
    "a copy to the vector memory is a read": (
        "(f32[16,8]{1,0:S(1)}, f32[16,8]{1,0}, u32[]{:S(2)}) copy-start(%a)",
        WHOLE,
    ),
    "a copy within the main memory is both": (
        "(f32[16,8]{1,0}, f32[16,8]{1,0}, u32[]{:S(2)}) copy-start(%a)",
        2 * WHOLE,
    ),
    "a fusion that slices": (
        "f32[2,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%rows",
        2 * PART + NUMBER,
    ),
    "a fusion that slices in the background": (
        "((f32[16,8]{1,0}, s32[]), f32[2,8]{1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, "
        "calls=%rows",
        2 * PART + NUMBER,
    ),
    "a fusion that updates in the background": (
        "((f32[16,8]{1,0}, f32[2,8]{1,0}, s32[]), f32[16,8]{1,0}, u32[]) "
        "fusion-start(%a, %b, %i), kind=kLoop, calls=%placed",
        2 * PART + NUMBER,
    ),
    "a fusion that updates": (
        "f32[16,8]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%placed",
        2 * PART + NUMBER,
    ),
    "a fusion with a result in a TPU's vector memory, beside a collective": (
        "(f32[16,8]{1,0:S(1)}, f32[16,8]{1,0}, f32[16,8]{1,0}, f32[16,8]{1,0}) "
        "fusion(%a, %a), kind=kLoop, calls=%two",
        2 * WHOLE,
    ),
    "whole tiles are stored": (
        "f32[16,8]{1,0:T(8,128)} negate(%a)",
        WHOLE + 4 * 16 * 128,
    ),
    "a fusion within which another slices what it renames": (
        "f32[2,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%nested_rows",
        2 * PART + NUMBER,
    ),
    "a fusion within which another updates": (
        "f32[8,16]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%nested_placed",
        2 * PART + NUMBER,
    ),
    "what runs aside counts where it runs": (
        "((f32[16,8]{1,0}), f32[16,8]{1,0}, u32[]) call-start(%a), calls=%copied",
        2 * WHOLE,
    ),
    "what is reserved": (
        'f32[16,8]{1,0} custom-call(%a), custom_call_target="AllocateBuffer"',
        0,
    ),
}


@pytest.mark.parametrize(("line", "expected"), LINES.values(), ids=LINES)
def test_bytes(line: str, expected: int) -> None:
    text = (
        f"HloModule m\n\n{FUSED}\nENTRY %main () -> f32[] {{\n"
        "  %a = f32[16,8]{1,0} parameter(0)\n"
        "  %b = f32[2,8]{1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n"
        f"  ROOT %y = {line}\n}}\n"
    )
    assert bytes_moved(Module(text)) == expected
