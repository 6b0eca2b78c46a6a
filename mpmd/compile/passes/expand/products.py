"""Products in the one form that kernels know, with the algorithm they request, convolutions among them.

Kernels sum over one run of elements of two matrices.  Dims are arranged for that, a convolution becomes the
product of its patches, and extents that fill vectors badly are padded where that costs less than it gives.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, Ints, PadDim, WindowDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder, is_identity, reducer
from mpmd.cost.device import HOST, Device


class ConvolutionToDot(ComputationPass):
    """Multiplies matrices where a convolution's windows do not overlap: patch embeddings, 1 x 1 convolutions.

    convolution(image: [b,h,w,f], kernel: [2,2,f,o]), stride=2x2
      -> dot(reshape(image: [b,h/2,2,w/2,2,f]), kernel), contracting the window and f

    The gradient of its kernel too, whose windows have elements that are as far apart as there are windows:
    the image is reshaped to `[window, place]` instead of `[place, window]`.

    Requires: no schedule.
    Ensures: no convolution of an image as it lies, without groups, is left whose windows do not overlap.
    Cost: linear.
    Source: each element of the image belongs to one window: the patches are a reshape.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"convolution": (_as_dot_of_patches,)}, _has_no_groups)


def _has_no_groups(convolution: HloInstruction) -> bool:
    attributes = convolution.attributes
    return attributes.get("feature_group_count", 1) == attributes.get("batch_group_count", 1) == 1


def _are_adjacent(w: WindowDim) -> bool:
    """Whether each window begins where the one before ends."""
    return w.size == w.stride and w.rhs_dilation == 1


def _are_interleaved(w: WindowDim, places: int) -> bool:
    """Whether each window is the one before moved by an element, up to the second element of the first."""
    return w.stride == 1 and w.rhs_dilation == places


def _as_dot_of_patches(site: RewriteSite) -> HloInstruction | None:
    image, kernel = site.operands
    dims, window = site.at.conv_dims, site.at.window.dims
    counts = [site.shape.dims[d] for d in dims.out_spatial]
    for count, w in zip(counts, window):
        if w.pad_low or w.pad_high > 0 or w.lhs_dilation != 1 or w.reversed:
            return None
        if not (_are_adjacent(w) or _are_interleaved(w, count)):
            return None
    limits = list(image.shape.dims)
    for d, count, w in zip(dims.lhs_spatial, counts, window):
        limits[d] = count * w.size
    if tuple(limits) != image.shape.dims:
        image = site.build.slice(image, (0,) * len(limits), limits)
    split: list[int] = []
    inner: dict[int, int] = {}
    outer: dict[int, int] = {}
    for d, size in enumerate(limits):
        if d not in dims.lhs_spatial:
            outer[d] = len(split)
            split.append(size)
            continue
        place = dims.lhs_spatial.index(d)
        parts = [(outer, counts[place]), (inner, window[place].size)]
        for where, extent in parts if _are_adjacent(window[place]) else parts[::-1]:
            where[d] = len(split)
            split.append(extent)
    patches = site.build.reshape(image, split)
    contracted = (*(inner[d] for d in dims.lhs_spatial), outer[dims.lhs_feature])
    numbers = DotDims(contracted, (*dims.rhs_spatial, dims.rhs_input_feature))
    free = numbers.lhs_free(len(split))
    result = [*(split[d] for d in free), kernel.shape.dims[dims.rhs_output_feature]]
    product = site.build.add(
        "dot",
        patches,
        kernel,
        shape=array(site.shape.dtype, result),
        dot_dims=numbers,
        operand_precision=site.at.attributes.get("operand_precision"),
    )
    meaning = {outer[dims.lhs_batch]: dims.out_batch}
    meaning |= {outer[d]: o for d, o in zip(dims.lhs_spatial, dims.out_spatial)}
    to = [*(meaning[d] for d in free), dims.out_feature]
    return site.build.transpose(product, [to.index(d) for d in range(site.shape.rank)])


_FACTORS = {"dot_bf16_bf16_f32": "bf16", "dot_f16_f16_f32": "f16"}
"""Algorithm → the type in which it multiplies."""


class DotAlgorithmRewriter(ComputationPass):
    """Rounds the factors of a product to the type in which its algorithm multiplies.

    dot(x: f32, y: bf16), algorithm=dot_bf16_bf16_f32  ->  dot(convert(x): bf16, y), the sums in f32

    The gradient of a product of bf16 with sums in f32 has a factor in f32.  Multiplied as it is, it needs
    units for f32 where there are those for bf16.

    Requires: no schedule.
    Ensures: the factors of products with such an algorithm have its type.
    Cost: linear.
    Source: XLA's dot algorithm rewriter for GPUs; StableHLO's specification of `dot_general`.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"dot": (_rounded,)}, lambda i: not i.has_control_edges)


def _rounded(site: RewriteSite) -> HloInstruction | None:
    dtype = _FACTORS.get(str(site.at.attributes.get("algorithm", "")))
    if dtype is None or all(o.shape.dtype == dtype for o in site.operands):
        return None
    return site.same(*(site.build.convert(o, dtype) for o in site.operands), shape=site.shape)


class DotDecomposer(ComputationPass):
    """Brings the elements that a product sums over into one order by transposes and reshapes.

    dot(x: [k1,m,b,k2], y: [n,b,k2,k1])  ->  reshape(dot([b,m,k1*k2], [b,k1*k2,n]))

    Requires: no schedule.
    Ensures: each dot sums over neighbouring dims, in the same order in both factors: kernels read any
        strides.  Those that did not are `[batch.., m, k] x [batch.., k, n]` afterwards; m or n is missing
        if a side has no free dims.
    Cost: linear.
    Source: XLA's dot decomposer.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"dot": (_decompose,)}, _is_scattered)


def _is_scattered(dot: HloInstruction) -> bool:
    """Whether the summed dims are not neighbours, in the same order in both factors."""
    sides = (dot.dot_dims.lhs_contracting, dot.dot_dims.rhs_contracting)
    return len(dot.operands) == 2 and any(b != a + 1 for side in sides for a, b in itertools.pairwise(side))


def _decompose(site: RewriteSite) -> HloInstruction:
    a, b = site.operands
    dims = site.at.dot_dims
    free_a, free_b = dims.lhs_free(a.shape.rank), dims.rhs_free(b.shape.rank)
    batch = [a.shape.dims[d] for d in dims.lhs_batch]
    depth = math.prod(a.shape.dims[d] for d in dims.lhs_contracting)
    m = [math.prod(a.shape.dims[d] for d in free_a)] if free_a else []
    n = [math.prod(b.shape.dims[d] for d in free_b)] if free_b else []
    left = _arranged(site, a, (*dims.lhs_batch, *free_a, *dims.lhs_contracting), [*batch, *m, depth])
    right = _arranged(site, b, (*dims.rhs_batch, *dims.rhs_contracting, *free_b), [*batch, depth, *n])
    count = len(batch)
    numbers = tuple(range(count))
    product = site.same(
        left,
        right,
        shape=array(site.shape.dtype, (*batch, *m, *n)),
        dot_dims=DotDims((count + len(m),), (count,), numbers, numbers),
    )
    return site.build.reshape(product, site.shape.dims)


def _arranged(site: RewriteSite, value: HloInstruction, order: Ints, dims: list[int]) -> HloInstruction:
    return site.build.reshape(site.build.transpose(value, order), dims)


_NARROW = ("bf16", "f16")
_ROW_BYTES = 16
"""Rows that begin at multiples of it are read by wide and asynchronous copies."""
_EXTENT = 64
_MAX_GROWN = 1 / 16
"""Of a dim: more would cost what it saves."""


class DotPadding(ComputationPass):
    """Makes rows of large products begin where wide accesses can.

    dot(x[m,50257], y[50257,n])  ->  dot(pad(x)[m,50304], pad(y)[50304,n])
    dot(x[m,k], y[k,50257])      ->  slice(dot(x, pad(y)[k,50304])), [:, :50257]

    Sums get terms of zero times zero.  Rows that elementwise work makes of such a slice stay as long as it:
    where a product reads them they are zeros at the end, and reductions read their start values there.  So
    they remain one kernel, whose rows begin at wide places, too.

    Requires: no schedule.
    Ensures: no product of numbers of two bytes that takes longer than padding has rows at odd places.
    Cost: linear.
    Source: XLA's padding of products for cuBLAS.

    Attributes:
        device: whose rates say what padding costs.
    """

    device: Device = HOST

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return _Padding(computation, self.device).run()


@dataclasses.dataclass(frozen=True)
class _Side:
    """A dim of a product, not of its batch: its number in each factor and in the result, or -1."""

    left: int = -1
    right: int = -1
    result: int = -1


class _Padding:
    """The work on one computation.

    Attributes:
        longer: (value, dim) → the same with a longer dim, with anything behind its own end; None if nothing
            elementwise makes it.
        padded: (value, dim) → the same with zeros there.
        extents: of results, before they are longer.
    """

    def __init__(self, computation: HloComputation, device: Device) -> None:
        self.computation, self.device = computation, device
        self.build = TrackingBuilder(computation)
        self.longer: dict[tuple[HloInstruction, int], HloInstruction | None] = {}
        self.padded: dict[tuple[HloInstruction, int], HloInstruction] = {}
        self.extents = set[int]()

    def run(self) -> bool:
        dots, reductions = (self._all(opcode) for opcode in ("dot", "reduce"))
        changed = [self._dot(dot) for dot in dots]
        for reduction in reductions if any(changed) else ():
            self._reduce(reduction)
        return any(changed)

    def _all(self, opcode: str) -> list[HloInstruction]:
        candidates = [i for i in self.computation.post_order() if i.opcode == opcode]
        return [i for i in candidates if not i.has_control_edges]

    def _dot(self, dot: HloInstruction) -> bool:
        """Pads the dims of a product whose rows begin at odd places."""
        sides = [side for side in _sides(dot) if self._pays(dot, side)]
        a, b = dot.operands
        for side in sides:
            a = self._with_zeros(a, side.left) if side.left >= 0 else a
            b = self._with_zeros(b, side.right) if side.right >= 0 else b
        if not sides:
            return False
        results = [side.result for side in sides if side.result >= 0]
        dims = _lengthened(dot.shape.dims, *results)
        padded = self.build.like(dot, (a, b), array(dot.shape.dtype, dims))
        sliced = self.build.slice(padded, [0] * len(dims), dot.shape.dims) if results else padded
        if len(results) == 1:
            self.longer[sliced, results[0]] = padded
            self.extents.add(dot.shape.dims[results[0]])
        self.computation.replace(dot, sliced)
        return True

    def _pays(self, dot: HloInstruction, side: _Side) -> bool:
        """Whether padding a dim takes less time than a product whose rows along it begin at odd places."""
        pairs = [(v, d) for v, d in zip(dot.operands, (side.left, side.right)) if d >= 0]
        dtype, extent = pairs[0][0].shape.dtype, pairs[0][0].shape.dims[pairs[0][1]]
        if dtype not in _NARROW or extent * DTYPE_BYTES[dtype] % _ROW_BYTES == 0:
            return False
        if _multiple(extent) - extent > _MAX_GROWN * extent or not _is_innermost(dot, side):
            return False
        copied = [v for v, d in pairs if not self._is_sliced(v, d)] + ([dot] if side.result >= 0 else [])
        moved = sum(2 * DTYPE_BYTES[dtype] * math.prod(v.shape.dims) for v in copied)
        terms = math.prod(dot.operands[0].shape.dims[d] for d in dot.dot_dims.lhs_contracting)
        seconds = 2.0 * terms * math.prod(dot.shape.dims) / self.device.matmul_rate(dtype)
        return seconds > moved / self.device.bandwidth + len(copied) * self.device.start_seconds

    def _with_zeros(self, value: HloInstruction, d: int) -> HloInstruction:
        """A value with zeros behind the end of a dim."""
        if (value, d) not in self.padded:
            self.padded[value, d] = self._zeros_behind(value, d)
        return self.padded[value, d]

    def _zeros_behind(self, value: HloInstruction, d: int) -> HloInstruction:
        if value.opcode == "transpose":
            return self.build.transpose(
                self._with_zeros(value.operands[0], value.dimensions[d]), value.dimensions
            )
        zero = self.build.constant(np.zeros((), value.shape.numpy_dtype))
        longer = self._longer(value, d) if self._is_sliced(value, d) else None
        if longer is not None:
            return self._inside(longer, d, value.shape.dims[d], zero)
        sizes = zip(value.shape.dims, _lengthened(value.shape.dims, d))
        return self.build.pad(value, zero, [PadDim(0, more - size) for size, more in sizes])

    def _inside(self, longer: HloInstruction, d: int, extent: int, rest: HloInstruction) -> HloInstruction:
        dims = longer.shape.dims
        places = self.build.iota("s32", dims, d)
        inside = self.build.compare(places, self.build.full(extent, "s32", dims), "LT")
        return self.build.select(inside, longer, self.build.broadcast(rest, dims))

    def _reduce(self, reduce: HloInstruction) -> None:
        """A reduction over a longer dim reads its start value behind the end, which changes nothing."""
        if len(reduce.operands) != 2 or reduce.shape.is_tuple:
            return
        if self._reduce_others(reduce) or len(reduce.dimensions) > 1:
            return
        (value, start), (d,) = reduce.operands, reduce.dimensions
        opcode = reducer(reduce.to_apply)
        if opcode is None or not is_identity(opcode, start) or value.shape.dims[d] not in self.extents:
            return
        longer = self._longer(value, d)  # also what only compares positions: it is part of the same kernel
        if longer is not None:
            inside = self._inside(longer, d, value.shape.dims[d], start)
            self.computation.replace(reduce, self.build.like(reduce, (inside, start)))

    def _reduce_others(self, reduce: HloInstruction) -> bool:
        """A reduction over other dims than a longer one: its result is sliced instead of its operand."""
        value, start = reduce.operands
        kept = [d for d in range(value.shape.rank) if d not in reduce.dimensions]
        for k, d in enumerate(kept):
            longer = self._longer(value, d) if self._is_sliced(value, d) else None
            if longer is not None:
                dims = _lengthened(reduce.shape.dims, k)
                padded = self.build.like(reduce, (longer, start), array(reduce.shape.dtype, dims))
                sliced = self.build.slice(padded, [0] * len(dims), reduce.shape.dims)
                self.computation.replace(reduce, sliced)
                return True
        return False

    def _is_sliced(self, value: HloInstruction, d: int) -> bool:
        """Whether a value is made elementwise of a slice of a longer product."""
        waiting, seen = [value], set[HloInstruction]()
        while waiting:
            each = waiting.pop()
            if self.longer.get((each, d)) is not None:
                return True
            if each not in seen and _is_pointwise(each):
                waiting += [a for a in each.operands if a.shape.dims == each.shape.dims]
            seen.add(each)
        return False

    def _longer(self, value: HloInstruction, d: int) -> HloInstruction | None:
        if (value, d) not in self.longer:
            self.longer[value, d] = self._made_longer(value, d)
        return self.longer[value, d]

    def _made_longer(self, value: HloInstruction, d: int) -> HloInstruction | None:
        dims = _lengthened(value.shape.dims, d)
        if value.opcode == "broadcast":
            return self._longer_broadcast(value, d, dims)
        if value.opcode == "iota":
            return self.build.iota(value.shape.dtype, dims, value.iota_dimension)
        if not _is_pointwise(value):
            return None
        parts = []
        for part in value.operands:
            longer = part if part.shape.is_scalar else self._longer(part, d)
            if longer is None:
                return None
            parts.append(longer)
        return self.build.like(value, parts, array(value.shape.dtype, dims))

    def _longer_broadcast(
        self, value: HloInstruction, d: int, dims: tuple[int, ...]
    ) -> HloInstruction | None:
        (given,) = value.operands
        if d in value.dimensions:
            if given.shape.size > _MAX_GROWN * value.shape.size:
                return None  # copying it costs too much
            given = self._with_zeros(given, value.dimensions.index(d))
        return self.build.broadcast(given, dims, value.dimensions)


def _is_pointwise(value: HloInstruction) -> bool:
    return value.is_elementwise and bool(value.operands) and not value.has_control_edges


def _multiple(extent: int) -> int:
    return -(-extent // _EXTENT) * _EXTENT


def _lengthened(dims: Sequence[int], *longer: int) -> tuple[int, ...]:
    return tuple(_multiple(n) if d in longer else n for d, n in enumerate(dims))


def _sides(dot: HloInstruction) -> list[_Side]:
    dims, (a, b) = dot.dot_dims, dot.operands
    contracted = [_Side(left, right) for left, right in zip(dims.lhs_contracting, dims.rhs_contracting)]
    free = [_Side(left=d) for d in dims.lhs_free(a.shape.rank)] + [
        _Side(right=d) for d in dims.rhs_free(b.shape.rank)
    ]
    return contracted + [
        dataclasses.replace(side, result=k) for k, side in enumerate(free, len(dims.lhs_batch))
    ]


def _is_innermost(dot: HloInstruction, side: _Side) -> bool:
    """Whether rows of a factor, as it is stored, or of the result are along a dim."""
    if side.result == dot.shape.rank - 1:
        return True
    for value, d in zip(dot.operands, (side.left, side.right)):
        while value.opcode == "transpose" and d >= 0:
            value, d = value.operands[0], value.dimensions[d]
        if d >= 0 and d == value.shape.rank - 1:
            return True
    return False
