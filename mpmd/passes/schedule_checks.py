"""Passes that check a schedule and its stages."""

from __future__ import annotations

import collections

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.support import diagnostics
from mpmd.support.passes import passes_in
from mpmd.support.user_code import frames_of


class SchedulingUnitsVerifier(FunctionPass):
    """Warns of meshes that do not have one forward and one backward unit per microbatch.

        m1: f0 f1 b0 b1;  m2: f0 f1 b0 b1       ->  fine
        m1: f0 f1 b0 b1;  m2: f0 f1 b0 b0' b1   ->  warning: mesh m2 has 3 backward units, not 2

    Changes nothing: a program whose units could not be merged runs, but its schedule is not the requested
    one.  Programs without microbatches are left alone, with a remark.  It does not support split backward
    fragments, nor several stages per mesh.

    Requires: scheduling units are merged, not split.  Ensures: nothing.  Cost: linear.
    Source: openxla/shardy MPMD, `scheduling_units_verifier`.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        fragments = ir.fragments(f)
        counters = {op.call_counter for op in fragments if op.call_counter is not None}
        expected = max(counters, default=0) + (0 in counters)
        if not expected:
            diagnostics.notice(f"@{f.symbol} has no microbatches: nothing to count", f.location)
            return
        count = collections.Counter((op.mesh, op.is_forward) for op in fragments if op.is_scheduling_unit)
        for mesh in f.topology.schedulable:
            for phase, is_forward in (("forward", True), ("backward", False)):
                got = count[mesh, is_forward]
                if got != expected:
                    diagnostics.warning(
                        f"Number of {phase} scheduling units in mesh {mesh} does not match expected "
                        f"number for {expected} microbatches. Got {got}. {_advice(got, expected)}",
                        f.location,
                    )


def _advice(got: int, expected: int) -> str:
    if got > expected:
        return "Named computations of one mesh are kept apart by work on another one between them."
    return "Name some of the work of every microbatch on this mesh."


_SPLIT = {(True, False): "kKeepTransferred", (False, True): "kDropTransferred"}
_Key = tuple[str, int, int | None, str, bool]


class VerifyStageMerging(FunctionPass):
    """Rejects programs in which a stage is more than one fragment per microbatch and phase.

        m1["f"] stage=0 cc=0 (a); m1["f"] stage=0 cc=1 (b)   ->  fine
        m1["f"] stage=0 cc=0 (a); m1["g"] stage=0 cc=0 (b)   ->  error: two forward fragments of stage 0

    Changes nothing.  Two fragments with a stage are in conflict if they have the same mesh, stage,
    transpose count, kind of split and remat mark, and the same call counter or one has none.

    Requires: scheduling units are merged.  Ensures: one fragment for each of these.  Cost: linear.
    Source: openxla/shardy MPMD, `verify_stage_merging`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        seen: dict[_Key, dict[int | None, ir.Fragment]] = {}
        for fragment in ir.fragments(f):
            if fragment.stage is None:
                continue
            if _has_mixed_counts(fragment):
                continue
            count, half = _count(fragment), _split(fragment)
            same = seen.setdefault((fragment.mesh, fragment.stage, count, half, fragment.is_remat), {})
            earlier = _match(fragment.call_counter, same)
            if earlier is None:
                same[fragment.call_counter] = fragment
            else:
                diagnostics.error(_conflict(f, earlier, fragment), fragment.location)


def _count(fragment: ir.Fragment) -> int | None:
    if fragment.transpose_count is None and fragment.is_remat:
        return max(o.transpose_count for o in fragment.origins)
    return fragment.transpose_count


def _split(fragment: ir.Fragment) -> str:
    marks = (fragment.split_keep_transferred, fragment.split_drop_transferred)
    return _SPLIT.get(marks, "nullopt")


def _match(counter: int | None, same: dict[int | None, ir.Fragment]) -> ir.Fragment | None:
    """The first fragment with that call counter; none given matches any."""
    if counter is None:
        return next(iter(same.values()), None)
    return same.get(counter, same.get(None))


def _has_mixed_counts(fragment: ir.Fragment) -> bool:
    """Reports a staged fragment that is neither forward nor backward work."""
    if fragment.is_remat or fragment.transpose_count is not None:
        return False
    origins = ", ".join(map(str, fragment.origins))
    diagnostics.error(
        f"the fragment of stage {fragment.stage} on mesh {fragment.mesh} has origins that were transposed a "
        f"different number of times: {origins}. A stage is forward or backward work: the target of the merge "
        "rule that joined them must have no stage",
        fragment.location,
    )
    return True


def _conflict(f: ir.Func, earlier: ir.Fragment, fragment: ir.Fragment) -> str:
    counter = -1 if fragment.call_counter is None else fragment.call_counter
    origins = ", ".join(str(a) for a in fragment.origin)
    text = (
        "A valid program cannot have more than one fragment with the same mesh, stage, transpose, call "
        "counts, split type, and remat flag but found multiple fragments with the same attributes: "
        f"[mesh={fragment.mesh}, stage_id={fragment.stage}, transpose_count={_count(fragment)}, "
        f"call_count={counter}, split_type={_split(fragment)}, is_remat={int(fragment.is_remat)}] "
        f"for current fragment with origin: [{origins}]"
    )
    other = ", ".join(map(str, earlier.origins))
    frames = frames_of(earlier)
    text += f"\n  the earlier one has the origins {other}" + (f" and is at {frames[0]}" if frames else "")
    path = [op for op in Dependencies(f).path(earlier, fragment) if isinstance(op, ir.Transfer)]
    if path:
        meshes = " -> ".join([path[0].tensor.type.mesh, *(op.result.type.mesh for op in path)])
        text += (
            f"\n  data goes from one to the other through {meshes}: assign what runs in between to mesh "
            f"{fragment.mesh}, or give the two different stages"
        )
    return text


PASSES = passes_in(__name__)
