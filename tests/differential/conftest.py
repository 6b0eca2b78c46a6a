"""Poison: native code overwrites memory as soon as it is free, so that a wrong read shows in the numbers."""

import pytest

from mpmd.compile import driver
from mpmd.compile.thunks.emission import Emitter


@pytest.fixture(scope="module")
def poison():
    """All native programs that a module of tests compiles are poisoned."""

    def poisoned(assignment, plans, **_):
        return Emitter(assignment, plans, poison=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "Emitter", poisoned)
        yield
