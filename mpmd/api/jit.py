"""`mpmd.jit`: `jax.jit` for a step whose named parts run on several meshes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import reprlib
import sys
import time
import types
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import jax

from mpmd.api.jax_stages import Unpicklable
from mpmd.api.step_log import say_again, say_traced
from mpmd.brief import few
from mpmd.config.ambient import bind_step, refuse_within_jit
from mpmd.config.config import Config, make_config, with_compiler_options
from mpmd.config.described import described_world
from mpmd.errors import ConfigError, SignatureError, close_to, collect
from mpmd.jax_compat import ClearedWithJax, closed_over, is_staging, trace_context
from mpmd.partition.signature import (
    ArgumentRules,
    Arguments,
    check_leaves,
    fitted,
    flatten,
    in_wholes,
    paths,
)
from mpmd.support.option_texts import CompilerOptions
from mpmd.support.other_libraries import JIT_KEYWORDS
from mpmd.support.resources import forget_results, garbage_kept

if TYPE_CHECKING:
    from mpmd.api.aot import Compiled, Lowered, Traced

P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(
    fn: Callable[P, R],
    config: Config,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: CompilerOptions | None = None,
) -> Jitted[P, R]: ...


@overload
def jit(
    fn: Config,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: CompilerOptions | None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


@overload
def jit(
    *,
    config: Config,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: CompilerOptions | None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    fn: Callable[..., Any] | Config | None = None,
    config: Config | None = None,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    compiler_options: CompilerOptions | None = None,
    **others: Any,
) -> Any:
    """Compiles a function for several meshes.

        step = mpmd.jit(step, config, donate_argnums=0)

        @mpmd.jit(config, donate_argnums=0)
        def step(state, batch): ...

    The function is traced when it is first called, and again for every other signature: shapes, dtypes,
    static values, and the switches of JAX that tracing reads.  Arguments may be anywhere, host memory
    included: they are placed on the meshes that use them.  Results are `jax.Array`s on the meshes that made
    them.

    Args:
        fn: the function; leave it out to use `jit` as a decorator.
        config: made by `make_config`.
        static_argnums: positions of arguments that are compiled in; they need a hash.
        static_argnames: names of such arguments.
        donate_argnums: positions of arguments whose memory the step may reuse; their arrays are deleted.
        donate_argnames: names of such arguments.
        in_shardings: as `in_shardings` of `make_config`, for a config without them.
        out_shardings: likewise for the results.
        compiler_options: as `compiler_options` of `make_config`, for a config without them.
        **others: keywords of `jax.jit` that have no effect here are accepted with its defaults, such as
            `inline=False`; the error for any other keyword says where it is given instead.

    Returns:
        A `Jitted` function, or a decorator that makes one.

    Raises:
        ConfigError: no config, or no function, was given, or shardings or options of XLA twice.
        SignatureError: a position or name that the function does not have, or an unknown keyword.
    """
    _refuse_others(others)
    fn, config = _function_and_config(fn, config)
    given = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    config = _with_more(config, given, compiler_options)
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }
    if fn is None:
        return functools.partial(jit, config=config, **options)
    if not callable(fn):
        raise ConfigError(f"mpmd.jit compiles a function, got {fn!r}")
    return Jitted(fn, config, ArgumentRules.of(fn, **options))  # type: ignore[arg-type]


_A_CONFIG = (
    "  make one of a topology and of names that are placed on it: mpmd.make_config(topology, {'encode': "
    "'m0', 'decode': 'm1'}), or mpmd.make_config(topology, stages='auto') for a loss without names"
)


def _function_and_config(fn: Any, config: Any) -> tuple[Any, Config]:
    """The function, None for a decorator, and the configuration.

    Raises:
        ConfigError: there is no configuration, or the two are in the other order.
    """
    if isinstance(fn, Config):
        if config is not None:
            raise ConfigError(
                f"mpmd.jit got a config first, and then {config!r}\n"
                "  the function is first: mpmd.jit(step, config); without it, mpmd.jit(config) is a decorator"
            )
        return None, fn
    if config is None:
        got = "" if fn is None or callable(fn) else f", got {fn!r}"
        raise ConfigError(f"mpmd.jit needs a config{got}\n{_A_CONFIG}")
    if not isinstance(config, Config):
        raise ConfigError(f"mpmd.jit needs a config made by mpmd.make_config, got {config!r}\n{_A_CONFIG}")
    return fn, config


def _refuse_others(given: dict[str, Any]) -> None:
    """Raises for keywords that `jit` does not take.

    Raises:
        SignatureError: there are some, but `jax.jit`'s with their defaults; says where each is given instead.
    """
    problems = []
    known = [*inspect.signature(jit).parameters, *JIT_KEYWORDS]
    of_config = inspect.signature(make_config).parameters
    for name, value in given.items():
        default, instead = JIT_KEYWORDS.get(name, (None, ""))
        if instead and value == default:
            continue
        if not instead and name in of_config:
            instead = f"it is a part of the configuration: mpmd.make_config(..., {name}=...)"
        hint = f"\n  {instead}" if instead else close_to(name, known)
        problems.append(f"mpmd.jit does not take {name}={reprlib.repr(value)}{hint}")
    if problems:
        raise collect(SignatureError, problems)


def _with_more(config: Config, shardings: dict[str, Any], compiler_options: CompilerOptions | None) -> Config:
    given = {name: value for name, value in shardings.items() if value is not None}
    for name in [*given, *(["compiler_options"] if compiler_options else [])]:
        if getattr(config, name) not in (None, ()):
            raise ConfigError(f"mpmd.jit and its config both have {name}\n  leave one of them out")
    config = dataclasses.replace(config, **given)
    return with_compiler_options(config, compiler_options) if compiler_options else config


class Jitted(Unpicklable, Generic[P, R]):
    """A function that runs on several meshes.  Call it, or take it through its stages."""

    def __init__(self, fn: Callable[P, R], config: Config, rules: ArgumentRules) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._config, self._rules = fn, config, rules
        self._compiled: dict[Hashable, Compiled] = {}
        self._explicit = False  # whether it was traced with explicit axes
        self._last: tuple[Any, Compiled] | None = None
        """Of the last call without static arguments, what its arguments were, and what it ran."""
        self._refined: dict[Hashable, Config] = {}
        self._cleared = ClearedWithJax(self.clear_cache)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step; returns before it is done, as `jax.jit` does.

        Under `jax.disable_jit` it runs op by op on one device, as a function under `jax.jit` does.  Within
        `jax.eval_shape` and `jax.make_jaxpr` it is one equation, and nothing runs.

        Raises:
            SignatureError: the arguments are not arrays, or the step is called inside of `jax.jit`.
            FragmentError: a fragment failed, in this step or the one before.
        """
        if jax.config.jax_disable_jit:
            return self._fn(*args, **kwargs)
        arguments = flatten(self._rules, args, kwargs)
        if is_staging():
            try:
                arguments_alone = arguments.without_arrays()
            except (TypeError, ValueError, OverflowError):  # some leaf is not an array
                check_leaves(arguments, paths(self._rules, args, kwargs))
                raise
            traced = self._trace(arguments_alone, args, kwargs)
            leaves = [*closed_over(traced.jax_traced), *_leaves_for(traced, arguments)]
            return jax.tree.unflatten(traced.out_tree, bind_step(leaves, traced.jaxpr))
        compiled = self._compiled_for(arguments, args, kwargs)
        return compiled.run_flat(_leaves_for(compiled.lowered.traced, arguments))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, where a class has it: the object is then the first argument, and usually a static one."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The function traced for arguments like these (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._trace(flatten(self._rules, args, kwargs), args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program partitioned, scheduled and linearized for arguments like these."""
        return self.trace(*args, **kwargs).lower()

    def compiled(self, *args: Any, **kwargs: Any) -> Compiled:
        """What a call with arguments like these runs; compiled now if it was not before."""
        refuse_within_jit()
        return self._compiled_for(flatten(self._rules, args, kwargs), args, kwargs)

    def clear_cache(self) -> None:
        """Forgets all compiled programs, as at `jax.clear_caches()`; calls of other threads finish.

        Programs, their memory and their threads are released with the last reference to them.
        """
        self._compiled, self._last, self._refined = {}, None, {}
        forget_results()

    def _compiled_for(self, arguments: Arguments, args: Any, kwargs: Any) -> Compiled:
        context, last, known = trace_context(), self._last, self._compiled
        try:
            marks = arguments.tree, context, arguments.marks
            if last is not None and last[0] == marks and not arguments.statics:
                return last[1]
            key = self._key(arguments, context)
        except (TypeError, ValueError, OverflowError):  # some leaf is not an array
            check_leaves(arguments, paths(self._rules, args, kwargs))
            raise
        compiled = known.get(key)
        if compiled is None:
            say_again(str(getattr(self._fn, "__name__", "step")), arguments, known.values())
            compiled = self._compile(arguments, args, kwargs)
            self._explicit |= compiled.lowered.traced.explicit
            known[self._key(arguments, context)] = compiled
        if not arguments.statics and known is self._compiled:
            self._last = marks, compiled
        return compiled

    def _key(self, arguments: Arguments, context: Hashable) -> Hashable:
        return arguments.key, context, arguments.types if self._explicit else None

    def _compile(self, arguments: Arguments, args: Any, kwargs: Any) -> Compiled:
        """What a new signature runs; with stacks in parts it is the program of whole arrays."""
        if self._config.stages is not None and self._config.stages.stacked:
            wholes = flatten(self._rules, *in_wholes(args, kwargs))
            if wholes.tree != arguments.tree:
                return self._compiled_for(wholes, *in_wholes(args, kwargs))
        with garbage_kept():
            return self._trace(arguments, args, kwargs).lower().compile()

    def _trace(self, arguments: Arguments, args: Any, kwargs: Any) -> Traced:
        with garbage_kept():
            from mpmd.api.trace_step import trace  # brings the compiler: as many modules as the rest

            def under(config: Config) -> Traced:
                begin = time.perf_counter()
                traced = trace(self._fn, config, self._rules, arguments, args, kwargs)
                say_traced(traced, begin)
                return dataclasses.replace(traced, again=under) if described_world() else traced

            if not getattr(self._config.stages, "refine", False):
                return under(self._config)
            from mpmd.api.refine import refined

            key = arguments.key, trace_context()
            refined_config = self._refined.get(key)
            if refined_config is None:
                refined_config = self._refined[key] = refined(self._config, under)
            return under(refined_config)

    pickle_instead = (
        "it is pickled by its name, like a function, where it is an attribute of its module; pickle the "
        "configuration otherwise, and call mpmd.jit there"
    )

    def __reduce__(self) -> str:
        """Its name, by which it is found in its module, as a function is."""
        found: Any = sys.modules.get(str(getattr(self, "__module__", "")))
        name = str(getattr(self, "__qualname__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else super().__reduce__()

    def __repr__(self) -> str:
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        return f"<mpmd.jit of {name!r} on {few(self._config.topology)}>"


def _leaves_for(traced: Traced, arguments: Arguments) -> list[Any]:
    """The leaves of a call as the program takes them: stacks in parts, if it divides some."""
    if not traced.takes_parts:
        return arguments.leaves
    given = jax.tree.unflatten(arguments.tree, arguments.leaves)
    return jax.tree.leaves(fitted(traced.arguments, *given))
