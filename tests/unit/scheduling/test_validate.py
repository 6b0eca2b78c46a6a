import pytest

from mpmd.errors import ScheduleError
from mpmd.scheduling import ScheduleTable, Task, get_schedule, linearize, validate


def table(*orders: str, placement: tuple[int, ...], has_backward: bool = True) -> ScheduleTable:
    parsed = tuple(tuple(Task.parse(cell) for cell in order.split()) for order in orders)
    splits = any("I" in order for order in orders)
    return ScheduleTable(parsed, placement, splits, has_backward)


def message(broken: ScheduleTable, num_microbatches: int | None = None) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(broken, num_microbatches)
    return str(caught.value)


def test_the_certificate_holds_all_tasks_behind_what_they_need() -> None:
    good = get_schedule("zb_h1").table(4, 4, 8)
    order = validate(good, 8)
    place = {task: k for k, task in enumerate(order)}
    assert len(place) == 4 * 8 * 3
    assert all(place[source] < place[task] for task in order for source in good.dependencies(task))


def test_a_backward_before_its_forward() -> None:
    text = message(table("0B0 0F0", placement=(0,)))
    assert text.splitlines()[0] == "task 0B0 is impossible: it needs 0F0, which comes after it on mesh 0"


def test_a_weight_gradient_before_the_input_gradient() -> None:
    text = message(table("0F0 0W0 0I0", placement=(0,)))
    assert text.splitlines()[0] == "task 0W0 is impossible: it needs 0I0, which comes after it on mesh 0"


def test_a_deadlock_over_two_meshes_is_spelled_out() -> None:
    text = message(table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", placement=(0, 1)))
    assert text.splitlines() == [
        "task 0B0 is impossible: the schedule deadlocks",
        "  mesh 0 waits at 0B0 (number 1), which needs 1B0 from mesh 1",
        "  mesh 1 waits at 1F1 (number 0), which needs 0F1 from mesh 0",
        "  move one of these tasks after the work that the others wait for",
    ]


def test_a_mesh_outside_the_cycle_is_not_blamed() -> None:
    # mesh 2 only waits for mesh 1, which is in the cycle with mesh 0
    text = message(table("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", "2F0 2B0 2F1 2B1", placement=(0, 1, 2)))
    assert text.startswith("task 0B0 is impossible: the schedule deadlocks\n  mesh 0 waits at 0B0")
    assert "mesh 2 stands" not in text


def test_a_task_on_the_wrong_mesh() -> None:
    assert message(table("0F0 0B0 1F0", "1B0", placement=(0, 1))).startswith(
        "task 1F0, number 2 on mesh 0: stage 1 is on mesh 1"
    )


def test_a_task_twice() -> None:
    assert message(table("0F0 0F0 0B0", placement=(0,))).startswith(
        "task 0F0, number 1 on mesh 0: it is already at number 0"
    )


def test_a_task_missing() -> None:
    assert message(table("0F0 0B0 0F1", placement=(0,))).startswith(
        "task 0B1 is missing; it belongs on mesh 0"
    )


def test_a_whole_microbatch_missing() -> None:
    text = message(table("0F0 0B0", placement=(0,)), 2)
    assert text.splitlines() == [
        "2 problems in the schedule:",
        "  1. task 0F1 is missing; it belongs on mesh 0",
        "  2. task 0B1 is missing; it belongs on mesh 0",
    ]


def test_a_backward_both_whole_and_split() -> None:
    assert message(table("0F0 0B0 0I0 0W0", placement=(0,))).startswith(
        "2 problems in the schedule:\n  1. task 0I0, number 2 on mesh 0: 0B0 is there as well"
    )


def test_half_a_backward() -> None:
    assert message(table("0F0 0I0", placement=(0,))).startswith("task 0W0 is missing")


def test_a_stage_and_a_microbatch_that_are_not_there() -> None:
    assert message(table("0F0 0B0 3F0", placement=(0,))).startswith(
        "task 3F0, number 2 on mesh 0: there is no stage 3; the stages are 0 to 0"
    )
    assert message(table("0F0 0B0 0F1 0B1", placement=(0,)), 1).startswith(
        "2 problems in the schedule:\n  1. task 0F1, number 2 on mesh 0: there is no microbatch 1"
    )


def test_a_backward_in_a_forward_only_schedule() -> None:
    assert message(table("0F0 0B0", placement=(0,), has_backward=False)).startswith(
        "task 0B0, number 1 on mesh 0: the schedule is forward only"
    )


def test_many_problems_are_cut_off_but_counted() -> None:
    text = message(table("0F0", placement=(0,)), 30)
    assert text.splitlines()[0] == "59 problems in the schedule:"
    assert len(text.splitlines()) == 9


def test_linearize_alone_finds_deadlocks_too() -> None:
    with pytest.raises(ScheduleError, match=r"^task 0B0 is impossible"):
        linearize(table("0B0 0F0", placement=(0,)))
