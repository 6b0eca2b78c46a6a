"""What objects print: at most 10 lines of 120 columns, in less than 50 ms; and draw, in 736 pixels."""

from __future__ import annotations

import dataclasses
import inspect
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.api.compare import Comparison, FragmentDifference, ResultDifference
from mpmd.brief import BriefTable, brief, card, few
from mpmd.compile.comparison.narrowing import Divergence
from mpmd.compile.comparison.rounding import Difference
from mpmd.config.described import DescribedWorld
from mpmd.cost.device import Device
from mpmd.planning.step_forecast import forecast
from mpmd.runtime.program.stream_memory import predict_memory
from mpmd.scheduling import (
    SCHEDULES,
    Costs,
    SchedulingProblem,
    StageCosts,
    from_table,
    get_schedule,
    search,
    simulate,
)
from mpmd.scheduling.render_svg import PAGE_WIDTH
from tests.repo.tree import text
from tests.support.object_walk import faults, reached
from tests.support.scheduled_steps import jitted, placement

WIDE = 16


def step_of(meshes: int, microbatches: int):
    """A jitted step with a stage on each mesh, and arguments for it."""
    names = [f"stage{k}" for k in range(meshes)]
    stages = [mpmd.named_computation(lambda w, h: jnp.tanh(h @ w), name=name) for name in names]

    def step(params, x):
        def loss(params, x):
            for name, stage in zip(names, stages, strict=True):
                x = stage(params[name], x)
            return jnp.mean(x**2)

        value, grads = mpmd.accumulate_gradients(loss, num_microbatches=microbatches)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    topology = mpmd.make_topology({f"m{k}": 1 for k in range(meshes)})
    assignment = {name: f"m{k}" for k, name in enumerate(names)}
    config = mpmd.make_config(topology, assignment, schedule="1f1b")
    params = {name: np.eye(4, dtype=np.float32) for name in names}
    return mpmd.jit(step, config, donate_argnums=0), (params, np.ones((microbatches, 4), np.float32))


def objects_of(meshes: int, microbatches: int) -> dict[str, object]:
    """All that a step gives."""
    jitted, arguments = step_of(meshes, microbatches)
    lowered = jitted.lower(*arguments)
    compiled = lowered.compile()
    world = DescribedWorld(1, meshes, Device.parse("H100"), "H100", 80 << 30, False, print)
    return {
        "jitted": jitted,
        "traced": lowered.traced,
        "lowered": lowered,
        "compiled": compiled,
        "predicted": lowered.schedule(),
        "measured": compiled.measure.timeline(*arguments)[1],
        "estimated costs": lowered.estimated_costs(),
        "measured costs": compiled.measure.costs(*arguments)[1],
        "memory": compiled.memory_analysis(),
        "work": compiled.cost_analysis(),
        "memory of fragments": compiled.fragment_memory(),
        "forecast": forecast(lowered, world),
        "messages": forecast(lowered, world).messages,
    }


@pytest.fixture(scope="module")
def small():
    return objects_of(2, 4)


def plan_of(devices: int):
    one, two = (mpmd.named_computation(lambda w, h: jnp.tanh(h @ w), name=name) for name in ("one", "two"))

    def step(params, x, num_microbatches=2):
        def loss(params, x):
            return jnp.mean(two(params[1], one(params[0], x)) ** 2)

        value, grads = mpmd.accumulate_gradients(loss, num_microbatches)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    given = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2, jax.ShapeDtypeStruct((8, 4), jnp.float32)
    return mpmd.plan(step, *given, devices=devices, microbatches=(2, 4), partition=0)


def comparison():
    """Of a fragment with many results that differ."""
    difference = Difference(5e6, (0, 5), 0.28, 0.08, 32, 32)
    results = tuple(ResultDifference(k, "model.py:6", difference, 0.1, "native") for k in range(40))
    divergence = Divergence(12, "%12 = stablehlo.multiply " + "%11, " * 50, difference, "fusion.67")
    of_fragment = FragmentDifference("p3", "m1", "B stage 1", 2, results, divergence, "model.py:6", "")
    return Comparison((of_fragment,), 7, 16, (difference, "p0"), ("p1",), {"p2": "XLA compiles them"})


def others() -> dict[str, object]:
    """Objects without a step."""
    stacked = mpmd.Stacked([jnp.ones((2, 4))] * 64)
    tables = {name: get_schedule(name).smallest_table(4, 8) for name in SCHEDULES}
    return {
        "plan": plan_of(2),
        "comparison": comparison(),
        "stacked": stacked,
        "stages by parameters": mpmd.by_parameters(r"layers/(\d+)"),
        "stages by cost": mpmd.by_cost(4),
        "split": mpmd.split("layers"),
        "keep": mpmd.checkpoint.Keep(last=2, every=10_000),
        "saver": mpmd.checkpoint.Saver("/a/folder" * 20),
        "restored": mpmd.checkpoint.Restored(3, {"w": np.ones((1000, 1000))}, {"loss": 1.0}),
        "options": mpmd.PipelineOptions(**{
            field.name: ("x" * 50,) * 20
            for field in dataclasses.fields(mpmd.PipelineOptions)
            if field.default == ()
        }),
        "runtime options": mpmd.RuntimeOptions(run_ahead=3),
        "table": tables["1f1b"],
        "schedules": [get_schedule(name) for name in SCHEDULES],
        "a table of one's own": from_table([["0F0", "0B0"]]),
        "simulated": simulate(tables["zb_v"]),
        "problem": SchedulingProblem(Costs.uniform(WIDE, StageCosts()), WIDE, 4),
        "searched": search(SchedulingProblem(Costs.unit(2), 2, 4)),
    }  # fmt: skip


def classes_of_the_reference() -> set[str]:
    """The classes that the reference of the API names."""
    return {name.rpartition(".")[2] for name in re.findall(r"autoclass:: ([\w.]+)", text("docs/api.md"))}


def test_every_public_object_prints_in_a_few_lines(small):
    found = dict(reached(small | others()))
    assert [fault for path, value in found.items() for fault in faults(path, value)] == []
    kinds = {base.__name__ for value in found.values() for base in type(value).__mro__}
    public = {name for name in mpmd.__all__ if inspect.isclass(getattr(mpmd, name))}
    errors = {name for name in public if issubclass(getattr(mpmd, name), Exception)}
    assert public - errors <= kinds, "a class of mpmd.__all__ that these objects do not reach"
    options = {name for name in classes_of_the_reference() if name.endswith("Options")}
    assert classes_of_the_reference() - options <= kinds, "a class of docs/api.md that they do not reach"
    assert len(kinds) > 80


@pytest.mark.slow
def test_objects_of_a_large_step_print_in_as_few():
    found = dict(reached(objects_of(WIDE, 64)))
    assert [fault for path, value in found.items() for fault in faults(path, value)] == []


def in_units(lowered):
    """The timeline of a step whose backwards take two forwards, and whose optimizer takes no time."""
    units = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    seconds = {op.executable: units.get(op.phase, 0.0) + op.with_forward for op in lowered.figures.runs}
    return lowered.schedule(seconds)


def test_a_step_says_what_it_runs_and_sends(small):
    lowered, compiled = small["lowered"], small["compiled"]
    timeline, memory = lowered.schedule({}), predict_memory(lowered.program)
    runs = sum(len(timeline.compute(mesh)) for mesh in timeline.meshes)
    sent = sum(span.nbytes for span in timeline.transfers)
    shown = repr(lowered)
    assert lowered.figures.bubble == pytest.approx(in_units(lowered).bubble_fraction())
    assert lowered.figures.peak_bytes == {m.mesh: m.peak_bytes for m in memory}
    assert compiled.figures.peak_bytes == {n: m.peak_bytes for n, m in compiled.memory_analysis().items()}
    assert (lowered.figures.messages, lowered.figures.message_bytes) == (len(timeline.transfers), sent)
    assert shown.startswith(
        "Lowered 'step'\n  meshes     m0, m1 (data=1)\n  schedule   1f1b, 2 stages, 4 micro"
    )
    assert (
        f"bubble {in_units(lowered).bubble_fraction():.1%} if a backward" in shown
        and f"called {runs} times in a step" in shown
    )
    assert f"messages   {len(timeline.transfers)} in a step, {sent} B" in shown
    assert "arguments  3 arrays" in shown and "2 donated" in shown
    assert f"{len(compiled.executables)} native" in repr(compiled) or "xla" in repr(compiled)
    assert repr(small["jitted"]) == "<mpmd.jit of 'step' on m0, m1>"
    assert repr(timeline).startswith(f"Timeline {timeline.title!r}: 10 ")
    kinds = "computations  4 forward, 4 forward and backward, 4 backward, 4 optimizer and others\n"
    assert kinds in repr(timeline) and f"transfers     {len(timeline.transfers)}, {sent} B" in repr(timeline)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zb_h1", "zb_v"])
@pytest.mark.slow
def test_the_bubble_is_the_predicted_one_for_every_schedule(schedule):
    meshes = placement(schedule, 2)
    stages = [
        mpmd.named_computation(lambda w, h: jnp.tanh(h @ w), name=f"stage{s}") for s in range(len(meshes))
    ]

    def step(params, x):
        def loss(params, x):
            for w, stage in zip(params, stages, strict=True):
                x = stage(w, x)
            return jnp.sum(x)

        value, grads = mpmd.accumulate_gradients(loss, num_microbatches=4)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    lowered = jitted(step, schedule, meshes).lower(
        [np.eye(4, dtype=np.float32)] * len(stages), np.ones((8, 4))
    )
    assert lowered.figures.bubble == pytest.approx(in_units(lowered).bubble_fraction())
    if schedule == "gpipe":  # as simulate says of two stages and four microbatches
        assert lowered.figures.bubble == pytest.approx(1 / 5)


PICTURES = (
    "lowered",
    "compiled",
    "predicted",
    "measured",
    "memory",
    "forecast",
    "plan",
    "table",
    "schedules[0]",
    "searched",
)


def shown_in_a_notebook(value: object) -> str:
    """What a notebook shows: HTML before SVG, as Jupyter prefers it."""
    for kind in ("html", "svg"):
        method = getattr(value, f"_repr_{kind}_", None)
        if method is not None:
            return method()
    raise AssertionError(f"{type(value).__name__} has no picture")


def test_objects_are_pictures_in_a_notebook(small):
    found = small | others()
    found["schedules[0]"] = found["schedules"][0]
    for name in PICTURES:
        page = shown_in_a_notebook(found[name])
        pictures = re.findall(r"<svg.*?</svg>", page, re.S)
        assert pictures, name
        for picture in pictures:
            svg = ET.fromstring(picture)
            assert int(svg.get("width")) <= PAGE_WIDTH, name
            assert len(list(svg.iter("{http://www.w3.org/2000/svg}rect"))) > 2, name
    topology = ET.fromstring(shown_in_a_notebook(small["traced"].config.topology))
    assert [cell.text for cell in topology.iter("td")][:2] == ["m0", "data=1"]


def test_fields_that_are_as_by_default_are_left_out():
    assert repr(mpmd.RuntimeOptions()) == "RuntimeOptions()"
    assert repr(mpmd.PipelineOptions(backend="xla")) == "PipelineOptions(backend='xla')"

    @dataclasses.dataclass
    class Held:
        array: object = None
        text: str = ""
        __repr__ = brief

    shown = repr(Held(np.ones((3, 4)), "long " * 100))
    assert shown.startswith("Held(array=float64[3,4], text='long long") and len(shown) < 120
    assert repr(Held(object())).endswith("Held(array=<object>)")


def test_tables_show_their_first_entries():
    assert repr(BriefTable({"a": 1})) == "{'a': 1}"
    lines = repr(BriefTable(dict.fromkeys(range(40), "x" * 200))).splitlines()
    assert len(lines) == 10 and lines[-1] == " … and 31 more}" and max(map(len, lines)) <= 120
    assert len(repr(BriefTable({k: k for k in range(10)})).splitlines()) == 10
    assert few("abc") == "a, b, c" and few(range(9), most=2) == "0, 1 and 7 more"
    assert card("Head", [("one", "1"), ("none", "")]) == "Head\n  one  1"
