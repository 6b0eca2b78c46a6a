"""Residuals that a policy of `jax.checkpoint` offloads, moved to host memory between two fragments.

JAX writes the policy as two ops: one places the value in host memory behind its producer, the other one in
device memory before its readers.  Forward and backward are two programs, so that the first op is in one, the
second in the other, and no compiler sees both.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.export.donation import COMPUTE_TYPE, HOST, PLACES, MemoryTrace, placement
from mpmd.passes.structure import mentions

ADVISORY = "mpmd.advisory"
"""Marks a placement that the platform itself does not follow: JAX lowers none there."""


class OffloadResiduals(FunctionPass):
    """Moves what a forward fragment places in host memory there, and back before each fragment that reads it.

        y, r = m1["f"] (w, x) {...; h = annotate_device_placement t pinned_host; ret y, h}
        ...
        g = m1["f"(1)] (r, d) { t = annotate_device_placement r device; ...}
        -->
        y, r = m1["f"] (w, x) {...; ret y, t}
        h = transfer r to m1 in pinned_host
        ...
        b = transfer h to m1
        g = m1["f"(1)] (b, d) {...}

    The copy back begins a task before its reader (`linearize`).  So a value whose first reader is one of the
    next two fragments of its mesh stays in device memory: nothing would run while it is on the host.  What a
    loop collects piece by piece is moved whole, after the fragment.  A pair of placements within one fragment
    is left to the compiler, unless it is advisory.

    Requires: the order of fragments is final, shardings are part of types; no computation on the host, of
        which the placements may be the operands: such a program is left alone.
    Ensures: same values; a fragment returns no value to other fragments of its mesh in host memory.
    Cost: linear in the ops.
    Source: ours; between programs what XLA's host offloader does within one.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Finds all values before it changes a body: bodies may be shared by fragments."""
        module = ir.module_of(f)
        if not mentions(module, PLACES) or mentions(module, COMPUTE_TYPE):
            return
        symbols = ir.symbol_table(module)
        trace, place = MemoryTrace(symbols), _places(f)
        placed: dict[ir.Op, None] = {}
        readers: dict[ir.Op, None] = {}
        for fragment in ir.fragments(f):
            for returned, result in zip(fragment.returned, fragment.results):
                op, users = trace.decider(returned), ir.users(result)
                if op is None or placement(op) != HOST or not _all_read_it(users, fragment.mesh):
                    continue
                placed[op] = None
                readers.update(dict.fromkeys(users))
                if min(place[user] for user in users) > place[fragment] + 2:
                    _move(result, fragment, dict.fromkeys(users))
        _forget(placed)
        for reader in readers:
            ops = _placements(reader, symbols)
            if all(placement(op) != HOST for op in ops):
                _forget(ops)
        _forget(op for op in ir.walk(module, ir.stablehlo.CustomCallOp) if ADVISORY in op.attributes)


def _places(f: ir.Func) -> Mapping[ir.Op, int]:
    """For each fragment its position among the fragments of its mesh."""
    count: collections.Counter[str] = collections.Counter()
    place: dict[ir.Op, int] = {}
    for fragment in ir.fragments(f):
        place[fragment] = count[fragment.mesh]
        count[fragment.mesh] += 1
    return place


def _all_read_it(users: list[ir.Op], mesh: str) -> bool:
    return bool(users) and all(isinstance(user, ir.Fragment) and user.mesh == mesh for user in users)


def _move(result: ir.Value, maker: ir.Fragment, readers: Iterable[ir.Op]) -> None:
    kind = result.type
    on_host = ir.MeshTensor.get(kind.mesh, kind.tensor, kind.sharding, HOST)
    held = ir.make_transfer(result, on_host, ir.after(maker)).result
    for reader in readers:
        back = ir.make_transfer(held, kind, ir.before(reader)).result
        ir.replace_uses_in(result, back, reader)


def _placements(fragment: ir.Op, symbols: Mapping[str, ir.Func]) -> list[ir.Op]:
    """The ops that place a value, in a fragment and in the functions that it calls."""
    todo, seen, found = [fragment], set[str](), list[ir.Op]()
    while todo:
        where = todo.pop()
        found += [op for op in ir.walk(where, ir.stablehlo.CustomCallOp) if placement(op) is not None]
        names = {call.callee.value for call in ir.walk(where, ir.FuncCall)} - seen
        seen |= names
        todo += [symbols[name] for name in sorted(names)]
    return found


def _forget(placements: Iterable[ir.Op]) -> None:
    for op in placements:
        ir.replace(op, [op.operands[0]])
