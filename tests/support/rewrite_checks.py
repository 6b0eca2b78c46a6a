"""What a rewrite did to a program: whether it changed it, and whether it kept its numbers bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.hlo.dtypes import DTYPES, dtype_of
from tests.support.hlo_meaning import evaluate


def identical(a: np.ndarray, b: np.ndarray, *, signs: bool = True) -> bool:
    """Equal bit for bit but for the bits of NaN, and unless `signs` for the sign of zeros."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind == "c":
        return identical(a.real, b.real, signs=signs) and identical(a.imag, b.imag, signs=signs)
    if DTYPES[dtype_of(a)].kind != "float":
        return bool(np.array_equal(a, b))
    with np.errstate(all="ignore"):
        a, b = a.astype(np.float64), b.astype(np.float64)
    if not np.array_equal(a, b, equal_nan=True):
        return False
    return not signs or bool(np.all((np.signbit(a) == np.signbit(b)) | np.isnan(a)))


def rewritten(
    module: HloModule,
    arguments: Sequence[Any],
    rewrite: Callable[[HloModule], bool],
    *,
    signs: bool = True,
    differ: Callable[[list[Any], list[Any]], str] | None = None,
) -> bool:
    """Whether a rewrite changed a program.

    Args:
        module: the program; it is not changed.
        arguments: of the program.
        rewrite: changes a module, and says whether it did.
        signs: zeros keep their sign.
        differ: says what differs between two lists of results beyond what the rewrite may; by default
            nothing may.

    Raises:
        AssertionError: the program is invalid or computes something else afterwards.
    """
    after = module.clone()
    changed = rewrite(after)
    verify(after)
    if not changed:
        return False
    want, got = (jax.tree.leaves(evaluate(m, arguments)) for m in (module, after))
    if differ is not None:
        problem = differ(got, want)
    else:
        pairs = zip(got, want, strict=True)
        wrong = [(a, b) for a, b in pairs if not identical(np.asarray(a), np.asarray(b), signs=signs)]
        problem = f"{wrong[0][0]}, expected {wrong[0][1]}" if wrong else ""
    assert not problem, f"{problem}\n{print_module(module)}\n---\n{print_module(after)}"
    return True
