"""Checkpoints: what is saved is restored, anywhere, or it is said why not; a failed save leaves nothing."""

from __future__ import annotations

import builtins
import re
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpmd
from mpmd.api.checkpoints import files, pieces
from mpmd.api.checkpoints import folder as folders
from mpmd.errors import CheckpointError
from tests.repo.tree import ROOT
from tests.support.stacked_training import assert_equal


def on(count, *spec):
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    return NamedSharding(mesh, PartitionSpec(*spec))


def some_state():
    """Leaves of all sorts: sharded, replicated, stacked, empty, keys, small dtypes, Python numbers."""
    rows = np.arange(96, dtype=np.float32).reshape(8, 12)
    first, second = (jax.device_put(rows[k * 4 : k * 4 + 4], on(2 - k, "x")) for k in range(2))
    return {
        "sharded": jax.device_put(rows, on(4, "x")),
        "columns": jax.device_put(rows, on(4, None, "x")),
        "replicated": jax.device_put(rows, on(2)),
        "stacked": mpmd.Stacked([first, second]),
        "key": jax.random.split(jax.random.key(1), 3),
        "rbg": jax.random.key(2, impl="rbg"),
        "host": rows.astype(ml_dtypes.bfloat16),
        "small": (jnp.ones(3, jnp.float8_e4m3fn), jnp.array([True, False]), jnp.ones(2, jnp.complex64)),
        "empty": jnp.zeros((0, 3)),
        "step": 7,
        "weak": jnp.asarray(1.5),
        "none": None,
    }


def struct(sharding=None):
    """A state of shapes and dtypes; all arrays with one sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding), some_state()
    )


def test_what_was_saved_is_restored_with_its_shardings_and_with_others(tmp_path, monkeypatch):
    state = some_state()
    mpmd.checkpoint.save(tmp_path / "run", 3, state, {"losses": [1.5, 2]})
    back = mpmd.checkpoint.restore(tmp_path / "run", state)
    assert (back.step, back.extra) == (3, {"losses": [1.5, 2]})
    assert_equal(back.state, jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.int32(x), state))
    for name in ("sharded", "columns", "replicated"):
        assert back.state[name].sharding == state[name].sharding
    assert back.state["weak"].aval.weak_type and back.state["rbg"].dtype == state["rbg"].dtype
    other = struct(jax.sharding.SingleDeviceSharding(jax.devices()[1]))
    other["stacked"] = mpmd.Stacked([jax.ShapeDtypeStruct((n, 12), jnp.float32) for n in (3, 3, 2)])
    other["columns"] = jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=on(2, "x"))
    assert_equal(mpmd.checkpoint.restore(tmp_path / "run", other).state, back.state)
    other["stacked"] = jax.ShapeDtypeStruct((8, 12), jnp.float32)
    assert_equal(mpmd.checkpoint.restore(tmp_path / "run", other).state, back.state)


@pytest.mark.slow
def test_large_shards_are_written_in_pieces_and_each_row_once(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 100)
    state = {
        "w": jax.device_put(np.arange(96.0, dtype=np.float32).reshape(8, 12), on(2, "x")),
        "s": jnp.zeros(()),
    }
    mpmd.checkpoint.save(tmp_path, 1, state)
    found = folders.read_manifest(tmp_path, 1)["pieces"]
    assert [box for _, leaf, box, *_ in found if leaf] == [[[k, k + 2], [0, 12]] for k in range(0, 8, 2)]
    assert_equal(
        mpmd.checkpoint.restore(tmp_path, {"w": np.zeros((8, 12), np.float32), "s": state["s"]}).state, state
    )


@pytest.mark.slow
def test_the_newest_stay(tmp_path):
    for step in (2, 4, 6):
        mpmd.checkpoint.save(tmp_path, step, {"w": np.full(2, step)})
    assert mpmd.checkpoint.steps(tmp_path) == [4, 6]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["4", "6"]
    like = {"w": np.zeros(2, int)}
    assert mpmd.checkpoint.restore(tmp_path, like).state["w"].tolist() == [6, 6]
    assert mpmd.checkpoint.restore(tmp_path, like, 4).state["w"].tolist() == [4, 4]
    mpmd.checkpoint.save(tmp_path, 6, like)
    assert mpmd.checkpoint.restore(tmp_path, like).state["w"].tolist() == [0, 0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["4", "6"]
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        mpmd.checkpoint.restore(tmp_path / "none", like)


def test_a_checkpoint_of_another_state_names_what_differs(tmp_path):
    mpmd.checkpoint.save(tmp_path, 1, {"a": np.zeros(2, np.float32), "b": np.zeros(3)})
    with pytest.raises(CheckpointError) as raised:
        mpmd.checkpoint.restore(tmp_path, {"a": np.zeros(3, np.float32), "c": np.zeros(3)})
    text = str(raised.value)
    assert text.startswith("the checkpoint of step 1 in ")
    assert "['c']: float64[3] is not in it" in text
    assert "['b']: float64[3] is in it, and not expected" in text
    assert "['a']: float32[2] was saved, expected float32[3]" in text


def test_a_damaged_checkpoint_is_refused(tmp_path, monkeypatch):
    state = {"w": np.arange(2000, dtype=np.float32)}
    for step in (1, 2):
        mpmd.checkpoint.save(tmp_path, step, state)
    shutil.rmtree(tmp_path / "2" / "process_0")
    files.write(tmp_path / "2" / "process_0", {"0['w']": state["w"] + 1})
    says = r"step 2 is damaged[\s\S]*\['w'\]: float32\[2000\] has other bytes[\s\S]*go on from step 1"
    with pytest.raises(CheckpointError, match=says):
        mpmd.checkpoint.restore(tmp_path, state)
    manifest = tmp_path / "2" / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="step 2 is damaged"):
        mpmd.checkpoint.restore(tmp_path, state)
    for file in (tmp_path / "1" / "process_0").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step 1 is damaged[\s\S]*\['w'\]: float32\[2000\]"):
        mpmd.checkpoint.restore(tmp_path, state, 1)


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path):
    mpmd.checkpoint.save(tmp_path, 1, {"w": np.zeros(2, np.float32)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # "File too large"
    try:
        with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*: the disk is full"):
            noise = np.random.default_rng(0).normal(size=200_000)
            mpmd.checkpoint.save(tmp_path, 2, {"w": noise})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint to"):
        mpmd.checkpoint.save(tmp_path / "file", 1, {"w": np.zeros(2)})


def test_without_orbax_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("orbax"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=re.escape("pip install orbax-checkpoint")):
        mpmd.checkpoint.save(tmp_path, 1, {"w": np.zeros(2)})
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys, numpy as np, mpmd
from mpmd.api.checkpoints import files, folder
mpmd.checkpoint.save(sys.argv[1], 1, {"w": np.zeros(3)})
at = {"before": folder.prepare, "written": files.write, "complete": folder.complete}[sys.argv[2]]
def killed(*args):
    at(*args)
    os.kill(os.getpid(), signal.SIGKILL)
owner = files if sys.argv[2] == "written" else folder
setattr(owner, at.__name__, killed)
mpmd.checkpoint.save(sys.argv[1], 2, {"w": np.ones(3)})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "newest"), [("before", 1), ("written", 1), ("complete", 2)])
def test_a_killed_save_is_complete_or_not_there(where, newest, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), where], cwd=ROOT, check=False)
    assert done.returncode == -9
    back = mpmd.checkpoint.restore(tmp_path, {"w": np.zeros(3)})
    assert (back.step, back.state["w"][0]) == (newest, newest - 1)
    mpmd.checkpoint.save(tmp_path, 3, {"w": np.zeros(3)})
    assert {entry.name for entry in tmp_path.iterdir()} == ({"1", "3"} if newest == 1 else {"2", "3"})


def test_a_piece_is_written_once_by_a_process_that_holds_all_of_it():
    kind = pieces.LeafKind("['w']", (4, 2), "float32")
    top, bottom, whole = ((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 4), (0, 2))
    both = {(0, top): 0, (0, bottom): 0}
    assert pieces.writers([kind], [[(0, top), (0, bottom)], [(0, whole)]]) == both, (
        "sharded here, whole there"
    )
    assert pieces.writers([kind], [[(0, top)], [(0, whole)]]) == {(0, whole): 1}
    assert pieces.writers([kind], [[(0, top)], [(0, top), (0, bottom)]]) == both | {(0, bottom): 1}
    with pytest.raises(CheckpointError, match="no process holds all of"):
        pieces.writers([kind], [[(0, top)], [(0, top)]])
    with pytest.raises(CheckpointError, match="processes hold different parts of"):
        pieces.writers([kind], [[(0, ((0, 3), (0, 2)))], [(0, ((1, 4), (0, 2)))]])
