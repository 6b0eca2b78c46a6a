"""Attention as Triton kernels: what they compute, by Triton's interpreter, and when they go over all keys."""

import importlib.util
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.machine.disassembly import disassembler_problem
from mpmd.compile.backends.native_gpu.machine.execution import RATES
from mpmd.compile.backends.native_gpu.machine.times import kernel_model
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.attention import argument_names, attention_kernels, first_scratch
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.evaluate_products import evaluate_attention
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.thunks.thunk import AttentionThunk
from tests.support.native_fragments import fragment_of

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)


def causal(scores):
    rows = jnp.arange(scores.shape[-2])[:, None]
    return jnp.where(rows >= jnp.arange(scores.shape[-1]), scores, -1e9)


def padded(scores):
    return jnp.where(jnp.arange(scores.shape[-1]) < 21, scores, -jnp.inf)


def attend(q, k, v, masked=causal, bias=None, kept=None):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = masked(scores if bias is None else scores + bias)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    weights = weights if kept is None else jnp.where(kept, weights / 0.9, 0).astype(q.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def plans_of(function, *arguments):
    """The attention plans of a function and its gradients by its first three arguments."""

    def both(*given):
        value, pull = jax.vjp(lambda *a: function(*a, *given[3:]), *given[:3])
        return value, pull(jnp.flip(value, 0))  # the cotangent depends on the forward pass

    fragment = fragment_of(both, *arguments)
    thunks = prepare_fragment(fragment, GpuTarget()).thunks
    return [t.plan for t in thunks if isinstance(t, AttentionThunk)]


def arrays_of(plan, seed=0, scale=1.0):
    """Arrays for every argument, one for the views of one array; results begin as NaN."""
    rng, arrays, known = np.random.default_rng(seed), {}, {}
    for name, view in plan.views.items():
        kind, k = name[0], int(name[1:])
        if kind in "ab":
            sides = (plan.queries, plan.scores[k].depth)
            sides = sides if kind == "a" else (plan.scores[k].depth, plan.keys)
        else:
            over_keys, width = plan.mixtures[k].over == "keys", plan.mixtures[k].width
            sides = (plan.keys if over_keys == (kind == "w") else plan.queries, width)
        steps = zip((*plan.batch, *sides), (*view.batch, view.row, view.column))
        size = view.offset + sum((n - 1) * step for n, step in steps) + 1
        values = np.full(size, np.nan) if kind == "c" else rng.standard_normal(size) * scale
        arrays[name] = values.astype(NUMPY_DTYPE[view.dtype])
        if kind != "c":
            before = known.setdefault(plan.array_of(name), arrays[name])
            assert len(before) >= size
            arrays[name] = before
    for k in plan.outer:
        operand = plan.rows.operands[k]
        values = (
            rng.standard_normal(operand.size) > 0 if operand.dtype == "pred" else rng.random(operand.size)
        )
        arrays[f"p{k}"] = np.asarray(values).astype(NUMPY_DTYPE[operand.dtype])
    return arrays


def check(plan, **how):
    """Kernels and evaluator agree on every result."""
    from tests.support.launch_memory import Extent
    from tests.support.triton_interpreter import run_kernel

    found, wanted = arrays_of(plan, **how), arrays_of(plan, **how)
    evaluate_attention(plan, wanted)
    made = attention_kernels(plan)
    scratch, ends = np.full(made.scratch_bytes, 0xFF, np.uint8), [*made.scratch[1:], made.scratch_bytes]
    places = {n: found[name] for n, name in argument_names(plan).items() if name in found}
    numbered = enumerate(zip(made.scratch, ends), first_scratch(plan))
    places |= {n: scratch[at:end] for n, (at, end) in numbered}
    for kernel in made.kernels:
        run_kernel(kernel, [Extent.of(places[k]) for k in kernel.operands])
    results = {f"c{k}" for k in range(len(plan.mixtures))} | {f"p{k}" for k in plan.rows.results}
    for name in results & found.keys():
        a, b = found[name].astype(np.float64), wanted[name].astype(np.float64)
        assert np.array_equal(np.isnan(a), np.isnan(b)), name
        loose = 2e-2 if found[name].dtype.itemsize == 2 else 2e-5
        scale = np.nanmax(np.abs(b), initial=1)
        np.testing.assert_allclose(a, b, rtol=loose, atol=loose * scale, err_msg=name)


def heads(width, dtype=np.float32, queries=40, keys=40, batch=(2, 2)):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((*batch, n, width)).astype(dtype) for n in (queries, keys, keys)]


def grouped_heads(q, k, v):
    """As users write it: positions before heads, sums in f32, groups of one query head."""
    return jax.nn.dot_product_attention(q, k, v)


def test_attention_of_jax_is_found():
    """Forward and backward, each one kernel of products and rows; results of f32 sums are stored in bf16."""
    arguments = [jnp.asarray(a, jnp.bfloat16) for a in heads(16, batch=(2,))]
    arguments = [jnp.stack([a, 2 * a], 2) for a in arguments]
    forward, backward = plans_of(grouped_heads, *arguments)
    assert [len(p.scores) for p in (forward, backward)] == [1, 2]
    assert [len(p.mixtures) for p in (forward, backward)] == [1, 3]
    assert {m.c.dtype for p in (forward, backward) for m in p.mixtures} == {"bf16"}
    assert {p.rows.operands[m.factor].dtype for p in (forward, backward) for m in p.mixtures} == {"bf16"}


def test_one_iteration_serves_each_kernel():
    """Maxima, totals and row terms of the backward pass are in memory; each factor is loaded once."""
    forward, backward = plans_of(attend, *heads(16))
    (one,) = attention_kernels(forward).kernels
    queries, keys = attention_kernels(backward).kernels
    loops = [kernel.source.count("for c0 in") for kernel in (one, queries, keys)]
    # keys that all queries of a block see, the others, and those after a causal mask, which rows without
    # small scores do not enter; of 40 queries the last 8 are no whole tile
    assert loops == [3, 2, 3]
    assert backward.rows.kind == "loop"
    bodies = [source.split("for c0 in")[1].count("tl.load") for source in (queries.source, keys.source)]
    assert bodies == [2, 5]  # values and keys; queries, gradients, and three numbers of each row
    assert one.flops == pytest.approx(2 * forward.share * 4 * 40 * 40 * 32)


@needs_triton
def test_attention_of_jax_computes_as_its_plan():
    arguments = [jnp.asarray(a, jnp.bfloat16) for a in heads(16, batch=(2,))]
    for plan in plans_of(grouped_heads, *(jnp.stack([a, 2 * a], 2) for a in arguments)):
        check(plan)


@needs_triton
@pytest.mark.parametrize("width", [16, 80])
def test_causal(width):
    for plan in plans_of(attend, *heads(width)):
        assert plan.triangle is not None
        check(plan)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_widths(width):
    for plan in plans_of(attend, *heads(width, queries=70, keys=70)):
        check(plan)


@needs_triton
def test_rows_whose_own_scores_are_as_small_as_the_filler():
    """The first queries see large negative scores only: keys behind the mask count as much."""
    for plan in plans_of(attend, *heads(16, queries=80, keys=80)):
        check(plan, scale=2e5)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["A100", "H100", "B200"])
@pytest.mark.parametrize("depth", [64, 80, 96, 128, 256])
def test_heads_of_every_width_fit_into_a_program(depth, gpu):
    shape = jax.ShapeDtypeStruct((4, 8, 1024, depth), jnp.bfloat16)
    target = GpuTarget(GPUS[gpu])

    def both(q, k, v, g):
        value, pull = jax.vjp(attend, q, k, v)
        return value, pull(g)

    def apart(q, k, v):
        value, pull = jax.vjp(attend, q, k, v)
        return value, pull(jnp.flip(value, 0))

    for function, arguments in ((attend, [shape] * 3), (both, [shape] * 4), (apart, [shape] * 3)):
        kernels = prepare_fragment(fragment_of(function, *arguments), target).program.kernels
        found = {name: kernel for name, kernel in kernels.items() if "attention" in name}
        assert found
        for cubin in target.compiler.compile(found, target.gpu.capability).values():
            assert cubin.shared_bytes <= target.gpu.shared_bytes
            assert cubin.stack_bytes <= 16, cubin.name


@pytest.mark.skipif(bool(disassembler_problem()), reason=disassembler_problem())
@pytest.mark.parametrize("depth", [64, 128])
def test_gradients_have_room_for_two_programs(depth):
    """By their machine code; four warps multiply 64 rows, and more would compute them again."""
    shape = jax.ShapeDtypeStruct((4, 8, 1024, depth), jnp.bfloat16)
    target = GpuTarget(GPUS["H100"])

    def both(q, k, v):
        value, pull = jax.vjp(attend, q, k, v)
        return value, pull(jnp.flip(value, 0))

    kernels = prepare_fragment(fragment_of(both, *[shape] * 3), target).program.kernels
    gradients = {name: kernel for name, kernel in kernels.items() if len(kernel.operands) > 6}
    gradients = {name: kernel for name, kernel in gradients.items() if kernel.kind == "attention"}
    assert len(gradients) == 2
    for name, cubin in target.compiler.compile(gradients, 90).items():
        found = kernel_model(gradients[name], cubin, RATES[90])
        assert found.together >= 2 and found.warps == 4 and not found.code.stack
        assert found.program.flops * kernels[name].grid < 1.2 * kernels[name].flops


def unseen(kind):
    """Masks with -inf as the filler, and their positions over 96 queries and keys in blocks of 32."""
    q, k = jnp.arange(96)[:, None], jnp.arange(96)
    return {
        "left padding": k >= 70,
        "a window": abs(q - k - 30) < 9,
        "a causal window": (q >= k) & (q - k < 9),
        "causal": q >= k,
        "nothing": (k < 60) & (q > 3),
    }[kind]


def guarded(q, k, v, seen):
    """A softmax that is 0 where a row sees nothing; all scores are far below 0."""
    scores = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", q, k) - 150, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    e = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bhkd->bhqd", e / jnp.where(total == 0, 1, total), v)


@needs_triton
@pytest.mark.parametrize("kind", ["left padding", "a window", "a causal window", "causal", "nothing"])
def test_rows_that_see_nothing_of_their_first_keys(kind):
    """Fillers of -inf; where a row sees nothing at all it is NaN, or 0 if that is asked for."""

    def masked(scores):
        return jnp.where(unseen(kind), scores, -jnp.inf)

    arguments = heads(16, queries=96, keys=96, batch=(1, 1))
    plans = plans_of(lambda q, k, v: attend(q, k, v, masked), *arguments)
    plans += plans_of(lambda q, k, v: guarded(q, k, v, unseen(kind)), *arguments)[:1]
    assert len(plans) == 3
    for plan in plans:
        check(plan)


def bounds(source, block):
    """The bounds of a block's loops: numbers of tiles, and the end."""
    found, names = {}, types.SimpleNamespace(maximum=max, minimum=min)
    for name, text in re.findall(r"^    (whole|end|first) = (.*)$", source, re.MULTILINE):
        if "tl.where" not in text:  # a flag of a row that breaks a condition
            found[name] = eval(text, {"tl": names, "block": block})
    return found


@pytest.mark.parametrize("offset", [0, 5, -5, 39, -38])
@pytest.mark.parametrize(("queries", "keys"), [(96, 96), (70, 100), (100, 70)])
def test_blocks_without_a_mask_are_seen_by_all_queries(offset, queries, keys):
    """As many as there are of keys, and of queries; others have the mask, and those after it are left out."""
    seen, outer, inner = np.arange(queries)[:, None] + offset >= np.arange(keys), 32, 32

    def masked(scores):
        return jnp.where(jnp.arange(queries)[:, None] + offset >= jnp.arange(keys), scores, -1e9)

    arguments = heads(16, queries=queries, keys=keys, batch=(1, 1))
    forward, backward = plans_of(lambda q, k, v: attend(q, k, v, masked), *arguments)
    (first,), (second, last) = (attention_kernels(plan).kernels for plan in (forward, backward))
    for kernel, over_keys in ((first, True), (second, True), (last, False)):
        assert f"block * {outer} + tl.arange(0, {outer})" in kernel.source
        assert f"c0 + tl.arange(0, {inner})" in kernel.source
        bodies = kernel.source.split("for c0 in")[1:3]
        assert [" >= " in body for body in bodies] == ([False, True] if over_keys else [True, False])
        matrix = seen if over_keys else seen.T
        for block in range(-(-len(matrix) // outer)):
            rows, at = matrix[block * outer : (block + 1) * outer], bounds(kernel.source, block)
            tiles = [rows[:, n : n + inner] for n in range(0, matrix.shape[1], inner)]
            full = [tile.all() and tile.shape[1] == inner for tile in tiles]
            some = [tile.any() for tile in tiles]
            if over_keys:
                assert all(full[: at["whole"]]) and not any(some[-(-at["end"] // inner) :])
                assert at["whole"] == len(full) or not full[at["whole"]] or len(rows) < outer
            else:
                assert not any(some[: at["first"]])
                assert all(full[at["whole"] : matrix.shape[1] // inner])


def test_weights_are_divided_once_for_each_row():
    """By totals of a softmax, whose reciprocals are normal numbers; not by others, which may be denormal."""

    def halved(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True) / 2)
        return jnp.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), v)

    arguments = heads(16, queries=96, keys=96, batch=(1, 1))
    whole, half = (
        [
            kernel.source
            for plan in plans_of(function, *arguments)
            for kernel in attention_kernels(plan).kernels
        ]
        for function in (attend, halved)
    )
    assert sum("div_rn" in source for source in whole) >= 2
    assert all(map(_divides_rows, whole))
    assert not all(map(_divides_rows, half))


def _divides_rows(source):
    """Whether every division is of a number 1 by a value of a row."""
    ones = set(re.findall(r"(v\d+) = tl.full\(\[1, 1\], 1.0, tl.float32\)", source))
    return set(re.findall(r"div_rn\((v\d+),", source)) <= ones


def test_fillers_are_numbers_of_the_kernel_s_language():
    """-inf is printed as a call, not as a name."""
    for plan in plans_of(lambda q, k, v: attend(q, k, v, lambda s: jnp.where(unseen("causal"), s, -jnp.inf)),
                         *heads(16, queries=96, keys=96, batch=(1, 1))):  # fmt: skip
        assert plan.rows and "float('-inf') - v" in attention_kernels(plan).kernels[0].source


def test_what_falls_as_the_maximum_grows_is_not_subtracted_before_the_last_key():
    """exp(x - (3 - max)) cannot be summed online: terms lost beside a small maximum count at the end."""

    def mirrored(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        e = jnp.exp(scores - (3 - scores.max(-1, keepdims=True)))
        return jnp.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdims=True), v)

    def clipped(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        e = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), 0))
        return jnp.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdims=True), v)

    for function, online in ((mirrored, False), (clipped, True), (lambda q, k, v: attend(q, k, v), True)):
        for plan in plans_of(function, *heads(16, queries=96, keys=96, batch=(1, 1)))[:1]:
            assert ("fade" in attention_kernels(plan).kernels[0].source) == online


@pytest.mark.parametrize(("value", "online"), [(-200.0, False), (-1e30, True), (-np.inf, True), (None, True)])
def test_exponentials_of_online_sums_are_at_most_1(value, online):
    """A filler above the maximum's gives infinity where a row has seen nothing: it is not summed online."""

    def function(q, k, v):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        seen = unseen("left padding")
        top = jnp.where(seen, scores, -1e30).max(-1, keepdims=True)
        if value is None:
            e = jnp.where(seen, jnp.exp(scores - top), 0)
        else:
            e = jnp.exp(jnp.where(seen, scores, value) - top)
        return jnp.einsum("bhqk,bhkd->bhqd", e / (1 + e.sum(-1, keepdims=True)), v)

    plans = plans_of(function, *heads(16, queries=96, keys=96, batch=(1, 1)))
    assert ("fade" in attention_kernels(plans[0]).kernels[0].source) == online


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_padding_bias_dropout_and_cross_attention(dtype):
    rng = np.random.default_rng(3)
    bias = rng.standard_normal((2, 2, 40, 40)).astype(dtype)
    kept = rng.random((2, 2, 40, 40)) > 0.1
    many = [
        plans_of(lambda q, k, v: attend(q, k, v, padded), *heads(32, dtype)),
        plans_of(lambda q, k, v, b: attend(q, k, v, bias=b), *heads(32, dtype), bias),
        plans_of(lambda q, k, v, m: attend(q, k, v, kept=m), *heads(32, dtype), kept),
        plans_of(lambda q, k, v: attend(q, k, v, lambda s: s), *heads(32, dtype, queries=23, keys=57)),
    ]
    for plans in many:
        assert plans
        for plan in plans:
            check(plan)
