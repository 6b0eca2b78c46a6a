"""Shapes from their texts."""

from __future__ import annotations

from mpmd.compile.hlo.shape import Shape, shape_at
from mpmd.compile.hlo.text import TextError, located
from mpmd.errors import HloError


def parse_shape(text: str) -> Shape:
    """The shape in a text such as `(f32[2,3]{1,0}, s32[])`.

    Raises:
        HloError: the text is not a shape; shows the place.
    """
    try:
        shape, end = shape_at(text, 0)
        if text[end:].strip():
            raise TextError("nothing may follow the shape", end)
    except TextError as error:
        raise HloError(located(text, error.offset, error.message, "shape")) from None
    return shape
