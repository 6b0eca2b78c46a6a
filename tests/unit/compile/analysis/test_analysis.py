"""Values, live ranges, reachability, cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.analysis.call_graph import CallGraph, Context, Reachability
from mpmd.compile.analysis.dataflow import Dataflow
from mpmd.compile.analysis.liveness import Liveness, LiveRange, in_place_pairs, overwritten_pairs
from mpmd.compile.cost.hlo_cost import Cost, CostModel
from mpmd.compile.hlo import HloBuilder, parse_module
from mpmd.compile.lowering import lower

LOOP = """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

cond {
  cs = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  ci = s32[] get-tuple-element(cs), index=0
  cn = s32[] constant(3)
  ROOT cl = pred[] compare(ci, cn), direction=LT
}

body {
  bs = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  bi = s32[] get-tuple-element(bs), index=0
  bx = f32[4]{0} get-tuple-element(bs), index=1
  bk = f32[4]{0} get-tuple-element(bs), index=2
  bo = s32[] constant(1)
  bj = s32[] add(bi, bo)
  by = f32[4]{0} multiply(bx, bk)
  ROOT bt = (s32[], f32[4]{0}, f32[4]{0}) tuple(bj, by, bk)
}

ENTRY main {
  x = f32[4]{0} parameter(0)
  k = f32[4]{0} parameter(1)
  zero = s32[] constant(0)
  neg = f32[4]{0} negate(x)
  init = (s32[], f32[4]{0}, f32[4]{0}) tuple(zero, neg, k)
  loop = (s32[], f32[4]{0}, f32[4]{0}) while(init), condition=cond, body=body
  out = f32[4]{0} get-tuple-element(loop), index=1
  abs = f32[4]{0} abs(out)
  ROOT r = (f32[4]{0}) tuple(abs)
}
"""


def named(module, name):
    return next(i for i in module.instructions() if i.name == name)


@pytest.fixture
def module():
    return parse_module(LOOP)


def test_loops_define_phis_only_where_the_state_changes(module):
    flow = Dataflow(module)
    state = named(module, "bs")
    assert flow.value_at(state, (1,)).is_phi
    assert flow.value_at(state, (2,)) is flow.value_at(named(module, "k"))
    assert flow.value_at(named(module, "bx")) is flow.value_at(state, (1,))
    assert flow.value_at(named(module, "out")) is flow.value_at(named(module, "loop"), (1,))
    assert flow.value_at(named(module, "loop"), (2,)) is flow.value_at(named(module, "k"))
    assert [u.instruction.name for u in flow.value_at(named(module, "k")).uses] == ["by"]
    assert [v.instruction.name for v in flow.values if v.live_out] == ["abs"]


def test_live_ranges_on_one_axis(module):
    flow = Dataflow(module)
    live = Liveness(flow)
    instants = live.time.instants
    assert instants[named(module, "neg")] < instants[named(module, "ci")] < instants[named(module, "bj")]
    assert instants[named(module, "bt")] < instants[named(module, "loop")]

    def range_of(name, index=()):
        return live.ranges[flow.value_at(named(module, name), index)]

    assert range_of("neg") == LiveRange(
        instants[named(module, "neg")], live.time.spans[module.computation("cond")].start
    )
    assert range_of("by").end == live.time.spans[module.computation("body")].end
    assert range_of("k").end == live.time.length == range_of("abs").end
    assert range_of("x") == LiveRange(0, instants[named(module, "neg")])


def test_conditionals_join_their_branches():
    module = parse_module(
        """HloModule m
t {
  a = f32[2]{0} parameter(0)
  ROOT n = f32[2]{0} negate(a)
}
f {
  ROOT b = f32[2]{0} parameter(0)
}
ENTRY e {
  p = pred[] parameter(0)
  x = f32[2]{0} parameter(1)
  ROOT c = f32[2]{0} conditional(p, x, x), true_computation=t, false_computation=f
}"""
    )
    flow = Dataflow(module)
    phi = flow.value_at(module.entry.root)
    assert phi.is_phi and phi.live_out
    assert (module.entry.root, ()) in phi.positions


def test_call_graph_contexts():
    module = parse_module(
        """HloModule m
inner {
  i = f32[] parameter(0)
  ROOT j = f32[] negate(i)
}
mapped {
  p = f32[] parameter(0)
  ROOT q = f32[] call(p), to_apply=inner
}
dead {
  ROOT d = f32[] constant(0)
}
ENTRY e {
  x = f32[2]{0} parameter(0)
  ROOT m = f32[2]{0} map(x), dimensions={0}, to_apply=mapped
}"""
    )
    graph = CallGraph(module)
    contexts = {c.name: graph.contexts[c] for c in module.computations}
    assert contexts == {
        "inner": Context.EMBEDDED,
        "mapped": Context.EMBEDDED,
        "dead": Context.UNREACHED,
        "e": Context.SEQUENTIAL,
    }
    assert graph.is_flat()


@pytest.mark.parametrize(
    ("use", "context"),
    [
        ("ROOT z = f32[2] call(y), to_apply=f", Context.SEQUENTIAL),
        (
            "ROOT z = f32[2] map(y), dimensions={0}, to_apply=g",
            Context.BOTH,
        ),
    ],
)
def test_a_call_graph_is_flat_only_where_everything_has_one_caller(use, context):
    module = parse_module(
        f"""HloModule m
f {{
  i = f32[2] parameter(0)
  ROOT j = f32[2] negate(i)
}}
g {{
  p = f32[] parameter(0)
  b = f32[2] broadcast(p), dimensions={{}}
  c = f32[2] call(b), to_apply=f
  ROOT s = f32[] custom-call(c), custom_call_target="t"
}}
ENTRY e {{
  x = f32[2] parameter(0)
  y = f32[2] call(x), to_apply=f
  {use}
}}"""
    )
    graph = CallGraph(module)
    assert graph.contexts[module.computation("f")] is context and not graph.is_flat()


def test_in_place_operations():
    module = parse_module(
        """HloModule m
fused {
  p = f32[8]{0} parameter(0)
  u = f32[2]{0} parameter(1)
  i = s32[] parameter(2)
  b = f32[8]{0} bitcast(p)
  ROOT d = f32[8]{0} dynamic-update-slice(b, u, i)
}
ENTRY e {
  x = f32[8]{0} parameter(0)
  u = f32[2]{0} parameter(1)
  i = s32[] parameter(2)
  d = f32[8]{0} dynamic-update-slice(x, u, i)
  c = f32[8]{0} custom-call(u, d), custom_call_target="t", output_to_operand_aliasing={{}: (1, {})}
  ROOT f = f32[8]{0} fusion(c, u, i), kind=kLoop, calls=fused
}"""
    )
    found = {i.name: in_place_pairs(i) for i in module.entry}
    assert found["d"] == [(0, (), ())] and found["c"] == [(1, (), ())] and found["f"] == [(0, (), ())]


def test_what_is_read_too_is_not_overwritten():
    module = parse_module(
        """HloModule m
fused {
  p = f32[8]{0} parameter(0)
  i = s32[] parameter(1)
  h = f32[2]{0} slice(p), slice={[6:8]}
  ROOT d = f32[8]{0} dynamic-update-slice(p, h, i)
}
ENTRY e {
  x = f32[8]{0} parameter(0)
  i = s32[] parameter(1)
  b = f32[8]{0} bitcast(x)
  d = f32[8]{0} dynamic-update-slice(x, b, i)
  ROOT f = f32[8]{0} fusion(d, i), kind=kLoop, calls=fused
}"""
    )
    for name in "df":
        (instruction,) = (i for i in module.entry if i.name == name)
        assert in_place_pairs(instruction) == [(0, (), ())] and overwritten_pairs(instruction) == []


def test_reachability_and_its_update():
    module = parse_module(
        """HloModule m
ENTRY e {
  a = f32[] parameter(0)
  b = f32[] negate(a)
  c = f32[] abs(a)
  d = f32[] add(b, c)
  ROOT e = f32[] add(b, d)
}"""
    )
    a, b, c, d, e = (named(module, n) for n in "abcde")
    reach = Reachability(module.entry)
    assert reach.reaches(a, e) and reach.reaches(b, d) and not reach.reaches(d, b)
    assert not reach.connected(b, c)
    c.replace_operand(0, b)
    reach.update([c])
    assert reach.reaches(b, c) and reach.reaches(b, d)
    made = HloBuilder(module.entry).add("negate", c)
    d.replace_operand(0, made)
    reach.update([d])
    assert reach.reaches(c, made) and reach.reaches(made, e) and made in reach


def test_what_control_edges_say_is_a_dependence():
    module = parse_module(
        """HloModule m
ENTRY e {
  a = f32[] parameter(0)
  b = f32[] negate(a)
  c = f32[] abs(a), control-predecessors={b}
  ROOT d = f32[] sine(c)
}"""
    )
    b, d = named(module, "b"), named(module, "d")
    assert Reachability(module.entry).reaches(b, d)


@pytest.mark.parametrize("seed", range(5))
def test_reachability_against_search(seed):
    rng = np.random.default_rng(seed)
    lines = ["a0 = f32[] parameter(0)"]
    for n in range(1, 40):
        left, right = rng.integers(0, n, 2)
        lines.append(f"a{n} = f32[] add(a{left}, a{right})")
    module = parse_module("HloModule m\nENTRY e {\n" + "\n".join(lines) + "\n}")
    reach = Reachability(module.entry)

    def search(start):
        seen, waiting = {start}, [start]
        while waiting:
            for operand in waiting.pop().operands:
                if operand not in seen:
                    seen.add(operand)
                    waiting.append(operand)
        return seen

    for instruction in module.entry:
        assert {i for i in module.entry if reach.reaches(i, instruction)} == search(instruction)


def test_costs_of_known_operations():
    x, w = jnp.ones((8, 16)), jnp.ones((16, 32))
    module = lower(jax.jit(lambda x, w: jnp.tanh(x @ w)).lower(x, w).compiler_ir("stablehlo"))
    cost = CostModel().module(module)
    assert (cost.flops, cost.transcendentals) == (2 * 8 * 16 * 32, 8 * 32)
    assert cost.bytes_read == 4 * (8 * 16 + 16 * 32 + 8 * 32) and cost.bytes_written == 4 * 2 * 8 * 32


def test_loops_cost_their_trips(module):
    loop = named(module, "loop")
    once = CostModel().instruction(loop)
    loop.backend_config = '{"known_trip_count":{"n":"3"}}'
    assert CostModel().instruction(loop) == once.times(3)
    loop.backend_config = ""
    assert CostModel().instruction(loop) == once
    assert Cost(1, 2, 3, 4) + Cost(1, 1, 1, 1) == Cost(2, 3, 4, 5) and Cost(1, 2, 3, 4).bytes == 7


def test_slices_and_updates_touch_only_their_part():
    module = parse_module(
        """HloModule m
ENTRY e {
  x = f32[1000]{0} parameter(0)
  u = f32[10]{0} parameter(1)
  i = s32[] parameter(2)
  s = f32[10]{0} dynamic-slice(x, i), dynamic_slice_sizes={10}
  v = f32[10]{0} add(s, u)
  ROOT d = f32[1000]{0} dynamic-update-slice(x, v, i)
}"""
    )
    model = CostModel()
    assert model.instruction(named(module, "s")).bytes == 40 + 40 + 4
    assert model.instruction(named(module, "d")).bytes == 40 + 40 + 4


def test_a_fusion_reads_only_what_it_takes():
    module = parse_module(
        """HloModule m
rows {
  x = f32[1000,8]{1,0} parameter(0)
  i = s32[4,1]{1,0} parameter(1)
  y = f32[4,8]{1,0} parameter(2)
  g = f32[4,8]{1,0} gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0},
    index_vector_dim=1, slice_sizes={1,8}
  ROOT a = f32[4,8]{1,0} add(g, y)
}
ENTRY e {
  x = f32[1000,8]{1,0} parameter(0)
  i = s32[4,1]{1,0} parameter(1)
  y = f32[4,8]{1,0} parameter(2)
  ROOT f = f32[4,8]{1,0} fusion(x, i, y), kind=kLoop, calls=rows
}"""
    )
    cost = CostModel().module(module)
    assert (cost.bytes_read, cost.bytes_written) == (4 * (32 + 4 + 32), 4 * 32)


@pytest.mark.parametrize(
    ("opcode", "result", "attributes", "expected"),
    [
        ("all-reduce", "[8]", "to_apply=sum", (2 * 32 * 3 // 4, 6)),
        ("all-gather", "[32]", "dimensions={0}", (128 * 3 // 4, 3)),
        ("reduce-scatter", "[2]", "dimensions={0}, to_apply=sum", (32 * 3 // 4, 3)),
        ("all-to-all", "[8]", "dimensions={0}", (32 * 3 // 4, 3)),
        ("collective-permute", "[8]", "source_target_pairs={{0,1}}", (32, 1)),
    ],
)
def test_collectives_send_what_a_ring_does(opcode, result, attributes, expected):
    groups = "" if "pairs" in attributes else ", replica_groups={{0,1,2,3},{4,5,6,7}}"
    module = parse_module(
        "HloModule m, num_partitions=8\nsum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n"
        "  ROOT c = f32[] add(a, b)\n}\nENTRY main {\n  x = f32[8] parameter(0)\n"
        f"  ROOT r = f32{result} {opcode}(x){groups}, channel_id=1, {attributes}"
        + (", use_global_device_ids=true" if opcode in ("all-reduce", "all-gather", "reduce-scatter") else "")
        + "\n}\n"
    )
    cost = CostModel().module(module)
    assert (cost.bytes_sent, cost.messages) == expected
