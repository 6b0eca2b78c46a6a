"""Expanders of types, functions, calls and factorisations."""

from __future__ import annotations

from tests.preconditions import RowsOf

_EXPAND = "mpmd/compile/passes/expand"
_LEFT = "tests/unit/compile/passes/test_left_alone.py::test_a_pass_leaves_it_alone"
_DIRECTED = "tests/property/test_directed_rewrites.py::test_an_expander_keeps_the_numbers"
_SAYS = "tests/property/test_hlo_passes.py::test_an_expander_says_what_the_operation_means"
_NARROW = "tests/unit/compile/passes/test_narrow.py"
_NATIVE = "tests/differential/test_native_operations.py"
_ORDER = "within rounding: XLA leaves the order of sums open, too"
_row = RowsOf(_EXPAND, _LEFT)
_directed = RowsOf(_EXPAND, _DIRECTED)
_tested = RowsOf(_EXPAND)
_PADDED = "tests/unit/compile/passes/test_dot_padding.py"

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
        "the high half is the narrow type's",
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
        "bit_patterns.py:_expand_comparison",
        "floats are compared in total order",
        'site.at.attributes.get("comparison_type") != "TOTALORDER" or ',
        "",
        "a comparison of numbers",
    ),
    _directed(
        "bit_patterns.py:_ordered",
        "the bits of negative numbers are in the opposite order",
        'build.add("and", sign, mask)',
        "build.full(0, dtype, x.shape.dims)",
        "total order",
    ),
    _row(
        "bit_patterns.py:_expand_bitcast",
        "elements are not pairs",
        ' or "complex" in (old.kind, new.kind)',
        "",
        "bits of complex numbers",
    ),
    _directed(
        "bit_patterns.py:_joined",
        "the least significant part comes first",
        "i * narrow",
        "(width // narrow - i) * narrow",
        "bits",
    ),
    _row(
        "bit_patterns.py:_expand_precision",
        "the layout of the bits is known",
        "dtype not in _LAYOUT",
        "False",
        "rounding of eight bits",
    ),
    _directed(
        "bit_patterns.py:_expand_precision",
        "NaN stays NaN: rounding its bits may give infinity",
        "build.select(is_nan, x, result) if wanted[1] else result",
        "result",
        "rounding",
    ),
    _directed(
        "bit_patterns.py:_Rounding.rounded",
        "ties go to even",
        'build.add("add", odd, half)',
        "half",
        "rounding",
    ),
    _directed(
        "bit_patterns.py:_Rounding.rounded",
        "too large numbers become infinite",
        "build.select(over, self.infinite(), build.select(under, sign, bits))",
        "build.select(under, sign, bits)",
        "rounding",
    ),
    _directed(
        "bit_patterns.py:_Rounding.rounded",
        "what would be denormal is zero of its sign",
        "build.select(under, sign, bits)",
        "bits",
        "rounding",
    ),
    _row(
        "bit_patterns.py:_expand_stochastic",
        "the target is an integer",
        "not site.shape.info.is_integral or ",
        "",
        "random rounding to floats",
    ),
    _row(
        "indexing.py:_widened",
        "updates may meet at a place",
        ' or site.at.attributes.get("unique_indices")',
        "",
        "updates at different places",
    ),
    _row(
        "indexing.py:_widened",
        "updates have two bytes",
        "site.shape.dtype not in _NARROW",
        "False",
        "updates of four bytes",
    ),
    _row(
        "indexing.py:_widened",
        "the device combines f32 so in one step",
        "opcode not in _COMBINED",
        "opcode is None",
        "updates that are multiplied",
    ),
    _row(
        "products.py:_Padding._all",
        "a product has no place in an order of its own",
        "[i for i in candidates if not i.has_control_edges]",
        "candidates",
        "a large product that has an order",
    ),
    *(
        _tested(f"products.py:_Padding.{function}", says, text, mutant, f"{_PADDED}::{test}")
        for function, says, text, mutant, test in (
            (
                "_pays",
                "numbers have two bytes",
                "dtype not in _NARROW",
                "False",
                "test_what_pays[sizes0-True]",
            ),
            (
                "_pays",
                "rows begin at odd places",
                "extent * DTYPE_BYTES[dtype] % _ROW_BYTES == 0",
                "False",
                "test_what_pays[sizes3-False]",
            ),
            (
                "_pays",
                "a dim grows by little",
                "_multiple(extent) - extent > _MAX_GROWN * extent",
                "False",
                "test_what_pays[sizes6-False]",
            ),
            (
                "_pays",
                "rows are along the dim",
                "not _is_innermost(dot, side)",
                "False",
                "test_what_pays[sizes5-False]",
            ),
            (
                "_zeros_behind",
                "a product reads zeros behind the end: what is there else may be no number",
                "return self._inside(longer, d, value.shape.dims[d], zero)",
                "return longer",
                "test_numbers_stay_and_every_product_has_even_rows[None]",
            ),
            (
                "_reduce",
                "the start value changes nothing",
                "not is_identity(opcode, start)",
                "False",
                "test_sums_that_start_with_a_number_read_it_once",
            ),
            (
                "_reduce",
                "a reduction reads start values behind the end",
                "(inside, start)",
                "(longer, start)",
                "test_numbers_stay_and_every_product_has_even_rows[None]",
            ),
        )
    ),
    _row(
        "products.py:_rounded",
        "the algorithm rounds the factors",
        '_FACTORS.get(str(site.at.attributes.get("algorithm", "")))',
        '"bf16"',
        "a product by another algorithm",
        "within rounding: as the algorithm says",
    ),
)
_REST = (
    _row(
        "functions.py:_inline",
        "the computation is elementwise work on scalars",
        "not is_inlinable(body) or ",
        "",
        "a map by a reduction",
    ),
    _row(
        "functions.py:AsyncExpander.rewrite_computation",
        "nothing else reads the start",
        " and all(len(i.users) == 1 for i in chain)",
        "",
        "a start that others read",
    ),
    _tested(
        "functions.py:_join",
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
)

ROWS = (*_TYPES, *_REST)

ALWAYS = {
    f"{_EXPAND}/reductions.py:BatchNormExpander": "formulas are the operation's, in f32 or f64",
    f"{_EXPAND}/rng_bit_generator_expander.py:RngBitGeneratorExpander": "bits are the named algorithm's",
    f"{_EXPAND}/functions.py:SpecialFunctionExpander": "formulas hold for all real numbers",
    f"{_EXPAND}/float_jitter.py:FloatJitter": "it changes numbers on purpose, if a flag says so",
}
