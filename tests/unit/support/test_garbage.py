"""What a pause of garbage collection leaves behind."""

import gc

import pytest

from mpmd.support import resources
from mpmd.support.resources import garbage_kept


@pytest.fixture
def collections(monkeypatch):
    """The generations that were collected, as long as few objects are many and nothing is frozen."""
    monkeypatch.setattr(resources, "MIN_AGED", 100)
    monkeypatch.setattr(resources, "MAX_AGED", 10_000)
    monkeypatch.setattr(resources, "_aged", 0)
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.unfreeze()
    gc.collect(1)
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.freeze()


def test_objects_become_old_without_a_collection(collections):
    with garbage_kept(), garbage_kept():
        kept = [[k] for k in range(5000)]
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_count()[0] < 100
    assert collections == []
    with garbage_kept():  # more than may become old so
        kept += [[k] for k in range(6000)]
    assert collections == [2]


def test_what_the_user_froze_and_switched_off_stays_so(collections):
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with garbage_kept():
            kept = [[k] for k in range(5000)]
        assert gc.get_freeze_count() == frozen and len(kept) == 5000
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with garbage_kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
