"""The common part of passes that change backward fragments: traversal."""

from __future__ import annotations

import abc

from mpmd import ir
from mpmd.passes.bases import FunctionPass


class BackwardPass(FunctionPass):
    """A pass that rewrites one backward fragment after the other, in program order."""

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits each backward fragment of the function."""
        for fragment in ir.fragments(f):
            if fragment.is_backward:
                self.rewrite_fragment(fragment)

    @abc.abstractmethod
    def rewrite_fragment(self, fragment: ir.Fragment) -> None:
        """Rewrites one backward fragment."""
