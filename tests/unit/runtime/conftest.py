from __future__ import annotations

import threading

import pytest


@pytest.fixture(autouse=True)
def no_thread_stays_behind():
    """Every test ends with the runtime threads it began with."""
    before = set(threading.enumerate())
    yield
    left = [
        t.name
        for t in threading.enumerate()
        if t not in before and t.name.startswith("mpmd-") and t.is_alive()
    ]
    assert left == []
