"""Whatever the number of stages, meshes and microbatches and the costs: a schedule is complete and ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.errors import ScheduleError
from mpmd.scheduling import SCHEDULES, Costs, Link, ScheduleTable, StageCosts, Task, get_schedule, simulate
from mpmd.scheduling.simulate import peak_activations
from mpmd.scheduling.table import visits_of_mesh
from mpmd.scheduling.validate import linearize, validate

SINGLE_VISIT = {"1f1b", "eager_1f1b", "combined_1f1b", "zb_h1", "zb_h2", "dualpipe"}
V_SHAPED = {"zb_v", "v_half", "v_min", "dualpipe_v"}


def assert_complete(table: ScheduleTable, num_microbatches: int) -> None:
    """Without the code of ``validate``: every task once, where its stage is, after what it needs."""
    seen: dict[tuple[int, int, str], int] = {}
    for moment, task in enumerate(linearize(table)):
        key = (task.stage, task.microbatch, task.phase.value)
        assert key not in seen
        seen[key] = moment
    for mesh, order in enumerate(table.orders):
        moments = [seen[t.stage, t.microbatch, t.phase.value] for t in order]
        assert moments == sorted(moments)
        assert all(table.mesh_of(t) == mesh for t in order)
    for stage in range(table.num_stages):
        for m in range(num_microbatches):
            whole, first, second = ((stage, m, p) in seen for p in "BIW")
            assert (whole, first, second) in (
                {(True, False, False), (False, True, True)} if table.has_backward else {(False, False, False)}
            )
            assert stage == 0 or seen[stage, m, "F"] > seen[stage - 1, m, "F"]
            if table.has_backward:
                mine = seen[stage, m, "B" if whole else "I"]
                assert mine > seen[stage, m, "F"]
                assert whole or seen[stage, m, "W"] > mine
                if stage + 1 < table.num_stages:
                    later = (stage + 1, m, "B") if (stage + 1, m, "B") in seen else (stage + 1, m, "I")
                    assert mine > seen[later]
    assert {m for _, m, _ in seen} == set(range(num_microbatches))


@st.composite
def problems(draw: st.DrawFn, name: str) -> tuple[int, int, int]:
    meshes = draw(st.integers(1, 5))
    least = 2 * meshes if name in V_SHAPED else meshes
    return draw(st.integers(least, least + 7)), meshes, draw(st.integers(1, 13))


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_number_of_stages_meshes_and_microbatches(name: str, data: st.DataObject) -> None:
    stages, meshes, microbatches = data.draw(problems(name))
    table = get_schedule(name).table(stages, meshes, microbatches)
    assert_complete(table, microbatches)
    assert set(table.stage_to_mesh) == set(range(meshes))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in SINGLE_VISIT])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_placement(name: str, data: st.DataObject) -> None:
    meshes = data.draw(st.integers(1, 4))
    placement = data.draw(st.lists(st.integers(0, meshes - 1), min_size=1, max_size=9))
    microbatches = data.draw(st.integers(1, 9))
    try:
        table = get_schedule(name).table(len(placement), meshes, microbatches, placement)
    except ScheduleError as error:
        assert name in V_SHAPED, error
        used = len(set(placement))
        assert len(placement) < 2 * used or (used > 1 and min(visits_of_mesh(placement).values()) == 1), error
        return
    assert_complete(table, microbatches)
    assert list(table.stage_to_mesh) == placement


costs_of_a_stage = st.builds(
    StageCosts,
    *(st.floats(0.0, 5.0, allow_subnormal=False) for _ in range(4)),
    *(st.integers(0, 1000) for _ in range(3)),
    st.one_of(st.none(), st.integers(0, 1000)),
    *(st.integers(0, 1000) for _ in range(3)),
)
links = st.builds(Link, st.floats(0, 3), st.floats(1e2, 1e6), st.floats(0, 1))


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(), name=st.sampled_from(sorted(SCHEDULES)), link=links, host_s=st.sampled_from([0.0, 0.1])
)
def test_a_prediction_is_possible(data: st.DataObject, name: str, link: Link, host_s: float) -> None:
    stages, meshes, microbatches = data.draw(problems(name))
    costs = Costs(tuple(data.draw(costs_of_a_stage) for _ in range(stages)))
    table = get_schedule(name).table(stages, meshes, microbatches)
    line = simulate(table, costs, link, host_s=host_s)
    spans = {span.task: span for mesh in line.meshes for span in line.compute(mesh)}
    assert len(spans) == sum(map(len, table.orders))
    arrived = {(t.task, t.peer): t for t in line.transfers}
    for mesh, order in zip(line.meshes, table.orders, strict=True):
        clock = 0.0
        gaps = {gap.end_s: gap for gap in line.idle(mesh)}
        for task in order:
            span = spans[task]
            assert span.start_s >= clock - 1e-9
            assert span.start_s <= clock + 1e-9 or span.start_s in gaps
            assert span.seconds == pytest.approx(costs.seconds(task))
            clock = span.end_s
            for source in table.dependencies(task):
                if table.mesh_of(source) == table.mesh_of(task):
                    assert spans[source].end_s <= span.start_s + 1e-9
                else:
                    sent = arrived[source, mesh]
                    assert spans[source].end_s - 1e-9 <= sent.start_s
                    assert sent.end_s <= span.start_s + 1e-9
    for memory in line.memory:
        assert all(size >= 0 for _, sizes in memory.samples for size in sizes)
        final = dict(zip(memory.categories, memory.samples[-1][1], strict=True))
        assert final["residuals"] == final["activations"] == final["workspace"] == 0


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    seed=st.integers(0, 10**6),
    damage=st.sampled_from(["drop", "repeat", "swap", "move"]),
)
def test_a_damaged_table_is_found_or_still_runs(name: str, seed: int, damage: str) -> None:
    chance = random.Random(seed)
    table = get_schedule(name).table(8, 4, 5)
    orders = [list(order) for order in table.orders]
    mesh = chance.randrange(4)
    order = orders[mesh]
    k, j = chance.randrange(len(order)), chance.randrange(len(order))
    task = order[k]
    if damage == "drop":
        del order[k]
    elif damage == "repeat":
        order.insert(j, task)
    elif damage == "swap":
        order[k], order[j] = order[j], order[k]
    else:
        orders[(mesh + 1) % 4].insert(0, order.pop(k))
    broken = ScheduleTable(
        tuple(map(tuple, orders)),
        table.stage_to_mesh,
        table.splits_backward,
        table.has_backward,
        table.mirror,
    )
    if damage == "swap":
        try:
            validate(broken, 5)
        except ScheduleError as error:
            assert "impossible" in str(error).splitlines()[0]
        else:
            assert_complete(broken, 5)
    else:
        with pytest.raises(ScheduleError, match="task"):
            validate(broken, 5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_every_time(name: str) -> None:
    first, second = (get_schedule(name).table(9, 4, 7) for _ in range(2))
    assert first == second


@settings(max_examples=40, deadline=None)
@given(meshes=st.integers(1, 5), microbatches=st.integers(1, 12), data=st.data())
def test_joining_split_backwards_keeps_a_table_legal(
    meshes: int, microbatches: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_min", "dualpipe"]))
    table = get_schedule(name).table(2 * meshes, meshes, microbatches)
    joined = table.with_whole_backward(data.draw(st.sets(st.integers(0, 2 * meshes - 1))))
    assert_complete(joined, microbatches)
    assert max(peak_activations(joined)) <= max(peak_activations(table))


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="0123456789FBIWX,\n ", max_size=8))
def test_parsing_a_task_gives_it_back_or_an_error(text: str) -> None:
    try:
        task = Task.parse(text)
    except ScheduleError as error:
        assert "is not a task" in str(error)
    else:
        assert Task.parse(str(task)) == task
