"""Every schedule against what was published about it, with unit costs.

A forward, an input gradient and a weight gradient take one second each, a whole backward two, transfers none.
``idle`` is the makespan less the work of a mesh, in seconds of one stage; ``peak`` counts, per mesh, stages'
activations of a microbatch.  Both are what the literature states, for ``p`` meshes, ``m`` microbatches and,
where a mesh holds two stages, ``v = 2``.  ``better`` says where and why ours idles less than the formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from mpmd.scheduling import SCHEDULES, Timeline, get_schedule, linearize, simulate
from mpmd.scheduling.simulate import peak_activations

F = I = W = 1
B = I + W


@dataclasses.dataclass(frozen=True)
class Published:
    idle: Callable[[int, int], float]
    peak: Callable[[int, int, int], int]  # p, m, r
    stages_per_mesh: int = 1
    better: dict[int, tuple[float, str]] = dataclasses.field(default_factory=dict)  # p -> (idle, reason)


PUBLISHED = {
    "gpipe": Published(lambda p, m: (p - 1) * (F + B), lambda p, m, r: m),
    "1f1b": Published(lambda p, m: (p - 1) * (F + B), lambda p, m, r: min(m, p - r)),
    "eager_1f1b": Published(lambda p, m: (p - 1) * (F + B), lambda p, m, r: min(m, 2 * (p - r) - 1)),
    "combined_1f1b": Published(lambda p, m: (p - 1) * (F + B), lambda p, m, r: min(m, 2 * (p - r))),
    "interleaved_1f1b": Published(
        lambda p, m: (p - 1) * (F + B), lambda p, m, r: min(2 * m, p + 2 * (p - 1 - r) + 1), 2
    ),
    "looped_bfs": Published(lambda p, m: (p - 1) * (F + B), lambda p, m, r: 2 * m, 2),
    "circular": Published(lambda p, m: (p - 1) * (F + B), lambda p, m, r: 2 * m, 2),
    "zb_h1": Published(lambda p, m: (p - 1) * (F + I - W), lambda p, m, r: p),
    "zb_h2": Published(lambda p, m: (p - 1) * F, lambda p, m, r: min(m, 2 * p - 1)),
    "interleaved_zb": Published(lambda p, m: (p - 1) * (F + I - W), lambda p, m, r: 2 * p, 2),
    "zb_v": Published(lambda p, m: (p - 1) * F, lambda p, m, r: 2 * p, 2),
    "v_half": Published(
        lambda p, m: max(3 * p - 7, p - 1), lambda p, m, r: 2 * ((p + 2) // 2), 2
    ),  # for p = 2 the formula is negative; no schedule idles less than (p-1)F
    "v_min": Published(
        lambda p, m: 4 * p - 5,
        lambda p, m, r: 2 * ((p + 4) // 3),
        2,
        {
            2: (1, "two microbatches take as much memory as under zb_v"),
            8: (23, "steps may overtake each other in the gaps of the pattern"),
        },
    ),
    "dualpipe_v": Published(
        lambda p, m: (p - 1) * (F + B + B - 3 * W),
        lambda p, m, r: min(2 * m, 2 * p + 1),
        2,
        {p: (p - 1, "forwards and backwards are not tied in pairs") for p in (2, 4, 8)},
    ),
    "dualpipe": Published(lambda p, m: (p // 2 - 1) * (F + B + B - 3 * W), lambda p, m, r: min(m, p + 1)),
    "forward_only": Published(lambda p, m: (p - 1) * F, lambda p, m, r: 1),
}  # fmt: skip


def timeline(name: str, p: int, m: int) -> tuple[Timeline, tuple[int, ...]]:
    table = get_schedule(name).table(PUBLISHED[name].stages_per_mesh * p, p, m)
    assert len(linearize(table)) == sum(map(len, table.orders))  # deadlock free
    return simulate(table), peak_activations(table)


def test_every_schedule_is_in_the_table() -> None:
    assert set(PUBLISHED) == set(SCHEDULES)


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_idle_time_and_memory_are_as_published(name: str, p: int) -> None:
    published = PUBLISHED[name]
    for m in (p, 2 * p, 4 * p):
        line, peaks = timeline(name, p, m)
        work = m * published.stages_per_mesh * (F if name == "forward_only" else F + B)
        idle, reason = published.better.get(p, (published.idle(p, m), ""))
        assert idle <= published.idle(p, m), reason
        assert line.makespan_s == work + idle
        assert line.bubble_fraction() == pytest.approx(idle / (work + idle))
        allowed = [published.peak(p, m, r) for r in range(p)]
        assert all(peak <= most for peak, most in zip(peaks, allowed, strict=True)), (peaks, allowed)
        assert m < 2 * p or max(peaks) == max(allowed)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_formula_for_whole_backwards_is_exact_on_every_mesh(p: int) -> None:
    for name in (
        "gpipe",
        "1f1b",
        "eager_1f1b",
        "combined_1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "circular",
    ):
        for m in (p, 2 * p, 4 * p):
            _, peaks = timeline(name, p, m)
            assert peaks == tuple(PUBLISHED[name].peak(p, m, r) for r in range(p)), name


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_h2_has_no_gap_between_first_and_last_task(p: int) -> None:
    for m in (2 * p, 4 * p):
        line, _ = timeline("zb_h2", p, m)
        assert [line.span_idle_s(mesh) for mesh in line.meshes] == [0.0] * p
    assert max(timeline("zb_h1", p, 2 * p)[0].span_idle_s(mesh) for mesh in line.meshes) > 0.0


@pytest.mark.parametrize("stages", [3, 5])
@pytest.mark.parametrize(
    "name", ["zb_v", "v_half", "v_min", "dualpipe_v", "zb_h1", "zb_h2", "interleaved_zb"]
)
def test_memory_is_as_published_where_the_stages_of_a_mesh_do_not_divide_into_equal_visits(
    name: str, stages: int
) -> None:
    published, p = PUBLISHED[name], 4
    table = get_schedule(name).table(stages * p, p, 12)
    microbatches = published.peak(p, 12, 0) / published.stages_per_mesh
    assert max(peak_activations(table)) <= microbatches * stages


def test_memory_is_as_published_where_meshes_have_different_numbers_of_stages() -> None:
    for name, most in (("zb_v", 3), ("v_half", 2), ("v_min", 2), ("dualpipe_v", 3.5), ("zb_h2", 5)):
        for num_stages in (7, 8, 10, 11):
            table = get_schedule(name).table(num_stages, 3, 9)
            held = peak_activations(table)
            assert all(peak <= most * table.stage_to_mesh.count(mesh) for mesh, peak in enumerate(held)), name
