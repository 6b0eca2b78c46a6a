"""Expanders: operations that become others."""

from __future__ import annotations

from tests.preconditions import Precondition

_EXPAND = "mpmd/compile/passes/expand"
_LEFT = "tests/unit/compile/passes/test_left_alone.py::test_a_pass_leaves_it_alone"
_DIRECTED = "tests/property/test_directed_rewrites.py::test_an_expander_keeps_the_numbers"
_SAYS = "tests/property/test_hlo_passes.py::test_an_expander_says_what_the_operation_means"
_NARROW = "tests/unit/compile/passes/test_narrow.py"
_NATIVE = "tests/differential/test_native_operations.py"
_ORDER = "within rounding: XLA leaves the order of sums open, too"


def _row(place: str, holds: str, code: str, dropped: str, left: str, exact: str = "exact") -> Precondition:
    """A precondition that a program shows which the pass must leave alone."""
    return Precondition(f"{_EXPAND}/{place}", holds, code, dropped, f"{_LEFT}[{left}]", exact)


def _directed(
    place: str, holds: str, code: str, dropped: str, name: str, exact: str = "exact"
) -> Precondition:
    return Precondition(f"{_EXPAND}/{place}", holds, code, dropped, f"{_DIRECTED}[{name}]", exact)


def _tested(place: str, holds: str, code: str, dropped: str, test: str, exact: str = "exact") -> Precondition:
    return Precondition(f"{_EXPAND}/{place}", holds, code, dropped, test, exact)


_REDUCTIONS = (
    _row(
        "argmax_rewriter.py:_is_better",
        "of equal values the smaller place counts",
        "place == min(k for",
        "place >= min(k for",
        "the last of equal values",
        "within rounding: of zeros of both signs, which are equal, the value may be the other one",
    ),
    _row(
        "argmax_rewriter.py:_is",
        "a NaN is larger and smaller than all numbers",
        '*([np.nan] if value.info.kind == "float" else [])',
        "",
        "a maximum that is no NaN's",
    ),
    _row(
        "argmax_rewriter.py:_only_compares",
        "values are not compared in total order, where zeros and NaN differ",
        "total or ",
        "",
        "a maximum in total order",
    ),
    _row(
        "argmax_rewriter.py:_only_compares",
        "the reducer only compares: it is known by its results for each order",
        "instruction.opcode not in _ORDERS",
        "False",
        "the square of a maximum",
    ),
    _directed(
        "argmax_rewriter.py:_rewrite",
        "the place of a NaN is found, which equals nothing",
        'x.shape.info.kind == "float"',
        "False",
        "places of maxima",
    ),
    _row(
        "reduce_window_rewriter.py:ReduceWindowRewriter._scan",
        "the initial value is neutral: it fills what moves in",
        "not is_identity(opcode, init) or ",
        "",
        "a running sum from one",
        _ORDER,
    ),
    _row(
        "reduce_window_rewriter.py:ReduceWindowRewriter._scan",
        "the operation is associative",
        "reducer(site.at.to_apply) if count == 1",
        "site.at.to_apply.root.opcode if count == 1",
        "a running double",
    ),
    _row(
        "reduce_window_rewriter.py:ReduceWindowRewriter._scan",
        "windows cover all elements before: the result has the dims of the operand",
        " or x.shape.logical is not site.shape.logical",
        "",
        "windows that are not all before",
    ),
    _row(
        "reduce_window_rewriter.py:_running_dim",
        "they are padded on one side",
        " or sides not in ((n - 1, 0), (0, n - 1))",
        "",
        "windows that reach to both sides",
    ),
    _row(
        "reduce_window_rewriter.py:_running_dim",
        "windows are at each element, which are not spread, and have no holes",
        "w.stride != 1 or w.lhs_dilation != 1 or w.rhs_dilation != 1",
        "False",
        "windows at every other place of spread elements",
    ),
    _row(
        "reduce_window_rewriter.py:_running_dim",
        "one dim is summed along",
        "found is not None or ",
        "",
        "running sums along two dims",
    ),
    _directed(
        "reduction_expander.py:_joined",
        "neighbours are joined in their order: the computation need only be associative",
        "[*even, *odd]",
        "[*odd, *even]",
        "reductions of pairs",
        _ORDER,
    ),
    _directed(
        "reduction_expander.py:_joined",
        "elements that wait for a neighbour come last",
        "[*last, *waiting]",
        "[*waiting, *last]",
        "reductions of pairs",
        _ORDER,
    ),
    _directed(
        "reduction_expander.py:_expand",
        "the initial value takes part, first",
        "[*begin, *values]",
        "[*values, *begin]",
        "reductions of pairs",
    ),
    _directed(
        "reduce_window_expander.py:_Windowed._joined",
        "padding is ignored: it takes part in no combination",
        "both[k], a[k]",
        "both[k], both[k]",
        "windows of pairs",
        _ORDER,
    ),
    _directed(
        "reduce_window_expander.py:_Windowed.reduce",
        "a part of the window begins where those before it end",
        "done * window.rhs_dilation",
        "0",
        "windows of pairs",
    ),
    _directed(
        "reduce_window_expander.py:_expand",
        "a window over nothing but padding is the initial value",
        "windowed.there is not None",
        "False",
        "windows of pairs",
    ),
    _row(
        "select_and_scatter_expander.py:SelectAndScatterExpander._expand",
        "updates are added",
        ' or reducer(site.at.called[1]) != "add"',
        "",
        "a largest gradient of pooling",
        _ORDER,
    ),
    _row(
        "select_and_scatter_expander.py:SelectAndScatterExpander._expand",
        "windows have no holes",
        "w.lhs_dilation == w.rhs_dilation == 1",
        "w.lhs_dilation == 1",
        "the gradient of pooling with holes",
    ),
    _row(
        "select_and_scatter_expander.py:SelectAndScatterExpander._expand",
        "nothing is cut from the sides",
        " and min(w.pad_low, w.pad_high) >= 0",
        "",
        "the gradient of pooling of a part",
    ),
    _directed(
        "select_and_scatter_expander.py:_winner",
        "padding wins nowhere",
        'build.full(True, "pred", counts) if inside is None else _seen(site, inside, offset)',
        'build.full(True, "pred", counts)',
        "gradients of pooling",
    ),
    _directed(
        "topk_decomposer.py:_order",
        "floats are in total order: -0 before 0, NaN at the ends",
        '"TOTALORDER" if key.info.kind == "float" else None',
        "None",
        "largest elements",
    ),
    _directed(
        "topk_decomposer.py:_decompose",
        "equal values keep their order",
        "build.iota(site.shape.elements[1].dtype, x.shape.dims, dim)",
        'build.add("reverse", build.iota(site.shape.elements[1].dtype, x.shape.dims, dim), dimensions=(dim,))',
        "largest elements",
    ),
)
_INDICES = (
    _directed(
        "index_vectors.py:_wide_enough",
        "the type of the indices counts the positions of a batch",
        'largest < 1 << (info.bits - (info.kind == "signed"))',
        "True",
        "gathers",
    ),
    _tested(
        "index_vectors.py:as_list",
        "positions follow in the order of the batch's dims",
        "dim - (dim > vector_dim)",
        "0 * dim",
        f"{_SAYS}[hlo-scatter-simplifier]",
    ),
    _directed(
        "scatter_simplifier.py:_normal",
        "updates keep the order of their index vectors",
        "site.build.transpose(update, order)",
        'site.build.add("reverse", site.build.transpose(update, order), dimensions=(0,))',
        "scatters",
    ),
    _tested(
        "gather_simplifier.py:_normal",
        "dims of the slices go back to their places",
        "to.index(d) for d in range(site.shape.rank)",
        "to[d] for d in range(site.shape.rank)",
        f"{_SAYS}[hlo-gather-simplifier]",
    ),
)
_TYPES = (
    _tested(
        "narrow_type_expander.py:_right",
        "zeros follow a logical shift, signs an arithmetic one, of the narrow type",
        "_as(site, value, sign)",
        "value",
        f"{_NARROW}::test_two_numbers[s4-shift-right-logical]",
    ),
    _tested(
        "narrow_type_expander.py:_high_half",
        "the high half is that of the narrow type",
        "site.shape.info.bits",
        "16",
        f"{_NARROW}::test_two_numbers[s4-mulhi]",
    ),
    _tested(
        "narrow_type_expander.py:_count",
        "leading zeros are counted from the top of the narrow type",
        "32 - bits",
        "0 * bits",
        f"{_NARROW}::test_one_number[s4-count-leading-zeros]",
    ),
    _tested(
        "narrow_type_expander.py:_count",
        "the sign is a bit like others",
        '_as(site, site.operands[0], "u")',
        "site.operands[0]",
        f"{_NARROW}::test_one_number[s4-popcnt]",
    ),
    _tested(
        "narrow_type_expander.py:_wide_step",
        "each step of a computation is rounded or wrapped as in the narrow type",
        "i.shape.dtype in _WIDE and i.opcode not in _EXACT",
        "False",
        f"{_NARROW}::test_a_computation_rounds_each_step[s4]",
        "within rounding: sums of floats are kept wide to their end, as XLA keeps them",
    ),
    _tested(
        "narrow_type_expander.py:_product",
        "a product of truths is a truth: a sum of ones wraps in no type that has no end",
        "_is_of_truths(site.at)",
        "False",
        f"{_NARROW}::test_products_of_truths_are_truths",
    ),
    _row(
        "comparison_expander.py:_expand",
        "floats are compared in total order",
        'site.at.attributes.get("comparison_type") != "TOTALORDER" or ',
        "",
        "a comparison of numbers",
    ),
    _directed(
        "comparison_expander.py:_ordered",
        "the bits of negative numbers are in the opposite order",
        'build.add("and", sign, mask)',
        "build.full(0, dtype, x.shape.dims)",
        "total order",
    ),
    _row(
        "bitcast_convert_expander.py:_expand",
        "elements are not pairs",
        ' or "complex" in (old.kind, new.kind)',
        "",
        "bits of complex numbers",
    ),
    _directed(
        "bitcast_convert_expander.py:_joined",
        "the least significant part comes first",
        "i * narrow",
        "(width // narrow - i) * narrow",
        "bits",
    ),
    _row(
        "reduce_precision_expander.py:_expand",
        "the layout of the bits is known",
        "dtype not in _LAYOUT",
        "False",
        "rounding of eight bits",
    ),
    _directed(
        "reduce_precision_expander.py:_expand",
        "NaN stays NaN: rounding its bits may give infinity",
        "build.select(is_nan, x, made) if wanted[1] else made",
        "made",
        "rounding",
    ),
    _directed(
        "reduce_precision_expander.py:_Rounding.rounded",
        "ties go to even",
        'build.add("add", odd, half)',
        "half",
        "rounding",
    ),
    _directed(
        "reduce_precision_expander.py:_Rounding.rounded",
        "what is too large is infinite",
        "build.select(over, self.infinite(), build.select(under, sign, bits))",
        "build.select(under, sign, bits)",
        "rounding",
    ),
    _directed(
        "reduce_precision_expander.py:_Rounding.rounded",
        "what would be denormal is zero of its sign",
        "build.select(under, sign, bits)",
        "bits",
        "rounding",
    ),
    _row(
        "stochastic_convert_expander.py:_expand",
        "the target is an integer",
        "not site.shape.info.is_integral or ",
        "",
        "random rounding to floats",
    ),
    _row(
        "dot_algorithm_rewriter.py:_rounded",
        "the algorithm rounds the factors",
        '_FACTORS.get(str(site.at.attributes.get("algorithm", "")))',
        '"bf16"',
        "a product by another algorithm",
        "within rounding: as the algorithm asks for",
    ),
)
_CONVOLUTIONS = (
    _row(
        "convolution_to_dot.py:_as_dot_of_patches",
        "windows do not overlap",
        "not (_are_adjacent(w) or _are_interleaved(w, count))",
        "False",
        "windows of a convolution that overlap",
        _ORDER,
    ),
    _row(
        "convolution_to_dot.py:_as_dot_of_patches",
        "nothing is padded in front",
        "w.pad_low or ",
        "",
        "a convolution of padding",
    ),
    _row(
        "convolution_to_dot.py:_as_dot_of_patches",
        "nothing is padded behind",
        "w.pad_high > 0 or ",
        "",
        "a convolution of padding behind",
    ),
    _row(
        "convolution_to_dot.py:_as_dot_of_patches",
        "elements of the image are not spread",
        "w.lhs_dilation != 1 or ",
        "",
        "a convolution of spread elements",
    ),
    _row(
        "convolution_to_dot.py:_as_dot_of_patches",
        "the kernel is not reversed",
        " or w.reversed",
        "",
        "a convolution backwards",
    ),
    _row(
        "convolution_to_dot.py:_has_no_groups",
        "features are in one group",
        'attributes.get("feature_group_count", 1) == ',
        "",
        "a convolution of groups",
    ),
    _row(
        "convolution_to_dot.py:_has_no_groups",
        "the batch is in one group",
        'attributes.get("batch_group_count", 1) == 1',
        "1",
        "a convolution of groups of the batch",
    ),
    _row(
        "transposed_convolution.py:patches_of_dot",
        "patches of the result do not overlap",
        "w.lhs_dilation != w.size or ",
        "",
        "a transposed convolution whose patches overlap",
        "within rounding: each result is one sum; zeros between elements, and with them 0 * inf, are left out",
    ),
    _row(
        "transposed_convolution.py:patches_of_dot",
        "the result begins with the first patch",
        "w.pad_low != w.size - 1 or ",
        "",
        "a transposed convolution that begins inside",
    ),
    _row(
        "transposed_convolution.py:patches_of_dot",
        "it does not end inside of one",
        "rest < 0",
        "False",
        "a transposed convolution that ends inside",
    ),
    _row(
        "transposed_convolution.py:patches_of_dot",
        "windows have no holes",
        " or w.rhs_dilation != 1",
        "",
        "a transposed convolution with holes",
    ),
    _row(
        "transposed_convolution.py:patches_of_dot",
        "every element of a patch is a result",
        "w.stride != 1 or ",
        "",
        "a transposed convolution with a stride",
    ),
    _directed(
        "transposed_convolution.py:patches_of_dot",
        "an element is reached by that of the window which is as far from its end",
        "if turned:",
        "if False:",
        "windows of a convolution",
    ),
    _row(
        "convolution_expander.py:ConvolutionExpander._is_fast",
        "there are no groups",
        'attributes.get("feature_group_count", 1) != 1',
        "False",
        "patches of groups",
        _ORDER,
    ),
    _directed(
        "dot_decomposer.py:_decompose",
        "both factors have their summed dims in the same order",
        "(*dims.rhs_batch, *dims.rhs_contracting, *free_b)",
        "(*dims.rhs_batch, *sorted(dims.rhs_contracting), *free_b)",
        "products",
        _ORDER,
    ),
)
_REST = (
    _row(
        "map_inliner.py:_inline",
        "the computation is elementwise work on scalars",
        "not is_inlinable(body) or ",
        "",
        "a map by a reduction",
    ),
    _row(
        "async_expander.py:AsyncExpander.rewrite_computation",
        "nothing else reads the start",
        " and all(len(i.users) == 1 for i in chain)",
        "",
        "a start that others read",
    ),
    _tested(
        "async_expander.py:_join",
        "the start goes: an effect is done once",
        "    for instruction in chain:\n        computation.remove(instruction)\n",
        "",
        "tests/unit/compile/passes/test_effects.py::test_an_effect_is_done_once[an asynchronous call]",
    ),
    _directed(
        "complex_to_pairs.py:_compare",
        "numbers are equal if both parts are",
        '"and" if site.at.direction == "EQ" else "or"',
        '"or"',
        "complex numbers",
    ),
    _tested(
        "complex_to_pairs.py:_is_separate",
        "a computation does the same to each part: a sum, not a product",
        'reducer(site.at.to_apply) == "add"',
        "reducer(site.at.to_apply) is not None",
        f"{_NATIVE}::test_complex_numbers[products of all]",
    ),
    _tested(
        "complex_functions.py:divide",
        "a divisor whose parts are both 0, or both infinite, has no ratio",
        'ratio.is_("NE", ratio) & most.is_("EQ", most)',
        'ratio.is_("EQ", ratio) & most.is_("NE", most)',
        f"{_NATIVE}::test_complex_numbers[division by zero and infinity]",
        "within rounding: numbers of 64 bits are divided in f64, where nothing overflows",
    ),
    _tested(
        "complex_functions.py:exponential",
        "the exponential is finite where its parts are",
        'root * angle.of("cosine") * root',
        'root * root * angle.of("cosine")',
        f"{_NATIVE}::test_complex_numbers[functions of huge numbers]",
        "within rounding: the square of a root errs by an ulp more than an exponential",
    ),
    _tested(
        "complex_functions.py:_distance",
        "squares do not overflow",
        "_wide(*x)",
        "x",
        f"{_NATIVE}::test_complex_numbers[functions of huge numbers]",
        "within rounding: rounded once, from f64",
    ),
    _tested(
        "complex_functions.py:hyperbolic_tangent",
        "an angle counts only where the exponential has not decayed to 0",
        "endless.choose(b.full(0.0), ",
        "(endless & endless).choose(second, ",
        f"{_NATIVE}::test_complex_numbers[tangents of infinities]",
        "within rounding: by a decaying exponential, which neither overflows nor cancels",
    ),
    _tested(
        "fft_expander.py:_roots",
        "quarter turns are exact",
        "np.where(rest == 0, _QUARTERS[quarter], np.exp(2j * np.pi / n * power))",
        "np.exp(2j * np.pi / n * power)",
        f"{_NATIVE}::test_fourier_transforms[signs of zeros]",
        "within rounding: sums of up to 64 terms, in f32 where a library's are",
    ),
    _tested(
        "fft_expander.py:_sums",
        "what is multiplied by 0 is left out: 0 * inf is NaN",
        "not factor.all()",
        "False",
        f"{_NATIVE}::test_fourier_transforms[beside infinity]",
    ),
    _tested(
        "fft_expander.py:_roots",
        "the middle of half a spectrum counts twice, its ends once",
        "roots[1 : (n + 1) // 2] *= 2",
        "roots[1:] *= 2",
        f"{_NATIVE}::test_fourier_transforms[irfft]",
    ),
    _row(
        "fft_expander.py:FftExpander._expand",
        "rows are short",
        " or max(lengths) > self.most",
        "",
        "a long transform",
    ),
    _tested(
        "cholesky_expander.py:_by_columns",
        "pivots are positive: 0 is none",
        '"GT"), square, nan)',
        '"GE"), square, nan)',
        f"{_NATIVE}::test_matrices[cholesky of singular matrices]",
        "within rounding: the factorisation is backward stable, as LAPACK's",
    ),
    _tested(
        "triangular_solve_expander.py:_by_rows",
        "the other half of the matrix is not read: it may be NaN",
        'body.select(compared(body, places, "LT", i), row, body.full(0, dtype, (count, n)))',
        "row",
        f"{_NATIVE}::test_matrices[triangular systems whose inverses overflow]",
        "within rounding: substitution is backward stable, as LAPACK's",
    ),
    _row(
        "lapack_expander.py:LapackExpander._expand",
        "matrices are small",
        "most is not None and max(site.operands[0].shape.dims[-2:]) > most",
        "False",
        "factors of a large matrix",
    ),
    _row(
        "lapack_expander.py:LapackExpander._expand",
        "the call is one of those that are known",
        "FUNCTIONS.get(found[1]) if found else None",
        "FUNCTIONS.get(found[1], _cholesky) if found else None",
        "another call of the library",
    ),
)

ROWS = (*_REDUCTIONS, *_INDICES, *_TYPES, *_CONVOLUTIONS, *_REST)

ALWAYS = {
    f"{_EXPAND}/batch_norm_expander.py:BatchNormExpander": "the formulas are those of the operation, in f32 or f64",
    f"{_EXPAND}/rng_bit_generator_expander.py:RngBitGeneratorExpander": "bits are those of the named algorithm",
    f"{_EXPAND}/special_function_expander.py:SpecialFunctionExpander": "formulas hold for all real numbers",
    f"{_EXPAND}/float_jitter.py:FloatJitter": "it changes numbers on purpose, where a flag asks for it",
}
