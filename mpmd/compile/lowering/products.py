"""Lowering of products, and of operations over windows or whole dims: reductions, sorts, batch norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpmd.compile.hlo.attributes import Verbatim, Window, WindowDim
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.site import LoweringSite, Rule, plain


def _precision(site: LoweringSite) -> tuple[str, ...] | None:
    """`operand_precision`, left out where it is the default for all operands."""
    given = tuple(p.lower() for p in site.attribute("precision_config") or ())
    return given if any(p != "default" for p in given) else None


def _algorithm(site: LoweringSite) -> Verbatim | None:
    parts: dict[str, str] | None = site.attribute("algorithm")
    if parts is None:
        return None
    types = [parts[f"{side}_type"] for side in ("lhs_precision", "rhs_precision", "accumulation")]
    steps = int(parts.get("num_primitive_operations", "1"))
    return Verbatim("dot_" + "_".join(types) + (f"_x{steps}" if steps > 1 else ""))


def dot_general(site: LoweringSite) -> HloInstruction:
    return site.build.add(
        "dot",
        *site.operands,
        shape=site.shape,
        dot_dims=site.required("dot_dimension_numbers"),
        operand_precision=_precision(site),
        algorithm=_algorithm(site),
    )


def window_dims(
    sizes: Any,
    strides: Any,
    padding: Any,
    lhs: Any = None,
    rhs: Any = None,
    flipped: Any = None,
) -> Window:
    """A window from StableHLO's lists, each of which but the sizes may be None."""
    rank = len(sizes)
    ones = (1,) * rank
    pairs = padding.reshape(-1, 2).tolist() if padding is not None else [(0, 0)] * rank
    columns = zip(sizes, strides or ones, pairs, lhs or ones, rhs or ones, flipped or (False,) * rank)
    return Window(
        tuple(WindowDim(size, step, low, high, a, b, bool(f)) for size, step, (low, high), a, b, f in columns)
    )


def convolution(site: LoweringSite) -> HloInstruction:
    dims = site.required("dimension_numbers")
    kernel = site.operands[1].shape
    window = window_dims(
        [kernel.dims[d] for d in dims.rhs_spatial],
        site.attribute("window_strides"),
        site.attribute("padding"),
        site.attribute("lhs_dilation"),
        site.attribute("rhs_dilation"),
        site.attribute("window_reversal"),
    )
    return site.build.add(
        "convolution",
        *site.operands,
        shape=site.shape,
        window=window if window.dims else None,
        conv_dims=dims,
        feature_group_count=site.attribute("feature_group_count", 1),
        batch_group_count=site.attribute("batch_group_count", 1),
        operand_precision=_precision(site),
    )


def cholesky(site: LoweringSite) -> HloInstruction:
    return site.build.add("cholesky", site.operands[0], lower=site.attribute("lower", False))


def reduce(site: LoweringSite) -> Sequence[HloInstruction]:
    reduced = site.build.add(
        "reduce", *site.operands, dimensions=site.required("dimensions"), called=(site.region(),)
    )
    return site.parts(reduced)


def reduce_window(site: LoweringSite) -> Sequence[HloInstruction]:
    window = window_dims(
        site.required("window_dimensions"),
        site.attribute("window_strides"),
        site.attribute("padding"),
        site.attribute("base_dilations"),
        site.attribute("window_dilations"),
    )
    reduced = site.build.add(
        "reduce-window", *site.operands, window=window if window.dims else None, called=(site.region(),)
    )
    return site.parts(reduced)


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
    ordered = site.build.add(
        "sort",
        *site.operands,
        dimensions=(dim % site.operands[0].shape.rank,),
        is_stable=site.attribute("is_stable", False),
        called=(site.region(),),
    )
    return site.parts(ordered)


def batch_norm(site: LoweringSite) -> Sequence[HloInstruction]:
    normalised = site.build.add(
        site.name.partition(".")[2].replace("_", "-"),
        *site.operands,
        epsilon=site.required("epsilon"),
        feature_index=site.required("feature_index"),
    )
    return site.parts(normalised)


RULES: dict[str, Rule] = {
    "stablehlo.cholesky": cholesky,
    "stablehlo.convolution": convolution,
    "stablehlo.dot_general": dot_general,
    "stablehlo.fft": plain("fft", fft_type="fft_type", fft_length="fft_length"),
    "stablehlo.triangular_solve": plain(
        "triangular-solve",
        left_side="left_side",
        lower="lower",
        unit_diagonal="unit_diagonal",
        transpose_a="transpose_a",
    ),
    "stablehlo.batch_norm_grad": batch_norm,
    "stablehlo.batch_norm_inference": batch_norm,
    "stablehlo.batch_norm_training": batch_norm,
    "stablehlo.reduce": reduce,
    "stablehlo.reduce_window": reduce_window,
    "stablehlo.select_and_scatter": select_and_scatter,
    "stablehlo.sort": sort,
}
