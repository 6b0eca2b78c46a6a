"""Attention, its masks, and sorts."""

from __future__ import annotations

from tests.preconditions import Precondition

_MASKING = "mpmd/compile/kernels/masking.py"
_PLANNING = "mpmd/compile/kernels/planner"
_STITCHING = "mpmd/compile/passes/fusion/attention_search.py"
_GROUPED = "tests/unit/compile/passes/fusion/test_attention_stitching.py"
_CPU = "mpmd/compile/backends/native_cpu"
_MASKS = "tests/unit/compile/kernels/test_masking.py"
_ORDERS = "tests/unit/compile/kernels/planner/test_comparators.py"
_ATTENTION = "tests/unit/compile/backends/native_cpu/attention/test_attention.py"
_POISON = "tests/unit/compile/backends/native_cpu/test_poison.py"
_SELECTION = "tests/unit/compile/backends/native_cpu/kernels/test_selection.py"

_TERMS = "mpmd/compile/passes/fusion/attention_stitching.py"
_OF_ROWS = "tests/unit/compile/passes/fusion/test_row_terms.py"
_PRECISION = "mpmd/compile/kernels/precision.py"
_ROUNDED = "tests/unit/compile/kernels/test_narrow_sums.py"
_CANCELLATION = "mpmd/compile/passes/fusion/keep_rounding.py"
_CANCELS = "tests/unit/compile/passes/fusion/test_rounding_of_what_cancels.py"
_ZERO = f"{_CANCELS}::test_what_cancels_is_zero"

_LOOKED_AT = "within rounding: a masked zero times what lies behind the mask is +0, whatever that is"


def _masking(name: str, holds: str, code: str, dropped: str, test: str, exact: str = "exact") -> Precondition:
    return Precondition(f"{_MASKING}:{name}", holds, code, dropped, f"{_MASKS}::{test}", exact)


_POSITIONS = (
    _masking(
        "_side",
        "a comparison orders a query's place and a key's",
        'direction not in ("lt", "le", "gt", "ge")',
        "False",
        "test_other_comparisons_hide_nothing_behind_a_query[eq]",
    ),
    _masking(
        "_side",
        "both places take steps of one",
        "(query, key) == (1, -1)",
        "key == -1",
        "test_places_that_do_not_keep_step_are_no_triangle",
    ),
    _masking(
        "_side",
        "equal places are on the side that the direction says",
        'constant -= direction in ("gt", "lt")',
        "pass",
        "test_a_comparison_of_positions_is_a_triangle[before]",
    ),
    _masking(
        "_affine",
        "places follow from the query and the key alone",
        "atom.number >= rank - 2",
        "True",
        "test_places_that_change_with_the_batch_are_no_triangle",
    ),
    _masking(
        "_is_exact",
        "the integer type holds every place and every sum of places: none wraps",
        "int(limits.min) <= low and high <= int(limits.max)",
        "True",
        "test_positions_that_wrap_or_are_rounded_are_no_triangle[u8]",
    ),
    _masking(
        "_is_exact",
        "the floating type holds every place exactly",
        "-exact <= low and high <= exact",
        "True",
        "test_positions_that_wrap_or_are_rounded_are_no_triangle[bf16]",
    ),
    _masking(
        "triangle_of",
        "the offset is in the range of the queries, so that places computed from it do not overflow",
        "max(offset, -queries)",
        "offset",
        "test_an_offset_is_no_farther_than_there_are_queries",
    ),
)

_VALUES = (
    _masking(
        "_Following._applied",
        "a mask decides `and` where it is false, `or` where it is true",
        "bool(constants[a]) == decides",
        "True",
        "test_one_of_two_conditions_that_holds_does_not_decide",
    ),
    _masking(
        "_Following._reduction",
        "what a row adds up is known behind the mask",
        " or filler is None",
        "",
        "test_a_sum_of_what_is_hidden_is_needed",
    ),
    _masking(
        "_Following._reduction",
        "and is zero there",
        " and float(filler) == 0.0",
        "",
        "test_what_is_mixed_or_added_up_is_zero_behind_the_mask",
    ),
    _masking(
        "_Following._reduction",
        "a row's maximum is above the filler: checked at run time",
        "self.guards[Guard(number, float(filler), 0.0)] = None",
        "pass",
        "test_a_maximum_over_another_filler_keeps_its_guard",
    ),
    _masking(
        "_Following._applied",
        "an exponential vanishes: that the filler is so far below is checked at run time",
        "self.guards[self.below[args[0]]] = None",
        "pass",
        "test_a_comparison_of_positions_is_a_triangle[at or before]",
    ),
    _masking(
        "_Following._applied",
        "an exponential of at most -105 is zero in its type",
        "args[0] in self.below and node.dtype in _WIDE_EXPONENTS",
        "args[0] in self.below",
        "test_an_exponential_of_a_wider_type_is_not_zero",
    ),
    _masking(
        "_Following._zero",
        "a masked zero is divided by a value of its row, as what lies behind the mask may be zero",
        " or not of_row",
        "",
        "test_a_masked_zero_is_divided_by_a_positive_value_of_the_row",
        _LOOKED_AT,
    ),
    _masking(
        "_Following._zero",
        "which is above zero: checked at run time",
        "self.guards[Guard(other, 0.0, 0.0)] = None",
        "pass",
        "test_a_masked_zero_is_divided_by_a_positive_value_of_the_row",
        _LOOKED_AT,
    ),
    _masking(
        "_Following._zero",
        "a value of the row that a masked zero is multiplied with is finite: checked at run time",
        "self.guards[Guard(other, 0.0, _FINITE, negated)] = None",
        "pass",
        "test_a_masked_zero_times_a_value_of_the_row_needs_a_finite_one",
        _LOOKED_AT,
    ),
    _masking(
        "Guard.implies",
        "a condition stands for another one of a smaller filler and a higher bound",
        "self.filler >= other.filler and self.bound <= other.bound",
        "True",
        "test_a_maximum_over_another_filler_keeps_its_guard",
    ),
    _masking(
        "Guard.implies",
        "and of the same sign of the same value",
        "(self.value, self.negated) == (other.value, other.negated)",
        "True",
        "test_a_stronger_condition_stands_for_a_weaker_one",
    ),
    _masking(
        "_Following.triangle",
        "a block whose rows break a condition is computed twice: nothing is added to memory",
        "if store.combine:",
        "if False:",
        "test_a_row_that_is_added_to_what_is_there_is_computed_once",
    ),
    _masking(
        "_Following.triangle",
        "mixed factors are zero behind the mask",
        "fills[number] != 0.0",
        "False",
        "test_what_is_mixed_or_added_up_is_zero_behind_the_mask",
    ),
    _masking(
        "_Following.triangle",
        "all reductions are known behind the mask",
        "not self.possible or ",
        "",
        "test_a_sum_of_what_is_hidden_is_needed",
    ),
)

_KERNEL = (
    Precondition(
        f"{_CPU}/attention/attention_rows.py:Reach.end",
        "a row looks at the strips of keys that are computed for it, at none if it sees none",
        "self.seen(rows)",
        "self.f.imax(self.seen(rows), 1)",
        f"{_POISON}::test_rows_that_read_sums_which_are_not_computed_are_noticed",
    ),
    Precondition(
        f"{_CPU}/attention/attention_rows.py:BlockRows._guarded",
        "a comparison with NaN breaks a condition",
        '"olt"',
        '"ult"',
        f"{_ATTENTION}::test_a_row_of_nan_is_nan_behind_its_mask_too",
    ),
    Precondition(
        f"{_CPU}/attention/attention_rows.py:BlockRows._pad",
        "factors are zero as far as any row of the block looks",
        "f.store(zero, row.pointers[factor], at.i)",
        "pass",
        f"{_ATTENTION}::test_queries_that_see_no_key_mix_zeros[100-50]",
    ),
    Precondition(
        f"{_CPU}/attention/attention_rows.py:BlockRows._fill",
        "results read outside are written behind the mask, too",
        "scope.store(item)",
        "pass",
        f"{_ATTENTION}::test_a_product_of_zeros_and_masks_keeps_probabilities",
    ),
    Precondition(
        f"{_PLANNING}/attention.py:_check_dtypes",
        "kernels add up in f32: no factor is wider",
        "array.shape.dtype not in _FACTORS",
        "False",
        f"{_ATTENTION}::test_doubles_are_products",
    ),
)

_SORTS = (
    Precondition(
        f"{_PLANNING}/sorting.py:Comparator._check",
        "a comparator is a strict weak order: places are counts, and each element has one",
        "if first is None:",
        "if first is None and not keys:",
        f"{_ORDERS}::test_what_may_contradict_itself_has_none[one of two]",
    ),
    Precondition(
        f"{_PLANNING}/sorting.py:Comparator._check",
        "it is false of equal elements",
        "self._decided(root, equal) is not False",
        "self._decided(root, equal) is None",
        f"{_ORDERS}::test_what_may_contradict_itself_has_none[less or equal]",
    ),
    Precondition(
        f"{_PLANNING}/sorting.py:Comparator._decides",
        "an element that comes before another one does not come after it, too",
        " and less != greater",
        "",
        f"{_ORDERS}::test_what_may_contradict_itself_has_none[different]",
    ),
    Precondition(
        f"{_PLANNING}/sorting.py:Comparator._totalled",
        "a key is the same function of both elements",
        "text is not None and text == self._text(right, not turned)",
        "text is not None and self._text(right, not turned) is not None",
        f"{_ORDERS}::test_what_may_contradict_itself_has_none[of two functions]",
    ),
    Precondition(
        f"{_PLANNING}/sorting.py:Comparator._compared",
        "floats are in a total order: all NaN are equal, and last",
        "build.dtype(left) not in FLOATS",
        "True",
        f"{_ORDERS}::test_the_best_of_values_with_nan_are_elements[4-2-f32]",
        "within rounding: HLO leaves open where a comparison of floats puts NaN",
    ),
    Precondition(
        "mpmd/compile/kernels/planner/sorting.py:_planned",
        "equal elements keep their order",
        'build.apply("and", build.apply("not", after), earlier)',
        "earlier",
        f"{_SELECTION}::test_the_beginning_of_a_sort[greatest-dims6-2-3]",
    ),
    Precondition(
        "mpmd/compile/kernels/planner/sorting.py:plan_sort_prefix",
        "a slice takes the first elements",
        " or result.slice_dims != first_elements(whole)",
        "",
        f"{_ORDERS}::test_a_slice_of_the_middle_is_no_beginning",
    ),
    Precondition(
        "mpmd/compile/passes/fusion/sort_prefix.py:_taken",
        "nothing else reads the sorted array",
        'u.opcode != "slice" for u in users',
        "False for u in users",
        f"{_SELECTION}::test_what_is_read_as_a_whole_is_sorted_as_a_whole",
    ),
    Precondition(
        "mpmd/compile/passes/fusion/sort_prefix.py:_taken",
        "no control edge orders the sort or what reads it",
        "any(i.has_control_edges for i in (sort, *elements, *users))",
        "False",
        f"{_SELECTION}::test_what_control_edges_order_stays",
    ),
)

_GROUPS = (
    Precondition(
        f"{_STITCHING}:Search.refusal",
        "no control edge orders a member by itself",
        "if ordered is not None:",
        "if False:",
        f"{_GROUPED}::test_what_is_ordered_by_itself_is_no_part_of_a_kernel",
    ),
    Precondition(
        f"{_STITCHING}:Search.refusal",
        "no input of the kernel depends on its results",
        "if self._would_create_cycle(attention, before):",
        "if False:",
        f"{_GROUPED}::test_inputs_do_not_depend_on_results",
    ),
    Precondition(
        f"{_PLANNING}/attention.py:_mixture",
        "a mixture has its factor's batch dims, in their order",
        "tuple(batched) != tuple(range(rank - 2)) or ",
        "",
        f"{_ATTENTION}::test_batches_of_a_product_in_another_order_are_no_mixture",
    ),
    Precondition(
        f"{_PLANNING}/attention.py:_divided",
        "products divide their batch as the rows do",
        "delinearized(flat, own, batch)",
        "dim(d) for d in range(len(own))",
        f"{_ATTENTION}::test_heads_may_be_a_part_of_a_dim_of_the_products",
    ),
)

_ROW_TERMS = (
    Precondition(
        f"{_TERMS}:_is_result",
        "a result is of the weights that the sum is of",
        "factors.matrices == (term.weights,) and not factors.times",
        "True",
        f"{_OF_ROWS}::test_another_result_of_the_values_is_not_taken",
    ),
    Precondition(
        f"{_TERMS}:_is_result",
        "weights are divided by a softmax's total, with which the row can be multiplied again",
        " and known",
        "",
        f"{_OF_ROWS}::test_sums_of_other_weights_stay_what_they_are[other_scale]",
    ),
    Precondition(
        f"{_TERMS}:_is_result",
        "the values pair their batch dims with the weights as with the scores",
        "tuple(batch) != tuple(scores.rhs_batch) or ",
        "",
        f"{_OF_ROWS}::test_the_batch_of_values_is_in_the_order_of_the_weights",
    ),
    Precondition(
        f"{_TERMS}:_is_total",
        "exponentials and the maximum are of the same values",
        " and top.operands[0] is inner.operands[0]",
        "",
        f"{_OF_ROWS}::test_maxima_of_other_values_bound_no_exponential",
    ),
    Precondition(
        f"{_TERMS}:_is_total",
        "the maximum is replaced only where it is not finite",
        'test.opcode != "is-finite" or test.operands[0] is not top',
        "False",
        f"{_OF_ROWS}::test_a_maximum_that_anything_replaces_bounds_no_exponential",
    ),
    Precondition(
        f"{_TERMS}:multiply_by_reciprocals",
        "a divisor's reciprocal is a normal number",
        " or not _is_total(total)",
        "",
        f"{_OF_ROWS}::test_totals_of_numbers_that_may_be_denormal_are_divided_by",
    ),
    Precondition(
        f"{_STITCHING}:_is_shared",
        "values of a row have as many digits in memory as in a kernel",
        ' and value.shape.dtype == "f32"',
        "",
        f"{_OF_ROWS}::test_what_is_read_of_a_row_has_the_digits_of_f32",
    ),
    Precondition(
        f"{_PRECISION}:without_narrow_sums",
        "exponents are rounded as in other kernels that know the row's maximum",
        "_meets_row(plan, number)",
        "False",
        f"{_ROUNDED}::test_exponents_are_rounded_if_their_maximum_is_in_memory[f32-loaded]",
    ),
    Precondition(
        f"{_PRECISION}:without_narrow_sums",
        "values are rounded in a kernel as others read them",
        "n for s in plan.stores if s.operand not in factors for n in store_arguments(s)",
        "n for n in ()",
        f"{_ROUNDED}::test_values_that_others_read_are_rounded",
    ),
    Precondition(
        f"{_TERMS}:replace_row_terms",
        "scores are as exact as the term that is subtracted from them",
        "_widen(term.scores)",
        "pass",
        f"{_OF_ROWS}::test_scores_are_as_exact_as_the_row_term",
    ),
    Precondition(
        f"{_PRECISION}:without_narrow_sums",
        "what something discrete is made of is rounded",
        " or _is_discrete(plan, number)",
        "",
        f"{_ROUNDED}::test_values_that_are_compared_are_rounded",
    ),
)

_ROUNDING = (
    Precondition(
        f"{_CANCELLATION}:_cancels",
        "values that may cancel are rounded alike",
        "a.wide & b.rounded | a.rounded & b.wide",
        "False",
        f"{_CANCELS}::test_a_query_that_sees_one_key_has_no_gradient",
    ),
    Precondition(
        f"{_CANCELLATION}:_cancels",
        "so are the parts of one value that a constant is taken from",
        " if splat(o) is None",
        "",
        f"{_ZERO}[beside a constant]",
    ),
    Precondition(
        f"{_CANCELLATION}:_rounds",
        "a conversion from bf16 or to it rounds",
        "NARROW_TYPE in (instruction.shape.dtype, instruction.operands[0].shape.dtype)",
        "False",
        f"{_ZERO}[through f32]",
    ),
    Precondition(
        f"{_CANCELLATION}:_rounds",
        "so does memory, where a value is more than elementwise work and movement",
        "not instruction.is_elementwise and instruction.opcode not in _MOVES",
        "False",
        f"{_ZERO}[sum of columns]",
    ),
)

ROWS = (*_POSITIONS, *_VALUES, *_KERNEL, *_GROUPS, *_ROW_TERMS, *_ROUNDING, *_SORTS)

ALWAYS = {
    "mpmd/compile/passes/fusion/attention_search.py:moved_factor": (
        "movement and widening of bf16 compute nothing: each kernel may repeat them"
    ),
    f"{_CPU}/kernels/sort_rows.py:MergeSortKernel": (
        "every step moves whole elements from one row to another: the result is a permutation whatever the "
        "comparator says"
    ),
}
