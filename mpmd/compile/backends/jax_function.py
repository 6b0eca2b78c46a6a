"""How fragments enter JAX, for all backends.

Arguments and results are JAX values with the dtypes and shardings of the fragment.  StableHLO text becomes a
primitive whose lowering is the text's own functions, a loaded program a custom call in traced code.  Either
is compiled once, as a function that takes and gives arrays on the devices of a mesh.

Python functions that fragments on CPU call.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir as mlir
from jax.interpreters import mlir as jax_mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.compile.artefact import Artefact
from mpmd.compile.backends.target_backend import LoadedProgram
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.hlo import Shape
from mpmd.errors import CompileError
from mpmd.jax_calls import direct_call, taking_packed
from mpmd.jax_compat import ShapedArray, lower

INLINE_BELOW_FLOPS = 1000
"""XLA on CPU runs a program of fewer operations in the thread that calls it; custom calls count none."""

module_p = Primitive("mpmd_fragment")
module_p.multiple_results = True


@module_p.def_abstract_eval
def _result_types(*_: Any, text: str, results: tuple[ValueSpec, ...], callbacks: Any) -> list[Any]:
    return [ShapedArray(r.shape, numpy_dtype(r.dtype)) for r in results]


def _lower(ctx: Any, *operands: Any, text: str, results: tuple[ValueSpec, ...], callbacks: Any) -> Any:
    """Copies the fragment's functions into jit's module and calls its main."""
    on_cpu = tuple(ctx.module_context.platforms) == ("cpu",)
    for callback in callbacks:  # nothing else adds any, so positions stay what they are in the text
        ctx.module_context.add_host_callback(with_aligned_arguments(callback) if on_cpu else callback)
    fragment = mlir.Module.parse(text)
    outer, into = ctx.module_context.symbol_table, ctx.module_context.module.body
    renamed = {}
    for op in list(fragment.body.operations):
        old = mlir.StringAttr(op.attributes["sym_name"]).value
        if op.operation.name == "sdy.mesh" and old in outer:
            continue
        copy = op.operation.clone(mlir.InsertionPoint(into))
        if op.operation.name == "func.func":
            copy.attributes["sym_visibility"] = mlir.StringAttr.get("private")
            mlir.SymbolTable.set_symbol_name(copy, f"fragment_{old}")
        renamed[old] = (outer.insert(copy).value, copy)
    for old, (new, _) in renamed.items():
        for _, copy in renamed.values():
            mlir.SymbolTable.replace_all_symbol_uses(old, new, copy)
    name, main = renamed["main"]
    kind = mlir.FunctionType(mlir.TypeAttr(main.attributes["function_type"]).value)
    call = mlir.Operation.create(
        "func.call", list(kind.results), list(operands), {"callee": mlir.FlatSymbolRefAttr.get(name)}
    )
    return list(call.results)


jax_mlir.register_lowering(module_p, _lower)


_BITS = (2, 4, 8, 16, 32, 64)
_FLOATS8 = ("E3M4", "E4M3", "E4M3B11FNUZ", "E4M3FN", "E4M3FNUZ", "E5M2", "E5M2FNUZ", "E8M0FNU")
_NUMPY = {
    "i1": "bool",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    **{f"{sign}i{bits}": f"{'u' if sign else ''}int{bits}" for sign in ("", "u") for bits in _BITS},
    **{f"f8{kind}": f"float8_{kind.lower()}" for kind in _FLOATS8},
    "f4E2M1FN": "float4_e2m1fn",
}


def numpy_dtype(element_type: str) -> np.dtype[Any]:
    """The NumPy dtype of an MLIR element type.

    Raises:
        CompileError: there is none.
    """
    if element_type not in _NUMPY:
        raise CompileError(
            f"no array has elements of type {element_type}\n  expected: one of {', '.join(_NUMPY)}"
        )
    return jax.numpy.dtype(_NUMPY[element_type])


_MLIR = {
    "pred": "i1",
    "c64": "complex<f32>",
    "c128": "complex<f64>",
    **{f"{sign}{bits}": f"{'u' if sign == 'u' else ''}i{bits}" for sign in "su" for bits in _BITS},
    **{f"f8{kind.lower()}": f"f8{kind}" for kind in _FLOATS8},
    "f4e2m1fn": "f4E2M1FN",
}


def value_spec(shape: Shape) -> ValueSpec:
    """An array of an HLO program as a value on one device."""
    return ValueSpec(shape.dims, _MLIR.get(shape.dtype, shape.dtype), ((),) * shape.rank)


def named_sharding(mesh: Mesh, value: ValueSpec) -> NamedSharding:
    """The JAX sharding of a value on the devices of a mesh."""
    spec = PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in value.spec))
    if value.memory_kind is None:
        return NamedSharding(mesh, spec)
    return NamedSharding(mesh, spec, memory_kind=value.memory_kind)


def array_types(mesh: Mesh, values: Sequence[ValueSpec]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(v.shape, numpy_dtype(v.dtype), sharding=named_sharding(mesh, v)) for v in values
    ]


_FILTERS = threading.Lock()


@dataclasses.dataclass
class CompiledFragment:
    """A fragment as a compiled function of JAX.

    Attributes:
        fragment: the fragment.
        compiled: the function.
    """

    fragment: FragmentModule
    compiled: jax.stages.Compiled

    @property
    def has_token(self) -> bool:
        """Whether a token follows the results."""
        return self.fragment.token

    @property
    def name(self) -> str:
        return self.fragment.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        results: Sequence[Any] = self.compiled(*arrays)
        return results

    @property
    def kept_memory(self) -> dict[int, int]:
        """Bytes that it keeps from call to call, by owner: equal keys share them."""
        return {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes per device that it takes while it runs, beside arguments, results and kept memory."""
        return self.memory_analysis().temporaries

    def memory_analysis(self) -> MemoryStats:
        """XLA's own count, per device."""
        stats = self.compiled.memory_analysis()
        return MemoryStats(
            arguments=stats.argument_size_in_bytes,
            results=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
        )


def on_each_device(
    run: Callable[..., Sequence[Any]], fragment: FragmentModule, mesh: Mesh
) -> Callable[..., Sequence[Any]]:
    """A function of each device's parts of a fragment's arguments as one of whole arrays."""
    if mesh.size == 1:
        return run
    given, outputs = (
        [named_sharding(mesh, v).spec for v in vs] for vs in (fragment.arguments, fragment.results)
    )
    mapped: Callable[..., Sequence[Any]] = jax.shard_map(
        run, mesh=mesh, in_specs=tuple(given), out_specs=outputs, check_vma=False
    )
    return mapped


def compiled_function(
    run: Callable[..., Sequence[Any]], fragment: FragmentModule, mesh: Mesh
) -> jax.stages.Compiled:
    """Compiles a function of a fragment's arguments for a mesh; adds the token, if there is one.

    Args:
        run: computes the fragment's results, as traced arrays.
        fragment: its name, arguments, results and options of XLA, and which arguments are donated.
        mesh: its mesh.

    Raises:
        CompileError: XLA does not compile it.
    """

    def with_token(*arrays: Any) -> list[Any]:
        return [*run(*arrays), *[jax.numpy.int8(0)] * fragment.token]

    with_token.__name__ = with_token.__qualname__ = fragment.name
    jitted = jax.jit(
        with_token,
        donate_argnums=fragment.donated,
        keep_unused=True,
        out_shardings=[
            *(named_sharding(mesh, result) for result in fragment.results),
            *[NamedSharding(mesh, PartitionSpec())] * fragment.token,
        ],
    )
    try:
        # Steps have values of 64 bits whatever the user's setting, such as the counters of random numbers.
        with jax.enable_x64(True):
            # Filters of warnings belong to the process: one thread at a time may change and restore them.
            with _FILTERS, warnings.catch_warnings():
                # Buffers that cannot be donated are freed by the runtime; nothing is lost.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                lowered = lower(jitted.trace(*array_types(mesh, fragment.arguments)))
            return taking_packed(lowered.compile(dict(fragment.compiler_options) or None))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise CompileError(
            f"XLA cannot compile fragment {fragment.name!r} on {fragment.mesh}: {error}"
        ) from error


@dataclasses.dataclass(frozen=True)
class ArgumentOrder:
    """In which order JAX is given the arguments, and gives the results.

    JAX pairs donated arguments with results of their type in the order of both.  So that its pairs are ours,
    paired arguments and paired results come first, in the same order.

    Attributes:
        arguments: numbers of the arguments as JAX gets them.
        results: numbers of the results as JAX gives them.
        places: where each result, and the token after them if there is one, is among these.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    places: tuple[int, ...]

    @staticmethod
    def of(aliases: dict[int, int], fragment: FragmentModule) -> ArgumentOrder:
        """The order for pairs of arguments and results."""
        arguments, results = list(aliases), list(aliases.values())
        arguments += [k for k in range(len(fragment.arguments)) if k not in aliases]
        paired = set(results)
        results += [k for k in range(len(fragment.results)) if k not in paired]
        places = [results.index(k) for k in range(len(results))]
        if fragment.token:
            places.append(len(results))
        return ArgumentOrder(tuple(arguments), tuple(results), tuple(places))

    @property
    def is_plain(self) -> bool:
        """Whether nothing changes its place."""
        return list(self.arguments) == sorted(self.arguments) and list(self.results) == sorted(self.results)

    def around(self, call: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """A call in this order as one in the fragment's; the call itself where nothing changes its place."""
        if self.is_plain:
            return call
        take, give = _picker(self.arguments), _picker(self.places)
        return lambda *arrays: give(call(*take(arrays)))


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that gives the entries with these numbers (at least one)."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    (number,) = numbers
    return lambda entries: (entries[number],)


def jax_function(
    fragment: FragmentModule, mesh: Mesh, program: LoadedProgram, aliases: dict[int, int], large: bool
) -> jax.stages.Compiled:
    """The custom call as a compiled function of JAX, arguments and results in `ArgumentOrder`.

    Args:
        fragment: the computation.
        mesh: where.
        program: what computes it.
        aliases: argument → the result that takes its memory.
        large: whether XLA should hand the call to another thread.

    Raises:
        CompileError: XLA does not compile the call.
    """
    order = ArgumentOrder.of(aliases, fragment)
    as_given = dataclasses.replace(
        fragment,
        arguments=tuple(fragment.arguments[k] for k in order.arguments),
        results=tuple(fragment.results[k] for k in order.results),
        donated=tuple(range(len(aliases))),
    )
    given = [order.arguments.index(k) for k in range(len(order.arguments))]
    results = [_local(t) for t in array_types(mesh, fragment.results)]

    def run(*arrays: Any) -> list[Any]:
        outputs = traced_call(program, [arrays[k] for k in given], results, aliases, large)
        return [outputs[k] for k in order.results]

    return compiled_function(on_each_device(run, as_given, mesh), as_given, mesh)


def traced_call(
    program: LoadedProgram,
    arrays: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    large: bool,
    after: Any = None,
) -> list[Any]:
    """The results of a program, in traced code, in the order of its own arguments and results."""
    whole = [jax.ShapeDtypeStruct(r.shape, _BYTES.get(r.dtype.name, r.dtype)) for r in results]
    given = map(_unpacked, arrays)
    outputs = program(*given, results=whole, aliases=aliases, large=large, after=after)
    return [_packed(array, result.dtype) for array, result in zip(outputs, results, strict=True)]


class DirectCall:
    """Its instances hold the object that is called, so that a call enters no Python frame before it."""

    __slots__ = ("__call__",)
    __call__: Callable[..., Sequence[Any]]


_Program = TypeVar("_Program", bound=LoadedProgram)


@dataclasses.dataclass
class ProgramFragment(DirectCall, CompiledFragment, Generic[_Program]):
    """A fragment as one program of a target.

    Attributes:
        artefact: its code.
        program: the code loaded, with the memory of its mesh.
    """

    artefact: Artefact
    program: _Program

    def __post_init__(self) -> None:
        order = ArgumentOrder.of(self.artefact.aliases, self.fragment)
        self.__call__ = order.around(direct_call(self.compiled))

    @property
    def timer(self) -> _Program:
        """What writes when it runs."""
        return self.program

    @property
    def made(self) -> Artefact:
        """The artefact by its former name, which measurements kept outside of this project read."""
        return self.artefact

    @property
    def kept_memory(self) -> dict[int, int]:
        """Bytes that its code keeps; fragments of one program on one mesh share them."""
        return {self.program.key: self.program.kept_bytes}

    def cost_analysis(self) -> dict[str, float]:
        return {**self.artefact.costs, "fallbacks": 0.0}


_BYTES = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8", "float4_e2m1fn": "uint8"}
"""XLA's arrays of less than a byte lie packed; native code has one to a byte, the first bits unused."""


def _unpacked(array: Any) -> Any:
    """What native code is given of an array: elements of a byte or more, and some memory in any case.

    XLA of JAX 0.11.2 crashes where a call on several devices is given an array without elements.
    """
    if not array.size:
        return jax.numpy.zeros(1, "uint8")
    name = array.dtype.name
    if name == "float4_e2m1fn":
        return _unpacked(jax.lax.bitcast_convert_type(array, "uint4"))
    return array.astype(_BYTES[name]) if name in _BYTES else array


def _packed(array: Any, dtype: Any) -> Any:
    if dtype.name == "float4_e2m1fn":
        return jax.lax.bitcast_convert_type(array.astype("uint4"), dtype)
    return array.astype(dtype) if dtype.name in _BYTES else array


def _local(whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(whole.sharding.shard_shape(whole.shape), whole.dtype)


_ALIGNMENT = 64
"""Bytes: JAX on CPU takes an array at a multiple of it as it is, without a copy."""


def with_aligned_arguments(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback that gets copies of its arguments that JAX takes as they are.

    JAX makes a `jax.Array` of each argument, and copies a large one on a thread of the client.  A fragment on
    several devices runs on these threads itself: if there is one, the callback would wait for itself.
    """

    def call(*arguments: Any) -> Any:
        return callback(*map(_aligned, arguments))

    return call


def _aligned(argument: Any) -> Any:
    """A copy of an array of NumPy at an aligned address; other arguments as they are."""
    if not isinstance(argument, np.ndarray) or not argument.size:
        return argument
    memory = np.empty(argument.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + argument.nbytes].view(argument.dtype).reshape(argument.shape)
    copy[...] = argument
    return copy
