"""Shapes and layouts: interning, text, sizes."""

import pickle
import sys
import threading

import numpy as np
import pytest

from mpmd.compile.hlo import TOKEN, Layout, Shape, array, tuple_of
from mpmd.compile.hlo.dtypes import DTYPES, dtype_of
from mpmd.errors import HloError
from tests.support.hlo_shapes import parse_shape

THREADS, SIZES = 4, 300


@pytest.mark.parametrize(
    "text",
    [
        "f32[]",
        "f32[10,20,30]{2,0,1}",
        "bf16[2,3]",
        "(f32[2]{0}, (s32[], pred[4]{0}), token[])",
        "()",
        "f32[8,128]{1,0:T(8,128)(2,1)S(5)}",
        "s4[8]{0:E(4)}",
        "f32[<=8,3]{1,0}",
        "f32[0,3]{1,0}",
        "f32[]{:S(1)}",
    ],
)
def test_text_round_trips(text):
    assert str(parse_shape(text)) == text


def test_equal_shapes_are_one_object():
    assert parse_shape("f32[2,3]{1,0}") is array("f32", (2, 3))
    assert array("f32", (2, 3)) is not array("f32", (2, 3), (0, 1))
    assert array("f32", (2, 3)).logical is array("f32", (2, 3), (0, 1)).logical
    assert tuple_of([array("f32")]) is tuple_of([Shape("f32")])
    nested = tuple_of([array("f32", (2,)), TOKEN])
    assert pickle.loads(pickle.dumps(nested)) is nested


def test_equal_shapes_of_several_threads_are_one_object():
    """Fragments are compiled by several threads at once; the compiler compares shapes with `is`."""
    together = threading.Barrier(THREADS)
    made = [[] for _ in range(THREADS)]

    def create(found):
        for size in range(SIZES):
            together.wait()
            found.append(tuple_of([array("f32", (size, 7919)), array("s8", (7919, size), (0, 1))]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds that a thread may run while others wait
    try:
        threads = [threading.Thread(target=create, args=(found,)) for found in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for first, *others in zip(*made, strict=True):
        assert all(other is first and other.logical is first.logical for other in others)


def test_layout_lists_dims_from_minor_to_major():
    shape = parse_shape("f32[10,20,30]{2,0,1}")
    assert shape.physical_dims == (20, 10, 30)
    assert shape.with_default_layout() is array("f32", (10, 20, 30))
    assert not shape.layout.is_row_major and Layout.row_major(3).is_row_major


def test_a_scalar_has_one_form():
    assert parse_shape("f32[]") is parse_shape("f32[]{}") is array("f32")
    assert array("f32").has_layouts and array("f32").logical is array("f32")


def test_sizes():
    shape = parse_shape("(f32[2,3]{1,0}, bf16[4]{0}, pred[], token[])")
    assert shape.byte_size == 24 + 8 + 1
    assert parse_shape("s4[7]{0:E(4)}").byte_size == 4
    assert parse_shape("s4[7]{0}").byte_size == 7
    assert [i for i, _ in shape.leaves()] == [(0,), (1,), (2,), (3,)]


def test_subshape_and_variants():
    shape = parse_shape("(f32[2]{0}, (s32[], pred[4]{0}))")
    assert shape.subshape((1, 1)) is array("pred", (4,))
    assert not parse_shape("f32[2,3]").has_layouts
    assert parse_shape("f32[2,3]").filled() is array("f32", (2, 3))
    with pytest.raises(HloError, match=r"has no position \(1, 2\): element 2 at depth 1 does not exist"):
        shape.subshape((1, 2))


@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type_has_numpy_values(name):
    assert dtype_of(np.zeros(2, DTYPES[name].numpy)) == name


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("f31[2]", "unknown element type 'f31'", 0),
        ("f32[2,x]", "expected dim sizes such as 2,3, got '2,x'", 4),
        ("f32[2,3]{0,0}", r"layout \{0,0\} is not a permutation", 9),
        ("f32[2,3]{0}", r"layout \{0\} has 1 dims, the array 2", 9),
        ("(f32[2], s32[]", "never closed", 0),
        ("f32[2] f32[2]", "nothing may follow the shape", 6),
        ("banana", "expected a shape", 0),
        ("f32[-1]", "a dim cannot be negative", 4),
    ],
)
def test_malformed_text_shows_the_spot(text, problem, column):
    with pytest.raises(HloError, match=problem) as error:
        parse_shape(text)
    assert str(error.value).splitlines()[-1] == "  " + " " * column + "^"


def test_numpy_types_without_hlo_are_refused():
    with pytest.raises(HloError, match="NumPy type object has no HLO element type"):
        dtype_of(np.array([object()]))
    with pytest.raises(HloError, match="a dim cannot be negative"):
        array("f32", (-1,))
    with pytest.raises(HloError, match=r"layout \(0, 0\) is not a permutation"):
        array("f32", (2, 3), (0, 0))


def test_elements_of_another_type_are_not_packed():
    packed = parse_shape("s4[8,4]{0,1:E(4)}")
    assert packed.byte_size == 16
    assert str(packed.with_dtype("s32")) == "s32[8,4]{0,1}"
    assert packed.with_dtype("s32").byte_size == 128
