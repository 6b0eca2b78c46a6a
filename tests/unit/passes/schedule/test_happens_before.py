"""The built-in schedules as relations: neighbours imply all pairs, and orders are those of the papers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.errors import ConfigError
from mpmd.passes.schedule.pipeline_scheduler import SCHEDULES, Mesh, SchedulingUnit, find_schedule
from mpmd.scheduling.catalogue import get_schedule

units = st.lists(
    st.builds(
        SchedulingUnit,
        fragment=st.uuids(),
        phase=st.sampled_from("FAW"),
        counter=st.integers(0, 5),
        stage=st.none() | st.integers(0, 3),
    ),
    max_size=9,
    unique_by=lambda u: u.fragment,
)


def closure(
    pairs: set[tuple[SchedulingUnit, SchedulingUnit]], everything: list[SchedulingUnit]
) -> set[tuple[SchedulingUnit, SchedulingUnit]]:
    """All that follows from some pairs."""
    found = set(pairs)
    for b in everything:
        for a, c in itertools.product(everything, repeat=2):
            if (a, b) in found and (b, c) in found:
                found.add((a, c))
    return found


@settings(max_examples=60, deadline=None)
@given(units, st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(0, 3))
def test_neighbours_are_enough(found: list[SchedulingUnit], name: str, count: int, position: int) -> None:
    for relation in find_schedule(name)(Mesh("m2", count, min(position, count - 1))):
        every, enough = set(relation.every(found)), set(relation.enough(found))
        assert enough <= every
        assert closure(enough, found) >= every


def order_of(name: str, count: int, position: int, microbatches: int, phases: str) -> list[str]:
    """The tasks of one mesh in the order that a schedule alone gives, if it gives one."""
    every = [SchedulingUnit(None, p, i, 0) for i in range(microbatches) for p in phases]
    mesh = Mesh(f"m{position}", count, position)
    pairs = closure({pair for r in find_schedule(name)(mesh) for pair in r.every(every)}, every)
    order = sorted(every, key=lambda u: sum((v, u) in pairs for v in every))
    assert all((a, b) in pairs for a, b in itertools.pairwise(order)), "the order is not total"
    return [f"{u.phase.replace('A', 'B')}{u.counter}" for u in order]


@pytest.mark.parametrize(
    ("name", "position", "expected"),
    [
        ("1F1B", 0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1F1B", 1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1F1B", 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("gpipe", 0, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("GPipeBut1F1BForLastMesh", 1, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("GPipeBut1F1BForLastMesh", 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("Circular", 0, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("CircularWithReversedBackward", 0, "F0 F1 F2 F3 B3 B2 B1 B0"),
    ],
)
def test_orders(name: str, position: int, expected: str) -> None:
    assert order_of(name, 3, position, 4, "FA") == expected.split()


TABLES = {
    "1F1B": "ONE_FWD_ONE_BWD",
    "GPipe": "GPIPE",
    "GPipeBut1F1BForLastMesh": "GPIPE_BUT_1F1B_FOR_LAST_MESH",
    "Circular": "CIRCULAR",
    "CircularWithReversedBackward": "CIRCULAR_WITH_REVERSED_BACKWARD",
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("count", "microbatches"), [(1, 3), (2, 2), (3, 5), (4, 4)])
def test_orders_are_those_of_the_tables(name: str, count: int, microbatches: int) -> None:
    table = get_schedule(TABLES[name]).table(count, count, microbatches)
    for position, tasks in enumerate(table.orders):
        expected = [f"{task.phase.value}{task.microbatch}" for task in tasks]
        assert order_of(name, count, position, microbatches, "FA") == expected


def test_wrap_around_begins_with_the_mesh_of_its_number() -> None:
    assert order_of("ParallelPipelinesWithWrapAround", 4, 2, 5, "F") == ["F2", "F1", "F0", "F4", "F3"]


def test_circular_takes_as_many_microbatches_as_meshes_through_a_stage() -> None:
    every = [SchedulingUnit(None, "F", i, stage) for stage in (0, 1) for i in range(4)]
    (relation,) = find_schedule("Circular")(Mesh("m1", 2, 0))
    order = sorted(every, key=lambda u: sum(b == u for _, b in relation.every(every)))
    found = [(u.stage, u.counter) for u in order]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


def test_zero_bubble_h2_keeps_enough_forwards_in_flight() -> None:
    every = [SchedulingUnit(None, p, i, None) for i in range(8) for p in "FAW"]
    forwards = {}
    for latency in ("Zero", "Half", "Full"):
        relations = find_schedule(f"ZeroBubbleH2{latency}TxLatency")(Mesh("m0", 3, 0))
        pairs = {pair for r in relations for pair in r.every(every)}
        first = {a.counter for a, b in pairs if a.phase == "F" and b.phase == "A" and b.counter == 0}
        forwards[latency] = max(first) + 1
    assert forwards == {"Zero": 5, "Half": 7, "Full": 8}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown pipeline schedule '3F1B'"):
        find_schedule("3F1B")


def test_a_mesh_without_number_cannot_wrap_around() -> None:
    with pytest.raises(ConfigError, match="needs a number in the name"):
        find_schedule("ParallelPipelinesWithWrapAround")(Mesh("left", 2, 0))
