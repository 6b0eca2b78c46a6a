"""What opcodes mean on values that are known when a program is compiled, in NumPy: slow and obvious.

The tests, whose oracle it is, too, have that of control flow, collectives, random numbers and libraries.
"""

from mpmd.compile.hlo.evaluator.engine import Evaluator, is_evaluable

__all__ = ["Evaluator", "is_evaluable"]
