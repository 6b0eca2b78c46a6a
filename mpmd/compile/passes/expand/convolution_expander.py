"""hlo-convolution-expander."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, Ints, PadDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import inverse, is_trivial

_MIN_OF_GROUP = 2
"""Channels of a group, of the image and of the result, from which a convolution with groups is expanded."""


class ConvolutionExpander(ComputationPass):
    """Computes a convolution as one matrix product of patches with the kernel.

    convolution(image: [b,h,w,f], kernel: [3,3,f,o])
      -> dot(patches: [b,h*w,9,f], kernel: [9,f,o]), the patches joined from nine slices of the padded image

    Left to XLA's library, which is 2 to 80 times as fast there, are those with few channels, in all or in a
    group, and those of dilated images, unless the window is larger than its positions, where XLA has no
    library.

    Requires: no schedule; `hlo-convolution-to-dot` has taken those whose patches are a reshape.
    Ensures: no convolution is left that needs `most_slices` slices or fewer, but for those above.
    Cost: linear in the slices; at run time the patches take the kernel's size times the image's memory.
    Source: lowering to matrices ("im2col"), as in Chellapilla, Puri and Simard, 2006.  The slices are taken
    per element or per position of the window, whichever are fewer: gradients of kernels have large windows.

    Attributes:
        most_slices: slices up to which a convolution is expanded.
        least_channels: channels, of the image and of the result, from which one without groups is.
        without_library: expand those too that are left to XLA's library.
    """

    most_slices: int = 256
    least_channels: int = 64
    without_library: bool = False

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"convolution": (self._expand,)}, lambda i: not i.shape.dynamic)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        dims = site.at.conv_dims
        places = tuple(site.shape.dims[d] for d in dims.out_spatial)
        if is_trivial(site.at) or any(is_trivial(o) for o in site.operands):
            return site.build.full(0, site.shape.dtype, site.shape.dims)
        if not self._is_expanded(site.at, places):
            return None
        product = _product(site, _patches(site, places), _kernel(site), places)
        to = (dims.out_batch, *dims.out_spatial, dims.out_feature)
        return site.build.transpose(product, inverse(to))

    def _is_expanded(self, convolution: HloInstruction, places: Ints) -> bool:
        dims, window = convolution.conv_dims, convolution.window
        if min(math.prod(window.sizes), math.prod(places)) > self.most_slices:
            return False
        if self.without_library:
            return True
        by_place = _by_place(window.sizes, places)
        if any(w.lhs_dilation > 1 for w in window.dims):
            return by_place
        image, result = convolution.operands[0].shape.dims, convolution.shape.dims
        channels = image[dims.lhs_batch if by_place else dims.lhs_feature]  # of a gradient's image: its batch
        groups = _groups(convolution)
        if groups > 1:
            return min(channels, result[dims.out_feature]) >= groups * _MIN_OF_GROUP
        return min(channels, result[dims.out_feature]) >= self.least_channels


def _groups(convolution: HloInstruction) -> int:
    """The number of groups, of features or of the batch: no convolution has both."""
    counts = (convolution.attributes.get(f"{kind}_group_count", 1) for kind in ("feature", "batch"))
    return max(cast(int, count) for count in counts)


def _by_place(window: Ints, places: Ints) -> bool:
    """Whether patches are joined from a slice for each position of the window, not for each element of it."""
    return math.prod(places) < math.prod(window)


def _patches(site: RewriteSite, places: Ints) -> HloInstruction:
    """The elements of the window at each of its positions: `[batch, places, window, features]`."""
    build, window = site.build, site.at.window
    image = _padded(site)
    batch, features = image.shape.dims[0], image.shape.dims[-1]
    count, size = math.prod(places), math.prod(window.sizes)
    by_place = _by_place(window.sizes, places)
    outer, inner = (places, window.sizes) if by_place else (window.sizes, places)
    parts = []
    for position in np.ndindex(*outer):
        starts, limits, strides = [0], [batch], [1]
        for at, extent, w in zip(position, inner, window.dims):
            far, near = (w.stride, w.rhs_dilation) if by_place else (w.rhs_dilation, w.stride)
            starts.append(at * far)
            limits.append(at * far + (extent - 1) * near + 1)
            strides.append(near)
        part = build.slice(image, [*starts, 0], [*limits, features], [*strides, 1])
        flat = (batch, 1, size, features) if by_place else (batch, count, 1, features)
        parts.append(build.reshape(part, flat))
    return build.concatenate(parts, 1 if by_place else 2)


def _padded(site: RewriteSite) -> HloInstruction:
    """The image as `[batch, spatial.., features]`, dilated and padded."""
    build, dims = site.build, site.at.conv_dims
    image = build.transpose(site.operands[0], (dims.lhs_batch, *dims.lhs_spatial, dims.lhs_feature))
    sides = [PadDim(w.pad_low, w.pad_high, w.lhs_dilation - 1) for w in site.at.window.dims]
    if all(p == PadDim(0, 0) for p in sides):
        return image
    return build.pad(image, build.constant(0, image.shape.dtype), [PadDim(0, 0), *sides, PadDim(0, 0)])


def _kernel(site: RewriteSite) -> HloInstruction:
    """The kernel as `[window, inputs, outputs]`."""
    build, dims = site.build, site.at.conv_dims
    kernel = build.transpose(
        site.operands[1], (*dims.rhs_spatial, dims.rhs_input_feature, dims.rhs_output_feature)
    )
    turned = tuple(d for d, w in enumerate(site.at.window.dims) if w.reversed)
    if turned:
        kernel = build.add("reverse", kernel, dimensions=turned)
    rank = kernel.shape.rank
    return build.reshape(kernel, (math.prod(kernel.shape.dims[: rank - 2]), *kernel.shape.dims[rank - 2 :]))


def _product(
    site: RewriteSite, patches: HloInstruction, kernel: HloInstruction, places: Ints
) -> HloInstruction:
    """`[batch, places.., outputs]`; groups are batch dims of the product."""
    build, groups = site.build, _groups(site.at)
    batch, count, size, features = patches.shape.dims
    inputs, outputs = kernel.shape.dims[-2:]
    dims = DotDims((2, 3), (0, 1))
    made: tuple[int, ...] = (batch, count, outputs)
    if groups > 1:
        kernel = build.reshape(kernel, (size, inputs, groups, outputs // groups))
        if inputs < features:  # groups of features
            patches = build.reshape(patches, (batch, count, size, groups, inputs))
            dims = DotDims((2, 4), (0, 1), (3,), (2,))
        else:
            batch //= groups
            patches = build.reshape(patches, (groups, batch, count, size, features))
            dims = DotDims((3, 4), (0, 1), (0,), (2,))
        made = (groups, batch, count, outputs // groups)
    product = build.add(
        "dot",
        patches,
        kernel,
        shape=array(site.shape.dtype, made),
        dot_dims=dims,
        operand_precision=site.at.attributes.get("operand_precision"),
    )
    if groups > 1:
        product = build.transpose(product, (1, 2, 0, 3))
    return build.reshape(product, (batch, *places, outputs))
