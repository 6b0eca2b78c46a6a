"""The folder of the checkpoints of a run: one folder for each step, complete or not there.

A checkpoint is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

from mpmd.errors import CheckpointError

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished"
_REMOVE_SECONDS = 10.0


def steps(folder: Path) -> list[int]:
    """The steps there are complete checkpoints of, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())


def unfinished(folder: Path, step: int) -> Path:
    """Where a checkpoint is while it is written."""
    return folder / f"{step}{_UNFINISHED}"


def prepare(folder: Path, step: int) -> None:
    """Creates the folder of a checkpoint to be written; removes what a run that was killed left.

    Raises:
        OSError: it cannot be created.
    """
    for left in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(left)
    unfinished(folder, step).mkdir(parents=True)


def complete(folder: Path, step: int, manifest: dict[str, Any], keep: int) -> None:
    """Gives a checkpoint that is whole its name, then removes all but the newest ones.

    One of the same step is replaced: only between two renamings there is neither of them.
    """
    part = unfinished(folder, step)
    with (part / MANIFEST).open("w") as file:
        json.dump({**manifest, "digest": _digest(manifest)}, file)
        file.flush()
        os.fsync(file.fileno())
    replaced = folder / f"{step}.replaced{_UNFINISHED}"
    if (folder / str(step)).exists():
        (folder / str(step)).rename(replaced)
    part.rename(folder / str(step))
    shutil.rmtree(replaced, ignore_errors=True)
    with contextlib.suppress(OSError):  # some file systems cannot do it
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    for old in steps(folder)[:-keep]:
        gone = unfinished(folder, old)
        (folder / str(old)).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def discard(folder: Path, step: int) -> None:
    """Removes a checkpoint that could not be written; threads may still write to it for a moment."""
    part, until = unfinished(folder, step), time.monotonic() + _REMOVE_SECONDS
    while part.exists() and time.monotonic() < until:
        shutil.rmtree(part, ignore_errors=True)
        time.sleep(0.05)


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The description of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another version of this package.
    """
    path = folder / str(step) / MANIFEST
    try:
        found = json.loads(path.read_text())
        digest, known = found.pop("digest"), found["format"] == 1
        if digest != _digest(found):
            raise ValueError("it has other bytes than were saved")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, step, f"{path.name}: {error}") from error
    if not known:
        raise damaged(folder, step, f"{path.name} has another format")
    return dict(found)


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
