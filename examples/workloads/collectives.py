"""Collectives in the text of an HLO module, as often as they run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable

import numpy as np

COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\((?P<rest>.*)"
)
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "s64": 8}


@dataclasses.dataclass(frozen=True)
class CountedCollective:
    """One in the text of a program.

    Attributes:
        kind: `all-reduce` and so on.
        size: bytes of its result on a device.
        groups: the devices that exchange, by their positions in the mesh.
    """

    kind: str
    size: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a ring."""
        members = len(self.groups[0])
        share = (members - 1) / members
        return {"all-reduce": 2 * share, "reduce-scatter": members - 1}.get(self.kind, share) * self.size


def collectives(text: str, devices: int) -> list[CountedCollective]:
    """Those that one run of an HLO module executes; branches are taken to run."""
    runs = iterations(text)
    found = []
    for name, body in computations(text).items():
        for match in COLLECTIVE.finditer(body):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match["shape"])
            sizes = [BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in shapes]
            if match["kind"] != "collective-permute":
                one = CountedCollective(match["kind"], sum(sizes), groups_of(match["rest"], devices))
                found += [one] * runs(name)
    return found


def computations(text: str) -> dict[str, str]:
    """The text of each computation of an HLO module, by name."""
    parts = re.split(r"^(?:ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def iterations(text: str) -> Callable[[str], int]:
    """How often a computation of an HLO module runs: the iterations of the loops that it is in.

    Raises:
        ValueError: the number of iterations of a loop around a collective is unknown.
    """
    parents: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for name, body in computations(text).items():
        for line in body.splitlines():
            trips = re.search(r'"?known_trip_count"?:\{"?n"?:"?(\d+)', line)
            count = "1" if " while(" not in line else trips[1] if trips else ""
            called = re.findall(
                r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line
            )
            called += re.findall(r"%?([\w.\-]+)", "".join(re.findall(r"branch_computations=\{(.*?)\}", line)))
            for each in called:
                parents[each].append((name, count))

    @functools.cache
    def runs(name: str) -> int:
        if any(not count for _, count in parents[name]):
            raise ValueError(f"the iterations of the loop around {name} are unknown")
        return sum(int(count) * runs(caller) for caller, count in parents[name]) if parents[name] else 1

    return runs


def groups_of(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The replica groups among the attributes of a collective."""
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota is not None:
        shape, dims, order = ([int(n) for n in g.split(",")] if g else None for g in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        table = (ids if order is None else ids.transpose(order)).reshape(shape)
        return tuple(tuple(int(i) for i in row) for row in table)
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", rest)
    rows = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
    return tuple(tuple(int(i) for i in row.split(",")) for row in rows) or (tuple(range(devices)),)
