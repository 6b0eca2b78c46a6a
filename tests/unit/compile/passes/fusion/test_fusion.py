"""What becomes one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.thunks.thunk import KernelThunk, MatmulThunk
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_functions import Floats, attention, gradients, layer_norm

floats = Floats()


def thunks_of(function, *arguments):
    return compiled(fragment_of(function, *arguments), poison=False).thunks


@pytest.mark.parametrize(
    ("function", "arguments", "kind"),
    [
        (jax.nn.softmax, [floats(16, 64)], "row"),
        (layer_norm, [floats(4, 8, 64), floats(64), floats(64)], "row"),
        (gradients(layer_norm), [floats(4, 8, 64), floats(64), floats(64)], "mixed"),
        (lambda x: (jnp.tanh(x), jnp.tanh(x).sum(0)), [floats(64, 32)], "column"),
        (lambda p, m, v, g: (p - m / (jnp.sqrt(v) + 1e-8), 0.9 * m + g, 0.99 * v + g * g),
         [floats(64, 32)] * 4, "loop"),
    ],
    ids=["softmax", "layer norm", "layer norm gradients", "sums of what is computed", "adam"],
)  # fmt: skip
def test_is_one_kernel(function, arguments, kind):
    (thunk,) = thunks_of(function, *arguments)
    assert isinstance(thunk, KernelThunk)
    assert thunk.plan.kind == kind


def test_a_product_takes_what_follows_it():
    (thunk,) = thunks_of(
        lambda x, w, b, r: r + jax.nn.gelu(x @ w + b),
        floats(8, 16),
        floats(16, 32),
        floats(32),
        floats(8, 32),
    )
    assert isinstance(thunk, MatmulThunk)
    assert thunk.plan.epilogue is not None


def test_a_product_takes_what_only_its_epilogue_reads():
    """An outer product that is as large as the result is computed where it is read."""

    def gated(x, w, u, v):
        return jnp.tanh(x @ w) * (v[None, :] * u[:, None])

    arguments = floats(8, 16), floats(16, 32), floats(8), floats(32)
    (thunk,) = thunks_of(gated, *arguments)
    assert isinstance(thunk, MatmulThunk) and thunk.plan.epilogue is not None
    fragment = fragment_of(gated, *arguments)
    (got,) = run(fragment, list(arguments), compiled(fragment))
    np.testing.assert_allclose(got, gated(*arguments), atol=1e-5)
    factor, product = thunks_of(lambda x, w: (x * x) @ w, floats(32, 32), floats(32, 32))
    assert isinstance(factor, KernelThunk) and isinstance(product, MatmulThunk), "tiles read factors often"
    slope = lambda x, w, u: (x @ w) * ((1 + u) * (1 - u))  # noqa: E731
    (thunk,) = thunks_of(slope, *arguments[:2], floats(8, 32))
    assert isinstance(thunk, MatmulThunk), "so is a chain of what only the epilogue reads"
    dear, product = thunks_of(lambda x, w, u: (x @ w) * jnp.tanh(u), *arguments[:2], floats(8, 32))
    assert isinstance(dear, KernelThunk) and isinstance(product, MatmulThunk)


def test_a_product_stays_one_where_others_read_its_factor_too():
    """A factor whose elements lie apart is moved once for both products, not summed element by element."""

    def both(x, g, w):
        return jnp.einsum("btd,bhtk->dhk", x, g), jnp.einsum("bhtk,dhk->btd", g, w)

    thunks = thunks_of(both, floats(2, 16, 32), floats(2, 4, 16, 8), floats(32, 4, 8))
    assert sum(isinstance(t, MatmulThunk) for t in thunks) == 2
    assert all(t.plan.kind == "loop" for t in thunks if isinstance(t, KernelThunk))


def test_attention_moves_no_heads():
    """Heads are read where they lie in the projection, and written where the next product reads them."""
    thunks = thunks_of(attention, floats(2, 16, 32), floats(32, 96), floats(32, 32))
    assert [type(t).__name__ for t in thunks] == ["MatmulThunk", "AttentionThunk", "MatmulThunk"]


def test_backward_passes_read_few_arrays_of_the_forward_epilogue():
    """Of gelu's inner values only what is expensive is kept."""

    def mlp(x, w, v):
        return jax.nn.gelu(x @ w) @ v

    thunks = thunks_of(gradients(mlp), floats(64, 32), floats(32, 64), floats(64, 32))
    first = next(t for t in thunks if isinstance(t, MatmulThunk))
    assert len(first.writes) <= 3


def test_an_update_in_place_walks_over_the_update_alone():
    def insert(x, row):
        return jax.lax.dynamic_update_slice(x, row * 2, (5, 0))

    thunks = compiled(fragment_of(insert, floats(64, 8), floats(1, 8), donated=(0,))).thunks
    (thunk,) = thunks
    assert thunk.plan.size == 8


def test_loops_carry_their_state_in_place():
    def grow(x):
        def body(carry, row):
            return carry + row, carry

        return jax.lax.scan(body, x[0], x)

    (loop,) = [t for t in thunks_of(grow, floats(9, 33)) if type(t).__name__ == "WhileThunk"]
    copies = [t for t in loop.body if type(t).__name__ == "CopyThunk"]
    assert all(c.source.size < 33 * 4 * 9 for c in copies), "the stacked results are not copied"


def test_equal_kernels_share_code():
    def step(*arrays):
        return [jnp.tanh(a) for a in arrays]

    made = compiled(fragment_of(step, *[floats(33)] * 12), poison=False)
    names = {r.kernel.name for r in made.program.threaded.steps}
    assert len(made.thunks) == 12
    assert len(names) == 1


def test_scalars_and_constants_need_no_kernel():
    (_,) = thunks_of(lambda x: x * 2 + np.float32(1), floats(8))
