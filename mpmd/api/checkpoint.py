"""Checkpoints of state that lies on several meshes, in one process or in several.

    mpmd.checkpoint.save(folder, step, state, {"losses": losses})
    restored = mpmd.checkpoint.restore(folder, compiled.arguments.abstract[0])

Every array is written once, by a process that holds it, with orbax, and read back.  A checkpoint is complete
or not there.  It may be restored onto another topology: other processes, stages, devices or platforms, and
stacks in other parts.  In several processes all must call these functions, and see the same folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mpmd.api.checkpoints import files
from mpmd.api.checkpoints import folder as folders
from mpmd.api.checkpoints.folder import Keep
from mpmd.api.checkpoints.pieces import (
    Box,
    Leaf,
    LeafKind,
    as_box,
    held,
    leaves_of,
    replicas_that_differ,
    writers,
)
from mpmd.api.checkpoints.restore import CheckpointReader, SaveRequest, step_number
from mpmd.api.checkpoints.together import Processes, all_processes
from mpmd.errors import CheckpointError, collect
from mpmd.runtime.processes.exchange import Alike
from mpmd.support.user_code import warn_user

Folder = str | os.PathLike[str]


class Restored(NamedTuple):
    """A checkpoint: its step, its state, and the values that were saved with it."""

    step: int
    state: Any
    extra: dict[str, Any]


def steps(folder: Folder) -> list[int]:
    """The steps there are complete checkpoints of, in the order in which they were written."""
    return folders.steps(Path(folder))


def best(folder: Folder, *, highest: bool = False) -> int:
    """The step of the checkpoint with the lowest metric, or the highest; of equal ones the older.

    Raises:
        CheckpointError: none was saved with a metric.
    """
    found = folders.ranked(folders.written(Path(folder)), highest)
    if not found:
        root = Path(folder).absolute()
        raise CheckpointError(f"no checkpoint in {root} has a metric: give save(..., metric=float(loss))")
    return found[0].step


def save(
    folder: Folder,
    step: int,
    state: Any,
    extra: Mapping[str, Any] | None = None,
    *,
    metric: float | None = None,
    keep: int | Keep = 2,
) -> None:
    """Writes a checkpoint; it returns when the checkpoint is complete, and was read back.

    Args:
        folder: where the checkpoints of a run are; created if it does not exist.
        step: its number; a checkpoint of the same number is replaced.
        state: a pytree of arrays on any meshes, `mpmd.Stacked`, NumPy arrays, or numbers.
        extra: a JSON value to be saved with it; process 0's counts.
        metric: a number by which the best checkpoints are found, such as the loss of an evaluation; process
            0's counts.  A NaN is never among the best.
        keep: which checkpoints of the folder stay, those of earlier runs included: how many of the ones that
            were written last, this one included, or a `Keep`.

    Raises:
        CheckpointError: an argument could not be restored, or some process cannot write, as when the disk is
            full, or orbax is not installed.  Older checkpoints stay, and nothing of this one.
        PeerError: another process failed, or saves something else; likewise.
    """
    with all_processes("mpmd.checkpoint.save") as processes:
        requests: list[SaveRequest] = []
        processes.do(
            "save the state",
            lambda: requests.append(SaveRequest.of(folder, step, state, extra, metric, keep)),
        )
        processes.compare(Alike("saves something else", requests[0].text()))
        with contextlib.ExitStack() as until_complete:
            notes = _save(requests[0], processes, until_complete)
    if jax.process_index() == 0:
        warn_user(notes)


def _save(request: SaveRequest, processes: Processes, until_complete: contextlib.ExitStack) -> list[str]:
    root, step, first = request.root, request.step, jax.process_index() == 0
    what, kinds = f"write a checkpoint to {root}", [leaf.kind for leaf in request.leaves]
    pieces: dict[tuple[int, Box], np.ndarray] = {}
    digests: dict[tuple[int, Box], int] = {}
    notes: list[str] = []

    def begin() -> list[Any]:
        pieces.update(((k, box), data) for k, leaf in enumerate(request.leaves) for box, data in held(leaf))
        digests.update((piece, files.digest(data)) for piece, data in pieces.items())
        if first:
            until_complete.enter_context(folders.writing(root))
            until_complete.callback(folders.discard, root, step)
            folders.prepare(root, step)
        return [[k, box, digest] for (k, box), digest in digests.items()]

    def write() -> list[Any]:
        own = {piece: pieces[piece] for piece, owner in owners.items() if owner == jax.process_index()}
        return _write(root, step, kinds, own, digests)

    def describe() -> None:
        if first:
            owned = [[process, *piece] for process, of in enumerate(written) for piece in of]
            leaves = [[kind.path, kind.shape, kind.dtype] for kind in kinds]
            manifest = {"format": 1, "step": step, "leaves": leaves, "pieces": owned, "extra": request.extra}
            manifest |= {} if request.metric is None else {"metric": request.metric}
            folders.describe(root, step, manifest)

    def complete() -> None:
        if first:
            notes.extend(folders.complete(root, step, request.keep))

    claims = processes.do(what, begin)
    held_by = [[(k, as_box(box)) for k, box, _ in of] for of in claims]
    owners = processes.alike(lambda: writers(kinds, held_by))
    written = processes.do(what, write)
    processes.do(what, describe)
    processes.do(what, complete)
    return [*replicas_that_differ(kinds, claims), *notes]


def restore(folder: Folder, like: Any, step: int | None = None) -> Restored:
    """The state of a checkpoint, each array where `like` says.

    Args:
        folder: where the checkpoints of a run are.
        like: a pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings, such as
            `compiled.arguments.abstract[0]`.  Leaves without a sharding become NumPy arrays.
        step: which one; by default the one that was written last.

    Raises:
        CheckpointError: there is none, it is damaged, or it has other leaves, shapes or dtypes.
        PeerError: another process failed, or restores something else.
    """
    root, leaves, arrays = Path(folder).absolute(), list[Leaf](), list[Any]()
    what = f"read a checkpoint in {root}"
    with all_processes("mpmd.checkpoint.restore") as processes:

        def begin() -> int:
            leaves.extend(leaves_of(like))
            if step is not None:
                return step_number(step)
            return _newest(root) if jax.process_index() == 0 else -1

        chosen = processes.do(what, begin)[0]
        kinds = "".join(f"{leaf.kind}\n" for leaf in leaves)
        which = "the newest" if step is None else f"step {step_number(step)}"
        processes.compare(Alike("restores something else", f"{which}\n{kinds}"))
        manifest: dict[str, Any] = {}

        def read() -> None:
            manifest.update(folders.read_manifest(root, chosen))
            saved = [LeafKind(path, tuple(shape), dtype) for path, shape, dtype in manifest["leaves"]]
            _compare(root, chosen, saved, [leaf.kind for leaf in leaves])
            reader = CheckpointReader(root, chosen, manifest)
            arrays.extend(array for leaf in leaves for array in reader.arrays(leaf))

        processes.do(what, read)
    return Restored(chosen, jax.tree.unflatten(jax.tree.structure(like), arrays), manifest["extra"])


def extra(folder: Folder, step: int | None = None) -> dict[str, Any]:
    """The values that were saved with the state of a checkpoint, by default the newest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    root = Path(folder).absolute()
    chosen = _newest(root) if step is None else step_number(step)
    values: dict[str, Any] = folders.read_manifest(root, chosen)["extra"]
    return values


def _newest(root: Path) -> int:
    numbers = folders.steps(root)
    if not numbers:
        raise CheckpointError(f"there is no checkpoint in {root}")
    return numbers[-1]


def _write(
    root: Path,
    step: int,
    kinds: Sequence[LeafKind],
    pieces: Mapping[tuple[int, Box], np.ndarray],
    digests: Mapping[tuple[int, Box], int],
) -> list[Any]:
    """Writes this process's pieces and reads them back; for each its leaf, box, name and checksum."""
    part = folders.unfinished(root, step)
    if not part.is_dir():
        raise CheckpointError(
            f"{part}, which process 0 created, is not there\n  all processes must see the same folder"
        )
    names = {piece: str(number) for number, piece in enumerate(pieces)}
    if pieces:
        own = part / f"process_{jax.process_index()}"
        files.write(own, {names[piece]: data for piece, data in pieces.items()})
        folders.flush(own)
        for piece, data in pieces.items():
            back = files.read(own, names[piece])
            if files.digest(back) != digests[piece] or (back.shape, back.dtype) != (data.shape, data.dtype):
                raise CheckpointError(f"{kinds[piece[0]]} was written, and reads differently")
    return [[k, box, names[k, box], digests[k, box]] for k, box in pieces]


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
