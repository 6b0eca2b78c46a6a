"""Functions of complex numbers by functions of their real and imaginary parts.

Numbers of 64 bits are computed in f64 where squares could overflow or cancel: that is exact enough and
cheaper than scaling.  Numbers of 128 bits are scaled.
"""

from __future__ import annotations

from collections.abc import Callable

from mpmd.compile.passes.expand.functions import Number

Pair = tuple[Number, Number]


def _wide(*numbers: Number) -> list[Number]:
    return [n.to("f64") for n in numbers]


def _narrow(dtype: str, *numbers: Number) -> Pair:
    a, b = (n.to(dtype) for n in numbers)
    return a, b


def add(x: Pair, y: Pair) -> Pair:
    return x[0] + y[0], x[1] + y[1]


def subtract(x: Pair, y: Pair) -> Pair:
    return x[0] - y[0], x[1] - y[1]


def multiply(x: Pair, y: Pair) -> Pair:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def divide(x: Pair, y: Pair) -> Pair:
    """The quotient; the divisor is scaled so that its larger part is 1.

    Each part is divided by zero, or by infinity, if that is what both parts of the divisor are.
    """
    a, b, c, d = (*x, *y)
    dtype = a.dtype
    if dtype == "f32":
        a, b, c, d = _wide(a, b, c, d)
    large = c.abs().is_("GE", d.abs())  # Smith's method
    most, least = large.choose(c, d), large.choose(d, c)
    ratio = least / most
    lost = ratio.is_("NE", ratio) & most.is_("EQ", most) & least.is_("EQ", least)
    scale = lost.choose(most.abs(), most + least * ratio)
    top = lost.choose(a, large.choose(a + b * ratio, a * ratio + b))
    side = lost.choose(b, large.choose(b - a * ratio, b * ratio - a))
    return _narrow(dtype, top / scale, side / scale)


def negate(x: Pair) -> Pair:
    return -x[0], -x[1]


def _is_infinite(x: Pair) -> Number:
    return x[0].abs().is_("EQ", float("inf")) | x[1].abs().is_("EQ", float("inf"))


def _distance(x: Pair) -> Number:
    """The distance from zero, of finite numbers; in f64 for those of 64 bits."""
    if x[0].dtype == "f32":
        wide, high = _wide(*x)
        return (wide * wide + high * high).sqrt()
    a, b = x[0].abs(), x[1].abs()
    most, least = a.with_("maximum", b), a.with_("minimum", b)
    ratio = least / most.is_("EQ", 0.0).choose(most.full(1.0), most)
    return most * (1.0 + ratio * ratio).sqrt()


def magnitude(x: Pair) -> Number:
    """The distance from zero; infinite if a part is, even beside NaN."""
    return _is_infinite(x).choose(x[0].full(float("inf")), _distance(x).to(x[0].dtype))


def sign(x: Pair) -> Pair:
    """The number of magnitude 1 in the same direction; zero stays zero."""
    size = magnitude(x)
    nothing = size.is_("EQ", 0.0)
    safe = nothing.choose(size.full(1.0), size)
    return nothing.choose(x[0], x[0] / safe), nothing.choose(x[1], x[1] / safe)


def exponential(x: Pair) -> Pair:
    root, angle = (x[0] * 0.5).of("exponential"), x[1]  # its square may be infinite where a part is not
    real = angle.is_("EQ", 0.0)
    return root * angle.of("cosine") * root, real.choose(angle, root * angle.of("sine") * root)


def exponential_minus_one(x: Pair) -> Pair:
    half = (x[1] * 0.5).of("sine")
    grown, cosine = x[0].of("exponential-minus-one"), x[1].of("cosine")
    real = x[1].is_("EQ", 0.0)
    side = real.choose(x[1], (grown + 1.0) * x[1].of("sine"))
    return real.choose(grown, grown * cosine - 2.0 * half * half), side


def logarithm(x: Pair) -> Pair:
    """The logarithm: of the distance from zero, and the angle."""
    angle = x[1].with_("atan2", x[0])
    if x[0].dtype == "f32":
        a, b = _wide(*x)
        size = (0.5 * (a * a + b * b).of("log")).to("f32")
        return _is_infinite(x).choose(size.full(float("inf")), size), angle
    size = magnitude(x)
    a, b = x[0].abs(), x[1].abs()
    most, least = a.with_("maximum", b), a.with_("minimum", b)
    near = 0.5 * ((most - 1.0) * (most + 1.0) + least * least).of("log-plus-one")
    close = (size - 1.0).abs().is_("LT", 0.5)
    return close.choose(near, size.of("log")), angle


def logarithm_plus_one(x: Pair) -> Pair:
    a, b = x
    angle = b.with_("atan2", a + 1.0)
    dtype = a.dtype
    if dtype == "f32":
        a, b = _wide(a, b)
    near = (0.5 * (a * (a + 2.0) + b * b).of("log-plus-one")).to(dtype)
    size, _ = logarithm((x[0] + 1.0, x[1]))
    close = x[0].abs().with_("maximum", x[1].abs()).is_("LT", 0.5)
    return close.choose(near, size), angle


def square_root(x: Pair) -> Pair:
    """The root with a real part that is not negative."""
    dtype, total = x[0].dtype, _distance(x)
    a, b = _wide(*x) if dtype == "f32" else x
    larger = ((a.abs() * 0.5) + total * 0.5).sqrt()
    nothing = larger.is_("EQ", 0.0)
    other = nothing.choose(b.abs(), b.abs() * 0.5 / nothing.choose(larger.full(1.0), larger))
    right = a.is_("GE", 0.0)
    first, second = right.choose(larger, other), right.choose(other, larger).with_sign_of(b)
    endless = x[1].abs().is_("EQ", float("inf"))
    return endless.choose(x[0].full(float("inf")), first.to(dtype)), endless.choose(x[1], second.to(dtype))


def inverse_root(x: Pair) -> Pair:
    root = square_root(x)
    return divide((root[0].full(1.0), root[0].full(0.0)), root)


def sine(x: Pair) -> Pair:
    a, b = x
    return a.of("sine") * b.of("cosh"), a.of("cosine") * b.of("sinh")


def cosine(x: Pair) -> Pair:
    a, b = x
    return a.of("cosine") * b.of("cosh"), -(a.of("sine") * b.of("sinh"))


def hyperbolic_tangent(x: Pair) -> Pair:
    a, b = x
    less = (a.abs() * -2.0).of("exponential-minus-one")
    decay, cosine_ = (a.abs() * -2.0).of("exponential"), b.of("cosine")
    bottom = less * less + 4.0 * decay * cosine_ * cosine_
    top = (a.abs() * -4.0).of("exponential-minus-one")
    second = 4.0 * decay * b.of("sine") * cosine_ / bottom
    endless = a.abs().is_("EQ", float("inf"))
    first = endless.choose(a.full(1.0), (-top) / bottom).with_sign_of(a)
    return first, endless.choose(b.full(0.0), b.is_("EQ", 0.0).choose(b, second))


def tangent(x: Pair) -> Pair:
    real, imaginary = hyperbolic_tangent((-x[1], x[0]))
    return imaginary, -real


def logistic(x: Pair) -> Pair:
    """1 / (1 + exp(-x)), of negative numbers exp(x) / (1 + exp(x)): the exponential is at most 1."""
    less = x[0].is_("LT", 0.0)
    a, b = exponential((less.choose(x[0], -x[0]), less.choose(x[1], -x[1])))
    top = less.choose(a, a.full(1.0)), less.choose(b, b.full(0.0))
    return divide(top, (a + 1.0, b))


def power(x: Pair, y: Pair) -> Pair:
    """X to the power y; zero stays zero for positive y, and everything to the power zero is one."""
    real, imaginary = exponential(multiply(y, logarithm(x)))
    zero = x[0].is_("EQ", 0.0) & x[1].is_("EQ", 0.0)
    nothing = y[0].is_("EQ", 0.0) & y[1].is_("EQ", 0.0)
    stays = zero & y[0].is_("GT", 0.0)
    real = nothing.choose(real.full(1.0), stays.choose(real.full(0.0), real))
    return real, (nothing | stays).choose(real.full(0.0), imaginary)


UNARY: dict[str, Callable[[Pair], Pair]] = {
    "cosine": cosine,
    "exponential": exponential,
    "exponential-minus-one": exponential_minus_one,
    "log": logarithm,
    "log-plus-one": logarithm_plus_one,
    "logistic": logistic,
    "negate": negate,
    "rsqrt": inverse_root,
    "sign": sign,
    "sine": sine,
    "sqrt": square_root,
    "tan": tangent,
    "tanh": hyperbolic_tangent,
}
BINARY: dict[str, Callable[[Pair, Pair], Pair]] = {
    "add": add,
    "divide": divide,
    "multiply": multiply,
    "power": power,
    "subtract": subtract,
}
