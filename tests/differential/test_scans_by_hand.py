"""Scanned models divided by `mpmd.split` against the same models rewritten by hand: numbers, messages, bytes.

Each case says how the layers are run; both forms of the model are written from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import mpmd
from examples.workloads.models import token_batch
from mpmd.runtime.program.stream_memory import predict_memory
from tests.support.comparing import copied, relative_difference
from tests.support.layered_models import block, block_params, entropy, token_params

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_xla")]

MICROBATCHES, LAYERS = 4, 4
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
SHARDED = {"w": PartitionSpec(None, None, "model"), "b": PartitionSpec(), "scale": PartitionSpec()}


def nested(p, x):
    """A layer that is a scan of its own."""
    inner = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), p)
    return jax.lax.scan(lambda h, q: (block(q, h), None), x, inner)[0]


def named(p, x):
    return (
        x + checkpoint_name(jnp.tanh(checkpoint_name(x @ p["w"], "product") + p["b"]), "hidden") * p["scale"]
    )


def matrices(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T * p["scale"]


@dataclasses.dataclass(frozen=True)
class ScanByHand:
    layer: Callable[..., Any] = block
    around: Callable[..., Any] = lambda body: body
    scan: Any = dataclasses.field(default_factory=dict)
    lengths: tuple[int, ...] = (2, 2)
    returns_sizes: bool = False
    shares_a_weight: bool = False
    mesh: Any = 1

    def run(self, params, x, rows):
        """Some layers: their carry, and a size for each."""

        def body(x, p):
            x = self.layer(p, x)
            if self.shares_a_weight:
                x = x + jnp.tanh(x @ params["shared"])
            return x, (jnp.mean(x**2) if self.returns_sizes else None)

        return jax.lax.scan(self.around(body), x, rows, **self.scan)

    def total(self, params, x, sizes, targets):
        loss = entropy(x @ params["head"], targets)
        return loss + 1e-2 * sizes.mean() if self.returns_sizes else loss

    def scanned(self, params, ids, targets):
        x, sizes = self.run(params, params["embed"][ids] + params["pos"], params["layers"])
        return self.total(params, x, sizes, targets)

    def by_hand(self, params, ids, targets):
        """A stack and a name for each stage; stages with later rows come first in a reversed scan."""
        x, found, stages = None, [], range(len(self.lengths))
        for stage in stages:

            def forward(params, rows, x, sizes, stage=stage):
                x = params["embed"][ids] + params["pos"] if stage == 0 else x
                x, own = self.run(params, x, rows)
                if stage < stages[-1]:
                    return x, own
                order = [*sizes, own][:: -1 if self.scan.get("reverse") else 1]
                return self.total(params, x, jnp.concatenate(order) if self.returns_sizes else None, targets)

            named = mpmd.named_computation(forward, name=f"stage{stage}")
            reads = ["shared"] * self.shares_a_weight
            reads += ["embed", "pos"] * (stage == 0) + ["head"] * (stage == stages[-1])
            given = found if stage == stages[-1] and self.returns_sizes else []
            made = named({k: params[k] for k in reads}, params[f"layers{stage}"], x, given)
            if stage < stages[-1]:
                x, own = made
                found.append(own)
        return made


POLICIES = jax.checkpoint_policies
CASES = {
    "plain": ScanByHand(),
    "reverse": ScanByHand(scan={"reverse": True}, lengths=(1, 3)),
    "unrolled": ScanByHand(scan={"unroll": 2}),
    "unrolled unevenly": ScanByHand(scan={"unroll": 3}, lengths=(3, 1)),
    "sizes": ScanByHand(returns_sizes=True),
    "sizes in reverse": ScanByHand(returns_sizes=True, scan={"reverse": True}),
    "shared weight": ScanByHand(shares_a_weight=True),
    "rematerialised": ScanByHand(around=jax.checkpoint),
    "matrices saved": ScanByHand(
        layer=matrices, around=lambda body: jax.checkpoint(body, policy=POLICIES.dots_saveable)
    ),
    "names saved": ScanByHand(
        layer=named,
        around=lambda body: jax.checkpoint(body, policy=POLICIES.save_only_these_names("product")),
    ),
    "nothing saved": ScanByHand(
        layer=matrices, around=lambda body: jax.checkpoint(body, policy=POLICIES.nothing_saveable)
    ),
    "nested": ScanByHand(layer=nested),
    "nested and rematerialised": ScanByHand(layer=nested, around=jax.checkpoint, lengths=(1, 1, 2)),
    "uneven": ScanByHand(lengths=(3, 1)),
    "four stages": ScanByHand(lengths=(1, 1, 1, 1)),
    "sharded layers": ScanByHand(mesh={"data": 2, "model": 2}),
    "sharded and rematerialised": ScanByHand(
        mesh={"data": 1, "model": 2}, around=jax.checkpoint, lengths=(1, 3)
    ),
}


def training(loss):
    def step(params, state, *batch):
        value, grads = mpmd.accumulate_gradients(loss, MICROBATCHES)(params, *batch)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def jitted(case, loss, params, stages=None):
    meshes = [f"m{s}" for s in range(len(case.lengths))]
    names = None if stages else {f"stage{s}": mesh for s, mesh in enumerate(meshes)}
    shardings = {}
    if case.mesh != 1:
        specs = {k: SHARDED if k.startswith("layers") else PartitionSpec() for k in params}
        batch = PartitionSpec("data")
        shardings = {"in_shardings": (specs, None, batch, batch), "out_shardings": (specs, None, None)}
    topology = mpmd.make_topology(dict.fromkeys(meshes, case.mesh))
    config = mpmd.make_config(topology, names, stages=stages, **shardings)
    return mpmd.jit(training(loss), config, donate_argnums=(0, 1))


@pytest.mark.parametrize("name", CASES)
def test_divided_scans_are_those_written_by_hand(name):
    case, batch = CASES[name], token_batch()
    params = token_params(block_params(20, LAYERS))
    if case.shares_a_weight:
        params["shared"] = np.eye(params["pos"].shape[1], dtype=np.float32) / 2
    params = jax.tree.map(np.asarray, params)
    ends = np.cumsum(case.lengths)[:-1]
    rows = [
        dict(zip(params["layers"], of)) for of in zip(*(np.split(a, ends) for a in params["layers"].values()))
    ]
    if case.scan.get("reverse"):
        ends = np.cumsum(case.lengths[::-1])[:-1]
        split = zip(*(np.split(a, ends) for a in params["layers"].values()))
        rows = [dict(zip(params["layers"], of)) for of in split][::-1]
    rewritten = {k: v for k, v in params.items() if k != "layers"}
    rewritten |= {f"layers{stage}": own for stage, own in enumerate(rows)}
    ours = jitted(case, case.scanned, params, mpmd.split("layers", lengths=list(case.lengths)))
    theirs = jitted(case, case.by_hand, rewritten)
    found = ours.lower(params, ADAM.init(params), *batch)
    wanted = theirs.lower(rewritten, ADAM.init(rewritten), *batch)
    assert found.warnings == []
    assert sent(found.program) == sent(wanted.program)
    peaks = [[mesh.peak_bytes for mesh in predict_memory(low.program)] for low in (found, wanted)]
    assert peaks[0] == peaks[1]
    want, got = (params, ADAM.init(params)), copied((params, ADAM.init(params)))
    for _ in range(2):
        *want, want_loss = jax.jit(training(case.scanned))(*want, *batch)
        *got, got_loss = ours(*got, *batch)
    whole = jax.tree.map(np.asarray, got, is_leaf=lambda leaf: isinstance(leaf, mpmd.Stacked))
    assert relative_difference((whole, got_loss), (want, want_loss)) <= 1e-5


def sent(program):
    """The shapes of all messages, without an order."""
    return sorted(str(kind) for channel in program.channels for kind in channel.types)
