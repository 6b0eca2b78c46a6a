"""HLO text, and the memory of programs: sharing, live ranges, orders, thunks."""

from __future__ import annotations

from tests.preconditions import Precondition

_MEMORY = "tests/property/test_directed_hlotext.py::test_values_keep_their_memory_until_the_last_reader"
_TEXT = "tests/text/test_text.py::test_file"
_SIZES = "mpmd/compile/kernels/planner/collectives.py:_check_sizes"
_FITTING = (
    "tests/unit/compile/backends/native_cpu/test_rare_hlo.py::"
    "test_a_collective_whose_groups_do_not_fit_its_shapes_is_refused"
)

ROWS = (
    Precondition(
        "mpmd/compile/buffers/sharing.py:Sharing._may_join",
        "No two values of the groups are live at one instant, but where the two that are joined may touch.",
        "if self.occupancy.conflict(x, y, touching):",
        "if False:",
        _MEMORY,
    ),
    Precondition(
        "mpmd/compile/buffers/sharing.py:Sharing._in_place",
        "An array that is changed in place is read by nothing later, be the result unread or not.",
        "if not self.occupancy.ends_at(source, instants[instruction]):",
        "if False:",
        "tests/unit/compile/buffers/test_sharing.py"
        "::test_a_change_that_nothing_reads_leaves_an_array_that_is_read_later",
    ),
    Precondition(
        "mpmd/compile/buffers/sharing.py:Sharing._written_over",
        "A result is written over an operand whose last reader writes it.",
        "self.occupancy.last(source) != now or ",
        "",
        "tests/unit/compile/buffers/test_sharing.py"
        "::test_a_result_that_nothing_reads_lies_over_no_operand_that_is_read_later",
    ),
    Precondition(
        "mpmd/compile/analysis/liveness.py:Occupancy._state_spans",
        "The state of a loop is in use until the last reader in its body.",
        "last = max(last, instant)",
        "pass",
        _MEMORY,
    ),
    Precondition(
        "mpmd/compile/analysis/liveness.py:overwritten_pairs",
        "An update that reads its array a second time changes a copy.",
        "if not _is_read_too(instruction, p[0])",
        "if True",
        "tests/unit/compile/buffers/test_changes_in_place.py"
        "::test_what_is_read_is_the_array_before_the_change",
    ),
    Precondition(
        "mpmd/compile/schedule/memory_schedule.py:_sunk",
        "What needs an instruction that moves behind the peak moves with it.",
        "if any(n in group for n in needed):",
        "if False:",
        "tests/property/test_hlo_schedules.py::test_orders_and_repetitions_keep_values",
    ),
    Precondition(
        "mpmd/compile/schedule/memory_schedule.py:_hoisted",
        "An instruction moves before the peak no further than behind everything that it needs.",
        "first = max(needed, default=-1) + 1",
        "first = 0",
        "tests/property/test_hlo_schedules.py::test_orders_and_repetitions_keep_values",
    ),
    Precondition(
        "mpmd/compile/hlo/shape.py:Shape.with_dtype",
        "The bits of a packed element belong to its type: another type is not packed.",
        "if layout is not None and layout.element_bits:",
        "if False:",
        "tests/unit/compile/hlo/test_shape.py::test_elements_of_another_type_are_not_packed",
    ),
    Precondition(
        "mpmd/compile/kernels/evaluate.py:evaluate",
        "A space is computed in slices of a dim along which nothing is added up.",
        "extent * each <= most or _adds_columns(plan)",
        "extent * each <= most",
        "tests/unit/compile/kernels/test_evaluate.py::test_slices_of_a_space_give_what_the_whole_gives",
    ),
    Precondition(
        "mpmd/compile/passes/expand/indexing.py:_apart",
        "A scatter into several arrays is one for each where no array is combined with another's updates.",
        " or any(_read(part) - {k, count + k} for k, part in enumerate(parts))",
        "",
        f"{_TEXT}[hlo/expand/scatter-simplifier-0]",
    ),
    Precondition(
        "mpmd/compile/hlo/collective_groups.py:check_collective",
        "Groups name each device once.",
        "if not all(groups) or ids != list(range(len(ids))):",
        "if False:",
        "tests/unit/compile/hlo/test_verifier.py::test_broken_operations",
    ),
    Precondition(
        _SIZES,
        "Gathers give each member's array once, scatters a part for each member.",
        "not fits or ",
        "",
        f"{_FITTING}[all-gather]",
    ),
    Precondition(
        _SIZES,
        "An all-to-all divides its dim by the members.",
        ' or (opcode == "all-to-all" and any(n % count for n in parts))',
        "",
        f"{_FITTING}[all-to-all]",
    ),
    Precondition(
        "mpmd/compile/hlo/literals.py:_floats",
        "A number that is beyond the largest value of its type is refused, not read as an infinity.",
        "if wide is not None:",
        "if False:",
        f"{_TEXT}[hlo/forms/refused-0]",
    ),
    Precondition(
        "mpmd/compile/hlo/printer.py:_spelled",
        "A name that is a word of the language is written after a percent sign.",
        "if name in _KEYWORDS",
        "if False",
        f"{_TEXT}[hlo/forms/shapes-0]",
    ),
    Precondition(
        "mpmd/compile/hlo/literals.py:_number",
        "The sign of a zero is read back: -0 would be an integer.",
        'if text == "-0.0":',
        "if False:",
        f"{_TEXT}[hlo/forms/literals-0]",
    ),
    Precondition(
        "mpmd/compile/hlo/shape_inference/products.py:dot",
        "Both operands of a product are real, or both are complex.",
        '(a.info.kind == "complex") == (b.info.kind == "complex"),',
        "True,",
        "tests/unit/compile/hlo/test_verifier.py::test_broken_operations",
    ),
    Precondition(
        "mpmd/compile/lowering/lower.py:flatten_parameters",
        "An alias that names an array of a tuple follows it to its own parameter.",
        "parameter=number[said.parameter, said.parameter_index]",
        "parameter=said.parameter",
        "tests/unit/compile/lowering/test_flat_parameters.py::test_numbers_layouts_aliases_and_donors_follow",
    ),
)

ALWAYS = {
    "mpmd/compile/passes/simplify/algebra/movement.py:copy_of_tuple": (
        "a copy is its operand's value; values that are live at once never share memory"
    ),
    "mpmd/compile/passes/simplify/control_flow.py:CallInliner": (
        "the value of a call or a fusion is the value of its computation's root"
    ),
}
