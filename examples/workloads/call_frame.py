"""A call frame as XLA makes it, for calling a handler without XLA.

The structs are laid out as in xla/ffi/api/c_api.h; offsets are those that handlers read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from mpmd.compile.backends.ffi.frame import (
    API,
    BUFFER_DATA,
    EXECUTE_STAGE,
    EXTENSION,
    FRAME,
    METADATA,
    METADATA_EXTENSION,
)

_ERROR = 0xE0  # what stands for an XLA_FFI_Error*


class CompiledHandler(Protocol):
    """Compiled code that XLA calls."""

    @property
    def function(self) -> Any:
        """A ctypes function of the address of a frame."""


class CallFrame:
    """One call of a handler.

    Attributes:
        errors: messages of the errors that the handler made.
    """

    def __init__(self, arguments: Sequence[int], results: Sequence[int], *, stream: int = 0x77) -> None:
        """Takes the addresses of the buffers, and what the stream is."""
        self.errors: list[str] = []
        self._stream = stream
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        self._callbacks = [function(self._create_error), function(self._get_stream)]
        self._api = (ctypes.c_void_p * 32)()
        self._api[API["error_create"] // 8] = ctypes.cast(self._callbacks[0], ctypes.c_void_p).value
        self._api[API["stream_get"] // 8] = ctypes.cast(self._callbacks[1], ctypes.c_void_p).value
        self._frame = (ctypes.c_int64 * 24)()
        self._kept: list[Any] = []
        self._put("api", ctypes.addressof(self._api))
        self._frame[FRAME["context"] // 8] = 0xC0
        ctypes.c_int32.from_buffer(self._frame, FRAME["stage"]).value = EXECUTE_STAGE
        for count, where, buffers in (("arg_count", "args", arguments), ("ret_count", "rets", results)):
            self._put(count, len(buffers))
            self._put(where, self._listed(buffers))

    def run(self, handler: CompiledHandler) -> bool:
        """Calls the handler; whether it succeeded."""
        return handler.function(ctypes.addressof(self._frame)) != _ERROR

    def metadata(self, handler: CompiledHandler) -> tuple[int, int, int]:
        """The handler's answer to XLA's query: API major, minor, traits."""
        metadata = (ctypes.c_int32 * 16)(*[-1] * 16)
        extension = (ctypes.c_int64 * 4)()
        ctypes.c_int32.from_buffer(extension, EXTENSION["type"]).value = METADATA_EXTENSION
        extension[EXTENSION["metadata"] // 8] = ctypes.addressof(metadata)
        self._put("extension", ctypes.addressof(extension))
        handler.function(ctypes.addressof(self._frame))
        self._put("extension", 0)
        major, minor, traits = (metadata[METADATA[name] // 4] for name in ("major", "minor", "traits"))
        return major, minor, traits

    def _put(self, field: str, value: int) -> None:
        self._frame[FRAME[field] // 8] = value

    def _listed(self, buffers: Sequence[int]) -> int:
        """The address of an array of pointers to buffer structs."""
        structs = [(ctypes.c_int64 * 8)() for _ in buffers]
        for struct, address in zip(structs, buffers, strict=True):
            struct[BUFFER_DATA // 8] = address
        listed = (ctypes.c_void_p * max(1, len(buffers)))(*map(ctypes.addressof, structs))
        self._kept += [structs, listed]
        return ctypes.addressof(listed)

    def _create_error(self, request: int) -> int:
        words = ctypes.cast(request, ctypes.POINTER(ctypes.c_void_p))
        self.errors.append(ctypes.string_at(words[2] or 0).decode())
        return _ERROR

    def _get_stream(self, request: int) -> None:
        ctypes.cast(request, ctypes.POINTER(ctypes.c_int64))[3] = self._stream
