"""What opcodes mean on values that are known when a program is compiled, in NumPy: slow and obvious.

Collectives, random numbers and calls of libraries have theirs in the tests, whose oracle it is, too.
"""

from mpmd.compile.hlo.evaluator.engine import Evaluator

__all__ = ["Evaluator"]
