"""The arguments of a save, checked before anything is written: each save can be restored.

Leaves of a checkpoint, read from its pieces into the arrays that are wanted.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from mpmd.api.checkpoints import files, folder
from mpmd.api.checkpoints.folder import Keep
from mpmd.api.checkpoints.pieces import Box, Leaf, LeafKind, as_box, box_of, intersection, leaves_of, within
from mpmd.api.inputs import weakly_typed
from mpmd.errors import CheckpointError, collect
from mpmd.jax_compat import ShapedArray, as_key, is_key
from mpmd.jax_distributed import absent_array_maker

BoxReader: TypeAlias = Callable[[LeafKind, Box, tuple[int, ...], Any], np.ndarray]
"""`read(leaf, box, tail, dtype)` returns a box of a leaf with the dims `tail` behind, which random keys have,
as an array of its own: devices on CPUs may keep and reuse its memory."""


def read_leaf(leaf: Leaf, read: BoxReader) -> list[Any]:
    """The arrays of a leaf, with the shardings of `leaf`; reads of each what this process holds."""
    return [_array(leaf.kind, offset, like, read) for offset, like in leaf.arrays]


def _array(kind: LeafKind, offset: tuple[int, ...], like: Any, read: BoxReader) -> Any:
    sharding, shape, dtype = getattr(like, "sharding", None), tuple(like.shape), like.dtype
    tail: tuple[int, ...] = ()
    if is_key(dtype):  # kept as integers
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, dtype=dtype)))
        dtype, tail = data.dtype, data.shape
    if sharding is None:
        return read(kind, box_of((slice(None),) * len(shape), shape, offset), tail, dtype)
    weak = bool(getattr(getattr(like, "aval", like), "weak_type", False))
    if not sharding.has_addressable_devices:
        aval = ShapedArray((*shape, *tail), np.dtype(dtype), weak_type=weak)
        array = absent_array_maker(aval, sharding)()
    else:
        array = jax.make_array_from_callback(
            (*shape, *tail),
            sharding,
            lambda index: read(kind, box_of(index, shape, offset), tail, dtype),
        )
        array = weakly_typed(array) if weak else array
    return as_key(array, like.dtype) if is_key(like.dtype) else array


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
        """The arrays of a leaf, with the shardings of `leaf`.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        self._known.clear()
        return read_leaf(leaf, self._box)

    def _box(self, kind: LeafKind, box: Box, tail: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.zeros((*(stop - start for start, stop in box), *tail), dtype)
        for process, has, name, digest in self._of_leaf.get(self._paths[kind.path], ()):
            common = intersection(box, has)
            if common is not None:
                piece = self._piece(kind, process, name, digest)
                array[within(common, box)] = piece[within(common, has)]
        return array

    def _piece(self, kind: LeafKind, process: int, name: str, digest: int) -> np.ndarray:
        if (process, name) not in self._known:
            try:
                piece = files.read(self._root / str(self._step) / f"process_{process}", name)
            except files.FILE_ERRORS as error:
                raise folder.damaged(self._root, self._step, f"{kind}: {files.reason(error)}") from error
            if files.digest(piece) != digest:
                raise folder.damaged(self._root, self._step, f"{kind} has other bytes than were saved")
            self._known[process, name] = piece
        return self._known[process, name]


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """A save that can be restored.

    Attributes:
        root: the folder of all checkpoints.
        step: the number of this one.
        leaves: of the state.
        extra: what JSON can hold.
        metric: by which the best checkpoints are found; None if it has none.
        keep: which checkpoints stay.
    """

    root: Path
    step: int
    leaves: list[Leaf]
    extra: dict[str, Any]
    metric: float | None
    keep: Keep

    @staticmethod
    def of(folder: Any, step: Any, state: Any, extra: Any, metric: Any, keep: Any) -> SaveRequest:
        """The arguments of `save`.

        Raises:
            CheckpointError: a checkpoint of them could not be restored; names every problem.
        """
        files.orbax()
        leaves = leaves_of(state)
        keep = Keep(keep) if type(keep) is int else keep
        problems = [*_of_keep(keep, metric), *_of_metric(metric), *_of_extra(extra)]
        problems += _of_leaves([leaf.kind for leaf in leaves])
        if problems:
            raise collect(CheckpointError, problems, "the checkpoint could not be restored:")
        plain = json.loads(json.dumps(dict(extra or {})))
        value = None if metric is None else float(metric)
        return SaveRequest(Path(folder).absolute(), step_number(step), leaves, plain, value, keep)

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
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"step is {step!r}; it must be an integer that is not negative")
    return number


def _of_keep(keep: Any, metric: Any) -> list[str]:
    if not isinstance(keep, Keep):
        return [f"keep is {keep!r}; give a number of checkpoints, or mpmd.checkpoint.Keep(...)"]
    problems = []
    if type(keep.last) is not int or keep.last < 1:
        problems.append(f"keep is {keep.last!r}; at least the checkpoint that is written must stay")
    for name in ("every", "best"):
        if type(value := getattr(keep, name)) is not int or value < 0:
            problems.append(f"keep.{name} is {value!r}; it must be an integer that is not negative")
    if not problems and keep.best and metric is None:
        problems.append(f"keep.best is {keep.best}, and no metric was given: save(..., metric=float(loss))")
    return problems


def _of_metric(metric: Any) -> list[str]:
    if metric is None:
        return []
    try:
        if not isinstance(metric, (str, bytes, bool)) and np.shape(metric) == ():
            float(metric)
            return []
    except (TypeError, ValueError):
        pass
    return [f"metric is {metric!r}; it must be one real number"]


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
        problems = [
            f"{path} has the key {key!r}, which JSON gives back as a text: give a str" for key in keys
        ]
        return [*problems, *(p for key in extra for p in _of_extra(extra[key], f"{path}[{key!r}]"))]
    if isinstance(extra, (list, tuple)):
        return [p for k, item in enumerate(extra) for p in _of_extra(item, f"{path}[{k}]")]
    return []
