"""The arguments of a save, checked before anything is written: each save can be restored."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpmd.api.checkpoints import files
from mpmd.api.checkpoints.pieces import Leaf, LeafKind, leaves_of
from mpmd.errors import CheckpointError, collect


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """A save that can be restored.

    Attributes:
        root: the folder of all checkpoints.
        step: the number of this one.
        leaves: of the state.
        extra: what JSON can hold.
        keep: how many checkpoints stay.
    """

    root: Path
    step: int
    leaves: list[Leaf]
    extra: dict[str, Any]
    keep: int

    @staticmethod
    def of(folder: Any, step: Any, state: Any, extra: Any, keep: Any) -> SaveRequest:
        """The arguments of `save`.

        Raises:
            CheckpointError: a checkpoint of them could not be restored; names every problem.
        """
        files.orbax()
        leaves = leaves_of(state)
        problems = [*_of_keep(keep), *_of_extra(extra), *_of_leaves([leaf.kind for leaf in leaves])]
        if problems:
            raise collect(CheckpointError, problems, "the checkpoint could not be restored:")
        plain = json.loads(json.dumps(dict(extra or {})))
        return SaveRequest(Path(folder).absolute(), step_number(step), leaves, plain, keep)

    def text(self) -> str:
        """What all processes must save alike, one a line."""
        kinds = "".join(f"{leaf.kind}\n" for leaf in self.leaves)
        return f"step {self.step}\nkeep {self.keep}\n{kinds}"


def step_number(step: Any) -> int:
    """The number of a step: an integer of Python, NumPy or JAX.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        found = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        found = -1
    if found < 0:
        raise CheckpointError(f"step is {step!r}; it must be an integer that is not negative")
    return found


def _of_keep(keep: Any) -> list[str]:
    if type(keep) is int and keep >= 1:
        return []
    return [f"keep is {keep!r}; at least the checkpoint that is written must stay"]


def _of_leaves(kinds: Sequence[LeafKind]) -> list[str]:
    """Leaves of one path, of which each would be restored as the last, and dtypes that files cannot hold."""
    known = set[str]()
    problems = []
    for kind in kinds:
        if kind.path in known:
            problems.append(f"{kind} is there twice: the keys of a node of the pytree print alike")
        known.add(kind.path)
        if not files.can_hold(kind.dtype):
            problems.append(f"{kind} cannot be written to a file\n  put what JSON can hold into `extra`")
    return problems


def _of_extra(extra: Any, path: str = "extra") -> list[str]:
    """What JSON cannot hold, or would give back as something else: keys that are not texts."""
    if path == "extra":
        if extra is not None and not isinstance(extra, Mapping):
            return [f"extra is a {type(extra).__name__}; it must be a dict"]
        try:
            json.dumps(dict(extra or {}))
        except RecursionError:
            return ["extra has too many levels, or holds itself"]
        except (TypeError, ValueError) as error:
            return [f"extra cannot be written as JSON: {error}; give numbers as float(x) or x.tolist()"]
    if isinstance(extra, Mapping):
        keys = [key for key in extra if not isinstance(key, str)]
        found = [f"{path} has the key {key!r}, which JSON gives back as a text: give a str" for key in keys]
        return [*found, *(p for key in extra for p in _of_extra(extra[key], f"{path}[{key!r}]"))]
    if isinstance(extra, (list, tuple)):
        return [p for k, item in enumerate(extra) for p in _of_extra(item, f"{path}[{k}]")]
    return []
