"""A loaded program as a function of JAX: the order of its arguments and results, and its devices."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mpmd.compile.backends.arrays import array_types
from mpmd.compile.backends.compiled import compiled_function, on_each_device
from mpmd.compile.backends.target_backend import LoadedProgram
from mpmd.compile.fragment import FragmentModule


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
        made = traced_call(program, [arrays[k] for k in given], results, aliases, large)
        return [made[k] for k in order.results]

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
    made = program(*given, results=whole, aliases=aliases, large=large, after=after)
    return [_packed(array, result.dtype) for array, result in zip(made, results, strict=True)]


class DirectCall:
    """Its instances hold the object that is called, so that a call enters no Python frame before it."""

    __slots__ = ("__call__",)
    __call__: Callable[..., Sequence[Any]]


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
