import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from mpmd.errors import ScheduleError
from mpmd.scheduling import SCHEDULES, Costs, Link, StageCosts, get_schedule, simulate
from mpmd.scheduling.definition import PipelineShape
from mpmd.scheduling.list_schedule import Clockwork, Ordered, fill_weights, list_schedule
from mpmd.scheduling.patterns import zigzag
from mpmd.scheduling.search import SchedulingProblem, lower_bound, search
from mpmd.scheduling.simulate import peak_activations
from mpmd.scheduling.validate import validate
from mpmd.scheduling.workload import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Step,
    Workload,
    costed_workload,
    expand,
    unit_workload,
)


def random_costs(chance: random.Random, stages: int) -> Costs:
    return Costs(tuple(StageCosts(*(chance.randrange(1, 6) for _ in range(4))) for _ in range(stages)))


def shortest(workload: Workload, limits: list[int]) -> float:
    """Tries every order of every mesh, microbatches in any order too."""
    choices = [list(mesh_orders(workload, mesh, limits[mesh])) for mesh in range(workload.num_meshes)]
    timed = (in_order(workload, orders) for orders in itertools.product(*choices))
    return min(ordered.makespan_s for ordered in timed if ordered is not None)


def in_order(workload: Workload, orders: Sequence[Sequence[Step]]) -> Ordered | None:
    """Runs steps exactly in the given order; None if that deadlocks."""
    clock = Clockwork(workload)
    at = [0] * len(orders)
    while True:
        for mesh, order in enumerate(orders):
            while clock.free[mesh] <= clock.now and at[mesh] < len(order):
                step = order[at[mesh]]
                if step[0] != WEIGHTS and clock.ready_s(step) > clock.now:
                    break
                clock.run(step)
                at[mesh] += 1
        if not clock.advance():
            return (
                None if any(k < len(order) for k, order in zip(at, orders, strict=True)) else clock.result()
            )


def mesh_orders(workload: Workload, mesh: int, limit: int) -> Iterator[list[Step]]:
    chains = [
        [(kind, chain_index, m) for kind in workload.kinds]
        for chain_index in workload.chains_on(mesh)
        for m in workload.chains[chain_index].microbatches
    ]

    def extend(at: list[int], held: int, order: list[Step]) -> Iterator[list[Step]]:
        if len(order) == sum(map(len, chains)):
            yield list(order)
        for k, chain in enumerate(chains):
            if at[k] == len(chain):
                continue
            kind, chain_index, _ = chain[at[k]]
            size = workload.sizes[chain_index]
            after = held + size * (kind == FORWARD) - size * (at[k] + 1 == len(chain))
            if after <= limit:
                at[k] += 1
                order.append(chain[at[k] - 1])
                yield from extend(at, after, order)
                order.pop()
                at[k] -= 1

    return extend([0] * len(chains), 0, [])


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("placement", "microbatches", "splits", "limit"),
    [
        ((0, 1), 2, True, 2), ((0, 1), 2, True, 1), ((0, 1, 2), 2, True, 2), ((0, 1), 3, False, 3),
        ((0, 1), 3, False, 2), ((0, 1, 0), 2, False, 4), ((0, 1, 0), 2, False, 3), ((0, 1, 0), 2, False, 2),
        ((0, 1, 0, 1), 2, False, 2), ((0, 1, 1, 0), 1, True, 2),
        ((0, 0, 1), 2, False, 2), ((0, 0, 1), 2, False, 3),
    ],
)  # fmt: skip
def test_no_order_is_shorter_than_the_bound(
    placement: tuple[int, ...], microbatches: int, splits: bool, limit: int
) -> None:
    chance = random.Random(f"{placement}{microbatches}{splits}{limit}")
    meshes = max(placement) + 1
    for _ in range(1 if len(placement) * microbatches == 8 else 3):  # of those there are many orders
        costs = random_costs(chance, len(placement))
        shape = PipelineShape(meshes, microbatches, placement)
        link = Link(latency_s=chance.choice([0, 1, 3]))
        workload = costed_workload(shape, splits, costs, link, merge=False)
        limits = [limit] * meshes
        assert lower_bound(workload) <= lower_bound(workload, limits) <= shortest(workload, limits)


@pytest.mark.parametrize("splits", [False, True])
def test_list_scheduling_holds_its_limits_and_is_legal(splits: bool) -> None:
    chance = random.Random(5)
    for _ in range(25):
        meshes = chance.randrange(1, 5)
        placement = tuple(chance.randrange(meshes) for _ in range(chance.randrange(1, 8)))
        shape = PipelineShape(meshes, chance.randrange(1, 8), placement)
        workload = costed_workload(shape, splits, random_costs(chance, len(placement)), Link(latency_s=1))
        least = [sum(workload.sizes[k] for k in workload.chains_on(mesh)) for mesh in range(meshes)]
        limits = [size + chance.randrange(3) for size in least]
        ordered = list_schedule(workload, limits, max_wait=chance.choice([0.0, 0.7]))
        again = in_order(workload, ordered.orders)
        assert again is not None
        assert again.makespan_s <= ordered.makespan_s + 1e-9
        for mesh, order in enumerate(ordered.orders):
            held = 0
            for kind, chain_index, _ in order:
                held += workload.sizes[chain_index] * (
                    (kind == FORWARD) - (kind == (WEIGHTS if splits else BACKWARD))
                )
                assert held <= limits[mesh]
        assert sum(map(len, expand(workload, ordered.orders))) == len(placement) * shape.num_microbatches * (
            2 + splits
        )


def test_a_limit_below_one_microbatch_is_an_error() -> None:
    workload = unit_workload(PipelineShape(2, 4, (0, 1, 0)), splits=True)
    with pytest.raises(ScheduleError, match=r"^mesh 0 may hold 1, but a single microbatch needs 2 there"):
        list_schedule(workload, [1, 1])


def test_a_given_order_that_cannot_hold_the_limit_is_told() -> None:
    workload = unit_workload(PipelineShape(2, 4, (0, 1)), splits=True)
    pattern = zigzag(workload, lambda place, chains: 2)
    assert fill_weights(workload, pattern, [3, 3]) is not None
    assert fill_weights(workload, pattern, [2, 2]) is None


@pytest.mark.fast_cases
@pytest.mark.parametrize("limit", [None, 8, 4])
@pytest.mark.parametrize("even", [True, False])
def test_never_worse_than_a_named_schedule_that_fits(limit: int | None, even: bool) -> None:
    costs = Costs.unit(8) if even else random_costs(random.Random(3), 8)
    link = Link(latency_s=0.5)
    result = search(SchedulingProblem(costs, 4, 6, link, limit_activations=limit, copies=True))
    validate(result.table, 6)
    assert result.timeline == simulate(result.table, costs, link, title=result.timeline.title)
    assert limit is None or max(peak_activations(result.table)) <= limit
    named = 0
    for kind in SCHEDULES.values():
        if kind.has_backward:
            table = kind().table(8, 4, 6)
            if limit is None or max(peak_activations(table)) <= limit:
                named += 1
                assert result.makespan_s <= simulate(table, costs, link).makespan_s
    assert named
    assert result.bound_s <= result.makespan_s
    assert result.gap == pytest.approx(result.makespan_s / result.bound_s - 1)


def test_the_optimum_for_uneven_stages_is_proved() -> None:
    costs = Costs(tuple(StageCosts(s, 2 * s, s, s) for s in (7, 10, 12, 9)))
    result = search(SchedulingProblem(costs, 4, 8, Link(latency_s=1), limit_activations=4))
    named = simulate(get_schedule("zb_h1").table(4, 4, 8), costs, Link(latency_s=1)).makespan_s
    assert result.proved and result.makespan_s == result.bound_s == 307 < named == 315
    assert result.report().splitlines()[-1].endswith("307 s, bound 307 s, optimal")
    whole = search(
        SchedulingProblem(costs, 4, 8, Link(latency_s=1), limit_activations=4, split_backward=False)
    )
    assert not whole.table.splits_backward
    assert whole.makespan_s >= 307


def test_stages_that_cannot_be_split_stay_whole() -> None:
    result = search(SchedulingProblem(Costs.unit(3), 3, 5, whole=(0,), limit_activations=3))
    phases = {task.phase.value for task in result.table.tasks() if task.stage == 0}
    assert phases == {"F", "B"}
    assert result.table.splits_backward


def test_a_limit_in_bytes() -> None:
    stage = StageCosts(residual_bytes=100, parameter_bytes=1000, gradient_bytes=10, output_bytes=1)
    free = search(SchedulingProblem(Costs.uniform(4, stage), 4, 8))
    tight = search(SchedulingProblem(Costs.uniform(4, stage), 4, 8, limit_bytes=1230))
    assert max(m.peak_bytes for m in free.timeline.memory) > 1230
    assert max(m.peak_bytes for m in tight.timeline.memory) <= 1230
    assert tight.makespan_s > free.makespan_s


def test_a_limit_nothing_fits() -> None:
    stage = StageCosts(residual_bytes=100, parameter_bytes=1000)
    with pytest.raises(ScheduleError) as caught:
        search(SchedulingProblem(Costs.uniform(2, stage), 2, 4, limit_bytes=1050))
    lines = str(caught.value).splitlines()
    assert lines[0] == "no schedule fits the memory limits"
    assert "needs 1,100 bytes on mesh" in lines[1]
    with pytest.raises(ScheduleError, match=r"^memory limits are given for 3 meshes, not 2"):
        search(SchedulingProblem(Costs.uniform(2, stage), 2, 4, limit_bytes=[1, 2, 3]))


def test_the_same_result_every_time() -> None:
    problem = SchedulingProblem(random_costs(random.Random(11), 4), 2, 5, limit_activations=5)
    assert search(problem) == search(problem)
