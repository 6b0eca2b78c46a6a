"""Lowering of reductions, windows, sorts and batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.products import window_dims
from mpmd.compile.lowering.site import LoweringSite, Rule


def reduce(site: LoweringSite) -> Sequence[HloInstruction]:
    made = site.build.add(
        "reduce", *site.operands, dimensions=site.required("dimensions"), called=(site.region(),)
    )
    return site.parts(made)


def reduce_window(site: LoweringSite) -> Sequence[HloInstruction]:
    window = window_dims(
        site.required("window_dimensions"),
        site.attribute("window_strides"),
        site.attribute("padding"),
        site.attribute("base_dilations"),
        site.attribute("window_dilations"),
    )
    made = site.build.add(
        "reduce-window", *site.operands, window=window if window.dims else None, called=(site.region(),)
    )
    return site.parts(made)


def select_and_scatter(site: LoweringSite) -> HloInstruction:
    """Each source element goes to the preferred element of its window."""
    window = window_dims(
        site.attribute("window_dimensions") or (1,) * site.shape.rank,
        site.attribute("window_strides"),
        site.attribute("padding"),
    )
    return site.build.add(
        "select-and-scatter",
        *site.operands,
        window=window if window.dims else None,
        called=(site.region(0), site.region(1)),
    )


def sort(site: LoweringSite) -> Sequence[HloInstruction]:
    """Several arrays in the order of a comparator."""
    dim = site.attribute("dimension", -1)
    made = site.build.add(
        "sort",
        *site.operands,
        dimensions=(dim % site.operands[0].shape.rank,),
        is_stable=site.attribute("is_stable", False),
        called=(site.region(),),
    )
    return site.parts(made)


def batch_norm(site: LoweringSite) -> Sequence[HloInstruction]:
    made = site.build.add(
        site.name.partition(".")[2].replace("_", "-"),
        *site.operands,
        epsilon=site.required("epsilon"),
        feature_index=site.required("feature_index"),
    )
    return site.parts(made)


RULES: dict[str, Rule] = {
    "stablehlo.batch_norm_grad": batch_norm,
    "stablehlo.batch_norm_inference": batch_norm,
    "stablehlo.batch_norm_training": batch_norm,
    "stablehlo.reduce": reduce,
    "stablehlo.reduce_window": reduce_window,
    "stablehlo.select_and_scatter": select_and_scatter,
    "stablehlo.sort": sort,
}
