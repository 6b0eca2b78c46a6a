"""Names of computations, how JAX carries them, and the arguments of named ones that are not arrays."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import re
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np

from mpmd.errors import ConfigError
from mpmd.tracing import stateful_modules
from mpmd.tracing.stateful_modules import (
    call_with_modules,
    has_modules,
    is_initializing,
    mutable_states,
    returning_changes,
    write_changes,
)

_OF_FEW_VALUES = (bool, str, enum.Enum)
"""Types of arguments whose nested jit is cached; for others a new one is created in every call."""


def taking_anything(
    fn: Callable[..., Any], carried: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """`fn` under a nested jit, with the arguments that are not arrays bound to it.

    Numbers are arrays, as for JAX; `True` and `False` are not, because they select behaviour.

    Args:
        fn: takes pytrees of anything.
        carried: puts a function of arrays under the nested jit.
    """
    plain = carried(fn)
    known: dict[Hashable, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        bound = {i: leaf for i, leaf in enumerate(leaves) if is_bound(leaf)}
        if not bound:
            return plain(*args, **kwargs)
        arrays = [leaf for i, leaf in enumerate(leaves) if i not in bound]
        key = tree, tuple((i, type(leaf), leaf) for i, leaf in bound.items())
        if not all(isinstance(leaf, _OF_FEW_VALUES) for leaf in bound.values()):
            return carried(_with_bound(fn, tree, bound))(*arrays)
        if key not in known:
            known[key] = carried(_with_bound(fn, tree, bound))
        return known[key](*arrays)

    return call


def _with_bound(fn: Callable[..., Any], tree: Any, bound: dict[int, Any]) -> Callable[..., Any]:
    def of_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        leaves = [bound[i] if i in bound else next(rest) for i in range(tree.num_leaves)]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fn(*args, **kwargs)

    return of_arrays


def is_bound(leaf: Any) -> bool:
    """Whether an argument is not an array, but is bound to the function."""
    if isinstance(leaf, bool):
        return True
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        return False
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError):
        return True
    return False


MICROBATCHES = "microbatches"
"""The kind of a name that marks how a batch is split; the name itself is the batch dim."""

P = ParamSpec("P")
R = TypeVar("R")

_ESCAPED = re.compile(r"-([0-9a-f]+)-")


def encode(kind: str, name: str) -> str:
    """The name of the nested jit that carries a user's name of some kind."""
    text = "".join(c if (c.isalnum() and c.isascii()) or c == "_" else f"-{ord(c):x}-" for c in name)
    return f"mpmd.{kind}.{text}."


def decode(symbol: str) -> tuple[str, str] | None:
    """The kind and the user's name in a function's symbol; None if the symbol has none."""
    match = re.fullmatch(r"mpmd\.(\w+)\.(.*)\.(?:_\d+)?", symbol)
    if match is None:
        return None
    return match[1], _ESCAPED.sub(lambda code: chr(int(code[1], 16)), match[2])


def carrier(fn: Callable[..., Any], kind: str, name: str) -> Callable[..., Any]:
    """`fn` under a nested jit that carries the name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.__name__ = call.__qualname__ = encode(kind, name)
    return jax.jit(call)


_kept: Any = jax.make_user_context(None)
"""The names that are carried, None for all: a part of the key of JAX's caches."""


@contextlib.contextmanager
def keeping(names: frozenset[str]) -> Iterator[None]:
    """Computations and tensors of other names are traced as if they had none."""
    with _kept(names):
        yield


def _is_kept(name: str) -> bool:
    return _kept.value is None or name in _kept.value


def _carrier_if_kept(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`fn` under a nested jit, which carries the name if it is kept when it is called."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    plain.__name__ = plain.__qualname__ = name if name.isidentifier() else "unnamed"
    named, nameless = carrier(fn, "comp", name), jax.jit(plain)
    return lambda *args, **kwargs: (named if _is_kept(name) else nameless)(*args, **kwargs)


@overload
def named_computation(fn: Callable[P, R], *, name: str | None = None) -> Callable[P, R]: ...


@overload
def named_computation(*, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def named_computation(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Callable[..., Any]:
    """Names a computation, so that it can be assigned to a mesh and a stage.

    Use it on a function, `named_computation(f, name="stage0")(x)`, or as a decorator with or without a
    name; without one the function's own name is taken.  Arguments and results are pytrees of arrays;
    other arguments, such as `True` or `"train"`, are passed unchanged.

    It may be a submodule of a flax module, a method of one, or close over some, and it may call haiku
    modules.  While linen or haiku initialise them, it is called as it is, because parameters must not be
    created inside of a nested jit.  Changes of modules, such as statistics of batches, are results of the
    computation too: of linen modules, of nnx modules that it is, closes over or is given, and the state and
    random keys of `hk.transform`.

    Source: openxla/shardy MPMD, `mpmd.named_computation`.

    Raises:
        ConfigError: there is no function, no name, or a name with quotes, backslashes or control characters.
    """
    if name is not None:
        _check_name(name, "named_computation")
    if fn is None:
        return functools.partial(named_computation, name=name)
    if not callable(fn):
        raise ConfigError(f"named_computation takes a function, got {fn!r}")
    chosen = name or _name_of(fn)
    if not chosen:
        raise ConfigError("named_computation needs a name: the function has none\n  write name='...'")
    _check_name(chosen, "named_computation")

    def under_name(inner: Callable[..., Any]) -> Callable[..., Any]:
        return taking_anything(inner, lambda of_arrays: _carrier_if_kept(of_arrays, chosen))

    carried = under_name(fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        _note(chosen)
        if is_initializing(fn) or stateful_modules.is_creating_parameters():
            return fn(*args, **kwargs)
        if stateful_modules.inside_transform():
            return stateful_modules.call_with_state(fn, args, kwargs, under_name)
        if has_modules(fn, args, kwargs):
            return call_with_modules(fn, args, kwargs, under_name)
        states = mutable_states(fn)
        if not states:
            return carried(*args, **kwargs)
        results, changed = under_name(returning_changes(fn, states))(*args, **kwargs)
        write_changes(states, changed)
        return results

    return functools.wraps(fn)(call)


def _name_of(fn: Any) -> str:
    """The name of a function, as of `jax.jit`: of a `functools.partial` that of its function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", ""))


_UNWRITABLE = '"\\'
"""Characters that MLIR escapes in one place and not in another."""


def _check_name(name: Any, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} needs a name, a text that is not empty, got {name!r}")
    wrong = [c for c in dict.fromkeys(name) if not c.isprintable() or c in _UNWRITABLE]
    if wrong:
        raise ConfigError(
            f"{what} cannot have the name {name!r}: the text of programs cannot hold "
            f"{', '.join(map(repr, wrong))}\n  use letters, digits, spaces and signs other than these"
        )


_called: contextvars.ContextVar[set[str]] = contextvars.ContextVar("_called")


@contextlib.contextmanager
def names_called(names: set[str]) -> Iterator[None]:
    """Adds to `names` all names of computations and tensors that are called inside."""
    token = _called.set(names)
    try:
        yield
    finally:
        _called.reset(token)


def _note(name: str) -> None:
    names = _called.get(None)
    if names is not None:
        names.add(name)


def named_tensor(x: R, name: str) -> R:
    """Names the arrays of a pytree, so that they can be assigned to a mesh or memory; returns them.

    Raises:
        ConfigError: there is no name.
    """
    _check_name(name, "named_tensor")
    _note(name)
    return carrier(jax.lax.optimization_barrier, "tensor", name)(x) if _is_kept(name) else jax.jit(_same)(x)


def _same(x: R) -> R:
    return x


def call(fn: Callable[P, R], *, call_counter: int | None = None) -> Callable[P, R]:
    """Calls of `fn` that stay calls: one microbatch's work each, partitioned once for all of them.

    Args:
        fn: the work of one microbatch; arguments and results are pytrees of arrays.
        call_counter: which microbatch it is, from 0.

    Raises:
        ConfigError: there is no function, or the counter is not the number of a microbatch.
    """
    if not callable(fn):
        raise ConfigError(f"mpmd.call takes a function, got {fn!r}")
    if call_counter is not None and (not isinstance(call_counter, int) or call_counter < 0):
        raise ConfigError(f"call_counter must be a whole number from 0, got {call_counter!r}")
    callee = _callee(fn)
    carried = callee if call_counter is None else carrier(callee, "call", str(call_counter))

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return carried(*args, **kwargs)

    return functools.wraps(fn)(call)  # and so holds `fn`, which the callee does not


_callees: dict[tuple[int, ...], tuple[Callable[..., Any], tuple[Any, ...]]] = {}
"""The identities of a function's parts → its carrier, and weak references that end the entry with a part."""


def _callee(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The carrier of a function's calls: one for all of them, so that JAX lowers them to one function.

    A bound method is a new object at each access; its object and its function are what stays.  Objects that
    are equal may hold other values, so parts are known by identity.
    """
    parts = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn,)
    key = tuple(map(id, parts))
    if key in _callees:
        return _callees[key][0]
    name = getattr(fn, "__name__", "call")
    try:
        held = tuple(weakref.ref(part, lambda _: _callees.pop(key, None)) for part in parts)
    except TypeError:  # nothing says when it ends
        return carrier(fn, "callee", name)
    callee = carrier(functools.partial(_call_of, held), "callee", name)
    return _callees.setdefault(key, (callee, held))[0]


def _call_of(held: tuple[weakref.ref[Any], ...], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that the caller holds, and which its carrier must not keep alive."""
    parts: list[Any] = [part() for part in held]
    return parts[-1](*parts[:-1], *args, **kwargs)


def broadcast(x: R) -> R:
    """Declares that the arrays of `x` may be sent to every mesh that uses them; returns them."""
    return carrier(jax.lax.optimization_barrier, "broadcast", "x")(x)


def reduce(x: R) -> R:
    """Declares that the arrays of `x` may be computed by a reduction across meshes; returns them."""
    return carrier(jax.lax.optimization_barrier, "reduce", "x")(x)
