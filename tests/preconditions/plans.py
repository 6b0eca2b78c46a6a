"""Plans that are cached, of collectives and of groups; passes that divide a program into kernels."""

from __future__ import annotations

from tests.preconditions import RowsOf

_UNIT = "tests/unit/compile/kernels/planner"
_STITCHED = "tests/unit/compile/passes/fusion/test_attention_stitching.py"
_LEFT = "tests/unit/compile/passes/test_left_alone.py::test_a_pass_leaves_it_alone"
_CUT = "tests/unit/compile/passes/collectives/test_spmd_partitioner.py"
_TEXT = "tests/text/test_text.py::test_file"
_planned = RowsOf("mpmd/compile/kernels/planner")
_differs = RowsOf("mpmd/compile/kernels/planner", f"{_UNIT}/test_plan_cache.py::test_groups_differ")
_passes = RowsOf("mpmd/compile/passes")
_SUMS = "within rounding: sums over devices have the same terms, added in another order, as XLA may too"
_ORDER = "within rounding: XLA leaves the order of sums open, too"

_CACHED = (
    _differs(
        "plan_cache.py:structure_of",
        "operations are equal",
        "(member.opcode, member",
        "(member",
        "operations",
    ),
    _differs(
        "plan_cache.py:structure_of",
        "they read the same values",
        ", tuple(operands), ",
        ", len(operands), ",
        "edges",
    ),
    _differs(
        "plan_cache.py:structure_of", "attributes are equal", ", attributes, called", ", called", "attributes"
    ),
    _differs(
        "plan_cache.py:structure_of",
        "called computations are one, or one operation",
        "tuple(simple_opcode(c) or c for c in member.called)",
        "len(member.called)",
        "called computations",
    ),
    _differs(
        "plan_cache.py:_number",
        "constants are equal bit for bit",
        "literal.tobytes()",
        "literal.item()",
        "signs of zeros",
    ),
    _planned(
        "plan_cache.py:structure_of",
        "the same values are results",
        ", tuple(number[r] for r in results))",
        ",)",
        f"{_UNIT}/test_plan_cache.py::test_results_differ",
    ),
    _planned(
        "plan_cache.py:structure_of",
        "views are of one array or of several, as they were",
        "parts.append((value.opcode, number[array]))",
        "parts.append(value.opcode)",
        f"{_UNIT}/test_plan_cache.py::test_views_of_one_array_are_not_those_of_two",
    ),
)
_EXCHANGED = (
    _planned(
        "collectives.py:plan_collective",
        "all devices take part",
        "if sum(map(len, groups)) != devices:",
        "if False:",
        f"{_UNIT}/test_collective_plans.py::test_no_plan[some devices]",
    ),
    _planned(
        "collectives.py:plan_collective",
        "parts are along a dim, not the elements of a tuple",
        'if opcode == "all-to-all" and not instruction.dimensions:',
        "if False:",
        f"{_UNIT}/test_collective_plans.py::test_no_plan[tuples]",
    ),
    _planned(
        "collectives.py:plan_collective",
        "a device gets the parts of its place in the group",
        "group_of[d].index(d) if divided else 0",
        "d % len(group_of[d]) if divided else 0",
        f"{_UNIT}/test_collective_plans.py::test_a_part_of_a_sum_goes_to_its_place_in_the_group",
    ),
    _planned(
        "collectives.py:plan_collective",
        "kernels have the elements",
        "check_dtype(operand)",
        "pass",
        f"{_UNIT}/test_collective_plans.py::test_elements_that_kernels_do_not_have_are_refused",
    ),
    _planned(
        "collectives.py:_reduction",
        "narrow floats are summed in wide ones",
        'if opcode in ("add", "multiply"):',
        "if False:",
        f"{_UNIT}/test_collective_plans.py::test_a_sum_of_narrow_floats_is_kept_in_wide_ones_and_a_maximum_is_not",
        _SUMS,
    ),
    _planned(
        "collectives.py:CollectivePlan.may_share",
        "a result takes the memory of its operand only if it needs each element at the same place alone",
        'self.opcode == "all-reduce" and ',
        "",
        f"{_UNIT}/test_collective_plans.py::test_a_part_of_a_sum_goes_to_its_place_in_the_group",
    ),
    _planned(
        "index_rules.py:_iota",
        "a truth value counts nothing",
        'if dtype == "pred":',
        "if False:",
        f"{_UNIT}/test_refusals.py::test_no_kernel_computes[a count of truths]",
    ),
)
_GROUPED = (
    _planned(
        "groups.py:_user_place",
        "each dim of a broadcast goes where the attribute says: they may be in any order",
        "dict(zip(user.dimensions, at))",
        "dict(zip(sorted(user.dimensions), at))",
        f"{_UNIT}/test_group_plans.py::test_dims_of_a_broadcast_may_be_in_any_order",
    ),
    _passes(
        "fusion/attention_stitching.py:_stitch",
        "no other kernel is between what it reads and what it gives",
        "if _is_made_of(arrays, set(results), sources):",
        "if False:",
        f"{_STITCHED}::test_kernels_do_not_wait_for_each_other",
    ),
    _passes(
        "fusion/attention_stitching.py:_is_made_of",
        "a kernel needs all of its inputs for each result",
        "sources.get(value, value.operands)",
        "value.operands",
        f"{_STITCHED}::test_kernels_do_not_wait_for_each_other",
    ),
    _passes(
        "simplify/algebra/__init__.py:AlgebraicSimplifier._is_allowed",
        "sizes are known when the program is compiled",
        "if any(s.dynamic for s in shapes):",
        "if False:",
        f"{_LEFT}[a size that is known at run time]",
    ),
    _passes(
        "simplify/algebra/__init__.py:AlgebraicSimplifier._is_allowed",
        "once arrays have orders, all that a rule looks at is row-major",
        "return all(_is_plain(s) for s in shapes)",
        "return True",
        f"{_LEFT}[a transpose into another order]",
    ),
    _passes(
        "layout/layout_normalization.py:_copy",
        "a copy that is a bitcast leaves the bytes where they are",
        "if is_bitcast(x.shape, site.shape):",
        "if True:",
        f"{_TEXT}[hlo/layout/layout-normalization-0]",
    ),
    _passes(
        "collectives/spmd_partitioner.py:_check_even",
        "shardings divide parameters and results",
        "if size % count:",
        "if False:",
        f"{_CUT}::test_what_cannot_be_partitioned_is_refused[a dim that does not divide]",
    ),
    _passes(
        "collectives/spmd_partitioner.py:SpmdPartitioner.rewrite",
        "there are several devices",
        "if module.num_partitions == 1:",
        "if False:",
        f"{_CUT}::test_one_device_has_nothing_to_partition",
    ),
)

ROWS = (*_CACHED, *_EXCHANGED, *_GROUPED)

_COMBINED = "`combiners.py` compares all that collectives must have in common"
_COMPLEX = "the definition of the operation on real and imaginary parts; real numbers are left alone"
_PAIRS = "mpmd/compile/passes/expand/complex_to_pairs.py:"
_LAID = "mpmd/compile/passes/layout/layout_normalization.py:"
_RULES = "mpmd/compile/kernels/planner/index_rules.py:"
ALWAYS = {
    **{
        f"mpmd/compile/passes/collectives/communication.py:{name}Combiner": _COMBINED
        for name in ("AllGather", "AllReduce", "ReduceScatter")
    },
    **{
        _PAIRS + name: _COMPLEX
        for name in ("_abs", "_binary", "_constant", "_convert", "_iota", "_part", "_unary")
    },
    "mpmd/compile/passes/fusion/attention_search.py:together": (
        "`Search.refusal` plans both as one, or keeps two"
    ),
    "mpmd/compile/passes/fusion/fusion.py:Fusion.rewrite": (
        "`grouping.py` and `merging.py` check each group, and a reshape of a row-major array moves nothing"
    ),
    _PAIRS + "_product": "four products of parts, two where all of an imaginary part is 0",
    _PAIRS + "_moved": "both parts of an element go where the element does",
    **{
        _LAID + name: "an attribute follows the dims to their places in memory"
        for name in ("_dimensions", "_iota", "_padding", "_sizes", "_slice")
    },
    _LAID + "_constant": "the same numbers, in the order in which they lie",
    _LAID + "_nothing": "no attribute names a dim",
    _LAID + "_broadcast": "dims follow to their places, and the operand is transposed into their order",
    _LAID + "_reduce": "reduced dims follow to their places, and the result is transposed into its own order",
    _LAID + "_transpose": "a transpose may have any order",
    _RULES + "_convert": "an element is converted by itself; all pairs of types have a conversion",
    _RULES + "_part": "both parts of a complex number are nodes of the plan",
    _RULES + "read_broadcast": "the attribute names the dim of each dim of the operand",
    _RULES + "read_same": "a copy gives each element where it is",
    "mpmd/compile/lowering/spmd/spmd_rules.py:_sorted_dim": "a sort is along one dim",
}
