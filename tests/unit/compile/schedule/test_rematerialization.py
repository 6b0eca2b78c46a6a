"""Values that are computed again to save memory."""

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, verify
from mpmd.compile.schedule.heap import peak_of
from mpmd.compile.schedule.rematerialization import Rematerialization
from mpmd.errors import PassError
from mpmd.support import diagnostics
from mpmd.support.diagnostics import Severity
from tests.support.hlo_meaning import evaluate
from tests.support.three_rounds import three_rounds

LESS = """
less { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = pred[] compare(a, b), direction=LT }
"""
KEPT = f"""HloModule kept, is_scheduled=true
{LESS}
ENTRY main {{
  x = f32[1000] parameter(0)
  c = f32[1000] cosine(x)
  n = f32[1000] negate(x)
  a = f32[1000] sort(n), dimensions={{0}}, to_apply=less
  b = f32[1000] reverse(a), dimensions={{0}}
  ROOT r = f32[1000] add(c, b)
}}
"""
ROUNDS = three_rounds("""
  x = f32[] constant(2)
  c = f32[1000] broadcast(x), dimensions={}
  n = f32[1000] multiply(v, c)
  a = f32[1000] sort(n), dimensions={0}, to_apply=less
  b = f32[1000] reverse(a), dimensions={0}
  w = f32[1000] add(b, c)
""")
LOOP = f"""HloModule loop, is_scheduled=true
{LESS}
{ROUNDS}ENTRY main {{
  x = f32[1000] parameter(0)
  i = s32[] constant(0)
  b = (s32[], f32[1000]) tuple(i, x)
  l = (s32[], f32[1000]) while(b), condition=condition, body=body
  o = f32[1000] get-tuple-element(l), index=1
  ROOT r = f32[1000] negate(o)
}}
"""


@pytest.mark.parametrize("text", [KEPT, LOOP])
def test_the_peak_is_under_the_limit_and_the_numbers_are_the_same(text):
    module = parse_module(text)
    x = np.linspace(-2, 2, 1000).astype(np.float32)[::-1].copy()
    want = evaluate(parse_module(text), [x])
    before = peak_of(module)
    with diagnostics.collecting() as found:
        assert Rematerialization(limit=before - 4000).run(module)
    assert peak_of(module) <= before - 4000
    verify(module)
    np.testing.assert_array_equal(evaluate(module, [x]), want)
    (notice,) = found.of(Severity.NOTICE)
    assert "computed again to save memory" in notice.message
    assert not found.of(Severity.WARNING)


def test_what_cannot_be_reached_is_said_with_who_holds_it():
    module = parse_module(KEPT)
    with diagnostics.collecting() as found:
        Rematerialization(limit=100).run(module)
    (warning,) = found.of(Severity.WARNING)
    assert "the limit is 100" in warning.message
    assert "(4,000)" in warning.message
    assert "jax.checkpoint" in warning.message


def test_nothing_is_done_without_a_limit_or_under_it():
    module = parse_module(KEPT)
    assert not Rematerialization().run(module)
    assert not Rematerialization(limit=peak_of(module)).run(module)


def test_an_order_is_needed_first():
    with pytest.raises(PassError, match="needs an order"):
        Rematerialization(limit=1).run(parse_module(KEPT.replace(", is_scheduled=true", "")))


def test_what_nobody_read_before_is_moved():
    """`c` is needed at the end only: it is computed there, once."""
    module = parse_module(KEPT)
    Rematerialization(limit=peak_of(module) - 4000).run(module)
    assert sum(i.opcode == "cosine" for i in module.entry) == 1


ONCE = {
    "an effect": "f32[1000] rng(zero, one), distribution=rng_uniform",
    "a call": 'f32[1000] custom-call(x), custom_call_target="f"',
    "a sum over devices": "f32[1000] all-reduce(x), replica_groups={}, to_apply=sum",
    "a fixed order": "f32[1000] cosine(x), control-predecessors={n}",
}


@pytest.mark.parametrize("what", ONCE)
def test_it_is_done_once_and_where_it_stands(what):
    text = KEPT.replace("  c = f32[1000] cosine(x)\n", "").replace(
        "  a = f32",
        f"  zero = f32[] constant(0)\n  one = f32[] constant(1)\n  c = {ONCE[what]}\n  a = f32",
    )
    added = "sum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"
    module = parse_module(text.replace("ENTRY", added + "ENTRY"))
    (once,) = [i for i in module.entry if i.name == "c"]
    with diagnostics.collecting():
        Rematerialization(limit=100).run(module)
    assert [i for i in module.entry if i.opcode == once.opcode] == [once]
