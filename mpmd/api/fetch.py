"""Results of several meshes on one device, where they can be combined."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from mpmd.runtime.channels.everywhere import everywhere
from mpmd.runtime.processes.world import world
from mpmd.tracing.stages.stacked.stacked import Stacked, is_stacked


def fetch(tree: Any, device: jax.Device | None = None) -> Any:
    """The arrays of a pytree on one device, so that they can be combined op by op.

        grads_norm = optax.tree.norm(mpmd.fetch(grads))

    The results of a step are on the meshes that computed them, and JAX combines arrays of the same devices
    only.  An array on a CPU device that a topology made shares its memory with the result.

    Args:
        tree: arrays on any meshes, sharded or not; other leaves are left as they are.
        device: where to; by default the first of `jax.local_devices()`.

    Returns:
        The same pytree, with arrays on `device`, a whole one for each `Stacked`; they may still be computed.
        In several processes every process must call it for the same pytree, and gets all arrays, on the first
        of its own devices or on `device`.

    Raises:
        PeerError: another process failed, or calls it for other arrays.
    """
    to = jax.local_devices()[0] if device is None else device
    if world() is not None:
        flat, structure = tree_flatten_with_path(tree)
        paths, leaves = [keystr(path) for path, _ in flat], [leaf for _, leaf in flat]
        tree = jax.tree.unflatten(structure, everywhere(paths, leaves))

    def on_device(leaf: Any) -> Any:
        if isinstance(leaf, Stacked) and not any(isinstance(part, jax.Array) for part in leaf.parts):
            return leaf.whole()
        if isinstance(leaf, Stacked):
            return jax.numpy.concatenate([on_device(part) for part in leaf.parts], leaf.dim)
        return jax.device_put(leaf, to) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(on_device, tree, is_leaf=is_stacked)
