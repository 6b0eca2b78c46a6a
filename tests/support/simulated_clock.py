"""The clocks of stand-in GPUs, and the kernel that writes their times to memory of the host."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.poison import POISON
from tests.support.ptx_interpreter import run_ptx

HOST_OFFSET = 1 << 44
"""From an address of the host's memory to that by which GPUs reach it."""


@dataclasses.dataclass(frozen=True)
class PtxModule:
    """A module that the driver has compiled, of one kernel."""

    text: str

    @property
    def name(self) -> str:
        return re.search(r"\.entry (\w+)", self.text)[1]


class SimulatedClock:
    """What a stand-in has for times."""

    def _cuMemHostAlloc(self, where: int, size: int, flags: int) -> None:
        self._here()
        assert size > 0 and flags == 2, "memory that no GPU reaches"
        data = np.full(size + 4096, POISON, np.uint8)
        data = data[-data.ctypes.data % 4096 :][:size]
        self._handles[data.ctypes.data] = ("host", data)
        ctypes.c_uint64.from_address(where).value = data.ctypes.data

    def _cuMemHostGetDevicePointer_v2(self, where: int, at: int, flags: int) -> None:
        self._get("host", at)
        ctypes.c_uint64.from_address(where).value = at + HOST_OFFSET

    def _cuMemFreeHost(self, at: int) -> None:
        self._freed.append(self._get("host", at))
        self._drop("host", at)

    def _stamp(self, made: Any, sizes: Sequence[int], shared: int, stream: int, parameters: int, extra: int):
        assert made["loaded"] and sizes == [1] * 6 and not shared and not extra
        self.stamps.append(stream)
        mark = ctypes.c_uint64.from_address(ctypes.c_void_p.from_address(parameters).value).value
        device = self._get("context", self._context.current)

        def clock() -> int:
            """Begins somewhere on each GPU, and runs at a rate of its own."""
            return 10**18 * (device + 1) + int(time.perf_counter_ns() * (1 + 1e-3 * device))

        return self._start(lambda: run_ptx(made["kernel"].text, [mark], self._reached, clock), stream)

    def _reached(self, at: int, size: int) -> int:
        """An address of the GPU as this process has it: memory of the host has another one."""
        for kind, value in self._handles.values():
            if kind == "host" and 0 <= at - value.ctypes.data - HOST_OFFSET < value.nbytes:
                return at - HOST_OFFSET
        return self._memory(at, size)
