"""Calls of compiled functions and copies of arrays, in the order they are made and with minimal overhead.

As in `jax_compat`, each function tests for the names of JAX that it needs, and documents its result without.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def taking_packed(compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """A call that takes arrays of elements smaller than a byte, such as `int4`.

    JAX compares the layouts of arguments with those compiled for, where only the latter say that elements are
    packed: it refuses every such array with a default layout, its own results too.  Here the order of dims in
    an unspecified layout is the default; any other is still compared.
    """
    executable: Any = getattr(compiled, "_executable", None)
    layouts = getattr(executable, "_xla_in_layouts", None)
    if layouts is not None:
        executable._xla_in_layouts = [None if _only_says_packed(layout) else layout for layout in layouts]
    return compiled


def _only_says_packed(layout: Any) -> bool:
    order = tuple(getattr(layout, "major_to_minor", ()))
    packed = getattr(layout, "sub_byte_element_size_in_bits", 0) > 0
    return packed and order == tuple(range(len(order)))


def compiled_for(
    compiled: jax.stages.Compiled, devices: Sequence[Any], others: Sequence[Any]
) -> jax.stages.Compiled | None:
    """An executable for some devices, loaded onto others of the same platform.

    Loading is much faster than compiling.  The serialised executable holds the numbers of its devices three
    times: JAX's shardings name them, JAX's reader resolves them, and XLA's options assign them; all three are
    replaced.  None where this JAX cannot.
    """
    from jax.experimental import serialize_executable
    from jaxlib import xla_client

    reader: Any = getattr(serialize_executable, "_JaxPjrtUnpickler", None)
    if reader is None:
        return None
    options = xla_client.CompileOptions()
    options.num_partitions = len(others)
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in others]]))

    class OntoOthers(reader):
        def persistent_load(self, pid: Any) -> Any:
            if pid[0] != "exec":
                return super().persistent_load(pid)
            return self.backend.deserialize_executable(pid[1], self.execution_devices, options)

    try:
        written, in_tree, out_tree = serialize_executable.serialize(compiled)
        loading = OntoOthers(io.BytesIO(written), others[0].client, list(others))
        loading.devices_by_id = {device.id: other for device, other in zip(devices, others, strict=True)}
        unloaded, args_info, no_kwargs = loading.load()
        loaded = jax.stages.Compiled(
            unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs
        )
        return taking_packed(loaded)
    except (AttributeError, TypeError, ValueError, jax.errors.JaxRuntimeError):
        return None


def direct_call(compiled: jax.stages.Compiled) -> Callable[..., Any]:
    """Calls a compiled function of arrays, one that returns a list, with minimal overhead.

    On one device, arrays of types that were accepted before go to the executable at once.  XLA checks that
    they are on its device, and `in_order` that their elements are in order.  All other arguments go through
    JAX, as does everything where this JAX has no such calls.
    """
    executable, parameters = getattr(compiled, "_executable", None), getattr(compiled, "_params", None)
    make = getattr(executable, "create_cpp_call", None)
    call = make(parameters) if make is not None and parameters is not None else None
    checked: Callable[..., Any] = compiled if call is None else call
    launch = _launch(executable, parameters)
    return checked if launch is None else _call_of_known_types(checked, *launch)


def _launch(
    executable: Any, parameters: Any
) -> tuple[int, Callable[..., Any], Sequence[Any], Callable[[Any], Any]] | None:
    """The number of arrays of an executable of one device; functions that start it, build its results, and
    return the type of an array.

    None if a call needs more than that, or JAX lacks one of these.
    """
    from jaxlib import _jax

    runner: Any = getattr(executable, "unsafe_call", None)
    loaded: Any = getattr(executable, "xla_executable", None)
    start = getattr(loaded, "execute_sharded", None)
    handlers = getattr(getattr(runner, "out_handler", None), "handlers", None)
    type_of = getattr(getattr(getattr(_jax, "ArrayImpl", None), "aval", None), "fget", None)
    effects = ("ordered_effects", "has_unordered_effects", "has_host_callbacks", "mut", "pgle_profiler")
    if start is None or not handlers or type_of is None or any(getattr(runner, n, True) for n in effects):
        return None
    nothing, count = jax.tree.structure(None), len(getattr(executable, "in_avals", ()))
    flat = [jax.tree.structure((tuple(range(count)), {})), jax.tree.structure([0] * len(handlers))]
    is_flat = [getattr(parameters, name, nothing) for name in ("in_tree", "out_tree")] == flat
    kept = set(getattr(runner, "kept_var_idx", ()))
    whole = kept == set(range(count)) and not getattr(parameters, "const_args", True)
    if not is_flat or not whole or len(loaded.local_devices()) != 1:
        return None
    return count, start, handlers, type_of


_CALL = """
def call({names}):
    try:
        known = {known}
    except TypeError:  # one is not an array, or is a tracer
        known = False
    if not known:
        return other({names})
    try:
        started = start(({names}))
    except failure as error:
        return refused(error, {names})
    return started.consume_with_handlers(handlers)
"""


def _call_of_known_types(
    checked: Callable[..., Any],
    count: int,
    start: Callable[..., Any],
    handlers: Sequence[Any],
    type_of: Callable[[Any], Any],
) -> Callable[..., Any]:
    """A call that passes arguments of other types than the last accepted ones to `checked`.

    Its source is generated for its number of arguments; it first compares their types by identity with those
    of the last call, which is faster than comparing lists.
    """

    def other(*arrays: Any) -> Any:
        try:
            types = {f"type_{k}": type_of(array) for k, array in enumerate(arrays)}
        except TypeError:
            return checked(*arrays)
        if all(scope[name] == type for name, type in types.items()):
            scope.update(types)
            return call(*arrays)
        made = checked(*arrays)
        scope.update(types)
        return made

    def refused(error: Exception, *arrays: Any) -> Any:
        if "INVALID_ARGUMENT" in str(error):  # it did not start; JAX reports the reason
            return checked(*arrays)
        raise error

    names = "".join(f"array_{k}, " for k in range(count))
    known = " and ".join(f"type_of(array_{k}) is type_{k}" for k in range(count)) or "True"
    scope: dict[str, Any] = {f"type_{k}": None for k in range(count)}
    scope |= {"start": start, "handlers": handlers, "failure": jax.errors.JaxRuntimeError}
    scope |= {"type_of": type_of, "other": other, "refused": refused}
    exec(_CALL.format(names=names, known=known), scope)
    call: Callable[..., Any] = scope["call"]
    return call


@contextlib.contextmanager
def execution_order(number: int) -> Iterator[bool]:
    """Orders the programs that this thread starts on CPU devices inside it separately.

    On a device, programs of one thread run in the order in which they were started; programs with a number,
    from 1 up, are ordered only among those with the same one.  Yields whether that is so: False where this
    jaxlib has no such orders.
    """
    from jaxlib import _jax

    ask, choose = (getattr(_jax, f"{verb}_execution_stream_id", None) for verb in ("get", "set"))
    if ask is None or choose is None:
        yield False
        return
    outside = ask()
    choose(number)
    try:
        yield True
    finally:
        choose(outside)


def in_order(rank: int) -> Callable[[jax.Array], jax.Array]:
    """A function of an array of so many dims on CPUs: itself, or a copy if its elements are in another order.

    Such arrays are created by `jax.experimental.layout` only.
    """
    from jax.experimental.layout import Format, Layout

    if rank < 2:
        return lambda array: array
    order = tuple(range(rank))
    known: Any = None

    def as_ordered(array: jax.Array) -> jax.Array:
        nonlocal known
        if array.is_deleted():  # the reader reports it
            return array
        layout = getattr(array, "_pjrt_layout", None)
        if layout is not None and known is not None and layout == known:
            return array
        form = getattr(array, "format", None)
        if form is None or form.layout is None:  # random keys, which consist of such arrays
            return array
        if form.layout.major_to_minor != order:
            return jax.device_put(array, Format(Layout(order), array.sharding))
        known = layout
        return array

    return as_ordered


def array_copier(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    """A function that copies an array to `target` without waiting for the array to be computed.

    The array must be sharded as `target` is: over as many devices, with equal shards.  Where jaxlib offers
    the call behind `jax.device_put`, it is used directly, with less overhead.  Otherwise the function is
    `jax.device_put`, which does the same and copies to the same device only on request.
    """
    batched = _batched_copy()
    if batched is None:
        return lambda array: jax.device_put(array, target, may_alias=False)
    copy, make_device_list, semantics = batched
    devices = [make_device_list(_devices_in_order(target))]
    shardings, how = [target], [semantics]
    of_thread = _transfers_of_thread()

    def copy_to_target(array: jax.Array) -> jax.Array:
        thread = of_thread()
        outside, thread.explicit_device_put = thread.explicit_device_put, True
        try:
            result: jax.Array = copy([array], devices, shardings, how)[0]
        finally:
            thread.explicit_device_put = outside
        return result

    return copy_to_target


class _Unguarded:
    """Replaces the state of a thread's transfers where JAX does not provide it."""

    explicit_device_put = False


def _transfers_of_thread() -> Callable[[], Any]:
    """JAX's state of a thread's transfers: `jax.transfer_guard` allows explicit ones."""
    try:
        from jaxlib._jax import guard_lib
    except ImportError:
        return _Unguarded
    of_thread: Callable[[], Any] = getattr(guard_lib, "thread_local_state", _Unguarded)
    return of_thread if hasattr(of_thread(), "explicit_device_put") else _Unguarded


def _batched_copy() -> tuple[Callable[..., Any], Callable[..., Any], Any] | None:
    try:
        from jaxlib import xla_client
    except ImportError:
        return None
    copy = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)
    make_device_list = getattr(xla_client, "DeviceList", None)
    semantics = getattr(getattr(xla_client, "ArrayCopySemantics", None), "ALWAYS_COPY", None)
    if copy is None or make_device_list is None or semantics is None:
        return None
    return copy, make_device_list, semantics


def _devices_in_order(sharding: Sharding) -> tuple[Any, ...]:
    """The devices of a sharding in the order of its shards in JAX."""
    mesh = getattr(sharding, "mesh", None)
    return tuple(sharding.device_set if mesh is None else mesh.devices.flat)
