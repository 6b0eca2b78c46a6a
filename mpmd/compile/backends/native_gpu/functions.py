"""The functions of the CUDA driver and of cuBLASLt that programs call, and their C types.

Every function returns a status, 0 for success, unless `RESULTS` says otherwise.  A library here is anything
that has functions by name: the real ones, found by `libraries.py`, or those of a test.

Source: the headers cuda.h and cublasLt.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

_P, _I, _U, _S, _Q = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64

DRIVER: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetName": (_P, _I, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuCtxSetCurrent": (_P,),
    "cuModuleLoadDataEx": (_P, _P, _U, _P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, _P),
    "cuFuncSetAttribute": (_P, _I, _I),
    "cuFuncGetAttribute": (_P, _I, _P),
    "cuMemAlloc_v2": (_P, _S),
    "cuMemFree_v2": (_Q,),
    "cuMemcpyHtoD_v2": (_Q, _P, _S),
    "cuMemHostAlloc": (_P, _S, _U),
    "cuMemHostGetDevicePointer_v2": (_P, _P, _U),
    "cuMemFreeHost": (_P,),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
    "cuMemcpyDtoDAsync_v2": (_Q, _Q, _S, _P),
    "cuMemsetD32Async": (_Q, _U, _S, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _Q, _S, _P),
    "cuStreamCreate": (_P, _U),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuEventCreate": (_P, _U),
    "cuEventRecord": (_P, _P),
    "cuEventElapsedTime": (_P, _P, _P),
    "cuEventDestroy_v2": (_P,),
    "cuStreamBeginCapture_v2": (_P, _I),
    "cuStreamEndCapture": (_P, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphLaunch": (_P, _P),
    "cuGraphDestroy": (_P,),
    "cuGraphExecDestroy": (_P,),
    "cuGetErrorName": (_I, _P),
    "cuGetErrorString": (_I, _P),
}
"""Functions of libcuda → types of their arguments.  Handles are pointers, addresses on a device `uint64`."""

CUBLASLT: dict[str, tuple[Any, ...]] = {
    "cublasLtGetVersion": (),
    "cublasLtGetStatusName": (_I,),
    "cublasLtCreate": (_P,),
    "cublasLtMatmulDescCreate": (_P, _I, _I),
    "cublasLtMatmulDescDestroy": (_P,),
    "cublasLtMatmulDescSetAttribute": (_P, _I, _P, _S),
    "cublasLtMatrixLayoutCreate": (_P, _I, _Q, _Q, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_P,),
    "cublasLtMatrixLayoutSetAttribute": (_P, _I, _P, _S),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceDestroy": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, _I, _P, _S),
    "cublasLtMatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, _I, _P, _P),
    "cublasLtMatmul": (_P, _P, _P, _Q, _P, _Q, _P, _P, _Q, _P, _Q, _P, _P, _Q, _S, _P),
}
"""Functions of libcublasLt → types of their arguments."""

RESULTS: dict[str, Any] = {"cublasLtGetVersion": _S, "cublasLtGetStatusName": _P}
"""Functions that return something else than a status → its type."""


class FunctionLibrary(Protocol):
    """Functions of C by name."""

    def function(self, name: str) -> Any:
        """A function, a ctypes function with the types that are listed here.

        Raises:
            AttributeError: the library has no such function.
        """


def prototype(name: str) -> Any:
    arguments = DRIVER[name] if name in DRIVER else CUBLASLT[name]
    return ctypes.CFUNCTYPE(RESULTS.get(name, _I), *arguments)


def address(function: Any) -> int:
    """Where a ctypes function is."""
    return ctypes.cast(function, _P).value or 0
