"""Random programs with names and calls compute the same after import."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd import ir
from tests.support.named_programs import NamedProgram, evaluated, imported


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(2, 3), st.integers(4, 16))
def test_import_keeps_values(seed: int, calls: bool, meshes: int, size: int) -> None:
    program = NamedProgram(seed, calls, meshes, size)
    before = ir.parse(program.text)
    count = len(ir.symbol_table(before)["main"].args)
    inputs = list(np.random.default_rng(seed).normal(size=(count, 4)))
    want = evaluated(before, inputs)
    got = evaluated(imported(program, infer_transfers=True), inputs)
    for a, b in zip(want, got, strict=True):
        # Sums across meshes may be added up in another order.
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=program.text)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_import_gives_the_same_text_each_time(seed: int) -> None:
    program = NamedProgram(seed, calls=True)
    texts = {ir.to_text(imported(program, infer_transfers=True)) for _ in range(2)}
    assert len(texts) == 1
