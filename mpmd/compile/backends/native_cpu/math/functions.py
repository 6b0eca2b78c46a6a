"""The elementary functions by the names that kernels use."""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.backends.native_cpu.math.exponential import exp, expm1, logistic
from mpmd.compile.backends.native_cpu.math.lanes import call_each_lane
from mpmd.compile.backends.native_cpu.math.logarithm import log, log1p
from mpmd.compile.backends.native_cpu.math.power import cbrt, pow, rsqrt, sqrt
from mpmd.compile.backends.native_cpu.math.rational import erf, tanh
from mpmd.compile.backends.native_cpu.math.trigonometric import cos, sin
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.types import Value


def tan(b: FunctionBuilder, x: Value) -> Value:
    return call_each_lane(b, "tan", x)


def atan2(b: FunctionBuilder, y: Value, x: Value) -> Value:
    return call_each_lane(b, "atan2", y, x)


UNARY: dict[str, Callable[[FunctionBuilder, Value], Value]] = {
    "cbrt": cbrt,
    "cos": cos,
    "erf": erf,
    "exp": exp,
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "logistic": logistic,
    "rsqrt": rsqrt,
    "sin": sin,
    "sqrt": sqrt,
    "tan": tan,
    "tanh": tanh,
}
BINARY: dict[str, Callable[[FunctionBuilder, Value, Value], Value]] = {"atan2": atan2, "pow": pow}
