"""The checkpoints of a run: `mpmd.checkpoint` with losses, and the facts that a resumed run must share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax.training.train_state import TrainState

import mpmd
from mpmd.errors import CheckpointError


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
        return mpmd.checkpoint.steps(self.directory)

    @property
    def of_this_start(self) -> bool:
        """Whether `mpmd-run --max-restarts` started this run again, and the newest checkpoint is its own."""
        if os.environ.get("MPMD_RESTART_COUNT", "0") == "0" or not self.steps:
            return False
        return bool(mpmd.checkpoint.extra(self.directory).get("run") == os.environ.get("MPMD_RUN_ID"))

    def set_aside(self) -> Path | None:
        """Renames the folder if it holds checkpoints of another run; returns its new name."""
        if not self.steps or jax.process_index():
            return None
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}.{number}")).exists():
            number += 1
        self.directory.rename(aside)
        return aside

    def save(self, step: int, state: TrainState, losses: Sequence[float]) -> None:
        """Saves the state after a number of steps, and the loss of each of them.

        Raises:
            CheckpointError: the folder cannot be written to, or the disk is full; older checkpoints stay.
        """
        run = {"facts": self._facts, "losses": list(losses), "run": os.environ.get("MPMD_RUN_ID")}
        mpmd.checkpoint.save(self.directory, step, state, run)

    def newest(self) -> int:
        """The step of the newest checkpoint.

        Raises:
            CheckpointError: there is none, or it belongs to another model or other data.
        """
        if not self.steps:
            raise CheckpointError(
                f"no checkpoint in {self.directory}\n  leave out --resume to begin a run there"
            )
        step = self.steps[-1]
        self._compare(step, mpmd.checkpoint.extra(self.directory, step).get("facts", {}))
        return step

    def restore(self, state: Any) -> tuple[TrainState, list[float]]:
        """The newest checkpoint: a state with the shardings of `state`, and the losses up to there.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another model or other data.
        """
        step = self.newest()
        restored = mpmd.checkpoint.restore(self.directory, state, step)
        return restored.state, restored.extra["losses"]

    def _compare(self, step: int, saved: Mapping[str, Any]) -> None:
        names = sorted(self._facts.keys() | saved.keys())
        differ = [name for name in names if self._facts.get(name) != saved.get(name)]
        if differ:
            rows = [f"\n  {n}: saved with {saved.get(n)!r}, now {self._facts.get(n)!r}" for n in differ]
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.directory} belongs to another run:{''.join(rows)}\n"
                "  use the same flags and data, or another --checkpoint_dir"
            )
