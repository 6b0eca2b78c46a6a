"""Errors of elementary operations in units in the last place, of native code and of XLA:CPU.

python -m tests.support.ulps            writes docs/ulps.md
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from scipy import special

from tests.support.native_fragments import compiled, fragment_of, run

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "ulps.md"
DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cbrt": (jax.lax.cbrt, np.cbrt),
    "cosine": (jax.lax.cos, np.cos),
    "erf": (jax.lax.erf, special.erf),
    "exponential": (jax.lax.exp, np.exp),
    "exponential-minus-one": (jax.lax.expm1, np.expm1),
    "log": (jax.lax.log, np.log),
    "log-plus-one": (jax.lax.log1p, np.log1p),
    "logistic": (jax.lax.logistic, lambda x: 1 / (1 + np.exp(-x))),
    "rsqrt": (jax.lax.rsqrt, lambda x: 1 / np.sqrt(x)),
    "sine": (jax.lax.sin, np.sin),
    "sqrt": (jax.lax.sqrt, np.sqrt),
    "tan": (jax.lax.tan, np.tan),
    "tanh": (jax.lax.tanh, np.tanh),
}
BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (jax.lax.add, np.add),
    "subtract": (jax.lax.sub, np.subtract),
    "multiply": (jax.lax.mul, np.multiply),
    "divide": (jax.lax.div, np.divide),
    "atan2": (jax.lax.atan2, np.arctan2),
    "power": (jax.lax.pow, np.power),
}
_LOOSE = {"erf": 8.0, "logistic": 3.0, "tanh": 6.0, "power": 0.7, "log": 1.0}
_TIGHT = dict.fromkeys(("add", "subtract", "multiply", "divide", "sqrt"), 0.5001)


def bound(op: str, dtype: str) -> float:
    """What native code promises: functions of f64 are libm's, narrow types round those of f32."""
    if op in _TIGHT:
        return _TIGHT[op]
    if op == "logistic":  # which JAX writes as 1 / (1 + exp(-x)), each rounded
        return 3.0
    if dtype == "f32":
        return _LOOSE.get(op, 1.7)
    return {"cbrt": 4.0, "tanh": 2.0}.get(op, 1.7) if dtype == "f64" else 0.51


def arguments(op: str, dtype: str, count: int) -> list[np.ndarray]:
    """Special values, and random ones of all sizes and of ordinary size."""
    rng, own = np.random.default_rng([36, len(op)]), DTYPES[dtype]
    info = ml_dtypes.finfo(own)
    # parts of functions are smaller than their results, and below the smallest normal number they are zero
    low = np.log2(float(info.tiny)) + (2 if dtype == "f16" else 24)
    top = np.log2(float(info.max)) - 1
    specials = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, float(info.max), float(info.tiny)]
    specials += [9.01, -9.02, 3.92, 88.7, -87.3, 709.7, 16.5, 1 + float(info.eps), 1e-3, -1 + float(info.eps)]

    def drawn() -> np.ndarray:
        sizes = np.exp2(rng.uniform(low, top, count // 2)) * rng.choice([-1, 1], count // 2)
        return np.concatenate([sizes, rng.standard_normal(count - count // 2) * 5]).astype(own)

    with np.errstate(all="ignore"):
        ends = np.array(specials).astype(own)
    if op in UNARY:
        return [np.concatenate([ends, drawn()])]
    pairs = (np.repeat(ends, ends.size), np.tile(ends, ends.size))
    return [np.concatenate([end, rng.permutation(drawn())]) for end in pairs]


def worst(got: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """The largest distance in last places; infinite where NaN, an infinity or the sign of a zero is wrong.

    Numbers below the smallest normal one are left out: threads of XLA flush them.
    """
    info = ml_dtypes.finfo(DTYPES[dtype])
    wide = exact.dtype
    with np.errstate(all="ignore"):
        value = got.astype(wide)
        if dtype == "f64":
            ideal, step = exact, np.spacing(np.abs(exact.astype(np.float64))).astype(wide)
            step = np.where(np.isfinite(step), step, np.exp2(np.asarray(971, wide)))
        else:
            exponent = np.floor(np.log2(np.clip(np.abs(exact), float(info.tiny), float(info.max))))
            ideal, step = exact, np.exp2(exponent) * float(info.eps)
        limit = np.asarray(float(info.max), wide)
        beyond = np.abs(ideal) >= limit + step / 2  # which rounds to infinity
        distance = np.abs(np.clip(value, -limit, limit) - np.clip(ideal, -limit, limit)) / step
        distance = np.where(
            np.isfinite(value) | beyond | (np.abs(ideal) > limit - 2 * step), distance, np.inf
        )
        distance = np.where(np.isnan(ideal) | np.isnan(value), np.inf, distance)
        distance = np.where(np.isnan(ideal) & np.isnan(value), 0, distance)
        small = 4 * float(info.tiny)
        distance = np.where((np.abs(ideal) < small) & (np.abs(value) < small), 0, distance)
        other_sign = (ideal == 0) & (value == 0) & (np.signbit(ideal) != np.signbit(value))
        distance = np.where(other_sign, np.inf, distance)
    return float(distance.max())


def errors(dtype: str, count: int, *, xla: bool) -> dict[str, tuple[float, float]]:
    """Of each operation the largest error of native code, and of XLA if it is wanted."""
    names = [n for n in (*UNARY, *BINARY) if (n, dtype) != ("erf", "f64")]  # no wider one to compare with
    functions = {**UNARY, **BINARY}
    given = {name: arguments(name, dtype, count) for name in names}
    flat = [a for name in names for a in given[name]]

    def every(*values: Any) -> list[Any]:
        left = iter(values)
        return [functions[name][0](*(next(left) for _ in given[name])) for name in names]

    with jax.enable_x64(True):
        fragment = fragment_of(every, *flat)
        native = run(fragment, flat, compiled(fragment, poison=False))
        other = [np.asarray(v) for v in jax.jit(every)(*map(jnp.asarray, flat))] if xla else native
    wide = np.longdouble if dtype == "f64" else np.float64
    found = {}
    for name, ours, theirs in zip(names, native, other, strict=True):
        with np.errstate(all="ignore"):
            exact = functions[name][1](*(a.astype(wide) for a in given[name]))
        found[name] = (worst(ours, exact, dtype), worst(theirs, exact, dtype))
    return found


_HEAD = """\
<!-- made by `python -m tests.support.ulps`: change that module instead -->

# Errors of operations

The largest errors of elementary operations in units in the last place of the result, against NumPy and SciPy
in a wider type (long double for f64): native code with the bound that `tests/property/test_ulps.py` holds,
and XLA:CPU. Arguments are special values, random ones of all sizes, and ordinary ones. Numbers near the
smallest normal one are left out, as threads of XLA flush smaller ones to zero. ∞ is a NaN, an infinity or a
finite number in the wrong place. `erf` and `logistic` are what JAX writes: a polynomial, 1 / (1 + exp(-x)).
"""


def page(count: int = 200_000) -> str:
    """The table, measured on this machine."""
    columns = {dtype: errors(dtype, count, xla=True) for dtype in DTYPES}
    head = " | ".join(f"{dtype} | XLA" for dtype in DTYPES)
    lines = [_HEAD, f"| operation | {head} |", "|---" * (1 + 2 * len(DTYPES)) + "|"]
    for name in (*UNARY, *BINARY):
        cells = [
            f"{_number(columns[d][name][0])} ({bound(name, d):.3g}) | {_number(columns[d][name][1])}"
            if name in columns[d]
            else "– | –"
            for d in DTYPES
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@functools.cache
def _number(value: float) -> str:
    return "∞" if value == np.inf else f"{value:.2g}" if value < 1e4 else f"{value:.0e}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
