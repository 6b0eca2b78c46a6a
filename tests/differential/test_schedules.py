"""Real steps under every schedule: the numbers of `jax.jit`, in the order of the schedule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mpmd
from examples.workloads.models import MODELS
from examples.workloads.steps import sgd_momentum, training_step
from mpmd.errors import ScheduleError
from mpmd.runtime.program.streams import Run
from mpmd.scheduling import SCHEDULES, Costs, Phase, Task, from_csv, from_function, from_table, get_schedule
from mpmd.scheduling.search import SchedulingProblem, search
from tests.support.comparing import copied, relative_difference
from tests.support.scheduled_steps import jitted, placement

pytestmark = pytest.mark.usefixtures("plain_xla")

TRAINING = [name for name in SCHEDULES if SCHEDULES[name].has_backward]
FAST = {("mlp", "zb_h1"), ("mlp", "interleaved_zb"), ("mlp", "zb_v"), ("mlp", "looped_bfs")}


def orders(program) -> list[list[str]]:
    """For each mesh its tasks as they run."""
    return [
        [
            f"{op.stage}{op.phase}{op.microbatch}"
            for op in stream.instructions
            if isinstance(op, Run) and op.phase
        ]
        for stream in program.streams
    ]


def check(name: str, schedule, meshes: list[int], microbatches: int):
    """Two steps both ways; the program."""
    params, loss, batch = MODELS[name].build(len(meshes))
    batch = jax.tree.map(lambda x: x[: len(x) // microbatches * microbatches], batch)
    init, update = sgd_momentum()
    step = training_step(loss, microbatches, update)
    pipelined, state, plain = jitted(step, schedule, meshes), init(params), jax.jit(step)
    got = pipelined(pipelined(copied(state), *batch)[0], *batch)
    assert relative_difference(got, plain(plain(state, *batch)[0], *batch)) <= MODELS[name].tolerance
    return pipelined.compiled(copied(state), *batch).program


CASES = [("mlp", s) for s in TRAINING]
CASES += [(n, s) for n in ("uneven", "tied", "skip") for s in ("zb_h1", "interleaved_zb", "zb_v", "circular")]


@pytest.mark.fast_cases("mlp-zb_h1", "mlp-zb_v")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_training_under_every_schedule_is_that_of_jit(name, schedule):
    """Seven microbatches or fewer: any number, not only multiples of the meshes."""
    program = check(name, schedule, placement(schedule, 2), 5 if name == "mlp" else 4)
    tasks = orders(program)
    assert all(len(set(order)) == len(order) for order in tasks)
    split = {task[: task.index("W")] for order in tasks for task in order if "W" in task}
    splits = get_schedule(schedule).splits_backward
    assert bool(split) == splits, "the backward is split where the schedule asks for it"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_a_mesh_runs_its_tasks_in_the_order_of_the_table(schedule):
    """Forward and backward of the last stage may be one program, and the first stage's backward is whole."""
    params, loss, batch = MODELS["mlp"].build(3)
    init, update = sgd_momentum()
    step = training_step(loss, 4, update)
    lowered = jitted(step, schedule, [0, 1, 2]).lower(init(params), *batch)
    assert lowered.warnings == []
    table = get_schedule(schedule).table(3, 3, 4)
    found = orders(lowered.program)
    assert found[1] == list(map(str, table.orders[1]))
    assert [t for t in found[0] if "B" not in t] == [str(t) for t in table.orders[0] if t.phase is Phase.F]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "v_half", "interleaved_1f1b"])
def test_any_number_of_microbatches(schedule, microbatches):
    check("mlp", schedule, placement(schedule, 2), microbatches)


@pytest.mark.parametrize(
    "meshes",
    [[0, 0, 1], *(pytest.param(m, marks=pytest.mark.slow) for m in ([0, 1, 1, 0, 0], [1, 0, 1, 0]))],
)
def test_any_number_of_stages_on_a_mesh(meshes):
    check("mlp", "interleaved_1f1b", meshes, 4)


class TestSchedulesOfTheUser:
    TABLE = [
        ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"],
        ["1F0", "1F1", "1B0", "1B1", "1F2", "1F3", "1B2", "1B3"],
    ]

    def test_a_table(self):
        program = check("mlp", from_table(self.TABLE), [0, 1], 4)
        first, second = orders(program)
        assert first == self.TABLE[0]
        # Where its backward follows at once, the forward is part of the same program.
        assert second == [task for task in self.TABLE[1] if task in second]
        assert {"1B0", "1B1", "1B2", "1B3"} <= set(second)

    def test_a_file(self, tmp_path):
        path = tmp_path / "mine.csv"
        path.write_text("\n".join(map(",".join, self.TABLE)) + "\n")
        assert orders(check("mlp", from_csv(path), [0, 1], 4))[0] == self.TABLE[0]

    def test_a_table_with_split_backwards_splits_the_backward(self):
        table = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1F2", "1I0", "1I1", "1W0", "1W1"]]
        table[1].remove("1F2")
        assert orders(check("mlp", from_table(table), [0, 1], 2))[1][-2:] == ["1W0", "1W1"]

    def test_a_function(self):
        def key(task: Task):
            return task.microbatch, task.phase is not Phase.F

        program = check("mlp", from_function(key), [0, 1], 4)
        assert orders(program)[0] == [f"0{p}{m}" for m in range(4) for p in "FB"]

    def test_a_table_for_another_number_of_microbatches(self):
        with pytest.raises(ScheduleError, match=r"^schedule 'from_table' does not fit the program"):
            check("mlp", from_table(self.TABLE), [0, 1], 2)

    def test_a_searched_table(self):
        found = search(SchedulingProblem(Costs.unit(3), 3, 4, whole=(0,), limit_activations=2))
        program = check("mlp", found.table, [0, 1, 2], 4)
        middle = next(s for s in program.streams if s.mesh == "m1")
        assert orders(program)[program.streams.index(middle)] == list(map(str, found.table.orders[1]))

    def test_what_the_data_flow_forbids_names_the_first_task(self):
        with pytest.raises(ScheduleError, match=r"^task 1B0 is impossible: it needs 1F0"):
            from_table([["0F0", "0B0"], ["1B0", "1F0"]])


def test_evaluation_under_a_forward_only_schedule():
    params, loss, batch = MODELS["mlp"].build(3)

    def evaluate(params, *batch):
        return mpmd.microbatch_loop(
            lambda total, *rows: (total + loss(params, *rows), None),
            jnp.float32(0),
            *batch,
            num_microbatches=4,
        )

    pipelined = jitted(evaluate, "forward_only", [0, 1, 2], donate=False)
    assert relative_difference(pipelined(params, *batch), jax.jit(evaluate)(params, *batch)) <= 1e-5
    assert orders(pipelined.compiled(params, *batch).program) == [
        [f"{s}F{m}" for m in range(4)] for s in range(3)
    ]


def test_dualpipe_keeps_two_copies_of_every_stage():
    """The first half of the microbatches goes up the meshes, the second comes down."""
    program = check("mlp", "dualpipe", [0, 1, 2, 3], 4)
    for stream, order in zip(program.streams, orders(program)):
        mesh = int(stream.mesh[1:])
        stages = {int(task[-1]): int(task[0]) for task in order}
        assert stages == {0: mesh, 1: mesh, 2: 3 - mesh, 3: 3 - mesh}
    assert sum("W" in t for order in orders(program) for t in order) == 3 * 4, "all but the first stage split"


def test_dualpipe_without_microbatches_has_no_second_copies():
    params, loss, batch = MODELS["mlp"].build(2)
    pipelined = jitted(jax.value_and_grad(loss), "dualpipe", [0, 1], donate=False)
    assert relative_difference(pipelined(params, *batch), jax.value_and_grad(loss)(params, *batch)) <= 1e-5
