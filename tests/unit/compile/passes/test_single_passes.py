"""What passes do that texts and random programs do not show: refusals, limits, jitter, fixed points."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, print_module, verify
from mpmd.compile.passes import PASSES, collectives, expand, layout, make_pass, simplify
from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.compile.passes.simplify.while_loops import counter_of
from mpmd.compile.pipelines import GROUPS
from mpmd.errors import ConfigError
from mpmd.support.pass_pipeline import Timing, Watch, run_pipeline
from mpmd.support.passes import Pass
from tests.support.hlo_meaning import evaluate
from tests.support.rewrite_checks import rewritten

CHAIN = """HloModule chain

ENTRY main {
  x = f32[4]{0} parameter(0)
  e = f32[4]{0} exponential(x)
  t = f32[4]{0} tanh(e)
  ROOT r = f32[4]{0} add(t, e)
}
"""


def test_jitter_is_small_but_there():
    module = parse_module(CHAIN)
    x = np.array([0.1, -1.0, 0.7, 2.0], np.float32)
    before = evaluate(module, [x])
    assert make_pass("hlo-float-jitter", "values=tanh|exp relative=1000").run(module)
    verify(module)
    after = evaluate(module, [x])
    assert not np.array_equal(before, after)
    np.testing.assert_allclose(after, before, rtol=3e-3)


def test_an_unknown_pass_is_named_with_what_is_close():
    with pytest.raises(ConfigError, match="unknown pass 'hlo-dze'; did you mean"):
        make_pass("hlo-dze")


COUNTED = """HloModule counted

condition {{
  s = ({0}[], f32[]) parameter(0)
  i = {0}[] get-tuple-element(s), index=0
  n = {0}[] constant({2})
  ROOT c = pred[] compare(i, n), direction={3}
}}

body {{
  t = ({0}[], f32[]) parameter(0)
  j = {0}[] get-tuple-element(t), index=0
  d = {0}[] constant({4})
  k = {0}[] add(j, d)
  v = f32[] get-tuple-element(t), index=1
  one = f32[] constant(1)
  w = f32[] add(v, one)
  ROOT u = ({0}[], f32[]) tuple(k, w)
}}

ENTRY main {{
  zero = f32[] constant(0)
  first = {0}[] constant({1})
  init = ({0}[], f32[]) tuple(first, zero)
  ROOT l = ({0}[], f32[]) while(init), condition=condition, body=body
}}
"""


@pytest.mark.parametrize(
    "loop",
    [
        ("s32", 0, 10, "LT", 1),
        ("s32", 0, 10, "LT", 3),
        ("s32", 0, 10, "LE", 5),
        ("s32", 10, 0, "GT", -3),
        ("s32", 10, 0, "GE", -5),
        ("s32", 0, 6, "NE", 2),
        ("s32", 3, 3, "EQ", 1),
        ("s32", 5, 3, "LT", 1),
        ("u8", 0, 200, "LT", 7),
    ],
    ids=str,
)
def test_trips_are_what_the_evaluator_counts(loop):
    module = parse_module(COUNTED.format(*loop))
    counter = counter_of(module.entry.root)
    assert counter is not None
    assert counter.trips == evaluate(module, [])[1]


@pytest.mark.parametrize(
    "loop",
    [
        ("s32", 0, 10, "LT", 0),  # for ever
        ("s32", 10, 0, "GT", 0),
        ("s32", 0, 5, "NE", 2),  # past the limit and round
        ("s32", 0, 6, "NE", -2),
        ("s8", 0, 126, "LE", 5),  # past the largest number
        ("s32", 0, 10, "LT", -1),
    ],
    ids=str,
)
def test_trips_are_not_guessed(loop):
    assert counter_of(parse_module(COUNTED.format(*loop)).entry.root) is None


def test_a_loop_that_never_runs_is_known():
    counter = counter_of(parse_module(COUNTED.format("s32", 0, 10, "GT", -1)).entry.root)
    assert counter is not None and counter.trips == 0


def test_a_fixed_point_is_reached_and_counted():
    ran: list[str] = []

    class Countdown(Pass):
        name = "countdown"

        def run(self, module):
            ran.append("run")
            return len(ran) < 4

    assert Fixpoint("test", (Countdown(),)).run(None)
    assert len(ran) == 4
    ran.clear()
    assert Fixpoint("test", (Countdown(),), most=2).run(None)
    assert len(ran) == 2


def test_passes_are_disabled_by_name():
    module = parse_module(CHAIN)
    watch = Watch(verify=verify, text=print_module, disabled=frozenset(["hlo-float-jitter"]))
    timing = Timing()
    run_pipeline(module, [make_pass("hlo-float-jitter"), make_pass("hlo-dce")], watch, timing)
    assert [name for name, _ in timing.seconds] == ["hlo-dce"]


def test_groups_name_passes_of_the_table():
    def inner(pass_: Pass) -> list[Pass]:
        return [p for q in pass_.passes for p in inner(q)] if isinstance(pass_, Fixpoint) else [pass_]

    here = {kind.name for family in (expand, simplify, collectives, layout) for kind in family.PASSES}
    used = {p.name for make in GROUPS.values() for q in make() for p in inner(q)}
    assert used <= here <= set(PASSES)


READ_IN_VAIN = """HloModule vain

condition {
  s = (s32[], f32[], f32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(5)
  ROOT c = pred[] compare(i, n), direction=LT
}

body {
  s = (s32[], f32[], f32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  x = f32[] get-tuple-element(s), index=1
  y = f32[] add(x, x)
  unread = f32[] get-tuple-element(s), index=2
  vain = f32[] exponential(unread)
  vainer = f32[] negate(vain)
  ROOT t = (s32[], f32[], f32[]) tuple(next, y, unread)
}

ENTRY main {
  zero = s32[] constant(0)
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  init = (s32[], f32[], f32[]) tuple(zero, a, b)
  w = (s32[], f32[], f32[]) while(init), condition=condition, body=body
  ROOT r = f32[] get-tuple-element(w), index=1
}
"""


@pytest.mark.parametrize("name", ["hlo-while-simplifier", "hlo-while-invariant-code-motion"])
def test_work_in_vain_does_not_keep_the_state_of_a_loop(name):
    """Passes run before dead code is taken out."""
    module = parse_module(READ_IN_VAIN)
    assert make_pass(name).run(module) == (name == "hlo-while-simplifier")
    verify(module)
    assert evaluate(module, [np.float32(3), np.float32(1)]) == 96


BRANCHES = """HloModule branches

one {{
  x = f32[] parameter(0)
  ROOT a = f32[] negate(x)
}}

two {{
  x = f32[] parameter(0)
  ROOT a = f32[] add(x, x)
}}

three {{
  x = f32[] parameter(0)
  ROOT a = f32[] multiply(x, x)
}}

ENTRY main {{
  k = s32[] constant({})
  x = f32[] parameter(0)
  ROOT r = f32[] conditional(k, x, x, x), branch_computations={{one, two, three}}
}}
"""


@pytest.mark.parametrize("number", [-2, -1, 0, 1, 2, 3, 99])
def test_a_number_outside_of_the_branches_selects_the_last_one(number):
    module = parse_module(BRANCHES.format(number))
    assert rewritten(module, [np.float32(3)], make_pass("hlo-conditional-simplifier").run)
