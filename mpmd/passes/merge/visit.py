"""The common part of passes that merge a producer with a consumer: traversal, position, attributes."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import block_users, in_block_order, merge


class MergePass(FunctionPass):
    """Merges producers with consumers, last producer first.

    Each fragment is merged with its candidate, and the merged fragment with its own, as long as a pass
    allows it.  Of a program in which values are defined before they are used, the result is one as well:
    only positions are compared, never data-flow paths.  Pure fragments without uses are erased.

    Cost: linear in fragments and their uses.  Source: openxla/shardy MPMD, `MergeFragmentBasePass`.
    """

    runs_on = "distributed"

    @abc.abstractmethod
    def allows(self, producer: ir.Fragment, consumer: ir.Fragment) -> bool:
        """Whether the two may become one."""

    def candidate(self, producer: ir.Fragment, following: Iterator[ir.Fragment]) -> ir.Fragment | None:
        """The fragment to merge `producer` with; `following` are those after it on its mesh, nearest first.

        By default: its first fragment user, if the pass allows the two.
        """
        first = next(iter(fragment_users(producer)), None)
        return first if first is not None and self.allows(producer, first) else None

    def part_for(self, producer: ir.Fragment, consumer: ir.Fragment) -> ir.Fragment:
        """The fragment to merge with the consumer: the producer, unless a pass prefers a clone of it."""
        return producer

    def rewrite_function(self, f: ir.Func) -> None:
        behind: dict[str, dict[ir.Fragment, None]] = {}  # per mesh, nearest last
        for fragment in reversed(ir.fragments(f)):
            followers = behind.setdefault(fragment.mesh, {})
            if ir.is_trivially_dead(fragment):
                ir.erase(fragment)
                continue
            left = self._merge_repeatedly(fragment, followers)
            if left is not None:
                followers[left] = None

    def _merge_repeatedly(
        self, producer: ir.Fragment, followers: dict[ir.Fragment, None]
    ) -> ir.Fragment | None:
        """The fragment that contains `producer` now; None if nothing is left of it."""
        while True:
            behind = (other for other in reversed(followers) if ir.comes_before(producer, other))
            consumer = self.candidate(producer, behind)  # a merge may have moved the producer after others
            if consumer is None:
                return producer
            part = self.part_for(producer, consumer)
            if not bring_together(part, consumer):
                return producer
            followers.pop(consumer, None)
            if part == producer:
                producer = merged(producer, consumer)
                continue
            followers[merged(part, consumer)] = None
            if ir.is_unused(producer):
                ir.erase(producer)
                return None


def fragment_users(fragment: ir.Fragment) -> list[ir.Fragment]:
    """The fragments that use a result of `fragment`, in program order, each once."""
    users = dict.fromkeys(user for user in ir.users(fragment) if isinstance(user, ir.Fragment))
    return in_block_order(users)


def bring_together(producer: ir.Fragment, consumer: ir.Fragment) -> bool:
    """Whether the two can be merged at `consumer`, which may be moved right after `producer`.

    It stays if no user of the producer comes before it.  Else it moves, if all its operands are defined.
    """
    if not any(ir.comes_before(user, consumer) for user in block_users(producer)):
        return True
    makers = (ir.producer(v) for v in consumer.inputs)
    if all(m is None or m == producer or ir.comes_before(m, producer) for m in makers):
        ir.move_after(consumer, producer)
        return True
    return False


def merged(producer: ir.Fragment, consumer: ir.Fragment) -> ir.Fragment:
    """One fragment for two, with the call counter and the origins that both agree on."""
    counter = merged_call_counter(producer, consumer)
    inferred = not producer.is_user and not consumer.is_user
    makers = [*producer.inferred_by, *consumer.inferred_by] if inferred else []
    result = merge(producer, consumer)
    result.call_counter = counter
    result.inferred_by = list(dict.fromkeys(makers))
    return result


def merged_call_counter(a: ir.Fragment, b: ir.Fragment) -> int | None:
    """The only one defined, or the common one, or that of the one user fragment; else none."""
    if a.call_counter == b.call_counter or None in (a.call_counter, b.call_counter):
        return b.call_counter if a.call_counter is None else a.call_counter
    if a.is_user != b.is_user:
        return a.call_counter if a.is_user else b.call_counter
    return None


def named(fragment: ir.Fragment) -> str:
    origins = ", ".join(map(str, fragment.origins)) or "unnamed work"
    parts = [f'{origins} on mesh "{fragment.mesh}"']
    if fragment.stage is not None:
        parts.append(f"stage {fragment.stage}")
    if fragment.call_counter is not None:
        parts.append(f"microbatch {fragment.call_counter}")
    return ", ".join(parts)
