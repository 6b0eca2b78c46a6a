"""Products of f32 have all of their digits, as those that they are compared with: by default GPUs keep 11."""

import jax
import pytest


@pytest.fixture
def every_digit():
    with jax.default_matmul_precision("highest"):
        yield
