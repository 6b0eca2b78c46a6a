"""From the user's function to a `Traced` stage."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from mpmd.api.ambient import without_ambient_mesh
from mpmd.api.config import Config
from mpmd.api.prepare import flat_prefix, for_arguments
from mpmd.api.signature import ArgumentRules, Arguments, abstract, check_leaves, flatten, paths
from mpmd.api.stages import Traced
from mpmd.api.traced_axes import explicit_axes, typed, under_fitting_mesh
from mpmd.errors import PlacementError, SignatureError
from mpmd.jax_compat import closed_over, created_by, is_staging, ordered_effects
from mpmd.tracing.conditionals import has_wide_conditional, with_split_conditionals
from mpmd.tracing.live import names_in
from mpmd.tracing.names import decode, names_called
from mpmd.tracing.stages.staged import StagePlan, over_parts, planned


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A step traced under one mesh.

    Attributes:
        traced: by JAX.
        given: shapes and dtypes of its arguments, stacks in parts.
        names: names that were called.
        plan: the stages from outside.
        explicit: whether axes were explicit.
    """

    traced: jax.stages.Traced
    given: Any
    names: set[str]
    plan: StagePlan | None
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
    found = paths(rules, args, kwargs)
    check_leaves(arguments, found)

    def with_statics(dynamic: Any, named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = iter(dynamic)
        positional = tuple(args[i] if i in rules.static_argnums else next(values) for i in range(len(args)))
        return positional, {k: kwargs[k] if k in rules.static_argnames else named[k] for k in kwargs}

    specs = flat_prefix(for_arguments(config.in_shardings), arguments.tree, "in_shardings")
    structs = [abstract(leaf) for leaf in arguments.leaves]

    def under(mesh: AbstractMesh) -> _Attempt:
        given = jax.tree.unflatten(arguments.tree, typed(structs, arguments.leaves, specs, mesh))
        return _attempt(fn, config, rules, given, with_statics, bool(explicit_axes(mesh)))

    topology = config.topology
    attempt = under_fitting_mesh(topology.abstract_mesh, under, topology.explicit_axes)
    traced, names, plan = attempt.traced, attempt.names, attempt.plan
    if plan is not None and plan.selector.stacked:
        arguments = flatten(rules, *with_statics(*attempt.given))
        found = paths(rules, *with_statics(*attempt.given))
    if plan is not None:
        plan.check_used()
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
        traced, config, arguments.without_arrays(), found, frozenset(called), _ever_called(fn, called),
        plan, attempt.explicit,
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
    plan = None if config.stages is None else StagePlan(config.stages)
    with names_called(names), planned(plan):
        if plan is not None and plan.selector.stacked:
            of_parts, given = over_parts(fn, plan, given, lambda wholes: _call(fn, *with_statics(*wholes)))
            traced = jax.jit(of_parts, keep_unused=True).trace(given)
        else:
            jitted = jax.jit(
                fn,
                keep_unused=True,
                static_argnums=rules.static_argnums,
                static_argnames=rules.static_argnames,
            )
            positional, keywords = with_statics(*given)
            traced = jitted.trace(*positional, **keywords)
        if len(config.topology) > 1 and not is_staging() and has_wide_conditional(traced.jaxpr.jaxpr):
            traced = _with_split_conditionals(traced, given)
    return _Attempt(traced, given, names, plan, explicit)


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
        found = decode(name)
        inside = f"named computation {found[1]!r}" if found else f"function {name!r}"
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
