"""The frame of an XLA FFI call, as the code of a handler reads it: version, buffers, services, errors.

    XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)

Whatever a handler runs, and on whatever device, it answers who it is, counts its buffers and fails like this.

Source: xla/ffi/api/c_api.h, which jaxlib ships; offsets below are of API version 0.3, and later versions of
    the same major number only add fields at the ends of structs.

When native code ran: the entries that handlers write to an `ExecutionLog`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import jax

from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.errors import CompileError
from mpmd.support.execution_log import (
    CAPACITY_AT,
    CLOCK_MONOTONIC,
    COUNT_AT,
    ENTRIES_AT,
    ENTRY,
    ENTRY_BYTES,
)

API_MAJOR, API_MINOR = 0, 3

# offsets in bytes
FRAME = {
    "extension": 8, "api": 16, "context": 24, "stage": 32,
    "arg_count": 56, "args": 72, "ret_count": 96, "rets": 112, "attributes": 160,
}  # fmt: skip
BUFFER_DATA = 24
EXTENSION = {"type": 8, "metadata": 24}
METADATA = {"major": 24, "minor": 28, "traits": 32}
ANSWER = 24  # where every question about a call is answered: behind size, extension and context
API = {"error_create": 48, "stream_get": 80, "state_set": 104, "run_id": 176, "device_ordinal": 184}
SCALAR_VALUE = 8  # where an attribute that is a number has the address of its value

METADATA_EXTENSION = 1
"""Of an enum of extensions: the one that requests the version."""

INSTANTIATE_STAGE, EXECUTE_STAGE = 0, 3
"""Of an enum of stages: an executable is loaded; a call does its work."""

_FAILED_PRECONDITION = 9
_ORDINAL_BYTES = 28  # of the struct that requests a device's number, an `i32`
STATE_BYTES = 48  # of the struct that sets a state
_ERROR_BYTES = 28  # of the struct that requests an error, up to its last field
_NULL = Value("null", "ptr")


@lru_cache(maxsize=1)
def check_version() -> None:
    """Refuse a jaxlib whose interface has another layout.

    Raises:
        CompileError: the major version of XLA's FFI differs, or its minor version is too old.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text())
    version = {part: int(number) for part, number in found}
    if version.get("MAJOR") != API_MAJOR or version.get("MINOR", 0) < API_MINOR:
        raise CompileError(
            f"this jaxlib has XLA FFI version {version.get('MAJOR')}.{version.get('MINOR')}; "
            f"native code needs {API_MAJOR}.{API_MINOR} or a later minor version.\n"
            "Use the `xla` backend, or a jaxlib that fits."
        )


class FfiFrame:
    """The frame of the call, while a handler is under construction.

    Args:
        module: takes the texts of errors.
        f: the handler, whose only argument is `frame`.
    """

    def __init__(self, module: Module, f: FunctionBuilder) -> None:
        self.module = module
        self.f = f
        self.address = f.arguments["frame"]

    def begin(self, only_stage: int = EXECUTE_STAGE, traits: int = 0) -> None:
        """Answer what XLA asks when it registers a handler; do nothing in other stages.

        Args:
            only_stage: the stage that the handler is for.
            traits: bits of `XLA_FFI_Handler_TraitsBits` that the handler says of itself.
        """
        self._answer_metadata(traits)
        stage = self.f.load(self._at("stage"), "i32")
        self.return_if(self.f.compare("ne", stage, constant(only_stage, "i32")), _NULL)

    def count(self, field: str) -> Value:
        """`arg_count` or `ret_count`, an `i64`."""
        return self.f.load(self._at(field), "i64")

    def buffers(self, field: str, count: int) -> Iterator[Value]:
        """Where the data of the first `args` or `rets` are."""
        buffers = self.f.load(self._at(field), "ptr")
        for number in range(count):
            buffer = self.f.load(buffers, "ptr", number)
            yield self.f.load(self.f.offset(buffer, BUFFER_DATA), "ptr")

    def attribute(self, number: int) -> Value:
        """The address of the value of an attribute that is a number; attributes are in the order of names."""
        scalar = self.f.load(self.f.load(self._at("attributes"), "ptr"), "ptr", number)
        return self.f.load(self.f.offset(scalar, SCALAR_VALUE), "ptr")

    def set_state(self, type_number: int, state: Value) -> None:
        """Attach a state to the call, for as long as its executable lives; only where it is instantiated.

        Args:
            type_number: the address of its `XLA_FFI_TypeId`, registered with what deletes such states.
            state: a pointer.
        """
        f = self.f
        request = f.stack("i64", STATE_BYTES // 8)
        fields: list[Value] = [
            constant(STATE_BYTES, "i64"),
            _NULL,
            f.load(self._at("context"), "ptr"),
            constant(INSTANTIATE_STAGE, "i64"),
            f.op(f"inttoptr i64 {type_number} to ptr", "ptr"),
            state,
        ]
        for number, value in enumerate(fields):
            f.store(value, request, number)
        error = f.op(f"call ptr {self._service('state_set')}(ptr {request})", "ptr")
        self.return_if(f.op(f"icmp ne ptr {error}, null", "i1"), error)

    def ask(self, service: str, size: int, kind: str = "i64") -> Value:
        """What XLA knows about this call; the handler ends with XLA's error if it does not know.

        Args:
            service: a function of `API` that takes a struct of size, extension, context and answer.
            size: bytes of that struct up to its last field.
            kind: the answer's type, of 8 bytes.
        """
        f = self.f
        request = f.stack("i64", 4)
        f.store(constant(size, "i64"), request)
        f.store(_NULL, request, 1)
        f.store(f.load(self._at("context"), "ptr"), request, 2)
        f.store(constant(0, "i64"), request, 3)
        error = f.op(f"call ptr {self._service(service)}(ptr {request})", "ptr")
        self.return_if(f.op(f"icmp ne ptr {error}, null", "i1"), error)
        return f.load(f.offset(request, ANSWER), kind)

    def device(self) -> Value:
        """XLA's number in this process of the device that is called, an `i64`."""
        return self.f.op(f"and i64 {self.ask('device_ordinal', _ORDINAL_BYTES)}, {2**32 - 1}", "i64")

    def fail_if(self, condition: Value, symbol: str, message: str) -> None:
        """End the handler with an error; `symbol` names its text in the module."""
        with self.f.branch_value(condition, _NULL) as branch:
            branch.value = self.error(self.text(symbol, message))
        self.return_if(condition, branch.result())

    def return_if(self, condition: Value, error: Value) -> None:
        """End the handler with an `XLA_FFI_Error*`, or well if that is null."""
        with self.f.when(condition, returns=True, value=error):
            pass

    def _at(self, field: str) -> Value:
        return self.f.offset(self.address, FRAME[field])

    def _answer_metadata(self, traits: int) -> None:
        f = self.f
        extension = f.load(self._at("extension"), "ptr")
        with f.when(f.op(f"icmp ne ptr {extension}, null", "i1")):
            kind = f.load(f.offset(extension, EXTENSION["type"]), "i32")
            asked = f.compare("eq", kind, constant(METADATA_EXTENSION, "i32"))
            with f.when(asked, returns=True, value=_NULL):
                metadata = f.load(f.offset(extension, EXTENSION["metadata"]), "ptr")
                answers = (("major", API_MAJOR), ("minor", API_MINOR), ("traits", traits))
                for field, value in answers:
                    f.store(constant(value, "i32"), f.offset(metadata, METADATA[field]))

    def _service(self, name: str) -> Value:
        api = self.f.load(self._at("api"), "ptr")
        return self.f.load(self.f.offset(api, API[name]), "ptr")

    def text(self, symbol: str, message: str) -> Value:
        """The address of a text that ends with a zero byte."""
        text = message.encode()
        escaped = "".join(chr(c) if 32 <= c < 127 and chr(c) not in '"\\' else f"\\{c:02X}" for c in text)
        self.module.add_global(symbol, f'internal constant [{len(text) + 1} x i8] c"{escaped}\\00"')
        return Value(f"@{symbol}", "ptr")

    def error(self, text: Value) -> Value:
        """A new `XLA_FFI_Error*`, with a copy of a text."""
        f = self.f
        request = f.stack("i64", 4)
        f.store(constant(_ERROR_BYTES, "i64"), request)
        f.store(_NULL, request, 1)
        f.store(text, request, 2)
        f.store(constant(_FAILED_PRECONDITION, "i32"), f.offset(request, 24))
        return f.op(f"call ptr {self._service('error_create')}(ptr {request})", "ptr")


def emit_now(f: FunctionBuilder) -> Value:
    """The nanoseconds of CLOCK_MONOTONIC as an `i64`: 25 ns, without a system call on Linux."""
    time = f.stack("i64", 2)
    f.call("clock_gettime", constant(CLOCK_MONOTONIC, "i32"), time, result="i32")
    seconds = f.op(f"mul i64 {f.load(time, 'i64')}, 1000000000", "i64")
    return f.op(f"add i64 {seconds}, {f.load(time, 'i64', 1)}", "i64")


def emit_entry(f: FunctionBuilder, log: Value, **fields: Value) -> None:
    """Write an entry of the `fields` of `ENTRY`, or only count it if the log is full."""
    number = f.atomic_add(f.offset(log, COUNT_AT), 1)
    has_room = f.compare("slt", number, f.load(f.offset(log, CAPACITY_AT), "i64"))
    with f.when(has_room):
        entry = f.offset(f.offset(log, ENTRIES_AT), f.imul(number, ENTRY_BYTES))
        for field, value in fields.items():
            f.store(value, f.offset(entry, ENTRY[field]))
