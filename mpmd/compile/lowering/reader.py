"""Reading StableHLO into records, the text of dense constants included: `dense<[1.5, 2.5]> : tensor<2xbf16>`.

With `spmd/shardy.py` it is the only module of the compiler that uses MLIR's bindings; everything after it
works on the records of `stablehlo_program.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir as mlir
from jax.extend.mlir.dialects import stablehlo

from mpmd import ir
from mpmd.compile.hlo.attributes import ConvDims, DotDims, GatherDims, ScatterDims
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import narrow
from mpmd.compile.hlo.shape import TOKEN, Shape, array, tuple_of
from mpmd.compile.lowering.spmd.moves import groups
from mpmd.compile.lowering.stablehlo_program import (
    Axis,
    Block,
    Function,
    Operation,
    Sharding,
    StablehloProgram,
    ValueId,
)
from mpmd.errors import CompileError
from mpmd.sharding.shards import axes_of, sdy_meshes

_IGNORED = frozenset({"sdy.mesh", "mpmd.topology"})
_CONFIGURATIONS = frozenset({"backend_config", "mhlo.backend_config"})
_SHARDING = "sdy.sharding"
_CONSTANTS = frozenset({"stablehlo.constant", "sdy.constant"})
_REDUCED_AXES = {"sdy.all_reduce": "reduction_axes", "sdy.reduce_scatter": "reduce_scatter_axes"}
_RETURNS = frozenset({"func.return", "stablehlo.return", "sdy.return"})
_ENUM = re.compile(r"#\w+<\w+ (\w+)>$")
_CHANNEL = re.compile(r"#stablehlo.channel_handle<handle = (\d+)")
_ALGORITHM = re.compile(r"(\w+) = (\w+)")
_ALIAS = re.compile(
    r"output_tuple_indices = \[(.*?)\], operand_index = (\d+), operand_tuple_indices = \[(.*?)\]"
)
_BUFFERED = frozenset(["pred", "s32", "s64", "u32", "u64", "f32", "f64"])


def parse_program(text: str) -> ir.Module:
    """The module of a text, operations of CHLO decomposed as jaxlib does.

    Raises:
        IRError: the text is not an MLIR module.
    """
    module = ir.parse(text)
    if "chlo." in text:
        ir.run_mlir_alone("func.func(chlo-legalize-to-stablehlo)", module)
    return module


def read_program(module: mlir.Module) -> StablehloProgram:
    """The records of a StableHLO module.

    Raises:
        CompileError: it has no function `main`, or a type that HLO lacks.
    """
    with module.context:
        return _ModuleReader().program(module)


class _ModuleReader:
    """Reads one module: numbers values, records types."""

    def __init__(self) -> None:
        self.ids: dict[mlir.Value, ValueId] = {}
        self.shapes: dict[str, Shape] = {}
        self.meshes: dict[str, dict[str, int]] = {}

    def program(self, module: mlir.Module) -> StablehloProgram:
        attributes = module.operation.attributes
        name = _text(attributes, "sym_name") or "main"
        functions = {}
        self.meshes = {mesh: axes_of(attribute) for mesh, attribute in sdy_meshes(module.operation).items()}
        for op in module.body.operations:
            if op.operation.name == "func.func":
                function = self.function(op.operation)
                functions[function.name] = function
            elif op.operation.name not in _IGNORED:
                raise CompileError(
                    f"module {name} has a top-level operation {op.operation.name} beside its functions"
                )
        if "main" not in functions:
            raise CompileError(
                f"module {name} has no function @main; it has {', '.join(functions) or 'none'}"
            )
        return StablehloProgram(
            name,
            functions,
            _count(attributes, "mhlo.num_replicas"),
            _count(attributes, "mhlo.num_partitions"),
        )

    def function(self, op: mlir.Operation) -> Function:
        name = mlir.StringAttr(op.attributes["sym_name"]).value
        blocks = list(op.regions[0].blocks)
        if len(blocks) != 1:
            raise CompileError(f"function @{name} must have one block, got {len(blocks)}")
        listed = mlir.ArrayAttr(op.attributes["arg_attrs"]) if "arg_attrs" in op.attributes else []
        notes = tuple({a.name: _attribute(a.attr) for a in mlir.DictAttr(d)} for d in listed)
        body = self.block(blocks[0])
        if self.meshes:
            given = [{a.name: a.attr for a in mlir.DictAttr(d)} for d in listed]
            shardings = [d.get(_SHARDING) for d in given]
            body.shardings = tuple(
                None if sharding is None else self.sharding(sharding) for sharding in shardings
            )
        return Function(name, body, notes)

    def block(self, block: mlir.Block) -> Block:
        record = Block(
            tuple(self.define(argument) for argument in block.arguments),
            tuple(self.shape(argument.type) for argument in block.arguments),
        )
        for op in block.operations:
            operation = op.operation
            if operation.name in _RETURNS:
                record.returned = tuple(self.ids[v] for v in operation.operands)
            else:
                record.operations.append(self.operation(operation))
        return record

    def operation(self, op: mlir.Operation) -> Operation:
        name = op.name
        regions = tuple(self.block(block) for region in op.regions for block in region.blocks)
        results = op.results
        attributes = {"value": _constant(op)} if name in _CONSTANTS else _attributes(op)
        if name in _REDUCED_AXES:
            axes = self._axes_of(op.attributes["out_sharding"])
            attributes["axes"] = sharding_axes(str(op.attributes[_REDUCED_AXES[name]]), axes)
        named = _MESH_GROUPS.match(str(attributes.get("replica_groups", "")))
        if named is not None:
            attributes["replica_groups"] = self._groups(named[1], named[2])
        if name == "stablehlo.dot":  # the general one, of the last dim of one side and the first of the other
            name = "stablehlo.dot_general"
            attributes["dot_dimension_numbers"] = DotDims((len(op.operands[0].type.shape) - 1,), (0,))
        if name == "sdy.manual_computation":
            given = ir.sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings
            attributes["in_shardings"] = tuple(map(self.sharding, given))
            axes = next(iter(self.meshes.values()), {})
            attributes["axes"] = sharding_axes(str(op.attributes["manual_axes"]), axes)
        return Operation(
            name,
            tuple([self.ids[v] for v in op.operands]),
            tuple([self.define(v) for v in results]),
            tuple([self.shape(v.type) for v in results]),
            attributes,
            regions,
            _source(op.location),
            self.shardings(op) if self.meshes else (),
        )

    def shardings(self, op: mlir.Operation) -> tuple[Sharding, ...]:
        """Shardings of an operation's results; empty if there are none."""
        given = op.attributes
        if "out_sharding" in given:
            return (self.sharding(given["out_sharding"]),)
        name = next((n for n in (_SHARDING, "out_shardings") if n in given), None)
        if name is None or not ir.sdy.TensorShardingPerValueAttr.isinstance(given[name]):
            return ()
        return tuple(map(self.sharding, ir.sdy.TensorShardingPerValueAttr(given[name]).shardings))

    def sharding(self, attribute: mlir.Attribute) -> Sharding:
        axes = self._axes_of(attribute)
        dims = ir.sdy.TensorShardingAttr(attribute).dimension_shardings
        return tuple(sharding_axes(str(dim), axes) for dim in dims)

    def _groups(self, mesh: str, axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups of devices along axes of a mesh: JAX 0.11 names groups this way.

        Raises:
            CompileError: there is no such mesh, or the axes are parts of axes.
        """
        sizes = self.meshes.get(mesh)
        names = re.findall(r'name = "([^"]+)"', axes)
        if sizes is None or "sub_axis" in axes or not set(names) <= set(sizes):
            raise CompileError(f"cannot read the groups of devices along {axes} of the mesh @{mesh}")
        return groups(named_axes(names, sizes), math.prod(sizes.values()))

    def _axes_of(self, sharding: mlir.Attribute) -> dict[str, int]:
        return self.meshes.get(str(ir.sdy.TensorShardingAttr(sharding).mesh_or_ref).lstrip("@"), {})

    def define(self, value: mlir.Value) -> ValueId:
        number = self.ids[value] = len(self.ids)
        return number

    def shape(self, kind: mlir.Type) -> Shape:
        text = str(kind)
        shape = self.shapes.get(text)
        if shape is None:
            shape = self.shapes[text] = shape_of(text)
        return shape


def sharding_axes(text: str, axes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The axes that a list such as `{"data", "model":(2)4}` names, on a mesh with axes of these sizes."""
    named = []
    for name, before, part in _AXIS.findall(text):
        size = axes[name]
        inner = math.prod(list(axes.values())[list(axes).index(name) + 1 :])
        if part:
            inner, size = inner * (size // (int(before) * int(part))), int(part)
        if size > 1:
            named.append(Axis(inner, size))
    return tuple(named)


def named_axes(names: Sequence[str], axes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The axes of the given names, on a mesh with axes of these sizes."""
    return sharding_axes(" ".join(f'"{name}"' for name in names), axes)


_MESH_GROUPS = re.compile(r"#stablehlo\.replica_group_mesh_axes<mesh = @(\w+), axes = \[(.*)\]>$")
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_TENSOR = re.compile(r"tensor<((?:[\d?]+x)*)([^,]+?)(?:, .*)?>$")
_ELEMENTS = {"i1": "pred", "index": "s64", "complex<f32>": "c64", "complex<f64>": "c128"}


def shape_of(text: str) -> Shape:
    """The shape for the text of an MLIR type, e.g. `tensor<2x3xf32>`.

    Raises:
        CompileError: HLO has no such type, or the type has run-time sizes.
    """
    if text in ("!stablehlo.token", "!mhlo.token"):
        return TOKEN
    if text.startswith("tuple<"):
        return tuple_of([shape_of(part) for part in _split_types(text[6:-1])])
    match = _TENSOR.match(text)
    if match is None:
        raise CompileError(f"type {text} has no HLO shape")
    dims = match.group(1).split("x")[:-1]
    if "?" in dims:
        raise CompileError(f"type {text} has a size that is not known; lower the function for fixed shapes")
    element = match.group(2)
    if element in _ELEMENTS:
        dtype = _ELEMENTS[element]
    elif element.startswith("ui"):
        dtype = "u" + element[2:]
    elif element.startswith("i"):
        dtype = "s" + element[1:]
    else:
        dtype = element.lower()
    return array(dtype, [int(d) for d in dims])


def _split_types(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "<") - (char == ">")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text[start:].strip() else parts


# -- attributes -------------------------------------------------------------------------------------


def _attributes(op: mlir.Operation) -> dict[str, Any]:
    """All attributes; configurations of custom calls as text, because their element types matter."""
    return {
        name: str(op.attributes[name]) if name in _CONFIGURATIONS else _attribute(op.attributes[name])
        for name in op.attributes
    }


def _attribute(attribute: mlir.Attribute) -> Any:
    """An attribute as a Python value; unknown attributes are kept as text."""
    if isinstance(attribute, (mlir.BoolAttr, mlir.IntegerAttr, mlir.StringAttr, mlir.FlatSymbolRefAttr)):
        return attribute.value
    if isinstance(attribute, (mlir.DenseI64ArrayAttr, mlir.DenseI32ArrayAttr, mlir.DenseBoolArrayAttr)):
        return tuple(attribute)
    if isinstance(attribute, mlir.FloatAttr):
        return attribute.value
    if isinstance(attribute, mlir.ArrayAttr):
        return tuple(_attribute(part) for part in attribute)
    if isinstance(attribute, mlir.DictAttr):
        return {part.name: _attribute(part.attr) for part in attribute}
    if isinstance(attribute, mlir.UnitAttr):
        return True
    if isinstance(attribute, mlir.DenseElementsAttr):
        return parse_dense(str(attribute), shape_of(str(attribute.type)))
    return _stablehlo(attribute)


def _stablehlo(attribute: mlir.Attribute) -> Any:
    if stablehlo.DotDimensionNumbers.isinstance(attribute):
        dot = stablehlo.DotDimensionNumbers(attribute)
        return DotDims(
            tuple(dot.lhs_contracting_dimensions),
            tuple(dot.rhs_contracting_dimensions),
            tuple(dot.lhs_batching_dimensions),
            tuple(dot.rhs_batching_dimensions),
        )
    if stablehlo.GatherDimensionNumbers.isinstance(attribute):
        gather = stablehlo.GatherDimensionNumbers(attribute)
        return GatherDims(
            tuple(gather.offset_dims),
            tuple(gather.collapsed_slice_dims),
            tuple(gather.start_index_map),
            gather.index_vector_dim,
            tuple(gather.operand_batching_dims),
            tuple(gather.start_indices_batching_dims),
        )
    if stablehlo.ScatterDimensionNumbers.isinstance(attribute):
        scatter = stablehlo.ScatterDimensionNumbers(attribute)
        return ScatterDims(
            tuple(scatter.update_window_dims),
            tuple(scatter.inserted_window_dims),
            tuple(scatter.scattered_dims_to_operand_dims),
            scatter.index_vector_dim,
            tuple(scatter.input_batching_dims),
            tuple(scatter.scatter_indices_batching_dims),
        )
    if stablehlo.ConvDimensionNumbers.isinstance(attribute):
        conv = stablehlo.ConvDimensionNumbers(attribute)
        return ConvDims(
            conv.input_batch_dimension,
            conv.input_feature_dimension,
            tuple(conv.input_spatial_dimensions),
            conv.kernel_input_feature_dimension,
            conv.kernel_output_feature_dimension,
            tuple(conv.kernel_spatial_dimensions),
            conv.output_batch_dimension,
            conv.output_feature_dimension,
            tuple(conv.output_spatial_dimensions),
        )
    return _from_text(str(attribute))


def _from_text(text: str) -> Any:
    enum = _ENUM.match(text)
    if enum is not None:
        return enum.group(1)
    channel = _CHANNEL.match(text)
    if channel is not None:
        return int(channel.group(1))
    if text.startswith("#stablehlo.dot_algorithm<"):
        return dict(_ALGORITHM.findall(text))
    alias = _ALIAS.search(text)
    if alias is not None:
        output, operand, index = alias.groups()
        return (_numbers(output), int(operand), _numbers(index))
    return text


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _constant(op: mlir.Operation) -> Any:
    """A constant's array.  The bindings read arrays of some element types only, the text has them all."""
    shape = shape_of(str(op.results[0].type))
    if shape.dtype in _BUFFERED and shape.size > 64:
        value = mlir.DenseElementsAttr(op.attributes["value"])
        if not value.is_splat:
            return np.array(value).reshape(shape.dims)
    if shape.info.kind != "complex":
        return parse_dense(str(op.attributes["value"]), shape)
    text = op.get_asm(use_local_scope=True)  # the bindings have no complex attributes
    return parse_dense(text[text.index("dense<") :], shape)


def _text(attributes: Any, name: str) -> str:
    return mlir.StringAttr(attributes[name]).value if name in attributes else ""


def _count(attributes: Any, name: str) -> int:
    return mlir.IntegerAttr(attributes[name]).value if name in attributes else 1


def _source(location: mlir.Location) -> str:
    return location.name_str if isinstance(location, mlir.NameLoc) else ""


_BODY = re.compile(r'dense<(?:"0x([0-9A-Fa-f]*)"|([^>]*))>')
_TOKEN = re.compile(r"\([^()]*\)|[^\s,\[\]()]+")


def parse_dense(text: str, shape: Shape) -> np.ndarray:
    """The array of a dense constant of this shape; a single value is repeated.

    Raises:
        CompileError: the text is not a dense constant, or was shortened.
    """
    match = _BODY.match(text)
    if match is None:
        raise CompileError(f"expected a dense constant of shape {shape}, got {text[:60]!r}")
    if match.group(1) is not None:
        return _from_bytes(bytes.fromhex(match.group(1)), shape)
    tokens = _TOKEN.findall(match.group(2))
    if any("..." in t for t in tokens):
        raise CompileError(
            f"the constant of shape {shape} was left out of the text\n  print the module with large constants"
        )
    if not tokens:
        return np.zeros(shape.dims, shape.numpy_dtype)
    values = _values(tokens, shape)
    if len(tokens) == 1:
        return np.broadcast_to(values.reshape(()), shape.dims)
    return values.reshape(shape.dims)


def _from_bytes(data: bytes, shape: Shape) -> np.ndarray:
    """Raw memory: booleans as bytes or packed bits, narrow integers as bytes, one element for all."""
    raw = np.frombuffer(data, np.uint8)
    if shape.dtype == "pred":
        whole = (
            raw != 0 if len(raw) in (1, shape.size) else np.unpackbits(raw, bitorder="little")[: shape.size]
        )
        values = whole.astype(np.bool_)
    elif shape.info.is_integral and shape.info.bits < 8:
        values = narrow(raw.astype(np.int64), shape.dtype)
    else:
        values = np.frombuffer(data, shape.numpy_dtype)
    if len(values) not in (1, shape.size):
        raise CompileError(
            f"a constant of shape {shape} has {len(values)} values\n  expected: one, or {shape.size}"
        )
    return np.broadcast_to(values.reshape(()), shape.dims) if len(values) == 1 else values.reshape(shape.dims)


def _values(tokens: list[str], shape: Shape) -> np.ndarray:
    info = shape.info
    if info.kind == "pred":
        return np.array([t in ("true", "1", "-1") for t in tokens])
    if info.is_integral:
        mask = (1 << info.bits) - 1
        wrapped = [int(t, 0) & mask for t in tokens]
        return narrow(np.array(wrapped, np.uint64).astype(np.int64), shape.dtype).astype(info.numpy)
    if info.kind == "complex":
        part = "f32" if shape.dtype == "c64" else "f64"
        pairs = [[_float(p.strip(), part) for p in t[1:-1].split(",")] for t in tokens]
        return np.array([complex(float(re_), float(im)) for re_, im in pairs], info.numpy)
    return np.array([_float(t, shape.dtype) for t in tokens], info.numpy)


def _float(token: str, dtype: str) -> Any:
    """A number, or its bits in hexadecimal (how infinities and NaN are written)."""
    info = DTYPES[dtype]
    if token.startswith("0x"):
        raw = int(token, 16).to_bytes(info.bytes, "little")
        return np.frombuffer(raw, info.numpy)[0]
    return np.asarray(narrow(np.asarray(float(token), np.float64), dtype))[()]
