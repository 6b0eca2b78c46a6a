"""Arithmetic of native code: rounding, special values, and the kernels for special forms."""

from __future__ import annotations

from tests.preconditions import Precondition

_CPU = "mpmd/compile/backends/native_cpu"
_EMIT, _MATH = f"{_CPU}/kernels", f"{_CPU}/math"
_UNIT = "tests/unit/compile/backends/native_cpu"
_ONE = f"{_UNIT}/test_one_value_one_number.py"
_ENDS = f"{_UNIT}/test_ends_of_functions.py"
_EXTREMES = f"{_UNIT}/kernels/test_extremes.py"
_OPERATIONS = f"{_UNIT}/kernels/test_operations.py"
_VECTOR = "tests/property/test_vector_math.py"
_SPECIAL = "tests/property/test_native_hlo.py::test_special_values_and_shapes"
_DISCRETE = "tests/unit/compile/passes/fusion/test_rounding_of_what_is_discrete.py"
_BUCKETS = f"{_DISCRETE}::test_what_is_discrete_is_that_of_jax_operation_by_operation"
_NARROW = "tests/unit/compile/kernels/test_narrow_types.py"
_KEEP = "mpmd/compile/passes/fusion/keep_rounding.py"
_ROUNDING_TEXT = "tests/text/test_text.py::test_file[hlo/fusion/keep-rounding-0]"
_SMALL = "within rounding: bf16 stays nearer to the exact value, as XLA's excess precision does"

_ROUNDING = (
    Precondition(
        "mpmd/compile/llvm/llvm_arithmetic.py:Arithmetic.binary",
        "a product and a sum are not joined: whether LLVM joins them depends on other users of the product",
        '"{opcode} {a.type}'[1:],
        "{opcode} {'contract ' if opcode[0] == 'f' else ''}{a.type}",
        f"{_ONE}::test_every_row_and_column_has_its_maximum[shape0]",
    ),
    Precondition(
        f"{_MATH}/elementary.py:exp",
        "scalars take the table that registers take",
        "if has_tables(b):",
        'if has_tables(b) and x.type == "<16 x float>":',
        f"{_ONE}::test_a_value_of_a_row_is_that_of_its_elements[exponential]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:emit_operation",
        "f16, and bf16 that is not widened, is rounded after each operation that is not exact",
        "result if op in EXACT else round_to(f, result, dtype)",
        "result",
        f"{_ONE}::test_f16_is_rounded_after_each_operation",
    ),
    Precondition(
        "mpmd/compile/kernels/precision.py:_is_smooth",
        "an operation that may change much with its operand reads a rounded one",
        'OPERATIONS[node.op].result == "same" and node.op not in ABRUPT',
        'OPERATIONS[node.op].result == "same"',
        f"{_DISCRETE}::test_an_abrupt_operation_reads_what_is_stored",
        _SMALL,
    ),
    Precondition(
        "mpmd/compile/kernels/precision.py:_Widening.rounded",
        "a stored value has its own type",
        "self.build.convert(self._wide[number], NARROW_TYPE)",
        "self._wide[number]",
        f"{_DISCRETE}::test_smooth_chains_stay_more_exact_than_their_type",
        _SMALL,
    ),
    Precondition(
        f"{_KEEP}:KeepRounding.rewrite",
        "the chain behind a discrete value is rounded at each step, in all kernels that compute it",
        "_is_inexact(value) and not",
        "False and not",
        f"{_BUCKETS}[int8]",
    ),
    Precondition(
        f"{_KEEP}:is_discrete",
        "a conversion to integers or to fewer than 16 bits makes buckets",
        'instruction.shape.info.kind != "float" or instruction.shape.dtype in NARROW',
        "False",
        f"{_BUCKETS}[truncated]",
    ),
    Precondition(
        f"{_KEEP}:is_discrete",
        "floats of 8 bits are buckets, too",
        " or instruction.shape.dtype in NARROW",
        "",
        f"{_BUCKETS}[float8]",
    ),
    Precondition(
        f"{_KEEP}:is_discrete",
        "a comparison decides by the last bit",
        '"compare", ',
        "",
        f"{_BUCKETS}[comparison]",
    ),
    Precondition(
        f"{_KEEP}:is_discrete",
        "the order of a sort is decided by the last bit",
        ', "sort")',
        ")",
        f"{_BUCKETS}[order]",
    ),
    Precondition(
        f"{_KEEP}:is_discrete",
        "an extreme is compared with its operands, perhaps in another fragment",
        'not in ("add", "multiply")',
        "is None",
        f"{_DISCRETE}::test_the_maximum_of_a_fragment_is_found_in_another_one",
    ),
    Precondition(
        f"{_KEEP}:_sources",
        "chains go on through the state of loops",
        "yield from ((instruction.operands[0], index), (instruction.while_body.root, index))",
        "yield from ()",
        _ROUNDING_TEXT,
    ),
    Precondition(
        f"{_KEEP}:_is_rounded_anyway",
        "every user rounds the value by itself",
        "not value.is_root and all(",
        "any(",
        _ROUNDING_TEXT,
    ),
)

_SPECIAL_VALUES = (
    Precondition(
        f"{_EMIT}/operations.py:extreme",
        "the instruction that orders zeros leaves NaN out, so NaN is put back",
        'f.select(f.compare("uno", a, b), f.add(a, b), extreme_number(f, op, a, b))',
        "extreme_number(f, op, a, b)",
        f"{_EXTREMES}::test_of_two_arrays_and_of_a_constant[maximum-f32]",
    ),
    Precondition(
        f"{_EMIT}/operations.py",
        "the larger of two zeros is the positive one",
        '"maximum": 0b0101',
        '"maximum": 0b0001',
        f"{_EXTREMES}::test_of_two_arrays_and_of_a_constant[maximum-f32]",
    ),
    Precondition(
        f"{_EMIT}/partials.py:Accumulators.finish",
        "a NaN that a reduction left out is its result",
        "total = with_nan(f, values[self.masks[number]], total)",
        "pass",
        f"{_EXTREMES}::test_of_rows_and_columns_with_one_special_value_anywhere[17-max-f32]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:nan_among",
        "of an odd number of registers the last one is looked at, too",
        "[*values[1::2], values[-1]]",
        "values[1::2]",
        f"{_EXTREMES}::test_of_rows_and_columns_with_one_special_value_anywhere[17-max-f32]",
    ),
    Precondition(
        f"{_EMIT}/partials.py:Accumulators.add",
        "lanes beyond the end of a row have the neutral element",
        "if part.mask is not None:",
        "if False:",
        f"{_EXTREMES}::test_of_rows_and_columns_with_one_special_value_anywhere[7-max-f32]",
    ),
    Precondition(
        "mpmd/compile/kernels/evaluate.py:_keys",
        "the meaning of an extreme orders zeros and keeps NaN",
        "op not in _EXTREMES or",
        "True or",
        f"{_EXTREMES}::test_the_meaning_of_plans_is_the_same[maximum-f32]",
    ),
    Precondition(
        f"{_MATH}/elementary.py",
        "beyond its limit tanh is exactly one",
        "_TANH_ONE = 9.0109215",
        "_TANH_ONE = 9.02",
        f"{_VECTOR}::test_far_from_zero_it_is_one[tanh-host]",
    ),
    Precondition(
        f"{_MATH}/elementary.py",
        "beyond its limit erf is exactly one",
        "_ERF_ONE = 3.9192019",
        "_ERF_ONE = 3.93",
        f"{_VECTOR}::test_far_from_zero_it_is_one[erf-host]",
    ),
    Precondition(
        f"{_MATH}/elementary.py:_odd_fraction",
        "the rounded fraction is at most one",
        "clamp_keeping_nan(b, quotient, -1.0, 1.0)",
        "quotient",
        f"{_VECTOR}::test_far_from_zero_it_is_one[tanh-host]",
    ),
    Precondition(
        f"{_MATH}/lanes.py:small_as_itself",
        "denormals are kept in threads that flush them",
        'b.select(b.compare("oeq", x, like(x, 0.0)), x, result)',
        "result",
        f"{_ENDS}::test_odd_functions_keep_denormals",
    ),
    Precondition(
        f"{_MATH}/lanes.py:clamp_keeping_nan",
        "a limit keeps NaN: the instruction returns its second operand then",
        "b.larger_number(like(x, low), b.smaller_number(like(x, high), x))",
        "b.larger_number(b.smaller_number(x, like(x, high)), like(x, low))",
        f"{_VECTOR}::test_unary_f32_within_its_bound[tanh-host]",
    ),
    Precondition(
        f"{_MATH}/elementary.py:_edges",
        "logarithms are NaN below their pole",
        'b.compare("uge", x, pole)',
        'b.compare("ueq", x, x)',
        f"{_VECTOR}::test_unary_f32_within_its_bound[log-host]",
    ),
    Precondition(
        f"{_MATH}/elementary.py:log",
        "denormals have no exponent to split off",
        "b.select(tiny, b.mul(x, like(x, 2.0**23)), x)",
        "x",
        f"{_VECTOR}::test_unary_f32_within_its_bound[log-host]",
    ),
    Precondition(
        f"{_MATH}/elementary.py",
        "the reduction by parts of π/2 is exact up to its limit only",
        "_MAX_REDUCED = 71000.0",
        "_MAX_REDUCED = 4e38",
        f"{_VECTOR}::test_unary_f32_within_its_bound[sin-host]",
    ),
    Precondition(
        f"{_MATH}/elementary.py:pow",
        "a power of one, or to zero, is one even of NaN",
        "b.select(always, one, result)",
        "result",
        f"{_VECTOR}::test_pow_f32[host]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_divide",
        "an integer divided by zero has all bits set",
        "f.select(by_zero, constant(-1, a.type), quotient)",
        "quotient",
        f"{_SPECIAL}[divide of s32 wraps]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_divide",
        "the smallest integer divided by -1 wraps",
        'f.select(f.compare("eq", b, constant(-1, b.type)), f.neg(a), quotient)',
        "quotient",
        f"{_SPECIAL}[divide of s32 wraps]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_remainder",
        "the remainder by zero is the dividend",
        "f.select(by_zero, a, rest)",
        "rest",
        f"{_SPECIAL}[remainder of s32 wraps]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_shift",
        "a shift by the width or more moves every bit out",
        "f.select(inside, shifted, constant(0, a.type))",
        "shifted",
        f"{_SPECIAL}[shift-left by any distance]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_sign",
        "the sign of NaN is NaN",
        '"ueq"',
        '"oeq"',
        f"{_SPECIAL}[sign of special floats]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_bounded",
        "NaN becomes zero",
        'f.select(f.compare("uno", a, a), constant(0.0, a.type), a)',
        "a",
        f"{_OPERATIONS}::test_floats_at_the_bounds_of_integers[f32]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_bounded",
        "the largest integer is not a float: numbers beyond are chosen by themselves",
        "if top != high:",
        "if False:",
        f"{_OPERATIONS}::test_floats_at_the_bounds_of_integers[f32]",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_nearest_away",
        "the number below one half is added: a half would carry the number below it to one",
        "0.49999997",
        "0.5",
        f"{_ENDS}::test_halves_are_rounded_away_from_zero",
    ),
    Precondition(
        f"{_EMIT}/operations.py:_compare",
        "NaN differs from everything",
        '"une" if direction == "ne" else "o" + direction',
        '"o" + direction',
        f"{_SPECIAL}[compare NE]",
    ),
)

_NARROW_VALUES = (
    Precondition(
        f"{_EMIT}/operations.py:_to_narrow",
        "f64 is rounded to odd before f32 is rounded",
        'to_odd(f, a) if source == "f64" else _convert(f, a, source, "f32")',
        '_convert(f, a, source, "f32")',
        f"{_NARROW}::test_wide_values_are_rounded_once[f64]",
    ),
    Precondition(
        f"{_CPU}/storage.py:_rounded",
        "an overflow becomes the format's value for it",
        "f.select(over, constant(form.beyond, type_), result)",
        "result",
        f"{_NARROW}::test_wide_values_are_rounded_once[f32]",
    ),
    Precondition(
        f"{_CPU}/storage.py:_rounded",
        "NaN is the format's",
        "f.select(is_nan, constant(form.nan, type_), result)",
        "result",
        f"{_NARROW}::test_wide_values_are_rounded_once[f32]",
    ),
    Precondition(
        f"{_CPU}/storage.py:_rounded",
        "denormals are rounded where they are",
        'f.select(f.compare("ult", magnitude, smallest), tiny, normal)',
        "normal",
        f"{_NARROW}::test_wide_values_are_rounded_once[f32]",
    ),
    Precondition(
        f"{_CPU}/storage.py:_float_bits",
        "denormals of narrow floats have no hidden bit",
        'f.select(f.compare("ult", magnitude, constant(1 << form.mantissa, type_)), tiny, normal)',
        "normal",
        f"{_NARROW}::test_every_value_converts_as_the_evaluator_says[f8e5m2]",
    ),
    Precondition(
        f"{_CPU}/storage.py:widened",
        "the unused bits of a byte may be anything",
        "f.ashr(f.shl(raw, 8 - info.bits), 8 - info.bits)",
        "raw",
        f"{_NARROW}::test_every_value_converts_as_the_evaluator_says[s4]",
    ),
    Precondition(
        f"{_CPU}/storage.py:_kept",
        "the high bits of a stored byte are zero",
        "f.and_(raw, constant((1 << DTYPES[dtype].bits) - 1, raw.type))",
        "raw",
        f"{_NARROW}::test_the_high_bits_of_a_byte_are_zero[s4]",
    ),
)

_FORMS = (
    Precondition(
        f"{_CPU}/steps.py:as_reduction",
        "the result is contiguous",
        "plan.b.column == plan.c.column == 1 and plan.n > 1",
        "plan.b.column == 1 and plan.n > 1",
        f"{_UNIT}/test_thin_products.py::test_which_products_are_reductions",
    ),
    Precondition(
        f"{_CPU}/steps.py:as_reduction",
        "there are terms to add",
        "plan.m and plan.n and plan.k",
        "plan.m and plan.n",
        f"{_UNIT}/test_thin_products.py::test_which_products_are_reductions",
    ),
    Precondition(
        f"{_CPU}/gemm/thin.py:thin_form",
        "both factors are contiguous along K",
        "long.step != 1 or few.step != 1",
        "False",
        f"{_UNIT}/test_thin_products.py::test_which_products_have_no_tiles",
    ),
    Precondition(
        f"{_EMIT}/loop.py:PlanEpilogue.check",
        "the epilogue reads each sum where it is made",
        "node.operand == self.sums and node.index != dense",
        "False",
        f"{_UNIT}/kernels/test_epilogue.py::test_epilogues_that_do_not_fit_are_refused",
    ),
    Precondition(
        f"{_EMIT}/scatter.py:pieces_apart",
        "rows of the result start no nearer than they are long",
        "others and pitch < plan.extents[last]",
        "False",
        f"{_UNIT}/kernels/test_scatter.py::test_rows_are_added_in_order_whoever_adds_them",
    ),
    Precondition(
        f"{_EMIT}/loop.py:meets_itself",
        "two points that write one place are in order",
        "s.index.values() or s.combine",
        "s.combine",
        f"{_UNIT}/kernels/test_computed_places.py::test_rows_are_scattered[30-100--True-f32-near]",
    ),
    Precondition(
        f"{_EMIT}/plan_kernel.py:streamed_operands",
        "a result that the kernel reads is not streamed",
        "number not in read and ",
        "",
        f"{_UNIT}/kernels/test_together.py::test_which_results_go_past_the_caches",
    ),
    Precondition(
        f"{_EMIT}/partials.py:finish_columns",
        "the last vector of a row ends where the row ends",
        "if plan.extents[last] % lanes:",
        "if False:",
        f"{_UNIT}/kernels/test_tails.py::test_narrow_results_end_where_they_end",
    ),
    Precondition(
        f"{_EMIT}/partials.py:Partials.clear",
        "partial results begin with the neutral element of their reduction",
        "identity(node, self.lanes)",
        "constant(0.0, identity(node, self.lanes).type)",
        f"{_EXTREMES}::test_of_columns_in_a_pass_over_rows",
    ),
)

ROWS = (*_ROUNDING, *_SPECIAL_VALUES, *_NARROW_VALUES, *_FORMS)

ALWAYS = {
    f"{_EMIT}/row.py:plan_passes": "a value is one number, whether it is kept or computed again",
    f"{_EMIT}/plan_kernels.py:across_rows": "a plan without reductions has no order of its points",
    f"{_EMIT}/loop.py:evaluate": "values without effects, in any order after their arguments",
    f"{_EMIT}/loop.py:vectors_at_once": "how many vectors are computed side by side changes no lane",
    f"{_CPU}/storage.py:narrow": "a value widened from a narrower one is that one, without rounding",
    "mpmd/compile/llvm/squares.py:transpose": "lanes move, whatever they hold",
}
