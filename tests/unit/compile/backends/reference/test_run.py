"""Thunks by NumPy on real buffers: what is wrong with memory shows in the numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.reference.target import Memory, Reference, ReferenceProgram, run_program
from mpmd.compile.buffers.assignment import Allocation, Slice
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.planner.collectives import CollectivePlan
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.thunk import CollectiveThunk, ConditionalThunk, CopyThunk, DeviceThunk, WhileThunk
from mpmd.errors import CompileError
from tests.support import reference_runs
from tests.support.native_fragments import fragment_of
from tests.support.poison import poison

X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 3


def chain(x, w):
    first = jnp.tanh(x @ w)
    second = jnp.tanh(first @ w)
    return (second @ w) @ first


def loop(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, c: (c[1], jnp.tanh(c[0] @ w) + x), (x, x @ w))


def made(function, donated=()):
    fragment = fragment_of(function, X, X, donated=donated)
    with poison(False):
        return fragment, prepare_fragment(fragment, Reference())


def run(fragment, program):
    return reference_runs.run_program(program, fragment, [[X, X]])[0]


@pytest.mark.parametrize("function", [chain, loop])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_fragments_compute_what_jit_does(function, donated):
    fragment, prepared = made(function, donated)
    for got, want in zip(run(fragment, prepared.program), jax.tree.leaves(function(X, X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_values_that_overlap_show():
    """All temporaries are at the start of the arena."""
    fragment, prepared = made(chain)
    arena = prepared.assignment.arenas[0].number
    slices = {
        v: Slice(arena, 0, p.size) if p.allocation == arena else p
        for v, p in prepared.assignment.slices.items()
    }
    wrong = dataclasses.replace(prepared.assignment, slices=slices)
    plans = KernelPlans()
    program = dataclasses.replace(prepared.program, thunks=Emitter(wrong, plans).program())
    (got,) = run(fragment, program)
    assert not np.allclose(got, chain(X, X), atol=1e-3)


def test_copies_in_the_wrong_order_show():
    """The state of a loop changes places: each copy is in the place that it must have."""
    fragment, prepared = made(loop)
    at = next(k for k, t in enumerate(prepared.thunks) if isinstance(t, WhileThunk))
    around = prepared.thunks[at]
    copies = [t for t in around.body if isinstance(t, CopyThunk)]
    assert copies
    first = [*copies, *(t for t in around.body if not isinstance(t, CopyThunk))]
    changed = dataclasses.replace(around, body=tuple(first))
    thunks = (*prepared.thunks[:at], changed, *prepared.thunks[at + 1 :])
    got = run(fragment, dataclasses.replace(prepared.program, thunks=thunks))
    wanted = jax.tree.leaves(loop(X, X))
    assert not all(np.allclose(g, w, atol=1e-3) for g, w in zip(got, wanted, strict=True))


def test_a_read_of_what_was_never_written_gives_nan():
    fragment, prepared = made(chain)
    got = run(fragment, dataclasses.replace(prepared.program, thunks=prepared.thunks[1:]))
    assert np.isnan(got[0]).any()


def test_a_program_comes_back_from_its_bytes():
    fragment, prepared = made(loop)
    again = Reference().code_from_bytes(prepared.program.to_bytes())
    assert isinstance(again, ReferenceProgram)
    for one, other in zip(run(fragment, again), run(fragment, prepared.program), strict=True):
        np.testing.assert_array_equal(one, other)
    for data in (b"", b"\x80\x04N."):
        with pytest.raises(ValueError, match="no program"):
            Reference().code_from_bytes(data)


def test_devices_that_wait_for_each_other_in_vain_are_an_error():
    """Each device is in another branch, with another collective."""
    plan = CollectivePlan("all-reduce", 2, ((0, 1),), (((0, 0), (1, 0)),) * 2, ())
    branches = tuple((CollectiveThunk(name, plan, ()),) for name in ("first", "second"))
    where = Slice(0, 0, 4)
    thunks = [DeviceThunk("device", where), ConditionalThunk("either", where, branches)]
    memories = [Memory([Allocation(0, "arena", 4)]) for _ in range(2)]
    with pytest.raises(CompileError, match="in different collectives: first, second"):
        run_program(thunks, memories)
    run_program([thunks[0], *branches[0]], memories)
