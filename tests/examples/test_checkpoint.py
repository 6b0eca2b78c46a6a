"""A checkpoint gives back exactly what was saved, or says why it cannot."""

from __future__ import annotations

import resource
import shutil

import jax
import numpy as np
import pytest

from examples.pipelined_transformer.checkpoint import Checkpoints
from examples.pipelined_transformer.train_step import make_state
from mpmd.errors import CheckpointError

# Orbax leaves a coroutine behind when it meets a damaged file.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")

FACTS = {"d_model": 16, "text": "abc"}
LOSSES = [6.25, 5.125, 0.1]


@pytest.fixture(scope="module")
def state(text_file):
    from examples.pipelined_transformer.config import TrainConfig

    small = TrainConfig(layers=1, num_stages=1, d_model=8, heads=1, seq_len=8, vocab_size=256)
    fresh = jax.device_get(make_state(small))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: np.asarray(leaf + rng.integers(1, 9), leaf.dtype), fresh)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    Checkpoints(folder, FACTS).save(2, state, LOSSES[:2])
    Checkpoints(folder, FACTS).save(3, state, LOSSES)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def zeros(state):
    return jax.tree.map(np.zeros_like, state)


def test_what_is_restored_is_what_was_saved(folder, state):
    restored, losses = Checkpoints(folder, FACTS).restore(zeros(state))
    assert losses == LOSSES
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_the_newest_two_are_kept(folder, state):
    checkpoints = Checkpoints(folder, FACTS)
    checkpoints.save(4, state, [*LOSSES, 0.5])
    assert checkpoints.steps == [3, 4]


def test_nothing_to_resume(tmp_path, state):
    with pytest.raises(CheckpointError, match=rf"^no checkpoint in {tmp_path}/none\n"):
        Checkpoints(tmp_path / "none", FACTS).restore(state)


def largest_array_file(folder):
    return max((folder / "3" / "process_0").rglob("d/*"), key=lambda file: file.stat().st_size)


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, lambda file: file.unlink()])
@pytest.mark.parametrize("which", ["array", "manifest", "description"])
def test_a_damaged_checkpoint(folder, state, which, damage):
    files = {
        "array": largest_array_file(folder),
        "manifest": folder / "3" / "process_0" / "manifest.ocdbt",
        "description": folder / "3" / "manifest.json",
    }
    damage(files[which])
    with pytest.raises(CheckpointError) as error:
        Checkpoints(folder, FACTS).restore(zeros(state))
    first, _, last = str(error.value).splitlines()
    assert first == f"the checkpoint of step 3 is damaged: {folder}/3"
    assert last == "  remove that folder to go on from step 2"


def test_a_description_of_something_else(folder, state):
    (folder / "3" / "manifest.json").write_text('{"losses": []}')
    with pytest.raises(CheckpointError, match=rf"^the checkpoint of step 3 is damaged: {folder}/3\n"):
        Checkpoints(folder, FACTS).restore(zeros(state))


def test_a_checkpoint_of_another_run(folder, state):
    with pytest.raises(CheckpointError) as error:
        Checkpoints(folder, {**FACTS, "d_model": 32}).restore(state)
    assert str(error.value).splitlines()[:2] == [
        f"the checkpoint of step 3 in {folder} belongs to another run:",
        "  d_model: saved with 16, now 32",
    ]


def test_a_folder_that_cannot_be_written_to(tmp_path, state):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=rf"^cannot write a checkpoint to {tmp_path}/file/inside: "):
        Checkpoints(tmp_path / "file" / "inside", FACTS).save(1, state, [1.0])


def test_a_full_disk_leaves_the_older_checkpoints_and_nothing_else(folder, state, caplog):
    """A limit on the size of files stands in for the disk."""
    before = sorted(path.name for path in folder.iterdir())
    large = jax.tree.map(lambda leaf: np.random.default_rng(0).random((1000, *leaf.shape)), state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"^cannot write a checkpoint to .*: the disk is full"):
            Checkpoints(folder, FACTS).save(4, large, [*LOSSES, 0.5])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not [record for record in caplog.records if record.exc_info]
    assert Checkpoints(folder, FACTS).restore(zeros(state))[1] == LOSSES


def test_checkpoints_of_another_run_are_set_aside_not_removed(folder):
    assert Checkpoints(folder.with_name("none"), FACTS).set_aside() is None
    (folder.with_name("copy.1")).mkdir()
    assert Checkpoints(folder, FACTS).set_aside() == folder.with_name("copy.2")
    assert Checkpoints(folder, FACTS).steps == []
    assert Checkpoints(folder.with_name("copy.2"), FACTS).steps == [2, 3]
