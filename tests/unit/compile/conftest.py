"""One XLA process for all tests of this folder."""

import pytest

from tests.support.xla_hlo import XlaWorker


@pytest.fixture(scope="session")
def xla():
    with XlaWorker(120) as worker:
        yield worker
