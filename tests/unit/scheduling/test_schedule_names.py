from pathlib import Path

import pytest

from mpmd.errors import ScheduleError
from mpmd.scheduling import (
    SCHEDULES,
    Phase,
    PipelineSchedule,
    Task,
    from_csv,
    from_function,
    from_table,
    get_schedule,
)
from mpmd.scheduling.catalogue import ALIASES
from mpmd.scheduling.definition import PipelineShape


def orders(schedule: str | PipelineSchedule, *numbers: int, **options: object) -> list[str]:
    table = get_schedule(schedule, **options).table(*numbers)
    return [" ".join(f"{t.phase.value}{t.microbatch}" for t in order) for order in table.orders]


def first_line(caught: pytest.ExceptionInfo[ScheduleError]) -> str:
    return str(caught.value).splitlines()[0]


def test_the_names() -> None:
    assert list(SCHEDULES) == [
        "gpipe", "1f1b", "eager_1f1b", "combined_1f1b", "interleaved_1f1b", "looped_bfs", "circular", "zb_h1",
        "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v", "dualpipe", "forward_only",
    ]  # fmt: skip
    assert all(get_schedule(name).name == name for name in SCHEDULES)


def test_orders_known_from_the_literature() -> None:
    assert orders("gpipe", 2, 2, 2) == ["F0 F1 B0 B1", "F0 F1 B0 B1"]
    assert orders("1f1b", 3, 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert orders("eager_1f1b", 3, 3, 6)[1] == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert orders("combined_1f1b", 2, 2, 5) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
    ]
    assert orders("zb_h1", 2, 2, 4) == [
        "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
        "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
    ]
    assert orders("forward_only", 2, 2, 3) == ["F0 F1 F2", "F0 F1 F2"]


def test_the_registry_names_of_shardy() -> None:
    assert orders("ONE_FWD_ONE_BWD", 3, 3, 4) == orders("1f1b", 3, 3, 4)
    assert orders("GPIPE_BUT_1F1B_FOR_LAST_MESH", 2, 2, 3) == ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert orders("CIRCULAR_WITH_REVERSED_BACKWARD", 2, 2, 2) == ["F0 F1 B1 B0", "F0 F1 B1 B0"]
    assert orders("ZERO_BUBBLE_H2_FULL_TX_LATENCY", 2, 2, 6)[0].startswith("F0 F1 F2 F3 F4 I0")
    for name, (ours, _) in ALIASES.items():
        assert get_schedule(name).name == ours


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ScheduleError) as caught:
        get_schedule("ZB-H1")
    assert first_line(caught) == "there is no schedule 'ZB-H1'; did you mean 'zb_h1'?"
    with pytest.raises(ScheduleError) as caught:
        get_schedule("something else")
    assert first_line(caught) == "there is no schedule 'something else'"


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ScheduleError) as caught:
        get_schedule("circular", degre=2)
    assert first_line(caught) == "schedule 'circular' has no option 'degre'; did you mean 'degree'?"
    with pytest.raises(ScheduleError, match="it has no options"):
        get_schedule("1f1b", degree=2)


def test_something_that_is_no_schedule() -> None:
    with pytest.raises(
        ScheduleError, match=r"^a schedule is a name, a PipelineSchedule or a ScheduleTable, got 3"
    ):
        get_schedule(3)  # type: ignore[arg-type]


def test_options_of_a_schedule_that_is_given_as_an_object() -> None:
    schedule = get_schedule(get_schedule("circular"), reversed_backward=True)
    assert orders(schedule, 2, 2, 2)[0] == "F0 F1 B1 B0"


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("circular", {"group": 0}, "schedule 'circular': group must be at least 1, got 0"),
        (
            "interleaved_1f1b",
            {"extra_warm_up": -1},
            "schedule 'interleaved_1f1b': extra_warm_up must not be negative",
        ),
        ("zb_h2", {"latency": -1.0}, "schedule 'zb_h2': latency must be finite and not negative, got -1.0"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, object], line: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        get_schedule(name, **options)
    assert first_line(caught).startswith(line)


@pytest.mark.parametrize(
    ("name", "numbers", "placement", "line"),
    [
        ("1f1b", (2, 3, 4), None, "2 stages cannot be spread over 3 meshes: every mesh needs a stage"),
        ("1f1b", (2, 2, 0), None, "schedule '1f1b' needs at least one microbatch, got 0"),
        (
            "1f1b",
            (3, 2, 1),
            (0, 1, 0),
            "schedule '1f1b' comes to every mesh once, but mesh 0 holds stage 0 and",
        ),
        ("gpipe", (3, 2, 1), (0, 1), "stage_to_mesh names 2 stages, the program has 3"),
        ("gpipe", (2, 2, 1), (0, 2), "stage_to_mesh puts stage 1 on mesh 2, but the meshes are 0 to 1"),
        ("zb_v", (5, 3, 4), None, "schedule 'zb_v' needs two stages per mesh: 6 for 3 meshes, got 5"),
    ],
)
def test_problems_a_schedule_cannot_order(
    name: str, numbers: tuple[int, int, int], placement: tuple[int, ...] | None, line: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        get_schedule(name).table(*numbers, stage_to_mesh=placement)
    assert first_line(caught).startswith(line)


def test_the_degree_of_a_circular_schedule_is_checked() -> None:
    get_schedule("circular", degree=2).table(8, 4, 4)
    with pytest.raises(
        ScheduleError, match=r"^schedule 'circular' with degree 3 visits 4 meshes 3 times each, but"
    ):
        get_schedule("circular", degree=3).table(8, 4, 4)


def test_1f1b_for_the_last_mesh_needs_it_to_be_last_only() -> None:
    with pytest.raises(
        ScheduleError, match=r"^schedule 'gpipe' with last_mesh_1f1b comes to mesh 0 only at the end"
    ):
        get_schedule("gpipe", last_mesh_1f1b=True).table(3, 2, 2, (0, 1, 0))


def test_a_mesh_without_stages_stays_empty() -> None:
    table = get_schedule("1f1b").table(2, 3, 2, (2, 0))
    assert [len(order) for order in table.orders] == [4, 0, 4]


def test_a_function_orders_tasks() -> None:
    gpipe = from_function(lambda t: (t.phase is not Phase.F, t.microbatch))
    assert orders(gpipe, 3, 3, 4) == orders("gpipe", 3, 3, 4)
    last_first = from_function(lambda t: (t.phase is not Phase.F, -t.microbatch), name="last first")
    assert orders(last_first, 2, 2, 2) == ["F1 F0 B1 B0", "F1 F0 B1 B0"]
    split = from_function(lambda t: ("FIW".index(t.phase.value), t.microbatch), splits_backward=True)
    assert orders(split, 2, 2, 2)[0] == "F0 F1 I0 I1 W0 W1"
    assert get_schedule(split).table(2, 2, 2).splits_backward
    evaluation = from_function(lambda t: t.microbatch, has_backward=False)
    assert orders(evaluation, 2, 2, 2) == ["F0 F1", "F0 F1"]


def test_a_function_that_deadlocks_is_found() -> None:
    with pytest.raises(ScheduleError, match=r"^task 0B0 is impossible: it needs 0F0"):
        from_function(lambda t: t.phase is Phase.F).table(1, 1, 1)
    with pytest.raises(ScheduleError, match=r"^task 0B0 is impossible: the schedule deadlocks"):
        from_function(lambda t: t.microbatch * (-1) ** t.stage).table(2, 2, 2)


def test_a_function_with_an_unknown_placement() -> None:
    with pytest.raises(ScheduleError, match=r"^there is no placement 'vee'"):
        from_function(lambda t: t.microbatch, placement="vee")


def test_a_table_written_out() -> None:
    schedule = from_table([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", Task(1, 1, Phase.F), "1B1"]])
    table = schedule.table(2, 2, 2)
    assert table.stage_to_mesh == (0, 1)
    assert get_schedule(table).table(2, 2, 2) is table
    assert from_csv(table.as_csv()).table(2, 2, 2) == table
    with pytest.raises(ScheduleError) as caught:
        schedule.table(2, 2, 3)
    assert first_line(caught) == "schedule 'from_table' does not fit the program"
    with pytest.raises(ScheduleError, match=r"^schedule 'from_table' puts stages on other meshes"):
        schedule.table(2, 2, 2, (1, 0))


def test_tables_that_are_impossible() -> None:
    with pytest.raises(ScheduleError, match=r"^task 1F0, number 0 on mesh 1: stage 1 is on mesh 0"):
        from_table([["0F0", "1B0", "0B0"], ["1F0"]])
    with pytest.raises(ScheduleError, match=r"^stage 1 has no tasks, but stage 2 has"):
        from_table([["0F0", "0B0"], ["2F0", "2B0"]])
    with pytest.raises(ScheduleError, match=r"^schedule 'from_table' has no tasks"):
        from_table([[], []])
    with pytest.raises(ScheduleError, match=r"^'0G0' is not a task"):
        from_table([["0G0"]])


def test_csv(tmp_path: Path) -> None:
    text = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert (
        from_csv(text).table(2, 2, 2) == from_csv(path).table(2, 2, 2) == from_csv(str(path)).table(2, 2, 2)
    )
    assert orders(from_csv(path), 2, 2, 2) == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    with pytest.raises(ScheduleError) as caught:
        from_csv("0F0,0SEND_F0,0B0\n1F0,1B,1B0\n")
    assert str(caught.value).splitlines()[0] == "2 cells of 'from_csv' are not tasks:"
    assert "line 1, cell 2: '0SEND_F0' is not a task" in str(caught.value)
    with pytest.raises(ScheduleError, match="cannot be read"):
        from_csv(tmp_path / "absent.csv")


def test_a_schedule_of_ones_own_class() -> None:
    class Backwards(PipelineSchedule):
        name = "backwards"

        def orders(self, shape: PipelineShape) -> list[list[Task]]:
            return [
                [Task(s, m, p) for p in (Phase.B, Phase.F) for m in range(shape.num_microbatches)]
                for s in range(shape.num_stages)
            ]

    with pytest.raises(ScheduleError, match=r"^task 0B0 is impossible"):
        get_schedule(Backwards()).table(2, 2, 2)
