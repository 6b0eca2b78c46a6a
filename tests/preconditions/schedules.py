"""The order in which instructions run, and what is computed again to save memory."""

from __future__ import annotations

from tests.preconditions import RowsOf

_UNIT = "tests/unit/compile/schedule"
_ORDERS = f"{_UNIT}/test_memory_orders.py"
_tested = RowsOf("mpmd/compile/schedule")
_once = RowsOf(
    "mpmd/compile/schedule", f"{_UNIT}/test_rematerialization.py::test_it_is_done_once_and_where_it_stands"
)
_stays = RowsOf("mpmd/compile/schedule", f"{_UNIT}/test_side_by_side.py::test_what_stays_where_it_is")

_ORDERED = (
    _tested(
        "memory_schedule.py:MemorySchedule.run",
        "the module has no order yet: one that is given stays",
        "if module.is_scheduled:",
        "if False:",
        f"{_ORDERS}::test_the_best_order_is_no_worse_than_any",
    ),
    _tested(
        "memory_schedule.py:MemorySchedule._best",
        "of all orders the one with the lowest peak is taken",
        "min(orders, key=lambda order: heap.simulate(order).score)",
        "orders[0]",
        f"{_ORDERS}::test_whichever_scheduler_leads_is_followed[post-order]",
    ),
    _tested(
        "memory_schedule.py:_ListScheduler.__init__",
        "what a control edge orders before it has run",
        "(*i.operands, *i.control_predecessors)",
        "i.operands",
        f"{_ORDERS}::test_control_predecessors_run_first[list]",
    ),
)
_AGAIN = (
    _once(
        "rematerialization.py:_can_repeat",
        "it has no effect",
        " or instruction.has_side_effect",
        "",
        "an effect",
    ),
    _once(
        "rematerialization.py:_can_repeat",
        "it calls nothing whose effect only the caller knows",
        "instruction.opcode in _NEVER or ",
        "",
        "a call",
    ),
    _once(
        "rematerialization.py:_can_repeat",
        "devices do not communicate in it",
        "if instruction.info.category in (Category.COLLECTIVE, Category.ASYNC):",
        "if False:",
        "a sum over devices",
    ),
    _once(
        "rematerialization.py:_can_repeat",
        "no control edge orders it",
        "return not instruction.has_control_edges",
        "return True",
        "a fixed order",
    ),
)
_BESIDE = (
    _tested(
        "side_by_side.py:_is_view",
        "a view follows its operand only if no control edge keeps it behind something else",
        " and not instruction.control_predecessors",
        "",
        f"{_UNIT}/test_side_by_side.py::test_an_order_is_kept[a view]",
    ),
    _tested(
        "side_by_side.py:_is_given",
        "a constant comes first only if no control edge keeps it behind something else",
        " and not instruction.control_predecessors",
        "",
        f"{_UNIT}/test_side_by_side.py::test_an_order_is_kept[a constant]",
    ),
    _stays(
        "side_by_side.py:SideBySide._is_small",
        "no control edge comes before it",
        " or instruction.control_predecessors",
        "",
        "another order",
    ),
    _stays(
        "side_by_side.py:SideBySide._is_small",
        "it changes no array in place",
        " or in_place_pairs(instruction)",
        "",
        "changes in place",
    ),
    _stays(
        "side_by_side.py:SideBySide._is_small",
        "it becomes a kernel of its own, no call",
        "instruction.opcode in _ALONE | _MOVED",
        "instruction.opcode in _MOVED",
        "calls",
    ),
    _stays(
        "side_by_side.py:_structure",
        "it computes the same as the others",
        "(i.opcode, tuple",
        "(tuple",
        "other work",
    ),
    _tested(
        "side_by_side.py:_together",
        "the peak grows by no more than a part of it",
        "then.peak <= limit and ",
        "",
        "tests/text/test_text.py::test_file[hlo/schedule/side-by-side-0]",
    ),
)

ROWS = (*_ORDERED, *_AGAIN, *_BESIDE)

ALWAYS = {
    "mpmd/compile/schedule/memory_schedule.py:post_order": (
        "operands and control predecessors come before users"
    ),
}
