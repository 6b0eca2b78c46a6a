"""Each rewrite on programs made for it: it fires on most of them, and keeps their numbers bit for bit."""

from __future__ import annotations

import functools

import pytest

from mpmd.compile.hlo import HloModule
from mpmd.compile.passes import make_pass
from mpmd.compile.passes.rewriter import Rewriter, Rule
from mpmd.compile.passes.simplify import algebra
from tests.support.directed import rewrites_expand, rewrites_passes, seeds
from tests.support.directed.rewrites import ROUNDED, RULES, ZEROS_LOSE_SIGNS, rule_case
from tests.support.random_hlo import differences
from tests.support.random_hlo.draft import Case
from tests.support.rewrite_checks import rewritten

FAST, SLOW = 10, 2000
MIN_FIRED = 0.5
"""Share of the programs on which a rewrite must fire."""


def named(rule: Rule) -> str:
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"


def fired(rule: Rule, count: int) -> int:
    """On how many programs a rule fires."""
    own = {opcode: (rule,) for opcode, rules in algebra.table().items() if rule in rules}

    def rewrite(module: HloModule) -> bool:
        return Rewriter(module.entry).run(own, lambda instruction: True)

    def check(case: Case) -> bool:
        case.exact = rule not in ROUNDED
        differ = None if case.exact else functools.partial(differences, case=case)
        signs = rule not in ZEROS_LOSE_SIGNS
        return rewritten(case.module, case.arguments, rewrite, signs=signs, differ=differ)

    return sum(check(rule_case(rule, seed)) for seed in seeds(count))


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_a_rule_keeps_the_numbers(rule):
    assert fired(rule, FAST) >= MIN_FIRED * FAST


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rule", RULES, ids=named)
def test_a_rule_keeps_the_numbers_of_many(rule):
    assert fired(rule, SLOW) >= MIN_FIRED * SLOW


def test_every_rule_has_programs():
    assert set(RULES) == {rule for rules in algebra.table().values() for rule in rules}


def passed(name: str, count: int) -> int:
    """How many programs a pass changes."""

    def check(case: Case) -> bool:
        differ = None if case.exact else functools.partial(differences, case=case)
        signs = name not in rewrites_passes.ZEROS_LOSE_SIGNS
        return rewritten(case.module, case.arguments, make_pass(name).run, signs=signs, differ=differ)

    return sum(check(rewrites_passes.pass_case(name, seed)) for seed in seeds(count))


@pytest.mark.parametrize("name", rewrites_passes.PASSES)
def test_a_pass_keeps_the_numbers(name):
    assert passed(name, FAST) >= MIN_FIRED * FAST


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", rewrites_passes.PASSES)
def test_a_pass_keeps_the_numbers_of_many(name):
    assert passed(name, SLOW) >= MIN_FIRED * SLOW


def expanded(name: str, count: int) -> int:
    """How many operations an expander rewrites."""
    pass_ = make_pass(*rewrites_expand.EXPANDERS[name][0].split(" ", 1))
    signs = name not in rewrites_expand.ZEROS_LOSE_SIGNS

    def check(case: Case) -> bool:
        return rewritten(case.module, case.arguments, pass_.run, signs=signs)

    return sum(check(rewrites_expand.expander_case(name, seed)) for seed in seeds(count))


@pytest.mark.parametrize("name", rewrites_expand.EXPANDERS)
def test_an_expander_keeps_the_numbers(name):
    assert expanded(name, FAST) >= MIN_FIRED * FAST


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", rewrites_expand.EXPANDERS)
def test_an_expander_keeps_the_numbers_of_many(name):
    assert expanded(name, SLOW) >= MIN_FIRED * SLOW
