"""Where a value lives, and what it takes there: the questions several export passes ask."""

from __future__ import annotations

from mpmd import ir
from mpmd.sharding import shards

MEMORY_KIND = "mhlo.memory_kind"
DONOR = "jax.buffer_donor"
ALIAS = "tf.aliasing_output"
LAYOUT = "mhlo.layout_mode"

Attributes = dict[str, ir.Attribute]


def says_host(attributes: Attributes) -> bool:
    """Whether the attributes of an operand, a result or an argument put it into host memory."""
    kind = attributes.get(MEMORY_KIND)
    return kind is not None and ir.StringAttr(kind).value == "pinned_host"


def type_says_host(kind: ir.Type) -> bool:
    """Whether the type of a value puts it into the host memory of its mesh."""
    return isinstance(kind, ir.MeshTensor) and kind.on_host


def is_donor(attributes: Attributes) -> bool:
    """Whether the memory of a function's argument may be used for anything once it is not needed."""
    donor = attributes.get(DONOR)
    return donor is not None and bool(ir.BoolAttr(donor).value)


def local_bytes(value: ir.Value, topology: ir.TopologyAttr) -> int:
    """Bytes of one device's shard of a mesh tensor; 0 for anything else, such as a token."""
    kind = value.type
    return shards.local_bytes(kind, topology[kind.mesh]) if isinstance(kind, ir.MeshTensor) else 0
