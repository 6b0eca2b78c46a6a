"""What tracing, compiling and running use of JAX and jaxlib that is not public.

Each function tests for the names that it needs and documents its result without them.  No other module but
`jax_calls` and `jax_distributed` may import `jax._src`, `jaxlib` or an experimental module.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
from jax.core import ShapedArray as ShapedArray
from jax.errors import JaxRuntimeError as JaxRuntimeError
from jax.sharding import AxisType, NamedSharding, Sharding
from jaxlib.mlir._mlir_libs._mlir import register_operation as register_operation
from jaxlib.mlir.dialects import _func_ops_gen, _mpmd_ops_gen

func_dialect = _func_ops_gen._Dialect
mpmd_dialect = _mpmd_ops_gen._Dialect


def make_cpu_client(num_devices: int, number: int = 0) -> Any | None:
    """A CPU client of its own with `num_devices` devices, or None where jaxlib cannot make one.

    Its thread pool is sized and pinned by the affinity mask of the calling thread.  JAX numbers the devices
    of a client from its process's on, 2048 per process, so a client that says that its process is `number`
    has devices that no other client of this process has: they print and compare as different ones.
    """
    try:
        from jaxlib import xla_client
    except ImportError:
        return None
    make = getattr(xla_client, "make_cpu_client", None)
    return None if make is None else make(num_devices=num_devices, node_id=number)


def explain_mixed_devices(explain: Callable[[Sequence[Any]], str]) -> None:
    """Adds a text to JAX's error for a computation whose arrays are on different devices.

    Only its message changes, which JAX makes in one place.  Without it the message stays as it is.

    Args:
        explain: called with the first two different lists of devices; returns "" to add nothing.
    """
    from jax._src import stages

    made = getattr(stages, "_device_assignment_mismatch_error", None)
    if made is None or hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def with_text(name: Any, fails: Any, *rest: Any, **named: Any) -> Any:
        found = [getattr(fail, "da", None) for fail in fails]
        lists = [devices for devices in found if isinstance(devices, tuple)]
        return made(name, fails, *rest, **named) + explain(lists)

    stages._device_assignment_mismatch_error = with_text


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


def format_of(leaf: Any, sharding: Sharding) -> Any:
    """The `Format` of an array whose elements are in the default order."""
    from jax.experimental.layout import Format, Layout

    tiled = next(iter(sharding.device_set)).platform == "tpu"  # by its compiler
    return Format(Layout(tuple(range(len(leaf.shape))), tiling=None if tiled else ()), sharding)


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


def lower(traced: Any, **options: Any) -> Any:
    """`traced.lower`, without that JAX keeps the function and its executable until `jax.clear_caches()`.

    With `keep_unused=True` JAX 0.12 maps a jaxpr to itself in a cache whose keys are weak and whose values
    are not.
    """
    lowered = traced.lower(**options)
    from jax._src.interpreters import pxla

    forget = getattr(getattr(pxla, "_dce_jaxpr", None), "evict_weakref", None)
    if forget is not None:
        forget(traced.jaxpr)
    return lowered


def lower_with_memories(traced: Any, platform: str, mark: str) -> Any:
    """`traced.lower` for a platform, with `device_put` to a memory as an operation also where JAX drops it.

    JAX writes none on CPUs.  There the operation has the attribute `mark`, so that it can be dropped later;
    it is dropped at once if this version of JAX takes no rules.
    """
    if platform != "cpu" or not back_from_host(traced.jaxpr.jaxpr):
        return lower(traced, lowering_platforms=(platform,))
    try:
        from jax._src import core, dispatch
        from jax._src.interpreters import mlir

        parameters, to_kind = mlir.LoweringParameters, core.mem_space_to_kind
        place, primitive, space = mlir.wrap_with_memory_kind, dispatch.device_put_p, core.MemorySpace
    except (ImportError, AttributeError):
        return lower(traced, lowering_platforms=(platform,))

    def lowered(context: Any, *values: Any, devices: Sequence[Any], **_: Any) -> list[Any]:
        placed = list(values)
        for k, device in enumerate(devices):
            if isinstance(device, space):
                placed[k] = place(context.module_context, values[k], to_kind(device), context.avals_out[k])
                placed[k].owner.attributes[mark] = mlir.ir.UnitAttr.get()
        return placed

    rules = parameters(override_lowering_rules=((primitive, lowered),))
    return lower(traced, lowering_platforms=(platform,), _private_parameters=rules)


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
    """The place of an equation in the user's source, `file:line (function)`; "" if it is not known.

    The call of a function of this package, if the equation is of one.
    """
    from jax._src import source_info_util

    summarize = getattr(source_info_util, "summarize", None)
    found = "" if summarize is None else str(summarize(equation.source_info))
    if found.startswith(_PACKAGE):
        found = next((place for place in places_of(equation) if not place.startswith(_PACKAGE)), found)
    return "" if found == "unknown" else found


_PACKAGE = str(Path(__file__).parent) + os.sep


def places_of(equation: Any) -> list[str]:
    """The calls that led to an equation, `file:line (function)`, innermost first, without JAX's own."""
    from jax._src import source_info_util

    summarize = getattr(source_info_util, "summarize", None)
    lines = [] if summarize is None else str(summarize(equation.source_info, 100)).splitlines()
    return [line for line in reversed(lines) if line != "unknown"]


def scope_of(equation: Any) -> str:
    """The name stack of an equation within its jaxpr, such as `Model/layers_0/Dense_0`, or ""."""
    return str(getattr(equation.source_info, "name_stack", ""))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many carried; JAX 0.11 stores pytrees of them."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)
