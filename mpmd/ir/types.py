"""Types and attributes of the mpmd dialect that jaxlib has no classes for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import mpmd, sdy

from mpmd.ir.context import context
from mpmd.support.resources import memoised


@dataclasses.dataclass(frozen=True, order=True)
class Origin:
    """A user's name for a computation, and how often JAX transposed it."""

    name: str
    transpose_count: int = 0

    @staticmethod
    def of(attribute: ir.Attribute) -> Origin:
        """The origin in `#mpmd.user_origin<"name"(1)>`."""
        origin = mpmd.UserOriginAttr(attribute)
        return Origin(origin.user_name, origin.transpose_count)

    def attribute(self) -> ir.Attribute:
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
        return self._parts[0]

    @property
    @memoised()
    def tensor(self) -> ir.Type:
        """The global tensor type, as outside of any mesh and inside of fragments."""
        return ir.RankedTensorType.get(self.shape, self.element_type, loc=ir.Location.unknown(context()))

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
        return MeshTensor.get(mesh, self.tensor, self.sharding, self.memory_kind)

    @property
    def _parts(self) -> tuple[str, str | None, str | None]:
        return _mesh_tensor_parts(self)


@memoised()
def _mesh_tensor(mesh: str, tensor: ir.Type, sharding: object, memory_kind: str | None) -> MeshTensor:
    text = f'!mpmd.mesh_tensor<"{mesh}", {tensor}'
    if sharding is not None:
        text += f", sharding={str(sharding).removeprefix('#sdy.sharding')}"
    if memory_kind is not None:
        text += f', memory_kind="{memory_kind}"'
    return ir.Type.parse(text + ">", context())


@memoised()
def _mesh_tensor_parts(kind: MeshTensor) -> tuple[str, str | None, str | None]:
    text = str(kind)
    match = re.fullmatch(
        r'!mpmd\.mesh_tensor<"([^"]*)", tensor<.*?>'
        r'(?:, sharding=(<@.*?>))?(?:, memory_kind="([^"]*)")?>',
        text,
    )
    if match is None:
        raise ValueError(f"not a mesh tensor type: {text}")
    return match[1], match[2], match[3]


class TopologyAttr(dict[str, sdy.MeshAttr]):
    """Mesh name -> sdy mesh, in pipeline order: a function's `topology` attribute."""

    @staticmethod
    def of(attribute: ir.Attribute) -> TopologyAttr:
        """The meshes of `#mpmd.topology<...>`."""
        return TopologyAttr(_topology_meshes(str(attribute)))

    @staticmethod
    def from_axes(meshes: dict[str, dict[str, int]]) -> TopologyAttr:
        """A topology from mesh name -> axis name -> size."""

        def text(axes: dict[str, int]) -> str:
            return ", ".join(f'"{name}"={size}' for name, size in axes.items())

        return TopologyAttr(
            (name, sdy.MeshAttr(ir.Attribute.parse(f"#sdy.mesh<[{text(axes)}]>", context())))
            for name, axes in meshes.items()
        )

    def attribute(self) -> ir.Attribute:
        meshes = (f'<"{name}" : {str(mesh).removeprefix("#sdy.mesh")}>' for name, mesh in self.items())
        return ir.Attribute.parse(f"#mpmd.topology<{', '.join(meshes)}>", context())

    @property
    def schedulable(self) -> list[str]:
        """The meshes that count as pipeline stages: all but host meshes, in order."""
        return [name for name in self if not name.endswith("/cpu")]


@memoised()
def _topology_meshes(text: str) -> tuple[tuple[str, sdy.MeshAttr], ...]:
    parts = re.findall(r'<"([^"]*)" : (<.*?\]>)>', text)
    return tuple(
        (name, sdy.MeshAttr(ir.Attribute.parse("#sdy.mesh" + mesh, context()))) for name, mesh in parts
    )


def string_list(attribute: ir.Attribute | None) -> list[str]:
    """The strings of an array attribute; none if it is absent."""
    return [] if attribute is None else [ir.StringAttr(a).value for a in ir.ArrayAttr(attribute)]


def string_array(strings: Iterable[str]) -> ir.Attribute:
    return ir.ArrayAttr.get([ir.StringAttr.get(s, context()) for s in strings], context())


def _register() -> None:
    sample = ir.Type.parse('!mpmd.mesh_tensor<"m", tensor<f32>>', context())
    ir.register_type_caster(sample.typeid, replace=True)(memoised()(MeshTensor))


_register()
