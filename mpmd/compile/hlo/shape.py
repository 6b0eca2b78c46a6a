"""Shapes of values: arrays, tuples of shapes, tokens.

Shapes are interned: equal shapes are one object, so `is` compares them and hashing is free.  The table
refers to them weakly, so that shapes of programs that are gone do not collect.  Fragments are compiled by
several threads, and `setdefault` of a weak dictionary is not atomic: a lock is held while a shape is added.
Two shapes that differ only in layout are different objects with the same `logical` shape.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES, DType
from mpmd.compile.hlo.layout import Layout, parse_layout
from mpmd.compile.hlo.text import TextError, closing
from mpmd.errors import HloError

UNBOUNDED = -1
"""The size of a dim of which not even a bound is known: `?` in the text."""
ShapeIndex = tuple[int, ...]
"""A position inside a shape: () is the whole, (1, 0) element 0 of element 1."""

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\s*\[([^\]]*)\](?:\s*\{(?=\s*[\d:}])([^{}]*)\})?")
BUFFER = re.compile(r"b\s*\(")
_SCALAR_LAYOUT = Layout(())
_ADDING = threading.RLock()
"""Held while a shape is added, and with it its logical shape."""


class Shape:
    """An interned shape.

    Attributes:
        dtype: XLA's name of the element type, or `tuple`, `token`, `opaque`, `buffer`.
        dims: sizes of the dims of an array, outermost logical dim first; bounds, or `UNBOUNDED`, where
            `dynamic` is set.
        layout: order in memory, or None when not yet decided.  Scalars always have one.
        elements: shapes inside a tuple; the one array in a buffer.
        dynamic: for arrays with run-time sizes, a flag per dim; () when all are static.
        logical: the same shape without any layout; itself if it has none.
    """

    __slots__ = (
        "__weakref__", "_leaves", "_text", "dims", "dtype", "dynamic", "elements", "layout", "logical",
    )  # fmt: skip
    dtype: str
    dims: tuple[int, ...]
    layout: Layout | None
    elements: tuple[Shape, ...]
    dynamic: tuple[bool, ...]
    logical: Shape
    _leaves: tuple[tuple[ShapeIndex, Shape], ...]
    _text: str
    _pool: ClassVar[weakref.WeakValueDictionary[tuple[object, ...], Shape]] = weakref.WeakValueDictionary()

    def __new__(
        cls,
        dtype: str,
        dims: tuple[int, ...] = (),
        layout: Layout | None = None,
        elements: tuple[Shape, ...] = (),
        dynamic: tuple[bool, ...] = (),
    ) -> Shape:
        """The one object for these values; prefer `array` and `tuple_of`.

        Raises:
            HloError: the array would have more bytes than 63 bits count.
        """
        if not dims and layout is None and dtype in DTYPES:
            layout = _SCALAR_LAYOUT
        key = dtype, dims, layout, elements, dynamic
        pooled = cls._pool.get(key)
        if pooled is not None:
            return pooled
        # Shapes are compared by identity, so there must be one object per value.  The pool is weak, and read
        # without the lock: a hit is complete, as it enters only once it is created.
        with _ADDING:
            pooled = cls._pool.get(key)  # another thread may have added it meanwhile
            if pooled is None:
                pooled = cls._pool[key] = cls._create(*key)
            return pooled

    @classmethod
    def _create(
        cls,
        dtype: str,
        dims: tuple[int, ...],
        layout: Layout | None,
        elements: tuple[Shape, ...],
        dynamic: tuple[bool, ...],
    ) -> Shape:
        if dims and dtype in DTYPES:
            _check_bytes(dtype, dims)
        self = object.__new__(cls)
        self.dtype, self.dims, self.layout, self.elements, self.dynamic = (
            dtype,
            dims,
            layout,
            elements,
            dynamic,
        )
        self._text = self._render()
        self._leaves = tuple(self._find_leaves())
        # `logical` is the shape without layouts, so that two shapes agree but for layouts iff it is one
        # object.
        if elements:
            logical = tuple(e.logical for e in elements)
            self.logical = self if logical == elements else Shape(dtype, elements=logical)
        elif layout is None or layout is _SCALAR_LAYOUT:
            self.logical = self
        else:
            self.logical = Shape(dtype, dims, None, (), dynamic)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Shape, (self.dtype, self.dims, self.layout, self.elements, self.dynamic)

    def __copy__(self) -> Shape:
        return self

    def __deepcopy__(self, memo: object) -> Shape:
        return self

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def _render(self) -> str:
        if self.dtype in ("tuple", "buffer"):
            inside = ", ".join(e._text for e in self.elements)
            return f"b({inside})" if self.dtype == "buffer" else f"({inside})"
        if self.dtype in ("token", "opaque"):
            return f"{self.dtype}[]"
        flags = self.dynamic or (False,) * len(self.dims)
        dims = ",".join(
            "?" if d == UNBOUNDED else ("<=" if flag else "") + str(d) for d, flag in zip(self.dims, flags)
        )
        layout = "" if self.layout is None or self.layout is _SCALAR_LAYOUT else str(self.layout)
        return f"{self.dtype}[{dims}]{layout}"

    # -- kind ---------------------------------------------------------------------------------------

    @property
    def is_array(self) -> bool:
        return self.dtype in DTYPES

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    @property
    def is_scalar(self) -> bool:
        """True for arrays without dims."""
        return not self.dims and self.dtype in DTYPES

    @property
    def info(self) -> DType:
        """The element type of an array.

        Raises:
            HloError: it is a tuple, a token or opaque.
        """
        try:
            return DTYPES[self.dtype]
        except KeyError:
            raise HloError(f"{self} is not an array, so it has no element type") from None

    @property
    def numpy_dtype(self) -> np.dtype:
        return self.info.numpy

    # -- sizes --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of elements of an array, of the bounds where sizes are dynamic.

        Raises:
            HloError: a dim has no bound.
        """
        if UNBOUNDED in self.dims:
            raise HloError(f"{self} has dims without bounds, so it has no size")
        return math.prod(self.dims)

    @property
    def byte_size(self) -> int:
        """Bytes of all arrays in the shape; tuples' pointer tables and tokens count nothing."""
        if self.elements:
            return sum(e.byte_size for e in self.elements)
        if self.dtype not in DTYPES:
            return 0
        bits = self.layout.element_bits if self.layout is not None else 0
        return (self.size * bits + 7) // 8 if bits else self.size * DTYPES[self.dtype].bytes

    # -- layout -------------------------------------------------------------------------------------

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        """Dims from the contiguous one outwards; row-major when no layout was decided."""
        if self.layout is None:
            return tuple(range(len(self.dims) - 1, -1, -1))
        return self.layout.minor_to_major

    @property
    def physical_dims(self) -> tuple[int, ...]:
        return tuple(self.dims[d] for d in reversed(self.minor_to_major))

    @property
    def has_layouts(self) -> bool:
        """True if every array in the shape has a layout."""
        if self.elements:
            return all(e.has_layouts for e in self.elements)
        return self.layout is not None or self.dtype not in DTYPES

    def with_layout(self, layout: Layout | Sequence[int] | None) -> Shape:
        """The same array in another order in memory (minor to major).

        Raises:
            HloError: the layout has another number of dims.
        """
        if layout is not None and not isinstance(layout, Layout):
            layout = Layout(tuple(layout))
        if layout is not None and len(layout.minor_to_major) != len(self.dims):
            raise HloError(
                f"layout {layout} has {len(layout.minor_to_major)} dims, the array {self} {self.rank}"
            )
        return Shape(self.dtype, self.dims, layout, self.elements, self.dynamic)

    def with_default_layout(self) -> Shape:
        if self.elements:
            return Shape(self.dtype, elements=tuple(e.with_default_layout() for e in self.elements))
        if self.dtype not in DTYPES:
            return self
        return Shape(self.dtype, self.dims, Layout.row_major(len(self.dims)), (), self.dynamic)

    def filled(self) -> Shape:
        """Row-major where no layout was decided, unchanged elsewhere."""
        if self.has_layouts:
            return self
        if self.elements:
            return Shape(self.dtype, elements=tuple(e.filled() for e in self.elements))
        return self.with_default_layout()

    # -- variants -----------------------------------------------------------------------------------

    def with_dtype(self, dtype: str) -> Shape:
        """The same dims in the same order with other elements, which are not packed."""
        layout = self.layout
        if layout is not None and layout.element_bits:
            layout = Layout(layout.minor_to_major, layout.memory_space, 0, layout.tiles, layout.extra)
        return Shape(dtype, self.dims, layout, (), self.dynamic)

    def with_dims(self, dims: Sequence[int]) -> Shape:
        """Other dims, row-major: a layout does not carry over to other dims."""
        return array(self.dtype, dims)

    def scalar(self) -> Shape:
        return Shape(self.dtype)

    # -- tuples -------------------------------------------------------------------------------------

    def is_compatible(self, other: Shape) -> bool:
        """True if both are equal but for layouts, and for which dims are dynamic."""
        if self.logical is other.logical:
            return True
        mine, theirs = (
            [(index, s.dtype, s.dims, s.is_tuple) for index, s in shape.walk()] for shape in (self, other)
        )
        return mine == theirs

    def subshape(self, index: ShapeIndex) -> Shape:
        """The shape at a position of the tuple tree.

        Raises:
            HloError: there is no such position.
        """
        shape = self
        for depth, i in enumerate(index):
            if not shape.is_tuple or not 0 <= i < len(shape.elements):
                raise HloError(
                    f"shape {self} has no position {index}: element {i} at depth {depth} does not exist"
                )
            shape = shape.elements[i]
        return shape

    def walk(self, index: ShapeIndex = ()) -> Iterator[tuple[ShapeIndex, Shape]]:
        """Every (position, shape), tuples before their elements."""
        yield index, self
        for i, element in enumerate(self.elements if self.is_tuple else ()):
            yield from element.walk((*index, i))

    def leaves(self) -> tuple[tuple[ShapeIndex, Shape], ...]:
        """Every (position, shape) that is not a tuple."""
        return self._leaves

    def _find_leaves(self) -> Iterator[tuple[ShapeIndex, Shape]]:
        if not self.is_tuple:
            yield (), self
            return
        for i, element in enumerate(self.elements):
            yield from (((i, *index), shape) for index, shape in element._leaves)


def _check_bytes(dtype: str, dims: tuple[int, ...]) -> None:
    """The product of all dims but zeros must fit, too, as in XLA."""
    if math.prod(d for d in dims if d > 0) * DTYPES[dtype].bytes >= 1 << 63:
        raise HloError(f"{dtype}[{','.join(map(str, dims))}] has more bytes than 63 bits count")


TOKEN = Shape("token")


def array(dtype: str, dims: Sequence[int] = (), minor_to_major: Sequence[int] | None = None) -> Shape:
    """An array shape, row-major unless another order is given.

    Raises:
        HloError: unknown element type, negative size, or an order that is not a permutation.
    """
    if dtype not in DTYPES:
        raise HloError(f"unknown element type {dtype!r}; known: {', '.join(DTYPES)}")
    sizes = tuple(int(d) for d in dims)
    if any(d < 0 for d in sizes):
        raise HloError(f"a dim cannot be negative: {dtype}[{','.join(map(str, sizes))}]")
    if minor_to_major is None:
        return Shape(dtype, sizes, Layout.row_major(len(sizes)))
    if sorted(minor_to_major) != list(range(len(sizes))):
        raise HloError(
            f"layout {tuple(minor_to_major)} is not a permutation of the {len(sizes)} dims of {sizes}"
        )
    return Shape(dtype, sizes, Layout(tuple(minor_to_major)))


def tuple_of(elements: Sequence[Shape]) -> Shape:
    return Shape("tuple", elements=tuple(elements))


# -- text -------------------------------------------------------------------------------------------

_parsed: weakref.WeakValueDictionary[str, Shape] = weakref.WeakValueDictionary()


def shape_at(text: str, start: int) -> tuple[Shape, int]:
    """The shape that begins at an offset of `text`, which has no comments, and the offset after it.

    Raises:
        TextError: no shape begins there.
    """
    buffer = BUFFER.match(text, start)
    if buffer is not None:
        end = closing(text, buffer.end() - 1)
        inner, after = shape_at(text, _skip_blanks(text, buffer.end()))
        if not inner.is_array or _skip_blanks(text, after) != end:
            raise TextError("expected one array in a buffer, such as b(f32[2,3])", buffer.end())
        return Shape("buffer", elements=(inner,)), end + 1
    if text.startswith("(", start):
        end = closing(text, start) + 1
        # Programs repeat few shapes many times: the text is the key, and a hit costs no parsing.
        key = text[start:end]
        shape = _parsed.get(key)
        if shape is None:
            shape = _parsed[key] = _tuple_at(text, start, end - 1)
        return shape, end
    matched = _ARRAY.match(text, start)
    if matched is None:
        raise TextError("expected a shape such as f32[2,3]{1,0} or (s32[], pred[])", start)
    key = matched.group()
    shape = _parsed.get(key)
    if shape is None:
        shape = _parsed[key] = _array_from(matched)
    return shape, matched.end()


def _tuple_at(text: str, start: int, end: int) -> Shape:
    elements: list[Shape] = []
    position = _skip_blanks(text, start + 1)
    while position < end:
        element, position = shape_at(text, position)
        elements.append(element)
        position = _skip_blanks(text, position)
        if position < end and text[position] != ",":
            raise TextError("expected `,` or `)` after an element of a tuple", position)
        position = _skip_blanks(text, position + 1)
    return tuple_of(elements)


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _array_from(matched: re.Match[str]) -> Shape:
    dtype, dims_text, layout_text = matched.groups()
    if dtype in ("token", "opaque"):
        return Shape(dtype)
    if dtype not in DTYPES:
        raise TextError(f"unknown element type {dtype!r}; known: {', '.join(DTYPES)}", matched.start())
    parts = [part.strip() for part in dims_text.split(",")] if dims_text.strip() else []
    try:
        dims = tuple(UNBOUNDED if part == "?" else int(part.removeprefix("<=")) for part in parts)
    except ValueError:
        raise TextError(f"expected dim sizes such as 2,3, got {dims_text!r}", matched.start(2)) from None
    if any(d < 0 and part != "?" for d, part in zip(dims, parts)):
        raise TextError(f"a dim cannot be negative, got {dims_text!r}", matched.start(2))
    dynamic = tuple(part == "?" or part.startswith("<=") for part in parts)
    layout = None
    if layout_text is not None:
        try:
            layout = parse_layout(layout_text)
        # Offsets of the layout's parser are within its own text.
        except TextError as error:
            raise TextError(error.message, matched.start(3) + error.offset) from None
        if len(layout.minor_to_major) != len(dims):
            raise TextError(
                f"layout {layout} has {len(layout.minor_to_major)} dims, the array {len(dims)}",
                matched.start(3),
            )
    try:
        return Shape(dtype, dims, layout, (), dynamic if any(dynamic) else ())
    except HloError as error:
        raise TextError(str(error), matched.start()) from None
