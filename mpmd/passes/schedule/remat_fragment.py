"""mpmd-remat-fragment."""

from __future__ import annotations

import itertools

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import merge
from mpmd.passes.merge.visit import named
from mpmd.support import diagnostics


class RematFragment(FunctionPass):
    """Computes forward fragments again right before the backward fragments that need their results.

        f = m1["f"] cc=0 (a) {...}                   f = m1["f"] cc=0 (a) {...}
        k = m1["g"] cc=1 (b) {...}            ->     k = m1["g"] cc=1 (b) {...}
        h = m1["f"(1)] cc=0 (f, k) {...}             r = m1["f"] cc=0 remat (a) {...}
                                                     h = m1["f"(1)] cc=0 (r, k) {...}

    Results of a forward fragment for its backward then need not live in between.  With
    `merge-remat-fragments` the clone and the backward fragment become one.

    Requires: scheduling is over, so that clones need not be scheduled.
    Ensures: a backward fragment reads no result of a forward fragment of its microbatch and stage, except for
        the one that is right before it on its mesh, and for those that may not be done twice (a remark).
        Clones are whole: fragment-dce drops unused results.
    Cost: linear in fragments and clones.
    Source: openxla/shardy MPMD, `remat_fragment`.

    Attributes:
        merge_remat_fragments: make the clone and its backward fragment one.
    """

    runs_on = "distributed"
    merge_remat_fragments: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits all backward users of each forward fragment, in program order."""
        program = ir.fragments(f)
        place = {fragment: i for i, fragment in enumerate(program)}
        neighbours = _Neighbours(program)
        for forward in [fragment for fragment in program if fragment.is_forward]:
            users = {u for u in ir.users(forward) if _belong_together(forward, u)}
            far = [u for u in sorted(users, key=place.__getitem__) if neighbours.following[forward] != u]
            if far and not ir.is_duplicable(forward):
                _report_kept(forward)
                continue
            for backward in far:
                self._recompute(forward, backward, neighbours, place)

    def _recompute(
        self,
        forward: ir.Fragment,
        backward: ir.Fragment,
        neighbours: _Neighbours,
        place: dict[ir.Fragment, int],
    ) -> None:
        clone = ir.clone(forward, ir.before(backward))
        clone.is_remat = True
        for old, new in zip(forward.results, clone.results):
            ir.replace_uses_in(old, new, backward)
        if not self.merge_remat_fragments:
            neighbours.insert(clone, backward)
            return
        counter = backward.call_counter
        del place[backward]  # it is not backward work alone any more, and the fragment is erased
        ends = neighbours.remove(backward)
        merged = merge(clone, backward)
        neighbours.put_between(ends, merged)
        merged.call_counter = counter
        merged.is_remat = True


def _report_kept(forward: ir.Fragment) -> None:
    diagnostics.notice(
        f"{named(forward)} is not computed again for its backward pass: it calls back to Python, or draws "
        "numbers without a key, so that a second run would be noticed or have other results; they are kept",
        forward.location,
    )


def _belong_together(forward: ir.Fragment, backward: ir.Op) -> bool:
    """Whether they are the two halves of one microbatch's work on one stage."""
    return (
        isinstance(backward, ir.Fragment)
        and backward.is_backward
        and forward.call_counter is not None
        and forward.call_counter == backward.call_counter
        and forward.stage == backward.stage
    )


Ends = tuple[ir.Fragment | None, ir.Fragment | None]


class _Neighbours:
    """The fragments of each mesh as a chain.

    Attributes:
        following: the next fragment on the same mesh, if there is one.
    """

    def __init__(self, program: list[ir.Fragment]) -> None:
        self.following: dict[ir.Fragment, ir.Fragment | None] = {}
        self.previous: dict[ir.Fragment, ir.Fragment | None] = {}
        by_mesh: dict[str | None, list[ir.Fragment]] = {}
        for fragment in program:
            by_mesh.setdefault(fragment.mesh, []).append(fragment)
        for chain in by_mesh.values():
            for a, b in itertools.pairwise([None, *chain, None]):
                self._link(a, b)

    def insert(self, fragment: ir.Fragment, before: ir.Fragment) -> None:
        self._link(self.previous[before], fragment)
        self._link(fragment, before)

    def remove(self, fragment: ir.Fragment) -> Ends:
        return self.previous.pop(fragment), self.following.pop(fragment)

    def put_between(self, ends: Ends, fragment: ir.Fragment) -> None:
        self._link(ends[0], fragment)
        self._link(fragment, ends[1])

    def _link(self, a: ir.Fragment | None, b: ir.Fragment | None) -> None:
        if a is not None:
            self.following[a] = b
        if b is not None:
            self.previous[b] = a
