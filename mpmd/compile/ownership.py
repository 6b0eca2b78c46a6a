"""Whether a file may be executed: its digest shows that it is complete, its owner and mode who wrote it.

Source: OpenSSH's StrictModes, which checks a user's keys the same way.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_folder(folder: Path) -> None:
    """Checks that only this user can write to a folder.

    The folders above it may belong to root, too, may be writable by a group, and by everybody where they are
    sticky, as `/tmp` is.

    Raises:
        PermissionError: another user may write to it, or put another folder in its place.
        OSError: it is not there.
    """
    if not hasattr(os, "geteuid"):  # no owners and modes on this platform
        return
    real = folder.resolve(strict=True)
    _check(real, real.stat(), _WRITABLE_BY_OTHERS, {os.geteuid()})
    for above in real.parents:
        status = above.stat()
        sticky = status.st_mode & stat.S_ISVTX
        _check(above, status, 0 if sticky else stat.S_IWOTH, {os.geteuid(), 0})


def read_own_file(path: Path) -> bytes:
    """The bytes of a regular file of this user that no other user may write to.

    Raises:
        PermissionError: it is another kind of file, or belongs to others.
        OSError: it is not there, or cannot be read.
    """
    if path.is_symlink():
        raise PermissionError(f"{path} is a symbolic link")
    # A link put there meanwhile is not followed, and opening a pipe without a writer does not block.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        if hasattr(os, "geteuid"):
            _check(path, status, _WRITABLE_BY_OTHERS, {os.geteuid()})
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _check(path: Path, status: os.stat_result, forbidden: int, owners: set[int]) -> None:
    if status.st_uid not in owners:
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & forbidden:
        raise PermissionError(f"others may write to {path}")
