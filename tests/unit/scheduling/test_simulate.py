import random
import time

import pytest

from mpmd.errors import ScheduleError
from mpmd.scheduling import (
    Costs,
    Link,
    ScheduleTable,
    Skip,
    StageCosts,
    Task,
    from_csv,
    get_schedule,
    simulate,
)
from mpmd.scheduling.simulate import peak_activations


def when(line, name: str) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    span = next(s for s in line.spans if s.name == name)
    return span.start_s, span.end_s


def test_by_hand() -> None:
    table = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").table(2, 2, 2)
    costs = Costs((StageCosts(1, 2, output_bytes=10), StageCosts(3, 4, input_gradient_bytes=20)))
    line = simulate(table, costs, Link(latency_s=0.5, bytes_per_s=10), mesh_names=("a", "b"))
    assert when(line, "0F0") == (0, 1)
    assert when(line, "0F0 to b") == (1, 2.5)  # one second on the wire, half a second of latency
    assert when(line, "1F0") == (2.5, 5.5)
    assert when(line, "0F1 to b") == (2, 3.5)  # the wire was busy to 2
    assert when(line, "1B0") == (5.5, 9.5)
    assert when(line, "1B0 to a") == (9.5, 12)
    assert when(line, "0B0") == (12, 14)
    assert when(line, "1B1") == (12.5, 16.5)
    assert when(line, "0B1") == (19, 21)
    assert line.makespan_s == 21
    assert line.idle_s("a") == 15
    assert line.bubble_fraction("b") == pytest.approx(1 - 14 / 21)
    assert line.link_occupancy == {("a", "b"): pytest.approx(2.5 / 21), ("b", "a"): pytest.approx(5 / 21)}
    notes = [(s.start_s, s.end_s, s.note) for s in line.idle("a")]
    assert notes == [(2, 12, "0B0 waits for 1B0 on b"), (14, 19, "0B1 waits for 1B1 on b")]
    assert [s.note for s in line.idle("b")] == [
        "1F0 waits for 0F0 on a",
        "has done its part of the step",
    ]


def test_who_waits_for_the_link_is_told_so() -> None:
    table = get_schedule("forward_only").table(2, 2, 3)
    line = simulate(table, Costs.unit(2), Link(occupied_s=5))
    assert [s.note for s in line.idle("mesh1")][-1] == "1F2 waits for 0F2 from mesh0: the link is busy"
    line = simulate(table, Costs.uniform(2, StageCosts(forward_s=1)), Link(latency_s=0.25))
    assert line.makespan_s == 4.25


def test_the_host_can_be_what_a_mesh_waits_for() -> None:
    table = get_schedule("forward_only").table(1, 1, 3)
    line = simulate(table, Costs.unit(1), host_s=2.0)
    assert line.makespan_s == 7
    assert [s.note for s in line.idle("mesh0")] == [
        f"0F{m} waits for the host to enqueue it" for m in range(3)
    ]


def test_links_may_differ() -> None:
    table = get_schedule("forward_only").table(3, 3, 1)
    links = {(0, 1): Link(latency_s=1), (1, 2): Link(latency_s=10)}
    assert simulate(table, transfer=links).makespan_s == 14
    assert simulate(table, transfer=lambda a, b: Link(latency_s=a + b)).makespan_s == 3 + 1 + 3
    with pytest.raises(ScheduleError, match=r"^no link is given from mesh 1 to mesh 2"):
        simulate(table, transfer={(0, 1): Link()})


def test_skip_connections_are_waited_for() -> None:
    table = get_schedule("1f1b").table(3, 3, 1)
    plain = simulate(table, transfer=Link(bytes_per_s=1))
    costs = Costs((StageCosts(),) * 3, (Skip(0, 2, 30),))
    line = simulate(table, costs, Link(bytes_per_s=1))
    assert plain.makespan_s == 9
    assert when(line, "2F0")[0] == 31  # 0F0 ends at 1, thirty seconds on the wire
    assert when(line, "0B0")[0] == 64  # 2B0 ends at 34, and its gradient takes as long
    with pytest.raises(
        ScheduleError, match=r"^skip connection from stage 0 to stage 1: expected a stage and a later"
    ):
        Costs((StageCosts(),) * 3, (Skip(0, 1, 1),))


def test_memory_by_category() -> None:
    stage = StageCosts(
        residual_bytes=100, output_bytes=7, input_gradient_bytes=3, workspace_bytes=11, parameter_bytes=1000,
        gradient_bytes=500,
    )  # fmt: skip
    table = get_schedule("1f1b").table(2, 2, 4)
    line = simulate(table, Costs.uniform(2, stage), Link(latency_s=0.5))
    first, last = line.memory
    assert first.peak_by_category == {
        "parameters": 1000, "gradients": 500, "residuals": 200, "activations": 14, "workspace": 11,
        "batch": 0,
    }  # fmt: skip
    assert (first.peak_activations, last.peak_activations) == (2, 1)
    assert last.peak_by_category["residuals"] == 100
    assert last.peak_by_category["activations"] == 14  # the next input arrives while this one is used
    assert first.samples[0] == (0.0, (1000, 0, 100, 7, 11, 0))
    assert first.samples[-1][1] == (1000, 500, 0, 0, 0, 0)
    assert first.at(0.5) == 1118 and first.at(1e9) == 1500
    assert first.peak_bytes == sum(first.at_peak.values()) == first.at(first.peak_time_s)


def test_residuals_of_split_backwards() -> None:
    table = from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n").table(1, 1, 2)
    whole = simulate(table, Costs((StageCosts(residual_bytes=10),)))
    assert whole.memory[0].peak_by_category["residuals"] == 20
    freed = simulate(table, Costs((StageCosts(residual_bytes=10, weight_residual_bytes=4),)))
    assert freed.memory[0].peak_by_category["residuals"] == 14
    assert peak_activations(table) == (2,)


def test_both_copies_of_a_stage_are_held() -> None:
    table = get_schedule("dualpipe").table(4, 4, 8)
    line = simulate(table, Costs.uniform(4, StageCosts(parameter_bytes=5, gradient_bytes=3)))
    assert [m.samples[-1][1][:2] for m in line.memory] == [(10, 6)] * 4


def test_costs_and_names_must_fit_the_table() -> None:
    table = get_schedule("1f1b").table(2, 2, 2)
    with pytest.raises(ScheduleError, match=r"^costs are given for 3 stages, the schedule has 2"):
        simulate(table, Costs.unit(3))
    with pytest.raises(ScheduleError, match=r"^1 mesh names are given, the schedule has 2 meshes"):
        simulate(table, mesh_names=["a"])
    with pytest.raises(ScheduleError, match=r"^stage cost forward_s must be finite and not negative, got -1"):
        StageCosts(forward_s=-1)
    with pytest.raises(ScheduleError, match="must not be negative and bytes_per_s must be positive"):
        Link(bytes_per_s=0)


def test_against_a_clock_that_ticks() -> None:
    """Unit tasks, instant transfers: at every tick a mesh starts its next task if all it needs is there."""
    chance = random.Random(7)
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "v_min", "dualpipe"):
        for _ in range(4):
            meshes, microbatches = chance.randrange(1, 5), chance.randrange(1, 9)
            table = get_schedule(name).table(2 * meshes, meshes, microbatches)
            line = simulate(table, Costs.uniform(2 * meshes, StageCosts(1, 1, 1, 1)))
            expected = ticked(table)
            starts = {s.task: s.start_s for mesh in line.meshes for s in line.compute(mesh)}
            assert starts == expected


def ticked(table: ScheduleTable) -> dict[Task, int]:
    starts: dict[Task, int] = {}
    at = [0] * table.num_meshes
    tick = 0
    while len(starts) < sum(map(len, table.orders)):
        ready = []
        for mesh, order in enumerate(table.orders):
            if at[mesh] < len(order):
                task = order[at[mesh]]
                if all(starts.get(source, tick) < tick for source in table.dependencies(task)):
                    ready.append((mesh, task))
        for mesh, task in ready:
            starts[task] = tick
            at[mesh] += 1
        tick += 1
    return starts


@pytest.mark.slow
def test_sixteen_stages_and_128_microbatches_take_well_below_a_second() -> None:
    table = get_schedule("zb_h1").table(16, 16, 128)
    begin = time.process_time()
    line = simulate(
        table, Costs.uniform(16, StageCosts(residual_bytes=1, output_bytes=1)), Link(latency_s=0.1)
    )
    assert time.process_time() - begin < 1.0
    assert sum(len(line.compute(mesh)) for mesh in line.meshes) == 16 * 128 * 3


def test_a_batch_is_whole_at_first_and_in_slices_until_they_are_read() -> None:
    table = get_schedule("gpipe").table(2, 2, 4)
    line = simulate(table, Costs((StageCosts(batch_bytes=10), StageCosts())))
    first, last = line.memory
    batch = first.categories.index("batch")
    assert first.samples[0][1][batch] == 2 * 4 * 10
    assert first.at(1.0) == 4 * 10  # the first forward has ended
    assert first.samples[-1][1][batch] == 0
    assert not last.peak_by_category["batch"]
