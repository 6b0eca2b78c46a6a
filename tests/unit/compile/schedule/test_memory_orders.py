"""Orders of instructions and the heap that they are judged by."""

import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.schedule.heap import Heap
from mpmd.compile.schedule.memory_schedule import SCHEDULERS, MemorySchedule, exchanged
from mpmd.errors import PassError
from tests.support.three_rounds import three_rounds

SUM = """
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b) }
"""
WIDE = f"""HloModule wide
{SUM}
ENTRY main {{
  x = f32[] parameter(0)
  zero = f32[] constant(0)
  p = f32[1000] broadcast(x), dimensions={{}}
  q = f32[1000] broadcast(x), dimensions={{}}
  m = f32[1000] multiply(p, p)
  n = f32[1000] multiply(q, q)
  r = f32[] reduce(m, zero), dimensions={{0}}, to_apply=sum
  s = f32[] reduce(n, zero), dimensions={{0}}, to_apply=sum
  ROOT t = f32[] add(r, s)
}}
"""
ROUNDS = three_rounds("""
  e = f32[1000] exponential(v)
  r = f32[1000] reverse(e), dimensions={0}
  w = f32[1000] add(r, e)
""")
LOOP = f"""HloModule loop
{SUM}
{ROUNDS}ENTRY main {{
  x = f32[] parameter(0)
  i = s32[] constant(0)
  v = f32[1000] broadcast(x), dimensions={{}}
  zero = f32[] constant(0)
  b = (s32[], f32[1000]) tuple(i, v)
  l = (s32[], f32[1000]) while(b), condition=condition, body=body
  o = f32[1000] get-tuple-element(l), index=1
  ROOT r = f32[] reduce(o, zero), dimensions={{0}}, to_apply=sum
}}
"""


def entry_of(text):
    module = parse_module(text)
    return module, module.entry, Heap(module)


def named(computation, names):
    found = {i.name: i for i in computation}
    return [found[name] for name in names.split()]


def test_the_heap_counts_what_is_alive_and_what_is_written_in_place():
    _, entry, heap = entry_of(WIDE)
    one_by_one = named(entry, "x zero p m r q n s t")
    both = named(entry, "x zero p q m n r s t")
    assert heap.simulate(one_by_one).profile == [0, 0, 4000, 4000, 4004, 4004, 4004, 4008, 4]
    assert heap.simulate(both).peak == 8004


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("text", [WIDE, LOOP])
def test_every_scheduler_names_operands_before_users(name, text):
    heap = Heap(parse_module(text))
    for computation in heap.computations:
        order = SCHEDULERS[name](computation, heap)
        places = {instruction: place for place, instruction in enumerate(order)}
        assert sorted(i.name for i in order) == sorted(i.name for i in computation)
        assert all(places[o] < places[i] for i in order for o in i.operands)


def test_the_list_scheduler_finishes_one_branch_before_the_next():
    _, entry, heap = entry_of(WIDE)
    assert heap.simulate(SCHEDULERS["list"](entry, heap)).peak <= 4008


def test_the_best_order_is_no_worse_than_any():
    for text in (WIDE, LOOP):
        module, entry, heap = entry_of(text)
        for computation in heap.computations[:-1]:
            heap.settle(computation, computation.post_order())
        peaks = [heap.simulate(s(entry, heap)).peak for s in SCHEDULERS.values()]
        assert MemorySchedule().run(module)
        assert heap.simulate(list(entry)).peak <= min(peaks)
        assert not MemorySchedule().run(module), "it is scheduled now"


LEADERS = {
    "list": ["v0 8 x x", "v1 256 x x", "v2 8 x x", "v3 1000 x v2", "v4 8 x v1", "r 1 v0 v3 v4"],
    "post-order": ["v0 8 x x", "v1 64 v0 x", "v2 256 v0 v0", "v3 256 v2 x", "v4 64 v0 v1", "r 1 v3 v4"],
}
"""Programs for which one scheduler alone has the lowest peak: name, elements and operands of calls."""

AFTERWARDS = ["v0 256 x x", "v1 1000 x x", "v2 64 v1 v1", "v3 16 v0 x", "v4 256 v2 v0", "r 1 v3 v4"]
"""One for which no scheduler finds the order that an exchange does."""


def calls(lines):
    made = []
    for line in lines:
        name, size, *operands = line.split()
        call = f'f32[{size}] custom-call({", ".join(operands)}), custom_call_target="t"'
        made.append(f"  {'ROOT ' if name == 'r' else ''}{name} = {call}")
    return "HloModule m\nENTRY main {\n  x = f32[8] parameter(0)\n" + "\n".join(made) + "\n}\n"


def peaks_of(text):
    _, entry, heap = entry_of(text)
    return {name: heap.simulate(scheduler(entry, heap)).peak for name, scheduler in SCHEDULERS.items()}


def peak_after(text, **options):
    module, entry, _ = entry_of(text)
    MemorySchedule(**options).run(module)
    return Heap(module).simulate(list(entry)).peak


@pytest.mark.parametrize("leader", LEADERS)
def test_whichever_scheduler_leads_is_followed(leader):
    text = calls(LEADERS[leader])
    peaks = peaks_of(text)
    assert all(peaks[leader] < peak for name, peak in peaks.items() if name != leader)
    assert peak_after(text, exchange=False) == peaks[leader]


def test_exchanges_go_on_from_the_best_order():
    text = calls(AFTERWARDS)
    assert peak_after(text) < min(peaks_of(text).values()) == peak_after(text, exchange=False)


def test_an_exchange_moves_what_is_needed_late_behind_the_peak():
    _, entry, heap = entry_of(WIDE)
    bad = named(entry, "x zero q p m r n s t")
    assert heap.simulate(bad).peak == 8004
    assert heap.simulate(exchanged(bad, heap)).peak <= 4008


def test_a_loop_needs_what_its_body_needs_beside_its_state():
    module, entry, heap = entry_of(LOOP)
    MemorySchedule().run(module)
    heap = Heap(module)
    for computation in heap.computations:
        heap.settle(computation, list(computation))
    body = next(c for c in heap.computations if c.name == "body")
    assert heap.inside[body] == 8000, "e, and r; the next state is written over the one that is read no more"
    assert heap.inside[entry] == 8000 + 4000 + 4


def test_a_donated_parameter_is_read_before_its_memory_is_taken():
    text = """HloModule donated, input_output_alias={ {0}: (0, {}, may-alias) }
    ENTRY main {
      x = f32[1000] parameter(0)
      y = f32[1000] parameter(1)
      m = f32[1000] multiply(y, y)
      d = f32[1000] divide(x, y)
      ROOT t = (f32[1000], f32[1000]) tuple(m, d)
    }"""
    module, entry, heap = entry_of(text)
    wrong = heap.simulate(named(entry, "x y m d t"))
    right = heap.simulate(named(entry, "x y d m t"))
    assert (wrong.copied, right.copied) == (4000, 0)
    MemorySchedule().run(module)
    assert [i.name for i in entry][-3:] == ["d", "m", "t"]


def test_an_unknown_scheduler_is_refused():
    with pytest.raises(PassError, match="has no scheduler 'lucky'"):
        MemorySchedule(scheduler="lucky").run(parse_module(WIDE))


AFTER = """HloModule after
ENTRY main {
  x = f32[1000] parameter(0)
  b = f32[1000] cosine(x)
  c = f32[10] slice(x), slice={[0:10]}, control-predecessors={b}
  d = f32[10] slice(b), slice={[0:10]}
  ROOT r = f32[10] add(c, d)
}
"""


@pytest.mark.parametrize("name", SCHEDULERS)
def test_control_predecessors_run_first(name):
    module = parse_module(AFTER)
    order = [i.name for i in SCHEDULERS[name](module.entry, Heap(module))]
    assert order.index("b") < order.index("c")
