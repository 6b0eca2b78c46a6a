"""Passes that replace operations by others that later passes and backends support."""

from __future__ import annotations

from mpmd.compile.passes.expand.bit_patterns import (
    BitcastConvertExpander,
    ComparisonExpander,
    ReducePrecisionExpander,
    StochasticConvertExpander,
    TopkDecomposer,
)
from mpmd.compile.passes.expand.complex_to_pairs import ComplexToPairs
from mpmd.compile.passes.expand.float_jitter import FloatJitter
from mpmd.compile.passes.expand.functions import AsyncExpander, MapInliner, SpecialFunctionExpander
from mpmd.compile.passes.expand.indexing import GatherSimplifier, ScatterSimplifier, ScatterWidener
from mpmd.compile.passes.expand.narrow_type_expander import NarrowTypeExpander
from mpmd.compile.passes.expand.products import (
    ConvolutionToDot,
    DotAlgorithmRewriter,
    DotDecomposer,
    DotPadding,
)
from mpmd.compile.passes.expand.reductions import ArgmaxRewriter, BatchNormExpander, ReductionExpander
from mpmd.compile.passes.expand.rng_bit_generator_expander import RngBitGeneratorExpander
from mpmd.compile.passes.expand.windows import (
    ReduceWindowExpander,
    ReduceWindowRewriter,
    SelectAndScatterExpander,
)
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
