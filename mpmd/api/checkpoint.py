"""Checkpoints of state that lies on several meshes, in one process or in several.

    mpmd.checkpoint.save(folder, step, state, {"losses": losses})
    restored = mpmd.checkpoint.restore(folder, compiled.arguments.abstract[0])

Every array is written once, by a process that holds it, with orbax, and read back.  A checkpoint is complete
or not there.  It may be restored onto another topology: other processes, stages, devices or platforms, and
stacks in other parts.  In several processes all must call these functions, and see the same folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mpmd.api.checkpoints import folder as folders
from mpmd.api.checkpoints.folder import Keep
from mpmd.api.checkpoints.pieces import Leaf, LeafKind, leaves_of
from mpmd.api.checkpoints.restore import CheckpointReader, SaveRequest, step_number
from mpmd.api.checkpoints.saver import Saver
from mpmd.api.checkpoints.together import all_processes
from mpmd.api.checkpoints.writing import CheckpointWriter
from mpmd.brief import bytes_text, clipped, counted, few, seconds_text
from mpmd.errors import CheckpointError, collect
from mpmd.runtime.processes.exchange import Alike
from mpmd.support.user_code import warn_user

__all__ = ["Keep", "Restored", "Saver", "best", "extra", "restore", "save", "steps"]

log = logging.getLogger("mpmd.checkpoint")

Folder = str | os.PathLike[str]


class Restored(NamedTuple):
    """A checkpoint: its step, its state, and the values that were saved with it."""

    step: int
    state: Any
    extra: dict[str, Any]

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.state)
        size = bytes_text(sum(getattr(leaf, "nbytes", 0) for leaf in leaves))
        extra = f", extra {few(map(repr, self.extra))}" if self.extra else ""
        return clipped(f"Restored(step {self.step}, {counted(len(leaves), 'array')}, {size}{extra})")


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
            writer = CheckpointWriter(requests[0], until_complete)
            claims = processes.do(writer.what, writer.begin)
            processes.alike(lambda: writer.choose(claims))
            written = processes.do(writer.what, writer.write)
            processes.do(writer.what, lambda: writer.complete(written))
    if jax.process_index() == 0:
        warn_user(writer.notes)


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
    what, begun = f"read a checkpoint in {root}", time.perf_counter()
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
    log.info("restored step %d of %s in %s", chosen, root, seconds_text(time.perf_counter() - begun))
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
