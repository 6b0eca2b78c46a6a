"""Attention as one kernel: what is stitched, what comes out, and what a mask hides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.workloads.direct import DirectKernel
from mpmd.compile.backends.native_cpu.attention.attention_kernel import AttentionKernel
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.options import CompileOptions, Dump
from mpmd.compile.thunks.thunk import AttentionThunk
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_functions import Floats, gradients
from tests.support.targets import runs_here

floats = Floats()

BF16 = jnp.bfloat16


def attention(x, w, heads=2, mask="causal", filler=-1e9):
    """Self-attention as users write it, before its last projection."""
    q, k, v = jnp.split(x @ w, 3, -1)
    b, t, d = q.shape
    q, k, v = (a.reshape(b, t, heads, d // heads).transpose(0, 2, 1, 3) for a in (q, k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * np.asarray(1 / np.sqrt(d // heads), x.dtype)
    row, column = jnp.arange(t)[:, None], jnp.arange(t)
    seen = {"causal": row >= column, "strict": row > column, "late": column < row + 3, "none": None}[mask]
    if seen is not None:
        scores = jnp.where(seen, scores, jnp.asarray(filler, x.dtype))
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(b, t, d)


def stitched(made):
    return [t for t in made.thunks if isinstance(t, AttentionThunk)]


def check(function, arguments, *, count, pool=None):
    """Runs natively with so many attention kernels, and compares with f32 in JAX, to the dtype's accuracy."""
    fragment = fragment_of(function, *arguments)
    made = compiled(fragment)
    assert len(stitched(made)) == count
    got = run(fragment, arguments, made, pool)
    narrow = arguments[0].dtype == BF16
    exact = [np.asarray(a, np.float32) if a.dtype == BF16 else a for a in arguments]
    want = [np.asarray(w, np.float32) for w in jax.tree.leaves(jax.jit(function)(*exact))]
    for ours, theirs in zip(got, want):
        scale = max(1e-3, float(np.max(np.abs(theirs))))
        # of the largest element: 2^-8 is an ulp of bf16, which rounding of products spreads
        bound = (0.04 if narrow else 2e-5) * scale
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0, atol=bound)
    return made


def inputs(b, t, d, dtype=np.float32):
    return [floats(b, t, d, dtype=dtype), (floats(d, 3 * d) * d**-0.5).astype(dtype)]


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize(
    ("b", "t", "heads", "width"), [(2, 6, 2, 4), (1, 37, 1, 16), (1, 131, 2, 33), (2, 64, 2, 32)]
)
def test_numbers(b, t, heads, width, mask, dtype):
    function = functools.partial(attention, heads=heads, mask=mask)
    check(function, inputs(b, t, heads * width, dtype), count=1)


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize(("b", "t", "heads", "width"), [(1, 131, 2, 33), (2, 64, 2, 32)])
def test_gradients_are_one_kernel_more(b, t, heads, width, mask, dtype):
    function = gradients(functools.partial(attention, heads=heads, mask=mask))
    check(function, inputs(b, t, heads * width, dtype), count=2)


def test_large_scores_are_computed_again_and_never_written():
    function = gradients(functools.partial(attention, heads=4))
    made = check(function, inputs(2, 512, 64), count=2)
    matrix = 2 * 4 * 512 * 512 * 4
    assert max(s.size for thunk in made.thunks for s in (*thunk.reads, *thunk.writes)) < matrix


def test_threads_share_the_work():
    pool = WorkerPool(2)
    check(attention, inputs(2, 70, 32), count=1, pool=pool)
    check(gradients(attention), inputs(3, 70, 32), count=2, pool=pool)
    pool.close()


@pytest.mark.parametrize("target", ["avx2", "avx512"])
def test_other_targets(target):
    if not runs_here(named_target(target)):
        pytest.skip(f"this machine has no {target}")
    thunks = stitched(compiled(fragment_of(gradients(attention), *inputs(1, 50, 24))))
    assert len(thunks) == 2
    for thunk in thunks:
        results = [_run_alone(thunk, t) for t in (host_target(), named_target(target))]
        for ours, theirs in zip(*results):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def _run_alone(thunk, target):
    kernel = AttentionKernel("attention", thunk.plan, target)
    rng, arrays = np.random.default_rng(1), {}
    for name, place in (*thunk.inputs.items(), *thunk.outputs.items()):
        if (place.allocation, place.offset) not in arrays:
            size = max(p.size for p in (*thunk.inputs.values(), *thunk.outputs.values()) if p == place)
            array = aligned_empty((size // 4,), np.float32)
            array[:] = rng.standard_normal(size // 4) if name in thunk.inputs else np.nan
            arrays[place.allocation, place.offset] = array
    views = {f"{s}{k}": getattr(x, s) for k, x in enumerate(thunk.plan.scores) for s in "ab"}
    views |= {f"{s}{k}": getattr(x, s) for k, x in enumerate(thunk.plan.mixtures) for s in "wc"}
    places = {**thunk.inputs, **thunk.outputs}
    given = [
        arrays[places[p].allocation, places[p].offset][(views[p].offset if p in views else 0) :]
        for p in kernel.pointers
    ]
    DirectKernel(kernel, target)(*given)
    return [arrays[p.allocation, p.offset] for p in thunk.outputs.values()]


# -- masks
def test_what_a_mask_hides_is_not_looked_at():
    """Up to whole strips of keys; 0 times NaN would be NaN."""

    def values(q, k, v):
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(_causal(jnp.einsum("bqd,bkd->bqk", q, k))), v)

    q, k, v = (floats(2, 100, 8) for _ in range(3))
    v[:, -1] = np.nan
    made = compiled(fragment_of(values, q, k, v))
    (result,) = run(fragment_of(values, q, k, v), [q, k, v], made)
    assert np.isfinite(result[:, :48]).all()
    assert np.isnan(result[:, -1]).all()


def _causal(scores, filler=-1e9):
    t = scores.shape[-1]
    return jnp.where(jnp.arange(t)[:, None] >= jnp.arange(t), scores, filler)


@pytest.mark.parametrize(
    ("mask", "filler"),
    [("causal", -3.0), ("causal", -np.inf), ("strict", -1e9), ("strict", -np.inf), ("late", 0.0)],
)
def test_a_filler_that_counts_is_counted(mask, filler):
    """Weak fillers, rows with nothing but fillers, and infinities give what they give without stitching."""
    if mask == "strict" and filler == -np.inf:
        x, w = inputs(1, 40, 8)
        fragment = fragment_of(functools.partial(attention, mask=mask, filler=filler), x, w)
        (result,) = run(fragment, [x, w], compiled(fragment))
        assert np.isnan(result[0, 0]).all(), "a row without any key has no softmax"
        assert np.isfinite(result[0, 1:]).all()
        return
    check(functools.partial(attention, mask=mask, filler=filler), inputs(1, 75, 8), count=1)
    if filler == -3.0:
        check(gradients(functools.partial(attention, mask=mask, filler=filler)), inputs(1, 75, 8), count=2)


def test_rows_with_scores_as_small_as_the_filler_are_computed_whole():
    def one(q, k, v):
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(_causal(jnp.einsum("bqd,bkd->bqk", q, k))), v)

    q, k, v = floats(1, 80, 4), np.abs(floats(1, 80, 4)), floats(1, 80, 4)
    q[:, 5] = -3e9  # far below the filler: all that this row sees lies behind the mask
    check(one, [q, k, v], count=1)


def test_a_product_of_zeros_and_masks_keeps_probabilities():
    """Probabilities that are read outside are written, zeros behind the mask included."""

    def both(q, k, v):
        p = jax.nn.softmax(_causal(jnp.einsum("bqd,bkd->bqk", q, k)))
        return jnp.einsum("bqk,bkd->bqd", p, v), p

    arguments = [floats(2, 90, 8) for _ in range(3)]
    made = check(both, arguments, count=1)
    assert stitched(made)[0].plan.triangle is not None


def scored(q, k):
    return jnp.einsum("bqd,bkd->bqk", q, k)


def placed(queries, keys, offset=0):
    """Which keys each query sees: those up to its own place and an offset."""
    return jnp.arange(keys) <= jnp.arange(queries)[:, None] + offset


def cross_inputs(queries, keys, width=8):
    return [floats(2, n, width) / 2 for n in (queries, keys, keys)]


@pytest.mark.parametrize(("queries", "keys"), [(100, 50), (64, 17), (70, 3)])
def test_queries_that_see_no_key_mix_zeros(queries, keys):
    """Of their scores none is computed, so none may be read: what is there is NaN."""

    def attend(q, k, v):
        return jnp.exp(scored(q, k)) * placed(queries, keys, keys - queries) @ v

    arguments = cross_inputs(queries, keys)
    check(attend, arguments, count=1)
    check(gradients(attend), arguments, count=2)


def test_a_maximum_with_a_floor_is_over_the_floor_too():
    """Every visible score is below the floor, which stands behind the mask alone."""

    def attend(q, k, v):
        s, mask = scored(q, k) - 50, placed(60, 60)
        top = jnp.where(mask, s, 0.0).max(-1, keepdims=True)
        e = jnp.exp(jnp.where(mask, s, -1e30) - top)
        return e / (e.sum(-1, keepdims=True) + 1e-6) @ v, top

    check(attend, cross_inputs(60, 60), count=1)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, BF16])
def test_positions_that_wrap_or_are_rounded_hide_what_they_hide(dtype):
    def attend(q, k, v):
        places = jax.lax.iota(dtype, 300)
        return jax.nn.softmax(jnp.where(places[:, None] >= places, scored(q, k), -1e30)) @ v

    check(attend, cross_inputs(300, 300), count=1)


def test_a_row_without_weight_is_nan_behind_its_mask_too():
    """0 / 0 of a row that sees nothing, and of one whose visible weights vanish."""

    def attend(q, k, v):
        e = jnp.exp(scored(q, k)) * placed(40, 40, -30)
        p = e / e.sum(-1, keepdims=True)
        return p @ v, p

    arguments = cross_inputs(40, 40)
    made = compiled(fragment_of(attend, *arguments))
    assert stitched(made)[0].plan.triangle is not None
    for result in run(fragment_of(attend, *arguments), arguments, made):
        assert np.isnan(result[:, :30]).all()
        assert np.isfinite(result[:, 30:]).all()


def test_a_row_of_nan_is_nan_behind_its_mask_too():
    def attend(q, k, v):
        p = jax.nn.softmax(jnp.where(placed(40, 40), scored(q, k), -1e9))
        return p @ v, p

    q, k, v = cross_inputs(40, 40)
    q[:, 3] = np.nan
    fragment = fragment_of(attend, q, k, v)
    for result in run(fragment, [q, k, v], compiled(fragment)):
        assert np.isnan(result[:, 3]).all()
        assert np.isfinite(np.delete(result, 3, axis=1)).all()


def test_doubles_are_products():
    """Kernels of attention add up in f32."""

    def attend(q, k, v):
        return jax.nn.softmax(scored(q, k)).astype(np.float32) @ v

    with jax.enable_x64(True):
        q, k, v = cross_inputs(9, 20)
        arguments = [q.astype(np.float64) * 100, k.astype(np.float64), v]
        fragment = fragment_of(attend, *arguments)
        made = compiled(fragment)
        (got,), want = run(fragment, arguments, made), jax.jit(attend)(*arguments)
    assert not stitched(made)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_masked_zero_times_an_infinite_value_of_its_row_is_nan():
    def attend(q, k, v, weights):
        e = jnp.where(placed(40, 40), jnp.exp(scored(q, k)), 0.0)
        p = e * weights[:, None]
        return p @ v, p

    arguments = [*cross_inputs(40, 40), np.where(np.arange(40) == 7, np.inf, 1.0).astype(np.float32)]
    fragment = fragment_of(attend, *arguments)
    mixed, weighed = run(fragment, arguments, compiled(fragment))
    assert np.isnan(weighed[:, 7, 8:]).all() and np.isposinf(weighed[:, 7, :8]).all()
    assert np.isnan(mixed[:, 7]).all() and np.isfinite(np.delete(mixed, 7, axis=1)).all()


@pytest.mark.parametrize(
    "hidden",
    [
        lambda mask, s: (mask & (s > 0), lambda seen: jnp.where(seen, s, 0.0)),
        lambda mask, s: (jnp.where(mask, s, -jnp.inf), jnp.exp),
        lambda mask, s: (jnp.where(mask, (9 * s).astype(int), -7), lambda n: (n + 7).astype(np.float32)),
    ],
    ids=["pred", "f32", "s32"],
)
def test_what_is_read_outside_is_written_behind_the_mask_in_its_type(hidden):
    def attend(q, k, v):
        kept, factor = hidden(placed(40, 40), scored(q, k))
        return factor(kept) @ v, kept

    arguments = cross_inputs(40, 40)
    fragment = fragment_of(attend, *arguments)
    made = compiled(fragment)
    assert stitched(made)[0].plan.triangle is not None
    for got, want in zip(run(fragment, arguments, made), jax.jit(attend)(*arguments)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_other_lengths_of_keys_and_biases_per_pair():
    def cross(q, k, v, bias, padding):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
        scores = jnp.where(padding[:, None, None, :], scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    padding = np.arange(45) < np.array([[45], [20]])
    arguments = [floats(2, 21, 2, 8), floats(2, 45, 2, 8), floats(2, 45, 2, 8), floats(2, 21, 45), padding]
    check(cross, arguments, count=1)


def test_heads_may_be_a_part_of_a_dim_of_the_products():
    """What the rows read tells heads apart, the products do not."""

    def attend(q, k, v, bias):
        s = scored(q, k).reshape(2, 3, 20, 30) + bias[:, None, None, :]
        return jax.nn.softmax(s + bias[:, :3, None, None]).reshape(6, 20, 30) @ v

    q, k, v = (floats(6, n, 8) for n in (20, 30, 30))
    check(attend, [q, k, v, floats(2, 30)], count=1)


def test_batches_of_a_product_in_another_order_are_no_mixture():
    def attend(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
        return jax.lax.dot_general(p, v, (((3,), (2,)), ((1, 0), (1, 0))))

    check(attend, [floats(2, 2, n, 8) for n in (20, 30, 30)], count=0)


def test_without_a_softmax():
    def linear(q, k, v):
        return jnp.einsum("bqk,bkd->bqd", jnp.where(jnp.einsum("bqd,bkd->bqk", q, k) > 0, 1.0, 0.5), v)

    check(linear, [floats(2, 30, 8) for _ in range(3)], count=1)


def test_rows_that_read_a_product_of_rows_are_a_kernel_of_their_own():
    def two_layers_backwards(x, v, w, y, h):
        s = x @ v
        n = s - s.mean(1, keepdims=True) + y
        o = (n * h) @ w
        r = n + o - (o * h).mean(1, keepdims=True)
        return n * h, o, r, y.T @ r

    sizes = [(2, 16), (16, 16), (16, 16), (2, 16), (2, 16)]
    check(two_layers_backwards, [floats(*size) for size in sizes], count=2)


# -- the switch
def test_off_computes_product_by_product():
    x, w = inputs(2, 30, 16)
    fragment = fragment_of(attention, x, w)
    made = prepare_fragment(fragment, NativeCpu(), CompileOptions(attention_stitching="off")).compiled()
    assert not stitched(made)
    (off,), (auto,) = run(fragment, [x, w], made), run(fragment, [x, w], compiled(fragment))
    np.testing.assert_allclose(off, auto, rtol=2e-5, atol=2e-5)


def test_the_switch_is_part_of_the_key():
    assert CompileOptions(attention_stitching="off").key != CompileOptions().key


def test_dumps_say_what_was_refused(tmp_path):
    """One large matrix of scores, such as a vocabulary's, stays products."""

    def head(x, table):
        return jnp.einsum("tv,vd->td", jax.nn.softmax(x @ table.T), table)

    fragment = fragment_of(head, floats(512, 256), floats(1024, 256))
    made = prepare_fragment(fragment, NativeCpu(), CompileOptions(dump=Dump(tmp_path))).compiled()
    assert not stitched(made)
    (notices,) = tmp_path.rglob("notices.txt")
    assert "one large product" in notices.read_text()


def test_bf16_is_kept_in_pairs_where_they_are_multiplied_at_once():
    made = compiled(fragment_of(attention, *inputs(2, 40, 16, BF16)))
    (thunk,) = stitched(made)
    factor = thunk.plan.mixtures[0].factor
    assert thunk.plan.rows.operands[factor].dtype == "bf16"
    kernel = AttentionKernel("attention", thunk.plan, named_target("avx2"))
    assert kernel.blocking.local_rows.operands[factor].dtype == "f32"
    assert NUMPY_DTYPE["bf16"] == BF16
