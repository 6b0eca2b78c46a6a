"""StableHLO to HLO: the lowered module computes what `jax.jit` computes, and XLA reads its text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir as mlir

from mpmd.compile.hlo import fingerprint, parse_module, print_module, verify
from mpmd.compile.hlo.shape import array
from mpmd.compile.lowering import lower
from mpmd.compile.lowering.reader import parse_dense, read_program, shape_of
from mpmd.errors import CompileError
from tests.support.hlo_meaning import evaluate, evaluate_devices

pytestmark = pytest.mark.usefixtures("plain_xla")

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
KEY = jax.random.key(1)


def check(function, *arguments, rtol=2e-5, run=evaluate):
    jitted = jax.jit(function, keep_unused=True)
    module = lower(jitted.lower(*arguments).compiler_ir("stablehlo"))
    verify(module)
    assert fingerprint(parse_module(print_module(module))) == fingerprint(module)
    got = jax.tree.leaves(run(module, [np.asarray(a) for a in jax.tree.leaves(arguments)]))
    want = [np.asarray(leaf) for leaf in jax.tree.leaves(jitted(*arguments))]
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.dtype == b.dtype and a.shape == b.shape
        if b.dtype.kind in "biu":
            np.testing.assert_array_equal(a, b)
        else:
            wide = np.complex128 if b.dtype.kind == "c" else np.float64
            scale = np.max(np.abs(b.astype(wide)), initial=1.0, where=np.isfinite(b.astype(wide)))
            tolerance = rtol if b.dtype.itemsize > 2 else 2e-2
            np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol=tolerance, atol=tolerance * scale)
    return module


def scanned(x):
    return jax.lax.scan(lambda c, a: (jnp.tanh(c) + a, c.sum()), jnp.zeros(6), x)[1].sum()


def attention(x):
    q = x.reshape(1, 4, 2, 3)
    return jax.nn.dot_product_attention(q, q, q, is_causal=True)


def convolution(x):
    kernel = jnp.ones((2, 2, 3, 4)) * jnp.arange(4.0)
    numbers = ("NHWC", "HWIO", "NHWC")
    image = x.reshape(1, 2, 2, 6)
    made = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", feature_group_count=2, dimension_numbers=numbers
    )
    return (made**2).sum()


FUNCTIONS = {
    "softmax": jax.nn.softmax,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "layer norm gradient": jax.grad(lambda x: (jax.nn.standardize(x) ** 3).sum()),
    "attention": attention,
    "convolution gradient": jax.grad(convolution),
    "max pool gradient": jax.grad(
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID").sum()
    ),
    "cumulative sum": lambda x: jnp.cumsum(x, 0),
    "top k gradient": jax.grad(lambda x: (jax.lax.top_k(x, 2)[0] ** 2).sum()),
    "sort of pairs": lambda x: jax.lax.sort((x, -x), num_keys=1),
    "argmax": lambda x: jnp.argmax(x, 1),
    "scatter out of range": lambda x: x.at[jnp.array([0, 3, 7]), jnp.array([0, 1, 2])].add(5.0, mode="drop"),
    "gather with fill": lambda x: x.at[jnp.array([0, 9])].get(mode="fill", fill_value=7.0),
    "segment sum": lambda x: jax.ops.segment_sum(x, jnp.array([0, 1, 1, 0]), 3),
    "scan gradient": jax.grad(scanned),
    "loop reading from outside": lambda x: jax.lax.fori_loop(0, 5, lambda i, c: c * x + i, x),
    "nested loops": lambda x: jax.lax.fori_loop(
        0, 2, lambda i, c: jax.lax.fori_loop(0, i + 1, lambda j, d: d + x, c), x
    ),
    "switch reading from outside": lambda x: jax.lax.switch(
        1, [lambda a: a, lambda a: a + x[0, 0], lambda a: a * 2], x
    ),
    "rematerialised gradient": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()),
    "normal": lambda x: x + jax.random.normal(KEY, (4, 6)),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(KEY, 0.3, (4, 6)), x, 0),
    "truncated normal": lambda x: x + jax.random.truncated_normal(KEY, -2, 2, (4, 6)),
    "rbg": lambda x: x + jax.random.normal(jax.random.key(0, impl="rbg"), (4, 6)),
    "permutation": lambda x: jax.random.permutation(KEY, 10),
    "special functions": lambda x: (
        jax.lax.erf_inv(jnp.tanh(x)),
        jax.lax.lgamma(x),
        jnp.arccos(jnp.tanh(x)),
        jnp.sinh(x),
    ),
    "fft": lambda x: jnp.fft.fft2(x + 1j * x),
    "complex constant": lambda x: x * jnp.array([1 + 2j, 3j, 0, 0, 1, 1]),
    "narrow floats": lambda x: (
        x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16) * jnp.array([1.5, 2, 3, 1], jnp.bfloat16),
        x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
        jax.lax.reduce_precision(x, 5, 7),
    ),
    "narrow integers": lambda x: ((x * 10).astype(jnp.int8), x.astype(jnp.int4).astype(jnp.int32)),
    "integer division": lambda x: ((x * 10).astype(jnp.int32) // 3, (x * 10).astype(jnp.int32) % 3),
    "bits": lambda x: jax.lax.population_count(jax.lax.bitcast_convert_type(x, jnp.uint32)),
    "ragged dot": lambda x: jax.lax.ragged_dot(x, jnp.ones((2, 6, 3)), jnp.array([1, 3])),
    "einsum with batch": lambda x: jnp.einsum("ab,cb,db->acd", x, x, x),
    "stretched broadcast": lambda x: jnp.broadcast_to(x[:1, :], (4, 6)) + x[:, :1],
    "pad, reverse, stride": lambda x: (jnp.pad(x, 1)[::-1, ::2], jnp.roll(x, 1, 0), jnp.tril(x)),
    "dynamic slices": lambda x: jax.lax.dynamic_update_slice(
        x, jax.lax.dynamic_slice(x, (1, 5), (2, 2)), (0, 0)
    ),
    "large constant": lambda x: x + jnp.asarray(np.arange(24.0, dtype=np.float32).reshape(4, 6)),
    "dot algorithm": lambda x: jax.lax.dot_general(
        x, x, (((1,), (1,)), ((), ())), precision=jax.lax.DotAlgorithmPreset.F32_F32_F32
    ),
    "barrier": lambda x: jax.lax.optimization_barrier((x, x + 1)),
}


@pytest.mark.fast_cases(19)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_numbers_as_jit(name):
    check(FUNCTIONS[name], X)


def test_a_training_step_with_donation():
    def loss(weights, x, y):
        hidden = jax.nn.relu(x @ weights["w1"] + weights["b1"])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(hidden @ weights["w2"]) * y, -1))

    def step(weights, momentum, x, y):
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value

    rng = np.random.default_rng(1)
    weights = {
        n: rng.standard_normal(s).astype(np.float32)
        for n, s in (("w1", (6, 8)), ("b1", (8,)), ("w2", (8, 3)))
    }
    zeros = jax.tree.map(np.zeros_like, weights)
    y = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
    check(step, weights, zeros, X, y)
    source = jax.jit(step, donate_argnums=(0, 1)).lower(weights, zeros, X, y).compiler_ir("stablehlo")
    module = lower(source)
    assert sorted(a.parameter for a in module.input_output_alias) == list(range(6))
    verify(module)


def test_xla_reads_what_is_printed_and_computes_the_same(xla):
    for name in (
        "softmax",
        "sort of pairs",
        "scan gradient",
        "convolution gradient",
        "switch reading from outside",
    ):
        jitted = jax.jit(FUNCTIONS[name])
        module = lower(jitted.lower(X).compiler_ir("stablehlo"))
        results = xla.run(print_module(module), [X])
        for got, want in zip(results, jax.tree.leaves(jitted(X))):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_operations_keep_where_they_come_from():
    module = lower(jax.jit(lambda x: jnp.tanh(x)).lower(X).compiler_ir("stablehlo"))
    tanh = next(i for i in module.instructions() if i.opcode == "tanh")
    assert "tanh" in tanh.metadata and tanh.metadata.startswith('{op_name="')


def test_equal_reducers_are_one_computation():
    module = lower(
        jax.jit(lambda x: (x.sum(), x.sum(0), x.max(), x.max(1))).lower(X).compiler_ir("stablehlo")
    )
    reducers = {i.to_apply for i in module.instructions() if i.opcode == "reduce"}
    assert len(reducers) == 2


def test_collectives_per_device():
    text = """
module @m attributes {mhlo.num_partitions = 2 : i32} {
  func.func public @main(%x: tensor<2x4xf32>) -> (tensor<2x4xf32>, tensor<1x4xf32>, tensor<1x8xf32>,
  tensor<2x4xf32>) {
    %0 = "stablehlo.all_reduce"(%x) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<2x4xf32>) -> tensor<2x4xf32>
    %1 = "stablehlo.reduce_scatter"(%x) <{channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, scatter_dimension = 0 : i64,
      use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<2x4xf32>) -> tensor<1x4xf32>
    %2 = "stablehlo.all_to_all"(%x) <{channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, split_dimension = 0 : i64, concat_dimension = 1 :
      i64,
      split_count = 2 : i64}> : (tensor<2x4xf32>) -> tensor<1x8xf32>
    %3 = "stablehlo.collective_permute"(%x) <{channel_handle = #stablehlo.channel_handle<handle = 4,
      type = 1>, source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (tensor<2x4xf32>) ->
      tensor<2x4xf32>
    return %0, %1, %2, %3 : tensor<2x4xf32>, tensor<1x4xf32>, tensor<1x8xf32>, tensor<2x4xf32>
  }
}"""
    module = lower(text)
    verify(module)
    a, b = (np.arange(8, dtype=np.float32).reshape(2, 4) + 10 * d for d in range(2))
    first, second = evaluate_devices(module, [[a], [b]])
    np.testing.assert_array_equal(first[0], a + b)
    np.testing.assert_array_equal(np.concatenate([first[1], second[1]]), a + b)
    np.testing.assert_array_equal(first[2], np.concatenate([a[:1], b[:1]], 1))
    np.testing.assert_array_equal(second[2], np.concatenate([a[1:], b[1:]], 1))
    np.testing.assert_array_equal(first[3], b)


CUSTOM = """func.func public @main(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{replicated}"}
    : (tensor<2x3xf32>) -> tensor<2x3xf32>
  %1 = stablehlo.custom_call @mystery(%0) {api_version = 4 : i32,
    mhlo.backend_config = {n = 3 : i32, s = "a"}, has_side_effect = true,
    operand_layouts = [dense<[0, 1]> : tensor<2xindex>],
    result_layouts = [dense<[0, 1]> : tensor<2xindex>],
    output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [], operand_index = 0,
      operand_tuple_indices = []>]} : (tensor<2x3xf32>) -> tensor<2x3xf32>
  return %1 : tensor<2x3xf32>
}"""


def test_custom_calls_keep_layouts_aliases_and_configuration(xla):
    module = lower(CUSTOM)
    (call,) = module.entry.root.operands  # what the caller gets is row-major
    assert module.entry_shapes()[1] is array("f32", (2, 3), (1, 0))
    assert call.opcode == "custom-call" and call.operands[0].opcode == "parameter"
    assert call.shape is array("f32", (2, 3), (0, 1))
    assert call.attributes["operand_layout_constraints"] == "{f32[2,3]{0,1}}"
    assert call.attributes["api_version"] == "API_VERSION_TYPED_FFI" and call.has_side_effect
    assert call.backend_config == '{n = 3 : i32, s = "a"}'
    assert 'custom_call_target="mystery"' in xla.parse(print_module(module))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
            '  %0 = "stablehlo.unary_einsum"(%x) <{einsum_config = "a->a"}> '
            ": (tensor<2xf32>) -> tensor<2xf32>\n"
            "  return %0 : tensor<2xf32>\n}",
            r"cannot lower stablehlo.unary_einsum\(f32\[2\]\{0\}\): there is no rule for this operation",
        ),
        (
            "func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {\n  return %x : tensor<?xf32>\n}",
            r"type tensor<\?xf32> has a size that is not known",
        ),
        (
            "func.func @other(%x: tensor<f32>) -> tensor<f32> {\n  return %x : tensor<f32>\n}",
            "has no function @main",
        ),
        (
            "func.func @main(%x: tensor<2xf32>) -> tensor<1xf32> {\n"
            "  %0 = stablehlo.custom_call @Sharding(%x) : (tensor<2xf32>) -> tensor<1xf32>\n"
            "  return %0 : tensor<1xf32>\n}",
            "a marker for the partitioner changes the shape; partition the program first",
        ),
    ],
)
def test_refusals_name_the_operation(text, problem):
    with pytest.raises(CompileError, match=problem):
        lower(text)


@pytest.mark.parametrize(
    ("text", "dtype", "dims", "expected"),
    [
        ("dense<[1.5, -2.0]> : tensor<2xbf16>", "bf16", (2,), [1.5, -2.0]),
        ("dense<0x7FC0> : tensor<bf16>", "bf16", (), np.nan),
        ("dense<0xFF800000> : tensor<2xf32>", "f32", (2,), [-np.inf, -np.inf]),
        ("dense<[[1, -2], [3, 4]]> : tensor<2x2xi4>", "s4", (2, 2), [[1, -2], [3, 4]]),
        ("dense<[255, 0]> : tensor<2xui8>", "u8", (2,), [255, 0]),
        ("dense<-1> : tensor<ui64>", "u64", (), 2**64 - 1),
        ("dense<[true, false]> : tensor<2xi1>", "pred", (2,), [True, False]),
        ('dense<"0x803F0040"> : tensor<2xbf16>', "bf16", (2,), [1.0, 2.0]),
        ('dense<"0x010001"> : tensor<3xi1>', "pred", (3,), [True, False, True]),
        ('dense<"0x0503"> : tensor<10xi1>', "pred", (10,), [1, 0, 1, 0, 0, 0, 0, 0, 1, 1]),
        ('dense<"0x010E"> : tensor<2xi4>', "s4", (2,), [1, -2]),
        ("dense<(1.0,-2.0)> : tensor<2xcomplex<f32>>", "c64", (2,), [1 - 2j, 1 - 2j]),
        ("dense<> : tensor<0x3xf32>", "f32", (0, 3), np.zeros((0, 3))),
    ],
)
def test_dense_constants(text, dtype, dims, expected):
    value = parse_dense(text, array(dtype, dims))
    want = np.asarray(expected, dtype=object if dtype == "u64" else None).astype(value.dtype)
    np.testing.assert_array_equal(value.astype(np.complex128), want.astype(np.complex128))
    assert value.shape == dims


@pytest.mark.parametrize("dtype", ["f32", "i32", "i1", "bf16"])
def test_one_value_repeated_takes_no_memory(dtype):
    value = {"f32": "2.5", "bf16": "2.5", "i32": "7", "i1": "true"}[dtype]
    kind = f"tensor<40x100x{dtype}>"
    module = lower(
        f"func.func public @main() -> {kind} {{\n  %c = stablehlo.constant dense<{value}> : {kind}\n"
        f"  return %c : {kind}\n}}"
    )
    assert module.entry.root.opcode == "broadcast"
    assert [i.shape.size for i in module.entry if i.opcode == "constant"] == [1]


def test_types():
    assert shape_of("tensor<2x3xui8>") is array("u8", (2, 3))
    assert shape_of("tensor<f8E4M3FN>") is array("f8e4m3fn")
    assert shape_of("tensor<2xcomplex<f32>>") is array("c64", (2,))
    with pytest.raises(CompileError, match="type vector<2xf32> has no HLO shape"):
        shape_of("vector<2xf32>")


def test_reading_keeps_captured_values_apart():
    source = (
        jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: -x)).lower(X).compiler_ir("stablehlo")
    )
    assert isinstance(source, mlir.Module)
    body = read_program(source).functions["main"].body
    case = next(o for o in body.operations if o.name == "stablehlo.case")
    assert all(region.captured() == body.arguments for region in case.regions)


POSITIVE = X @ X.T + np.eye(4, dtype=np.float32)
LINEAR_ALGEBRA = {
    "cholesky": lambda s: (jnp.linalg.cholesky(s), jnp.linalg.cholesky(-s)),
    "solve": lambda s: jnp.linalg.solve(s, s[:, :2]),
    "qr": lambda s: jnp.linalg.qr(s[:, :3]),
    "eigh": jnp.linalg.eigvalsh,
    "svd": lambda s: jnp.linalg.svd(s, compute_uv=False),
    "slogdet": lambda s: jnp.linalg.slogdet(s[None]),
}


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_calls_of_lapack_run_on_xla_as_lowered(xla, name):
    jitted = jax.jit(LINEAR_ALGEBRA[name])
    module = lower(jitted.lower(POSITIVE).compiler_ir("stablehlo"))
    results = xla.run(print_module(module), [POSITIVE])
    for got, want in zip(results, jax.tree.leaves(jitted(POSITIVE)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
