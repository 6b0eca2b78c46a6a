"""Lowering of data movement and of constants.

Lowering of gather and scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import PadDim
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.site import LoweringSite, Rule, plain


def constant(site: LoweringSite) -> HloInstruction:
    value = site.required("value")
    if value.size > 1 and not any(value.strides):
        scalar = site.build.constant(value.reshape(-1)[0])
        return site.build.broadcast(scalar, value.shape)
    return site.build.constant(value)


def broadcast_in_dim(site: LoweringSite) -> HloInstruction:
    """HLO's broadcast does not stretch dims of size 1: those are dropped first."""
    (value,), dims = site.operands, site.required("broadcast_dimensions")
    kept = [i for i, d in enumerate(dims) if value.shape.dims[i] == site.shape.dims[d]]
    if len(kept) < value.shape.rank:
        value = site.build.reshape(value, [value.shape.dims[i] for i in kept])
    return site.build.broadcast(value, site.shape.dims, [dims[i] for i in kept])


def concatenate(site: LoweringSite) -> HloInstruction:
    """One after the other."""
    return site.build.add("concatenate", *site.operands, dimensions=(site.required("dimension"),))


def pad(site: LoweringSite) -> HloInstruction:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    sides = zip(*(site.required(name) for name in names))
    return site.build.pad(site.operands[0], site.operands[1], [PadDim(*side) for side in sides])


def slice_(site: LoweringSite) -> HloInstruction:
    bounds = (site.required(name) for name in ("start_indices", "limit_indices", "strides"))
    return site.build.slice(site.operands[0], *bounds)


def dynamic_slice(site: LoweringSite) -> HloInstruction:
    return site.build.dynamic_slice(site.operands[0], site.operands[1:], site.required("slice_sizes"))


def dynamic_update_slice(site: LoweringSite) -> HloInstruction:
    value, update, *starts = site.operands
    return site.build.dynamic_update_slice(value, update, starts)


def dimension_size(site: LoweringSite) -> HloInstruction:
    return site.build.constant(site.operands[0].shape.dims[site.required("dimension")], "s32")


def gather(site: LoweringSite) -> HloInstruction:
    return site.build.add(
        "gather",
        *site.operands,
        gather_dims=site.required("dimension_numbers"),
        slice_sizes=site.required("slice_sizes"),
        indices_are_sorted=site.attribute("indices_are_sorted", False),
    )


def scatter(site: LoweringSite) -> Sequence[HloInstruction]:
    made = site.build.add(
        "scatter",
        *site.operands,
        scatter_dims=site.required("scatter_dimension_numbers"),
        indices_are_sorted=site.attribute("indices_are_sorted", False),
        unique_indices=site.attribute("unique_indices", False),
        called=(site.region(),),
    )
    return site.parts(made)


RULES: dict[str, Rule] = {
    "sdy.constant": constant,
    "stablehlo.broadcast_in_dim": broadcast_in_dim,
    "stablehlo.concatenate": concatenate,
    "stablehlo.constant": constant,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    "stablehlo.get_dimension_size": dimension_size,
    "stablehlo.iota": plain("iota", shaped=True, iota_dimension="iota_dimension"),
    "stablehlo.pad": pad,
    "stablehlo.reshape": plain("reshape", shaped=True),
    "stablehlo.reverse": plain("reverse", dimensions="dimensions"),
    "stablehlo.slice": slice_,
    "stablehlo.transpose": plain("transpose", dimensions="permutation"),
    "stablehlo.gather": gather,
    "stablehlo.scatter": scatter,
}
