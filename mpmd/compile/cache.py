"""The compile cache on disk: bytes by key, verified when they are read.

One file per entry: a magic word, a digest, the key, the content.  An entry is written to a temporary file
and then renamed, so that several processes may share a folder; a damaged one is removed and written again.
Above the size limit the least recently read entries are evicted.

Whether a file may be executed: its digest shows that it is complete, its owner and mode who wrote it.

Source: OpenSSH's StrictModes, which checks a user's keys the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import stat
import tempfile
import threading
from functools import lru_cache
from pathlib import Path

from mpmd.brief import brief

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


log = logging.getLogger("mpmd.compile")

_MAGIC = b"MPMDKEEP"
_DIGEST = 32
_SUFFIX = ".kept"

DEFAULT_LIMIT = 1 << 30
"""Default size limit of a folder, in bytes."""


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """Text that differs between any two compilers: a digest of the sources, versions of dependences."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    beneath = [f"{name} {importlib.metadata.version(name)}" for name in ("jaxlib", "llvmlite", "numpy")]
    return " ".join([digest.hexdigest(), *beneath])


def key_of(*parts: object) -> str:
    """A key for a result that depends on the parts, and on the compiler."""
    return hashlib.sha256("\0".join([compiler_version(), *map(str, parts)]).encode()).hexdigest()


@dataclasses.dataclass
class Counts:
    """Statistics of a cache.

    Attributes:
        hits: entries found.
        misses: entries that were missing.
        damaged: files that were removed because their content does not match the digest.
        refused: entries that another user may have written, which are not used.
        failed: entries that could not be written.
        evicted: entries removed to keep the limit.
    """

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    refused: int = 0
    failed: int = 0
    evicted: int = 0


class DiskCache:
    """A folder of entries.

    Args:
        folder: its path; created, for this user alone, if it does not exist.  Write access to it means
            control over the code that runs, so a folder that others may write to is not used.
        limit: bytes that all entries together may take.
    """

    __repr__ = brief

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self.counts = Counts()
        self._lock = threading.Lock()
        self._notices: set[str] = set()

    def path_of(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def get(self, key: str) -> bytes | None:
        """The content of a key; None if there is none, or if it is damaged."""
        path = self.path_of(key)
        try:
            check_folder(self.folder)
            data = read_own_file(path)
        except PermissionError as error:
            self._refuse(error)
            return None
        except OSError:
            self._count("misses")
            return None
        content = _content(data, key)
        if content is None:
            self.discard(key, "the digest does not fit")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # mark it as used
        self._count("hits")
        return content

    def put(self, key: str, content: bytes) -> None:
        """Store bytes under a key.  A failed write is counted, and the bytes are not stored."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_folder(self.folder)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_entry(key, content))
                os.replace(name, self.path_of(key))
            except OSError:
                os.unlink(name)
                raise
            self._keep_limit()
        except PermissionError as error:
            self._refuse(error)
        except OSError as error:
            self._count("failed")
            log.warning("the compile cache in %s cannot be written: %s", self.folder, error)

    def discard(self, key: str, reason: str) -> None:
        """Remove an unusable entry, so that it is written again."""
        self._count("damaged")
        log.warning("the entry %s of the compile cache is made again: %s", self.path_of(key), reason)
        with contextlib.suppress(OSError):
            self.path_of(key).unlink()

    def _refuse(self, reason: PermissionError) -> None:
        """Warn, once for each reason, that a file is not used because others may have written it."""
        self._count("refused")
        if str(reason) in self._notices:
            return
        self._notices.add(str(reason))
        log.warning(
            "the compile cache in %s does not execute what others may have written: %s\n"
            "  give --mpmd_compile_cache_dir a folder that only you may write to",
            self.folder,
            reason,
        )

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self.counts, what, getattr(self.counts, what) + 1)

    def _keep_limit(self) -> None:
        """Remove the least recently read entries while the limit is exceeded."""
        entries = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may have removed it
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                self._count("evicted")
            total -= size


def _entry(key: str, content: bytes) -> bytes:
    body = key.encode() + content
    return _MAGIC + hashlib.sha256(body).digest() + body


def _content(data: bytes, key: str) -> bytes | None:
    """The content of an entry's file; None if it is not an entry, another key's, or damaged."""
    start = len(_MAGIC) + _DIGEST
    if data[: len(_MAGIC)] != _MAGIC or data[start : start + len(key)] != key.encode():
        return None
    if hashlib.sha256(data[start:]).digest() != data[len(_MAGIC) : start]:
        return None
    return data[start + len(key) :]
