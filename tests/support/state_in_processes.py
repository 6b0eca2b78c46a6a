"""Creates, saves and restores a state in one or several processes; each prints one JSON line.

    python -m tests.support.state_in_processes STAGES DEVICES save|load FOLDER

`save` takes three steps from a state that is created where it lies, saves, and goes on for two steps; `load`
takes these two steps from the checkpoint.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import jax
import numpy as np

import mpmd
from tests.support.stacked_training import assert_equal, batch, init, jitted

SAVED = 3


def own_bytes(state: Any) -> int:
    """Bytes of a state in this process."""
    here = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.has_addressable_devices]
    return sum(shard.data.nbytes for leaf in here for shard in leaf.addressable_shards)


def main(stages: int, devices: int, action: str, folder: str) -> None:
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", stages * devices)
    key = jax.random.key(7)
    everywhere = {
        "params": {"inward": True, "layers": None, "outward": True},
        "momenta": None,
        "step": None,
        "key": None,
    }
    compiled = jitted(stages, devices, replicate=(everywhere, None)).compiled(
        jax.eval_shape(init, key), *batch()
    )
    if action == "save":
        state = compiled.init(init, key)
        assert_equal(mpmd.fetch(state), jax.jit(init)(key), 2**-20)
        held = own_bytes(state)
        for _ in range(SAVED):
            state, _ = compiled(state, *batch())
        mpmd.checkpoint.save(folder, SAVED, state, {"stages": stages})
    else:
        restored = mpmd.checkpoint.restore(folder, compiled.abstract_args[0])
        state, held = restored.state, own_bytes(restored.state)
        assert restored.step == SAVED and restored.extra["stages"] > 0
    used = jax.tree.map(bool, compiled.inputs_used)[0]
    x, y = (
        leaf if here else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for leaf, here in zip(batch(), used[1:])
    )
    losses = []
    for _ in range(2):
        state, value = compiled(state, x, y)
        losses.append(float(value).hex())
    sums = [float(np.asarray(state["params"][name]).sum()).hex() for name in ("inward", "outward")]
    found = {"process": jax.process_index(), "losses": losses, "held": held, "used": used[1:], "sums": sums}
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
