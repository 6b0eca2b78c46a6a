"""Export: attributes for the runtime, and one function per distinct fragment."""

from mpmd.support.passes import passes_in

PASSES = passes_in(__name__)
