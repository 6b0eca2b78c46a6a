"""Estimated seconds and bytes of the operations of a loss, from their shapes: nothing is compiled or run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mpmd.jax_compat import inner_jaxprs
from mpmd.tracing.stages.items import Item, numbers
from mpmd.tracing.stages.placement import size
from mpmd.tracing.stages.report import equation_flops

_TRANSCENDENTAL = frozenset(
    ("acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp")
    + ("exp2", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "sin", "sinh", "tan", "tanh")
)
_TRANSCENDENTAL_OPERATIONS = 16
"""Multiply-adds of the polynomial of a transcendental function."""

_FUSED_BYTES = 0.25
"""The part of elementwise results that reaches memory: a fused kernel keeps the others in registers."""

_GRADIENT_TRAFFIC = 3
"""Passes over the bytes of a gradient for each microbatch: it is written, and added to the sum so far."""

FORWARD_AND_BACKWARD = 3.0
"""Work of forward and backward in units of the forward: the gradient of a product is two products."""

REMATERIALISED = 4.0
"""Likewise under `jax.checkpoint`, which computes the forward again."""


@dataclasses.dataclass(frozen=True)
class DeviceRates:
    """What one device does in a second.

    Attributes:
        name: of the device.
        matmul: (dtype, floating-point operations of products); the first is for all other dtypes.
        elements: elements of vectors in one operation.
        bandwidth: bytes of memory.
        start_s: overhead of starting a fragment, in seconds.
        link_bandwidth: bytes from a device of one mesh to a device of another.
        link_s: latency of a message, in seconds.
    """

    name: str = "host"
    matmul: tuple[tuple[str, float], ...] = (("float32", 5e10),)
    elements: float = 5e10
    bandwidth: float = 1e10
    start_s: float = 2e-5
    link_bandwidth: float = 2e9
    link_s: float = 5e-5

    def products_s(self, flops: float, dtype: Any) -> float:
        """Seconds of matrix products of a dtype."""
        return flops / dict(self.matmul).get(str(dtype), self.matmul[0][1])


HOST_RATES = DeviceRates()
"""About one core of a CPU."""


def item_seconds(item: Item, rates: DeviceRates) -> float:
    """Seconds of the forward of an item, all iterations of a loop included."""
    return equation_seconds(item.equation, rates)


def equation_seconds(equation: Any, rates: DeviceRates) -> float:
    """Seconds of an equation by the roofline: the slower of arithmetic and memory."""
    name = equation.primitive.name
    results = sum(size(v.aval) for v in equation.outvars)
    if name in ("dot_general", "conv_general_dilated"):
        moved = results + sum(size(v.aval) for v in equation.invars)
        flops = rates.products_s(equation_flops(equation), equation.outvars[0].aval.dtype)
        return max(flops, moved / rates.bandwidth)
    inner = [sum(equation_seconds(e, rates) for e in jaxpr.eqns) for jaxpr in inner_jaxprs(equation)]
    if inner:
        return max(inner) * _iterations(equation)
    elements = sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars)
    if name.startswith(("reduce_", "arg", "cum", "sort")):
        elements = max(math.prod(getattr(v.aval, "shape", ())) for v in equation.invars)
    operations = _TRANSCENDENTAL_OPERATIONS if name in _TRANSCENDENTAL else 1
    return max(elements * operations / rates.elements, results * _FUSED_BYTES / rates.bandwidth)


def products_work(equations: Sequence[Any], rates: DeviceRates) -> tuple[float, float]:
    """(operations, seconds of arithmetic) of the products in equations, loops and calls included."""
    flops = seconds = 0.0
    for equation in equations:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            own = equation_flops(equation)
            flops, seconds = flops + own, seconds + rates.products_s(own, equation.outvars[0].aval.dtype)
        for jaxpr in inner_jaxprs(equation):
            of_inner = products_work(jaxpr.eqns, rates)
            flops, seconds = flops + of_inner[0], seconds + of_inner[1]
    return flops, seconds


def _iterations(equation: Any) -> int:
    return int(equation.params.get("length", 1)) if equation.primitive.name == "scan" else 1


def work_factor(item: Item) -> float:
    """Forward and backward of an item in units of its forward."""
    return REMATERIALISED if item.checkpoints else FORWARD_AND_BACKWARD


def gradient_seconds(nbytes: float, rates: DeviceRates) -> float:
    """Seconds to write the gradient of a parameter of that size and to add it, for each microbatch."""
    return _GRADIENT_TRAFFIC * nbytes / rates.bandwidth


def saved_bytes(item: Item, avals: Any, constant: set[int]) -> int:
    """Bytes of an item's inputs that its backward reads, without parameters, which are there anyway.

    Linear operations save nothing; products save their operands, and other functions an array as large as
    their results.
    """
    name = item.equation.primitive.name
    if name in _LINEAR or item.checkpoints:
        return 0
    if name in ("dot_general", "conv_general_dilated", "mul", "gather"):
        return sum(size(avals[v]) for v in numbers(item.inputs) if v not in constant)
    inner = inner_jaxprs(item.equation)
    if inner:
        own = sum(_saved_in(e) for e in inner[0].eqns)
        return own * _iterations(item.equation)
    return sum(size(avals[v]) for v in item.outputs)


def _saved_in(equation: Any) -> int:
    """Bytes that one run of an equation inside of a loop or a call saves."""
    name = equation.primitive.name
    if name in _LINEAR or name in ("checkpoint", "remat", "remat2"):
        return 0
    inner = inner_jaxprs(equation)
    if inner:
        return sum(_saved_in(e) for e in inner[0].eqns) * _iterations(equation)
    return sum(size(v.aval) for v in equation.outvars)


_LINEAR = frozenset(
    ("add", "add_any", "sub", "neg", "reduce_sum", "reshape", "transpose", "broadcast_in_dim", "slice")
    + ("squeeze", "concatenate", "pad", "convert_element_type", "copy", "iota", "rev", "stop_gradient")
    + ("dynamic_slice", "dynamic_update_slice", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or")
    + ("not", "argmax", "argmin", "sign", "floor", "ceil", "round", "expand_dims", "split")
)
"""Operations whose backward reads none of their values, but for masks, which are small."""
