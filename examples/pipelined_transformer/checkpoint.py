"""Checkpoints with orbax: saved from any number of meshes, restored to any other number.

Arrays are saved as they are on the host, so that a run may be resumed with other stages or devices.  A
digest of their bytes is saved with them: orbax itself does not notice a byte that changed in an array.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

from mpmd.errors import CheckpointError

_KEPT = 2


class Checkpoints:
    """The checkpoints of one run, in one folder: the newest two.

    Args:
        directory: the folder; it is made when first needed.
        facts: what must be equal in a run that is resumed; values that JSON can hold.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        self.directory = directory.absolute()
        self._facts = dict(facts)

    @property
    def steps(self) -> list[int]:
        """The steps there are checkpoints of, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdigit())

    def set_aside(self) -> Path | None:
        """Renames the folder if it holds checkpoints of another run; returns its new name."""
        if not self.steps:
            return None
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}.{number}")).exists():
            number += 1
        self.directory.rename(aside)
        return aside

    def save(self, step: int, state: TrainState, losses: Sequence[float]) -> None:
        """Saves the state after a number of steps, and the loss of each of them.

        A checkpoint that cannot be saved whole leaves nothing behind, and the older ones as they are.

        Raises:
            CheckpointError: the folder cannot be written to, or the disk is full.
        """
        arrays = _on_host(state)
        run = {"facts": self._facts, "losses": list(losses), "digest": _digest(arrays)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), run=ocp.args.JsonSave(run))
        try:
            with _without_tracebacks(), self._manager() as manager:
                manager.save(step, args=items)
        except (OSError, ValueError, RuntimeError) as error:  # the latter two are tensorstore's
            self._remove_unfinished(step)
            raise CheckpointError(
                f"cannot write a checkpoint to {self.directory}: {_reason(error)}\n"
                "  give --checkpoint_dir a folder that you may write to, on a disk with room for it"
            ) from error

    def restore(self, state: TrainState) -> tuple[TrainState, list[float]]:
        """The newest checkpoint: a state of the same structure as `state`, and the losses up to there.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another model or other data.
        """
        if not self.steps:
            raise CheckpointError(
                f"no checkpoint in {self.directory}\n  leave out --resume to begin a run there"
            )
        step = self.steps[-1]
        run = self._read(step, "run", ocp.args.JsonRestore())
        if not isinstance(run, dict) or run.keys() != {"facts", "losses", "digest"}:
            raise self._damaged(step, "its description is incomplete")
        self._compare(step, run["facts"])
        arrays = _on_host(state)
        restored = self._read(step, "state", ocp.args.StandardRestore(arrays))
        if _digest(restored) != run["digest"] or len(run["losses"]) != step:
            raise self._damaged(step, "its arrays are not those that were saved")
        return state.replace(**restored), run["losses"]

    def _remove_unfinished(self, step: int) -> None:
        """Removes the files of a failed save: orbax gives a checkpoint its name once it is whole.

        Threads of the save may still write other arrays, so it removes until nothing comes back, for 10 s.
        """
        until = time.monotonic() + 10
        while time.monotonic() < until:
            for path in self.directory.glob(f"{step}.*"):
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.1)
            if not any(self.directory.glob(f"{step}.*")):
                return

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.directory, options=options)

    def _read(self, step: int, item: str, how: Any) -> Any:
        try:
            with self._manager() as manager:
                return manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except (ValueError, OSError, KeyError) as error:  # what orbax and tensorstore raise for bad files
            reason = str(error).partition("\n")[0]
            raise self._damaged(step, f"{type(error).__name__}: {reason[:200]}") from error

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        others = [other for other in self.steps if other != step]
        then = f"to go on from step {others[-1]}" if others else "and leave out --resume to start again"
        return CheckpointError(
            f"the checkpoint of step {step} is damaged: {self.directory / str(step)}\n"
            f"  got: {reason}\n  remove that folder {then}"
        )

    def _compare(self, step: int, saved: Mapping[str, Any]) -> None:
        names = sorted(self._facts.keys() | saved.keys())
        differ = [name for name in names if self._facts.get(name) != saved.get(name)]
        if differ:
            rows = [f"\n  {n}: saved with {saved.get(n)!r}, now {self._facts.get(n)!r}" for n in differ]
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.directory} belongs to another run:{''.join(rows)}\n"
                "  use the same flags and data, or another --checkpoint_dir"
            )


_FULL = re.compile(r"RESOURCE_EXHAUSTED|No space left on device|Disk quota exceeded|File too large")


def _reason(error: Exception) -> str:
    """What went wrong, in a line; tensorstore names the keys and files of a database before that."""
    text = " ".join(str(error).split())
    return f"the disk is full ({text[-200:]})" if _FULL.search(text) else text[:400]


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keeps out of the log the tracebacks of errors that orbax logs in its threads and then raises."""

    def has_none(record: logging.LogRecord) -> bool:
        return not record.exc_info

    log = logging.getLogger("absl")
    log.addFilter(has_none)
    try:
        yield
    finally:
        log.removeFilter(has_none)


def _on_host(state: TrainState) -> dict[str, Any]:
    saved = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    return jax.tree.map(np.asarray, jax.device_get(saved))


def _digest(arrays: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
