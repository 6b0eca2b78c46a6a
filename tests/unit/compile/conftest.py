"""For all tests of the compiler: the same random numbers whatever ran before."""

import pytest

from tests.support.native_functions import Floats


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(request):
    floats = getattr(request.module, "floats", None)
    if isinstance(floats, Floats):
        floats.restart()
