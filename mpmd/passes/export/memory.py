"""Where a value lives, and what it takes there: the questions several export passes ask."""

from __future__ import annotations

import math

from mpmd import ir

MEMORY_KIND = "mhlo.memory_kind"
DONOR = "jax.buffer_donor"
ALIAS = "tf.aliasing_output"

Attributes = dict[str, ir.Attribute]


def says_host(attributes: Attributes) -> bool:
    """Whether the attributes of an operand, a result or an argument put it into host memory."""
    kind = attributes.get(MEMORY_KIND)
    return kind is not None and ir.StringAttr(kind).value == "pinned_host"


def type_says_host(value: ir.Value) -> bool:
    """Whether the type of a value puts it into the host memory of its mesh."""
    return isinstance(value.type, ir.MeshTensor) and value.type.on_host


def is_donor(attributes: Attributes) -> bool:
    """Whether the memory of a function's argument may be used for anything once it is not needed."""
    donor = attributes.get(DONOR)
    return donor is not None and bool(ir.BoolAttr(donor).value)


def local_bytes(value: ir.Value, topology: ir.Topology) -> int:
    """Bytes of one device's shard of a mesh tensor; 0 for anything else, such as a token."""
    if not isinstance(value.type, ir.MeshTensor):
        return 0
    bits = math.prod(local_shape(value.type, topology[value.type.mesh])) * _bit_width(value.type.element_type)
    return -(-bits // 8)


def local_shape(kind: ir.MeshTensor, mesh: ir.Attribute) -> list[int]:
    """The shape of one device's shard: each dim divided by the sizes of the axes that shard it."""
    shape = list(kind.shape)
    if kind.sharding is None:
        return shape
    sizes = ir.axes_of(mesh)
    for i, axes in enumerate(ir.axes_by_dim(kind.sharding)):
        parts = math.prod(ir.axis_size(axis, sizes) for axis in axes)
        shape[i] = -(-shape[i] // parts)
    return shape


def _bit_width(element: ir.Type) -> int:
    """Bits that one element takes in memory; a boolean takes a byte, a complex number two floats."""
    if isinstance(element, ir.ComplexType):
        return 2 * _bit_width(element.element_type)
    return 8 if element.width == 1 else int(element.width)
