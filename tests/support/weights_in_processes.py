"""Weights in files of safetensors, written and read by one or several processes; each prints one JSON line.

    python -m tests.support.weights_in_processes STAGES DEVICES save|load FOLDER

`save` takes a step and writes the weights; `load` reads them into the state of a step for other meshes.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

import mpmd
from tests.support.stacked_training import batch, init, jitted

NAMES = {
    "['inward']": mpmd.safetensors.Stored("first.weight", axes=(1, 0)),
    "['layers']['w']": mpmd.safetensors.Stored("layers.{k}.weight", axes=(1, 0)),
    "['layers']['b']": "layers.{k}.bias",
    "['outward']": "last.weight",
}


def main(stages: int, devices: int, action: str, folder: str) -> None:
    if not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", stages * devices)
    key = jax.random.key(7)
    compiled = jitted(stages, devices).compiled(jax.eval_shape(init, key), *batch())
    if action == "save":
        state, _ = compiled(compiled.arguments.init(init, key), *batch())
        mpmd.safetensors.save(folder, state["params"], NAMES, max_file_bytes=3000)
        params = state["params"]
    else:
        params = mpmd.safetensors.restore(folder, compiled.arguments.abstract[0]["params"], NAMES)
        compiled({**compiled.arguments.init(init, key), "params": params}, *batch())
        params = mpmd.safetensors.restore(folder, compiled.arguments.abstract[0]["params"], NAMES)
    fetched = jax.tree.map(np.asarray, mpmd.fetch(params))
    sums = {
        name: float(np.sum(leaf)).hex()
        for name, leaf in (("in", fetched["inward"]), ("out", fetched["outward"]))
    }
    sums |= {name: float(np.sum(fetched["layers"][name])).hex() for name in ("w", "b")}
    print(json.dumps({"process": jax.process_index(), "sums": sums}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
