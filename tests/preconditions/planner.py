"""Kernel plans: the rules that make them, their checks, and what is done with them."""

from __future__ import annotations

from tests.preconditions import Precondition

_K = "mpmd/compile/kernels/"
_P = _K + "planner/"
_T = "tests/unit/compile/kernels/"
_GUARDS = _T + "planner/test_reduced_guards.py::"
_DIRECTED = "tests/property/test_directed_planner.py::test_plans_mean_what_the_program_does"
_SHARING = _T + "test_sharing.py::"
_GROUPS = _T + "planner/test_group_plans.py::"
_PLAN = _T + "test_plan.py::"
_EVERYWHERE = _T + "test_evaluated_everywhere.py::"


def _refused(what: str) -> str:
    return f"{_T}planner/test_refusals.py::test_no_kernel_computes[{what}]"


def _refusals(test: str) -> str:
    return f"{_T}planner/test_refusals.py::{test}"


ROWS = (
    # -- reductions
    Precondition(
        _P + "elements.py:Trace.reduced",
        "a reduction needs all of its elements wherever its result is, so guards on its dims are dropped",
        "if not depends & set(dims):",
        "if True:",
        _GUARDS + "test_such_a_reduction_is_one_kernel_with_its_reader[pad]",
    ),
    Precondition(
        _P + "elements.py:Trace.reduced",
        "a guard that joins reduced dims with others says nothing about the others alone",
        "elif depends - set(dims):",
        "elif False:",
        _GUARDS + "test_a_condition_on_reduced_and_other_dims_has_no_kernel",
    ),
    Precondition(
        _P + "elements.py:Trace.reduced",
        "the position of a result does not depend on the dims that its reduction runs over",
        "if self.dims_of(at) & set(dims):",
        "if False:",
        _GUARDS + "test_windows_as_many_as_one_is_long_are_not_its_elements[strides]",
    ),
    Precondition(
        _P + "iteration_space.py:reducer_of",
        "a reducer is one operation on its two parameters",
        "and simple and",
        "and",
        _refused("a reducer that does more"),
    ),
    Precondition(
        _P + "iteration_space.py:reducer_of",
        "a reducer joins both of its values",
        "and root.operands[0] is not root.operands[1]",
        "",
        _refused("a reducer of one of its values"),
    ),
    Precondition(
        _P + "iteration_space.py:_axes",
        "a row of the space has as many points as the reduction has terms",
        "space.count(row) == count and",
        "",
        _refused("rows of other lengths"),
    ),
    Precondition(
        _P + "iteration_space.py:_with_init",
        "an initial value is left out if it is the identity",
        "scalar_of(init) == REDUCTIONS[op].identity(init.shape.dtype)",
        "True",
        _refusals("test_an_initial_value_that_changes_the_result_is_joined_with_it"),
        "but for the sign of a sum of zeros whose initial value is -0: `jnp.sum` begins at 0",
    ),
    Precondition(
        _P + "iteration_space.py:_reduced",
        "a sum of f16 or bf16 is rounded once, after both axes",
        'wide = "f32" if dtype in ("bf16", "f16") and len(axes) > 1 else dtype',
        "wide = dtype",
        _refusals("test_a_sum_of_f16_over_rows_and_columns_is_rounded_once"),
        "within rounding: XLA keeps such sums in f32, too",
    ),
    Precondition(
        _P + "iteration_space.py:_reduce_window",
        "the row of the space is one window",
        "if [t.extents[d] for d in row] != list(i.window.sizes):",
        "if False:",
        _refused("windows of other sizes"),
    ),
    Precondition(
        _P + "iteration_space.py:_reduce_window",
        "padding is the identity of the reduction",
        "if inside >= 0:",
        "if False:",
        _DIRECTED + "[windows]",
    ),
    Precondition(
        _P + "iteration_space.py:_dot",
        "the row of the space is the summed dims of the product",
        "if [t.extents[d] for d in row] != [lhs.shape.dims[d] for d in numbers.lhs_contracting]:",
        "if False:",
        _refused("products whose sums differ"),
    ),
    Precondition(
        _P + "iteration_space.py:_dot",
        "products of f16 are summed in f32, in which none is infinite",
        'dtype, sides = "f32" if i.shape.dtype in ("bf16", "f16") else i.shape.dtype, []',
        "dtype, sides = i.shape.dtype, []",
        _GUARDS + "test_products_of_f16_are_not_infinite_inside_of_a_sum",
        "within rounding: XLA keeps such sums in f32, too",
    ),
    # -- positions
    Precondition(
        _P + "elements.py:Trace.within",
        "a condition is left out only where the range of the index says that it is true",
        "if low is not None and (known is None or known[0] < low):",
        "if low is not None and known is None:",
        _GUARDS + "test_a_reduction_whose_result_is_used_in_a_part_is_over_the_whole[pad]",
    ),
    Precondition(
        _P + "elements.py:Trace.within",
        "the same of the upper end",
        "if high is not None and (known is None or known[1] >= high):",
        "if high is not None and known is None:",
        _GUARDS + "test_a_reduction_whose_result_is_used_in_a_part_is_over_the_whole[pad]",
    ),
    Precondition(
        _P + "index_rules.py:_compare",
        "floats are compared as numbers: NaN is unordered and zeros are equal",
        """if i.attributes.get("comparison_type") == "TOTALORDER" and""",
        "if False and",
        _refused("an order of all floats"),
    ),
    Precondition(
        _P + "index_rules.py:_bitcast_convert",
        "elements of both types have one size",
        "source.dims != i.shape.dims or",
        "",
        _refused("half of an element"),
    ),
    Precondition(
        _P + "index_rules.py:_moved",
        "movement keeps the element type",
        "if i.operands[0].shape.dtype != i.shape.dtype:",
        "if False:",
        _refused("another type of the same memory"),
    ),
    Precondition(
        _P + "index_rules.py:_pad",
        "an element is read only where there is one",
        "kept = t.value(source, tuple(place), t.guarded(where, inside))",
        "kept = t.value(source, tuple(place), where)",
        _DIRECTED + "[movement]",
    ),
    Precondition(
        _P + "index_rules.py:spread",
        "between elements that are apart there are none",
        "if step > 1:",
        "if False:",
        _GUARDS + "test_a_reduction_whose_result_is_used_in_a_part_is_over_the_whole[interior-pad]",
    ),
    Precondition(
        _P + "index_rules.py:_concatenate",
        "a piece is read from its begin on, and the pieces before it up to there",
        "covers = result < 0 or begun < 0",
        "covers = True",
        _GUARDS + "test_such_a_reduction_is_one_kernel_with_its_reader[concatenate]",
    ),
    Precondition(
        _P + "index_rules.py:_concatenate",
        "a piece is left out only if no position is in it",
        "known[0] < end and known[1] >= start",
        "known[0] < end and known[1] > start",
        _GUARDS + "test_one_element_of_a_piece_is_read",
    ),
    Precondition(
        _P + "index_rules.py:clamped_start",
        "the largest start is compared in a type that holds it",
        'if dtype != "s64":',
        "if False:",
        _refusals("test_the_last_place_of_a_slice_may_be_larger_than_its_type[100-s8]"),
    ),
    Precondition(
        _P + "index_rules.py:_dynamic_update_slice",
        "an update is read only where it replaces the array",
        "changed = t.value(update, tuple(place), t.guarded(where, inside))",
        "changed = t.value(update, tuple(place), where)",
        _DIRECTED + "[movement]",
    ),
    Precondition(
        _P + "index_rules.py:_gather",
        "a slice is moved so that it lies inside of the array",
        "limit = source.shape.dims[d] - i.slice_sizes[d]",
        "limit = source.shape.dims[d]",
        _DIRECTED + "[movement]",
    ),
    # -- groups
    Precondition(
        _P + "groups.py:check_results",
        "each value is computed at one position",
        "if len(positions) > 1:",
        "if False:",
        _GROUPS + "test_a_value_that_is_needed_at_two_places_is_not_computed_twice",
    ),
    Precondition(
        _P + "groups.py:check_results",
        "the dims of a result's position count its elements, so that each is written once",
        "if space.count(used) != result.shape.size:",
        "if False:",
        _GROUPS + "test_results_are_written_exactly_once",
    ),
    Precondition(
        _P + "groups.py:check_results",
        "the results of a loop have its size",
        "if not reduces and",
        "if False and",
        _GROUPS + "test_results_of_a_loop_have_one_size",
    ),
    Precondition(
        _P + "planned_kernel.py:plan_members",
        "an update changes memory that no other result is computed of",
        "if len(results) > 1:",
        "if False:",
        _refused("an update beside another result"),
    ),
    # -- products
    Precondition(
        _P + "dots.py:strided",
        "a factor is in equal steps along each loop",
        'if any(atom.kind != "dim" for atom, _ in place.terms):',
        "if False:",
        _refused("a factor in steps that differ"),
    ),
    Precondition(
        _P + "dots.py:strided",
        "a factor is read without rounding",
        "(source.shape.dtype, value.shape.dtype) in _WIDENING",
        "True",
        _refused("a factor that is rounded"),
    ),
    Precondition(
        _P + "dots.py:merged",
        "loops are one where all factors move as one",
        "all(s.steps[groups[-1][-1]] == s.steps[d] * loops.extents[d] for s in sides)",
        "True",
        _refusals("test_sums_are_one_loop_only_where_both_factors_move_as_one[{0,2}]"),
    ),
    Precondition(
        _P + "dots.py:plan_dot",
        "the sums are one loop",
        "if len(sums) > 1:",
        "if False:",
        _refusals("test_sums_are_one_loop_only_where_both_factors_move_as_one[{0,2}]"),
    ),
    Precondition(
        _P + "dots.py:_with_epilogue",
        "an epilogue reads no value that exists inside of a factor only",
        "any(i in below for i in trace.arrays) or",
        "",
        _refused("a product and its factor"),
    ),
    Precondition(
        _P + "dots.py:_sums",
        "a sum is read by the point that it was computed for",
        "if position_of(i, at) != place:",
        "if False:",
        _refused("a product and its transpose"),
    ),
    # -- changes in place
    Precondition(
        _P + "groups.py:plan_update",
        "the changed array is in memory",
        "if target in inside:",
        "if False:",
        _refused("an update of a computed array"),
    ),
    Precondition(
        _P + "groups.py:plan_update",
        "the written elements depend on no other element of the changed array",
        "if any(array_beneath(o) is target for i in others for o in i.operands):",
        "if False:",
        _refused("an update with what lies elsewhere"),
    ),
    Precondition(
        _P + "groups.py:_scatter",
        "an update is written if all of it lies inside of the array",
        "source.shape.dims[d] - sizes[d] + 1",
        "source.shape.dims[d]",
        _DIRECTED + "[updates]",
    ),
    Precondition(
        _P + "groups.py:_scatter",
        "a kernel has the reduction for the element type",
        "if combine and root.shape.dtype not in REDUCTIONS[combine].dtypes:",
        "if False:",
        _refused("a scatter that adds up four bits"),
    ),
    Precondition(
        _P + "groups.py:_combiner",
        "the second parameter of the combiner is the update",
        "and root.parameter_number == 1",
        "",
        _refused("a scatter that keeps the old value"),
    ),
    # -- sorts
    Precondition(
        _P + "sorting.py:plan_sort_prefix",
        "a result is the beginning of a sorted array",
        "or result.slice_dims != first_elements(whole)",
        "",
        _refusals("test_the_beginning_of_a_sorted_array_is_a_kernel_and_no_other_part[1-3]"),
    ),
    Precondition(
        _P + "sorting.py:_planned",
        "an element behind the ones that are taken is not written",
        "if taken < dims[along]:",
        "if False:",
        _DIRECTED + "[sorts]",
    ),
    # -- plans
    Precondition(
        _K + "plan_builder.py:PlanBuilder.finish",
        "no store needs an element which its guard leaves out",
        "problems = guard_problems(plan)",
        "problems = []",
        _GUARDS + "test_no_plan_reduces_what_its_guard_leaves_out[pad]",
    ),
    Precondition(
        _K + "guards.py:_Conditions.needed",
        "a reduction needs its elements wherever along its dims",
        "if not self._dims(v) & gone",
        "",
        _GUARDS + "test_no_plan_reduces_what_its_guard_leaves_out[pad]",
    ),
    Precondition(
        _K + "kernel_plan.py:_level_problems",
        "a sum over the outer dims is joined with values that exist after it",
        "if not final[a] and (plan.depends[a] & outer or reduced[a])",
        "if False",
        _PLAN + "test_plans_that_make_no_sense_say_why",
    ),
    Precondition(
        _K + "kernel_plan.py:_level_problems",
        "a place and a guard belong to the pass of the stored value",
        "users += [",
        "[] + [",
        _GUARDS + "test_a_place_that_is_the_sum_of_as_many_numbers_as_an_update_has_is_known_before_it",
    ),
    Precondition(
        _K + "evaluate.py:Evaluation._inside",
        "a plan that is evaluated reads and writes inside of its arrays",
        "if wrong.size:",
        "if False:",
        _EVERYWHERE + "test_a_computed_place_outside_of_an_array_is_not_read",
    ),
    Precondition(
        _K + "evaluate_products.py:_compare",
        "keys that are skipped change no result",
        "if differs.any():",
        "if False:",
        _EVERYWHERE + "test_keys_that_change_a_row_are_not_skipped[False]",
    ),
    # -- normalisation
    Precondition(
        _K + "normalise.py:_moves_together",
        "the outer of two dims moves by as much as the whole inner one",
        "index.factor(at) == index.factor(at + 1) * extent",
        "True",
        _PLAN + "test_normalised_plans_have_few_dims",
    ),
    # -- sharing
    Precondition(
        _K + "in_place.py:may_share",
        "both arrays have one size",
        "plan.operands[source].bytes != plan.operands[result].bytes",
        "False",
        _SHARING + "test_memory_of_another_size_or_type_is_not_shared[bytes]",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "both arrays have one element type",
        "if plan.operands[source].dtype != plan.operands[result].dtype:",
        "if False:",
        _SHARING + "test_memory_of_another_size_or_type_is_not_shared[type]",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "the operand is not a result",
        "if source in plan.results:",
        "if False:",
        _SHARING + "test_a_result_is_not_written_over_another",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "all stores are at one place",
        "s.index != place or",
        "",
        _SHARING + "test_a_result_is_not_written_over_what_is[written in two parts]",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "old values are not joined with new ones",
        "s.combine or",
        "",
        _SHARING + "test_a_result_is_not_written_over_what_is[combined with what was there]",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "all elements are written",
        "s.where >= 0 or",
        "",
        _SHARING + "test_a_result_is_not_written_over_what_is[written in part]",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "an element is read by the point that writes its place",
        "if any(node.index != place for _, node in loads):",
        "if False:",
        _SHARING + "test_a_result_is_not_written_over_what_is[read at another place]",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "one point alone reads an element",
        "if any(e > 1 and d not in place.dims()",
        "if any(False",
        _SHARING + "test_an_element_that_several_points_read_is_kept",
    ),
    Precondition(
        _K + "in_place.py:may_share",
        "no later pass over the row reads an element again",
        "return all(last[number] <= written_in for number, _ in loads)",
        "return True",
        _SHARING + "test_a_result_is_not_written_over_what_is[read again in a later pass]",
    ),
    Precondition(
        _K + "in_place.py:_only_finishes",
        "a sum over the outer dims needs the operand no more",
        "isinstance(node, ReduceNode) and not iterated",
        "False",
        _SHARING + "test_a_finished_sum_is_written_over_what_only_finishes_it[reduced]",
    ),
    Precondition(
        _K + "in_place.py:_only_finishes",
        "no other store needs the operand",
        "in inner",
        "in (ELEMENT, ROW)",
        _SHARING + "test_a_finished_sum_is_written_over_what_only_finishes_it[stored]",
    ),
    Precondition(
        _K + "in_place.py:_only_finishes",
        "one batch index alone reads an element",
        "if any(plan.extents[d] > 1",
        "if any(False",
        _SHARING + "test_an_operand_is_kept_that_other_programs_read_when_a_sum_is_finished",
    ),
    Precondition(
        _K + "in_place.py:_only_finishes",
        "programs of other columns read no column's element",
        "stores_last and final == COLUMN",
        "stores_last",
        _SHARING + "test_an_operand_is_kept_that_other_programs_read_when_a_sum_is_finished",
    ),
)

ALWAYS = {
    _P
    + "index_rules.py:_elementwise": "an element of the result is computed of the elements at its position",
    _P + "index_rules.py:read_transpose": "a permutation of positions",
    _P + "index_rules.py:read_reshape": "the element at the same offset in a row-major array",
    _P + "index_rules.py:read_slice": "HLO's verifier has compared the bounds with the array's",
    _P + "index_rules.py:read_reverse": "a permutation of positions",
    _P + "iteration_space.py:reduce_space": "which dims come first changes the order of sums alone",
    _K + "normalise.py:drop_single_dims": "a dim of extent 1 is 0 everywhere",
    _K + "normalise.py:split": "the dim is replaced by an expression with the same values in the same order",
}
