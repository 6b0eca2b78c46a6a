"""The same random numbers for a test, whatever ran before it in this process."""

import numpy as np
import pytest

from tests.unit.compile.backends.native_cpu import test_fragments_run_natively, test_thin_products


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(monkeypatch):
    for module in (test_fragments_run_natively, test_thin_products):
        monkeypatch.setattr(module, "RNG", np.random.default_rng(0))
