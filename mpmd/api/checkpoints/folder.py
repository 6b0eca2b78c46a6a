"""The folder of the checkpoints of a run: one folder for each step, complete or not there.

A checkpoint is written under another name and renamed when it is whole.  One job writes at a time: its
process 0 holds a lock of the folder meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpmd.errors import CheckpointError

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished"
_REPLACED = f".replaced{_UNFINISHED}"
_REMOVE_SECONDS = 10.0
_NEWEST = float("inf")
"""In place of the number of a checkpoint that cannot be read: restoring it says so."""
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


class WrittenCheckpoint(NamedTuple):
    """A checkpoint: how many were written before it, its step, and its metric."""

    number: float
    step: int
    metric: float | None


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when another one is complete; the others are removed.

        keep=Keep(last=2, every=10_000, best=1)

    Attributes:
        last: how many of those that were written last, the new one included; at least 1.
        every: all whose step is a multiple of it; none if it is 0.
        best: how many of those with the lowest metric.
        highest: whether the best ones have the highest metric instead, such as an accuracy.
    """

    last: int = 2
    every: int = 0
    best: int = 0
    highest: bool = False

    def stay(self, written: Sequence[WrittenCheckpoint]) -> set[int]:
        """The steps that stay, of checkpoints in the order in which they were written."""
        last = {one.step for one in written[-self.last :]}
        every = {one.step for one in written if self.every and one.step % self.every == 0}
        return last | every | {one.step for one in ranked(written, self.highest)[: self.best]}


def ranked(written: Sequence[WrittenCheckpoint], highest: bool) -> list[WrittenCheckpoint]:
    """The checkpoints with a metric that is a number, the best one first, of equal ones the older."""
    sign = -1.0 if highest else 1.0
    known = [(sign * one.metric, one) for one in written if one.metric is not None]
    numbers = [(value, one) for value, one in known if not math.isnan(value)]  # NaN has no order
    return [one for _, one in sorted(numbers, key=lambda of: (of[0], of[1].number))]


def steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of, in the order in which they were written."""
    return [one.step for one in written(folder)]


def written(folder: Path) -> list[WrittenCheckpoint]:
    """The checkpoints that there are, in the order in which they were written, then unreadable ones."""
    if not folder.is_dir():
        return []
    found = [int(entry.name) for entry in folder.iterdir() if _is_step(entry)]
    return sorted((_written(folder, step) for step in found), key=lambda one: one[:2])


def _is_step(entry: Path) -> bool:
    """Whether this is the folder of a checkpoint: its name is as `str` writes a step."""
    name = entry.name
    return name.isascii() and name.isdecimal() and name == str(int(name)) and entry.is_dir()


def _written(folder: Path, step: int) -> WrittenCheckpoint:
    """A checkpoint that there is; versions that did not count wrote number 0."""
    try:
        manifest = _read(folder / str(step) / MANIFEST)
        return WrittenCheckpoint(float(manifest.get("number", 0)), step, manifest.get("metric"))
    except _UNREADABLE:
        return WrittenCheckpoint(_NEWEST, step, None)


def unfinished(folder: Path, step: int) -> Path:
    """Where a checkpoint is while it is written."""
    return folder / f"{step}{_UNFINISHED}"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Creates the folder, and keeps other jobs from writing to it, where the file system has locks.

    Raises:
        CheckpointError: another job writes to it.
        OSError: it cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(
                    f"another job writes a checkpoint to {folder} now\n  give each job a folder of its own"
                ) from error
        yield
    finally:
        os.close(handle)


def prepare(folder: Path, step: int) -> None:
    """Creates the folder of a checkpoint to be written; removes what a run that was killed left.

    Raises:
        OSError: it cannot be created.
    """
    for left in folder.glob(f"*{_REPLACED}"):  # a run was killed between two renamings
        step_of = folder / left.name.removesuffix(_REPLACED)
        if not step_of.exists():
            left.rename(step_of)
    for left in folder.glob(f"*{_UNFINISHED}"):
        _remove(left)
    unfinished(folder, step).mkdir()


def describe(folder: Path, step: int, manifest: dict[str, Any]) -> None:
    """Writes the description of a checkpoint, the last of its files, and sees that all reach the disk."""
    part = unfinished(folder, step)
    known = [int(one.number) for one in written(folder) if one.number != _NEWEST]
    manifest = json.loads(json.dumps({**manifest, "number": max(known, default=0) + 1}))
    with (part / MANIFEST).open("w") as file:
        json.dump({**manifest, "digest": _digest(manifest)}, file)
    flush(part)
    if _read(part / MANIFEST) != manifest:
        raise CheckpointError(f"{part / MANIFEST} was written, and reads differently")


def complete(folder: Path, step: int, keep: Keep) -> list[str]:
    """Gives a checkpoint that is whole its name, then removes all that need not stay.

    One of the same step is replaced: the two exchange their names, where the system can do that.

    Returns:
        What could not be removed, and why.
    """
    part, named = unfinished(folder, step), folder / str(step)
    replaced = folder / f"{step}{_REPLACED}"
    if not named.exists():
        part.rename(named)
    elif _exchange(part, named):
        part.rename(replaced)
    else:
        named.rename(replaced)
        part.rename(named)
    _flush_folder(folder)
    problems = []
    gone = [replaced] if replaced.exists() else []
    good = [one for one in written(folder) if one.number != _NEWEST]
    stay = keep.stay(good) | {step}
    for old in [one.step for one in good if one.step not in stay]:
        gone.append(unfinished(folder, old))
        try:
            (folder / str(old)).rename(gone[-1])
        except OSError as error:
            problems.append(f"the checkpoint {folder / str(old)} could not be removed: {error}")
    for entry in gone:
        shutil.rmtree(entry, ignore_errors=True)  # the next one that is written removes the rest
    return problems


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names at once, on Linux; whether it did."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def flush(folder: Path) -> None:
    """Sees that the files of a folder, and their names, reach the disk.

    Raises:
        OSError: a file cannot be written to the disk.
    """
    for where, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(where, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _flush_folder(Path(where))


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot do it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def discard(folder: Path, step: int) -> None:
    """Removes a checkpoint that could not be written; threads may still write to it for a moment."""
    part, until = unfinished(folder, step), time.monotonic() + _REMOVE_SECONDS
    while part.exists() and time.monotonic() < until:
        shutil.rmtree(part, ignore_errors=True)
        time.sleep(0.05)


def _remove(entry: Path) -> None:
    """Removes a folder, a file or a link, which may be gone meanwhile."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The description of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another version of this package.
    """
    path = folder / str(step) / MANIFEST
    try:
        manifest = _read(path)
        known = manifest["format"] == 1
    except _UNREADABLE as error:
        raise damaged(folder, step, f"{path.name}: {error}") from error
    if not known:
        raise damaged(folder, step, f"{path.name} has another format")
    return manifest


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _read(path: Path) -> dict[str, Any]:
    """A description, or one of `_UNREADABLE`."""
    description = dict(json.loads(path.read_text()))
    if description.pop("digest") != _digest(description):
        raise ValueError("it has other bytes than were saved")
    return description


def _digest(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def damaged(folder: Path, step: int, why: str) -> CheckpointError:
    """The error of a checkpoint that cannot be read."""
    others = [other for other in steps(folder) if other != step]
    then = f" to go on from step {others[-1]}" if others else ""
    return CheckpointError(
        f"the checkpoint of step {step} is damaged: {folder / str(step)}\n"
        f"  got: {why}\n  remove that folder{then}"
    )
