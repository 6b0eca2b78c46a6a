"""The language model: packed text, the numbers of `jax.jit`, and a run that goes on as if never stopped."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import mpmd
from examples.llm.data import BEGIN, VOCAB, Batches, documents, packed
from examples.llm.model import Llama
from examples.llm.train import Job, first_state, init, make_step, train
from mpmd.errors import CheckpointError, ConfigError
from tests.repo.tree import ROOT

SMALL = {
    "steps": 5, "batch": 4, "length": 32, "layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 32,
    "warmup": 2, "learning_rate": 1e-2, "microbatches": 2, "log_every": 1,
}  # fmt: skip


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)


@pytest.fixture
def padded_text(monkeypatch):
    """Documents of which no two fit into a row."""

    def short(held_out):
        return [text[: 18 + k % 12] for k, text in enumerate(documents(held_out)[:40]) if len(text) > 30]

    monkeypatch.setattr("examples.llm.train.documents", short)
    return short


@pytest.fixture
def compiled_once(monkeypatch):
    """Runs of one job share what they compile: a step and an evaluation, told apart by their schedules."""
    made, jit = {}, mpmd.jit
    shared = lambda fn, config, **more: made.setdefault(config.schedule, jit(fn, config, **more))  # noqa: E731
    monkeypatch.setattr(mpmd, "jit", shared)


def drawn(init_fn):
    """Random values as a function would create them, without compiling it."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda of: rng.uniform(0, 0.1, of.shape).astype(of.dtype), jax.eval_shape(init_fn))


def written(folder):
    """The metrics of a run by step; of a step that was taken again the last ones."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        values.pop("seconds", None)
        found.setdefault(values.pop("step"), {}).update(values)
    return found


def test_it_learns_as_under_jit_and_goes_on_bit_for_bit(tmp_path, two_devices, padded_text, compiled_once):
    job = Job(**SMALL, dtype="float32", evaluate_every=0, checkpoint_every=3, out=str(tmp_path / "whole"))
    plain = drawn(functools.partial(init, job))
    mpmd.checkpoint.save(tmp_path / "whole" / "checkpoints", 0, plain, job.facts)
    state = mpmd.fetch(train(job))
    metrics = written(tmp_path / "whole")
    losses = [metrics[step]["loss"] for step in range(1, 6)]
    assert losses[-1] < losses[0]

    batches = Batches(packed(padded_text(False), 32), 4, 5)
    counts = {(rows > 0).sum() for batch in batches.iterate(0) for rows in np.split(batch["segments"], 2)}
    assert len(counts) > 1  # so that a mean of the means of microbatches would be another loss
    whole_batch, expected = jax.jit(functools.partial(make_step(job), num_microbatches=1)), []
    for batch in batches.iterate(0):
        plain, scalars = whole_batch(plain, batch)
        expected.append(float(scalars["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # Adam divides gradients by their size, which enlarges rounding errors of those near zero.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3), state["params"], plain["params"])

    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "3", stopped / "checkpoints" / "3")
    again = mpmd.fetch(train(dataclasses.replace(job, out=str(stopped))))
    assert written(stopped) == {step: metrics[step] for step in (4, 5)}
    jax.tree.map(np.testing.assert_array_equal, again, state)

    with pytest.raises(CheckpointError, match="^.* is of another run: seed is 0 there, 1 here\n"):
        first_state(dataclasses.replace(job, seed=1), None)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"plan": "auto"}, {"meshes": 1}, {"schedule": "zb_h1"}], ids=str)
def test_ways_to_run_it_agree(tmp_path, two_devices, how):
    def losses(name, **more):
        train(Job(**SMALL | more, evaluate_every=2, out=str(tmp_path / name)))
        found = written(tmp_path / name)
        assert [step for step, values in found.items() if "held_out_loss" in values] == [2, 4, 5]
        return [found[step]["held_out_loss"] for step in (2, 4, 5)]

    assert losses("a", **how) == pytest.approx(losses("b"), rel=2e-3)


def test_what_cannot_be_used_is_said(tmp_path, two_devices, monkeypatch):
    with pytest.raises(ConfigError, match="^--plan is 'best'\n"):
        train(Job(**SMALL, plan="best", out=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="^--tensorboard needs a package: pip install tensorboardX$"):
        train(Job(**SMALL, tensorboard=True, out=str(tmp_path)))


def test_each_token_is_packed_once():
    texts = [np.r_[BEGIN, np.full(size, 7 + k)].astype(np.int32) for k, size in enumerate((70, 3, 20, 31, 9))]
    rows = packed(texts, 32)
    counted = rows["segments"] > 0
    assert sorted(rows["targets"][counted]) == sorted(np.concatenate([text[1:] for text in texts]))
    assert not rows["ids"][~counted].any()
    assert len(rows["ids"]) == 5  # 133 tokens in rows of 32
    for ids, segments, positions in zip(rows["ids"], rows["segments"], rows["positions"], strict=True):
        for segment in set(segments) - {0}:
            piece = segments == segment
            assert list(positions[piece]) == list(range(piece.sum()))
            assert len(set(ids[piece]) - {BEGIN}) == 1


def test_each_epoch_has_each_row_once():
    rows = {"ids": np.arange(10)}
    batches = Batches(rows, size=4, steps=5)
    order = np.concatenate([batch["ids"] for batch in batches.iterate(0)])
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert list(order[:10]) != list(order[10:])
    for step, batch in enumerate(batches.iterate(3), 3):
        assert np.array_equal(batch["ids"], batches[step]["ids"])


def test_held_out_documents_are_not_trained_on():
    train_on, held_out = ({text.tobytes() for text in documents(of)} for of in (False, True))
    assert train_on and held_out and not train_on & held_out


def test_a_document_in_a_row_of_others_is_as_alone():
    model = Llama(VOCAB, width=16, layers=1, heads=4, kv_heads=2, hidden=32, dtype="float32")
    ids, segments, positions = np.zeros((3, 3, 12), np.int32)
    first, second = np.arange(5) + 20, np.arange(6) + 40
    for row, at, piece in ((0, 0, first), (0, 5, second), (1, 0, first), (2, 0, second)):
        where = row, slice(at, at + len(piece))
        ids[where], segments[where], positions[where] = piece, 1 + bool(at), np.arange(len(piece))
    logits = jax.jit(model.logits)(drawn(lambda: model.init(jax.random.key(0))), ids, segments, positions)
    np.testing.assert_allclose(logits[0, :5], logits[1, :5], atol=1e-5)
    np.testing.assert_allclose(logits[0, 5:11], logits[2, :6], atol=1e-5)
    assert abs(logits[0, 5] - logits[0, 0]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_processes_are_killed_and_go_on_as_one_that_was_not(tmp_path):
    sizes = {**SMALL, "layers": 4, "steps": 8, "checkpoint_every": 3, "evaluate_every": 4}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)

    def start(folder, *launcher):
        command = [sys.executable, *launcher, "-m", "examples.llm.train", *options, f"--out={folder}"]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    alone, together = tmp_path / "alone", tmp_path / "together"
    with start(alone) as child:
        _, errors = child.communicate(timeout=150)
        assert child.returncode == 0, errors
    launcher = "-m", "mpmd.tools.run", "-n", "4"
    with start(together, *launcher) as child:
        assert any("step 5:" in line for line in child.stdout)
        child.kill()
    assert max(written(together)) < 8
    with start(together, *launcher) as child:
        _, errors = child.communicate(timeout=150)
        assert child.returncode == 0, errors
    assert written(together) == written(alone)
