"""Building computations: append operations, get their shapes inferred.

The general function is `HloBuilder.add`; the methods around it are the most frequent operations.  A
mistake is an `HloError` that names the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpmd.compile.hlo.attributes import Attribute, DotDims, GatherDims, PadDim, SliceDims
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction, Literal
from mpmd.compile.hlo.literals import freeze, literal_shape
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import OPCODES, unknown_opcode
from mpmd.compile.hlo.shape import Shape, array
from mpmd.compile.hlo.shape_inference import infer_shape
from mpmd.errors import HloError


class HloBuilder:
    """Appends operations to one computation.

    Attributes:
        computation: the computation under construction.
        metadata: text given to every operation that is added, "" for none.
    """

    def __init__(self, computation: HloComputation) -> None:
        self.computation = computation
        self.metadata = ""
        self._parameters = len(computation.parameters)

    @staticmethod
    def create(module: HloModule, name: str) -> HloBuilder:
        return HloBuilder(module.create_computation(name))

    def add(
        self,
        opcode: str,
        *operands: HloInstruction,
        shape: Shape | None = None,
        called: Sequence[HloComputation] = (),
        name: str = "",
        **attributes: Attribute,
    ) -> HloInstruction:
        """Append an operation.

        Args:
            opcode: key of `OPCODES`.
            operands: instructions of this computation.
            shape: stated shape; needed only where the operands do not determine it.  Its layout is kept.
            called: computations it calls.
            name: of the instruction; made from opcode and uid otherwise.
            attributes: by name; default values are dropped.

        Raises:
            HloError: operands or attributes do not fit the operation.
        """
        info = OPCODES.get(opcode)
        if info is None:
            raise HloError(unknown_opcode(opcode))
        defaults = {spec.name: spec.default for spec in info.specs}
        unknown = next((key for key in attributes if key not in defaults), None)
        if unknown is not None:
            raise HloError(f"{opcode} has no attribute {unknown!r}; it has {', '.join(defaults) or 'none'}")
        kept = {key: value for key, value in attributes.items() if value != defaults[key]}
        inferred = infer_shape(opcode, [o.shape for o in operands], kept, called, shape)
        if shape is not None and shape.logical is not inferred:
            raise HloError(f"{opcode} gives {inferred}, not the stated {shape}")
        return self._append(opcode, shape or inferred, operands, kept, called, None, name)

    def _append(
        self,
        opcode: str,
        shape: Shape,
        operands: Sequence[HloInstruction],
        attributes: dict[str, Attribute],
        called: Sequence[HloComputation] = (),
        literal: Literal | None = None,
        name: str = "",
    ) -> HloInstruction:
        stranger = next((o for o in operands if o.computation is not self.computation), None)
        if stranger is not None:
            raise HloError(f"operand {stranger.name} of {opcode} is not in {self.computation.name}")
        instruction = HloInstruction(opcode, shape.filled(), operands, attributes, called, literal, name)
        instruction.metadata = self.metadata
        self.added(self.computation.add(instruction))
        return instruction

    def added(self, instruction: HloInstruction) -> None:
        """Called with each instruction that was added."""

    def build(self, root: HloInstruction) -> HloComputation:
        self.computation.set_root(root)
        return self.computation

    # -- values without operands ----------------------------------------------------------------------

    def parameter(self, shape: Shape, name: str = "") -> HloInstruction:
        number, self._parameters = self._parameters, self._parameters + 1
        return self._append("parameter", shape, (), {"parameter_number": number}, name=name)

    def constant(self, value: object, dtype: str | None = None) -> HloInstruction:
        """A constant array or scalar; `dtype` is needed for Python numbers."""
        return self.literal(freeze(value, dtype))

    def literal(self, literal: Literal) -> HloInstruction:
        """A constant, which may be a tuple."""
        return self._append("constant", literal_shape(literal), (), {}, literal=literal)

    def iota(self, dtype: str, dims: Sequence[int], dimension: int = 0) -> HloInstruction:
        """0, 1, 2 ... along one dim."""
        return self.add("iota", shape=array(dtype, dims), iota_dimension=dimension)

    def full(self, value: float, dtype: str, dims: Sequence[int]) -> HloInstruction:
        return self.broadcast(self.constant(np.asarray(value).astype(DTYPES[dtype].numpy)), dims)

    # -- elementwise --------------------------------------------------------------------------------

    def convert(self, value: HloInstruction, dtype: str) -> HloInstruction:
        """Other elements; the value itself if it has them already."""
        if value.shape.dtype == dtype:
            return value
        return self.add("convert", value, shape=array(dtype, value.shape.dims))

    def compare(self, a: HloInstruction, b: HloInstruction, direction: str) -> HloInstruction:
        """Booleans: `a direction b`."""
        return self.add("compare", a, b, direction=direction)

    def select(self, predicate: HloInstruction, a: HloInstruction, b: HloInstruction) -> HloInstruction:
        """`a` where the predicate holds, else `b`."""
        return self.add("select", predicate, a, b)

    # -- data movement ------------------------------------------------------------------------------

    def broadcast(
        self, value: HloInstruction, dims: Sequence[int], dimensions: Sequence[int] | None = None
    ) -> HloInstruction:
        """Larger dims; operand dim i is result dim `dimensions[i]`.  A scalar is repeated everywhere."""
        if dimensions is None:
            dimensions = () if value.shape.is_scalar else range(value.shape.rank)
        return self.add(
            "broadcast",
            value,
            shape=array(value.shape.dtype, dims),
            dimensions=tuple(int(d) for d in dimensions),
        )

    def reshape(self, value: HloInstruction, dims: Sequence[int]) -> HloInstruction:
        """The same elements in other dims; the value itself if it has them."""
        if value.shape.dims == tuple(dims):
            return value
        return self.add("reshape", value, shape=array(value.shape.dtype, dims))

    def transpose(self, value: HloInstruction, permutation: Sequence[int]) -> HloInstruction:
        """Result dim i is operand dim `permutation[i]`; the value itself if nothing moves."""
        if tuple(permutation) == tuple(range(value.shape.rank)):
            return value
        return self.add("transpose", value, dimensions=tuple(permutation))

    def slice(
        self,
        value: HloInstruction,
        starts: Sequence[int],
        limits: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> HloInstruction:
        steps = tuple(strides) if strides is not None else (1,) * len(starts)
        return self.add("slice", value, slice=SliceDims(tuple(starts), tuple(limits), steps))

    def concatenate(self, values: Sequence[HloInstruction], dimension: int) -> HloInstruction:
        """One after the other along a dim; the value itself if there is one."""
        if len(values) == 1:
            return values[0]
        return self.add("concatenate", *values, dimensions=(dimension,))

    def pad(self, value: HloInstruction, filler: HloInstruction, padding: Sequence[PadDim]) -> HloInstruction:
        return self.add("pad", value, filler, padding=tuple(padding))

    def dynamic_slice(
        self, value: HloInstruction, starts: Sequence[HloInstruction], sizes: Sequence[int]
    ) -> HloInstruction:
        """A part of fixed size at run-time starts, which are moved inside the array."""
        return self.add("dynamic-slice", value, *starts, slice_sizes=tuple(sizes))

    def dynamic_update_slice(
        self, value: HloInstruction, update: HloInstruction, starts: Sequence[HloInstruction]
    ) -> HloInstruction:
        return self.add("dynamic-update-slice", value, update, *starts)

    # -- products, reductions, indices ------------------------------------------------------------------

    def dot(
        self, a: HloInstruction, b: HloInstruction, dims: DotDims | None = None, dtype: str | None = None
    ) -> HloInstruction:
        """A matrix product; by default the last dim of `a` with the first of `b`."""
        dims = dims or DotDims((a.shape.rank - 1,), (0,))
        stated = None
        if dtype is not None:
            plain = infer_shape("dot", [a.shape, b.shape.with_dtype(a.shape.dtype)], {"dot_dims": dims})
            stated = array(dtype, plain.dims)
        return self.add("dot", a, b, shape=stated, dot_dims=dims)

    def reduce(
        self,
        values: Sequence[HloInstruction],
        inits: Sequence[HloInstruction],
        dimensions: Sequence[int],
        computation: HloComputation,
    ) -> HloInstruction:
        return self.add("reduce", *values, *inits, dimensions=tuple(dimensions), called=(computation,))

    def gather(
        self, value: HloInstruction, indices: HloInstruction, dims: GatherDims, sizes: Sequence[int]
    ) -> HloInstruction:
        return self.add("gather", value, indices, gather_dims=dims, slice_sizes=tuple(sizes))

    # -- tuples and control flow --------------------------------------------------------------------

    def tuple(self, values: Sequence[HloInstruction]) -> HloInstruction:
        return self.add("tuple", *values)

    def element(self, value: HloInstruction, index: int) -> HloInstruction:
        """One element of a tuple; an operand of the tuple op, if there is one."""
        if value.opcode == "tuple":
            return value.operands[index]
        return self.add("get-tuple-element", value, index=index)

    def call(self, computation: HloComputation, arguments: Sequence[HloInstruction]) -> HloInstruction:
        return self.add("call", *arguments, called=(computation,))

    def loop(self, condition: HloComputation, body: HloComputation, init: HloInstruction) -> HloInstruction:
        """`while condition(state): state = body(state)`."""
        return self.add("while", init, called=(condition, body))


def scalar_computation(module: HloModule, opcode: str, dtype: str) -> HloComputation:
    """`(a, b) -> opcode(a, b)` on scalars: the reducer of sums, maxima and the like."""
    builder = HloBuilder.create(module, f"{opcode}_{dtype}")
    a, b = builder.parameter(array(dtype)), builder.parameter(array(dtype))
    return builder.build(builder.add(opcode, a, b))
