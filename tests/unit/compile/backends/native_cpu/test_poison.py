"""Memory that was never written is NaN in tests: mistakes of the past are noticed wherever they happen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.attention.attention_rows import Reach
from mpmd.compile.backends.native_cpu.handler import compile_with_handler
from mpmd.compile.backends.native_cpu.steps import PlanCode, native_program
from mpmd.compile.kernels.planner import sorting
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.thunks.thunk import AttentionThunk
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.poison import check_returned, is_poison


def ran(function, *arguments):
    fragment = fragment_of(function, *arguments)
    return run(fragment, list(arguments), compiled(fragment))


def test_rows_that_read_sums_which_are_not_computed_are_noticed(monkeypatch):
    """Each row looked at one strip of keys at least, also where no score of it was computed."""

    def one_strip(self, rows):
        return self.f.round_up(self.f.imax(self.seen(rows), 1), self.blocking.scores[0].width)

    def attend(q, k, v):
        mask = jnp.arange(30) <= jnp.arange(70)[:, None] - 40
        return jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k)) * mask @ v

    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal((2, n, 8)).astype(np.float32) for n in (70, 30, 30)]
    assert any(isinstance(t, AttentionThunk) for t in compiled(fragment_of(attend, *arguments)).thunks)
    assert np.isfinite(ran(attend, *arguments)[0]).all()
    monkeypatch.setattr(Reach, "end", one_strip)
    with pytest.raises(AssertionError, match="result 0 holds what was never written"):
        ran(attend, *arguments)


def test_a_comparator_that_contradicts_itself_is_noticed(monkeypatch):
    """Places are counts: where a NaN was compared as it is, two elements had one, and another had none."""

    @dataclasses.dataclass
    class Trusted:
        build: object
        first: object
        second: object
        answer: int

    x = np.array([-1.0, np.nan, 3.0, 2.0], np.float32)
    values, places = ran(lambda x: jax.lax.approx_max_k(x, 2), x)
    np.testing.assert_array_equal(values, [np.nan, 3.0])
    np.testing.assert_array_equal(places, [1, 2])
    monkeypatch.setattr(sorting, "Comparator", Trusted)
    with pytest.raises(AssertionError, match="result 0 holds what was never written"):
        ran(lambda x: jax.lax.approx_max_k(x, 2), x)


def test_a_result_that_is_written_in_part_is_noticed():
    x = np.arange(64, dtype=np.float32)
    fragment = fragment_of(jnp.sin, x)
    made = compiled(fragment)
    (kernel,) = [t for t in made.thunks if not is_poison(t)]
    short = dataclasses.replace(kernel, plan=dataclasses.replace(kernel.plan, extents=(63,)))
    thunks = [short if t is kernel else t for t in made.thunks]
    native = native_program("short", thunks, made.assignment, PlanCode(host_target()))
    code = compile_with_handler(native.threaded, host_target(), arguments=1, results=1, arena=True)
    with pytest.raises(AssertionError, match="result 0 holds what was never written"):
        run(fragment, [x], dataclasses.replace(made, program=native, code=code))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float64, np.complex64])
def test_only_poison_is_taken_for_poison(dtype):
    """Other NaN are numbers as others are, and an argument may hold any bits."""
    poison = np.full(8, 0xFF, np.uint8).view(dtype)
    check_returned([np.full(3, np.nan, dtype), np.zeros(2, dtype), np.full(3, -1)], [])
    check_returned([poison], [poison])
    with pytest.raises(AssertionError, match="result 1 holds what was never written"):
        check_returned([np.zeros(1, dtype), poison], [np.zeros(1, dtype)])
