"""Passes over communication, layouts, fusions and copies."""

from __future__ import annotations

from tests.preconditions import RowsOf

_PASSES = "mpmd/compile/passes"
_LEFT = "tests/unit/compile/passes/test_left_alone.py::test_a_pass_leaves_it_alone"
_EFFECTS = "tests/unit/compile/passes/test_effects.py::test_an_effect_is_done_once"
_COPIES = "tests/unit/compile/passes/test_copies.py::test_results_have_memory_of_their_own"
_ADDED = "within rounding: the order of a sum over devices is open, in XLA too"
_row = RowsOf(_PASSES, _LEFT)
_tested = RowsOf(_PASSES)

_COMMUNICATION = (
    _row(
        "collectives/communication.py:_join_reductions",
        "both sums are over the same groups",
        '("replica_groups", "use_global_device_ids", "constrain_layout")',
        '("use_global_device_ids", "constrain_layout")',
        "sums over other groups",
        _ADDED,
    ),
    _row(
        "collectives/communication.py:_join_reductions",
        "both reduce by one operation",
        "{reducer(a.to_apply), reducer(b.to_apply)} != {site.at.opcode}",
        "reducer(a.to_apply) != site.at.opcode",
        "a sum of a sum and a maximum",
        _ADDED,
    ),
    _row(
        "collectives/communication.py:_join_reductions",
        "which is the one that joins them",
        "{reducer(a.to_apply), reducer(b.to_apply)} != {site.at.opcode}",
        "reducer(a.to_apply) != reducer(b.to_apply)",
        "a maximum of sums",
    ),
    _row(
        "collectives/communication.py:_join_reductions",
        "nothing else reads them: devices would communicate once more",
        " or {only_user(a), only_user(b)} != {site.at}",
        "",
        "a sum over devices that is read twice",
    ),
    _row(
        "collectives/communication.py:_join_reductions",
        "no control edge orders them",
        "a.has_control_edges or b.has_control_edges",
        "False",
        "sums over devices in a fixed order",
    ),
    _row(
        "collectives/communication.py:_join_reductions",
        "both name a channel, or neither: groups are of partitions or of replicas",
        " or (a.channel_id is None) != (b.channel_id is None)",
        "",
        "sums by a channel and without",
    ),
    _row(
        "collectives/communication.py:per_device",
        "where the part begins follows from the device alone",
        " or not is_evaluable(visited)",
        "",
        "a part that begins at an argument",
    ),
    _row(
        "collectives/communication.py:own_part",
        "each device takes the part of its position in the group",
        "dim if fits else None",
        "dim",
        "a part of another device",
    ),
    _row(
        "collectives/communication.py:own_part",
        "the parts are all of the dim",
        " or size * count != whole.dims[dim]",
        "",
        "half of a part",
    ),
    _row(
        "collectives/communication.py:_create",
        "nothing else reads the sum",
        " or only_user(whole) is not site.at",
        "",
        "a part of a sum that is read as a whole, too",
        _ADDED,
    ),
    _row(
        "collectives/communication.py:_create",
        "no control edge orders it",
        "whole.has_control_edges",
        "False",
        "a part of a sum in a fixed order",
    ),
    _row(
        "collectives/communication.py:_move",
        "nothing else reads the sum",
        " or only_user(reduced) is not site.at",
        "",
        "a transpose of a sum that is read as it is, too",
    ),
    _row(
        "collectives/communication.py:_move",
        "no control edge orders it",
        "reduced.has_control_edges or ",
        "",
        "a transpose of a sum in a fixed order",
    ),
    _row(
        "collectives/communication.py:_key",
        "arrays are of one type",
        "instruction.operands[0].shape.dtype",
        "instruction.opcode",
        "gathers of different types",
    ),
    _row(
        "collectives/communication.py:_key",
        "groups and dims are the same",
        "tuple(sorted(attributes.items(), key=lambda item: item[0]))",
        "len(attributes)",
        "gathers in different groups",
    ),
    _row(
        "collectives/communication.py:_key",
        "they reduce by equal computations",
        "        called,\n",
        "        len(called),\n",
        "a sum and a maximum over devices",
    ),
    _row(
        "collectives/communication.py:_first_set",
        "none needs another: it would wait for itself",
        "any(reach.connected(candidate, other) for other in chosen)",
        "False",
        "gathers that depend on each other",
    ),
    _row(
        "collectives/communication.py:combine",
        "no control edge orders them",
        "not instruction.has_control_edges",
        "True",
        "gathers in a fixed order",
    ),
)
_LAID = (
    _row(
        "layout/layout_normalization.py:_elementwise",
        "operands and result lie in one order",
        "len(layouts) != 1 or ",
        "",
        "a sum of arrays in different orders",
    ),
    _row(
        "layout/layout_normalization.py:_elementwise",
        "they have as many dims: bits of narrower elements are along one more",
        "len(layouts) != 1 or ranks - {site.shape.rank}",
        "len(ranks) != 1",
        "bits along a new dim of an array in another order",
    ),
    _row(
        "layout/layout_normalization.py:_reordered",
        "moved arrays lie in the order of the result",
        "any(o.shape.layout is not site.shape.layout for o in arrays)",
        "False",
        "arrays in different orders, joined",
    ),
    _row(
        "layout/layout_normalization.py:_sorted",
        "dims are not in order",
        "list(dims) == sorted(dims)",
        "False",
        "a broadcast in order",
    ),
)
_FUSED = (
    _row(
        "fusion/fusion.py:_Merging._refusal",
        "nothing between two groups needs one and feeds the other",
        "grouping.would_create_cycle(a, b)",
        "False",
        "work that needs the call between",
    ),
    _row(
        "fusion/grouping.py:Grouping._following",
        "control edges order groups, too",
        "(*self.readers(instruction), *instruction.control_successors)",
        "tuple(self.readers(instruction))",
        "work between which an order leads",
    ),
    _row(
        "fusion/grouping.py:is_fusible",
        "no control edge orders the work",
        " or instruction.has_control_edges",
        "",
        "work whose order is fixed, beside other work",
    ),
    _row(
        "fusion/grouping.py:is_fusible",
        "arrays have elements: a kernel's loops run once or more",
        "not any(is_trivial(value) for value in (instruction, *instruction.operands))",
        "True",
        "work on arrays without elements",
    ),
    _tested(
        "fusion/grouping.py:remove_all_unused",
        "removed instructions have no effect",
        " and not instruction.has_side_effect",
        "",
        f"{_EFFECTS}[beside a fusion]",
    ),
    _row(
        "fusion/sort_prefix.py:_taken",
        "all results are read by slices",
        ' or any(u.opcode != "slice" for u in users)',
        "",
        "sorted values that are all read",
    ),
    _row(
        "fusion/sort_prefix.py:_taken",
        "of the first elements",
        "taken < sort.operands[0].shape.dims[along]",
        "True",
        "the last of sorted values",
    ),
    _row(
        "fusion/sort_prefix.py:_taken",
        "no control edge orders them",
        "any(i.has_control_edges for i in (sort, *elements, *users))",
        "False",
        "the first of values that are sorted in a fixed order",
    ),
    _row(
        "fusion/sort_prefix.py:_taken",
        "none is a result of the program",
        "e.is_root or ",
        "",
        "sorted values that are a result",
    ),
)
_COPIED = (
    _tested(
        "layout/copy_insertion.py:_own_results",
        "no two results are one value",
        " or base in seen",
        "",
        f"{_COPIES}[a value twice]",
    ),
    _tested(
        "layout/copy_insertion.py:_own_results",
        "no result is a parameter or a constant",
        "(base[0].opcode in _GIVEN or base in seen)",
        "base in seen",
        f"{_COPIES}[a parameter]",
    ),
    _tested(
        "layout/copy_insertion.py:_own_results",
        "state that stays is at its place",
        "base == (computation.parameters[0], (number,))",
        "base[0] is computation.parameters[0]",
        f"{_COPIES}[state that changes its place]",
    ),
    _tested(
        "layout/copy_insertion.py:_base",
        "what a barrier, a reshape or a bitcast passes on is the same memory",
        '("bitcast", "reshape", "opt-barrier")',
        '("bitcast", "reshape")',
        f"{_COPIES}[a parameter behind a barrier]",
    ),
    _tested(
        "layout/copy_insertion.py:_base",
        "what a loop leaves unchanged is the memory of its initial state",
        "_is_unchanged(value, index)",
        "False",
        f"{_COPIES}[a parameter that a loop leaves unchanged]",
    ),
    _tested(
        "layout/copy_insertion.py:_base",
        "the initial state of a loop is seen through a barrier",
        "_is_unchanged(value, index)",
        '(_is_unchanged(value, index) and value.operands[0].opcode == "tuple")',
        f"{_COPIES}[a parameter that a loop behind a barrier leaves unchanged]",
    ),
    _tested(
        "layout/copy_insertion.py:_numbered",
        "true selects branch 0",
        "builder.select(predicate, first, second)",
        "builder.select(predicate, second, first)",
        "tests/unit/compile/passes/test_copies.py::test_truth_selects_the_first_branch",
    ),
)

ROWS = (*_COMMUNICATION, *_LAID, *_FUSED, *_COPIED)

ALWAYS = {
    f"{_PASSES}/layout/layout_normalization.py:_decompose": "a copy, unless the bytes stay in place",
    f"{_PASSES}/layout/layout_normalization.py:LayoutRemoval": "transposes describe the order of layouts",
    f"{_PASSES}/layout/layout_assignment.py:LayoutAssignment": "copies separate orders that differ",
    f"{_PASSES}/fusion/fusion.py:repeat_cheap_results": "an operation gives one number everywhere",
}
