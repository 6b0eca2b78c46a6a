"""A compiled program on a GPU: kernels loaded, products prepared, constants copied, the handler bound.

A call of the driver or of cuBLASLt that fails leaves nothing behind.  Kernels, objects and memory are
released after the program that owns them, when the next one is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import weakref
from collections.abc import Sequence

import numpy as np

from mpmd.compile.backends.native_gpu.calls import (
    ENTRIES,
    EXECUTABLE,
    HEADER_WORDS,
    ROW_WORDS,
    STATE,
    block_words,
)
from mpmd.compile.backends.native_gpu.clock import PAIRED, clock_at
from mpmd.compile.backends.native_gpu.cublaslt import NoAlgorithm, PreparedProduct
from mpmd.compile.backends.native_gpu.cuda_driver import GpuDriver
from mpmd.compile.backends.native_gpu.gpu import OpenGpu
from mpmd.compile.backends.native_gpu.handler import PRODUCT_RECORD, WORKSPACE_ALIGNMENT
from mpmd.compile.backends.native_gpu.launches import LaunchProgram, ProductLaunch
from mpmd.compile.backends.native_gpu.libraries import DeviceError, address
from mpmd.compile.backends.native_gpu.products import ProductDescriptor
from mpmd.compile.backends.native_gpu.target import GpuCode
from mpmd.compile.buffers.assignment import Allocation, Slice
from mpmd.compile.llvm.engine import load_object
from mpmd.support.execution_log import TimeLog

BASE_ALIGNMENT = 128
"""Bytes: where memory that XLA allocates begins on a GPU."""
PARAMETER_ALIGNMENT = 16
"""The same of parameters, which others may have allocated, and of results, which may be in their memory."""


class LoadedGpuProgram:
    """A program on one GPU.

    Args:
        code: the program.
        gpu: the GPU.
        device: its number in the mesh that runs the program.
        command_buffers: whether calls are captured as graphs, if they can be.

    Attributes:
        function: its XLA FFI handler, a ctypes function of a frame.
        handler: the address that XLA calls for it.
        arena_bytes: of the last result of its call: temporaries, and the workspace of products.
        kept_bytes: that it keeps on the GPU: machine code and constants.

    Raises:
        CompileError: a call failed, or cuBLASLt is missing; names the program.
        NoAlgorithm: cuBLASLt lacks some of its products.
    """

    def __init__(
        self, code: GpuCode, gpu: OpenGpu, device: int = 0, *, command_buffers: bool = False
    ) -> None:
        program = code.program
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            try:
                gpu.driver.enter()
                # What ended programs left behind is released here: that waits for the whole GPU, which a
                # call must not.
                gpu.driver.release()
                kernels = _kernel_records(code, gpu.driver, undo)
                products = _prepared(program, gpu, undo)
                constants = gpu.driver.memory(program.constants, undo) if program.constants else 0
                table = _table(program, gpu)
                captured = command_buffers and program.is_capturable
                capturing = gpu.driver.stream(undo) if captured else 0
                # one block for calls that write their times, one for others: their graphs differ
                graphs = [_graphs(program, gpu.driver, undo) for _ in range(2 * captured)]
            except NoAlgorithm as error:
                raise NoAlgorithm(f"GPU program {program.name}: {error}", error.products) from error
            except DeviceError as error:
                raise DeviceError(f"GPU program {program.name}: {error}") from error
            self._undo = undo.pop_all()
        # Any thread may end a program: the release is only noted, and not at exit.
        weakref.finalize(self, gpu.driver.leave, self._undo).atexit = False
        needed = max((p.workspace_bytes for p in products), default=0)
        arena = program.allocations[-1].size
        self.arena_bytes = arena + needed + WORKSPACE_ALIGNMENT if products else max(1, arena)
        self.kept_bytes = code.size + len(program.constants)
        words = [word for p in products for word in map(p.words.__getitem__, PRODUCT_RECORD)]
        blocks = [_words(table), _words(kernels), _words(words)]
        handler, state = (f"{program.name}_{what}" for what in ("handler", "state"))
        host = load_object(code.handler, [handler, state])
        self.state = (ctypes.c_int64 * len(STATE)).from_address(
            host.function(state, result=ctypes.c_void_p)()
        )
        self._gpu, self._name, self._mark = gpu, program.name, 0
        self._graphs = [block.ctypes.data for block in graphs] or [0, 0]
        filled = {
            **dict(zip(STATE, (b.ctypes.data for b in blocks))),
            "context": gpu.driver.context,
            "constants": constants,
            "graphs": self._graphs[0],
            "capturing": capturing,
            "device": device,
        }
        self.state[:] = [filled.get(word, 0) for word in STATE]
        self.function = host.function(handler, ctypes.c_void_p, result=ctypes.c_void_p)
        self.handler = gpu.libraries.entry(host.address(handler))
        self._kept = [blocks, graphs, products, host, code]  # the handler has their addresses

    @property
    def address(self) -> int:
        return ctypes.addressof(self.state)

    def write_to(self, log: TimeLog | None, key: int) -> None:
        """Writes to a log, with a key, when its calls begin and end, from the next one on; None: to none.

        Graphs of calls that write are others, which are kept: their argument, the mark, stays where it is.
        """
        if log is None:
            self._set(stamp=0, graphs=self._graphs[0])
            return
        driver = self._gpu.driver
        driver.enter()
        mark = struct.pack("2Q", log.address_of(driver.ordinal), key | PAIRED)
        if self._mark:
            driver.write(self._mark, mark, f"the mark of GPU program {self._name}")
        else:
            self._mark = driver.memory(mark, self._undo, "marks")
        self._set(
            mark=self._mark,
            graphs=self._graphs[1],
            stamp=clock_at(self._gpu.libraries, driver.ordinal).function,
        )

    def _set(self, **words: int) -> None:
        for word, value in words.items():
            self.state[STATE.index(word)] = value


def _kernel_records(code: GpuCode, driver: GpuDriver, undo: contextlib.ExitStack) -> list[int]:
    """The records of the kernels, in the order of the program's."""
    words = []
    for name in code.program.kernels:
        cubin = code.cubins[name]
        words += [driver.kernel(cubin, undo), cubin.shared_bytes]
    return words


def _prepared(program: LaunchProgram, gpu: OpenGpu, undo: contextlib.ExitStack) -> list[PreparedProduct]:
    """The products, in the order of the program's descriptors."""
    alignments: dict[ProductDescriptor, int] = {}
    for step in program.launches():
        if isinstance(step, ProductLaunch):
            least = min(_alignment(place, program.allocations) for place in (*step.reads, step.d))
            alignments[step.descriptor] = min(least, alignments.get(step.descriptor, BASE_ALIGNMENT))
    prepared, missing = [], list[NoAlgorithm]()
    for product in program.descriptors:
        try:
            prepared.append(gpu.cublaslt.prepare(product, alignments[product], undo))
        except NoAlgorithm as error:
            missing.append(error)
    if missing:
        raise NoAlgorithm("\n".join(map(str, missing)), {p for error in missing for p in error.products})
    return prepared


def _alignment(place: Slice, allocations: Sequence[Allocation]) -> int:
    """The largest power of two that surely divides an address, up to its allocation's."""
    given = allocations[place.allocation].kind in ("parameter", "result")
    base = PARAMETER_ALIGNMENT if given else BASE_ALIGNMENT
    return min(base, place.offset & -place.offset or base)


def _table(program: LaunchProgram, gpu: OpenGpu) -> list[int]:
    """The addresses of `ENTRIES`; without products cuBLASLt's, which need not be here, are null."""
    addresses = []
    for name in ENTRIES:
        if not name.startswith("cublasLt"):
            addresses.append(address(gpu.driver.function(name)))
        else:
            addresses.append(address(gpu.cublaslt.function(name)) if program.descriptors else 0)
    return addresses


def _graphs(program: LaunchProgram, driver: GpuDriver, undo: contextlib.ExitStack) -> np.ndarray:
    """An empty block of graphs; see `capture.py`."""
    allocations = len(program.allocations)
    block = _words([0] * block_words(allocations))
    undo.callback(_destroy_graphs, block, allocations, driver)
    return block


def _destroy_graphs(block: np.ndarray, allocations: int, driver: GpuDriver) -> None:
    rows = block[HEADER_WORDS:].reshape(-1, ROW_WORDS + allocations)
    for executable in rows[:, EXECUTABLE]:
        if executable:
            driver.function("cuGraphExecDestroy")(int(executable))


def _words(values: Sequence[int]) -> np.ndarray:
    return np.array(values or [0], np.uint64)
