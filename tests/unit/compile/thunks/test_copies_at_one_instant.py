"""Copies of several values at one instant, in loops, branches and results, and what lasts until then."""

import dataclasses
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.thunks.check import check_thunks
from mpmd.compile.thunks.thunk import ConditionalThunk, CopyThunk, KernelThunk, WhileThunk
from mpmd.errors import CompileError
from tests.support.native_fragments import check_memory, compiled, fragment_of, run


def groups(thunks):
    """Copies that belong to one instant: those that follow each other without anything between them."""
    found = [[]]
    for thunk in thunks:
        if isinstance(thunk, CopyThunk):
            found[-1].append(thunk)
            continue
        if isinstance(thunk, WhileThunk):
            found += groups(thunk.condition) + groups(thunk.body)
        if isinstance(thunk, ConditionalThunk):
            found += [group for branch in thunk.branches for group in groups(branch)]
        found.append([])
    return [group for group in found if group]


def check(function, arguments, donated=()):
    """Both checkers, the numbers of poisoned memory, and copies that may run in any order."""
    fragment, leaves = fragment_of(function, *arguments, donated=donated), jax.tree.leaves(arguments)
    made = compiled(fragment, poison=True)
    check_memory(made)
    for mine, theirs in zip(run(fragment, leaves, made), jax.tree.leaves(jax.jit(function)(*arguments))):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    plain = compiled(fragment)
    check_memory(plain)
    for group in groups(plain.thunks):
        assert not any(a.target.overlaps(b.source) for a in group for b in group), group
    return plain


def numbered(*sizes):
    return [np.arange(n, dtype=np.float32) + 100 * k for k, n in enumerate(sizes)]


def fresh(i, *state):
    return tuple(jnp.full_like(x, k) * i for k, x in enumerate(state))


def branches(order, i, *state, then=lambda *state: state):
    """Rounds in which one branch reorders the state, and the other does not read it."""

    def reorder(_, *state):
        return tuple(state[k] for k in order)

    def step(k, state):
        return jax.lax.cond(k % 3 == 0, fresh, reorder, k, *state)

    return then(*jax.lax.fori_loop(0, i, step, state))


TWO_SWAPS, ROTATION, BOTH = (1, 0, 3, 2), (1, 2, 0), (1, 2, 0, 4, 3)


@pytest.mark.parametrize(
    ("order", "sizes"),
    [
        (TWO_SWAPS, (5, 5, 5, 5)),
        (TWO_SWAPS, (24, 24, 40, 40)),
        (ROTATION, (16, 16, 16)),
        (BOTH, (24, 24, 24, 7, 7)),
    ],
)
def test_a_branch_may_return_its_operands_in_any_order(order, sizes):
    check(lambda i, *s: branches(order, i, *s), [np.int32(5), *numbered(*sizes)])


@pytest.mark.parametrize("sizes", [(24, 24, 40, 40), (40, 40, 24, 24)])
def test_values_of_different_sizes_share_bytes(sizes):
    """All state is in the arena, where a part of a large value is in the memory of a small one."""

    def function(i, x):
        state = [jnp.sin(x[:n]) for n in sizes]
        return branches(TWO_SWAPS, i, *state, then=lambda *s: jnp.stack([jnp.cumsum(v)[-1] for v in s]))

    check(function, [np.int32(5), *numbered(64)])


def test_an_inner_loop_keeps_the_state_of_the_outer_one():
    """It is read at the beginning of each inner round, so that nothing else may be there at its end."""

    def function(x):
        def inner(_, y, x):
            y = jnp.sort(jnp.sort(y + x)[::-1] * 3)
            return jnp.sort(y ^ jnp.cumsum(y)) % 1000

        def outer(_, x):
            return jax.lax.fori_loop(0, 5, lambda j, y: inner(j, y, x), x * 5)

        return jax.lax.fori_loop(0, 3, outer, x)

    check(function, [np.arange(-18, 19, dtype=np.int32)])


def test_a_loop_rotates_its_state():
    def function(n, *state):
        return jax.lax.fori_loop(0, n, lambda _, s: (s[1], s[2], s[0], s[4], s[3] + s[0][:7]), state)

    check(function, [np.int32(7), *numbered(24, 24, 24, 7, 7)])


def test_loops_begin_with_each_other_s_results():
    def function(n, a, b, c):
        a, b, c = jax.lax.fori_loop(0, n, lambda k, s: (s[1], s[0] + k, s[2]), (a, b, c))
        b, c, a = jax.lax.fori_loop(0, n, lambda k, s: (s[2], s[0], s[1] * 0.5), (c, a, b))
        return jax.lax.fori_loop(0, n, lambda k, s: (s[1], s[2], s[0]), (b, c, a))

    check(function, [np.int32(4), *numbered(16, 16, 16)])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_results_take_each_other_s_donated_memory(order):
    check(lambda *s: tuple(s[k] for k in order) + (s[0] + s[1],), numbered(16, 16, 16), donated=(0, 1, 2))


def test_one_kernel_changes_what_it_reads_for_several_results():
    check(lambda x, y, z: (y * 2 + x, x * 3 - y, z + x), numbered(33, 33, 33), donated=(0, 1, 2))


def test_a_change_of_an_array_begins_with_a_copy_that_leaves_the_rest():
    """The array, its indices and its updates are all needed later, so that the change is of a copy."""

    def function(n, x, u):
        def step(k, state):
            x, u = state
            y = jax.lax.dynamic_update_slice(x, u, (k,))
            return y.at[jnp.argsort(u)].add(u) + x, u + y[:8] + x[-8:]

        return jax.lax.fori_loop(0, n, step, (x, u))

    check(function, [np.int32(4), *numbered(40, 8)])


def test_a_copy_over_a_part_of_its_own_source_is_refused():
    """It would read what it has written: copies run forwards in vectors."""
    made = compiled(fragment_of(lambda x: (jnp.cumsum(x), jnp.sin(x)), *numbered(64)))
    kernel = next(t for t in made.thunks if isinstance(t, KernelThunk))
    (place,) = kernel.writes
    (arena,) = made.assignment.arenas
    there = Slice(arena.number, 16, place.size)
    over = Slice(arena.number, 0, place.size)
    moved = [CopyThunk("there", place, there), CopyThunk("over", there, over), CopyThunk("back", over, place)]
    position = made.thunks.index(kernel) + 1
    allocations = [*made.assignment.allocations[:-1], dataclasses.replace(arena, size=1024)]
    with pytest.raises(CompileError, match=r"copy over .*: the copy overlaps its own source"):
        check_thunks(
            made.module,
            [*made.thunks[:position], *moved, *made.thunks[position:]],
            made.assignment.at,
            allocations,
            made.assignment.results,
        )
