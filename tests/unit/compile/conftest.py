"""For all tests of the compiler: one XLA process, and the same random numbers whatever ran before."""

import pytest

from tests.support.native_functions import Floats
from tests.support.xla_hlo import XlaWorker


@pytest.fixture(scope="session")
def xla():
    with XlaWorker(120) as worker:
        yield worker


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(request):
    floats = getattr(request.module, "floats", None)
    if isinstance(floats, Floats):
        floats.restart()
