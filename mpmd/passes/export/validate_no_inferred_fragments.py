"""mpmd-validate-no-inferred-fragments."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics

# Passes whose fragments cannot always be merged: users learn of these, but may keep them.
EXPECTED_MAKERS = frozenset(
    [
        "uniquify",
        "infer_mesh_wrap_meshless_ops",
        "extract_reshards",
        "infer_mesh_wrap_resultless_ops",
        "infer_mesh_convert_reduce_ops",
        "introduce_transfers",
    ]
)


class ValidateNoInferredFragments(FunctionPass):
    """Reports unnamed work that stays a program of its own; each costs a launch per call.

        m1["f"] (a) {...}               ->  fine
        m1[] by=uniquify (a) {...}      ->  warning: some passes cannot avoid it
        m1[] by=split (a) {...}         ->  error, or a warning without `fail-on-inferred-fragments`
        m1[] (a) {...}                  ->  error: its pass did not record its name

    Requires: merging is over.  Ensures: changes nothing.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_no_inferred_fragments`.

    Attributes:
        fail_on_inferred_fragments: report errors, not warnings.
    """

    runs_on = "distributed"
    fail_on_inferred_fragments: bool = True

    def rewrite_function(self, f: ir.Func) -> None:
        """Checks each inferred fragment."""
        for fragment in ir.fragments(f):
            if fragment.is_user:
                continue
            makers = fragment.inferred_by
            if not makers:
                diagnostics.error(
                    "Internal error: inferred fragment missing 'mpmd.inferred_by' attribute. It is on mesh "
                    f'"{fragment.mesh}" and does not say which pass made it. Please report this.',
                    fragment.location,
                )
                continue
            severe = self.fail_on_inferred_fragments and EXPECTED_MAKERS.isdisjoint(makers)
            report = diagnostics.error if severe else diagnostics.warning
            report(
                f"Inferred fragment has not been merged (inferred by {', '.join(makers)}). It stays a "
                f'program of its own on mesh "{fragment.mesh}"; name the computation, or assign what it '
                "reads and writes to the mesh that uses it.",
                fragment.location,
            )
