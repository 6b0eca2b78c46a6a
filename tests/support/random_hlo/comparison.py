"""Whether two implementations of a case agree."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from tests.support.random_hlo.draft import Case

EPSILON = {
    "bf16": 2.0**-8,
    "f16": 2.0**-11,
    "f32": 2.0**-24,
    "f64": 2.0**-53,
    "c64": 2.0**-24,
    "c128": 2.0**-53,
}


def differences(got: list[np.ndarray], want: list[np.ndarray], case: Case) -> str:
    """What differs between two lists of outputs beyond rounding; "" if nothing.

    Values below the smallest normal number count as zero: XLA:CPU flushes them.
    """
    if len(got) != len(want):
        return f"{len(got)} outputs, expected {len(want)}"
    for number, (a, b) in enumerate(zip(got, want)):
        problem = _difference(np.asarray(a), np.asarray(b), case)
        if problem:
            return f"output {number}: {problem}"
    return ""


def _difference(a: np.ndarray, b: np.ndarray, case: Case) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{a.shape}, expected {b.dtype}{b.shape}"
    names = {d.numpy: name for name, d in DTYPES.items()}
    dtype = names[a.dtype]
    if DTYPES[dtype].kind not in ("float", "complex"):
        return "" if np.array_equal(a, b) else f"{a.ravel()[:8]}, expected {b.ravel()[:8]}"
    wide = np.complex128 if DTYPES[dtype].kind == "complex" else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(wide), b.astype(wide)
    base = {"c64": np.float32, "c128": np.float64}.get(dtype, DTYPES[dtype].numpy)
    tiny = float(ml_dtypes.finfo(base).tiny)
    with np.errstate(all="ignore"):
        close = np.abs(x - y) <= 2 * tiny
        if not case.exact:
            scale = np.maximum(
                np.abs(y), np.max(np.abs(y[np.isfinite(y)]), initial=1) if case.terms > 1 else 0
            )
            close |= np.abs(x - y) <= (8 + 2 * case.terms) * EPSILON.get(dtype, 2.0**-3) * scale
        same = (x == y) | (np.isnan(x) & np.isnan(y)) | close
    if np.all(same):
        return ""
    where = tuple(int(i) for i in np.argwhere(~same)[0])
    return f"at {where}: {a[where]}, expected {b[where]} ({int(np.sum(~same))} of {a.size} differ)"
