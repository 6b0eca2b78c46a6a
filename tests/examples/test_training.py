"""The whole example: it learns, resumes where it was, and reports what it did."""

from __future__ import annotations

import dataclasses
import json
import signal

import jax
import numpy as np
import pytest

from examples.pipelined_transformer import data, main, report
from examples.pipelined_transformer.checkpoint import Checkpoints
from examples.pipelined_transformer.main import TrainingRun, train
from examples.pipelined_transformer.train_step import make_state
from mpmd.errors import ConfigError

pytestmark = pytest.mark.usefixtures("plain_xla")


@pytest.fixture(scope="module")
def ctrl_c_after():
    """Makes a step counter that presses Ctrl-C when a step is done."""

    def make(step):
        def step_done(progress, done, *args, **kwargs):
            if done == step:
                signal.raise_signal(signal.SIGINT)

        return step_done

    return make


def test_a_run_reports_and_draws_what_it_did(tiny, tmp_path, capsys):
    wanted = {"check": True, "check_steps": 3}
    outcome = train(tiny(steps=12, learning_rate=1e-2, output_dir=str(tmp_path), **wanted))
    assert outcome.backend == "native" and outcome.fallbacks == 0
    assert outcome.steps == 12 and outcome.check_steps == 3
    assert outcome.loss_last < outcome.loss_first
    assert 0 <= outcome.max_rel_diff < 1e-3
    assert 0 < outcome.bubble_measured < 1
    assert set(outcome.peak_bytes) == {"m0", "m1"} and min(outcome.peak_bytes.values()) > 0
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert last["steps"] == 12 and last["loss_last"] == pytest.approx(outcome.loss_last, rel=1e-5)
    assert any(line.startswith("step  1/12   loss ") for line in lines)
    assert sum("from jax.jit" in line for line in lines if line.startswith("step")) == 3
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"stages": "layers"}, {"stages": "auto"}, {"scan": True}, {"scan": True, "stages": "auto"}],
    ids=str,
)
def test_a_model_without_names_learns_and_resumes(tiny, tmp_path, how):
    """The checkpoint has whole arrays: a run in stages of another division goes on from it."""
    options = {"check": True, "layers": 4, "checkpoint_dir": str(tmp_path / "saved"), **how}
    first = train(tiny(steps=3, check_steps=3, **options))
    assert 0 <= first.max_rel_diff < 1e-3 and first.check_steps == 3
    again = train(tiny(steps=5, check_steps=2, resume=True, num_stages=4, **options))
    assert again.steps == 5 and 0 <= again.max_rel_diff < 1e-3


def test_stages_that_do_not_fit_the_model_are_refused(tiny):
    with pytest.raises(ConfigError, match="--stages is 'blocks'; use names, layers or auto"):
        tiny(stages="blocks")
    with pytest.raises(ConfigError, match="with --scan the blocks have none"):
        tiny(stages="names", scan=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["", "native", "xla"])
def test_both_backends_are_timed_at_the_end(tiny, backend, capsys):
    outcome = train(tiny(steps=2, backend=backend, compare_steps=1 if backend else 0))
    assert outcome.backend == (backend or "native") and outcome.fallbacks == 0
    out = capsys.readouterr().out
    assert ("one step: native " in out) == bool(backend)
    last = json.loads(out.splitlines()[-1])
    assert (last["native_step_ms"] is not None) == (last["xla_step_ms"] is not None) == bool(backend)


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_the_same_loss_curve(tiny, monkeypatch, tmp_path, ctrl_c_after):
    config = tiny(output_dir=str(tmp_path))
    whole = TrainingRun(config)
    with monkeypatch.context() as patch:
        patch.setattr(report.Progress, "step_done", ctrl_c_after(3))
        assert whole.train() is None
    assert (whole.step, whole.checkpoints.steps) == (3, [3])
    resumed = TrainingRun(dataclasses.replace(config, resume=True))
    assert resumed.step == 3
    assert resumed.train() is not None and whole.train() is not None
    assert resumed.step == whole.step == 6
    assert resumed.losses == whole.losses


def test_a_second_ctrl_c_is_at_once():
    before = signal.getsignal(signal.SIGINT)
    with main.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_left_to_train(tiny, tmp_path):
    config = tiny(steps=1, num_stages=2, output_dir=str(tmp_path))
    shapes = jax.eval_shape(lambda: make_state(config))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    dataset = data.load(config.data, config.vocab_size, config.seq_len, 1 << 20)
    Checkpoints(tmp_path / "checkpoints", main.facts(config, dataset)).save(1, state, [5.0])
    with pytest.raises(ConfigError, match=r"^the checkpoint is of step 1, and --steps is 1\n"):
        TrainingRun(dataclasses.replace(config, resume=True))


def test_an_output_folder_that_cannot_be_made(tiny, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=rf"^cannot write to --output_dir={tmp_path}/file/inside: "):
        TrainingRun(tiny(output_dir=str(tmp_path / "file" / "inside")))


@pytest.mark.slow
def test_a_batch_is_split_over_the_devices_of_a_mesh(tiny):
    run = TrainingRun(tiny(steps=2, devices_per_mesh=2, check=True, check_steps=2))
    assert run.train() is not None
    assert 0 <= run.check.max_rel_diff < 1e-3
    assert len(run.state.params["block_0"]["up"]["kernel"].sharding.device_set) == 2
