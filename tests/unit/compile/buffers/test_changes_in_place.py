"""Arrays that are changed by what is read of themselves, donated and not, in loops and out of them."""

import jax
import numpy as np
import pytest

from tests.support.native_fragments import check_memory, compiled, fragment_of, run

X = np.arange(84, dtype=np.float32).reshape(12, 7)
PLACES = np.array([1, 0, 3, 3, 2, 11, 20, 4, 5, 6, 7, 8], np.int32)  # one twice, one out of range

CASES = {
    "moved by one": lambda x: x.at[1:].set(x[:-1]),
    "a part over another": lambda x: x.at[2:4].set(x[5:7]),
    "a part from two others": lambda x: x.at[2:4].set(x[0:2] + x[5:7]),
    "turned over": lambda x: x.at[:].set(x[::-1]),
    "added to itself": lambda x: x.at[PLACES].add(x),
    "set from itself": lambda x: x.at[np.unique(PLACES)].set(x[:11]),
    "set from what it becomes": lambda x: x.at[PLACES].add(x * 2),
    "in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda k, y: y.at[PLACES].add(y * 0.5), x),
    "in a loop, itself": lambda x: jax.lax.fori_loop(0, 3, lambda k, y: y.at[PLACES].max(y), x),
    "shifted in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda k, y: y.at[1:].set(y[:-1]), x),
    "with another reader": lambda x: (x.at[PLACES].add(x), x.sum()),
}


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_the_array_before_the_change(case, donated):
    function = CASES[case]
    fragment = fragment_of(function, X, donated=donated)
    made = compiled(fragment, poison=True)
    check_memory(made)
    got = run(fragment, [X], made)
    for ours, theirs in zip(got, jax.tree.leaves(jax.jit(function)(X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
