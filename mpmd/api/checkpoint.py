"""Checkpoints of state that lies on several meshes, in one process or in several.

    mpmd.checkpoint.save(folder, step, state, {"losses": losses})
    restored = mpmd.checkpoint.restore(folder, compiled.abstract_args[0])

Every array is written once, by a process that holds it, with orbax.  A checkpoint is complete or not there.
It may be restored onto another topology: other processes, stages, devices or platforms, and stacks in other
parts.  In several processes all must call these functions, and see the same folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd.api.checkpoints import files
from mpmd.api.checkpoints import folder as folders
from mpmd.api.checkpoints.pieces import Box, Leaf, LeafKind, as_box, held, leaves_of, writers
from mpmd.api.checkpoints.reading import CheckpointReader
from mpmd.api.checkpoints.together import together
from mpmd.errors import CheckpointError, collect

Folder = str | os.PathLike[str]


class Restored(NamedTuple):
    """A checkpoint: its step, its state, and the values that were saved with it."""

    step: int
    state: Any
    extra: dict[str, Any]


def steps(folder: Folder) -> list[int]:
    """The steps there are complete checkpoints of, oldest first."""
    return folders.steps(Path(folder))


def save(
    folder: Folder, step: int, state: Any, extra: Mapping[str, Any] | None = None, *, keep: int = 2
) -> None:
    """Writes a checkpoint; it returns when the checkpoint is complete.

    Args:
        folder: where the checkpoints of a run are; created if it does not exist.
        step: its number; a checkpoint of the same number is replaced.
        state: a pytree of arrays on any meshes, `mpmd.Stacked`, or NumPy arrays.
        extra: what JSON can hold, to be saved with it; that of process 0.
        keep: how many of the newest checkpoints stay.

    Raises:
        CheckpointError: some process cannot write, as when the disk is full, or orbax is not installed.
            Older checkpoints stay, and nothing of this one.
        PeerError: another process failed; likewise.
    """
    root, leaves, first = Path(folder).absolute(), leaves_of(state), jax.process_index() == 0
    what, started = f"write a checkpoint to {root}", False
    if keep < 1:
        raise CheckpointError(f"keep is {keep}; at least the checkpoint that is written must stay")

    def begin() -> list[Any]:
        nonlocal started
        if first:
            json.dumps(dict(extra or {}))  # raises a TypeError where it was called
            folders.prepare(root, step)
            started = True
        return [[_plain(leaf.kind) for leaf in leaves], list(pieces)]

    def finish() -> None:
        if first:
            found = [[process, *piece] for process, own in enumerate(written) for piece in own]
            plain = [_plain(leaf.kind) for leaf in leaves]
            manifest = {
                "format": 1,
                "step": step,
                "leaves": plain,
                "pieces": found,
                "extra": dict(extra or {}),
            }
            folders.complete(root, step, manifest, keep)

    pieces = {(k, box): data for k, leaf in enumerate(leaves) for box, data in held(leaf)}
    try:
        owners = writers([leaf.kind for leaf in leaves], _claims(together("begin", what, begin)))
        own = {piece: data for piece, data in pieces.items() if owners.get(piece) == jax.process_index()}
        written = together("write", what, lambda: _write(root, step, leaves, own))
        together("complete", what, finish)
    except BaseException:
        if started:
            folders.discard(root, step)
        raise


def restore(folder: Folder, like: Any, step: int | None = None) -> Restored:
    """The state of a checkpoint, each array where `like` says.

    Args:
        folder: where the checkpoints of a run are.
        like: a pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings, such as
            `compiled.abstract_args[0]`.  Leaves without a sharding become NumPy arrays.
        step: which one; by default the newest.

    Raises:
        CheckpointError: there is none, it is damaged, or it has other leaves, shapes or dtypes.
        PeerError: another process failed.
    """
    root = Path(folder).absolute()
    what = f"read a checkpoint in {root}"
    chosen: int = together("step", what, lambda: _newest(root) if step is None else step)[0]
    found: list[tuple[list[Any], dict[str, Any]]] = []

    def read() -> None:
        manifest, leaves = folders.read_manifest(root, chosen), leaves_of(like)
        _compare(
            root, chosen, [_kind(*saved) for saved in manifest["leaves"]], [leaf.kind for leaf in leaves]
        )
        reader = CheckpointReader(root, chosen, manifest)
        found.append(([array for leaf in leaves for array in reader.arrays(leaf)], manifest["extra"]))

    together("read", what, read)
    arrays, extra = found[0]
    return Restored(chosen, jax.tree.unflatten(jax.tree.structure(like), arrays), extra)


def extra(folder: Folder, step: int | None = None) -> dict[str, Any]:
    """The values that were saved with the state of a checkpoint, by default the newest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    root = Path(folder).absolute()
    found: dict[str, Any] = folders.read_manifest(root, _newest(root) if step is None else step)["extra"]
    return found


def _newest(root: Path) -> int:
    found = folders.steps(root)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {root}")
    return found[-1]


def _write(root: Path, step: int, leaves: list[Leaf], pieces: dict[tuple[int, Box], np.ndarray]) -> list[Any]:
    """Writes this process's pieces; for each its leaf, box, name and checksum."""
    part = folders.unfinished(root, step)
    if not part.is_dir():
        raise CheckpointError(
            f"{part}, which process 0 created, is not there\n  all processes must see the same folder"
        )
    names = {(k, box): f"{number}{leaves[k].kind.path}" for number, (k, box) in enumerate(pieces)}
    if pieces:
        arrays = {names[piece]: data for piece, data in pieces.items()}
        files.write(part / f"process_{jax.process_index()}", arrays)
    return [[k, box, names[k, box], files.digest(data)] for (k, box), data in pieces.items()]


def _compare(root: Path, step: int, saved: list[LeafKind], wanted: list[LeafKind]) -> None:
    """Raises a CheckpointError that names every leaf that differs."""
    ours, theirs = ({kind.path: kind for kind in kinds} for kinds in (wanted, saved))
    problems = [f"{kind} is not in it" for path, kind in ours.items() if path not in theirs]
    problems += [f"{kind} is in it, and not expected" for path, kind in theirs.items() if path not in ours]
    problems += [
        f"{theirs[path]} was saved, expected {kind.type_text}"
        for path, kind in ours.items()
        if path in theirs and theirs[path] != kind
    ]
    if problems:
        head = f"the checkpoint of step {step} in {root} is of another state:"
        raise collect(CheckpointError, problems, head)


def _claims(found: list[Any]) -> list[list[tuple[int, Box]]]:
    """The pieces that each process holds.

    Raises:
        CheckpointError: they save different states.
    """
    ours = found[0][0]
    for process, (kinds, _) in enumerate(found):
        differ = [(mine, other) for mine, other in zip(ours, kinds) if mine != other]
        if differ or len(kinds) != len(ours):
            ends = [str(_kind(*kind)) for kind in differ[0]] if differ else [len(ours), len(kinds)]
            raise CheckpointError(
                f"processes save different states\n  process 0: {ends[0]}{'' if differ else ' leaves'}\n"
                f"  process {process}: {ends[1]}{'' if differ else ' leaves'}"
            )
    return [[(k, as_box(box)) for k, box in pieces] for _, pieces in found]


def _plain(kind: LeafKind) -> list[Any]:
    return [kind.path, kind.shape, kind.dtype]


def _kind(path: str, shape: list[int], dtype: str) -> LeafKind:
    return LeafKind(path, tuple(shape), dtype)
