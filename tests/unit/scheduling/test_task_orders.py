"""Tables of tasks as records: text there and back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpmd.errors import ScheduleError
from mpmd.passes import make_pass
from mpmd.scheduling.table import Phase, Task, TaskOrders

tasks = st.tuples(st.integers(0, 9), st.integers(0, 99), st.sampled_from(Phase))
tables = st.lists(tasks, unique=True, max_size=12).map(lambda ts: {"m1": ts[::2], "m2/cpu": ts[1::2]})


@given(tables)
def test_text_round_trip(table: dict[str, list[tuple[int, int, Phase]]]) -> None:
    orders = TaskOrders(tuple((mesh, tuple(Task(*t) for t in ts)) for mesh, ts in table.items()))
    assert TaskOrders.parse(str(orders)) == orders


def test_as_the_option_of_a_pass() -> None:
    made = make_pass("mpmd-order-by-tasks", "orders=m1:0F0,0B0;m2:1F0")
    assert made.orders.of_mesh[1] == ("m2", (Task(1, 0, Phase.F),))
    assert str(made) == "mpmd-order-by-tasks{orders=m1:0F0,0B0;m2:1F0}"


def test_pairs_in_text() -> None:
    orders = TaskOrders.parse("m1:0F0,0F1+0B0,0F2+0B1,0B2;m2:1F0,1B0")
    assert [(str(a), str(b)) for a, b in orders.pairs] == [("0F1", "0B0"), ("0F2", "0B1")]
    assert TaskOrders.parse(str(orders)) == orders


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("m1:0F1+0B0+0F2", "tasks 0F1 and 0B0 cannot be one program\n  they must be neighbours on a mesh"),
        ("m1:0F0,0F0", "task 0F0 occurs twice: on mesh 'm1' and on 'm1'"),
        ("m1:0F0;m2:0F0", "task 0F0 occurs twice: on mesh 'm1' and on 'm2'"),
        ("m1:0F0;m1:1F0", "mesh 'm1' has two orders"),
        ("0F0", "'0F0' is not an order of a mesh"),
        ("m1:F0", "'F0' is not a task"),
        ("m1:0X0", "'0X0' is not a task\n  expected: stage, one of the phases F B I W, microbatch"),
    ],
)
def test_bad_tables(text: str, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        TaskOrders.parse(text)
