"""Convolutions as products."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, Ints, PadDim, WindowDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import inverse, is_trivial


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
    # element p of a patch meets the element of the window that is as far from its end
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


class ConvolutionToDot(ComputationPass):
    """Multiplies matrices where a convolution's windows do not overlap: patch embeddings, 1 x 1 convolutions.

    convolution(image: [b,h,w,f], kernel: [2,2,f,o]), stride=2x2
      -> dot(reshape(image: [b,h/2,2,w/2,2,f]), kernel), contracting the window and f

    The gradients of such a convolution too.  The kernel's has windows whose elements are as far apart
    as there are windows: the image is reshaped to `[window, place]` instead of `[place, window]`.  The
    image's, a transposed convolution, has each element from one place: the product of the image and the
    kernel, `[place.., window.., o]`, is transposed.

    Requires: no schedule.
    Ensures: no convolution without groups is left whose windows do not overlap.
    Cost: linear.
    Source: each element of the image, or of the result, belongs to one window: the patches are a reshape.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules = {"convolution": (_as_dot_of_patches, patches_of_dot)}
        return Rewriter(computation).run(rules, _has_no_groups)


def _has_no_groups(convolution: HloInstruction) -> bool:
    attributes = convolution.attributes
    return attributes.get("feature_group_count", 1) == attributes.get("batch_group_count", 1) == 1


def _are_adjacent(w: WindowDim) -> bool:
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
