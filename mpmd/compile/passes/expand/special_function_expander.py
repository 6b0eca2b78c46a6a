"""hlo-special-function-expander."""

from __future__ import annotations

import math
from collections.abc import Callable

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.formulas import Number
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule


class SpecialFunctionExpander(ComputationPass):
    """Computes inverse and hyperbolic functions from exponentials, logarithms and angles.

    asinh(x) -> sign(x) * log1p(|x| + |x|^2 / (1 + sqrt(|x|^2 + 1))), of large x log1p(|x|) + log(2)

    Types narrower than f32 are computed in f32.

    Requires: no schedule; complex numbers are pairs.
    Ensures: no such function of real numbers is left.
    Cost: linear.
    Source: the definitions, in forms that neither cancel near zero nor overflow before the result does.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules: dict[str, tuple[Rule, ...]] = {name: (_rule(f),) for name, f in FUNCTIONS.items()}
        return Rewriter(computation).run(rules, lambda i: i.shape.info.kind == "float")


def _rule(function: Callable[[Number], Number]) -> Rule:
    def rule(site: RewriteSite) -> HloInstruction:
        x = Number(site.build, site.operands[0])
        if x.dtype in ("f32", "f64"):
            return function(x).value
        return function(x.to("f32")).to(x.dtype).value

    return rule


def _half_square(x: Number) -> Number:
    """Half of exp(x), which is finite as long as the result is."""
    root = (x * 0.5).of("exponential")
    return (root * 0.5) * root


def sinh(x: Number) -> Number:
    """The hyperbolic sine."""
    size = x.abs()
    grown = size.of("exponential-minus-one")
    near = 0.5 * (grown + grown / (grown + 1.0))
    return size.is_("LT", 20.0).choose(near, _half_square(size)).with_sign_of(x)


def cosh(x: Number) -> Number:
    """The hyperbolic cosine."""
    size = x.abs()
    grown = size.of("exponential")
    return size.is_("LT", 20.0).choose(0.5 * (grown + 1.0 / grown), _half_square(size))


def _is_large(x: Number) -> Number:
    """Whether 1 is negligible beside it; up to there its square is finite."""
    return x.is_("GT", 1e18 if x.dtype == "f64" else 1e9)


def _twice_if_large(x: Number, near: Number, far: Number) -> Number:
    """The logarithm of 1 + near, of large x that of twice 1 + far: one logarithm for both."""
    large = _is_large(x)
    made = large.choose(far, near).of("log-plus-one")
    return large.choose(made + math.log(2), made)


def asinh(x: Number) -> Number:
    """The inverse of the hyperbolic sine."""
    size = x.abs()
    square = size * size
    near = size + square / (1.0 + (square + 1.0).sqrt())
    return _twice_if_large(size, near, size).with_sign_of(x)


def acosh(x: Number) -> Number:
    """The inverse of the hyperbolic cosine; NaN below one."""
    more = x - 1.0
    near = more + (more * (more + 2.0)).sqrt()
    return x.is_("LT", 1.0).choose(x.full(math.nan), _twice_if_large(x, near, more))


def atanh(x: Number) -> Number:
    """The inverse of the hyperbolic tangent; NaN beyond one."""
    size = x.abs()
    return (0.5 * (2.0 * size / (1.0 - size)).of("log-plus-one")).with_sign_of(x)


def asin(x: Number) -> Number:
    """The angle whose sine this is; NaN beyond one."""
    return x.with_("atan2", ((1.0 - x) * (1.0 + x)).sqrt())


def acos(x: Number) -> Number:
    """The angle whose cosine this is; NaN beyond one."""
    return ((1.0 - x) * (1.0 + x)).sqrt().with_("atan2", x)


FUNCTIONS: dict[str, Callable[[Number], Number]] = {
    "acos": acos,
    "acosh": acosh,
    "asin": asin,
    "asinh": asinh,
    "atanh": atanh,
    "cosh": cosh,
    "sinh": sinh,
}
