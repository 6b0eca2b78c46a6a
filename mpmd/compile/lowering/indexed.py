"""Lowering of gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.site import LoweringSite, Rule


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


RULES: dict[str, Rule] = {"stablehlo.gather": gather, "stablehlo.scatter": scatter}
