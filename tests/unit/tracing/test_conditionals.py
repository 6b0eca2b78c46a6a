"""Conditionals over several arrays become one for each group of arrays, and compute the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.tracing.conditionals import has_wide_conditional, with_split_conditionals

A, B = np.arange(4, dtype="f4"), np.arange(6, dtype="f4").reshape(2, 3)


def unrelated(p, a, b):
    return jax.lax.cond(p, lambda a, b: (2 * a, b + 1), lambda a, b: (a, b * 0.5), a, b)


def with_a_norm(p, a, b):
    """Each array is scaled by a scalar of both, and the count and a sum are results."""

    def scaled(a, b, n):
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        a, b = a / norm, b / norm
        return a, b, n + 1, jnp.sum(a) + jnp.max(b)

    return jax.lax.cond(p, scaled, lambda a, b, n: (a, b, n, 0.0), a, b, jnp.int32(3))


def with_zeros(p, a, b):
    """Both arrays get rows of the same zeros, which do not join them."""
    zeros = lambda a, b: tuple(jnp.zeros((7, 3))[: len(x) + 1].sum() + 0 * x for x in (a, b))  # noqa: E731
    return jax.lax.cond(p, zeros, lambda a, b: (a + 1, b), a, b)


def with_flags(p, a, b):
    """An array of scalars of both belongs to none of them."""

    def checked(a, b):
        fine = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in (a, b)]))
        return jnp.where(fine, 2 * a, a), jnp.where(fine, -b, b)

    return jax.lax.cond(p, checked, lambda a, b: (a, b), a, b)


def nested(p, a, b):
    """The conditional inside of a branch has a group of both arrays, so that the one around it has too."""

    def inner(a, b):
        return jax.lax.cond(a[1] > 5, lambda a, b: (a, b), lambda a, b: (b[0, 0] + a, b), a, b)

    return jax.lax.cond(p, jax.jit(inner), lambda a, b: (a, b), a, b)


def of_three(p, a, b):
    branches = [lambda a, b: (a, b), lambda a, b: (a + 1, b - 1), lambda a, b: (a * 2, -b)]
    return jax.lax.switch(2 * p, branches, a, b)


def swapped(p, a, _):
    return jax.lax.cond(p, lambda a, b: (b, a), lambda a, b: (a, b), a, 10 + a)


def conditionals(jaxpr):
    return sum(equation.primitive.name == "cond" for equation in jaxpr.eqns)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (unrelated, 2),
        (with_a_norm, 4),
        (with_zeros, 2),
        (with_flags, 4),
        (nested, 1),
        (of_three, 2),
        (swapped, 1),
    ],
)
def test_groups_are_split_and_the_results_are_the_same(fn, count):
    closed = jax.make_jaxpr(fn)(True, A, B)
    assert has_wide_conditional(closed.jaxpr)
    split = jax.jit(with_split_conditionals(closed)).trace(True, A, B)
    assert conditionals(split.jaxpr.jaxpr) == count
    ours, theirs = split.lower().compile(), jax.jit(fn)
    for p in (False, True):
        for got, want in zip(ours(p, A, B), jax.tree.leaves(theirs(p, A, B)), strict=True):
            np.testing.assert_array_equal(got, want)


def halvings(x):
    return jax.lax.while_loop(lambda n: jnp.max(n) > 1.0, lambda n: n / 2, x)


@pytest.mark.parametrize(
    "looped",
    [
        halvings,
        lambda n: jax.lax.cond(n > 3.0, halvings, lambda n: n, n),
        lambda n: jnp.sum(halvings(jnp.full(4, n))),  # an array of no other, and a scalar of it
    ],
    ids=["a scalar", "inside of a conditional", "an array"],
)
def test_a_branch_with_a_loop_of_unknown_length_stays_whole(looped):
    """It may not end where its branch is not taken."""

    def fn(p, a, b):
        def halved(a, b):
            n = looped(a.sum() + b.sum())
            return a * n, b * n

        return jax.lax.cond(p, halved, lambda a, b: (a, b), a, b)

    closed = jax.make_jaxpr(fn)(True, A, B)
    assert conditionals(jax.make_jaxpr(with_split_conditionals(closed))(True, A, B).jaxpr) == 1


def test_scalars_of_a_branch_that_is_not_taken_are_not_nan_elsewhere(monkeypatch):
    def fn(count, a, b):
        def averaged(count, a, b):
            mean = count / count
            return a * mean, b * mean

        return jax.lax.cond(count > 0, averaged, lambda count, a, b: (a, b), count, a, b)

    read = []

    def switch(which, branches, operands, original=jax.lax.switch):
        read.extend(jax.tree.leaves(operands))
        return original(which, branches, operands)

    closed = jax.make_jaxpr(fn)(1.0, A, B)
    monkeypatch.setattr(jax.lax, "switch", switch)
    for count in (0.0, 2.0):
        for got, want in zip(with_split_conditionals(closed)(count, A, B), fn(count, A, B), strict=True):
            np.testing.assert_array_equal(got, want)
    assert any(operand.shape == () for operand in read)
    assert not any(np.isnan(operand).any() for operand in read)


def test_a_branch_with_an_effect_stays_whole():
    """It would happen whichever branch is taken."""

    def fn(p, a, b):
        def counted(a, b):
            jax.debug.callback(lambda total: None, a.sum() + b.sum())
            return a * 2, b * 2

        return jax.lax.cond(p, counted, lambda a, b: (a, b), a, b)

    closed = jax.make_jaxpr(fn)(True, A, B)
    assert conditionals(jax.make_jaxpr(with_split_conditionals(closed))(True, A, B).jaxpr) == 1
