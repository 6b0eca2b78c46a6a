"""Messages under way while other work runs."""

import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.cost.device import CORE, H200
from mpmd.compile.schedule.heap import Heap
from mpmd.compile.schedule.latency_hiding_schedule import Clock, LatencyHidingSchedule
from mpmd.errors import ConfigError, PassError
from mpmd.support.passes import with_overrides

PAIR = """HloModule pair, replica_count=4, is_scheduled=true
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b) }
ENTRY main {
  x = f32[256,256] parameter(0)
  w = f32[256,256] parameter(1)
  n = f32[256,256] negate(x)
  s = f32[256,256] all-reduce-start(n), replica_groups={{0,1,2,3}}, to_apply=sum
  d = f32[256,256] all-reduce-done(s)
  y = f32[256,256] dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = f32[256,256] add(d, y)
}
"""


def test_a_message_is_hidden_behind_a_product_and_time_is_won():
    module = parse_module(PAIR)
    clock = Clock(CORE, 1e9, 1e-5)
    before = clock.run(list(module.entry))
    assert LatencyHidingSchedule().run(module)
    names = [i.name for i in module.entry]
    assert names.index("s") < names.index("y") < names.index("d")
    product, start = (next(i for i in module.entry if i.name == name) for name in "ys")
    won = min(clock.seconds(product), clock.flight(start))
    assert clock.run(list(module.entry)) == pytest.approx(before - won)


def test_nothing_moves_where_nothing_is_won():
    module = parse_module(PAIR)
    assert LatencyHidingSchedule().run(module)
    assert not LatencyHidingSchedule().run(module)
    assert not LatencyHidingSchedule().run(
        parse_module("HloModule a, is_scheduled=true\nENTRY m { ROOT p = f32[] parameter(0) }")
    )


def test_an_order_that_needs_too_much_memory_is_not_taken():
    module = parse_module(PAIR)
    assert not LatencyHidingSchedule(memory_limit=1000).run(module)


def test_sums_are_made_in_place_of_what_is_summed():
    heap_of = [Heap(parse_module(text)) for text in (PAIR, PAIR.replace("dot(w, w)", "dot(n, w)"))]
    size = 256 * 256 * 4
    for heap, there in zip(heap_of, (size, 2 * size)):
        entry = heap.dataflow.module.entry
        profile = dict(zip([i.name for i in entry], heap.simulate(list(entry)).profile))
        assert profile["s"] == there, "who reads it besides needs it unchanged"
        assert profile["y"] == there + size


def test_operands_stay_until_the_message_has_arrived():
    permuted = "collective-permute-start(n), source_target_pairs={{0,1},{1,2}}"
    text = PAIR.replace("all-reduce-start(n), replica_groups={{0,1,2,3}}, to_apply=sum", permuted)
    text = text.replace("s = f32[256,256] ", "s = (f32[256,256], f32[256,256]) ")
    module = parse_module(text.replace("all-reduce-done", "collective-permute-done"))
    heap = Heap(module)
    size = 256 * 256 * 4
    profile = dict(zip([i.name for i in module.entry], heap.simulate(list(module.entry)).profile))
    assert profile["s"] == 2 * size
    assert profile["d"] == 2 * size
    assert profile["y"] == 2 * size, "what was sent is free, the sum and the product are there"


def test_times_come_from_the_device():
    module = parse_module(PAIR)
    product = next(i for i in module.entry if i.name == "y")
    assert Clock(H200, 4e11, 1e-6).seconds(product) < Clock(CORE, 1e9, 1e-5).seconds(product)


def test_an_order_is_needed_first():
    with pytest.raises(PassError, match="needs an order"):
        LatencyHidingSchedule().run(parse_module(PAIR.replace(", is_scheduled=true", "")))


def test_rates_can_be_set_by_options():
    (given,) = ("hlo-latency-hiding-schedule{latency=0.001 keep-peak=true device=H200}",)
    made = with_overrides(LatencyHidingSchedule(), (given,))
    assert (made.latency, made.keep_peak, made.link, made.device) == (1e-3, True, 1e9, H200)
    with pytest.raises(ConfigError, match="cannot read 'soon' as float"):
        with_overrides(LatencyHidingSchedule(), ("hlo-latency-hiding-schedule{latency=soon}",))


def test_an_order_that_needs_more_memory_than_before_is_not_taken():
    first = "n = f32[256,256] negate(x)"
    text = PAIR.replace(first, f"{first}\n  m = f32[256,256] negate(n)").replace("dot(w, w)", "dot(m, w)")
    moved = [LatencyHidingSchedule(keep_peak=keep).run(parse_module(text)) for keep in (False, True)]
    heap = Heap(parse_module(text))
    peak = heap.simulate(list(heap.dataflow.module.entry)).peak
    module = parse_module(text)
    LatencyHidingSchedule(keep_peak=True).run(module)
    after = Heap(module)
    assert after.simulate(list(module.entry)).peak <= peak
    assert moved[0]
