"""Weights in files of safetensors, as Hugging Face publishes them: read onto meshes, and written from them.

    names = {
        "['embed']": "model.embed_tokens.weight",
        "['layers']['q']": mpmd.safetensors.Stored("model.layers.{k}.self_attn.q_proj.weight", axes=(1, 0)),
    }
    params = mpmd.safetensors.restore("published", compiled.arguments.abstract[0]["params"], names)
    mpmd.safetensors.save("trained", state["params"], names)

`names` has for the paths of leaves, as `jax.tree_util.keystr` writes them, the names of arrays.  A word in
braces is a number.  If it is in both, as in `"['blocks'][{k}]['q']": "blocks.{k}.q"`, each leaf is one array;
if only the name has it, the leaf is a stack of the arrays 0, 1, ... along its first dim; of several such
words the first counts along the first dim.

In several processes all must call these functions, and see the same files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.api.checkpoints import tensor_files
from mpmd.api.checkpoints.pieces import Box, Leaf, LeafKind, as_box, held, leaves_of, writers
from mpmd.api.checkpoints.restore import read_leaf
from mpmd.api.checkpoints.tensor_files import StoredTensor
from mpmd.api.checkpoints.tensor_names import LocatedLeaf, Names, Stored, TensorNames
from mpmd.api.checkpoints.together import all_processes
from mpmd.errors import CheckpointError, collect
from mpmd.runtime.processes.exchange import Alike
from mpmd.support.user_code import warn_user

__all__ = ["Names", "Stored", "restore", "save"]

_SHOWN = 5
"""Names of arrays that a warning shows."""


def restore(path: str | os.PathLike[str], like: Any, names: Names) -> Any:
    """Arrays of files, each where `like` says; a process reads the parts that its own devices hold.

    Floats become floats of another width, and integers integers that hold their values.

    Args:
        path: a file, an index of several (`model.safetensors.index.json`), or a folder with either.
        like: a pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings, such as the parameters in
            `compiled.arguments.abstract[0]`.  Leaves without a sharding become NumPy arrays.
        names: for each path of `like` the name of its array; names of other paths do no harm.

    Raises:
        CheckpointError: a file is damaged, or a leaf has no name, no array, or one of another shape; all are
            listed.
        PeerError: another process failed, or restores something else.
    """
    root, leaves, arrays, notes = Path(path).absolute(), list[Leaf](), list[Any](), list[str]()
    tensors: dict[str, StoredTensor] = {}
    located: dict[str, LocatedLeaf] = {}

    def begin() -> None:
        leaves.extend(leaves_of(like))
        tensors.update(tensor_files.opened(root))
        directory = TensorNames(names)
        found, problems = directory.find_all([leaf.kind for leaf in leaves])
        located.update(found)
        for leaf in leaves:
            if leaf.kind.path in located:
                problems += _problems(leaf.kind, located[leaf.kind.path], tensors)
        if problems:
            raise collect(CheckpointError, problems, f"{root} does not fit the state:")
        if others := directory.unnamed(tensors):
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            notes.append(
                f"{root} has arrays without a place in the state: {', '.join(others[:_SHOWN])}{more}"
            )

    def read() -> None:
        def box(kind: LeafKind, box: Box, tail: tuple[int, ...], dtype: Any) -> np.ndarray:
            return _read(kind, located[kind.path], tensors, box, np.dtype(dtype))

        arrays.extend(array for leaf in leaves for array in read_leaf(leaf, box))

    with all_processes("mpmd.safetensors.restore") as processes:
        what = f"read {root}"
        processes.do(what, begin)
        kinds = "".join(f"{leaf.kind} is {located[leaf.kind.path]}\n" for leaf in leaves)
        stored = "".join(f"{name}: {of.type_text} at {of.begin}\n" for name, of in tensors.items())
        processes.compare(Alike("restores something else", kinds + stored))
        processes.do(what, read)
    if jax.process_index() == 0:
        warn_user(notes)
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _problems(kind: LeafKind, located: LocatedLeaf, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """The first thing that is wrong with the arrays of a leaf."""
    stacked = len(located.words)
    want = located.stored_shape(kind.shape[stacked:])
    for index in itertools.product(*map(range, kind.shape[:stacked])):
        name = located.name_at(index)
        if (tensor := tensors.get(name)) is None:
            yield f"{kind} needs {name!r}, which is not there"
            return
        if tensor.shape != want:
            axes = " with axes=(1, 0)" if located.axes is None and tensor.shape == want[::-1] != want else ""
            yield (
                f"{kind} needs {name!r} as [{','.join(map(str, want))}], which is {tensor.type_text}"
                + (f"\n  give it as Stored(...){axes}" if axes else "")
            )
            return
        if _group(tensor.dtype) != _group(kind.dtype):
            yield f"{kind} cannot be made of {name!r}, which is {tensor.type_text}"
            return
    for dim in range(stacked):
        name = located.name_at([kind.shape[dim] if k == dim else 0 for k in range(stacked)])
        if name in tensors and 0 not in kind.shape[:stacked]:
            yield f"{kind} has no place for {name!r}: its stack is longer"


def _group(dtype: Any) -> str:
    """Within a group numbers may change their width."""
    if str(dtype).startswith("key<"):
        return "keys"
    groups = {"floats": jnp.floating, "integers": jnp.integer, "complex": jnp.complexfloating}
    return next((name for name, kind in groups.items() if jnp.issubdtype(np.dtype(dtype), kind)), str(dtype))


def _read(
    kind: LeafKind, located: LocatedLeaf, tensors: Mapping[str, StoredTensor], box: Box, dtype: np.dtype[Any]
) -> np.ndarray:
    """A box of a leaf; of each array only this part is read."""
    result = np.empty([stop - start for start, stop in box], dtype)
    of_stack = len(located.words)
    inner = tuple(slice(*ends) for ends in box[of_stack:])
    for index in located.indices(box):
        name = located.name_at(index)
        part = located.as_leaf(tensors[name].mapped("r"))[inner]
        at = tuple(k - start for k, (start, _) in zip(index, box, strict=False))
        result[at] = part
        if _group(dtype) == "integers" and not np.array_equal(result[at], part):
            raise CheckpointError(
                f"{kind} cannot hold the values of {name!r}, which is {tensors[name].type_text}"
            )
    return result


def save(
    folder: str | os.PathLike[str],
    state: Any,
    names: Names,
    *,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Writes arrays to files, each part by a process that holds it, and reads them back.

    One file is `model.safetensors`; several have an index, `model.safetensors.index.json`.  Files of these
    names in the folder are replaced, the index last.

    Args:
        folder: where; created if it does not exist.
        state: a pytree of arrays on any meshes.
        names: for each path of the state the name of its array.
        metadata: texts in the header of each file; by default `{"format": "pt"}`, which transformers wants.
        max_file_bytes: of the arrays in a file, unless it has one array.

    Raises:
        CheckpointError: a leaf has no name, or a dtype that such files lack; the folder holds other
            weights; or some process cannot write.
        PeerError: another process failed, or saves something else.
    """
    export: list[_Export] = []
    with all_processes("mpmd.safetensors.save") as processes, contextlib.ExitStack() as until_complete:
        what = f"write to {Path(folder).absolute()}"
        text = {"format": "pt"} if metadata is None else dict(metadata)
        processes.do(what, lambda: export.append(_Export(folder, state, names, text, max_file_bytes)))
        processes.compare(Alike("saves something else", export[0].text()))
        claims = processes.do(what, lambda: export[0].begin(until_complete))
        held_by = [[(k, as_box(box)) for k, box in of] for of in claims]
        owners = processes.alike(lambda: writers(export[0].kinds, held_by))
        own = [piece for piece, owner in owners.items() if owner == jax.process_index()]
        processes.do(what, lambda: export[0].write(own))
        processes.do(what, lambda: export[0].read_back(own))
        processes.do(what, export[0].complete)


class _Export:
    """An export: a plan that is the same in all processes, and the pieces of this one."""

    def __init__(
        self, folder: Any, state: Any, names: Names, metadata: Mapping[str, str], max_file_bytes: int
    ) -> None:
        self._folder, self._metadata = Path(folder).absolute(), metadata
        self._leaves = leaves_of(state)
        self.kinds = [leaf.kind for leaf in self._leaves]
        located, problems = TensorNames(names).find_all(self.kinds)
        sizes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for kind in self.kinds:
            if kind.path not in located:
                continue
            if kind.dtype not in tensor_files.NAMES:
                problems.append(f"{kind} cannot be written: files have {', '.join(tensor_files.NAMES)}")
                continue
            of = located[kind.path]
            stacked = len(of.words)
            for index in itertools.product(*map(range, kind.shape[:stacked])):
                if (name := of.name_at(index)) in sizes:
                    problems.append(f"{kind} is {name!r}, as another leaf is")
                sizes[name] = np.dtype(kind.dtype), of.stored_shape(kind.shape[stacked:])
        if not all(isinstance(text, str) for text in (*metadata, *metadata.values())):
            problems.append(f"metadata is {metadata!r}; it must be texts")
        if problems:
            raise collect(CheckpointError, problems, "the state cannot be written to files of safetensors:")
        self._located, self._sizes = [located[kind.path] for kind in self.kinds], sizes
        self._files = _file_names(tensor_files.arranged(sizes, max_file_bytes))
        self._pieces: dict[tuple[int, Box], np.ndarray] = {}
        self._tensors: dict[str, StoredTensor] = {}

    def text(self) -> str:
        """What all processes must save alike, one a line."""
        return "".join(f"{kind} is {of}\n" for kind, of in zip(self.kinds, self._located, strict=True))

    def _unfinished(self, name: str) -> Path:
        return self._folder / f"{name}.unfinished"

    def begin(self, until_complete: contextlib.ExitStack) -> list[Any]:
        """Which pieces this process holds; process 0 creates the files."""
        self._pieces = {(k, box): data for k, leaf in enumerate(self._leaves) for box, data in held(leaf)}
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = {file.name for file in self._folder.glob(f"*{tensor_files.SUFFIX}")}
            if others := sorted(found - self._files.keys()):
                raise CheckpointError(
                    f"{self._folder} has other weights: {', '.join(others)}; give another folder"
                )
            for file, names in self._files.items():
                until_complete.callback(self._unfinished(file).unlink, missing_ok=True)
                tensor_files.create(self._unfinished(file), names, self._sizes, self._metadata)
        return list(self._pieces)

    def _parts(self, k: int, box: Box, mode: str) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
        """For each array of a piece: its part of the file, with the leaf's dims, and of the piece."""
        of, data = self._located[k], self._pieces[k, box]
        inner = tuple(slice(*ends) for ends in box[len(of.words) :])
        for index in of.indices(box):
            at = tuple(i - start for i, (start, _) in zip(index, box, strict=False))
            yield of.as_leaf(self._tensors[of.name_at(index)].mapped(mode)), inner, data[at]

    def write(self, own: Sequence[tuple[int, Box]]) -> None:
        for file in self._files:
            self._tensors |= tensor_files.opened(self._unfinished(file))
        for k, box in own:
            for array, inner, part in self._parts(k, box, "r+"):
                array[inner] = part
        for file in self._files:
            with self._unfinished(file).open("r+b") as opened:
                os.fsync(opened.fileno())

    def read_back(self, own: Sequence[tuple[int, Box]]) -> None:
        """Raises a CheckpointError if a piece is not there: file systems may lose writes of several hosts."""
        for k, box in own:
            for array, inner, part in self._parts(k, box, "r"):
                if array[inner].tobytes() != part.tobytes():
                    raise CheckpointError(f"{self.kinds[k]} was written, and reads differently")

    def complete(self) -> None:
        """Gives the files their names."""
        if jax.process_index():
            return
        index = self._folder / tensor_files.INDEX
        index.unlink(missing_ok=True)
        for file in self._files:
            self._unfinished(file).replace(self._folder / file)
        if len(self._files) > 1:
            total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._sizes.values())
            file_of = {name: file for file, names in self._files.items() for name in names}
            index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2))


def _file_names(files: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    if len(files) == 1:
        return {tensor_files.ONE_FILE: files[0]}
    return {f"model-{k:05d}-of-{len(files):05d}{tensor_files.SUFFIX}": of for k, of in enumerate(files, 1)}
