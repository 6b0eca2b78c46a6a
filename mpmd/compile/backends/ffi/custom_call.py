"""The one custom call target of all native programs, and which of them may be unloaded.

XLA keeps target names and handlers for the life of the process.  The only handler that it is given here, one
for each platform, lives as long; an attribute of the call says which program to enter, an index of a table:

    mpmd_native(frame):        table[frame.attribute].handler(frame)
    of several devices:        table[frame.attribute].handlers[frame.device](frame)
    instantiate(frame):        table[frame.attribute].executables += 1
    deleter(executables):      *executables -= 1

XLA instantiates a call when it loads an executable, and deletes the call's state with the executable, after
the last execution.  A program is loaded once for each name, and unloaded when neither Python refers to it nor
an executable calls it.

Source: xla/ffi/api/c_api.h (`XLA_FFI_State_Set`, `XLA_FFI_TypeInfo`), which jaxlib ships.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from mpmd.compile.backends.ffi.frame import EXECUTE_STAGE, INSTANTIATE_STAGE, FfiFrame
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.llvm.engine import LoadedCode, compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.errors import CompileError
from mpmd.support.resources import keep_past_exit, once, release

TARGET_NAME = "mpmd_native"
ATTRIBUTE = "program"

_HANDLER, _EXECUTABLES, _DEVICES, _ENTRY = 0, 1, 2, 3
"""Columns of the table, and how many: the handler's address, executables that call the program, and the
address of the handlers of each device, if there are any."""

_MAX_PROGRAMS = 1 << 16
"""The table cannot grow, since handlers have its address: 1.5 MiB, whose pages are used as rows are."""


class DeviceHandlers:
    """The handlers of a program that several devices run, each with its own memory.

    Args:
        handlers: XLA's number of a device in its process → the address of its handler.

    Attributes:
        words: how many follow, null, and the handlers, null where there is none.
    """

    def __init__(self, handlers: Mapping[int, int]) -> None:
        self.words = np.zeros(3 + max(handlers), np.int64)
        self.words[0] = 2 + max(handlers)
        for device, handler in handlers.items():
            self.words[2 + device] = handler


class _Table:
    """Programs of a platform that are loaded, by index; indices are used again."""

    def __init__(self, platform: str) -> None:
        self.rows = np.zeros((_MAX_PROGRAMS, _ENTRY), np.int64)
        self.code = _compile(platform, self.rows.ctypes.data, *_state_type())
        self._free: list[int] = []
        self._used = 0
        stages = ("instantiate", "execute")
        handlers = {stage: capsule(self.code.address(f"mpmd_{stage}")) for stage in stages}
        jax.ffi.register_ffi_target(TARGET_NAME, handlers, platform=platform)

    def add(self, handler: int | DeviceHandlers) -> int:
        if not self._free and self._used == _MAX_PROGRAMS:
            raise CompileError(
                f"{_MAX_PROGRAMS:,} native programs are loaded, and no more can be\n"
                "  drop steps that are not needed any more, or their compiled programs by clear_cache()"
            )
        if self._free:
            index = self._free.pop()
        else:
            index, self._used = self._used, self._used + 1
        if isinstance(handler, DeviceHandlers):
            self.rows[index] = self.code.address("mpmd_by_device"), 0, handler.words.ctypes.data
        else:
            self.rows[index] = handler, 0, 0
        return index

    def remove(self, index: int) -> None:
        self.rows[index] = 0
        self._free.append(index)


def add_program(handler: int | DeviceHandlers, platform: str = "cpu") -> int:
    """Makes a handler callable by the custom call; callers hold a lock.

    Args:
        handler: the address of an `XLA_FFI_Handler`; or one for each device, which the caller keeps.
        platform: as XLA names it, `"cpu"` or `"CUDA"`.

    Returns:
        The program's index, the value of `ATTRIBUTE` in its calls.

    Raises:
        CompileError: too many programs are loaded.
    """
    return _table(platform).add(handler)


def is_called(index: int, platform: str = "cpu") -> bool:
    """Whether XLA has an executable that calls the program."""
    return bool(_table(platform).rows[index, _EXECUTABLES])


def remove_program(index: int, platform: str = "cpu") -> None:
    """Forgets a program that no executable calls; callers hold a lock."""
    _table(platform).remove(index)


def capsule(address: int) -> Any:
    create = ctypes.pythonapi.PyCapsule_New
    create.restype, create.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return create(address, None, None)


@once
def _table(platform: str) -> _Table:
    """The table of a platform: XLA destroys executables, and calls the deleter, after Python's modules."""
    table = _Table(platform)
    for used in (table.rows, table.code):
        keep_past_exit(used)
    return table


def _state_type() -> tuple[np.ndarray, np.ndarray]:
    """Memory of an `XLA_FFI_TypeId` and of an `XLA_FFI_TypeInfo` (size, extension, deleter)."""
    number, info = np.zeros(1, np.int64), np.zeros(3, np.int64)
    info[0] = info.nbytes
    return number, info


def _compile(platform: str, table: int, type_number: np.ndarray, type_info: np.ndarray) -> LoadedCode:
    """The handlers of the target, with the type of its state registered."""
    module = Module(host_target())
    _emit_execute(module, table)
    _emit_by_device(module, table)
    _emit_instantiate(module, table, type_number.ctypes.data)
    with FunctionBuilder(module, "mpmd_deleter", [("executables", "ptr")], plain=True) as f:
        f.atomic_add(f.arguments["executables"], -1)
    code = compile_module(module, ["mpmd_execute", "mpmd_by_device", "mpmd_instantiate", "mpmd_deleter"])
    type_info[2] = code.address("mpmd_deleter")
    kind = {"type_id": capsule(type_number.ctypes.data), "type_info": capsule(type_info.ctypes.data)}
    jax.ffi.register_ffi_type("mpmd_native_executables", kind, platform=platform)
    code.state_type = type_number, type_info  # type: ignore[attr-defined]  # XLA keeps their addresses
    return code


def _emit_execute(module: Module, table: int) -> None:
    with FunctionBuilder(module, "mpmd_execute", [("frame", "ptr")], result="ptr", plain=True) as f:
        frame = FfiFrame(module, f)
        frame.begin(EXECUTE_STAGE)
        handler = f.load(_entry(frame, table), "ptr", _HANDLER)
        f.ret(f.op(f"call ptr {handler}({frame.address.typed})", "ptr"))


def _emit_by_device(module: Module, table: int) -> None:
    """The handler of programs with `DeviceHandlers`: calls the handler of the device it runs on."""
    with FunctionBuilder(module, "mpmd_by_device", [("frame", "ptr")], result="ptr", plain=True) as f:
        frame = FfiFrame(module, f)
        handlers = f.load(_entry(frame, table), "ptr", _DEVICES)
        number = f.op(f"add i64 {frame.device()}, 1", "i64")
        outside = f.compare("uge", number, f.load(handlers, "i64"))
        number = f.select(outside, constant(0, "i64"), number)
        handler = f.load(f.offset(f.offset(handlers, 8), f.imul(number, 8)), "ptr")
        missing = f.op(f"icmp eq ptr {handler}, null", "i1")
        frame.fail_if(missing, "mpmd_device", "a native program is called on a device that has not loaded it")
        f.ret(f.op(f"call ptr {handler}({frame.address.typed})", "ptr"))


def _emit_instantiate(module: Module, table: int, type_number: int) -> None:
    with FunctionBuilder(module, "mpmd_instantiate", [("frame", "ptr")], result="ptr", plain=True) as f:
        frame = FfiFrame(module, f)
        frame.begin(INSTANTIATE_STAGE)
        executables = f.offset(_entry(frame, table), 8 * _EXECUTABLES)
        f.atomic_add(executables, 1)
        frame.set_state(type_number, executables)
        f.ret(Value("null", "ptr"))


def _entry(frame: FfiFrame, table: int) -> Value:
    f = frame.f
    index = f.load(frame.attribute(0), "i64")
    start = f.op(f"inttoptr i64 {table} to ptr", "ptr")
    return f.offset(start, f.imul(index, 8 * _ENTRY))


P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class ProgramLoad(Generic[P]):
    """What loading a program gives.

    Attributes:
        handler: the address of its handler, or one for each of its devices.
        program: the program, of its index among its platform's.
        owned: code and memory of the program; it is dropped when the program is unloaded, and not at exit:
            calls that were issued may begin after Python's end.
    """

    handler: int | DeviceHandlers
    program: Callable[[int], P]
    owned: Any


class LoadedPrograms(Generic[P]):
    """The programs of one target.

    Args:
        platform: of JAX, that calls them.
    """

    def __init__(self, platform: str = "cpu") -> None:
        self.platform = platform
        self._lock = threading.Lock()
        self._programs: weakref.WeakValueDictionary[str, P] = weakref.WeakValueDictionary()
        self._retired: list[tuple[int, Any]] = []
        """Programs that nothing refers to: index and what it owns.  XLA may still call some."""

    def named(self, name: str, load: Callable[[], ProgramLoad[P]]) -> P:
        """The program of that name, which `load` loads if it is new."""
        with self._lock:
            self._unload()
            known = self._programs.get(name)
            if known is not None:
                return known
            loaded = load()
            index = add_program(loaded.handler, self.platform)
            owned = loaded.owned, loaded.handler
            keep_past_exit(owned)
            program = self._programs[name] = loaded.program(index)
            weakref.finalize(program, self._retire, index, owned).atexit = False
            return program

    def _retire(self, index: int, owned: Any) -> None:
        """Called when the last reference to a program goes, at any point of any thread: waits for no lock."""
        self._retired.append((index, owned))
        if self._lock.acquire(blocking=False):
            try:
                self._unload()
            finally:
                self._lock.release()

    def _unload(self) -> None:
        """Unloads the programs that nothing refers to and no executable calls; under the lock."""
        for _ in range(len(self._retired)):
            index, owned = self._retired.pop(0)
            if is_called(index, self.platform):
                self._retired.append((index, owned))
            else:
                remove_program(index, self.platform)
                release(owned)
