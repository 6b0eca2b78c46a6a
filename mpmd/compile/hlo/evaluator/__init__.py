"""The semantics of opcodes on values known at compile time, in NumPy: slow and simple.

Those of control flow, collectives, random numbers and libraries are in the tests, which also use it as
the oracle.
"""

from mpmd.compile.hlo.evaluator.engine import Evaluator, is_evaluable

__all__ = ["Evaluator", "is_evaluable"]
