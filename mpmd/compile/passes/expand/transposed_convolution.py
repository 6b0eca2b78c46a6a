"""Transposed convolutions whose patches do not overlap: each result is of one place of the image."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import DotDims, PadDim
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.rewriter import RewriteSite


def patches_of_dot(site: RewriteSite) -> HloInstruction | None:
    """The product of the image and the kernel, `[place.., window.., outputs]`, transposed.

    None for a convolution whose results are sums over several places.
    """
    image, kernel = site.operands
    dims, window = site.at.conv_dims, site.at.window.dims
    sizes = [image.shape.dims[d] for d in dims.lhs_spatial]
    behind = [
        site.shape.dims[d] - size * w.size for d, size, w in zip(dims.out_spatial, sizes, window)
    ]  # what no window reaches
    for rest, w in zip(behind, window):
        if w.lhs_dilation != w.size or w.pad_low != w.size - 1 or w.stride != 1 or w.rhs_dilation != 1:
            return None
        if rest < 0:
            return None
    build = site.build
    # the element p of a patch is reached by that of the window which is as far from its end
    turned = tuple(d for d, w in zip(dims.rhs_spatial, window) if w.size > 1 and not w.reversed)
    if turned:
        kernel = build.add("reverse", kernel, dimensions=turned)
    numbers = DotDims((dims.lhs_feature,), (dims.rhs_input_feature,))
    left, right = numbers.lhs_free(image.shape.rank), numbers.rhs_free(kernel.shape.rank)
    result = [*(image.shape.dims[d] for d in left), *(kernel.shape.dims[d] for d in right)]
    made = build.add(
        "dot",
        image,
        kernel,
        shape=array(site.shape.dtype, result),
        dot_dims=numbers,
        operand_precision=site.at.attributes.get("operand_precision"),
    )
    order: dict[int, tuple[int, ...]] = {
        dims.out_batch: (left.index(dims.lhs_batch),),
        dims.out_feature: (len(left) + right.index(dims.rhs_output_feature),),
    }
    for d, at, element in zip(dims.out_spatial, dims.lhs_spatial, dims.rhs_spatial):
        order[d] = left.index(at), len(left) + right.index(element)
    made = build.transpose(made, [d for out in range(site.shape.rank) for d in order[out]])
    rests = dict(zip(dims.out_spatial, behind))
    made = build.reshape(made, [extent - rests.get(d, 0) for d, extent in enumerate(site.shape.dims)])
    if not any(behind):
        return made
    edges = [PadDim(0, rests.get(d, 0)) for d in range(site.shape.rank)]
    return build.pad(made, build.constant(0, made.shape.dtype), edges)
