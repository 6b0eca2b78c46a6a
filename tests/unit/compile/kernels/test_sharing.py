"""A result is written over an operand only where nothing reads an element after its place was written."""

import pytest

from mpmd.compile.kernels.index import dim, value
from mpmd.compile.kernels.kernel_plan import may_share
from mpmd.compile.kernels.plan_builder import PlanBuilder

ROWS, WIDTH = 6, 8


def plan_of(kind: str):
    """A plan that reads operand 0 and writes operand 1 of as many elements."""
    b = PlanBuilder("p", (ROWS, WIDTH), row_dims=1)
    place = b.dense((0, 1))
    x, y = (b.operand(name, "f32", ROWS * WIDTH) for name in "xy")
    v = b.load(x, place)
    combine, where = "", -1
    if kind == "read at another place":
        v = b.apply("add", v, b.load(x, dim(0) * WIDTH + dim(1) * -1 + (WIDTH - 1)))
    elif kind == "written at another place":
        place = dim(0) * WIDTH + dim(1) * -1 + (WIDTH - 1)
    elif kind == "combined with what was there":
        combine = "add"
    elif kind == "written in part":
        where = b.apply("compare-lt", b.index(dim(1)), b.constant(3, "s64"))
    elif kind == "written at a computed place":
        place = value(b.load(b.operand("i", "s64", ROWS * WIDTH), place))
    elif kind == "read again in a later pass":
        total = b.reduce_row("add", v)
        b.store_dense(b.operand("z", "f32", ROWS * WIDTH), b.apply("subtract", v, total))
    elif kind == "written in two parts":
        b.store(y, dim(0) * WIDTH + dim(1), v)
        place = dim(0) * WIDTH + dim(1) * -1 + (WIDTH - 1)
    b.store(y, place, v, combine=combine, where=where)
    return b.finish()


def test_a_result_at_the_place_of_its_operand_is_written_over_it():
    assert may_share(plan_of(""), 0, 1)


@pytest.mark.parametrize(
    "kind",
    [
        "read at another place",
        "written at another place",
        "combined with what was there",
        "written in part",
        "written at a computed place",
        "read again in a later pass",
        "written in two parts",
    ],
)
def test_a_result_is_not_written_over_what_is(kind):
    assert not may_share(plan_of(kind), 0, 1)


def test_an_element_that_several_points_read_is_kept():
    """Each row reads the same element and writes to it."""
    b = PlanBuilder("again", (ROWS, WIDTH))
    x, y = (b.operand(name, "f32", WIDTH) for name in "xy")
    b.store(y, dim(1), b.apply("negate", b.load(x, dim(1))))
    assert not may_share(b.finish(), 0, 1)


@pytest.mark.parametrize("kind", ["bytes", "type"])
def test_memory_of_another_size_or_type_is_not_shared(kind):
    b = PlanBuilder("other", (WIDTH,))
    x = b.operand("x", "f32" if kind == "bytes" else "s32", WIDTH * (1 + (kind == "bytes")))
    b.store_dense(b.operand("y", "f32", WIDTH), b.convert(b.load_dense(x), "f32"))
    assert not may_share(b.finish(), 0, 1)


def test_a_result_is_not_written_over_another():
    b = PlanBuilder("two", (WIDTH,))
    x, y, z = (b.operand(name, "f32", WIDTH) for name in "xyz")
    v = b.load_dense(x)
    b.store_dense(y, b.apply("add", v, b.load_dense(y)))
    b.store_dense(z, v)
    assert not may_share(b.finish(), 1, 2)


@pytest.mark.parametrize("used", ["reduced", "stored", "finished"])
def test_a_finished_sum_is_written_over_what_only_finishes_it(used):
    """An operand that outer iterations need, too, is kept until the last of them."""
    b = PlanBuilder("finish", (ROWS, WIDTH), row_dims=1)
    old, y = b.operand("old", "f32", WIDTH), b.operand("y", "f32", WIDTH)
    x = b.load_dense(b.operand("x", "f32", ROWS * WIDTH))
    v = b.load(old, dim(1))
    total = b.reduce_column("add", b.apply("multiply", x, v) if used == "reduced" else x)
    if used == "stored":
        b.store_dense(b.operand("z", "f32", ROWS * WIDTH), b.apply("multiply", x, v))
    b.store(y, dim(1), b.apply("add", total, v))
    assert may_share(b.finish(), 0, 1) == (used == "finished")
    # kernels that finish after all iterations have read the operand by then
    assert may_share(b.finish(), 0, 1, stores_last=True)


def test_an_operand_is_kept_that_other_programs_read_when_a_sum_is_finished():
    def shares(place, *, over_rows):
        b = PlanBuilder("finish", (2, ROWS, WIDTH), batch_dims=1, row_dims=1)
        old, y = b.operand("old", "f32", WIDTH), b.operand("y", "f32", WIDTH)
        x = b.load_dense(b.operand("x", "f32", 2 * ROWS * WIDTH))
        v = b.load(old, place)
        b.store_dense(b.operand("z", "f32", 2 * ROWS * WIDTH), b.apply("multiply", x, v))
        total = b.reduce_column("add", b.reduce_row("add", x) if over_rows else x)
        b.store(y, place, b.apply("add", total, v))
        return may_share(b.finish(), 0, 1, stores_last=True)

    assert not shares(dim(2), over_rows=False)  # the other batch index
    assert not shares(dim(0), over_rows=True)  # other columns
