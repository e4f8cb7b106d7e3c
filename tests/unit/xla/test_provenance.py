"""What a value within a program is followed back and ahead to, form by form."""

import textwrap

import pytest

from spmdtrain.xla.collectives import Origin, Origins
from spmdtrain.xla.hlo import Computation, Instruction, Module

NAMES = {"state.params['w']": "w", "state.params['v']": "v"}
ARGUMENTS = """\
%w = f32[8,4]{1,0} parameter(0), metadata={op_name="state.params['w']"}
%v = f32[8,4]{1,0} parameter(1), metadata={op_name="state.params['v']"}
%x = f32[8,4]{1,0} parameter(2), metadata={op_name="batch"}
%i = s32[8,1]{1,0} parameter(3), metadata={op_name="numbers"}
%p = pred[] parameter(4), metadata={op_name="flag"}
"""
COMPUTATIONS = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gathering (a: f32[4,4], b: f32[4,4]) -> (f32[8,4], f32[8,4]) {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  ROOT %all = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-gather(%a, %b), dimensions={0}
}

%taken (t: (f32[8,4], f32[8,4])) -> f32[8,4] {
  %t = (f32[8,4]{1,0}, f32[8,4]{1,0}) parameter(0)
  ROOT %second = f32[8,4]{1,0} get-tuple-element(%t), index=1
}

%doubled (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %twice = f32[8,4]{1,0} add(%a, %a)
}
"""


def program(lines: str, w: str, v: str = "%v") -> tuple[Origins, Computation]:
    """A step whose results `w` and `v` take the places of the parameters."""
    body = f"{ARGUMENTS}{lines.strip()}\nROOT %out = (f32[8,4], f32[8,4]) tuple({w}, {v})\n"
    text = (
        "HloModule step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }\n"
        f"\n{COMPUTATIONS}\nENTRY %main () -> (f32[8,4], f32[8,4]) {{\n"
        f"{textwrap.indent(body, '  ')}}}\n"
    )
    module = Module(text)
    return Origins(module, NAMES, devices=2), module.computations["main"]


def origin(found: tuple[Origins, Computation], name: str, index: int = 0) -> Origin:
    origins, within = found
    return origins.parameters_of(within.instructions[name], within, index)


FORMS = {
    "a convert": "%y = bf16[8,4]{1,0} convert(%w)",
    "a part": "%y = f32[4,4]{1,0} slice(%w), slice={[0:4], [0:4]}",
    "the done half of a pair": """
%s = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%w)
%y = f32[8,4]{1,0} copy-done(%s)""",
    "one of a tuple": """
%t = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%v, %w)
%y = f32[8,4]{1,0} call(%t), to_apply=%taken""",
    "one of a gather that was begun": """
%h = f32[4,4]{1,0} slice(%v), slice={[0:4], [0:4]}
%k = f32[4,4]{1,0} slice(%w), slice={[0:4], [0:4]}
%s = ((f32[4,4]{1,0}, f32[4,4]{1,0}), (f32[8,4]{1,0}, f32[8,4]{1,0})) async-start(%h, %k), \
calls=%gathering
%d = (f32[8,4]{1,0}, f32[8,4]{1,0}) async-done(%s)
%y = f32[8,4]{1,0} get-tuple-element(%d), index=1""",
}


@pytest.mark.parametrize("lines", FORMS.values(), ids=FORMS)
def test_a_parameter_in_another_form_is_known_behind(lines: str) -> None:
    assert origin(program(lines, "%w"), "y") == Origin(("w",), is_source=True)


BECOMING = {
    "through what the optimizer does": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} add(%w, %y)""",
    "where a scatter adds to it": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} scatter(%y, %i, %x), to_apply=%add""",
    "through either branch": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} conditional(%p, %y, %x), true_computation=%doubled, \
false_computation=%doubled""",
    "to another slice": """
%y = f32[8,4]{1,0} negate(%x)
%a = token[] after-all()
%s = (f32[8,4]{1,0}, u32[], token[]) send(%y, %a), is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0"}
%r = (f32[8,4]{1,0}, u32[], token[]) recv(%a), is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0"}
%d = (f32[8,4]{1,0}, token[]) recv-done(%r), is_host_transfer=true
%n = f32[8,4]{1,0} get-tuple-element(%d), index=0""",
    "in parts": """
%y = f32[8,4]{1,0} negate(%x)
%g = f32[4,4]{1,0} reduce-scatter(%y), dimensions={0}, to_apply=%add
%n = f32[8,4]{1,0} all-gather(%g), dimensions={0}""",
}


@pytest.mark.parametrize("lines", BECOMING.values(), ids=BECOMING)
def test_what_a_parameter_is_made_of_is_known_ahead(lines: str) -> None:
    assert origin(program(lines, "%n"), "y") == Origin(("w",), is_source=False)


def test_what_is_sent_to_another_slice_is_known_where_it_is_sent() -> None:
    found = program(BECOMING["to another slice"], "%n")
    assert origin(found, "s") == Origin(("w",), is_source=False)
    sent = program(BECOMING["to another slice"].replace("negate(%x)", "copy(%v)"), "%w")
    assert origin(sent, "s") == origin(sent, "d") == Origin(("v",), is_source=True)


OTHERS = {
    "what a scatter adds": """
%y = f32[8,4]{1,0} negate(%x)
%n = f32[8,4]{1,0} scatter(%x, %i, %y), to_apply=%add""",
    "what a product is of": """
%y = f32[8,8]{1,0} negate(%x)
%n = f32[8,4]{1,0} dot(%y, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}""",
    "a sum that is part of no array": """
%y = f32[] negate(%x)
%n = f32[8,4]{1,0} broadcast(%y), dimensions={}""",
    "what goes elsewhere": "%y = f32[8,4]{1,0} negate(%x)",
}


@pytest.mark.parametrize("lines", OTHERS.values(), ids=OTHERS)
def test_other_data_is_no_parameter(lines: str) -> None:
    assert origin(program(lines, "%n" if "%n" in lines else "%w"), "y") == Origin((), False)


def test_each_of_several_that_travel_together() -> None:
    lines = """
%g = f32[8,4]{1,0} negate(%x)
%h = f32[8,4]{1,0} sine(%x)
%y = (f32[4,4]{1,0}, f32[4,4]{1,0}) reduce-scatter(%g, %h), dimensions={0}, to_apply=%add
%a = f32[4,4]{1,0} get-tuple-element(%y), index=0
%b = f32[4,4]{1,0} get-tuple-element(%y), index=1
%c = f32[8,4]{1,0} all-gather(%a), dimensions={0}
%d = f32[8,4]{1,0} all-gather(%b), dimensions={0}"""
    found = program(lines, "%d", "%c")
    assert [origin(found, "y", index).parameter for index in (0, 1)] == ["v", "w"]


def test_who_made_what_was_moved_since() -> None:
    lines = """
%m = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
metadata={op_name="jit(step)/dot_general"}
%c = bf16[8,8]{1,0} convert(%m)
%y = bf16[4,8]{1,0} reduce-scatter(%c), dimensions={0}, to_apply=%add"""
    origins, within = program(lines, "%w")
    made: Instruction = origins.producer(within.instructions["y"], within)
    assert made.op_name == "jit(step)/dot_general"
