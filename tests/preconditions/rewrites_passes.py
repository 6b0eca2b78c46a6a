"""Passes of simplification beside the algebraic one: constants, equal work, branches, loops, sorts, rows."""

from __future__ import annotations

from tests.preconditions import Precondition

_SIMPLIFY = "mpmd/compile/passes/simplify"
_LEFT = "tests/unit/compile/passes/test_left_alone.py::test_a_pass_leaves_it_alone"
_SINGLE = "tests/unit/compile/passes/test_single_passes.py"
_TRIPS = f"{_SINGLE}::test_trips_are_not_guessed"
_COUNTED = f"{_SINGLE}::test_trips_are_what_the_evaluator_counts"
_DIRECTED = "tests/property/test_directed_rewrites.py::test_a_pass_keeps_the_numbers"
_EFFECTS = "tests/unit/compile/passes/test_effects.py"


def _row(place: str, holds: str, code: str, dropped: str, left: str, exact: str = "exact") -> Precondition:
    """A precondition that a program shows which the pass must leave alone."""
    return Precondition(f"{_SIMPLIFY}/{place}", holds, code, dropped, f"{_LEFT}[{left}]", exact)


def _tested(place: str, holds: str, code: str, dropped: str, test: str, exact: str = "exact") -> Precondition:
    return Precondition(f"{_SIMPLIFY}/{place}", holds, code, dropped, test, exact)


_COUNTING = (
    _tested(
        "trip_count.py:counter_of",
        "the counter moves",
        " or step == 0",
        "",
        f"{_TRIPS}[('s32', 10, 0, 'GT', 0)]",
    ),
    _tested(
        "trip_count.py:counter_of",
        "the counter's type holds its value after the last iteration: it does not wrap",
        "low <= start + trips * step <= high",
        "True",
        f"{_TRIPS}[('s8', 0, 126, 'LE', 5)]",
    ),
    _row(
        "trip_count.py:counter_of",
        "the limit is a constant",
        "limit is None or ",
        "",
        "a limit that is computed",
    ),
    _row(
        "trip_count.py:_step",
        "the element that is compared is the one that is counted",
        " or _element(a, state) != index",
        "",
        "a counter that another element counts",
    ),
    _tested(
        "trip_count.py:_trips",
        "a counter that stops at its limit meets it",
        "distance % step == 0 and ",
        "",
        f"{_TRIPS}[('s32', 0, 5, 'NE', 2)]",
    ),
    _tested(
        "trip_count.py:_trips",
        "it moves towards its limit",
        " and distance // step >= 0",
        "",
        f"{_TRIPS}[('s32', 0, 6, 'NE', -2)]",
    ),
    _tested(
        "trip_count.py:_trips",
        "a counter below its limit rises",
        "(step > 0) != rising",
        "False",
        f"{_TRIPS}[('s32', 0, 10, 'LT', -1)]",
    ),
    _tested(
        "trip_count.py:_trips",
        "a limit that is reached counts",
        'direction in ("LE", "GE")',
        "False",
        f"{_COUNTED}[('s32', 0, 10, 'LE', 5)]",
    ),
    _tested(
        "trip_count.py:counter_of",
        "the direction turns with the operands",
        "_FLIPPED[direction]",
        "direction",
        f"{_DIRECTED}[hlo-while-loop-unroller]",
    ),
)
_LOOPS = (
    _row(
        "while_simplifier.py:WhileSimplifier._sink_constants",
        "a constant of the state stays the same in each iteration",
        "not passes_through(loop, index) or ",
        "",
        "state of a loop that changes, though it begins with a constant",
    ),
    _row(
        "while_simplifier.py:_needed",
        "state that an effect reads is kept",
        "instruction.has_side_effect",
        "False",
        "state that an effect reads",
    ),
    _row(
        "while_simplifier.py:_needed",
        "state from which needed state follows is kept",
        "if index not in needed:",
        "if False:",
        "state that needed state reads",
    ),
    _tested(
        "while_simplifier.py:_needed",
        "state that the condition reads is kept",
        "needed |= {r.tuple_index for r in loop.while_condition.parameters[0].users}",
        "",
        f"{_DIRECTED}[hlo-while-simplifier]",
    ),
    _row(
        "while_simplifier.py:may_change_state",
        "nothing else calls the loop's computations",
        "all(sum(c.callers.values()) == 1 for c in loop.called) and ",
        "",
        "unused state of loops that share their body",
    ),
    _row(
        "while_simplifier.py:_count",
        "a condition with an effect is evaluated as often as before",
        " and not any(i.has_side_effect for i in loop.while_condition)",
        "",
        "a single iteration whose condition has an effect",
    ),
    _tested(
        "while_simplifier.py:_count",
        "a loop that becomes its body runs once",
        "counter.trips <= 1",
        "counter.trips <= 2",
        f"{_DIRECTED}[hlo-while-simplifier]",
    ),
    _row(
        "loop_state.py:has_plain_state",
        "no control edge orders the loop, which is replaced",
        " or loop.has_control_edges",
        "",
        "unused state of a loop whose order is fixed",
    ),
    _row(
        "loop_state.py:has_plain_state",
        "the state as a whole is not a result of the program",
        "loop.is_root or ",
        "",
        "state that is a result as a whole",
    ),
    _row(
        "while_invariant_code_motion.py:_may_move",
        "what moves has no effect, which would be done once, or without an iteration",
        " or instruction.has_side_effect",
        "",
        "an effect for each element of what does not change",
    ),
    _row(
        "while_invariant_code_motion.py:_may_move",
        "devices communicate in each iteration that they agree on",
        "instruction.info.category not in _OUTSIDE",
        "True",
        "a sum over devices of what does not change",
    ),
    _row(
        "while_invariant_code_motion.py:_may_move",
        "no control edge orders it",
        "instruction.has_control_edges",
        "False",
        "work whose order in the body is fixed",
    ),
    _row(
        "while_invariant_code_motion.py:_invariant",
        "the state that it reads passes through each iteration unchanged",
        "passes_through(loop, instruction.tuple_index)",
        "True",
        "work on what changes",
    ),
    _row(
        "while_invariant_code_motion.py:WhileInvariantCodeMotion.rewrite_computation",
        "nothing else calls the loop's computations",
        " and may_change_state(instruction)",
        " and len(instruction.operands[0].operands) > 0",
        "work of loops that share their body",
    ),
    _row(
        "while_loop_unroller.py:WhileLoopUnroller._is_short",
        "the body is elementwise work and movement: no effect, no communication",
        "i.info.category not in _CHEAP or i.called or i.has_side_effect",
        "i.called",
        "a few iterations with an effect",
    ),
    _row(
        "while_loop_unroller.py:WhileLoopUnroller._is_short",
        "no control edge orders the loop",
        "not loop.has_control_edges",
        "True",
        "a few iterations whose order is fixed",
    ),
)
_BRANCHES = (
    _row(
        "conditional_simplifier.py:_taken",
        "branches that are equal read equal operands",
        "any(o is not first for o in instruction.operands[2:])",
        "False",
        "equal branches on different operands",
    ),
    _row(
        "conditional_simplifier.py:_taken",
        "branches that are taken for one are equal, with all that they call",
        "0 if len(digests) == 1 else None",
        "0",
        "different branches on one operand",
    ),
    _tested(
        "conditional_simplifier.py:_taken",
        "a number outside of the branches selects the last one",
        "int(value) if 0 <= int(value) < count else count - 1",
        "int(value) % count",
        f"{_SINGLE}::test_a_number_outside_of_the_branches_selects_the_last_one[-2]",
    ),
    _tested(
        "conditional_simplifier.py:_taken",
        "true selects the first branch",
        "0 if value else 1",
        "1 if value else 0",
        f"{_DIRECTED}[hlo-conditional-simplifier]",
    ),
    _row(
        "conditional_simplifier.py:_drop_unused",
        "no control edge orders the conditional, which is replaced",
        "instruction.has_control_edges",
        "False",
        "unused results of a branch whose order is fixed",
    ),
    _row(
        "conditional_simplifier.py:_drop_unused",
        "nothing else calls the branches",
        "not own or ",
        "",
        "unused results of branches that others call",
    ),
    _row(
        "conditional_simplifier.py:_drop_unused",
        "results are read one by one",
        ' or any(u.opcode != "get-tuple-element" for u in instruction.users)',
        "",
        "results of a branch that are read as a whole",
    ),
    _tested(
        "conditional_simplifier.py:_drop_unused",
        "effects of the branches are done once: the old conditional goes",
        "instruction.parent.remove(instruction)",
        "remove_unused(instruction)",
        f"{_EFFECTS}::test_an_effect_is_done_once[an unused result of a branch]",
    ),
)
_SHARED = (
    _row(
        "cse.py:_key",
        "operands are exchanged of operations that commute",
        "instruction.info.commutative",
        "True",
        "differences, which do not commute",
    ),
    _row(
        "cse.py:_bytes",
        "literals are equal bit for bit",
        "return literal.tobytes()",
        "return tuple(literal.reshape(-1).tolist())",
        "zeros of both signs",
    ),
    _row(
        "cse.py:Cse._may_share",
        "shared instructions have no effect",
        " and not instruction.has_side_effect",
        "",
        "an effect twice",
    ),
    _row(
        "cse.py:Cse._may_share",
        "no control edge orders one of both",
        " or instruction.has_control_edges",
        "",
        "equal work, one in a fixed order",
    ),
    _row(
        "cse.py",
        "values that barriers separate stay apart",
        ', "opt-barrier"]',
        "]",
        "values on both sides of a barrier",
    ),
    _row(
        "cse.py:_key",
        "called computations are equal",
        "tuple(digests[c] for c in instruction.called)",
        "len(instruction.called)",
        "reductions by different computations",
    ),
    _row(
        "cse.py:_key",
        "attributes are equal",
        "tuple(sorted(instruction.attributes.items(), key=lambda item: item[0]))",
        "len(instruction.attributes)",
        "comparisons in different directions",
    ),
    _row(
        "cse.py:_key",
        "types, dims and layouts are equal",
        "instruction.shape,",
        "instruction.shape.rank if instruction.shape.is_array else 0,",
        "conversions to different types",
    ),
    _row(
        "dce.py:Dce.rewrite",
        "removed instructions have no effect, no readers, and order nothing",
        "is_dead(instruction)",
        "not instruction.users and not instruction.is_root",
        "an unused effect",
    ),
    Precondition(
        "mpmd/compile/passes/rewriter.py:is_dead",
        "it has no effect, and none of the computations that it calls",
        "\n        or instruction.has_side_effect",
        "",
        f"{_LEFT}[an unused loop with an effect]",
    ),
    Precondition(
        "mpmd/compile/passes/rewriter.py:is_dead",
        "it does not order two others",
        "(instruction.control_successors and instruction.control_predecessors)",
        "False",
        f"{_LEFT}[work between two that it orders]",
    ),
    Precondition(
        "mpmd/compile/passes/rewriter.py:is_dead",
        "it is not a parameter",
        'instruction.opcode == "parameter"',
        "False",
        f"{_LEFT}[an unused parameter]",
    ),
    _row(
        "constant_folding.py:ConstantFolding._is_foldable",
        "no control edge orders it",
        " or instruction.has_control_edges",
        "",
        "a constant expression whose order is fixed",
    ),
)
_ROWS = (
    _tested(
        "sort_simplifier.py:_sort_of_one",
        "the sorted dim has at most one element",
        "> 1",
        "> 9",
        f"{_DIRECTED}[hlo-sort-simplifier]",
    ),
    _row(
        "sort_simplifier.py:_sort_used",
        "dropped operands are not compared",
        "i in used or i in compared",
        "i in used",
        "a key that is compared and not used",
    ),
    _row(
        "sort_simplifier.py:_sort_used",
        "results are read one by one",
        'any(u.opcode != "get-tuple-element" for u in site.at.users)',
        "False",
        "sorted values that are read as a whole",
    ),
    _row(
        "sort_simplifier.py:_sort_used",
        "it is not a result of the program",
        "site.at.is_root or ",
        "",
        "a sort that is a result",
    ),
    _row(
        "one_per_row_rewriter.py:_label",
        "the type of the labels counts all columns: positions do not wrap",
        "max(x.shape.dims) - 1 > integer_range(indices.shape.dtype)[1]",
        "False",
        "labels whose type cannot count the columns",
    ),
    _row(
        "one_per_row_rewriter.py:_label",
        "and all rows",
        "max(x.shape.dims) - 1",
        "x.shape.dims[-1] - 1",
        "labels whose type cannot count the rows",
    ),
    _row(
        "one_per_row_rewriter.py:_label",
        "rows are counted by an iota",
        "len(labels) != 1 or ",
        "",
        "rows in an order that is read",
    ),
    _row(
        "one_per_row_rewriter.py:_label",
        "each row is read once, in order",
        "not in_order or math.prod(extents) != math.prod(sizes)",
        "False",
        "fewer rows than the array has",
    ),
    _tested(
        "one_per_row_rewriter.py:_gather",
        "a label outside of the row reads its end, as a gather does",
        'build.add("minimum", build.add("maximum", label, low), high)',
        "label",
        f"{_DIRECTED}[hlo-one-per-row-rewriter]",
        "within rounding: the sum of one element and zeros is 0 for -0",
    ),
    _row(
        "one_per_row_rewriter.py:_scatter",
        "an update is added: (a, b) -> a + b",
        'reducer(site.at.to_apply) != "add"',
        'site.at.to_apply.root.opcode != "add"',
        "an update that is added to itself",
        "within rounding: 0 + -0 is 0, here -0",
    ),
    _row(
        "one_per_row_rewriter.py:_scatter",
        "it is added to zeros",
        "not _is_zero(zeros) or ",
        "",
        "updates of ones",
    ),
    _row(
        "unit_dim_removal.py:_elementwise",
        "operands have the dims of the result, or none",
        " or any(o.shape.dims not in (dims, ()) for o in site.operands)",
        "",
        "a dim of one that bits add",
    ),
    _row(
        "unit_dim_removal.py:UnitDimRemoval.rewrite_computation",
        "no control edge orders the work",
        "not i.has_control_edges",
        "True",
        "unit dims of work whose order is fixed",
    ),
    _row(
        "unit_dim_removal.py:_reduce",
        "no dim of one is reduced: the initial value takes part",
        "any(d not in places for d in site.at.dimensions)",
        "False",
        "a reduction over a dim of one",
    ),
    _row(
        "zero_sized_removal.py:_is_removable",
        "an empty array has no effect",
        " or instruction.has_side_effect",
        "",
        "an empty result of a call with an effect",
    ),
    _row(
        "zero_sized_removal.py:_is_removable",
        "parameters stay",
        '("parameter", "constant", "get-tuple-element")',
        '("constant", "get-tuple-element")',
        "an empty argument",
    ),
    _row(
        "zero_sized_removal.py:_is_removable",
        "devices that communicate all do",
        "instruction.info.category not in _OUTSIDE",
        "True",
        "an empty sum over devices",
    ),
    _tested(
        "call_inliner.py:inline",
        "effects of the body follow those before the call",
        "effect.add_control_predecessor(early)",
        "pass",
        f"{_EFFECTS}::test_an_inlined_effect_keeps_its_place",
    ),
    _tested(
        "call_inliner.py:inline",
        "and precede those after it",
        "late.add_control_predecessor(effect)",
        "pass",
        f"{_EFFECTS}::test_an_inlined_effect_keeps_its_place",
    ),
    _row(
        "call_inliner.py:CallInliner.rewrite",
        "the call may be inlined",
        " and _is_inlineable(instruction)",
        "",
        "a call that must stay",
    ),
)

ROWS = (*_COUNTING, *_LOOPS, *_BRANCHES, *_SHARED, *_ROWS)

ALWAYS = {
    f"{_SIMPLIFY}/flatten_call_graph.py:FlattenCallGraph.rewrite": "a copy computes what the original does",
    f"{_SIMPLIFY}/tuple_simplifier.py:TupleSimplifier": "it has the rules of tuples alone",
    f"{_SIMPLIFY}/unit_dim_removal.py:_broadcast": "a dim of 1 is repeated once",
    f"{_SIMPLIFY}/unit_dim_removal.py:_transpose": "dims of 1 have no order",
    f"{_SIMPLIFY}/unit_dim_removal.py:_dot": "sums and pairs of the remaining dims are the same",
}
