"""Programs of several devices: changes of shardings, and collectives that passes join, move or replace.

Elements are small whole numbers, so that sums over devices are exact in every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpmd.compile.hlo.attributes import ReplicaGroups
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import array
from mpmd.compile.lowering.spmd.moves import parts, place, resharded
from mpmd.compile.lowering.stablehlo_program import Axis, Sharding
from tests.support.random_hlo.draft import Case, Draft, small_integers

DTYPES = ("f32", "f32", "bf16", "s32", "u8", "f64")
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17)
_GROUPINGS = (
    ((0, 1, 2, 3),),
    ((3, 1, 0, 2),),
    ((0, 1), (2, 3)),
    ((2, 0), (1, 3)),
    ((0,), (1,), (2,), (3,)),
)
DEVICES = 4


# -- changes of shardings
@dataclass(frozen=True)
class Resharding:
    """A value that changes its sharding on devices.

    Attributes:
        module: the program of a device.
        given: the part that each device has.
        wanted: the part that each is to get.
    """

    module: HloModule
    given: list[np.ndarray]
    wanted: list[np.ndarray]


def resharding(seed: int) -> Resharding:
    """A mesh of two to 64 devices, and two ways in which its axes shard an array."""
    rng = np.random.default_rng([seed, 71])
    sizes = [int(n) for n in rng.choice((2, 2, 3, 4), int(rng.integers(1, 4)))]
    axes = [Axis(math.prod(sizes[k + 1 :]), size) for k, size in enumerate(sizes)]
    rank = int(rng.integers(1, 4))
    source, target = _sharding(rng, axes, rank), _sharding(rng, axes, rank)
    dims = [math.lcm(parts(a), parts(b)) * int(rng.integers(1, 4)) for a, b in zip(source, target)]
    whole = np.arange(math.prod(dims), dtype=np.float32).reshape(dims)
    devices = math.prod(sizes)
    module = HloModule("resharding")
    module.num_partitions = devices
    build = HloBuilder.create(module, "main")
    local = [n // parts(a) for n, a in zip(dims, source)]
    value = build.parameter(array("f32", local))
    module.set_entry(build.build(resharded(build, value, source, target, devices)))
    return Resharding(module, *([_part(whole, s, d) for d in range(devices)] for s in (source, target)))


def _sharding(rng: np.random.Generator, axes: Sequence[Axis], rank: int) -> Sharding:
    dims: list[list[Axis]] = [[] for _ in range(rank + 1)]  # what is in the last one shards nothing
    for number in rng.permutation(len(axes)):
        dims[int(rng.integers(rank + 1))].append(axes[number])
    return tuple(map(tuple, dims[:rank]))


def _part(whole: np.ndarray, sharding: Sharding, device: int) -> np.ndarray:
    index = []
    for size, axes in zip(whole.shape, sharding):
        length = size // parts(axes)
        begin = place(axes, device) * length
        index.append(slice(begin, begin + length))
    return whole[tuple(index)]


# -- collectives
class DeviceDraft:
    """A draft of a program of four devices, which are replicas or partitions.

    Attributes:
        draft: the case under construction.
        build: its builder.
        groups: the devices that communicate in most of its collectives.
        dims: sizes of its arrays.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft, self.build, self.rng = draft, draft.builder, draft.rng
        self.by_channel = bool(self.rng.random() < 0.5)
        draft.module.replica_count, draft.module.num_partitions = (1, DEVICES) if self.by_channel else (4, 1)
        self.dtype = draft.pick(DTYPES)
        self.groups = draft.pick(_GROUPINGS)
        rank = int(self.rng.integers(1, 4))
        self.dims = tuple(draft.pick(SIZES if k else SIZES[:5]) for k in range(rank))
        self.channels = 0
        self.values: list[HloInstruction] = []

    @property
    def count(self) -> int:
        """Devices of a group."""
        return len(self.groups[0])

    def value(self, dims: Sequence[int] = (), dtype: str = "") -> HloInstruction:
        """A parameter, of the usual dims if none are given."""
        dtype = dtype or self.dtype
        numbers = small_integers(self.rng, dtype, tuple(dims) or self.dims)
        return self.draft.parameter(numbers, dtype)

    def dim(self) -> int:
        """One of the dims."""
        return int(self.rng.integers(len(self.dims)))

    def attributes(self) -> dict[str, object]:
        """Groups, mostly the usual ones, and where devices are partitions a channel."""
        groups = self.groups if self.rng.random() < 0.85 else self.draft.pick(_GROUPINGS)
        if len(groups[0]) != self.count:
            groups = self.groups
        found: dict[str, object] = {"replica_groups": ReplicaGroups(groups)}
        if self.by_channel:
            self.channels += 1
            found |= {"channel_id": self.channels, "use_global_device_ids": True}
        return found

    def reduced(self, value: HloInstruction, opcode: str) -> HloInstruction:
        """An all-reduce."""
        called = scalar_computation(self.draft.module, opcode, value.shape.dtype)
        return self.build.add("all-reduce", value, called=(called,), **self.attributes())

    def own_start(self, size: int) -> HloInstruction:
        """Where the part of this device begins, as an s32."""
        starts = np.zeros(DEVICES, np.int32)
        for group in self.groups:
            for number, device in enumerate(group):
                starts[device] = number * size
        table = self.build.constant(starts)
        device = self.build.add("partition-id" if self.by_channel else "replica-id")
        found = self.build.dynamic_slice(table, [self.build.convert(device, "s32")], (1,))
        return self.build.reshape(found, ())

    def finish(self, values: Sequence[HloInstruction]) -> tuple[Case, list[list[np.ndarray]]]:
        """The case, and the arguments of each device."""
        self.draft.exact = True
        case = self.draft.finish(self.build.tuple(list(values)))
        rows = [
            [small_integers(self.rng, p.shape.dtype, p.shape.dims) for p in case.module.entry.parameters]
            for _ in range(DEVICES)
        ]
        return case, rows


def _operands(d: DeviceDraft, grown: int = -1) -> list[HloInstruction]:
    """Arrays of which one may be of another type or made of another; their sizes along a dim may differ."""
    found = []
    for _ in range(int(d.rng.integers(2, 5))):
        dims = [int(d.rng.integers(1, 4)) * n if k == grown else n for k, n in enumerate(d.dims)]
        found.append(d.value(dims, d.draft.pick(DTYPES) if d.rng.random() < 0.2 else ""))
    return found


def _gathers(d: DeviceDraft) -> list[HloInstruction]:
    dim, made = d.dim(), []
    for value in _operands(d):
        along = dim if d.rng.random() < 0.85 else d.dim()
        shape = value.shape.with_dims(
            [n * (d.count if k == along else 1) for k, n in enumerate(value.shape.dims)]
        )
        made.append(d.build.add("all-gather", value, shape=shape, dimensions=(along,), **d.attributes()))
    return [d.build.add("negate", m) if d.rng.random() < 0.5 else m for m in made]


def _sums(d: DeviceDraft) -> list[HloInstruction]:
    opcode, made = d.draft.pick(("add", "maximum", "minimum")), []
    for value in _operands(d):
        own = opcode if d.rng.random() < 0.85 else d.draft.pick(("add", "maximum"))
        again = bool(made) and made[-1].shape is value.shape and d.rng.random() < 0.2
        made.append(d.reduced(made[-1] if again else value, own))
    return made


def _scattered(d: DeviceDraft) -> list[HloInstruction]:
    dim = d.dim()
    d.dims = tuple(n * d.count if k == dim else n for k, n in enumerate(d.dims))
    made = []
    for value in _operands(d):
        shape = value.shape.with_dims([n // d.count if k == dim else n for k, n in enumerate(d.dims)])
        called = scalar_computation(d.draft.module, "add", value.shape.dtype)
        made.append(
            d.build.add(
                "reduce-scatter", value, shape=shape, dimensions=(dim,), called=(called,), **d.attributes()
            )
        )
    return made


def _joined_sums(d: DeviceDraft) -> list[HloInstruction]:
    opcode = d.draft.pick(("add", "maximum", "minimum"))
    a, b = (d.reduced(d.value(), opcode) for _ in range(2))
    made = [d.build.add(opcode, a, b)]
    return [*made, a] if d.rng.random() < 0.15 else made


def _own_parts(d: DeviceDraft) -> list[HloInstruction]:
    dim = d.dim()
    sizes = d.dims
    d.dims = tuple(n * d.count if k == dim else n for k, n in enumerate(d.dims))
    whole = d.reduced(d.value(), d.draft.pick(("add", "maximum")))
    start = d.own_start(sizes[dim] if d.rng.random() < 0.85 else sizes[dim] + 1)
    starts = [start if k == dim else d.build.constant(0, "s32") for k in range(len(sizes))]
    return [d.build.dynamic_slice(whole, starts, sizes)]


def _moved_sums(d: DeviceDraft) -> list[HloInstruction]:
    whole = d.reduced(d.value(), d.draft.pick(("add", "maximum")))
    order = tuple(int(k) for k in d.rng.permutation(len(d.dims)))
    moved = d.build.transpose(whole, order) if d.rng.random() < 0.5 else whole
    return [d.build.reshape(moved, (math.prod(d.dims), 1))]


PASSES: dict[str, Callable[[DeviceDraft], list[HloInstruction]]] = {
    "hlo-all-gather-combiner": _gathers,
    "hlo-all-reduce-combiner": _sums,
    "hlo-all-reduce-mover": _moved_sums,
    "hlo-all-reduce-reassociate": _joined_sums,
    "hlo-reduce-scatter-combiner": _scattered,
    "hlo-reduce-scatter-creator": _own_parts,
}


def collective_program(name: str, seed: int) -> tuple[Case, list[list[np.ndarray]]]:
    """A program for a pass, and the arguments of each of four devices."""
    draft = Draft(np.random.default_rng([seed, 72, list(PASSES).index(name)]), f"{name}#{seed}", seed)
    device = DeviceDraft(draft)
    return device.finish(PASSES[name](device))
