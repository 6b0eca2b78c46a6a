"""Tracing: calls by identity, loops, scans divided by stages, ranges of values, dead code; the comparison."""

from tests.preconditions import Precondition

_NAMES = "tests/unit/tracing/test_names.py"
_DIVISIONS = "tests/unit/tracing/stages/test_scan_divisions.py"
_LOOPS = "tests/differential/test_loops_by_cost.py"
_RANGES = "tests/unit/tracing/test_range_rules.py::test_a_range_is_that_of_the_whole"
_CONDITIONALS = "tests/unit/tracing/test_conditionals.py"
_CLUSTERS = "tests/unit/compile/backends/mixed/test_clusters.py"
_COMPARISON = "tests/unit/compile/comparison/test_comparison.py"
_RULES = "mpmd/tracing/wanted_ranges.py"
_STAGES = "mpmd/tracing/stages"

ROWS: tuple[Precondition, ...] = (
    Precondition(
        "mpmd/tracing/names.py:_callee",
        "Calls are one function only if they are of the same object and function: equal objects may hold"
        " other values.",
        "key = tuple(map(id, parts))",
        "key = parts",
        f"{_NAMES}::test_calls_of_functions_that_end_and_of_objects_that_are_equal[object]",
    ),
    Precondition(
        "mpmd/support/resources.py:once",
        "A registration runs in one thread at a time: XLA refuses the second, and its code stays.",
        "with running:",
        "if running:",
        "tests/unit/support/test_once.py::test_threads_that_ask_at_once_get_what_one_of_them_made",
    ),
    Precondition(
        "mpmd/tracing/trace.py:names_run_by",
        "The body of a loop runs at least once: JAX lowers a scan of no iterations to its operands.",
        "if _never_runs(equation):",
        "if False:",
        f"{_NAMES}::test_a_loop_of_no_iterations_runs_no_names",
    ),
    Precondition(
        "mpmd/tracing/scans.py:counted_loop",
        "A number of iterations is not negative: as one of 32 bits without a sign it would be four billion.",
        "max(trip_count, 0)",
        "trip_count",
        f"{_NAMES}::test_a_loop_of_no_iterations_runs_no_names[by_condition]",
    ),
    Precondition(
        "mpmd/tracing/expand.py:Expansion.expand_loop",
        "A loop of the dialect has iterations.",
        "not counted.trip_count or ",
        "",
        f"{_NAMES}::test_a_loop_of_no_iterations_runs_no_names[by_condition]",
    ),
    Precondition(
        "mpmd/tracing/trace.py:lower",
        "A step keeps the arguments that nothing reads: feeds are counted by them.",
        "keep_inputs=True",
        "keep_inputs=False",
        "tests/differential/test_daily_use.py"
        "::test_the_forward_derivative_of_a_function_that_has_none_where_nothing_needs_it",
    ),
    Precondition(
        "mpmd/tracing/scans.py:counted_loop",
        "A loop whose iterations are counted begins at 0.",
        "start == 0 and ",
        "",
        f"{_NAMES}::test_a_loop_that_does_not_count_from_zero_by_one_is_refused",
    ),
    Precondition(
        "mpmd/tracing/scans.py:counted_loop",
        "A loop whose iterations are counted goes on while its counter is less than the end.",
        ' and "LT" in str(compare.comparison_direction)',
        "",
        f"{_NAMES}::test_a_loop_that_does_not_count_from_zero_by_one_is_refused",
    ),
    Precondition(
        "mpmd/tracing/scans.py:_steps_by_one",
        "The counter of a loop whose iterations are counted grows by 1.",
        " and _integer(right) == 1",
        "",
        f"{_NAMES}::test_a_loop_that_does_not_count_from_zero_by_one_is_refused",
    ),
    Precondition(
        f"{_STAGES}/stacked/scan_ranges.py:_stack_values",
        "A value has the rows of a stack only if its first dim is as long as the stack's.",
        "if flat.avals[v].shape[:1] in lengths",
        "if True",
        f"{_DIVISIONS}::test_what_does_not_run_over_the_rows_is_refused[over_columns]",
    ),
    Precondition(
        f"{_STAGES}/stacked/scan_ranges.py:replace_scan",
        "Results of the parts of a scan are joined in the order of the rows, not of the stages in reverse.",
        "sorted(parts)",
        "parts",
        f"{_DIVISIONS}::test_a_divided_function_gives_the_same",
    ),
    Precondition(
        f"{_STAGES}/stacked/scan_ranges.py:ranges_of",
        "The first stage of a scan in reverse has the last rows.",
        "if reverse else (begin, end)",
        "if False else (begin, end)",
        f"{_DIVISIONS}::test_a_divided_function_gives_the_same",
    ),
    Precondition(
        f"{_STAGES}/stacked/scan_ranges.py:replace_scan",
        "Rows of what a stage computes are sliced after it.",
        "is_stack = source not in computed",
        "is_stack = True",
        f"{_LOOPS}::test_iterations_are_divided_between_meshes[4-over_time]",
    ),
    Precondition(
        f"{_STAGES}/stacked/row_views.py:_viewed",
        "A slice has neighbouring rows of a stack only if it leaves none out.",
        ' and set(params["strides"] or (1,)) == {1}',
        "",
        f"{_DIVISIONS}::test_a_loop_over_every_second_row_does_not_run_over_neighbours",
    ),
    Precondition(
        f"{_STAGES}/stacked/row_views.py:_viewed",
        "A slice has rows of a stack only if it has all of their columns.",
        " and new[1:] == shape[1:]",
        "",
        f"{_DIVISIONS}::test_loops_that_do_not_read_each_row_once_are_refused[columns_of_rows]",
    ),
    Precondition(
        f"{_STAGES}/stacked/row_views.py:_viewed",
        "Each row of a reshaped stack has whole rows of it.",
        " and rows % new[0] == 0",
        "",
        f"{_DIVISIONS}::test_a_loop_over_rows_of_another_length_does_not_run_over_those_of_the_stack",
    ),
    Precondition(
        f"{_STAGES}/stacked/row_views.py:views_scanned",
        "Loops over parts of a stack say where its rows are only if they read each row once.",
        " and _tile(sorted(ranges), flat.avals[stack].shape[0])",
        "",
        f"{_DIVISIONS}::test_loops_that_do_not_read_each_row_once_are_refused[rows_of_both]",
    ),
    Precondition(
        f"{_STAGES}/stacked/row_views.py:unroll",
        "The iterations of a scan in reverse follow one another from the last row to the first.",
        'reversed(order) if params["reverse"] else order',
        "order",
        f"{_DIVISIONS}::test_groups_that_run_from_the_last_to_the_first",
    ),
    Precondition(
        f"{_STAGES}/stacked/row_views.py:nested_loops",
        "A loop with effects is not unrolled: JAX differentiates callbacks of a scan otherwise.",
        "and not item.equation.effects",
        "",
        f"{_LOOPS}::test_a_loop_with_effects_stays_a_loop",
    ),
    Precondition(
        "mpmd/tracing/conditionals.py:_is_fixed",
        "What has effects stays in its branch.",
        "item.equation.effects or ",
        "",
        f"{_CONDITIONALS}::test_a_branch_with_an_effect_stays_whole",
    ),
    Precondition(
        "mpmd/tracing/conditionals.py:_is_fixed",
        "A loop of unknown length stays in its branch: it may not end where the branch is not taken.",
        "_has_while(item.equation)",
        "False",
        f"{_CONDITIONALS}::test_a_branch_with_a_loop_of_unknown_length_stays_whole",
    ),
    Precondition(
        "mpmd/tracing/conditionals.py:_Conditional._zero_unless_taken",
        "scalars of a branch that is not taken are finite outside of it",
        "jnp.where(taken, branch.env[v], jnp.zeros((), aval.dtype))",
        "branch.env[v]",
        f"{_CONDITIONALS}::test_scalars_of_a_branch_that_is_not_taken_are_not_nan_elsewhere",
    ),
    Precondition(
        f"{_RULES}:_slice",
        "A range of a slice is a range of its operand only along a dim without a stride.",
        "if strides is not None and strides[dim] != 1:",
        "if False:",
        f"{_RANGES}[strided slice]",
    ),
    Precondition(
        f"{_RULES}:_broadcast_in_dim",
        "A dim that is repeated is read whole.",
        " if own[at] == shape[wanted.dim] else None",
        "",
        f"{_RANGES}[broadcast of rows]",
    ),
    Precondition(
        f"{_RULES}:_elementwise",
        "Scalars among the operands are read whole.",
        "own and own[wanted.dim] == shape[wanted.dim]",
        "True",
        f"{_RANGES}[scalars]",
    ),
    Precondition(
        f"{_RULES}:_reshape",
        "A range of a reshape is a range of a dim with as many elements before it.",
        "math.prod(own[:dim]) == before and ",
        "",
        f"{_RANGES}[reshape to other dims]",
    ),
    Precondition(
        f"{_RULES}:_reshape",
        "A range of a reshape is a range of a dim of the same size.",
        " and size == shape[wanted.dim]",
        "",
        f"{_RANGES}[reshape that joins]",
    ),
    Precondition(
        f"{_RULES}:_iota",
        "The counts of a range begin at its start, along its own dim only.",
        "if dim == wanted.dim else numbers",
        "if False else numbers",
        f"{_RANGES}[counts]",
    ),
    Precondition(
        f"{_RULES}:_concatenate",
        "A range along the dim of a concatenation is of those pieces that it meets.",
        "if along != wanted.dim:",
        "if True:",
        f"{_RANGES}[pieces]",
    ),
    Precondition(
        "mpmd/tracing/wanted_ranges.py:DemandedJaxpr._scan",
        "A range of rows of a scan is along the dim of its iterations.",
        " or any(wanted.dim for wanted in ranges)",
        "",
        f"{_RANGES}[columns of a scan]",
    ),
    Precondition(
        "mpmd/tracing/wanted_ranges.py:_ScanBody._before",
        "The iterations before a range are those after its rows in a scan in reverse.",
        "if self._reverse else (0, wanted.start)",
        "if False else (0, wanted.start)",
        f"{_RANGES}[rows of a reversed scan]",
    ),
    Precondition(
        "mpmd/tracing/wanted_ranges.py:random_bits",
        "An element of random bits follows from its position, as JAX's switch of partitionable bits says.",
        "jax.config.jax_threefry_partitionable and ",
        "",
        f"{_RANGES}[random bits of the older kind]",
    ),
    Precondition(
        "mpmd/compile/lowering/spmd/localise.py:_Localising.manual",
        "A value of a device has one sharding: what a shard_map returns in another is a copy.",
        "if value in self.sharding:",
        "if False:",
        "tests/unit/compile/lowering/spmd/test_spmd.py"
        "::test_a_shard_map_returns_what_it_is_given_in_other_parts",
    ),
    Precondition(
        "mpmd/compile/backends/mixed/levels.py:_grouped",
        "A cluster comes after those whose values it reads.",
        "levels[before] + further",
        "levels[before]",
        f"{_CLUSTERS}::test_clusters_alternate_and_read_what_they_need",
    ),
    Precondition(
        "mpmd/compile/backends/mixed/clusters.py:_Division._cluster",
        "What another cluster reads, or is a result, is an output.",
        " or at in self.results",
        "",
        f"{_CLUSTERS}::test_clusters_alternate_and_read_what_they_need",
    ),
    Precondition(
        "mpmd/compile/comparison/rounding.py:Rounding.is_beyond",
        "An error that the other result has too is rounding.",
        "own > _ALIKE * others + self.limit * self.unit",
        "own > self.limit * self.unit",
        f"{_COMPARISON}::test_whose_error_is_larger_than_rounding",
    ),
    Precondition(
        "mpmd/compile/comparison/narrowing.py:widened",
        "A float's bits are its own type's, before the cast and after.",
        "_BITCAST.sub(_with_own_bits, _CONSTANT.sub(_constant, fragment.text))",
        "_CONSTANT.sub(_constant, fragment.text)",
        f"{_COMPARISON}::test_a_fragment_in_f64_has_the_constants_and_bits_of_its_own_types",
    ),
    Precondition(
        "mpmd/compile/comparison/narrowing.py:widened",
        "Constants written as bits have f64 bits.",
        "_CONSTANT.sub(_constant, fragment.text)",
        "fragment.text",
        f"{_COMPARISON}::test_a_fragment_in_f64_has_the_constants_and_bits_of_its_own_types",
    ),
    Precondition(
        "mpmd/api/compare.py:_not_compared",
        "What calls back to Python runs once.",
        "if executable.fragment.callbacks:",
        "if False:",
        "tests/differential/test_compare.py::test_callbacks_are_done_once",
    ),
)

ALWAYS: dict[str, str] = {
    "mpmd/tracing/scans.py:unroll": "an iteration is its body, with its number in place of the counter",
    "mpmd/tracing/conditionals.py:_selected": "a scalar of a branch that is not taken is not selected",
    f"{_RULES}:_transpose": "a permutation of dims moves every index to one place",
    f"{_RULES}:_squeeze": "a dim of size 1 has no other index",
    f"{_RULES}:_reduction": "a range is along a dim that is kept",
    f"{_RULES}:_of_keys": "every key is used by itself",
    f"{_STAGES}/stacked/stacked.py:_split_unstacked": "a row of `jnp.unstack` is a row",
    "mpmd/tracing/expand.py": "a call is its function's body",
}
