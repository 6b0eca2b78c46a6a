"""Files of safetensors: 8 bytes with the length of a header, the header in JSON, then the arrays, row by row.

    {"layer.weight": {"dtype": "BF16", "shape": [16, 8], "data_offsets": [0, 256]}, ...}

A file is checked as a whole when it is opened, and an array is read by slices, through a mapping of the file
that lasts as long as the read.

Source: https://github.com/huggingface/safetensors, section "Format" of its README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpmd.errors import CheckpointError, collect

SUFFIX, ONE_FILE, INDEX = ".safetensors", "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format: a reader need not allocate more for a header."""
_ALIGNED = 8

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Dtypes of whole bytes by the names of the format, whose F8_E4M3 has no infinities."""
NAMES = {str(dtype): name for name, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """An array in a file: its dtype and shape, and where its bytes begin."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int

    @property
    def type_text(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def mapped(self, mode: str) -> np.ndarray:
        """All of it, as memory of the file: `"r"` to read it, `"r+"` to write it."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        with self.file.open("rb" if mode == "r" else "r+b") as file:
            mapping: Any = np.memmap(file, self.dtype, mode, self.begin, self.shape)  # type: ignore[call-overload]
        return np.asarray(mapping).reshape(self.shape)


def opened(path: Path) -> dict[str, StoredTensor]:
    """The arrays of a file, of an index of several files, or of a folder that holds one of them.

    Raises:
        CheckpointError: there is none, or one of the files is damaged.
    """
    if path.is_dir():
        path = _of_folder(path)
    try:
        return _indexed(path) if path.name.endswith(".json") else _header(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _of_folder(folder: Path) -> Path:
    for name in (INDEX, ONE_FILE):
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "no file of safetensors"
        raise CheckpointError(f"{folder} has neither {INDEX} nor {ONE_FILE}, but {names}\n  give one file")
    return found[0]


def _indexed(index: Path) -> dict[str, StoredTensor]:
    entries = _json(index, index.read_bytes())
    files = entries.get("weight_map") if isinstance(entries, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _damaged(index, ["it has no 'weight_map' from names to files"])
    problems = [
        f"{file!r}, the file of {name!r}, is not the name of a file beside it"
        for name, file in files.items()
        if Path(file).name != file
    ]
    if problems:
        raise _damaged(index, problems)
    of_file = {file: _header(index.parent / file) for file in dict.fromkeys(files.values())}
    problems = [f"{name!r} is not in {file}" for name, file in files.items() if name not in of_file[file]]
    if problems:
        raise _damaged(index, problems)
    return {name: of_file[file][name] for name, file in files.items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    """The arrays of one file, whose header must describe each of its bytes once."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(path, [f"it has {size} bytes, and a header of {length} is said to come after 8"])
        entries = _json(path, file.read(length))
    if not isinstance(entries, dict):
        raise _damaged(path, ["its header is not a JSON object"])
    metadata = entries.pop("__metadata__", {})
    problems = [] if _is_metadata(metadata) else ["its __metadata__ is not an object of texts"]
    tensors, ends = dict[str, StoredTensor](), dict[str, int]()
    for name, entry in entries.items():
        problem, found = _entry(path, entry, 8 + length, size)
        if found is None:
            problems.append(f"{name!r}: {problem}")
        else:
            tensors[name], ends[name] = found, found.begin + found.dtype.itemsize * math.prod(found.shape)
    if not problems:
        problems = _gaps(tensors, ends, 8 + length, size)
    if problems:
        raise _damaged(path, problems)
    return tensors


def _entry(path: Path, entry: Any, base: int, size: int) -> tuple[str, StoredTensor | None]:
    """The array that an entry of a header describes, or what is wrong with it."""
    try:
        name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        natural = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        natural = False
    if not natural:
        return f"has no dtype, shape and data_offsets of two numbers: {str(entry)[:100]}", None
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        return f"dtype {name!r} is not known; known are {', '.join(DTYPES)}", None
    if not begin <= end <= size - base:
        return f"bytes {begin} to {end} are not in the file, which has {size - base} after its header", None
    if end - begin != (bytes_ := dtype.itemsize * math.prod(shape)):
        return f"{name}{shape} takes {bytes_} bytes, and has {end - begin}", None
    return "", StoredTensor(path, dtype, tuple(shape), base + begin)


def _gaps(tensors: Mapping[str, StoredTensor], ends: Mapping[str, int], base: int, size: int) -> list[str]:
    """Bytes that two arrays have, or none."""
    at, before, problems = base, "the header", []
    for name in sorted(tensors, key=lambda name: (tensors[name].begin, ends[name])):
        begin = tensors[name].begin
        if begin < at:
            problems.append(f"{name!r} begins {at - begin} bytes before the end of {before}")
        elif begin > at:
            problems.append(f"no array has the {begin - at} bytes between {before} and {name!r}")
        at, before = max(at, ends[name]), repr(name)
    if at != size and not problems:
        problems.append(f"no array has the {size - at} bytes after {before}")
    return problems


def _is_metadata(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())


def _json(path: Path, text: bytes) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            twice = next(key for k, (key, _) in enumerate(pairs) if key in dict(pairs[:k]))
            raise ValueError(f"{twice!r} is there twice")
        return found

    try:
        return json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        what = "" if path.name.endswith(".json") else "its header "
        raise _damaged(path, [f"{what}is not JSON: {str(error)[:200]}"]) from error


def _damaged(path: Path, problems: Iterable[str]) -> CheckpointError:
    head, found = f"{path} is damaged, or no file of safetensors:", list(problems)
    if len(found) == 1:
        return CheckpointError(f"{head} {found[0]}")
    return collect(CheckpointError, found, head)  # type: ignore[return-value]


def arranged(
    sizes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], max_file_bytes: int
) -> list[list[str]]:
    """Names in the order of their arrays in files, each of at most so many bytes, or of one array.

    Larger elements come first, so that each array begins at a multiple of the size of its elements.
    """
    files: list[list[str]] = [[]]
    left = max_file_bytes
    for name, (dtype, shape) in sizes.items():
        size = dtype.itemsize * math.prod(shape)
        if files[-1] and size > left:
            files.append([])
            left = max_file_bytes
        files[-1].append(name)
        left -= size
    return [sorted(file, key=lambda name: (-sizes[name][0].itemsize, name)) for file in files]


def create(
    path: Path,
    names: Sequence[str],
    sizes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> None:
    """Creates a file whose arrays are still to be written.

    Raises:
        OSError: it cannot be created.
    """
    at, entries = 0, dict[str, Any]()
    if metadata:
        entries["__metadata__"] = dict(metadata)
    for name in names:
        dtype, shape = sizes[name]
        end = at + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": NAMES[str(dtype)], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)
