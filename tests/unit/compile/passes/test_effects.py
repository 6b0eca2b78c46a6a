"""An effect that a rewrite moves is done as often as before."""

from __future__ import annotations

import pytest

from mpmd.compile.hlo import parse_module, print_module, verify
from mpmd.compile.passes import make_pass
from tests.support.left_alone.text import entry

_CALL = 'custom-call(p), custom_call_target="print", custom_call_has_side_effect=true'
_PRINTS = (
    f"one {{\n  p = f32[4] parameter(0)\n  e = f32[4] {_CALL}\n  n = f32[4] negate(p)\n"
    "  ROOT t = (f32[4], f32[4]) tuple(n, p)\n}\n"
)
_PLAIN = "two {\n  p = f32[4] parameter(0)\n  ROOT t = (f32[4], f32[4]) tuple(p, p)\n}\n"
_ALONE = f"one {{\n  p = f32[4] parameter(0)\n  ROOT e = f32[4] {_CALL}\n}}\n"

PROGRAMS = {
    "an unused result of a branch": (
        "hlo-conditional-simplifier",
        entry(
            "  q = pred[] parameter(0)\n  x = f32[4] parameter(1)\n"
            "  c = (f32[4], f32[4]) conditional(q, x, x), true_computation=one, false_computation=two\n"
            "  ROOT r = f32[4] get-tuple-element(c), index=0",
            _PRINTS + _PLAIN,
        ),
    ),
    "an asynchronous call": (
        "hlo-async-expander",
        entry(
            "  x = f32[4] parameter(0)\n  s = ((f32[4]), f32[4], u32[]) async-start(x), calls=one\n"
            "  ROOT d = f32[4] async-done(s)",
            _ALONE,
        ),
    ),
    "a call": (
        "hlo-call-inliner",
        entry("  x = f32[4] parameter(0)\n  ROOT c = f32[4] call(x), to_apply=one", _ALONE),
    ),
    "beside a fusion": (
        "hlo-fusion",
        entry(
            f"  p = f32[4] parameter(0)\n  e = f32[4] {_CALL}\n  n = f32[4] negate(p)\n"
            "  ROOT r = f32[4] abs(n)"
        ),
    ),
    "a loop that runs once": (
        "hlo-while-simplifier",
        entry(
            "  x = f32[4] parameter(0)\n  z = s32[] constant(0)\n  i = (s32[], f32[4]) tuple(z, x)\n"
            "  w = (s32[], f32[4]) while(i), condition=less, body=step\n"
            "  ROOT r = f32[4] get-tuple-element(w), index=1",
            "less {\n  s = (s32[], f32[4]) parameter(0)\n  i = s32[] get-tuple-element(s), index=0\n"
            "  n = s32[] constant(1)\n  ROOT c = pred[] compare(i, n), direction=LT\n}\n\n"
            "step {\n  s = (s32[], f32[4]) parameter(0)\n  i = s32[] get-tuple-element(s), index=0\n"
            f"  p = f32[4] get-tuple-element(s), index=1\n  e = f32[4] {_CALL}\n  one = s32[] constant(1)\n"
            "  j = s32[] add(i, one)\n  ROOT t = (s32[], f32[4]) tuple(j, e)\n}\n",
        ),
    ),
}


def test_an_inlined_effect_keeps_its_place():
    module = parse_module(
        entry(
            "  x = f32[4] parameter(0)\n  a = f32[4] tanh(x)\n"
            "  c = f32[4] call(x), to_apply=one, control-predecessors={a}\n"
            "  b = f32[4] abs(x), control-predecessors={c}\n  ROOT r = (f32[4], f32[4]) tuple(a, b)",
            _ALONE.replace("ROOT e", "e").replace("}", "  ROOT n = f32[4] negate(p)\n}"),
        )
    )
    assert make_pass("hlo-call-inliner").run(module)
    verify(module)
    by = {i.opcode: i for i in module.entry}
    assert by["tanh"].precedes(by["custom-call"]) and by["custom-call"].precedes(by["abs"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_effect_is_done_once(name):
    pass_, text = PROGRAMS[name]
    module = parse_module(text)
    assert make_pass(pass_).run(module)
    verify(module)
    assert print_module(module).count('custom_call_target="print"') == 1
    assert all(sum(c.callers.values()) <= 1 for c in module.computations)
