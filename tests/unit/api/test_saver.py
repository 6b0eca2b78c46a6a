"""Checkpoints written beside the steps: the values at the save, complete, or not there and an error."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.api.checkpoints import files
from mpmd.errors import CheckpointError

LIKE = {"w": np.zeros(3, np.float32)}


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def gate(monkeypatch):
    """What must be set before files are written; `gate.reached` is set when they would be."""
    write, opened = files.write, threading.Event()
    opened.reached = threading.Event()

    def wait(*args):
        opened.reached.set()
        assert opened.wait(20)
        write(*args)

    monkeypatch.setattr(files, "write", wait)
    yield opened
    opened.set()


def test_steps_go_on_and_donate_the_state_that_is_written(tmp_path, gate):
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    host, w = np.arange(3, dtype=np.float32), jnp.zeros(3)
    with mpmd.checkpoint.Saver(tmp_path) as saver:
        saver.save(1, {"w": w, "host": host}, {"loss": 2.5}, metric=1.0)
        assert gate.reached.wait(20)
        host += 7
        for _ in range(3):
            w = step(w)
        assert w.tolist() == [3, 3, 3] and mpmd.checkpoint.steps(tmp_path) == []
        gate.set()
        saver.wait()
        assert mpmd.checkpoint.steps(tmp_path) == [1]
        saver.save(2, {"w": w, "host": host})
    back = mpmd.checkpoint.restore(tmp_path, {**LIKE, "host": host}, 1)
    assert (back.state["w"].tolist(), back.state["host"].tolist()) == ([0, 0, 0], [0, 1, 2])
    assert back.extra == {"loss": 2.5} and mpmd.checkpoint.best(tmp_path) == 1
    assert mpmd.checkpoint.restore(tmp_path, {**LIKE, "host": host}).state["host"].tolist() == [7, 8, 9]


def test_a_save_waits_for_the_one_before_and_keeps_what_it_is_given_to_keep(tmp_path):
    with mpmd.checkpoint.Saver(tmp_path, keep=mpmd.checkpoint.Keep(last=1, every=2)) as saver:
        for step in range(1, 6):
            saver.save(step, {"w": np.full(3, step, np.float32)})
    assert mpmd.checkpoint.steps(tmp_path) == [2, 4, 5]
    assert mpmd.checkpoint.restore(tmp_path, LIKE, 2).state["w"].tolist() == [2, 2, 2]


def test_what_could_not_be_written_is_an_error_later_and_leaves_the_older_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    with mpmd.checkpoint.Saver(tmp_path) as saver:
        saver.save(1, LIKE)
        saver.wait()
        with monkeypatch.context() as broken:
            broken.setattr(files, "write", full)
            saver.save(2, LIKE)
            with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*: the disk is full"):
                saver.save(3, LIKE)
        assert names(tmp_path) == ["1"]
        saver.save(4, LIKE)
    assert names(tmp_path) == ["1", "4"]
    monkeypatch.setattr(files, "write", full)
    with pytest.raises(CheckpointError, match="the disk is full"), mpmd.checkpoint.Saver(tmp_path) as saver:
        saver.save(5, LIKE)
    assert names(tmp_path) == ["1", "4"]


def test_an_error_of_the_training_loop_leaves_after_the_checkpoint_is_complete(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError), mpmd.checkpoint.Saver(tmp_path) as saver:
        saver.save(1, LIKE)
        raise ZeroDivisionError
    assert names(tmp_path) == ["1"]
    monkeypatch.setattr(files, "read", lambda *_: np.ones(3, np.float32))
    with pytest.raises(ZeroDivisionError) as raised, mpmd.checkpoint.Saver(tmp_path) as saver:
        saver.save(2, LIKE)
        raise ZeroDivisionError
    assert "was written, and reads differently" in raised.value.__notes__[0]
    assert names(tmp_path) == ["1"]


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    saver = mpmd.checkpoint.Saver(tmp_path / "run")
    with pytest.raises(CheckpointError, match="a Saver saves within its with statement"):
        saver.save(1, LIKE)
    with saver, pytest.raises(CheckpointError, match="step is -1"):
        saver.save(-1, LIKE)
    with saver, pytest.raises(CheckpointError, match="deleted"):
        (array := jnp.ones(3)).delete()
        saver.save(1, {"w": array})
    with saver:
        saver.wait()
    assert not (tmp_path / "run").exists()
