"""Types and attributes of the mpmd dialect that jaxlib has no classes for."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import mpmd, sdy

from mpmd.ir.context import context


@dataclasses.dataclass(frozen=True, order=True)
class Origin:
    """A user's name for a computation, and how often JAX transposed it."""

    name: str
    transpose_count: int = 0

    @staticmethod
    def of(attribute: ir.Attribute) -> Origin:
        """The origin that `#mpmd.user_origin<"name"(1)>` stands for."""
        origin = mpmd.UserOriginAttr(attribute)
        return Origin(origin.user_name, origin.transpose_count)

    def attribute(self) -> ir.Attribute:
        """The dialect's attribute."""
        return mpmd.UserOriginAttr.get(self.name, self.transpose_count, context())

    def __str__(self) -> str:
        return f'"{self.name}"' + (f"({self.transpose_count})" if self.transpose_count else "")


class MeshTensor(ir.ShapedType):
    """A tensor on a mesh: `!mpmd.mesh_tensor<"m1", tensor<4x8xf32>>`.  Has `shape` and `element_type`."""

    @staticmethod
    def get(
        mesh: str, tensor: ir.Type, sharding: ir.Attribute | None = None, memory_kind: str | None = None
    ) -> MeshTensor:
        """The mesh tensor type; without `sharding` it is fully replicated."""
        return _mesh_tensor(mesh, tensor, sharding, memory_kind)

    @property
    def mesh(self) -> str:
        """Name of the mesh it lives on."""
        return self._parts[0]

    @property
    def tensor(self) -> ir.Type:
        """The global tensor type: what it is outside of any mesh, and inside of fragments."""
        return _tensor(self)

    @property
    def sharding(self) -> sdy.TensorShardingAttr | None:
        """Its sharding; None if fully replicated."""
        text = self._parts[1]
        if text is None:
            return None
        return sdy.TensorShardingAttr(ir.Attribute.parse("#sdy.sharding" + text, context()))

    @property
    def memory_kind(self) -> str | None:
        """`"pinned_host"`, `"device"` or None; the last two mean the same and are different types."""
        return self._parts[2]

    @property
    def on_host(self) -> bool:
        """Whether it lives in host memory."""
        return self.memory_kind not in (None, "device")

    def on(self, mesh: str) -> MeshTensor:
        """The same type on another mesh."""
        return MeshTensor.get(mesh, self.tensor, self.sharding, self.memory_kind)

    @property
    def _parts(self) -> tuple[str, str | None, str | None]:
        return _mesh_tensor_parts(self)


@functools.lru_cache(None)
def _mesh_tensor(
    mesh: str, tensor: ir.Type, sharding: ir.Attribute | None, memory_kind: str | None
) -> MeshTensor:
    text = f'!mpmd.mesh_tensor<"{mesh}", {tensor}'
    if sharding is not None:
        text += f", sharding={str(sharding).removeprefix('#sdy.sharding')}"
    if memory_kind is not None:
        text += f', memory_kind="{memory_kind}"'
    return ir.Type.parse(text + ">", context())


@functools.lru_cache(None)
def _tensor(kind: MeshTensor) -> ir.Type:
    return ir.RankedTensorType.get(kind.shape, kind.element_type, loc=ir.Location.unknown(context()))


@functools.lru_cache(None)
def _mesh_tensor_parts(kind: MeshTensor) -> tuple[str, str | None, str | None]:
    text = str(kind)
    found = re.fullmatch(
        r'!mpmd\.mesh_tensor<"([^"]*)", tensor<.*?>'
        r'(?:, sharding=(<@.*?>))?(?:, memory_kind="([^"]*)")?>',
        text,
    )
    if found is None:
        raise ValueError(f"not a mesh tensor type: {text}")
    return found[1], found[2], found[3]


class Topology(dict[str, sdy.MeshAttr]):
    """Mesh name -> sdy mesh, in pipeline order: a function's `topology` attribute."""

    @staticmethod
    def of(attribute: ir.Attribute) -> Topology:
        """The meshes of `#mpmd.topology<...>`."""
        return Topology(_topology_meshes(str(attribute)))

    @staticmethod
    def from_axes(meshes: dict[str, dict[str, int]]) -> Topology:
        """A topology from mesh name -> axis name -> size."""

        def text(axes: dict[str, int]) -> str:
            return ", ".join(f'"{name}"={size}' for name, size in axes.items())

        return Topology(
            (name, sdy.MeshAttr(ir.Attribute.parse(f"#sdy.mesh<[{text(axes)}]>", context())))
            for name, axes in meshes.items()
        )

    def attribute(self) -> ir.Attribute:
        """The dialect's attribute."""
        meshes = (f'<"{name}" : {str(mesh).removeprefix("#sdy.mesh")}>' for name, mesh in self.items())
        return ir.Attribute.parse(f"#mpmd.topology<{', '.join(meshes)}>", context())

    @property
    def schedulable(self) -> list[str]:
        """The meshes that count as pipeline stages: all but host meshes, in order."""
        return [name for name in self if not name.endswith("/cpu")]


@functools.lru_cache(None)
def _topology_meshes(text: str) -> tuple[tuple[str, sdy.MeshAttr], ...]:
    found = re.findall(r'<"([^"]*)" : (<.*?\]>)>', text)
    return tuple(
        (name, sdy.MeshAttr(ir.Attribute.parse("#sdy.mesh" + mesh, context()))) for name, mesh in found
    )


def mesh_order(names: Iterable[str]) -> list[str]:
    """Mesh names, each once: by the numbers at their ends where both have one (m2, m10), else by string."""

    def compare(a: str, b: str) -> int:
        numbers = [re.search(r"\d+$", name) for name in (a, b)]
        keys = [(int(found[0]) if found and all(numbers) else 0) for found in numbers]
        left, right = (keys[0], a), (keys[1], b)
        return (left > right) - (left < right)

    return sorted(sorted(set(names)), key=functools.cmp_to_key(compare))


def axes_of(mesh: sdy.MeshAttr) -> dict[str, int]:
    """Axis name -> size."""
    return {axis.name: axis.size for axis in (sdy.MeshAxisAttr(a) for a in mesh.axes)}


def axis_ref(attribute: ir.Attribute) -> sdy.AxisRefAttr:
    """The axis that an entry of a dim's sharding names."""
    return sdy.AxisRefAttr(attribute)


def on_sdy_mesh(shardings: ir.Attribute, name: str) -> ir.Attribute:
    """The same shardings, one per value, of the axes of the sdy mesh called `name`."""
    return sdy.TensorShardingPerValueAttr.get(
        [
            sdy.TensorShardingAttr.get(name, s.dimension_shardings, s.replicated_axes, s.unreduced_axes)
            for s in map(sdy.TensorShardingAttr, sdy.TensorShardingPerValueAttr(shardings).shardings)
        ],
        context(),
    )


def axes_by_dim(sharding: ir.Attribute) -> list[list[sdy.AxisRefAttr]]:
    """The axes, or parts of axes, that shard each dim."""
    dims = sdy.TensorShardingAttr(sharding).dimension_shardings
    return [[axis_ref(axis) for axis in sdy.DimensionShardingAttr(dim).axes] for dim in dims]


def axis_size(axis: sdy.AxisRefAttr, sizes: dict[str, int]) -> int:
    """Into how many parts an axis, or a part of one, cuts."""
    part = axis.sub_axis_info
    return sizes[axis.name] if part is None else int(sdy.SubAxisInfoAttr(part).size)


def local_shape(kind: MeshTensor, mesh: sdy.MeshAttr) -> list[int]:
    """The shape of one device's shard: each dim divided by the sizes of the axes that shard it."""
    shape = list(kind.shape)
    if kind.sharding is None:
        return shape
    sizes = axes_of(mesh)
    parts = [math.prod(axis_size(axis, sizes) for axis in axes) for axes in axes_by_dim(kind.sharding)]
    return [-(-size // count) for size, count in zip(shape, parts)]


def local_bytes(kind: MeshTensor, mesh: sdy.MeshAttr) -> int:
    """Bytes of one device's shard."""
    return -(-math.prod(local_shape(kind, mesh)) * _bit_width(kind.element_type) // 8)


def _bit_width(element: ir.Type) -> int:
    """Bits of one element in memory; a boolean takes a byte, a complex number two floats."""
    if isinstance(element, ir.ComplexType):
        return 2 * _bit_width(element.element_type)
    return 8 if element.width == 1 else int(element.width)


def element_count(kind: ir.ShapedType) -> int:
    """How many elements a tensor has, globally."""
    return math.prod(kind.shape)


def string_list(attribute: ir.Attribute | None) -> list[str]:
    """The strings of an array attribute; none if it is absent."""
    return [] if attribute is None else [ir.StringAttr(a).value for a in ir.ArrayAttr(attribute)]


def string_array(strings: Iterable[str]) -> ir.Attribute:
    """An array attribute of strings."""
    return ir.ArrayAttr.get([ir.StringAttr.get(s, context()) for s in strings], context())


def _register() -> None:
    sample = ir.Type.parse('!mpmd.mesh_tensor<"m", tensor<f32>>', context())
    ir.register_type_caster(sample.typeid, replace=True)(lambda kind: MeshTensor(kind))


_register()
