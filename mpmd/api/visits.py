"""Microbatches in the data flow of a step: their loops, and their way over the meshes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection

from mpmd import ir
from mpmd.passes.calls.mirror_stages import SUFFIX
from mpmd.runtime.program.entry import phase

BACKWARD = ("B", "I", "W")


@dataclasses.dataclass(frozen=True)
class TaskFragment:
    """A fragment that does one microbatch's forward or backward work on a mesh.

    Attributes:
        position: among the ops of the entry function.
        mesh: where it runs.
        stage: its pipeline stage, if the user gave one.
        microbatch: its call counter.
        phase: `F`, or `B`, `I` or `W` for backward work.
    """

    position: int
    mesh: str
    stage: int | None
    microbatch: int
    phase: str

    @property
    def is_backward(self) -> bool:
        """Whether it is backward work, whole or half."""
        return self.phase in BACKWARD


def task_fragments(main: ir.Func) -> list[TaskFragment]:
    """The named fragments of microbatches on meshes that are stages, in program order."""
    meshes = main.topology.schedulable
    return [
        TaskFragment(i, op.mesh, op.stage, op.call_counter, phase(op))
        for i, op in enumerate(ir.ops(main))
        if isinstance(op, ir.Fragment) and op.is_user and op.call_counter is not None and op.mesh in meshes
    ]


def rounds_of(main: ir.Func, fragments: Collection[TaskFragment]) -> list[list[int]]:
    """The microbatches in groups; each needs the backward work of groups before it.

    Microbatches of one loop over a batch are one group.  Those of a second loop that uses the gradients of
    the first, such as an evaluation of new parameters, are another.
    """
    at = {fragment.position: fragment for fragment in fragments}
    found: dict[int, int] = {}
    level: dict[ir.Value, int] = {}  # even if the last work on the way was forward, odd after backward work
    for position, op in enumerate(ir.ops(main)):
        reached = max((level.get(v, 0) for v in op.operands), default=0)
        fragment = at.get(position)
        if fragment is not None:
            reached += reached % 2 != fragment.is_backward
            found[fragment.microbatch] = max(found.get(fragment.microbatch, 0), reached // 2)
        if reached:
            level.update(dict.fromkeys(op.results, reached))
    groups: dict[int, list[int]] = {}
    for microbatch in sorted(found):
        groups.setdefault(found[microbatch], []).append(microbatch)
    return [groups[number] for number in sorted(groups)]


def mirrored_rounds(main: ir.Func, fragments: Collection[TaskFragment]) -> list[list[int | None]]:
    """The microbatches in groups; each has second copies of stages in its second half.

    Each loop over a batch has copies of its own and numbers of its own in a row, and is a group; a loop with
    one microbatch has no copies.  None takes the place of a microbatch of the first half that computes
    nothing, as nothing uses its results: the second half's stay there.
    """
    ops = ir.ops(main)
    copied = {
        fragment.microbatch
        for fragment in fragments
        if any(origin.name.endswith(SUFFIX) for origin in ops[fragment.position].origins)
    }
    groups: list[list[int | None]] = []
    first: list[int] = []
    microbatches = sorted({fragment.microbatch for fragment in fragments})
    for are_copied, run in itertools.groupby(microbatches, copied.__contains__):
        if not are_copied:
            first = list(run)
            continue
        second = list(run)
        own = max(0, len(first) - len(second) - 1)
        groups.extend([microbatch] for microbatch in first[:own])
        lost: list[int | None] = [None] * (len(second) - len(first))
        groups.append([*lost, *first[own:], *second])
        first = []
    groups.extend([microbatch] for microbatch in first)
    return groups


def depths_of(main: ir.Func, fragments: Collection[TaskFragment]) -> dict[TaskFragment, int]:
    """How often a microbatch changes meshes, on its longest way to each of its fragments.

    Args:
        main: the entry function.
        fragments: all forward or all backward fragments of one microbatch.
    """
    at = {fragment.position: fragment for fragment in fragments}
    found: dict[TaskFragment, int] = {}
    reached: dict[ir.Value, dict[str, int]] = {}  # last visited mesh -> depth there
    for position, op in enumerate(ir.ops(main)):
        before: dict[str, int] = {}
        for value in op.operands:
            for mesh, depth in reached.get(value, {}).items():
                before[mesh] = max(before.get(mesh, 0), depth)
        fragment = at.get(position)
        if fragment is not None:
            found[fragment] = max((d + (mesh != fragment.mesh) for mesh, d in before.items()), default=0)
            before = {fragment.mesh: found[fragment]}
        if before:
            reached.update(dict.fromkeys(op.results, before))
    return found
