"""What tracing, compiling and running use of JAX and jaxlib that is not public.

Each function tests for the names that it needs and documents its result without them.  No other module but
`jax_distributed` may import `jax._src`, `jaxlib` or an experimental module.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import jax
from jax.core import ShapedArray as ShapedArray
from jax.errors import JaxRuntimeError as JaxRuntimeError
from jax.sharding import AxisType, NamedSharding, Sharding
from jaxlib.mlir._mlir_libs._mlir import register_operation as register_operation
from jaxlib.mlir.dialects import _func_ops_gen, _mpmd_ops_gen

func_dialect = _func_ops_gen._Dialect
mpmd_dialect = _mpmd_ops_gen._Dialect


def make_cpu_client(num_devices: int) -> Any | None:
    """A CPU client of its own with `num_devices` devices, or None where jaxlib cannot make one.

    Its thread pool is sized and pinned by the affinity mask of the calling thread.
    """
    try:
        from jaxlib import xla_client
    except ImportError:
        return None
    make = getattr(xla_client, "make_cpu_client", None)
    return None if make is None else make(num_devices=num_devices)


def trace_context() -> Hashable:
    """JAX's state that affects tracing: a function traced under another state is another program.

    It includes the random bits, the precision of products and 64-bit types.  Empty where this JAX does not
    provide it: a change of such a switch is then not noticed.
    """
    from jax._src import config

    found = getattr(config, "trace_context", None)
    return () if found is None else cast("Hashable", found())


def effort_levels() -> dict[str, int]:
    """Name -> number of XLA's levels of effort; empty where this JAX has none."""
    from jax._src import config

    levels = getattr(jax, "CompilerEffortLevel", None) or getattr(config, "EffortLevel", None)
    return {level.name: level.value for level in levels or ()}


def has_effort() -> bool:
    """Whether the user set how hard XLA shall try to make programs fast."""
    level = getattr(jax.config, "jax_optimization_level", "UNKNOWN")
    return str(getattr(level, "name", level)) != "UNKNOWN" or bool(
        getattr(jax.config, "jax_exec_time_optimization_effort", 0.0)
    )


class ClearedWithJax:
    """Calls a method when `jax.clear_caches()` is called, as long as this and the method's object exist.

    Never where this JAX does not provide it.
    """

    def __init__(self, clear: Callable[[], None]) -> None:
        from jax._src import util

        self._clear = weakref.WeakMethod(clear)
        register = getattr(util, "register_cache", None)
        if register is not None:
            register(self, repr(clear))

    def cache_clear(self) -> None:
        if (clear := self._clear()) is not None:
            clear()


def is_staging() -> bool:
    """Whether JAX is tracing: within `jax.jit`, loops and such.

    Always False where this JAX does not provide it.
    """
    from jax._src import core

    at_top = getattr(core, "trace_state_clean", None)
    return at_top is not None and not at_top() and isinstance(jax.numpy.zeros(()), jax.core.Tracer)


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


def format_of(leaf: Any, sharding: Sharding) -> Any:
    """The `Format` of an array whose elements are in the default order."""
    from jax.experimental.layout import Format, Layout

    tiled = next(iter(sharding.device_set)).platform == "tpu"  # by its compiler
    return Format(Layout(tuple(range(len(leaf.shape))), tiling=None if tiled else ()), sharding)


def compiled_for(
    compiled: jax.stages.Compiled, devices: Sequence[Any], others: Sequence[Any]
) -> jax.stages.Compiled | None:
    """An executable for some devices, loaded onto the same devices of another client.

    Loading is much faster than compiling.  None where the devices have other numbers, which an executable
    stores, or where the client cannot serialise executables.
    """
    from jax.experimental import serialize_executable

    if [device.id for device in devices] != [device.id for device in others]:
        return None
    try:
        written = serialize_executable.serialize(compiled)
        loaded = serialize_executable.deserialize_and_load(
            *written, backend=others[0].client, execution_devices=list(others)
        )
        return taking_packed(loaded)
    except (ValueError, jax.errors.JaxRuntimeError):
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


def host_callbacks(lowered: Any) -> tuple[Any, ...] | None:
    """The Python functions of custom calls of a lowered step, by position; None if JAX hides them."""
    arguments = getattr(getattr(lowered, "_lowering", None), "compile_args", None)
    if arguments is None or "host_callbacks" not in arguments:
        return None
    return tuple(arguments["host_callbacks"])


def ordered_effects(traced: jax.stages.Traced) -> tuple[str, ...]:
    """Ordered effects of a traced function: primitives, with their places.

    Empty where this JAX does not report ordered effects.
    """
    from jax._src import core, effects, source_info_util

    ordered = getattr(effects, "ordered_effects", None)
    inner = getattr(core, "jaxprs_in_params", None)
    place = getattr(source_info_util, "summarize", None)
    if ordered is None or inner is None or place is None:
        return ()
    found: dict[str, None] = {}

    def look_into(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if not ordered.filter_in(equation.effects):
                continue
            parts = list(inner(equation.params))
            if not parts:
                found[f"{equation.primitive.name} ({place(equation.source_info)})"] = None
            for part in parts:
                look_into(part)

    look_into(traced.jaxpr)
    return tuple(found)


_MESH_REFUSALS = (
    "should match the mesh passed to",  # jax.shard_map, over another mesh than that of the context
    "in_specs argument must be a pytree",  # jax.shard_map, without in_specs
    "names that are of type Auto or Manual",  # jax.reshard and out_sharding=, without explicit axes
    "can only refer to Auto axes of the mesh",  # with_sharding_constraint, over explicit axes
    "should match the mesh of sharding",  # out_sharding=, over another mesh
    "must match the mesh passed to shardings",  # jax.sharding.auto_axes
)


def refuses_mesh(error: Exception) -> bool:
    """Whether JAX raised an error because the mesh of the context, or a type of its axes, does not fit.

    Never where this JAX words it differently.
    """
    return any(text in str(error) for text in _MESH_REFUSALS)


def explicit_sharding(value: Any) -> NamedSharding | None:
    """The sharding in the type of an array or an abstract value; None if no axis of it is explicit."""
    kind = getattr(value, "aval", value)
    sharding = getattr(kind, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype, weakness and explicit sharding of an abstract value."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=explicit_sharding(aval)
    )


def closed_over(traced: jax.stages.Traced) -> tuple[jax.core.Tracer, ...]:
    """The tracers that a traced function reads beside its arguments: its jaxpr takes them first.

    They belong to a trace around it, or to one inside of it that has ended.  Empty where JAX does not list
    them.
    """
    values = getattr(traced, "_consts", ())
    return tuple(value for value in values if isinstance(value, jax.core.Tracer))


def created_by(tracer: jax.core.Tracer) -> tuple[str, str]:
    """The name of the function during whose tracing a value was created, and the place, `file:line`.

    Empty where this JAX does not provide it.
    """
    from jax._src import source_info_util

    name = getattr(getattr(tracer, "_debug_info", None), "func_name", "")
    place, line = getattr(source_info_util, "summarize", None), getattr(tracer, "_line_info", None)
    return str(name), "" if place is None or line is None else str(place(line))


def hlo_to_stablehlo(text: str) -> str | None:
    """HLO text as StableHLO text; None where jaxlib does not translate.

    Raises:
        RuntimeError, ValueError: XLA refuses the text.
    """
    try:
        from jaxlib import _hlo, _jax
    except ImportError:
        return None
    read, computation = getattr(_hlo, "hlo_module_from_text", None), getattr(_hlo, "XlaComputation", None)
    translate = getattr(getattr(_jax, "mlir", None), "xla_computation_to_mlir_module", None)
    if read is None or computation is None or translate is None:
        return None
    return str(translate(computation(read(text).as_serialized_hlo_module_proto())))


def is_key(dtype: Any) -> bool:
    """Whether a dtype is a random key's; keys are integers in lowered programs."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def as_key(data: jax.Array, dtype: Any) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


def default_platform() -> str:
    """The platform of `jax.devices()`, such as "cpu"."""
    return str(jax.default_backend())


def devices(platform: str) -> list[jax.Device]:
    """This process's devices of a platform, in order."""
    return list(jax.local_devices(backend=platform))


def default_memory_kind(sharding: Sharding) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs of an equation: branches, bodies of loops, called functions."""
    found: list[Any] = []
    for value in equation.params.values():
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            entry = getattr(entry, "jaxpr", entry)
            if hasattr(entry, "eqns") and hasattr(entry, "outvars"):
                found.append(entry)
    return found


def back_from_host(jaxpr: Any) -> list[str]:
    """The types of values that a jaxpr, or one within it, copies back from host memory: offloaded before."""
    found: list[str] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            kinds = [str(v.aval.str_short(short_dtypes=True)) for v in equation.invars if hasattr(v, "aval")]
            found += [kind.replace("<host>", "") for kind in kinds if "<host>" in kind]
        for inner in inner_jaxprs(equation):
            found += back_from_host(inner)
    return found


def lower_with_memories(traced: Any, platform: str, mark: str) -> Any:
    """`traced.lower` for a platform, with `device_put` to a memory as an operation also where JAX drops it.

    JAX writes none on CPUs.  There the operation has the attribute `mark`, so that it can be dropped later;
    it is dropped at once if this version of JAX takes no rules.
    """
    if platform != "cpu" or not back_from_host(traced.jaxpr.jaxpr):
        return traced.lower(lowering_platforms=(platform,))
    try:
        from jax._src import core, dispatch
        from jax._src.interpreters import mlir

        parameters, to_kind = mlir.LoweringParameters, core.mem_space_to_kind
        place, primitive, space = mlir.wrap_with_memory_kind, dispatch.device_put_p, core.MemorySpace
    except (ImportError, AttributeError):
        return traced.lower(lowering_platforms=(platform,))

    def lowered(context: Any, *values: Any, devices: Sequence[Any], **_: Any) -> list[Any]:
        placed = list(values)
        for k, device in enumerate(devices):
            if isinstance(device, space):
                placed[k] = place(context.module_context, values[k], to_kind(device), context.avals_out[k])
                placed[k].owner.attributes[mark] = mlir.ir.UnitAttr.get()
        return placed

    rules = parameters(override_lowering_rules=((primitive, lowered),))
    return traced.lower(lowering_platforms=(platform,), _private_parameters=rules)


def without_dead_code(jaxpr: Any, *, keep_inputs: bool = False) -> Any:
    """A jaxpr without equations that neither results nor effects need; unchanged if JAX cannot do it.

    Without `keep_inputs` it has no unneeded inputs, either.
    """
    from jax.interpreters import partial_eval

    eliminate = getattr(partial_eval, "dce_jaxpr", None)
    return jaxpr if eliminate is None else eliminate(jaxpr, [True] * len(jaxpr.outvars), keep_inputs)[0]


def rebind(equation: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of an equation of a jaxpr for other operands; some of its parameters may be changed.

    Operations get the name stack of the equation after the current one, in which `transpose(jvp(...))`
    distinguishes backward from forward work, its place in the source, and its context.
    """
    with as_of(equation):
        given = equation.primitive.get_bind_params({**equation.params, **changed})
        made = equation.primitive.bind(*values, **given)
    return list(made) if equation.primitive.multiple_results else [made]


@contextlib.contextmanager
def as_of(equation: Any) -> Iterator[None]:
    """Operations that are traced inside have the name stack, place and context of an equation."""
    from jax._src import source_info_util

    scope = source_info_util.current_name_stack() + equation.source_info.name_stack
    place = source_info_util.user_context(equation.source_info.traceback, name_stack=scope)
    with place, equation.ctx.manager:
        yield


def place_of(equation: Any) -> str:
    """The place of an equation in the user's source, `file:line (function)`; "" if it is not known."""
    from jax._src import source_info_util

    summarize = getattr(source_info_util, "summarize", None)
    found = "" if summarize is None else str(summarize(equation.source_info))
    return "" if found == "unknown" else found


def scope_of(equation: Any) -> str:
    """The name stack of an equation within its jaxpr, such as `Model/layers_0/Dense_0`, or ""."""
    return str(getattr(equation.source_info, "name_stack", ""))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many carried; JAX 0.11 stores pytrees of them."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)
