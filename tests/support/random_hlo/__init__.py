"""Random HLO modules with arguments: single operations of all opcodes and types, graphs of exact operations.

A case's outputs are deterministic functions of its inputs up to rounding: inexact operations feed outputs
alone, so that a last-bit difference never decides a comparison, an index or a branch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.random_hlo import (
    control,
    elementwise,
    graphs,
    indexed,
    movement,
    narrow,
    products,
    reductions,
    squares,
    structure,
)
from tests.support.random_hlo.comparison import differences
from tests.support.random_hlo.draft import Case, Draft

__all__ = ["FAMILIES", "NATIVE_FAMILIES", "Case", "differences", "random_case"]

FAMILIES: dict[str, Callable[[Draft], Case]] = {
    "unary": elementwise.unary,
    "binary": elementwise.binary,
    "complex": elementwise.complex_values,
    "compare": elementwise.compare_select,
    "clamp": elementwise.clamp,
    "convert": elementwise.convert,
    "bitcast-convert": elementwise.bitcast_convert,
    "reduce-precision": elementwise.reduce_precision,
    "movement": movement.movement,
    "dot": products.dot,
    "convolution": products.convolution,
    "factorisation": products.factorisation,
    "fft": products.fourier,
    "gather": indexed.gather,
    "scatter": indexed.scatter,
    "reduce": reductions.reduce,
    "argmax": reductions.argmax,
    "reduce-window": reductions.reduce_window,
    "select-and-scatter": reductions.select_and_scatter,
    "sort": reductions.sort,
    "topk": reductions.topk,
    "batch-norm": reductions.batch_norm,
    "while": control.loop,
    "conditional": control.conditional,
    "call": control.call_and_map,
    "rng-bit-generator": control.bits,
    "graph": graphs.graph,
    "several": reductions.several,
    "structure": structure.structure,
    "narrow": narrow.narrow,
    "squares": squares.squares,
}

OF_LIBRARIES = ("convolution", "factorisation", "fft")
"""Families that no kernel computes, or only in part."""
NATIVE_FAMILIES = tuple(family for family in FAMILIES if family not in OF_LIBRARIES)


def random_case(family: str, seed: int) -> Case:
    """The case of a family for a seed: always the same."""
    draft = Draft(np.random.default_rng([seed, list(FAMILIES).index(family)]), f"{family}#{seed}", seed)
    return FAMILIES[family](draft)
