"""`mpmd-run --dry-run`: the page of a step in a world that is not here."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.repo.tree import ROOT
from tests.support.launching import output

SCRIPT = """
import jax, jax.numpy as jnp, mpmd
from jax.sharding import PartitionSpec as P

place = jax.process_index(), jax.process_count(), jax.device_count(), jax.local_device_count()
print("place", place, jax.distributed.is_initialized())
topology = mpmd.make_topology({"m0": {"data": 2, "model": 2}, "m1": {"data": 2, "model": 2}})
split = {"up": P(None, "model"), "down": P("model", None)}
layers, width, rows = 4, 64, 2048


def loss(params, x):
    for w in params:
        x = x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])
    return (x * x).mean()


shardings = [split] * layers, P("data")
config = mpmd.make_config(topology, stages="auto", schedule="1f1b", in_shardings=shardings)


@mpmd.jit(config, donate_argnums=0)
def train_step(params, x):
    value, grads = mpmd.accumulate_gradients(loss, num_microbatches=4)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


params = [{"up": of(width, 4 * width), "down": of(4 * width, width)}] * layers
train_step(params, of(rows * 4, width))
print("after the step")
"""


def dry_run(tmp_path, *options):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return output([sys.executable, "-m", "mpmd.tools.run", "--dry-run", *options, str(script)])


def test_a_world_of_gpus_and_what_would_make_the_step_fit(tmp_path):
    folder = tmp_path / "page"
    done = dry_run(tmp_path, "-n", "4", "--devices", "H100:2", "--memory", "5.5MiB", "--out", str(folder))
    assert done.returncode == 1, done.stderr
    page = done.stdout
    assert "place (0, 4, 8, 2) True" in page
    assert "after the step" not in page
    assert "dry run of train_step: 4 processes x 2 H100, 8 devices" in page
    assert "all with kernels planned for H100" in page
    assert "it does not fit: a device has 5.5 MiB, too little for m0" in page
    assert "it fits with stages=mpmd.by_cost(rematerialise=True)" in page
    figures = json.loads((folder / "forecast.json").read_text())
    assert set(figures["peak_bytes"]) == {"m0", "m1"}
    assert not figures["fits"]
    assert figures["step_s"] > 0
    for mesh, held in figures["held_bytes"].items():
        assert sum(held.values()) == pytest.approx(figures["peak_bytes"][mesh], abs=len(held))
    # Layers are split over "model", whose devices are in one process.  m0 has two: in each of 4 microbatches
    # it adds up f32[1024, 64] twice forward, and once backward: nothing reads the gradient of its input.
    assert re.search(r"all-reduce +within a process +12 +3\.0 MiB .* m0\n", page)
    assert "<svg" in (folder / "timeline.svg").read_text()


@pytest.mark.slow
def test_this_machine_is_forecast_by_timed_fragments(tmp_path):
    done = dry_run(tmp_path, "-n", "2", "--devices", "4")
    assert done.returncode == 0, done.stderr
    assert "2 processes x 4 host, 8 devices" in done.stdout
    assert "all compiled and timed here" in done.stdout


@pytest.mark.slow
def test_fragments_that_cannot_be_timed_are_said_to_be_priced(tmp_path):
    done = dry_run(tmp_path, "-n", "4", "--devices", "2")
    assert done.returncode == 0, done.stderr
    assert "timed here" not in done.stdout
    assert "not timed, but priced for a core of a server" in done.stdout


@pytest.mark.slow
def test_a_script_without_a_step_is_told(tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("print('nothing')\n")
    done = output([sys.executable, "-m", "mpmd.tools.run", "--dry-run", "-n", "2", str(script)])
    assert done.returncode == 1
    assert "ended without a step that mpmd.jit compiled" in done.stderr


@pytest.mark.slow
def test_the_guide_shows_what_the_command_prints():
    """A page of 512 devices, but for the seconds that it took."""
    done = output(
        [sys.executable, "-m", "mpmd.tools.run", "--dry-run", "-n", "64", "--devices", "H100:8"]
        + ["examples/llama_70b.py"],
        seconds=240,
    )
    assert done.returncode == 0, done.stderr
    guide = (ROOT / "docs" / "guides" / "dry-run.md").read_text()
    shown = guide.partition("```text\n")[2].partition("\n```")[0]
    without = [re.sub(r"512 devices; \d+ s", "512 devices", text.strip()) for text in (done.stdout, shown)]
    assert without[0] == without[1]
