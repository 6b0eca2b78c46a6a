"""How often fusion plans: layers that are alike are planned once, also where a pass runs by itself."""

from mpmd.compile.hlo import HloModule, parse_module, print_module
from mpmd.compile.kernels.planner import planned_kernel
from mpmd.compile.kernels.planner.plan_cache import caching_plans
from mpmd.compile.passes.fusion import Fusion

LAYER = """  n{k} = negate(x{k})
  e{k} = exponential(n{k})
  z{k} = f32[] constant(0)
  r{k} = reduce(e{k}, z{k}), dimensions={{1}}, to_apply=add
  b{k} = f32[64,64] broadcast(r{k}), dimensions={{0}}
  x{next} = divide(e{k}, b{k})"""


def layers(count: int) -> HloModule:
    """So many equal layers, one after the other."""
    body = "\n".join(LAYER.format(k=k, next=k + 1) for k in range(count))
    add = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = add(a, b)\n}"
    return parse_module(f"HloModule m\n{add}\nENTRY e {{\n  x0 = f32[64,64] parameter(0)\n{body}\n}}\n")


def test_equal_layers_are_planned_once(monkeypatch):
    planned = []
    plan = planned_kernel.plan_group

    def counted(*group):
        planned.append(group[0])
        return plan(*group)

    monkeypatch.setattr(planned_kernel, "plan_group", counted)
    Fusion().run(layers(3))
    few = len(planned)
    planned.clear()
    Fusion().run(layers(12))
    assert 0 < len(planned) < 3 * few


def test_a_pass_by_itself_does_what_it_does_in_a_pipeline():
    alone, together = layers(4), layers(4)
    Fusion().run(alone)
    with caching_plans():
        Fusion().run(together)
    assert print_module(alone) == print_module(together)
