"""The search for patterns: what it finds where pairs are misled, and that its groups compute the same."""

import jax
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.compilation import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import parse_module
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.fusion.grouping import Grouping
from mpmd.compile.passes.fusion.merging import BEAM, GREEDY, merge_groups
from mpmd.compile.passes.fusion.patterns import (
    ContractedReach,
    Pattern,
    PatternSpace,
    is_convex,
    join_patterns,
    plan_patterns,
    select_patterns,
)
from mpmd.compile.passes.fusion.prices import Prices
from mpmd.errors import ConfigError
from tests.support.native_fragments import fragment_of, run
from tests.support.native_functions import Floats, gradients, layer_norm

floats = Floats()

CHAIN = """HloModule chain

ENTRY main {
  x = f32[4096]{0} parameter(0)
  a = f32[4096]{0} exponential(x)
  b = f32[4096]{0} tanh(a)
  c = f32[4096]{0} exponential(b)
  ROOT d = f32[4096]{0} tanh(c)
}
"""

TURNS = CHAIN.replace("4096", "64,64").replace("{0}", "{1,0}")
for before, after in ("ab", "bc", "cd"):
    turned = f"  {before}t = f32[64,64]{{1,0}} transpose({before}), dimensions={{1,0}}\n"
    TURNS = TURNS.replace(f"({before})\n", f"({before}t)\n").replace(f"  {after} =", f"{turned}  {after} =")
    TURNS = TURNS.replace(f"  ROOT {after} =", f"{turned}  ROOT {after} =")

DIAMOND = """HloModule diamond

ENTRY main {
  x = f32[4096]{0} parameter(0)
  a = f32[4096]{0} exponential(x)
  b = f32[4096]{0} tanh(a)
  ROOT c = f32[4096]{0} add(a, b)
}
"""


class Listed(Prices):
    """Prices by names; groups that are not listed cannot be one kernel."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def of(self, members, planned):
        return self.seconds.get("".join(m.name for m in members))


def groups_of(text, prices, **options):
    grouping = Grouping(parse_module(text, "text").entry)
    join_patterns(grouping, 96, True, prices, **options)
    return ["".join(m.name for m in g.members) for g in grouping.groups()]


def test_two_small_gains_beat_a_larger_one_between_them():
    apart = dict.fromkeys("abcd", 10.0)
    prices = Listed({**apart, "ab": 16.0, "bc": 15.0, "cd": 16.0})
    assert groups_of(CHAIN, prices) == ["ab", "cd"]
    assert groups_of(CHAIN, prices, beam=1) == ["a", "bc", "d"], "the first choice by gain alone"


class Misleading(Listed):
    """Prices by names, and the most to be saved where `b` is read."""

    def saved(self, value, joining, others):
        return 2.0 if value.name == "b" else 1.0


@pytest.mark.parametrize(("search", "groups"), [(GREEDY, ["a", "bc", "d"]), (BEAM, ["ab", "cd"])])
def test_pairs_join_where_most_is_saved_and_the_search_looks_further(search, groups):
    apart = dict.fromkeys("abcd", 10.0)
    prices = Misleading({**apart, "ab": 16.0, "bc": 15.0, "cd": 16.0, "abc": 90.0, "bcd": 90.0, "abcd": 90.0})
    grouping = Grouping(parse_module(TURNS, "text").entry)
    merge_groups(grouping, 96, False, prices, search)
    assert ["".join(m.name for m in g.members) for g in grouping.groups()] == groups


def test_a_value_that_others_read_too_is_written_all_the_same():
    value = parse_module(CHAIN, "text").entry.root.operands[0]
    assert Prices().saved(value, 1, 0) == pytest.approx(2 * Prices().saved(value, 1, 1))
    assert Prices().saved(value, 2, 0) == pytest.approx(3 * Prices().saved(value, 1, 5))


def test_patterns_grow_over_several_groups_and_rounds():
    apart = dict.fromkeys("abcd", 10.0)
    whole = Listed({**apart, "ab": 19.0, "abc": 18.0, "abcd": 17.0, "cd": 19.0, "bc": 19.0})
    assert groups_of(CHAIN, whole) == ["abcd"]
    assert groups_of(CHAIN, Listed({**apart, "ab": 12.0, "cd": 12.0, "abcd": 20.0})) == ["abcd"], (
        "second round"
    )


def test_what_does_not_gain_stays_apart():
    assert groups_of(
        CHAIN, Listed(dict.fromkeys([*"abcd", "ab", "cd"], 20.0) | {"ab": 41.0, "cd": 40.0})
    ) == [*"abcd"]


def test_no_pattern_leaves_out_what_stands_between():
    prices = Listed({"a": 10.0, "b": 10.0, "c": 10.0, "ac": 1.0, "ab": 19.0})
    assert groups_of(DIAMOND, prices) == ["ab", "c"]


def test_patterns_that_would_circle_together_are_not_both_taken():
    """a feeds b and c feeds d: {a, d} and {b, c} are each fine, but need each other."""
    text = """HloModule circle

ENTRY main {
  x = f32[4096]{0} parameter(0)
  a = f32[4096]{0} exponential(x)
  c = f32[4096]{0} tanh(x)
  b = f32[4096]{0} add(a, x)
  d = f32[4096]{0} add(c, x)
  ROOT t = (f32[4096]{0}, f32[4096]{0}) tuple(b, d)
}
"""
    space = PatternSpace(Grouping(parse_module(text, "text").entry), 96, True, Prices())
    number = {g.members[0].name: k for k, g in enumerate(space.groups)}
    first = 1 << number["a"] | 1 << number["d"]
    second = 1 << number["c"] | 1 << number["b"]
    reach = ContractedReach(space)
    assert all(is_convex(mask, reach.above, reach.below) for mask in (first, second))
    assert reach.take(first) and not reach.take(second)
    plan = plan_patterns(space, [Pattern(first, 2.0), Pattern(second, 1.0)], 4)
    assert plan == [Pattern(first, 2.0)]


def test_a_wider_beam_never_selects_less():
    rng = np.random.default_rng(0)
    for _ in range(50):
        masks = {int(m) for m in rng.integers(1, 1 << 8, 12)}
        patterns = sorted((Pattern(m, float(rng.random())) for m in masks), key=lambda p: -p.gain)
        found = [select_patterns(patterns, beam)[0] for beam in (1, 4096)]
        assert found[0].gain <= found[1].gain
        for selection in found:
            used = 0
            for pattern in selection.patterns:
                assert not used & pattern.mask
                used |= pattern.mask
            assert selection.gain == pytest.approx(sum(p.gain for p in selection.patterns))


@pytest.mark.parametrize(
    "function", [gradients(layer_norm), lambda x, a, b: jax.nn.softmax(x * a).sum(0) + b]
)
def test_groups_of_patterns_compute_the_same(function):
    arguments = [floats(32, 48), floats(48), floats(48)]
    fragment = fragment_of(function, *arguments)
    options = CompileOptions(pass_options=("hlo-fusion{search=beam}",))
    made = prepare_fragment(fragment, NativeCpu(), options).compiled()
    for got, wanted in zip(
        run(fragment, arguments, made), jax.tree.leaves(function(*arguments)), strict=True
    ):
        np.testing.assert_allclose(got, np.asarray(wanted), rtol=2e-5, atol=2e-5)


def test_patterns_join_what_a_row_needs():
    """The search alone, without the pairs that the pass joins after it, makes one kernel of a softmax."""
    fragment = fragment_of(jax.nn.softmax, floats(16, 64))
    options = CompileOptions(disable_passes=("hlo-fusion",))
    module = prepare_fragment(fragment, NativeCpu(), options).module
    grouping = Grouping(module.entry)
    before = len(grouping.groups())
    join_patterns(grouping, 96, True, Prices())
    assert before > 3 and len(grouping.groups()) == 1


def test_no_such_search():
    with pytest.raises(ConfigError, match="option search of hlo-fusion is 'depth'"):
        Fusion(search="depth")
