"""Random programs of several devices: collectives in forms that passes change."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.attributes import ReplicaGroups
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from tests.support.random_hlo.draft import Case, Draft, small_integers
from tests.support.random_hlo.rewritable.pool import Pool

DEVICES = 4
GROUPS = (
    ReplicaGroups(),
    ReplicaGroups(((0, 1, 2, 3),)),
    ReplicaGroups(((0, 1), (2, 3))),
    ReplicaGroups(((0, 2), (1, 3))),
    ReplicaGroups(((0,), (1,), (2,), (3,))),
    ReplicaGroups(iota=(2, 2, (4,), (0,))),
)


def collective_case(seed: int) -> tuple[Case, list[list[np.ndarray]]]:
    """A program for four devices, and the arguments of each."""
    draft = Draft(np.random.default_rng([seed, 78]), f"collective#{seed}", seed)
    draft.module.replica_count = DEVICES
    pool = Pool(draft)
    for _ in range(3):
        pool.fresh("f32", (4, 2))
    for number in range(8):
        pool.grow(PATTERNS[(seed * 8 + number) // 2 % len(PATTERNS)] if number % 2 else draft.pick(PATTERNS))
    outputs = [v for v in pool.values if not v.users][-4:] or [pool.values[-1]]
    draft.exact, draft.terms = False, DEVICES
    case = draft.finish(draft.builder.tuple(outputs))
    rows = [
        [small_integers(draft.rng, p.shape.dtype, p.shape.dims) for p in case.module.entry.parameters]
        for _ in range(DEVICES)
    ]
    return case, rows


def _size(groups: ReplicaGroups) -> int:
    return len(groups.groups(DEVICES)[0])


def all_reduce(p: Pool, value: HloInstruction, groups: ReplicaGroups, opcode: str) -> HloInstruction:
    computation = p.reducer(opcode, value.shape.dtype)
    return p.build.add("all-reduce", value, replica_groups=groups, called=(computation,))


def all_gather(p: Pool, value: HloInstruction, groups: ReplicaGroups, dim: int) -> HloInstruction:
    shape = _scaled(value.shape, dim, _size(groups), 1)
    return p.build.add("all-gather", value, shape=shape, dimensions=(dim,), replica_groups=groups)


def reduce_scatter(p: Pool, value: HloInstruction, groups: ReplicaGroups, dim: int) -> HloInstruction:
    shape = _scaled(value.shape, dim, 1, _size(groups))
    return p.build.add(
        "reduce-scatter",
        value,
        shape=shape,
        dimensions=(dim,),
        replica_groups=groups,
        called=(p.reducer("add", value.shape.dtype),),
    )


def _scaled(shape: Shape, dim: int, times: int, over: int) -> Shape:
    return shape.with_dims([n * times // over if d == dim else n for d, n in enumerate(shape.dims)])


def _value(p: Pool) -> HloInstruction:
    fits = [v for v in p.values if v.shape.dims == (4, 2) and v.shape.dtype == "f32"]
    return p.small(p.choose(*fits))


def _groups(p: Pool) -> ReplicaGroups:
    return p.choose(*GROUPS)


def several_reduced(p: Pool) -> HloInstruction:
    groups, opcode = _groups(p), p.choose("add", "maximum")
    a, b = (all_reduce(p, _value(p), groups, opcode) for _ in range(2))
    return p.build.add(p.choose("add", "maximum"), a, b)


def dependent(p: Pool) -> HloInstruction:
    groups = _groups(p)
    once = p.small(all_reduce(p, _value(p), groups, "add"))
    return all_reduce(p, p.build.add("negate", once), groups, "add")


def crossed(p: Pool) -> HloInstruction:
    once = all_reduce(p, _value(p), GROUPS[2], "add")
    return all_reduce(p, once, p.choose(GROUPS[2], GROUPS[3]), "add")


def several_gathered(p: Pool) -> HloInstruction:
    groups = _groups(p)
    a, b = (all_gather(p, _value(p), groups, 0) for _ in range(2))
    total = p.build.add("maximum", a, b)
    return p.build.slice(total, (0, 0), (4, 2))


def gathered_copies(p: Pool) -> HloInstruction:
    row = p.build.slice(_value(p), (0, 0), (1, 2))
    wide = p.build.broadcast(p.build.reshape(row, (2,)), (4, 2), (1,))
    if p.rng.random() < 0.5:
        wide = p.build.convert(p.build.convert(_value(p), "bf16"), "f32")
    made = all_gather(p, wide, _groups(p), 1)
    return p.build.slice(made, (0, 0), (4, 2))


def several_scattered(p: Pool) -> HloInstruction:
    groups = p.choose(*GROUPS[:4])
    a, b = (reduce_scatter(p, _value(p), groups, 0) for _ in range(2))
    made = p.build.add("add", a, b)
    return p.build.add("concatenate", *[made] * _size(groups), dimensions=(0,))


def _own_start(p: Pool, groups: ReplicaGroups, size: int) -> HloInstruction:
    """Where this device's part begins."""
    places = np.zeros(DEVICES, np.int32)
    for group in groups.groups(DEVICES):
        for place, device in enumerate(group):
            places[device] = place
    if p.rng.random() < 0.2:
        places = places[::-1].copy()
    number = p.build.add("convert", p.build.add("replica-id"), shape=_scalar("s32"))
    found = p.build.dynamic_slice(p.build.constant(places), [number], (1,))
    return p.build.add("multiply", p.build.reshape(found, ()), p.build.constant(size, "s32"))


def _scalar(dtype: str) -> Shape:
    return Shape(dtype)


def own_part_of_sum(p: Pool) -> HloInstruction:
    groups = p.choose(*GROUPS[:4])
    size = 4 // _size(groups)
    whole = all_reduce(p, _value(p), groups, "add")
    start = _own_start(p, groups, size)
    part = p.build.dynamic_slice(whole, [start, p.build.constant(0, "s32")], (size, 2))
    return p.build.add("concatenate", *[part] * _size(groups), dimensions=(0,))


def own_part_of_all(p: Pool) -> HloInstruction:
    groups = p.choose(*GROUPS[:4])
    whole = all_gather(p, _value(p), groups, 0)
    start = _own_start(p, groups, 4)
    return p.build.dynamic_slice(whole, [start, p.build.constant(0, "s32")], (4, 2))


def constants(p: Pool) -> HloInstruction:
    x = _value(p)
    return p.build.add("add", x, all_reduce(p, p.full(2, x), _groups(p), p.choose("add", "maximum")))


def several_sent(p: Pool) -> HloInstruction:
    pairs = p.choose(((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 0), (1, 1), (2, 2), (3, 3)), ((0, 3), (1, 2)))
    a, b = (p.build.add("collective-permute", _value(p), source_target_pairs=pairs) for _ in range(2))
    return p.build.add("subtract", a, b)


def turned(p: Pool) -> HloInstruction:
    whole = all_reduce(p, _value(p), _groups(p), p.choose("add", "maximum"))
    return p.build.reshape(p.build.transpose(whole, (1, 0)), (4, 2))


def exchanged(p: Pool) -> HloInstruction:
    return p.build.add("all-to-all", _value(p), dimensions=(0,), replica_groups=_groups(p))


def narrow(p: Pool) -> HloInstruction:
    x = p.build.convert(_value(p), "bf16")
    return p.build.convert(all_reduce(p, x, _groups(p), "add"), "f32")


PATTERNS = (
    several_reduced,
    dependent,
    crossed,
    several_gathered,
    gathered_copies,
    several_scattered,
    own_part_of_sum,
    own_part_of_all,
    constants,
    several_sent,
    exchanged,
    narrow,
    turned,
)
