"""The training step of a Llama of 70 billion parameters, to be forecast before anything is rented.

    mpmd-run --dry-run -n 64 --devices H100:8 examples/llama_70b.py

Nothing is created: the state and the batch are shapes.  Each mesh splits weights and moments over `fsdp`,
whose devices are in several processes, and the parts of a layer over `model`, whose devices are in one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import mpmd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.llm.model import Llama

LLAMA = Llama(vocab=128_256, width=8192, layers=80, heads=64, kv_heads=8, hidden=28_672, checkpoint=True)
SPLIT = {
    "embed": P("model", "fsdp"),
    "layers": {
        "attention_norm": P(),
        **dict.fromkeys("qkv", P(None, "fsdp", "model")),
        "o": P(None, "model", None, "fsdp"),
        "mlp_norm": P(),
        **dict.fromkeys(("gate", "up"), P(None, "fsdp", "model")),
        "down": P(None, "model", "fsdp"),
    },
    "norm": P(),
    "head": P("fsdp", "model"),
}
"""How each parameter is split: layers are stacked in the first dim, which stages divide."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", type=int, default=16)
    parser.add_argument("--model", type=int, default=8, help="devices that share each layer")
    parser.add_argument("--batch", type=int, default=256, help="rows of 8,192 tokens")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--schedule", default="1f1b")
    given = parser.parse_args()

    fsdp = jax.device_count() // given.meshes // given.model
    topology = mpmd.make_topology(
        {f"m{k}": {"fsdp": fsdp, "model": given.model} for k in range(given.meshes)}
    )
    optimizer = optax.adam(1e-4)

    def init() -> Any:
        params = LLAMA.init(jax.random.key(0))
        return params, optimizer.init(params)

    def train_step(state: Any, batch: Any) -> Any:
        params, moments = state
        of_loss = mpmd.accumulate_gradients(LLAMA.loss, given.microbatches, weighted=True)
        loss, grads = of_loss(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    state = jax.eval_shape(init)
    rows = jax.ShapeDtypeStruct((given.batch, 8192), jnp.int32)
    batch = dict.fromkeys(("ids", "targets", "segments", "positions"), rows)
    of_moments = optax.tree.map_params(
        optimizer, lambda _, spec: spec, state[1], SPLIT, transform_non_params=lambda _: P()
    )
    config = mpmd.make_config(
        topology, stages="auto", schedule=given.schedule, in_shardings=((SPLIT, of_moments), P("fsdp"))
    )
    mpmd.jit(train_step, config, donate_argnums=0).compiled(state, batch)


if __name__ == "__main__":
    main()
