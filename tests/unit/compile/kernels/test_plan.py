import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.compile.kernels.index import constant, delinearized, dim, linear, strides_of, value
from mpmd.compile.kernels.kernel_plan import Apply, KernelPlan, Load, Operand, ReduceNode, Store
from mpmd.compile.kernels.normalise import normalise
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.errors import CompileError


def positions(index, extents):
    """The value of an index at every point, by brute force."""

    def at(expression, point):
        total = expression.constant
        for atom, factor in expression.terms:
            if atom.kind == "dim":
                part = point[atom.number]
            else:
                inner = at(atom.inner, point)
                part = inner // atom.number if atom.kind == "div" else inner % atom.number
            total += factor * part
        return total

    return [at(index, point) for point in np.ndindex(*extents)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_quotients_and_remainders_keep_their_value(data):
    extents = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    index = constant(data.draw(st.integers(0, 5)))
    for d in range(len(extents)):
        index = index + dim(d) * data.draw(st.sampled_from([0, 1, 2, 3, 4, 6, 12]))
    first, second = (data.draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(2))
    plain = np.array(positions(index, extents))
    assert positions(index.divided(first, extents), extents) == list(plain // first)
    assert positions(index.modulo(first, extents), extents) == list(plain % first)
    both = index.divided(first, extents).modulo(second, extents)
    assert positions(both, extents) == list(plain // first % second)
    low, high = both.bounds(extents)
    assert low <= min(positions(both, extents)) and max(positions(both, extents)) <= high


def test_reshapes_simplify_where_they_can():
    extents = (4, 6)
    position = linear([dim(0), dim(1)], strides_of(extents))
    assert delinearized(position, (4, 6), extents) == (dim(0), dim(1))
    assert [str(i) for i in delinearized(position, (4, 2, 3), extents)] == ["d0", "(d1) // 3", "(d1) % 3"]
    assert str(linear([dim(0) * 2 + 1, value(3)], (10, 1))) == "d0*20 + %3 + 10"


def copy_plan(extents, index, size):
    b = PlanBuilder("copy", extents)
    b.store_dense(b.operand("y", "f32", int(np.prod(extents))), b.load(b.operand("x", "f32", size), index))
    return b.finish()


def test_normalised_plans_have_few_dims():
    dense = copy_plan((2, 3, 1, 5), linear([dim(0), dim(1), dim(3)], (15, 5, 1)), 30)
    assert normalise(dense).extents == (30,)
    # a transposed matrix, flattened: the flat dim is split, then every index is linear again
    flat = linear(delinearized(dim(0), (6, 4), (24,))[::-1], (6, 1))
    split = normalise(copy_plan((24,), flat, 24))
    assert split.extents == (6, 4)
    assert [str(n.index) for n in split.nodes if isinstance(n, Load)] == ["d0 + d1*6"]
    b = PlanBuilder("turned", (3, 8))
    b.store(b.operand("y", "f32", 24), dim(1) * 3 + dim(0), b.load_dense(b.operand("x", "f32", 24)))
    assert normalise(b.finish()).extents == (8, 3), "results are written in the order of memory"


def test_text_shows_everything():
    b = PlanBuilder("mean", (2, 4), row_dims=1)
    x = b.load_dense(b.operand("x", "f32", 8))
    total = b.reduce_row("add", x)
    b.store(
        b.operand("y", "f32", 2), dim(0), b.apply("multiply", total, b.constant(0.25, "f32")), combine="add"
    )
    assert b.finish().text() == (
        "kernel mean [ | d0:2 | d1:4]\n"
        "  operand x: f32[8]\n"
        "  result y: f32[2]\n"
        "  %0 = f32 x[d0*4 + d1]\n"
        "  %1 = f32 reduce-add %0 over row\n"
        "  %2 = f32 0.25\n"
        "  %3 = f32 multiply %1 %2\n"
        "  y[d0] add= %3\n"
    )


def test_equal_nodes_are_shared_and_unused_ones_dropped():
    b = PlanBuilder("shared", (4,))
    x = b.operand("x", "f32", 4)
    assert b.load_dense(x) == b.load_dense(x)
    assert b.constant(0.0, "f32") != b.constant(-0.0, "f32")
    b.apply("tanh", b.load_dense(x))
    b.store_dense(b.operand("y", "f32", 4), b.load_dense(x))
    assert len(b.finish().nodes) == 1


def plan_of(nodes, stores, extents=(4, 8), row_dims=1):
    operands = (Operand("x", "f32", 32), Operand("y", "f32", 32), Operand("n", "s32", 4))
    return KernelPlan("wrong", extents, 0, row_dims, operands, tuple(nodes), tuple(stores))


DENSE = linear([dim(0), dim(1)], (8, 1))
X = Load("f32", 0, DENSE)
Y = Store(1, DENSE, 0)


@pytest.mark.parametrize(
    "nodes,stores,message",
    [
        ([Apply("f32", "negate", (0,))], [Y], "uses %0, which is not before it"),
        ([Load("f32", 0, DENSE + 1)], [Y], r"reaches \[1, 32\] of x, which has 32 elements"),
        ([Load("s32", 0, DENSE)], [], "loads s32 from x, which holds f32"),
        ([X, Apply("f32", "add", (0,))], [Y], "add takes 2 operands, got 1"),
        ([X, Apply("f32", "frobnicate", (0,))], [Y], "no operation is named frobnicate"),
        ([X, Apply("f32", "and", (0, 0))], [Y], "and is not defined for f32"),
        ([X, Load("s32", 2, dim(0)), Apply("f32", "add", (0, 1))], [Y], "add of f32 and s32: convert"),
        ([X, Apply("s32", "negate", (0,))], [Y], "negate of f32 gives f32, not s32"),
        ([X, Apply("s8", "bitcast-convert", (0,))], [Y], "from f32 to s8: sizes differ"),
        ([X, ReduceNode("f32", "mean", 0, "row")], [Y], "no reduction is named mean"),
        ([X, ReduceNode("f32", "add", 0, "diagonal")], [Y], "neither row nor column"),
        ([X], [Store(2, dim(0), 0)], "stores f32 to n, which holds s32"),
        (
            [X, ReduceNode("f32", "add", 0, "column")],
            [Store(1, DENSE, 1)],
            "a store to y uses a sum over the outer dims, but its place depends on d0",
        ),
        (
            [X, ReduceNode("f32", "add", 0, "column"), Apply("pred", "compare-lt", (1, 1))],
            [Store(1, DENSE, 0, "", 2)],
            "a store to y combines a sum over the outer dims with %0, which is inside of it",
        ),
        (
            [X, ReduceNode("f32", "add", 0, "column"), Apply("f32", "add", (0, 1))],
            [Store(1, dim(1), 2)],
            "combines a sum over the outer dims with %0, which is inside of it",
        ),
        ([X], [Store(1, DENSE, 0, "mean")], "combines by 'mean', which is not a reduction"),
        ([X], [Store(1, DENSE, 0, "", 0)], "guard %0 is f32, not pred"),
    ],
)
def test_plans_that_make_no_sense_say_why(nodes, stores, message):
    with pytest.raises(CompileError, match=message):
        plan_of(nodes, stores)


def test_all_problems_are_listed():
    nodes = [Load("s32", 0, DENSE), Load("f32", 0, DENSE + 1)]
    with pytest.raises(
        CompileError, match=r"(?s)kernel wrong is not valid.*1\. %0: loads.*2\. %1: .*reaches"
    ):
        plan_of(nodes, [])
    with pytest.raises(CompileError, match="2 batch dims and 1 row dims of 2 dims"):
        KernelPlan("wrong", (2, 2), 2, 1, (), (), ())
