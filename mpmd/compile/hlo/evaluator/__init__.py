"""The semantics of opcodes on values known at compile time, in NumPy: slow and simple.

Those of collectives, random numbers and library calls are in the tests, for which it is the oracle, too.
"""

from mpmd.compile.hlo.evaluator.engine import Evaluator

__all__ = ["Evaluator"]
