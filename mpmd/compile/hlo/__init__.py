"""HLO: our own IR, with XLA's text.

module = parse_module(text)        # or mpmd.compile.lowering.lower(stablehlo)
verify(module)
print_module(module)               # XLA parses it
"""

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.parser import parse_module
from mpmd.compile.hlo.printer import fingerprint, print_module
from mpmd.compile.hlo.shape import TOKEN, Shape, array, tuple_of
from mpmd.compile.hlo.verifier import verify

__all__ = [
    "TOKEN",
    "HloBuilder",
    "HloComputation",
    "HloInstruction",
    "HloModule",
    "Layout",
    "Shape",
    "array",
    "fingerprint",
    "parse_module",
    "print_module",
    "tuple_of",
    "verify",
]
