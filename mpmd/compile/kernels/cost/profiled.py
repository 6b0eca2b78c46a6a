"""Measured costs, kept on disk, and what they say about the projected ones.

Who can run kernels measures them (`measured_by`); who prices them asks (`measurer`).

One JSON line per measurement, keyed by device and kernel text.  Lines are appended whole, so several
processes may share a file; a line that cannot be read is ignored and measured again.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mpmd.compile.kernels.cost.device import Device
from mpmd.compile.kernels.cost.models import projected
from mpmd.compile.kernels.cost.workload import KernelWorkload
from mpmd.compile.kernels.plan import KernelPlan

_VERSION = 1

Measurer = Callable[[KernelPlan, KernelWorkload], float | None]
"""From a plan and its work to the seconds that its kernel takes; None for one that cannot be tried."""

_MEASURER: contextvars.ContextVar[Measurer | None] = contextvars.ContextVar("measurer", default=None)


@contextlib.contextmanager
def measured_by(measurer: Measurer) -> Iterator[None]:
    """Let `measurer` answer meanwhile, in this thread."""
    token = _MEASURER.set(measurer)
    try:
        yield
    finally:
        _MEASURER.reset(token)


def measurer() -> Measurer | None:
    """Who measures kernels here, if anybody does."""
    return _MEASURER.get()


class ProfiledCosts:
    """Measurements by device and kernel.

    Args:
        path: the file; None keeps measurements for this process only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._seconds: dict[str, float] = {}
        self._ratios: dict[tuple[str, str], list[float]] = {}
        self.unreadable = 0
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            entry = json.loads(line)
            known = entry["version"] == _VERSION
            seconds, ratio = float(entry["seconds"]), float(entry["ratio"])
            key, place = str(entry["key"]), (str(entry["device"]), str(entry["kind"]))
        except (ValueError, TypeError, KeyError):
            self.unreadable += 1
            return
        if known and math.isfinite(seconds) and seconds > 0 and math.isfinite(ratio) and ratio > 0:
            self._store(key, place, seconds, ratio)
        else:
            self.unreadable += 1

    def _store(self, key: str, place: tuple[str, str], seconds: float, ratio: float) -> None:
        if key not in self._seconds:
            self._ratios.setdefault(place, []).append(ratio)
        self._seconds[key] = seconds

    @staticmethod
    def key(device: Device, text: str) -> str:
        """The key of a kernel on a device, by the device's name: measured limits differ from run to run."""
        return hashlib.sha256(f"{device.name}\n{text}".encode()).hexdigest()

    def seconds(self, device: Device, text: str) -> float | None:
        """What a kernel was measured to take, if it was."""
        return self._seconds.get(self.key(device, text))

    def measure(self, device: Device, text: str, work: KernelWorkload, run: Callable[[], float]) -> float:
        """What a kernel takes: from the file, or measured now and written there.

        Args:
            device: where it runs.
            text: everything the kernel's code depends on.
            work: its workload, to calibrate the projection.
            run: runs the kernel and returns seconds; the best of a few runs.
        """
        key = self.key(device, text)
        if key in self._seconds:
            return self._seconds[key]
        seconds = run()
        ratio = seconds / projected(work, device).seconds
        self._store(key, (device.name, work.kind), seconds, ratio)
        self._append(
            {
                "version": _VERSION,
                "key": key,
                "device": device.name,
                "kind": work.kind,
                "seconds": seconds,
                "ratio": ratio,
            }
        )
        return seconds

    def _append(self, entry: dict[str, object]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(entry, sort_keys=True) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)

    def correction(self, device: Device, kind: str) -> float:
        """Measured over projected for one kind of kernel, the geometric mean; 1 without measurements."""
        ratios = self._ratios.get((device.name, kind), [])
        return math.exp(sum(math.log(r) for r in ratios) / len(ratios)) if ratios else 1.0

    def price(self, device: Device, text: str, work: KernelWorkload) -> float:
        """The best knowledge of a kernel's time: measured, else projected and corrected for its kind."""
        known = self.seconds(device, text)
        return (
            known
            if known is not None
            else projected(work, device).seconds * self.correction(device, work.kind)
        )
