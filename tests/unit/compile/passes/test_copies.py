"""Results of programs, loops and branches have memory of their own."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.passes import make_pass
from tests.support.left_alone.text import entry
from tests.support.rewrite_checks import rewritten

_STATE = "(s32[], s32[])"
_LOOP = (
    f"less {{\n  s = {_STATE} parameter(0)\n  a = s32[] get-tuple-element(s), index=0\n"
    "  n = s32[] constant(9)\n  ROOT c = pred[] compare(a, n), direction=LT\n}\n\n"
    f"step {{\n  s = {_STATE} parameter(0)\n  a = s32[] get-tuple-element(s), index=0\n"
    f"  b = s32[] get-tuple-element(s), index=1\n  m = s32[] add(a, b)\n"
    f"  ROOT t = {_STATE} tuple(RETURNED)\n}}\n"
)
_WHILE = (
    "  p = s32[] parameter(0)\n  q = s32[] parameter(1)\n"
    f"  i = {_STATE} tuple(p, q)\n  w = {_STATE} while(i), condition=less, body=step\n"
    "  a = s32[] get-tuple-element(w), index=0\n  b = s32[] get-tuple-element(w), index=1\n"
    f"  ROOT r = {_STATE} tuple(a, b)"
)
PROGRAMS = {
    "a value twice": (
        "  x = f32[4] parameter(0)\n  n = f32[4] negate(x)\n  ROOT r = (f32[4], f32[4]) tuple(n, n)",
        "",
        1,
    ),
    "a parameter": (
        "  x = f32[4] parameter(0)\n  n = f32[4] negate(x)\n  ROOT r = (f32[4], f32[4]) tuple(x, n)",
        "",
        1,
    ),
    "a parameter behind a barrier": (
        "  x = f32[4] parameter(0)\n  b = f32[4] opt-barrier(x)\n  n = f32[4] negate(x)\n"
        "  ROOT r = (f32[4], f32[4]) tuple(b, n)",
        "",
        1,
    ),
    "state that changes its place": (_WHILE, _LOOP.replace("RETURNED", "m, a"), 1),
    "a parameter that a loop leaves unchanged": (_WHILE, _LOOP.replace("RETURNED", "m, b"), 1),
    "a parameter that a loop behind a barrier leaves unchanged": (
        _WHILE.replace("while(i)", "while(o)").replace("  w =", f"  o = {_STATE} opt-barrier(i)\n  w ="),
        _LOOP.replace("RETURNED", "m, b"),
        1,
    ),
    "an element of a loop twice": (
        _WHILE.replace(
            "  ROOT r", f"  o = {_STATE} opt-barrier(w)\n  c = s32[] get-tuple-element(o), index=0\n  ROOT r"
        ).replace("tuple(a, b)", "tuple(a, c)"),
        _LOOP.replace("RETURNED", "m, a"),
        2,
    ),
}
"""The entry, what it calls, and how many copies make the results independent."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_memory_of_their_own(name):
    lines, called, copies = PROGRAMS[name]
    module = parse_module(entry(lines, called))
    assert make_pass("hlo-copy-insertion").run(module)
    assert sum(i.opcode == "copy" for i in module.instructions()) == copies


@pytest.mark.parametrize("truth", [True, False])
def test_truth_selects_the_first_branch(truth):
    branches = "".join(
        f"{name} {{\n  p = f32[] parameter(0)\n  ROOT r = f32[] {operation}\n}}\n\n"
        for name, operation in (("one", "negate(p)"), ("two", "add(p, p)"))
    )
    module = parse_module(
        entry(
            "  q = pred[] parameter(0)\n  x = f32[] parameter(1)\n"
            "  ROOT c = f32[] conditional(q, x, x), true_computation=one, false_computation=two",
            branches,
        )
    )
    assert rewritten(module, [np.asarray(truth), np.float32(3)], make_pass("hlo-copy-insertion").run)
