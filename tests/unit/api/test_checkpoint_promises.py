"""Promises of the guide and the docstrings about checkpoints, and attempts to break them."""

from __future__ import annotations

import enum
import errno
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import register_pytree_with_keys_class

import mpmd
from mpmd.api.checkpoints import files, pieces
from mpmd.api.checkpoints import folder as folders
from mpmd.errors import CheckpointError
from tests.repo.tree import ROOT

W = {"w": np.arange(3, dtype=np.float32)}


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_what_is_written_last_stays_and_is_restored_whatever_its_number(tmp_path):
    """A new run in an old folder, or one that was rolled back."""
    for step in (100, 200):
        mpmd.checkpoint.save(tmp_path, step, W)
    mpmd.checkpoint.save(tmp_path, 10, {"w": W["w"] + 1}, {"run": "new"})
    assert mpmd.checkpoint.steps(tmp_path) == [200, 10]
    back = mpmd.checkpoint.restore(tmp_path, W)
    assert (back.step, back.extra, back.state["w"].tolist()) == (10, {"run": "new"}, [1, 2, 3])
    assert mpmd.checkpoint.extra(tmp_path) == {"run": "new"}
    mpmd.checkpoint.save(tmp_path, 20, W, keep=1)
    assert names(tmp_path) == ["20"]


def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(tmp_path):
    for step in (1, 2):
        mpmd.checkpoint.save(tmp_path, step, W, keep=3)
    (tmp_path / "2" / "manifest.json").write_text("{")
    mpmd.checkpoint.save(tmp_path, 3, W)
    assert names(tmp_path) == ["1", "2", "3"] and mpmd.checkpoint.steps(tmp_path)[-1] == 2
    with pytest.raises(CheckpointError, match="step 2 is damaged"):
        mpmd.checkpoint.restore(tmp_path, W)
    assert mpmd.checkpoint.restore(tmp_path, W, 3).step == 3


@pytest.mark.parametrize(
    "step",
    [7, np.int64(7), np.uint8(7), np.array(7), jax.device_put(np.int32(7)), enum.IntEnum("N", {"A": 7}).A],
)
def test_any_integer_is_a_step(step, tmp_path):
    mpmd.checkpoint.save(tmp_path, step, W)
    assert mpmd.checkpoint.steps(tmp_path) == [7] and names(tmp_path) == ["7"]
    assert mpmd.checkpoint.restore(tmp_path, W, step).step == 7


@pytest.mark.parametrize("step", [-1, True, np.True_, 5.0, np.float32(5), "5", "../x", None, [1]])
def test_what_is_no_step_is_refused_before_anything_is_written(step, tmp_path):
    with pytest.raises(CheckpointError, match="step is .*; it must be an integer that is not negative"):
        mpmd.checkpoint.save(tmp_path / "run", step, W)
    assert names(tmp_path) == []


def test_what_is_no_checkpoint_is_not_taken_for_one(tmp_path):
    mpmd.checkpoint.save(tmp_path, 5, W)
    for name in ("9", "²", "x.unfinished"):
        (tmp_path / name).write_text("")
    for name in ("007", "٣", "-1", "1_0", " 3"):
        (tmp_path / name).mkdir()
    (tmp_path / "link.unfinished").symlink_to(tmp_path / "5")
    assert mpmd.checkpoint.steps(tmp_path) == [5]
    mpmd.checkpoint.save(tmp_path, 6, W)
    assert mpmd.checkpoint.steps(tmp_path) == [5, 6], "what a link led to is still there"
    assert mpmd.checkpoint.restore(tmp_path, W, 5).step == 5


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2", None])
def test_a_number_of_checkpoints_to_keep_that_keeps_none_is_refused(keep, tmp_path):
    with pytest.raises(CheckpointError, match="keep is"):
        mpmd.checkpoint.save(tmp_path, 1, W, keep=keep)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"losses": {9: 0.1, 10: 0.2}}, r"extra\['losses'\] has the key 9"),
        ({1: 1, "a": 2}, "extra has the key 1"),
        ({"a": [{None: 1}]}, r"extra\['a'\]\[0\] has the key None"),
        ({"loss": np.float32(1)}, "float32"),
        ({"loss": jax.device_put(np.ones(2))}, "cannot be written as JSON"),
        ({"text": b""}, "cannot be written as JSON"),
        ({("a", "b"): 1}, "keys must be str"),
        ([1, 2], "extra is a list; it must be a dict"),
    ],
)
def test_an_extra_that_json_would_change_is_refused_before_anything_is_written(extra, says, tmp_path):
    with pytest.raises(CheckpointError, match=says):
        mpmd.checkpoint.save(tmp_path / "run", 1, W, extra)
    assert names(tmp_path) == []


def test_an_extra_that_holds_itself_is_refused(tmp_path):
    extra = {}
    extra["itself"] = [extra]
    with pytest.raises(CheckpointError, match="Circular|levels"):
        mpmd.checkpoint.save(tmp_path, 1, W, extra)


def test_what_json_can_hold_comes_back(tmp_path):
    extra = {"a": [1.5, None, True, {"b": "ä\ud800\n"}], "": 10**30, "nan": float("inf"), "e": 5e-324}
    mpmd.checkpoint.save(tmp_path, 1, W, extra)
    assert mpmd.checkpoint.extra(tmp_path) == extra


def test_arrays_of_any_layout_come_back(tmp_path):
    rows = np.arange(24).reshape(4, 6)
    state = {
        "big": rows.astype(">f4"),
        "swapped": rows.astype(">i2")[::2],
        "fortran": np.asfortranarray(rows),
        "strided": rows[::-1, ::2],
        "transposed": rows.T,
        "scalar": np.float64(1e-300),
        "zero": np.array(5, np.int8),
        "negative zero": np.array([-0.0, np.nan, np.inf]),
        "broadcast": np.broadcast_to(np.float32(3), (2, 5)),
        "read-only": np.frombuffer(b"\1\2\3\4", np.uint8),
        "small": jnp.array([1, -3], jnp.int4),
        "wide": np.array([2**63], np.uint64),
    }
    mpmd.checkpoint.save(tmp_path, 1, state)
    back = mpmd.checkpoint.restore(tmp_path, state).state
    for name, want in state.items():
        np.testing.assert_array_equal(back[name], want, name)
        assert back[name].dtype == want.dtype
        signs = [np.signbit(np.asarray(x, np.float64)) for x in (back[name], want)]
        np.testing.assert_array_equal(*signs)


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        ("text", "is a str; a state consists of arrays and numbers"),
        (object(), "is a object; a state consists"),
        (np.array(["a"]), "cannot be written to a file"),
        (np.array([None]), "cannot be written to a file"),
        (np.zeros(2, "M8[s]"), "cannot be written to a file"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "cannot be written to a file"),
        (np.zeros(2, np.longdouble), "cannot be written to a file"),
        (np.ma.masked_array([1, 2], [0, 1]), "is a masked array"),
        (2**40, "which no int32 holds"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "no process holds all of"),
    ],
)
def test_leaves_that_files_cannot_hold_are_refused_and_named(leaf, says, tmp_path):
    mpmd.checkpoint.save(tmp_path, 1, W)
    with pytest.raises(CheckpointError, match=says) as raised:
        mpmd.checkpoint.save(tmp_path, 2, {"it": leaf})
    assert "['it']" in str(raised.value)
    assert names(tmp_path) == ["1"]


class SameText:
    def __repr__(self):
        return "key"


@register_pytree_with_keys_class
class TwoLeaves:
    """A node whose keys print alike."""

    def __init__(self, one, two):
        self.leaves = one, two

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(SameText()), leaf) for leaf in self.leaves], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_leaves_of_one_path_are_refused(tmp_path):
    """Both would be restored as the second."""
    with pytest.raises(CheckpointError, match=r"\[key\]: float32\[3\] is there twice"):
        mpmd.checkpoint.save(tmp_path, 1, TwoLeaves(W["w"], W["w"] + 1))


@pytest.mark.parametrize("what", ["bytes", "order", "manifest"])
def test_what_reads_differently_than_it_was_given_is_no_checkpoint(what, tmp_path, monkeypatch):
    mpmd.checkpoint.save(tmp_path, 1, W)
    read, read_file = files.read, folders._read
    wrong = {"bytes": lambda x: x + 1, "order": lambda x: x.astype(">f4"), "manifest": lambda x: x}[what]
    monkeypatch.setattr(files, "read", lambda *args: wrong(read(*args)))
    if what == "manifest":
        monkeypatch.setattr(folders, "_read", lambda path: {**read_file(path), "step": 7})
    with pytest.raises(CheckpointError, match="was written, and reads differently"):
        mpmd.checkpoint.save(tmp_path, 2, W)
    assert names(tmp_path) == ["1"]


def test_two_jobs_do_not_write_to_one_folder_at_once(tmp_path, monkeypatch):
    """The first of the second job's steps would remove what the first one is writing."""
    write, inside, go_on = files.write, threading.Event(), threading.Event()

    def slow(*args):
        inside.set()
        assert go_on.wait(10)
        write(*args)

    monkeypatch.setattr(files, "write", slow)
    first = threading.Thread(target=mpmd.checkpoint.save, args=(tmp_path, 1, W))
    first.start()
    assert inside.wait(10)
    with pytest.raises(CheckpointError, match="another job writes a checkpoint to"):
        mpmd.checkpoint.save(tmp_path, 2, W)
    go_on.set()
    first.join(10)
    assert mpmd.checkpoint.restore(tmp_path, W).step == 1
    mpmd.checkpoint.save(tmp_path, 2, W)
    assert names(tmp_path) == ["1", "2"]


REPLACED = """
import os, signal, sys, numpy as np, mpmd
from pathlib import Path
from mpmd.api.checkpoints import folder
mpmd.checkpoint.save(sys.argv[1], 1, {"w": np.zeros(3)})
if sys.argv[2] == "renames":
    folder._exchange = lambda *_: False
rename, number = Path.rename, [0]
def killed(self, target):
    if number[0] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    number[0] += 1
    return rename(self, target)
Path.rename = killed
mpmd.checkpoint.save(sys.argv[1], 1, {"w": np.ones(3)})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "at", "found"), [("exchange", 0, 1), ("renames", 0, 0), ("renames", 1, 0)])
def test_a_save_that_replaces_and_is_killed_loses_neither(how, at, found, tmp_path):
    """Between two renamings there is neither; the next save brings the old one back."""
    command = [sys.executable, "-c", REPLACED, str(tmp_path), how, str(at)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    like = {"w": np.zeros(3)}
    if (how, at) != ("renames", 1):
        assert mpmd.checkpoint.restore(tmp_path, like).state["w"][0] == found
    mpmd.checkpoint.save(tmp_path, 2, like)
    assert mpmd.checkpoint.restore(tmp_path, like, 1).state["w"][0] == found
    assert names(tmp_path) == ["1", "2"]


def test_an_older_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    mpmd.checkpoint.save(tmp_path, 1, W)
    rename = type(tmp_path).rename

    def refusing(self, target):
        if self.name == "1":
            raise OSError(errno.EBUSY, "busy")
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", refusing)
    with pytest.warns(UserWarning, match="1 could not be removed: .*busy"):
        mpmd.checkpoint.save(tmp_path, 2, W, keep=1)
    assert mpmd.checkpoint.restore(tmp_path, W).step == 2


def test_every_file_reaches_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    flushed, fsync, rename = set(), os.fsync, type(tmp_path).rename

    def noted(handle):
        flushed.add(os.fstat(handle).st_ino)
        fsync(handle)

    def checked(self, target):
        for where, _, inside in os.walk(self):
            entries = [where, *(os.path.join(where, name) for name in inside)]
            assert {os.stat(entry).st_ino for entry in entries} <= flushed
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(type(tmp_path), "rename", checked)
    mpmd.checkpoint.save(tmp_path, 1, W)
    assert os.stat(tmp_path).st_ino in flushed, "and the name"


def test_an_array_that_was_donated_is_an_error_before_anything_is_written(tmp_path):
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(CheckpointError, match="deleted"):
        mpmd.checkpoint.save(tmp_path, 1, {"w": array})
    assert names(tmp_path) == []


def test_replicas_that_differ_are_named():
    kinds = [pieces.LeafKind("['w']", (2,), "float32"), pieces.LeafKind("['b']", (), "float32")]
    claims = [[(0, [[0, 2]], 5), (1, [], 1)], [(0, [[0, 2]], 6), (1, [], 1)], [(0, [[0, 2]], 7)]]
    assert pieces.replicas_that_differ(kinds, claims) == [
        "['w']: float32[2] has other values in process 1 than in process 0, whose are saved"
    ]


def test_the_last_the_best_and_every_so_many_stay(tmp_path):
    keep = mpmd.checkpoint.Keep(last=1, every=4, best=2)
    losses = {1: 5.0, 2: 1.0, 3: np.float32(2), 4: 9.0, 5: np.nan, 6: jnp.bfloat16(1.0), 7: 3.0}
    for step, loss in losses.items():
        mpmd.checkpoint.save(tmp_path, step, W, metric=loss, keep=keep)
    assert mpmd.checkpoint.steps(tmp_path) == [2, 4, 6, 7], (
        "2 and 6 are the best, 4 is the fourth, 7 the last"
    )
    assert mpmd.checkpoint.best(tmp_path) == 2 and mpmd.checkpoint.best(tmp_path, highest=True) == 4
    assert mpmd.checkpoint.restore(tmp_path, W, mpmd.checkpoint.best(tmp_path)).step == 2
    mpmd.checkpoint.save(tmp_path, 9, W, metric=4.0, keep=mpmd.checkpoint.Keep(last=1, best=1, highest=True))
    assert mpmd.checkpoint.steps(tmp_path) == [4, 9], "those who save last say what stays"


def test_which_checkpoints_stay_is_checked_before_anything_is_written(tmp_path):
    keep = mpmd.checkpoint.Keep
    for how, says in [
        ({"keep": keep(last=0)}, "keep is 0; at least"),
        ({"keep": keep(every=-1)}, "keep.every is -1"),
        ({"keep": keep(best=1.5)}, "keep.best is 1.5"),
        ({"keep": keep(best=1)}, "keep.best is 1, and no metric was given"),
        ({"metric": "low"}, "metric is 'low'; it must be one real number"),
        ({"metric": np.ones(1)}, "it must be one real number"),
        ({"metric": 1j}, "it must be one real number"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            mpmd.checkpoint.save(tmp_path, 1, W, **how)
    assert names(tmp_path) == []
    mpmd.checkpoint.save(tmp_path, 1, W)
    with pytest.raises(CheckpointError, match="no checkpoint in .* has a metric"):
        mpmd.checkpoint.best(tmp_path)
