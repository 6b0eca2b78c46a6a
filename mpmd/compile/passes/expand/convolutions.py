"""Convolutions as products."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import DotDims, WindowDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


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
    made = site.build.add(
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
    return site.build.transpose(made, [to.index(d) for d in range(site.shape.rank)])
