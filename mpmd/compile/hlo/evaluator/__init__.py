"""The semantics of opcodes on values known at compile time, in NumPy: slow and simple.

Only of those that are still in programs when constants are folded, and that constants come from: elementwise
operations, conversions, movement.  The tests have the others, for their oracle.
"""

from mpmd.compile.hlo.evaluator.engine import Evaluator, is_evaluable

__all__ = ["Evaluator", "is_evaluable"]
