"""hlo-convolution-to-dot."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import DotDims
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class ConvolutionToDot(ComputationPass):
    """Multiplies matrices where a convolution's windows do not overlap: patch embeddings, 1 x 1 convolutions.

    convolution(image: [b,h,w,f], kernel: [2,2,f,o]), stride=2x2
      -> dot(reshape(image: [b,h/2,2,w/2,2,f]), kernel), contracting the window and f

    Requires: no schedule.
    Ensures: no convolution is left whose windows are adjacent, without padding, dilation and groups.
    Cost: linear.
    Source: each element of the image is read by one window at most, so that the patches are a reshape.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"convolution": (_as_dot,)}, _has_patches)


def _has_patches(convolution: HloInstruction) -> bool:
    attributes = convolution.attributes
    if attributes.get("feature_group_count", 1) != 1 or attributes.get("batch_group_count", 1) != 1:
        return False
    return all(
        w.size == w.stride
        and w.pad_low == w.pad_high == 0
        and w.lhs_dilation == w.rhs_dilation == 1
        and not w.reversed
        for w in convolution.window.dims
    )


def _as_dot(site: RewriteSite) -> HloInstruction:
    image, kernel = site.operands
    dims, window = site.at.conv_dims, site.at.window.dims
    counts = [site.shape.dims[d] for d in dims.out_spatial]
    limits = list(image.shape.dims)
    for d, count, w in zip(dims.lhs_spatial, counts, window):
        limits[d] = count * w.size
    if tuple(limits) != image.shape.dims:
        image = site.build.slice(image, (0,) * len(limits), limits)
    split: list[int] = []
    inner: dict[int, int] = {}
    outer: dict[int, int] = {}
    for d, size in enumerate(limits):
        outer[d] = len(split)
        if d in dims.lhs_spatial:
            place = dims.lhs_spatial.index(d)
            split.append(counts[place])
            inner[d] = len(split)
            split.append(window[place].size)
        else:
            split.append(size)
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
