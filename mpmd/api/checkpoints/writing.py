"""One checkpoint while it is written: the pieces of this process, and the description of all."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpmd.api.checkpoints import files
from mpmd.api.checkpoints import folder as folders
from mpmd.api.checkpoints.pieces import Box, as_box, held, replicas_that_differ, writers
from mpmd.api.checkpoints.restore import SaveRequest
from mpmd.brief import bytes_text, seconds_text
from mpmd.errors import CheckpointError

log = logging.getLogger("mpmd.checkpoint")

Pieces = dict[tuple[int, Box], np.ndarray]
"""By the position of the leaf, and the box."""


class CheckpointWriter:
    """The work of this process at a checkpoint, in the order of its methods; process 0 has more.

    Attributes:
        what: is done, for messages.
        notes: warnings, in process 0.
    """

    def __init__(self, request: SaveRequest, until_complete: contextlib.ExitStack) -> None:
        """Takes the checkpoint, and a stack that is closed when it is complete or given up."""
        self.what = f"write a checkpoint to {request.root}"
        self.notes: list[str] = []
        self._request, self._until_complete = request, until_complete
        self._begin = time.perf_counter()
        self._kinds = [leaf.kind for leaf in request.leaves]
        self._pieces: Pieces = {}
        self._own: list[tuple[int, Box]] = []

    @property
    def folder(self) -> Path:
        """Where it is while it is written."""
        return folders.unfinished(self._request.root, self._request.step)

    def begin(self, copies: Pieces | None = None) -> list[Any]:
        """Takes the values of the state, and creates the folder; which pieces this process holds.

        Args:
            copies: arrays of an earlier checkpoint to copy the values into; without them the values stay
                where they are, and must not change.
        """
        for k, leaf in enumerate(self._request.leaves):
            for box, data in held(leaf):
                self._pieces[k, box] = data if copies is None else _copied(data, copies.get((k, box)))
        if copies is not None:
            copies.clear()
            copies.update(self._pieces)
        if jax.process_index() == 0:
            root, step = self._request.root, self._request.step
            self._until_complete.enter_context(folders.writing(root))
            self._until_complete.callback(folders.discard, root, step)
            folders.prepare(root, step)
        return list(self._pieces)

    def choose(self, claims: Sequence[Sequence[Any]]) -> None:
        """Takes the pieces that each process holds, and finds those that this one writes.

        Raises:
            CheckpointError: no process holds some of a leaf, or they hold different pieces of it.
        """
        owners = writers(self._kinds, [[(k, as_box(box)) for k, box in of] for of in claims])
        self._own = [piece for piece, owner in owners.items() if owner == jax.process_index()]

    def write(self) -> list[Any]:
        """Writes this process's pieces and reads them back.

        Returns:
            For each piece that it holds the leaf, box, checksum, and name; None for those of others.
        """
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder}, which process 0 created, is not there\n"
                "  all processes must see the same folder"
            )
        digests = {piece: files.digest(data) for piece, data in self._pieces.items()}
        names = {piece: str(number) for number, piece in enumerate(self._own)}
        if names:
            own = self.folder / f"process_{jax.process_index()}"
            files.write(own, {name: self._pieces[piece] for piece, name in names.items()})
            folders.flush(own)
            for piece, name in names.items():
                self._read_back(piece, files.read(own, name), digests[piece])
        return [[*piece, digest, names.get(piece)] for piece, digest in digests.items()]

    def _read_back(self, piece: tuple[int, Box], back: np.ndarray, digest: int) -> None:
        data = self._pieces[piece]
        if files.digest(back) != digest or (back.shape, back.dtype) != (data.shape, data.dtype):
            raise CheckpointError(f"{self._kinds[piece[0]]} was written, and reads differently")

    def complete(self, written: Sequence[Sequence[Any]]) -> None:
        """Describes the checkpoint and gives it its name, in process 0.

        Args:
            written: what `write` returned in every process.
        """
        if jax.process_index():
            return
        request = self._request
        owned = [
            [process, k, box, name, digest]
            for process, of in enumerate(written)
            for k, box, digest, name in of
            if name is not None
        ]
        leaves = [[kind.path, kind.shape, kind.dtype] for kind in self._kinds]
        manifest = {
            "format": 1,
            "step": request.step,
            "leaves": leaves,
            "pieces": owned,
            "extra": request.extra,
        }
        manifest |= {} if request.metric is None else {"metric": request.metric}
        folders.describe(request.root, request.step, manifest)
        held_by = [[(k, box, digest) for k, box, digest, _ in of] for of in written]
        self.notes = replicas_that_differ(self._kinds, held_by)
        self.notes += folders.complete(request.root, request.step, request.keep)
        size = bytes_text(sum(data.nbytes for data in self._pieces.values()))
        took = seconds_text(time.perf_counter() - self._begin)
        log.info("wrote step %d to %s in %s, %s of this process", request.step, request.root, took, size)


def _copied(data: np.ndarray, copy: np.ndarray | None) -> np.ndarray:
    """A copy, in the memory of an earlier one if there is one: fresh memory takes longer."""
    if copy is None or (copy.shape, copy.dtype) != (data.shape, data.dtype):
        return np.array(data)
    np.copyto(copy, data)
    return copy
