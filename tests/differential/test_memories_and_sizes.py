"""Meshes of different sizes, with shardings of their own, and state in host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import FragmentError
from tests.support.comparing import copied, relative_difference, sgd_momentum, training_step
from tests.support.models import MODELS

pytestmark = pytest.mark.usefixtures("plain_xla")

SIZES = {
    "one and two": ({"m0": 1, "m1": 2}, None),
    "two and four": ({"m0": {"m0_data": 2}, "m1": {"m1_data": 4}}, (P("m0_data"), P("m1_data"))),
    "four and one": (
        {"m0": {"m0_data": 2, "m0_model": 2}, "m1": {"m1_data": 1}},
        (P("m0_data", "m0_model"), None),
    ),
}
FAST = {"two and four"}


def trained(meshes, **options):
    """Two steps of an MLP on two meshes; what they give, what `jax.jit` gives, and the compiled step."""
    params, loss, batch = MODELS["mlp"].build(2)
    init, update = sgd_momentum()
    step = training_step(loss, 2, update)
    config = mpmd.make_config(mpmd.make_topology(meshes), {"stage0": "m0", "stage1": "m1"}, **options)
    pipelined, plain = mpmd.jit(step, config, donate_argnums=0), jax.jit(step)
    got = pipelined(pipelined(copied(init(params)), *batch)[0], *batch)
    want = plain(plain(init(params), *batch)[0], *batch)
    assert relative_difference(got, want) <= 1e-5
    return got, pipelined.compiled(init(params), *batch)


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in SIZES])
def test_what_is_sent_between_meshes_of_different_sizes_is_sharded_anew(case):
    meshes, specs = SIZES[case]
    options = {} if specs is None else {"in_shardings": (None, *specs)}
    _, compiled = trained(meshes, **options)
    if case == "two and four":
        sent = {kind.sharding for channel in compiled.program.channels for kind in channel.types}
        assert sent == {'<@m0, [{"m0_data"}, {}]>', '<@m1, [{"m1_data"}, {}]>'}


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_optimizer_state_in_host_memory(devices):
    host, device = ({s: f"m{k}{kind}" for k, s in enumerate(("s0", "s1"))} for kind in ("#pinned_host", ""))
    state = (device, host)
    (new, _), compiled = trained(
        {"m0": devices, "m1": devices}, input_meshes=(state, None, None), output_meshes=(state, None)
    )
    kinds = [{leaf.sharding.memory_kind for leaf in jax.tree.leaves(part)} for part in new]
    assert kinds == [{"device"}, {"pinned_host"}]
    assert "in pinned_host = copy" in compiled.as_text("program")


def test_a_fragment_that_needs_more_memory_than_there_is():
    """64 TiB cannot be had; a smaller batch goes through afterwards."""

    def spread(x):
        return jax.lax.sort(jnp.tanh(jnp.outer(x, x)), dimension=0).sum(1) + x

    first = mpmd.named_computation(lambda w, x: w * x, name="first")
    config = mpmd.make_config(mpmd.make_topology({"m0": 1, "m1": 1}), {"first": "m0", "spread": "m1"})
    step = mpmd.jit(lambda w, x: mpmd.named_computation(spread, name="spread")(first(w, x)), config)
    compiled = step.lower(2.0, jnp.ones(1 << 22)).compile(runtime=mpmd.RuntimeOptions(blocking=True))
    message = r"^fragment 'p1_spread.*' failed on mesh 'm1', step 0: JaxRuntimeError: RESOURCE_EXHAUSTED"
    with pytest.raises(FragmentError, match=message):
        compiled(2.0, jnp.ones(1 << 22))
    assert step(2.0, jnp.ones(8)).shape == (8,)
