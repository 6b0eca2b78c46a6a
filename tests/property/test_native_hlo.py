"""Native code of random HLO programs against the evaluator, of special values and shapes against XLA, too."""

import jax
import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.passes.simplify.redundancy import ConstantFolding
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import quick_code, run_module
from tests.support.random_hlo import NATIVE_FAMILIES, differences, random_case
from tests.support.random_hlo.draft import Case
from tests.support.random_hlo.rewritable import rewritable
from tests.support.random_hlo.sweeping import sweep
from tests.support.random_hlo.wide import wide

FAST = 2
"""Cases of each family in every test run."""
SLOW = 80
"""The same for the slow test."""


def run(case: Case) -> list[np.ndarray]:
    return run_module(case.module, case.arguments)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_native_code_computes_what_the_evaluator_does(family):
    sweep((random_case(family, seed) for seed in range(FAST)), run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_native_code_computes_what_the_evaluator_does_on_many(family):
    sweep((random_case(family, seed) for seed in range(1000, 1000 + SLOW)), run)


# -- all dimensions of one size: no shape tells a transposed read from a right one


def test_programs_of_squares_are_exact():
    with quick_code():
        sweep((random_case("squares", seed) for seed in range(10, 60)), run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_programs_of_squares_are_exact():
    with quick_code():
        sweep((random_case("squares", seed) for seed in range(2000, 6000)), run)


# -- whole programs: fusions of many instructions, loops with state, arrays beyond vectors


@pytest.mark.parametrize("seed", range(4))
def test_programs_of_all_types_are_exact(seed):
    sweep([wide(seed, 25)], run)


def test_programs_full_of_what_passes_remove():
    sweep((rewritable(seed) for seed in range(3)), run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_programs_of_all_types_are_exact(first):
    sweep((wide(seed) for seed in range(first, first + 20)), run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_many_programs_full_of_what_passes_remove(first):
    sweep((rewritable(seed) for seed in range(first, first + 50)), run)


# -- special values and shapes ------------------------------------------------------------------------

INF, NAN = np.inf, np.nan
S32 = np.array([-(2**31), 2**31 - 1, -1, 0, 1, 7], np.int32)
S8 = np.array([-128, 127, -1, 0, 1, 100], np.int8)
F32 = np.array([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 3.4e38, -3.4e38, 1.2e-38, 2.5, -2.5, 1e-30], np.float32)


def pairs(values):
    """Every value with every other."""
    a, b = np.meshgrid(values, values)
    return [a.ravel().copy(), b.ravel().copy()]


def binary(opcode, dtype, values, result=None, more=""):
    n = len(values) ** 2
    text = f"a = {dtype}[{n}] parameter(0)\n b = {dtype}[{n}] parameter(1)\n"
    return text + f"ROOT r = {result or dtype}[{n}] {opcode}(a, b){more}", pairs(values)


def unary(opcode, dtype, values, result=None):
    n = len(values)
    return f"a = {dtype}[{n}] parameter(0)\n ROOT r = {result or dtype}[{n}] {opcode}(a)", [values]


FUNCTION_ARGUMENTS = np.concatenate(
    [np.array([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-20, 88.9, -89.1, 1e30, 1.0000001, 0.9999999]),
     np.linspace(-3, 3, 61), np.geomspace(1e-6, 1e6, 40)]
)  # fmt: skip

SUM = "sum { x = f32[] parameter(0)\n y = f32[] parameter(1)\n ROOT s = f32[] add(x, y) }\n"
SPECIAL = {
    **{
        f"{opcode} of {dtype} wraps": binary(opcode, dtype, values)
        for dtype, values in (("s32", S32), ("s8", S8))
        for opcode in ("add", "subtract", "multiply", "divide", "remainder", "maximum", "minimum")
    },
    **{
        f"{opcode} by any distance": binary(opcode, "s32", np.array([-5, -1, 0, 3, 31, 32, 40], np.int32))
        for opcode in ("shift-left", "shift-right-arithmetic", "shift-right-logical")
    },
    "negate of the smallest": unary("negate", "s32", S32),
    "abs of the smallest": unary("abs", "s8", S8),
    **{
        f"{opcode} of special floats": binary(opcode, "f32", F32)
        for opcode in ("add", "multiply", "divide", "maximum", "minimum", "power", "remainder", "atan2")
    },
    **{
        f"{opcode} of special floats": unary(opcode, "f32", F32)
        for opcode in ("exponential", "log", "tanh", "sqrt", "rsqrt", "floor", "sign", "cosine", "logistic")
    },
    **{
        f"compare {way}": binary("compare", "f32", F32, "pred", f", direction={way}")
        for way in ("EQ", "NE", "LT", "GE")
    },
    "is-finite": unary("is-finite", "f32", F32, "pred"),
    "floats become s32": unary("convert", "f32", F32, "s32"),
    "floats become u8": unary("convert", "f32", F32, "u8"),
    "floats become bf16": unary("convert", "f32", F32, "bf16"),
    "s32 becomes s8": unary("convert", "s32", S32, "s8"),
    "sum of nothing": (
        "a = f32[0,3] parameter(0)\n z = f32[] constant(2)\n"
        "ROOT r = f32[3] reduce(a, z), dimensions={0}, to_apply=sum",
        [np.zeros((0, 3), np.float32)],
    ),
    "product over nothing": (
        "a = f32[2,0] parameter(0)\n b = f32[0,3] parameter(1)\n"
        "ROOT r = f32[2,3] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        [np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)],
    ),
    "empty beside full": (
        "a = f32[0,3] parameter(0)\n b = f32[2,3] parameter(1)\n"
        "ROOT r = f32[2,3] concatenate(a, b), dimensions={0}",
        [np.zeros((0, 3), np.float32), np.ones((2, 3), np.float32)],
    ),
    "dims of size one": (
        "a = f32[1,5,1] parameter(0)\n b = f32[1,1] parameter(1)\n t = f32[5,1,1] transpose(a), "
        "dimensions={1,2,0}\n r1 = f32[5] reshape(t)\n b0 = f32[] reshape(b)\n"
        "w = f32[5] broadcast(b0), dimensions={}\n ROOT r = f32[5] multiply(r1, w)",
        [np.arange(5, dtype=np.float32).reshape(1, 5, 1), np.full((1, 1), 3, np.float32)],
    ),
    "slices out of range": (
        "a = f32[6] parameter(0)\n i = s32[] parameter(1)\n"
        "ROOT r = f32[4] dynamic-slice(a, i), dynamic_slice_sizes={4}",
        [np.arange(6, dtype=np.float32), np.asarray(2**31 - 1, np.int32)],
    ),
    "a large array": (
        "a = f32[3000,1400] parameter(0)\n z = f32[] constant(0)\n"
        "ROOT r = f32[3000] reduce(a, z), dimensions={1}, to_apply=sum",
        [np.resize(np.arange(7, dtype=np.float32), (3000, 1400))],
    ),
    "a long row": (
        "a = s32[4194305] parameter(0)\n i = s32[4194305] iota(), iota_dimension=0\n"
        "ROOT r = s32[4194305] add(a, i)",
        [np.full(4194305, 2**31 - 2, np.int32)],
    ),
}


@pytest.mark.fast_cases(26)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_and_shapes(name, xla):
    body, arguments = SPECIAL[name]
    text = f"HloModule special\n{SUM if 'to_apply=sum' in body else ''}ENTRY main {{\n {body}\n}}"
    module = parse_module(text)
    exact = not any(
        word in name for word in ("power", "exponential", "log", "tanh", "cosine", "atan2", "rsqrt")
    )
    case = Case(name, module, arguments, terms=1, exact=exact)
    want = jax.tree.leaves(evaluate(module, arguments))
    for got in (run_module(module, arguments), xla.run(text, arguments)):
        assert not differences(got, want, case)


@pytest.mark.parametrize("opcode", ["sinh", "cosh", "asinh", "acosh", "atanh", "asin", "acos"])
@pytest.mark.parametrize("dtype,kind", [("f32", np.float32), ("f64", np.float64)])
def test_functions_that_xla_does_not_have(opcode, dtype, kind):
    """Where their arguments are special, too; XLA leaves them to JAX."""
    body, arguments = unary(opcode, dtype, FUNCTION_ARGUMENTS.astype(kind))
    module = parse_module(f"HloModule f\nENTRY main {{\n {body}\n}}")
    (got,), want = run_module(module, arguments), evaluate(module, arguments)
    assert not differences([got], [want], Case(opcode, module, arguments, terms=1, exact=False))
    zero = want == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


def test_native_code_computes_with_denormals_where_its_thread_does():
    """Threads of XLA flush them; that is their float mode, not the code's."""
    tiny = np.array([1e-40, -1e-40, 1e-45, 0.0], np.float32)
    body, arguments = binary("add", "f32", tiny)
    module = parse_module(f"HloModule d\nENTRY main {{\n {body}\n}}")
    (got,) = run_module(module, arguments)
    np.testing.assert_array_equal(got, arguments[0] + arguments[1])


def test_folding_keeps_denormals():
    """A folded constant is what exact arithmetic gives, whatever the float mode of this thread."""
    text = "HloModule d\nENTRY main { a = f32[2] constant({1e-40, 2e-39})\n ROOT r = f32[2] add(a, a) }"
    module = parse_module(text)
    assert ConstantFolding().run(module)
    np.testing.assert_array_equal(module.entry.root.literal, np.array([1e-40, 2e-39], np.float32) * 2)
    assert module.entry.root.literal.all()
