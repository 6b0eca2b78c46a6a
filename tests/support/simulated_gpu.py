"""A GPU that is not there: libraries whose functions keep books and compute, called by all of the real code.

Kernels are run by Triton's interpreter, and products by NumPy as cuBLASLt's documents describe them.  It
knows what was created and not released, refuses what was not created, and fails at a call on request.  XLA on
CPU calls the real handlers: only the stream, which it has not, is put into the frame of a call.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib
import pickle
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpmd.compile.backends.ffi.frame import ANSWER, API, FRAME
from mpmd.compile.backends.native_gpu.cublaslt import Heuristic
from mpmd.compile.backends.native_gpu.libraries import CUBLASLT, DRIVER, prototype
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.compile.cache import DiskCache
from tests.support.launch_memory import Extent
from tests.support.poison import POISON
from tests.support.simulated_clock import PtxModule, SimulatedClock
from tests.support.tf32 import tf32

STREAM, FAILED, LIBRARY_FAILED = 0x77, 719, 13
STREAMS = (STREAM, 0)  # XLA's, and the driver's own
SHARED = 64 << 10  # more than a kernel may have without leave
WORKSPACE = 1 << 10
_P = ctypes.c_void_p
_TF32 = 77  # of cublasComputeType_t
_ALIGNED = 64  # of what XLA allocates on CPU; on a GPU it is more
_LENGTH = struct.Struct("<Q")
_CAPACITY = 1024  # of a thread block
_KINDS = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}  # cudaDataType
_RELEASING = ("Destroy", "Unload", "Free", "Release")
_WORDS = ("cuGetErrorName", "cuGetErrorString", "cublasLtGetStatusName", "cublasLtGetVersion")


class StandInCompiler:
    """Kernels whose machine code is the kernel itself."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem

    def key(self) -> str:
        return "stand-in"

    def problem(self) -> str:
        return self._problem

    def compile(
        self, kernels: Mapping[str, PrintedKernel], capability: int, cache: DiskCache | None
    ) -> dict[str, Cubin]:
        return {name: _cubin(name, kernel) for name, kernel in kernels.items()}


def _cubin(name: str, kernel: PrintedKernel) -> Cubin:
    data = pickle.dumps(kernel)
    return Cubin(name, _LENGTH.pack(len(data)) + data, f"// {name}", SHARED, 32 * kernel.warps, 0)


class _Functions:
    """A library: functions of one stand-in by name."""

    def __init__(self, gpu: StandInGpu, names: Sequence[str]) -> None:
        self._functions = {name: prototype(name)(gpu.entry_of(name)) for name in names}

    def function(self, name: str) -> Any:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None


class StandInGpu(SimulatedClock):
    """The driver and cuBLASLt of a machine with some GPUs: `GpuLibraries`.

    Args:
        name: the GPUs' name in the driver.
        capability: theirs.
        count: how many there are.
        problem: why there is no compiler, if there is none.

    Attributes:
        calls: names of the functions that were called.
        fail_at: the call, from 1, that fails.
        launched: names of the kernels, in order.
        stamps: the streams on which times were launched to be written, in order.
        contexts: of the threads that gave work to streams.
        broken: mistakes of the code under test, or of the stand-in.
        buffers: if there are any, all memory that may be used is in them.
        extents: bytes of a launch's arguments, by the kernel's name, its programs and their addresses.
        attributes: the driver's attributes of a GPU.
        pause: seconds that all work on a stream takes longer, in graphs too.
        unlike: device → attributes that are others.
        workspaces: device → bytes that its products need, if it is not the usual.
        lacks: whether the library has no algorithm for products of some sizes m, n, k.
    """

    platform = "cpu"

    def __init__(
        self, name: str = "NVIDIA H200", capability: int = 90, count: int = 1, problem: str = ""
    ) -> None:
        self.name, self.capability, self.count = name, capability, count
        self.compiler = StandInCompiler(problem)
        self.calls: list[str] = []
        self.launched: list[str] = []
        self.stamps: list[int] = []
        self.contexts: set[int] = set()
        self.broken: list[Exception] = []
        self.buffers: list[np.ndarray] = []
        self.extents: dict[tuple[str, int, tuple[int, ...]], tuple[int, ...]] = {}
        self.fail_at, self.missing, self.pause = 0, frozenset[str](), 0.0
        # multiprocessors, kHz, kHz of memory, its bits, bytes of L2 and of shared memory
        self.attributes = {16: 132, 13: 1_980_000, 36: 3_125_000, 37: 6144, 38: 50 << 20, 97: 227 << 10}
        self.unlike: dict[int, dict[int, int]] = {}
        self.workspaces: dict[int, int] = {}
        self.lacks: Callable[[tuple[int, int, int]], bool] = lambda sizes: False
        self._handles: dict[int, tuple[str, Any]] = {}
        self._next = 0x1000
        self._contexts: dict[int, int] = {}
        self._context = threading.local()
        self._shims: list[Any] = []
        self._promised: dict[int, int] = {}
        self._freed: list[np.ndarray] = []
        self._captures: dict[int, list[Callable[[], Any]]] = {}
        self._captures_by: dict[int, int] = {}
        self.driver = _Functions(self, DRIVER)
        self.cublaslt = _Functions(self, CUBLASLT)

    # -- what tests ask
    @property
    def live(self) -> collections.Counter[str]:
        """What was created and not released, but contexts and the library's handles, which stay."""
        kinds = (kind for kind, _ in self._handles.values())
        return collections.Counter(kind for kind in kinds if kind not in ("context", "library", "function"))

    def entry(self, handler: int) -> int:
        """A function that gives the handler at an address a frame with a stream."""
        function = ctypes.CFUNCTYPE(_P, _P)
        inner = function(handler)
        stream_of = function(_give_stream)

        def enter(frame: int) -> int | None:
            copy = _copied(frame)
            api = _copied(copy[FRAME["api"] // 8])
            api[API["stream_get"] // 8] = ctypes.cast(stream_of, _P).value
            copy[FRAME["api"] // 8] = ctypes.addressof(api)
            return inner(ctypes.addressof(copy))

        shim = function(enter)
        self._shims.append((shim, inner, stream_of))
        return ctypes.cast(shim, _P).value or 0

    def entry_of(self, name: str) -> Callable[..., Any]:
        """The function of that name."""
        function = getattr(self, f"_{name}")
        if name in _WORDS:
            return function

        def called(*given: int | None) -> int:
            self.calls.append(name)
            if len(self.calls) == self.fail_at and not name.endswith(_RELEASING):
                if name == "cuStreamEndCapture":
                    self._captures.clear()
                    self._captures_by.clear()
                return LIBRARY_FAILED if name.startswith("cublas") else FAILED
            try:
                status = function(*(argument or 0 for argument in given))
            except BaseException as error:
                self.broken.append(error)
                return 999
            return status or 0

        return called

    # -- handles
    def _create(self, kind: str, where: int, value: Any) -> None:
        self._next += 0x10
        self._handles[self._next] = (kind, value)
        _store(where, ctypes.c_uint64(self._next))

    def _get(self, kind: str, handle: int) -> Any:
        found, value = self._handles.get(handle, ("nothing", None))
        assert found == kind, f"{handle:#x} is {found}, not a {kind}"
        return value

    def _drop(self, kind: str, handle: int) -> None:
        self._get(kind, handle)
        del self._handles[handle]

    def _here(self) -> None:
        assert getattr(self._context, "current", 0), "the thread has no context"

    # -- the driver
    def _cuInit(self, flags: int) -> int:
        assert flags == 0
        return 0

    def _cuDriverGetVersion(self, where: int) -> None:
        _store(where, ctypes.c_int(13000))

    def _cuDeviceGet(self, where: int, ordinal: int) -> int:
        _store(where, ctypes.c_int(ordinal))
        return 0 if ordinal < self.count else 101

    def _cuDeviceGetName(self, where: int, size: int, device: int) -> None:
        data = self.name.encode() + b"\0"
        assert len(data) <= size
        ctypes.memmove(where, data, len(data))

    def _cuDeviceGetAttribute(self, where: int, attribute: int, device: int) -> None:
        found = {75: self.capability // 10, 76: self.capability % 10, **self.attributes}
        found |= self.unlike.get(device, {})
        _store(where, ctypes.c_int(found[attribute]))

    def _cuDevicePrimaryCtxRetain(self, where: int, device: int) -> None:
        if device not in self._contexts:
            self._create("context", where, device)
            self._contexts[device] = self._next
        _store(where, ctypes.c_uint64(self._contexts[device]))

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._get("context", context)
        self._context.current = context

    def _cuModuleLoadDataEx(self, where: int, image: int, count: int, options: int, values: int) -> None:
        self._here()
        assert [ctypes.cast(options, ctypes.POINTER(ctypes.c_int))[n] for n in range(count)] == [5, 6]
        if ctypes.string_at(image, 8) == b".version":  # the driver compiles it itself
            self._create("module", where, PtxModule(ctypes.string_at(image).decode()))
            return
        (size,) = _LENGTH.unpack(ctypes.string_at(image, _LENGTH.size))
        kernel = pickle.loads(ctypes.string_at(image + _LENGTH.size, size))
        self._create("module", where, kernel)

    def _cuModuleUnload(self, module: int) -> None:
        self._drop("module", module)
        for handle in [
            h for h, (kind, v) in self._handles.items() if kind == "function" and v["of"] == module
        ]:
            del self._handles[handle]

    def _cuModuleGetFunction(self, where: int, module: int, name: int) -> int:
        kernel = self._get("module", module)
        if ctypes.string_at(name).decode() != kernel.name:
            return 500
        self._create("function", where, {"of": module, "kernel": kernel, "shared": 48 << 10, "loaded": False})
        return 0

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        assert attribute == 8
        self._get("function", function)["shared"] = value

    def _cuStreamCreate(self, where: int, flags: int) -> None:
        assert flags == 1, "a stream that waits for the driver's own"
        self._here()
        self._create("stream", where, self._context.current)

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        assert stream not in self._captures
        self._drop("stream", stream)

    def _cuFuncGetAttribute(self, where: int, attribute: int, function: int) -> None:
        assert attribute in (3, 4) and self._get("function", function)
        self._get("function", function)["loaded"] = True
        _store(where, ctypes.c_int(0))

    def _cuMemAlloc_v2(self, where: int, size: int) -> None:
        self._here()
        assert size > 0
        data = np.zeros(size + 256, np.uint8)
        start = -data.ctypes.data % 256
        data = data[start : start + size]
        self._handles[data.ctypes.data] = ("memory", data)
        _store(where, ctypes.c_uint64(data.ctypes.data))

    def _cuMemFree_v2(self, at: int) -> None:
        freed = self._get("memory", at)
        freed[:] = POISON
        self._freed.append(freed)  # nothing else may come to lie there
        self._drop("memory", at)

    def _cuMemcpyHtoD_v2(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(self._memory(target, size), source, size)

    def _cuLaunchKernel(self, function: int, *rest: int) -> int:
        *sizes, shared, stream, parameters, extra = rest
        made = self._get("function", function)
        kernel = made["kernel"]
        if isinstance(kernel, PtxModule):
            return self._stamp(made, sizes, shared, stream, parameters, extra)
        assert made["loaded"], "a launch that loads its kernel waits for the whole GPU"
        assert sizes[1:] == [1, 1, 32 * kernel.warps, 1, 1]
        assert (
            32 * kernel.warps <= _CAPACITY and SHARED == shared <= made["shared"] and self._is_stream(stream)
        )
        assert sizes[0] < 1 << 31
        pointers = ctypes.cast(parameters, ctypes.POINTER(_P))
        values = [ctypes.cast(pointers[k], ctypes.POINTER(_P))[0] for k in range(len(kernel.pointers) + 2)]
        assert values[-2:] == [None, None] and not extra
        addresses = tuple(at or 0 for at in values[:-2])
        for aligned, at in zip(kernel.aligned, values):
            assert not aligned or (at or 0) % 16 == 0, "an argument is not aligned"

        def run() -> None:
            # Triton is imported where there are kernels: programs of products alone run without it
            interpreter = importlib.import_module("tests.support.triton_interpreter")
            arrays = self._arguments(kernel.name, sizes[0], addresses)
            interpreter.run_kernel(kernel, arrays, grid=sizes[0])
            self.launched.append(kernel.name)

        return self._start(run, stream)

    def _arguments(self, kernel: str, grid: int, addresses: tuple[int, ...]) -> list[Extent]:
        """The arrays of a launch: the program's, or else all memory from their addresses on."""
        for at in addresses:
            self._memory(at, 0)
        sizes = self.extents.get((kernel, grid, addresses))
        assert sizes is not None or not self.extents, "the program has no such launch"
        return [Extent(at, size) for at, size in zip(addresses, sizes or map(self._left, addresses))]

    def _left(self, at: int) -> int:
        """Bytes to the end of the memory at an address; far more than there are if it is XLA's."""
        held = [v for kind, v in self._handles.values() if kind == "memory"]
        ends = [b.ctypes.data + b.nbytes for b in (*self.buffers, *held) if at >= b.ctypes.data]
        return next((end - at for end in ends if end >= at), 1 << 40)

    def _cuMemcpyDtoDAsync_v2(self, target: int, source: int, size: int, stream: int) -> None:
        places = self._memory(target, size), self._memory(source, size)
        self._start(lambda: ctypes.memmove(*places, size), stream)

    def _cuMemsetD32Async(self, target: int, word: int, count: int, stream: int) -> None:
        assert target % 4 == 0
        filled = _array(self._memory(target, 4 * count), np.uint32, count)
        self._start(lambda: filled.fill(word), stream)

    def _cuMemcpyDtoHAsync_v2(self, host: int, source: int, size: int, stream: int) -> None:
        assert stream in STREAMS and not self._captures_here()
        ctypes.memmove(host, self._memory(source, size), size)

    def _cuStreamSynchronize(self, stream: int) -> None:
        assert self._is_stream(stream) and not self._captures_here()

    def _cuEventCreate(self, where: int, flags: int) -> None:
        assert flags == 0, "an event without a time"
        self._here()
        self._create("event", where, [])

    def _cuEventRecord(self, event: int, stream: int) -> None:
        assert self._is_stream(stream) and not self._captures_here()
        self._get("event", event)[:] = [time.perf_counter()]

    def _cuEventElapsedTime(self, where: int, begin: int, end: int) -> None:
        (first,), (last,) = self._get("event", begin), self._get("event", end)
        _store(where, ctypes.c_float(1e3 * (last - first)))

    def _cuEventDestroy_v2(self, event: int) -> None:
        self._drop("event", event)

    def _is_stream(self, stream: int) -> bool:
        """Whether work may be given to it: XLA's, the driver's own, or one of the context of the thread."""
        return stream in STREAMS or self._get("stream", stream) == self._context.current

    def _captures_here(self) -> bool:
        """Whether this thread captures: it may not wait then."""
        return threading.get_ident() in self._captures_by.values()

    def _start(self, work: Callable[[], Any], stream: int) -> int:
        """Runs what is launched, or captures it, whoever launches it on a stream that captures."""
        assert self._is_stream(stream)
        self._here()
        self.contexts.add(self._context.current)
        if self.pause:
            work = functools.partial(lambda work: (time.sleep(self.pause), work()), work)
        if stream in self._captures:
            assert self._captures_by[stream] == threading.get_ident(), "another thread's work is captured"
            self._captures[stream].append(work)
        else:
            work()
        return 0

    def _cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        assert mode == 1 and stream not in self._captures
        assert stream not in STREAMS, "others work on XLA's stream: it would be captured"
        self._get("stream", stream)
        self._captures[stream], self._captures_by[stream] = [], threading.get_ident()

    def _cuStreamEndCapture(self, stream: int, where: int) -> None:
        self._create("graph", where, self._captures.pop(stream))
        del self._captures_by[stream]

    def _cuGraphInstantiateWithFlags(self, where: int, graph: int, flags: int) -> None:
        assert flags == 0
        self._create("executable graph", where, list(self._get("graph", graph)))

    def _cuGraphLaunch(self, executable: int, stream: int) -> None:
        assert stream in STREAMS
        for work in self._get("executable graph", executable):
            work()

    def _cuGraphDestroy(self, graph: int) -> None:
        self._drop("graph", graph)

    def _cuGraphExecDestroy(self, executable: int) -> None:
        self._drop("executable graph", executable)

    def _cuGetErrorName(self, status: int, where: int) -> int:
        if status != FAILED:
            return 1
        self._name = ctypes.create_string_buffer(b"CUDA_ERROR_LAUNCH_FAILED")
        _store(where, ctypes.c_uint64(ctypes.addressof(self._name)))
        return 0

    def _cuGetErrorString(self, status: int, where: int) -> int:
        return 1

    def _memory(self, at: int, size: int) -> int:
        """The address, if its bytes are inside of one of the buffers."""
        inside = [b for b in self.buffers if b.ctypes.data <= at and at + size <= b.ctypes.data + b.nbytes]
        held = [v for k, v in self._handles.values() if k == "memory"]
        inside += [b for b in held if b.ctypes.data <= at and at + size <= b.ctypes.data + b.nbytes]
        assert inside or not self.buffers, f"{size} bytes are not inside of a buffer"
        assert not any(b.ctypes.data <= at < b.ctypes.data + b.nbytes for b in self._freed), (
            "memory was freed"
        )
        return at

    # -- cuBLASLt
    def _cublasLtGetVersion(self) -> int:
        return 130100

    def _cublasLtGetStatusName(self, status: int) -> int:
        known = b"CUBLAS_STATUS_EXECUTION_FAILED" if status == LIBRARY_FAILED else b"CUBLAS_STATUS_UNKNOWN"
        self._status = ctypes.create_string_buffer(known)
        return ctypes.addressof(self._status)

    def _cublasLtCreate(self, where: int) -> None:
        self._here()
        self._create("library", where, None)

    def _cublasLtMatmulDescCreate(self, where: int, compute: int, scale: int) -> None:
        assert (compute, scale) in ((68, 0), (77, 0), (70, 1))
        self._create("descriptor", where, {"scale": scale, "compute": compute})

    def _cublasLtMatmulDescDestroy(self, made: int) -> None:
        self._drop("descriptor", made)

    def _cublasLtMatmulDescSetAttribute(self, made: int, attribute: int, where: int, size: int) -> None:
        self._get("descriptor", made)[attribute] = _number(where, size)

    def _cublasLtMatrixLayoutCreate(self, where: int, kind: int, rows: int, columns: int, pitch: int) -> int:
        layout = {"kind": np.dtype(_KINDS[kind]), "rows": rows, "columns": columns, "pitch": pitch}
        self._create("layout", where, layout)
        return 0 if pitch >= rows else 7

    def _cublasLtMatrixLayoutDestroy(self, made: int) -> None:
        self._drop("layout", made)

    def _cublasLtMatrixLayoutSetAttribute(self, made: int, attribute: int, where: int, size: int) -> None:
        self._get("layout", made)[attribute] = _number(where, size)

    def _cublasLtMatmulPreferenceCreate(self, where: int) -> None:
        self._create("preference", where, {})

    def _cublasLtMatmulPreferenceDestroy(self, made: int) -> None:
        self._drop("preference", made)

    def _cublasLtMatmulPreferenceSetAttribute(self, made: int, attribute: int, where: int, size: int) -> None:
        self._get("preference", made)[attribute] = _number(where, size)

    def _cublasLtMatmulAlgoGetHeuristic(self, *given: int) -> int:
        handle, descriptor, a, b, c, d, preference, count, results, found = given
        self._get("library", handle)
        limits = self._get("preference", preference)
        assert limits.keys() >= {1, 5, 6, 7, 8} and limits[1] >= WORKSPACE and count == 1
        shapes = self._shapes(descriptor, a, b, d)
        if self.lacks(shapes):
            return 15
        result = Heuristic.from_address(results)
        result.algorithm[:] = [descriptor, a, b, c, d, *shapes]
        result.workspace, result.state = self._workspace, 0
        self._promised[descriptor] = min(limits[number] for number in (5, 6, 7, 8))
        _store(found, ctypes.c_int(1))
        return 0

    @property
    def _workspace(self) -> int:
        return self.workspaces.get(self._get("context", self._context.current), WORKSPACE)

    def _shapes(self, descriptor: int, a: int, b: int, d: int) -> tuple[int, int, int]:
        """The sizes m, n, k of a product in the library's sense, which fit to each other."""
        given = self._get("descriptor", descriptor)
        left, right, result = (self._get("layout", made) for made in (a, b, d))
        m, k = _taken(left, given[3])
        k_of_b, n = _taken(right, given[4])
        assert k == k_of_b and (result["rows"], result["columns"]) == (m, n)
        assert len({layout.get(5, 1) for layout in (left, right, result)}) == 1
        return m, n, k

    def _cublasLtMatmul(self, *given: int) -> int:
        """As the library's documents say, but that sums are exact to f64 and rounded once."""
        handle, descriptor, alpha, a_at, a, b_at, b, beta, c_at, c, d_at, d, algorithm, work, size, stream = (
            given
        )
        self._get("library", handle)
        assert c == d
        assert list((ctypes.c_uint64 * 5).from_address(algorithm)) == [descriptor, a, b, c, d]
        assert size == self._workspace and work % 256 == 0
        promised = min(self._promised[descriptor], _ALIGNED)
        shift_at = self._get("descriptor", descriptor).get(8, 0)
        assert not any(at % promised for at in (a_at, b_at, c_at, d_at, shift_at)), (
            f"a matrix does not begin at {promised} bytes"
        )
        self._memory(work, size)
        number = ctypes.c_double if self._get("descriptor", descriptor)["scale"] else ctypes.c_float
        before = number.from_address(beta).value
        assert number.from_address(alpha).value == 1.0 and (before in (0.0, 1.0))
        assert before or c_at == d_at
        self._shapes(descriptor, a, b, d)
        transposed = self._get("descriptor", descriptor)
        x, y, z = (self._matrices(at, made) for at, made in ((a_at, a), (b_at, b), (d_at, d)))
        w, kind = self._matrices(c_at, c), z.dtype
        if shift_at:
            assert transposed[7] == 4
            shift = _array(self._memory(shift_at, z.shape[1] * kind.itemsize), kind, z.shape[1])
        x = x.swapaxes(1, 2) if transposed[3] else x
        y = y.swapaxes(1, 2) if transposed[4] else y

        def run() -> None:
            with np.errstate(all="ignore"):
                left, right = map(tf32, (x, y)) if transposed["compute"] == _TF32 else (x, y)
                sums = np.matmul(left.astype(np.float64), right.astype(np.float64))
                if before:
                    sums += w.astype(np.float64)
                if shift_at:
                    sums += shift.astype(np.float64)[:, None]
                z[...] = sums.astype(z.dtype)

        return self._start(run, stream)

    def _matrices(self, at: int, made: int) -> np.ndarray:
        """The column-major matrices of a layout."""
        layout = self._get("layout", made)
        kind, sizes = layout["kind"], (layout.get(5, 1), layout["rows"], layout["columns"])
        steps = (layout.get(6, 0), 1, layout["pitch"])
        reach = sum((extent - 1) * step for extent, step in zip(sizes, steps)) + 1
        elements = _array(self._memory(at, reach * kind.itemsize), kind, reach)
        return as_strided(elements, sizes, [step * kind.itemsize for step in steps])


def _taken(layout: dict[Any, Any], transposed: int) -> tuple[int, int]:
    return (layout["columns"], layout["rows"]) if transposed else (layout["rows"], layout["columns"])


def _number(where: int, size: int) -> int:
    return int.from_bytes(ctypes.string_at(where, size), "little", signed=True)


def _store(where: int, value: Any) -> None:
    ctypes.memmove(where, ctypes.byref(value), ctypes.sizeof(value))


def _array(at: int, kind: Any, count: int) -> np.ndarray:
    kind = np.dtype(kind)
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(at)
    return np.frombuffer(memory, kind)


def _copied(at: int) -> Any:
    """A copy of a struct of XLA's, whose first word is its size."""
    words = -(-ctypes.c_uint64.from_address(at).value // 8)
    made = (ctypes.c_uint64 * words)()
    ctypes.memmove(made, at, 8 * words)
    return made


def _give_stream(request: int) -> None:
    ctypes.cast(request, ctypes.POINTER(ctypes.c_int64))[ANSWER // 8] = STREAM
