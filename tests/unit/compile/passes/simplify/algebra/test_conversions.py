"""Two conversions become one only where that is the same for every value."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpmd.compile.hlo import HloBuilder, HloModule
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import convert
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.rewriter import Rewriter
from mpmd.compile.passes.simplify.algebra import elementwise
from tests.support.random_hlo.draft import values
from tests.support.rewrite_checks import identical


def every_value(dtype: str) -> np.ndarray:
    """All values of a type of a byte; the extremes and some others of wider ones."""
    known = DTYPES[dtype]
    if known.kind == "pred":
        return np.array([False, True])
    if known.bits <= 8:
        return np.arange(1 << known.bits, dtype=np.uint8).view(known.numpy)
    edges = [s * (1 << b) + d for b in range(known.bits) for s in (1, -1) for d in (-1, 0, 1)]
    if known.is_integral:
        info = np.iinfo(known.numpy)
        return np.array([e for e in edges if info.min <= e <= info.max], known.numpy)
    drawn = values(np.random.default_rng(0), dtype, (64,), special=True)
    with np.errstate(all="ignore"):
        return np.concatenate([drawn, np.array([float(e) for e in edges]).astype(known.numpy)])


def once(source: str, middle: str, target: str) -> bool:
    """Whether the rule makes one conversion of the two."""
    module = HloModule("conversions")
    build = HloBuilder.create(module, "main")
    x = build.parameter(array(source, (4,)))
    module.set_entry(build.build(build.convert(build.convert(x, middle), target)))
    return Rewriter(module.entry).run({"convert": (elementwise.convert_twice,)}, lambda i: True)


@pytest.mark.parametrize("source", DTYPES)
def test_one_conversion_gives_what_two_do(source):
    given, fired = every_value(source), 0
    for middle, target in itertools.product(DTYPES, DTYPES):
        if middle in (source, target) or not once(source, middle, target):
            continue
        fired += 1
        with np.errstate(all="ignore"):
            two = convert(convert(given, source, middle), middle, target)
            one = convert(given, source, target)
        assert identical(one, two), f"{source} -> {middle} -> {target}"
    assert fired or source in ("s64", "u64", "f64", "c64", "c128", "f8e8m0fnu")
