"""When arrays are ready, and which fragment runs, as the device and a profiler record it.

A stamp is a tiny program per array that writes to a log when the array is ready: a custom call that does not
read the array; it waits for it because it is an argument.  It runs on the array's own device, in the order of
the programs that its thread starts there (on a GPU, on the stream on which it computes), or, with
`stamp_in_own_order`, in an order of its own.  An array over several devices has a stamp for each: XLA runs
the programs of several devices one after the other, and one that waits would delay the next.

An annotation of `jax.profiler`, which xprof and TensorBoard show, covers the dispatch of a call, on the
thread that issues its mesh.  Where the profiler records the execution on the device too, XLA's own
events show it under the name of the fragment's module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation, TraceAnnotation
from jax.sharding import Sharding, SingleDeviceSharding

from mpmd.jax_calls import execution_order
from mpmd.jax_compat import default_memory_kind
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.streams import task_text
from mpmd.runtime.run.interpreter import BoundCall, Observer, StepState
from mpmd.support.execution_log import TimeLog

Mark = Mapping[Any, jax.Array]
"""Second arguments of the stamps of an array, by the device of the mesh: `u64[2]`, the log and the key."""


class StampSource(Protocol):
    """What writes times on the devices of a platform.

    Attributes:
        ordered_apart: whether stamps can have an order of their own.
    """

    ordered_apart: bool

    def target(self, device: Any) -> str:
        """A custom call that writes the time to a log: `(u64[2]: address of the log, key) -> s8[]`."""

    def log(self, devices: Sequence[Any], room: int) -> TimeLog:
        """An empty log for some devices, with room for so many entries of each."""


class Stamps:
    """Writes stamps of the arrays of some meshes.

    Args:
        source: of the platform of their devices.
        devices: where the arrays live.
    """

    def __init__(self, source: StampSource, devices: MeshDevices) -> None:
        self._source, self._devices, self._programs = source, devices, devices.programs

    @property
    def ordered_apart(self) -> bool:
        """Whether stamps can have an order of their own."""
        return self._source.ordered_apart

    def log(self, mesh: str, room: int) -> TimeLog:
        """An empty log for a mesh, with room for so many entries of each device."""
        return self._source.log(self._own(mesh), room)

    def _own(self, mesh: str) -> list[Any]:
        return list(self._devices.meshes[mesh].local_devices)

    def marks(self, mesh: str, log: TimeLog, keys: list[int]) -> dict[int, Mark]:
        """The marks with which stamps of a mesh write these keys."""
        devices, placed = self._own(mesh), []
        with jax.enable_x64(True):
            for device in devices:
                address = log.address_of(max(0, device.local_hardware_id or 0))
                words = [np.array([address, key], np.uint64) for key in keys]
                placed.append(jax.device_put(words, device))
            jax.block_until_ready(placed)
        return {key: dict(zip(devices, of, strict=True)) for key, of in zip(keys, zip(*placed), strict=True)}

    def prepare(self, types: Iterable[BufferType]) -> None:
        """Compiles the stamps of such buffers, so that they take no time later."""
        for kind in dict.fromkeys(types):
            sharding = self._devices.sharding(kind)
            part = sharding.shard_shape(kind.shape), np.dtype(kind.dtype)
            for device in self._own(kind.mesh):
                self._program(*part, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))

    def stamp(self, mark: Mark, array: jax.Array) -> list[jax.Array]:
        """Starts the stamps of an array that is ready or on its way; their results, of one element each."""
        if len(mark) == 1 and array.is_fully_addressable:
            (only,) = mark.values()
            return [self._program(array.shape, array.dtype, array.sharding)(only, array)]
        parts = [(shard.device, shard.data) for shard in array.addressable_shards]
        return [self._program(p.shape, p.dtype, p.sharding)(mark[device], p) for device, p in parts]

    def stamp_in_own_order(self, number: int, mark: Mark, array: jax.Array) -> list[jax.Array]:
        """Stamps that are ordered only among themselves: each waits for its array and for earlier stamps.

        None if this jaxlib has one order only.  Only for a source with `ordered_apart`.
        """
        with execution_order(number) as is_apart:
            return self.stamp(mark, array) if is_apart else []

    def _program(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> Callable[..., jax.Array]:
        (device,) = sharding.device_set
        memory = sharding.memory_kind or default_memory_kind(sharding)
        target = self._source.target(device)
        key = target, shape, dtype, device, memory
        if key not in self._programs:
            write = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((), np.int8))
            here = SingleDeviceSharding(device)
            jitted = jax.jit(lambda mark, array: write(mark), keep_unused=True, out_shardings=here)
            with jax.enable_x64(True):  # values inside of a step may have 64 bits whatever the user's setting
                mark = jax.ShapeDtypeStruct((2,), np.uint64, sharding=here)
                there = SingleDeviceSharding(device, memory_kind=memory)
                array = jax.ShapeDtypeStruct(shape, dtype, sharding=there)
                self._programs[key] = jitted.lower(mark, array).compile()
        return self._programs[key]


def step_annotation(name: str, number: int) -> contextlib.AbstractContextManager[Any]:
    """Covers the dispatch of a step, which tools for traces number and divide by."""
    return StepTraceAnnotation(f"mpmd {name}", step_num=number)


class DispatchAnnotations(Observer):
    """An annotation for each call: fragment, task and mesh in its name, and each of them in its metadata."""

    def __init__(self) -> None:
        self._open = threading.local()

    def calling(self, call: BoundCall, frame: StepState) -> None:
        op = call.op
        task = task_text(op)
        facts = {"stage": op.stage, "microbatch": op.microbatch, "phase": op.phase or None}
        known = {word: fact for word, fact in facts.items() if fact is not None}
        label = f"{op.executable}{f' {task}' if task else ''} on {call.mesh}"
        where = {"fragment": op.executable, "mesh": call.mesh, "step": frame.number}
        self._open.annotation = TraceAnnotation(label, **where, **known)
        self._open.annotation.__enter__()

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        """Ends it; that of a call that failed ends when it is deleted, with the step."""
        self._open.annotation.__exit__(None, None, None)
        self._open.annotation = None


def dispatch_annotations() -> list[DispatchAnnotations]:
    """The observer of a step while a trace is recorded; otherwise none, and this check is the cost."""
    return [DispatchAnnotations()] if TraceAnnotation.is_enabled() else []
