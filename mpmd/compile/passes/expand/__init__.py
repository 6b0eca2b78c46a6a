"""Passes that replace operations by others that later passes and backends support."""

from __future__ import annotations

from mpmd.compile.passes.expand.argmax_rewriter import ArgmaxRewriter
from mpmd.compile.passes.expand.async_expander import AsyncExpander
from mpmd.compile.passes.expand.batch_norm_expander import BatchNormExpander
from mpmd.compile.passes.expand.bitcast_convert_expander import BitcastConvertExpander
from mpmd.compile.passes.expand.cholesky_expander import CholeskyExpander
from mpmd.compile.passes.expand.comparison_expander import ComparisonExpander
from mpmd.compile.passes.expand.complex_to_pairs import ComplexToPairs
from mpmd.compile.passes.expand.convolution_expander import ConvolutionExpander
from mpmd.compile.passes.expand.convolution_to_dot import ConvolutionToDot
from mpmd.compile.passes.expand.dot_algorithm_rewriter import DotAlgorithmRewriter
from mpmd.compile.passes.expand.dot_decomposer import DotDecomposer
from mpmd.compile.passes.expand.dot_padding import DotPadding
from mpmd.compile.passes.expand.fft_expander import FftExpander
from mpmd.compile.passes.expand.float_jitter import FloatJitter
from mpmd.compile.passes.expand.gather_simplifier import GatherSimplifier
from mpmd.compile.passes.expand.lapack_expander import LapackExpander
from mpmd.compile.passes.expand.map_inliner import MapInliner
from mpmd.compile.passes.expand.narrow_type_expander import NarrowTypeExpander
from mpmd.compile.passes.expand.reduce_precision_expander import ReducePrecisionExpander
from mpmd.compile.passes.expand.reduce_window_expander import ReduceWindowExpander
from mpmd.compile.passes.expand.reduce_window_rewriter import ReduceWindowRewriter
from mpmd.compile.passes.expand.reduction_expander import ReductionExpander
from mpmd.compile.passes.expand.rng_bit_generator_expander import RngBitGeneratorExpander
from mpmd.compile.passes.expand.scatter_simplifier import ScatterSimplifier
from mpmd.compile.passes.expand.scatter_widener import ScatterWidener
from mpmd.compile.passes.expand.select_and_scatter_expander import SelectAndScatterExpander
from mpmd.compile.passes.expand.special_function_expander import SpecialFunctionExpander
from mpmd.compile.passes.expand.stochastic_convert_expander import StochasticConvertExpander
from mpmd.compile.passes.expand.topk_decomposer import TopkDecomposer
from mpmd.compile.passes.expand.triangular_solve_expander import TriangularSolveExpander
from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
