"""From the user's function to a `Traced` stage.

The mesh under which a step is traced: with automatic axes, or explicit ones where the step needs them.

JAX compares the mesh of the context with each mesh that a step passes to `jax.shard_map`, with its kind of
device and its types of axes, and takes axis names in `jax.reshard` only where axes are explicit.  The same
model is written for any of these, so each is tried before the step is refused.  Types of explicit axes exist
while a step is traced; `tracing.expand` removes them, and Shardy shards the step as any other.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpmd.api.aot import Traced
from mpmd.config.ambient import without_ambient_mesh
from mpmd.config.config import Config
from mpmd.errors import PlacementError, SignatureError
from mpmd.jax_compat import (
    closed_over,
    created_by,
    explicit_sharding,
    is_staging,
    ordered_effects,
    refuses_mesh,
)
from mpmd.partition.prepare import axes_of_dims, flat_prefix, for_arguments, spec_problems
from mpmd.partition.signature import ArgumentRules, Arguments, abstract, check_leaves, flatten, paths
from mpmd.support.user_code import raised_at
from mpmd.tracing.conditionals import has_wide_conditional, with_split_conditionals
from mpmd.tracing.names import decode, names_called
from mpmd.tracing.stages.staged import TracedStages, dividing, over_parts
from mpmd.tracing.stateful_modules import add_note, are_modules, returning_what_it_changes
from mpmd.tracing.trace import names_in

R = TypeVar("R")


def under_fitting_mesh(
    mesh: AbstractMesh, trace: Callable[[AbstractMesh], R], explicit: Sequence[str] = ()
) -> R:
    """What `trace` returns under the first mesh that the step it traces accepts.

    Args:
        mesh: of all axes of the step, which are automatic.
        trace: is called with the mesh of the context, and traces the step anew.
        explicit: the axes that are made explicit, if the step needs some; all of them by default.

    Raises:
        PlacementError: the step needs a mesh with other axes, or several meshes at a time.
    """
    refused: list[Exception] = []
    for context in _meshes(mesh, explicit):
        try:
            with jax.sharding.use_abstract_mesh(context):
                return trace(context)
        except (TypeError, ValueError) as error:
            if not refuses_mesh(error):
                raise
            refused.append(error)
    raise PlacementError(_refusal(refused[0], mesh)) from refused[0]


def _meshes(mesh: AbstractMesh, explicit: Sequence[str]) -> Iterator[AbstractMesh]:
    """A mesh with automatic and explicit axes, with and without a kind of device."""
    types = dict.fromkeys(explicit or mesh.axis_names, AxisType.Explicit)
    for of_type in (mesh, mesh.update_axis_types(types)):
        yield of_type
        yield AbstractMesh(of_type.axis_sizes, of_type.axis_names, of_type.axis_types)


def _refusal(refused: Exception, mesh: AbstractMesh) -> str:
    reason = str(refused).partition("This error occurs")[0].strip()
    place, axes = raised_at(refused), ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return (
        f"the step needs another mesh than its topology has{f', at {place}' if place else ''}\n  {reason}\n"
        f"  the axes of the topology are {axes}: leave mesh= of jax.shard_map out, or give all calls the "
        "same mesh of the topology; jax.reshard and out_sharding= take a jax.P over these axes"
    )


def explicit_axes(mesh: AbstractMesh) -> list[str]:
    return [str(a) for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind is AxisType.Explicit]


def typed(
    structs: Sequence[Any], given: Sequence[Any], specs: Sequence[Any], mesh: AbstractMesh
) -> list[Any]:
    """Shapes and dtypes of arguments, with shardings over the explicit axes of the context.

    Args:
        structs: a `jax.ShapeDtypeStruct` of each leaf.
        given: the leaf: an array may have a type of its own.
        specs: for each leaf the `PartitionSpec` or `NamedSharding` of `in_shardings`, or None.
        mesh: of the context.
    """
    return [
        _typed(s, g if spec is None else spec, mesh) for s, g, spec in zip(structs, given, specs, strict=True)
    ]


def _typed(struct: Any, source: Any, mesh: AbstractMesh) -> Any:
    """A sharding that does not fit is left out; `mark_shardings` reports it."""
    known, spec = explicit_axes(mesh), source
    if not isinstance(spec, (PartitionSpec, NamedSharding)):
        spec = explicit_sharding(source)
    if not known or spec is None or spec_problems(spec, struct.shape, dict(mesh.shape)):
        return struct
    dims = [tuple(a for a in names if a in known) for names in axes_of_dims(spec, len(struct.shape))]
    return struct.update(sharding=NamedSharding(mesh, PartitionSpec(*[names or None for names in dims])))


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A step traced under one mesh.

    Attributes:
        traced: by JAX.
        given: shapes and dtypes of its arguments, stacks in parts.
        names: names that were called.
        stages: the stages from outside.
        explicit: whether axes were explicit.
    """

    traced: jax.stages.Traced
    given: Any
    names: set[str]
    stages: TracedStages | None
    explicit: bool


@without_ambient_mesh
def trace(
    fn: Callable[..., Any],
    config: Config,
    rules: ArgumentRules,
    arguments: Arguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Traced:
    """Traces `fn` with JAX, without devices, under the axes of all meshes.

    Static arguments are passed as they are, all others as shapes and dtypes.

    Raises:
        SignatureError: the function does not take such arguments.
        PlacementError: it has ordered effects, which meshes do not keep, or needs another mesh.
        UnexpectedTracerError: it stores a value of a named computation outside of it, and reads it there.
    """
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        raise SignatureError(f"{name} does not take these arguments: {error}") from None
    except ValueError:  # without a signature
        pass
    leaf_paths = paths(rules, args, kwargs)
    check_leaves(arguments, leaf_paths)

    def with_statics(dynamic: Any, named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = iter(dynamic)
        positional = tuple(args[i] if i in rules.static_argnums else next(values) for i in range(len(args)))
        return positional, {k: kwargs[k] if k in rules.static_argnames else named[k] for k in kwargs}

    specs = flat_prefix(for_arguments(config.in_shardings), arguments.tree, "in_shardings")
    structs = [abstract(leaf) for leaf in arguments.leaves]

    traced_fn = returning_what_it_changes(fn) if are_modules(args, kwargs) else fn

    def under(mesh: AbstractMesh) -> _Attempt:
        given = jax.tree.unflatten(arguments.tree, typed(structs, arguments.leaves, specs, mesh))
        try:
            return _attempt(traced_fn, config, rules, given, with_statics, bool(explicit_axes(mesh)))
        except Exception as error:
            add_note(error)
            raise

    topology = config.topology
    attempt = under_fitting_mesh(topology.abstract_mesh, under, topology.explicit_axes)
    traced, names, stages = attempt.traced, attempt.names, attempt.stages
    if stages is not None and stages.selector.stacked:
        arguments = flatten(rules, *with_statics(*attempt.given))
        leaf_paths = paths(rules, *with_statics(*attempt.given))
    if stages is not None:
        stages.check_used()
    if not is_staging():  # or its closed-over values may belong to the function around it
        _refuse_leaked(closed_over(traced))
    ordered = ordered_effects(traced)
    if ordered:
        raise PlacementError(
            "the step does things in order, and its meshes run at the same time:\n  "
            + "\n  ".join(ordered)
            + "\n  leave out ordered=True, as of jax.debug.print and io_callback"
        )
    called = _called(traced.jaxpr, names)
    return Traced(
        traced, config, arguments.without_arrays(), leaf_paths, frozenset(called), _ever_called(fn, called),
        stages, attempt.explicit, str(getattr(fn, "__name__", "step")),
    )  # fmt: skip


def _attempt(
    fn: Callable[..., Any],
    config: Config,
    rules: ArgumentRules,
    given: Any,
    with_statics: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    explicit: bool,
) -> _Attempt:
    names: set[str] = set()
    stages = None if config.stages is None else TracedStages(config.stages, config.assignment)
    with names_called(names), dividing(stages):
        if stages is not None and stages.selector.stacked:
            of_parts, given = over_parts(fn, stages, given, lambda wholes: _call(fn, *with_statics(*wholes)))
            of_parts.__name__ = getattr(fn, "__name__", "step")  # which fragments are called after
            traced = jax.jit(of_parts, keep_unused=True).trace(given)
        else:
            jitted = jax.jit(
                fn if stages is None else _noting(fn, stages),
                keep_unused=True,
                static_argnums=rules.static_argnums,
                static_argnames=rules.static_argnames,
            )
            positional, keywords = with_statics(*given)
            traced = jitted.trace(*positional, **keywords)
        if len(config.topology) > 1 and not is_staging() and has_wide_conditional(traced.jaxpr.jaxpr):
            traced = _with_split_conditionals(traced, given)
    return _Attempt(traced, given, names, stages, explicit)


def _noting(fn: Callable[..., Any], stages: TracedStages) -> Callable[..., Any]:
    """The function; its stages know its arguments by their paths."""

    @functools.wraps(fn)
    def noting(*args: Any, **kwargs: Any) -> Any:
        stages.of_step((list(args), kwargs))
        return fn(*args, **kwargs)

    return noting


def _with_split_conditionals(traced: jax.stages.Traced, given: Any) -> jax.stages.Traced:
    """The same step with its conditionals split, so that each part of them can be on a mesh of its own."""
    split = with_split_conditionals(traced.jaxpr)
    results = jax.tree.structure(traced.out_info)

    def step(arguments: Any) -> Any:
        return jax.tree.unflatten(results, split(*jax.tree.leaves(arguments)))

    return jax.jit(step, keep_unused=True).trace(given)


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


_called_by: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _called(jaxpr: Any, seen: set[str]) -> set[str]:
    """The names that were called for a jaxpr, also those that are not in it.

    JAX does not trace a function again for equal arguments, but returns the same jaxpr.
    """
    return _called_by.setdefault(jaxpr, seen | names_in(jaxpr.jaxpr))


def _refuse_leaked(values: Sequence[jax.core.Tracer]) -> None:
    if not values:
        return
    problems = []
    for value in values:
        name, place = created_by(value)
        decoded = decode(name)
        inside = f"named computation {decoded[1]!r}" if decoded else f"function {name!r}"
        problems.append(f"{inside} computed {value.aval.str_short()}" + (f" at {place}" if place else ""))
    raise jax.errors.UnexpectedTracerError(
        "the step uses values outside of the computations that computed them, without being given them:\n  "
        + "\n  ".join(problems)
        + "\n  JAX traces each named computation by itself: values that it stores elsewhere are unusable"
        "\n  return it as a result, and pass it on as an argument"
    )


_names: weakref.WeakKeyDictionary[Callable[..., Any], set[str]] = weakref.WeakKeyDictionary()


def _ever_called(fn: Callable[..., Any], called: set[str]) -> frozenset[str]:
    """The names that a function called in any trace, for all static arguments."""
    try:
        known = _names.setdefault(fn, set())
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return frozenset(called)
    known |= called
    return frozenset(known)
