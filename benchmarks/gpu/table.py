"""The functions that a handler may call, as a table of addresses; and a table that only writes down.

    entry                           the real one is of
    cuCtxSetCurrent                 libcuda
    cuLaunchKernel                  libcuda
    cuMemcpyDtoDAsync_v2            libcuda
    cuMemsetD32Async                libcuda
    cublasLtMatmulDescSetAttribute  libcublasLt
    cublasLtMatmul                  libcublasLt

Code that calls through such a table is the same with and without a GPU.  A `RecordingTable` needs neither:
each entry is a native function that keeps its arguments.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.driver import ExperimentDriver

_P, _I, _U, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxSetCurrent": (_P,),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
    "cuMemcpyDtoDAsync_v2": (_P, _P, _S, _P),
    "cuMemsetD32Async": (_P, _U, _S, _P),
    "cublasLtMatmulDescSetAttribute": (_P, _I, _P, _S),
    "cublasLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _S, _P),
}
ENTRIES = tuple(SIGNATURES)


def real_table(driver: ExperimentDriver, cublaslt: Any | None = None) -> Any:
    """The table of a machine with a GPU; without cuBLASLt its entries are null."""
    addresses = []
    for name in ENTRIES:
        if name.startswith("cu") and not name.startswith("cublas"):
            addresses.append(driver.address(name))
        else:
            addresses.append(_address(cublaslt.function(name)) if cublaslt is not None else None)
    return (ctypes.c_void_p * len(ENTRIES))(*addresses)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A call that a recorder saw.

    Attributes:
        name: of the entry.
        arguments: as passed; pointers as integers.
        parameters: of a launch: the values behind its array of pointers.
    """

    name: str
    arguments: tuple[int, ...]
    parameters: tuple[Any, ...] = ()


class RecordingTable:
    """A table whose functions keep what they are called with.

    Attributes:
        table: the addresses, in the order of `ENTRIES`.
        calls: the recorded calls, in order.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[Any]] | None = None,
        *,
        fail_at: int | None = None,
        status: int = 700,
    ) -> None:
        """Takes for each kernel the ctypes of its parameters, and which call (from 1) fails with what
        status.
        """
        self.calls: list[RecordedCall] = []
        self._parameters = dict(parameters or {})
        self._fail_at, self._status = fail_at, status
        self._callbacks = [
            ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])(self._entry(name)) for name in ENTRIES
        ]
        self.table = (ctypes.c_void_p * len(ENTRIES))(*map(_address, self._callbacks))

    def _entry(self, name: str) -> Any:
        def record(*arguments: int | None) -> int:
            values = tuple(argument or 0 for argument in arguments)
            self.calls.append(RecordedCall(name, self._attribute(name, values), self._launched(name, values)))
            return self._status if len(self.calls) == self._fail_at else 0

        return record

    def _launched(self, name: str, values: tuple[int, ...]) -> tuple[Any, ...]:
        if name != "cuLaunchKernel" or values[0] not in self._parameters:
            return ()
        pointers = ctypes.cast(values[9], ctypes.POINTER(ctypes.c_void_p))
        return tuple(
            ctypes.cast(pointers[number], ctypes.POINTER(kind))[0]
            for number, kind in enumerate(self._parameters[values[0]])
        )

    def _attribute(self, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
        """The new value of a descriptor's attribute is in the caller's frame: it is read now."""
        if name != "cublasLtMatmulDescSetAttribute":
            return values
        descriptor, attribute, where, size = values
        return descriptor, attribute, ctypes.cast(where, ctypes.POINTER(ctypes.c_int64))[0], size
