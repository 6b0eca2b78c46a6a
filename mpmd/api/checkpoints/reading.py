"""Leaves of a checkpoint, read from its pieces into the arrays that are wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpmd.api.checkpoints import files, folder
from mpmd.api.checkpoints.pieces import Box, Leaf, LeafKind, as_box, box_of, intersection, within
from mpmd.api.stored_forms import weakly_typed
from mpmd.jax_compat import ShapedArray, as_key, is_key
from mpmd.jax_distributed import absent_array_maker


class CheckpointReader:
    """Reads the leaves of one checkpoint; keeps the pieces of one leaf at a time."""

    def __init__(self, root: Path, step: int, manifest: dict[str, Any]) -> None:
        self._root, self._step = root, step
        self._paths = {path: k for k, (path, _, _) in enumerate(manifest["leaves"])}
        self._of_leaf: dict[int, list[tuple[int, Box, str, int]]] = {}
        for process, k, box, name, digest in manifest["pieces"]:
            self._of_leaf.setdefault(k, []).append((process, as_box(box), name, digest))
        self._known: dict[tuple[int, str], np.ndarray] = {}

    def arrays(self, leaf: Leaf) -> list[Any]:
        """The arrays of a leaf, with the shardings of those of `leaf`.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        self._known.clear()
        return [self._array(leaf.kind, offset, like) for offset, like in leaf.arrays]

    def _array(self, kind: LeafKind, offset: tuple[int, ...], like: Any) -> Any:
        sharding, shape, dtype = getattr(like, "sharding", None), tuple(like.shape), like.dtype
        tail: tuple[int, ...] = ()
        if is_key(dtype):  # kept as integers
            data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, dtype=dtype)))
            dtype, tail = data.dtype, data.shape
        if sharding is None:
            return self._box(kind, box_of((slice(None),) * len(shape), shape, offset), tail, dtype)
        weak = bool(getattr(getattr(like, "aval", like), "weak_type", False))
        if not sharding.has_addressable_devices:
            aval = ShapedArray((*shape, *tail), np.dtype(dtype), weak_type=weak)
            made = absent_array_maker(aval, sharding)()
        else:
            made = jax.make_array_from_callback(
                (*shape, *tail),
                sharding,
                lambda index: self._box(kind, box_of(index, shape, offset), tail, dtype),
            )
            made = weakly_typed(made) if weak else made
        return as_key(made, like.dtype) if is_key(like.dtype) else made

    def _box(self, kind: LeafKind, box: Box, tail: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A box of a leaf, as an array of its own: devices on CPUs may keep and reuse its memory."""
        made = np.zeros((*(stop - start for start, stop in box), *tail), dtype)
        for process, has, name, digest in self._of_leaf.get(self._paths[kind.path], ()):
            common = intersection(box, has)
            if common is not None:
                piece = self._piece(kind, process, name, digest)
                made[within(common, box)] = piece[within(common, has)]
        return made

    def _piece(self, kind: LeafKind, process: int, name: str, digest: int) -> np.ndarray:
        if (process, name) not in self._known:
            try:
                found = files.read(self._root / str(self._step) / f"process_{process}", name)
            except files.FILE_ERRORS as error:
                raise folder.damaged(self._root, self._step, f"{kind}: {files.reason(error)}") from error
            if files.digest(found) != digest:
                raise folder.damaged(self._root, self._step, f"{kind} has other bytes than were saved")
            self._known[process, name] = found
        return self._known[process, name]
