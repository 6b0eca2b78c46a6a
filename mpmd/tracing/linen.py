"""Named computations in flax linen: modules create parameters and change state while they are called.

Flax is not imported; modules and their scopes are recognised by their attributes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_ABSENT = object()


def is_initializing(fn: Callable[..., Any]) -> bool:
    """Whether a linen module inside another is creating its parameters: `fn`, or one that `fn` holds."""
    return any(_makes_parameters(held) for held in _held_by(fn))


def mutable_states(fn: Callable[..., Any]) -> list[Any]:
    """The root scopes of linen modules that `fn` holds, if calling it may change them."""
    found: dict[int, Any] = {}
    for held in _held_by(fn):
        root = getattr(getattr(held, "scope", None), "root", None)
        if callable(getattr(root, "mutable_variables", None)) and getattr(root, "mutable", False):
            found[id(root)] = root
    return list(found.values())


def returning_changes(fn: Callable[..., Any], states: Sequence[Any]) -> Callable[..., tuple[Any, Any]]:
    """`fn` as a function that also returns its changes of each state, as dicts in dicts.

    Otherwise values of a nested jit would leak into the state.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        before = [_copied(state.mutable_variables()) for state in states]
        made = fn(*args, **kwargs)
        return made, [_changes(old, state.mutable_variables()) for old, state in zip(before, states)]

    return call


def write_changes(states: Sequence[Any], changed: Sequence[Any]) -> None:
    """Writes the changes that `returning_changes` returned into the states."""
    for state, collections in zip(states, changed, strict=True):
        for collection, variables in collections.items():
            for name, value in variables.items():
                state.put_variable(collection, name, value)


def _copied(tree: Any) -> Any:
    return {k: _copied(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


def _changes(old: Any, new: Any) -> dict[str, Any]:
    """The entries of dicts in dicts that differ from before."""
    found = {}
    for key, value in new.items():
        before = old.get(key, _ABSENT)
        if isinstance(value, Mapping):
            inner = _changes(before if isinstance(before, Mapping) else {}, value)
            if inner:
                found[key] = inner
        elif value is not before:
            found[key] = value
    return found


def _held_by(fn: Any) -> Iterator[Any]:
    """A function, the object whose method it is, and what it closes over."""
    yield getattr(fn, "__self__", fn)
    if isinstance(fn, functools.partial):
        yield from (*_held_by(fn.func), *fn.args, *fn.keywords.values())
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            yield cell.cell_contents


def _makes_parameters(module: Any) -> bool:
    ask = getattr(module, "is_initializing", None)
    return callable(ask) and getattr(module, "scope", None) is not None and bool(ask())
