"""Named computations in libraries whose modules change while they are called: flax nnx, flax linen, haiku.

A nested jit must change nothing outside of it, since the values would belong to the nested jit.  So state is
an argument of it, and changed state a result.

* nnx: modules are objects that hold arrays.  A nested jit can change neither the closure of its function, for
  which nnx raises, nor its arguments: a module that is an argument would lose its new statistics and its
  counts of random numbers without an error.
* linen: modules create parameters and change state while they are called.  Modules and their scopes are
  recognised by their attributes.
* haiku: parameters, state and a sequence of random keys are in a frame outside of JAX.  Where its internals
  differ from the expected ones, functions are called directly and JAX reports the leaked values.

None of the libraries is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from mpmd.errors import SignatureError
from mpmd.support.user_code import warn_user

_NEEDED = ("internal_state", "temporary_internal_state", "update_internal_state", "base")


def inside_transform() -> bool:
    """Whether a function that haiku transformed is running."""
    return _frame() is not None


def is_creating_parameters() -> bool:
    """Whether it runs to create its parameters, which must not be created inside of a nested jit."""
    frame = _frame()
    return frame is not None and not frame.params_frozen


def call_with_state(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    carried: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Any:
    """Calls a function under a nested jit, and changes haiku's state and random keys as the call does.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        carried: puts a function of arrays under the nested jit.
    """
    stateful = _stateful()

    def pure(before: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inside = stateful.temporary_internal_state(before, share_python_state=True)
        with inside, stateful.base.push_jax_trace_level():
            results = fn(*args, **kwargs)
            return results, _state_changes(before, stateful.internal_state(params=False))

    before = stateful.internal_state(params=False)
    results, changed = carried(pure)(before, args, kwargs)
    stateful.update_internal_state(changed)
    return results


def _state_changes(before: Any, after: Any) -> Any:
    """The state and keys in `after` that are other objects than those in `before`, in haiku's form."""
    state = {
        module: {
            name: value
            for name, value in values.items()
            if _other(before.state.get(module, {}).get(name), value)
        }
        for module, values in after.state.items()
    }
    keys = after.rng if after.rng is not None and _other(before.rng, after.rng) else None
    return after._replace(state={module: values for module, values in state.items() if values}, rng=keys)


def _other(before: Any, after: Any) -> bool:
    """Whether two pairs of arrays (or of arrays and tuples) hold other objects."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    return len(old) != len(new) or any(a is not b for a, b in zip(old, new))


def _frame() -> Any:
    """The frame of the transformed function that runs in this thread; None if none does."""
    base = sys.modules.get("haiku._src.base")
    frames = getattr(base, "frame_stack", None)
    if not frames or not all(hasattr(_stateful(), name) for name in _NEEDED):
        return None
    return frames.peek()


def _stateful() -> Any:
    return importlib.import_module("haiku._src.stateful")


_ABSENT = object()


def is_initializing(fn: Callable[..., Any]) -> bool:
    """Whether a linen module inside another is creating its parameters: `fn`, or one that `fn` holds."""
    return any(_makes_parameters(held) for held in _modules_held_by(fn))


def mutable_states(fn: Callable[..., Any]) -> list[Any]:
    """The root scopes of linen modules that `fn` holds, if calling it may change them."""
    states: dict[int, Any] = {}
    for held in _modules_held_by(fn):
        root = getattr(getattr(held, "scope", None), "root", None)
        if callable(getattr(root, "mutable_variables", None)) and getattr(root, "mutable", False):
            states[id(root)] = root
    return list(states.values())


def returning_changes(fn: Callable[..., Any], states: Sequence[Any]) -> Callable[..., tuple[Any, Any]]:
    """`fn` as a function that also returns its changes of each state, as dicts in dicts.

    Otherwise values of a nested jit would leak into the state.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        before = [_copied(state.mutable_variables()) for state in states]
        results = fn(*args, **kwargs)
        return results, [_changes(old, state.mutable_variables()) for old, state in zip(before, states)]

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
    changes = {}
    for key, value in new.items():
        before = old.get(key, _ABSENT)
        if isinstance(value, Mapping):
            inner = _changes(before if isinstance(before, Mapping) else {}, value)
            if inner:
                changes[key] = inner
        elif value is not before:
            changes[key] = value
    return changes


def _modules_held_by(fn: Any) -> Iterator[Any]:
    """A function, the object whose method it is, and what it closes over."""
    yield getattr(fn, "__self__", fn)
    if isinstance(fn, functools.partial):
        yield from (*_modules_held_by(fn.func), *fn.args, *fn.keywords.values())
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            yield cell.cell_contents


def _makes_parameters(module: Any) -> bool:
    ask = getattr(module, "is_initializing", None)
    return callable(ask) and getattr(module, "scope", None) is not None and bool(ask())


def has_modules(fn: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function is an nnx module, closes over one, or gets one as an argument."""
    return are_modules(_held_by(fn), args, kwargs)


def are_modules(*values: Any) -> bool:
    """Whether nnx modules are among values."""
    return "flax.nnx" in sys.modules and any(map(_is_module, _leaves(*values)))


def call_with_modules(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    carried: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Any:
    """Calls a function under a nested jit, and changes its modules as the call does.

    Args:
        fn: the function.
        args: its positional arguments; they may contain modules.
        kwargs: its keyword arguments, likewise.
        carried: puts a function of arrays under the nested jit.
    """
    nnx: Any = sys.modules["flax.nnx"]
    module_leaves = filter(_is_module, _leaves(_held_by(fn), args, kwargs))
    modules = tuple({id(module): module for module in module_leaves}.values())
    definition, state = nnx.split(modules)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_module)

    def pure(state: Any, arrays: list[Any]) -> tuple[Any, Any]:
        inside = nnx.merge(definition, state)
        placeholders = {id(module): other for module, other in zip(modules, inside, strict=True)}
        before = {path: _value(variable) for path, variable in nnx.to_flat_state(nnx.state(inside))}
        rest = iter(arrays)
        given = [placeholders[id(leaf)] if _is_module(leaf) else next(rest) for leaf in leaves]
        positional, keywords = jax.tree.unflatten(tree, given)
        results = _rebuilt(fn, placeholders)(*positional, **keywords)
        after = nnx.to_flat_state(nnx.state(inside))
        changed = [(p, v) for p, v in after if p not in before or _value(v) is not before[p]]
        return results, nnx.from_flat_state(changed)

    results, changed = carried(pure)(state, [leaf for leaf in leaves if not _is_module(leaf)])
    nnx.update(modules, changed)
    return results


def returning_what_it_changes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A step or a loss, checked to return what it changes in nnx modules that are its arguments: copies.

    Raises:
        SignatureError: when called, and it returns not all changes; counts of random numbers are a warning.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not are_modules(args, kwargs):
            return fn(*args, **kwargs)
        before = _variables(fn, args, kwargs)
        held = {path: _value(variable) for path, variable in before.items()}
        results = fn(*args, **kwargs)
        returned = set(map(id, jax.tree.leaves(results)))
        lost = {
            path: variable
            for path, variable in before.items()
            if _value(variable) is not held[path] and id(_value(variable)) not in returned
        }
        if lost:
            _report_lost(getattr(fn, "__name__", "the step"), lost)
        return results

    return checked


def _variables(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The variables of nnx modules among the arguments of a call, by their paths."""
    nnx: Any = sys.modules["flax.nnx"]
    found: dict[str, Any] = {}
    try:
        arguments = inspect.signature(fn).bind(*args, **kwargs).arguments
    except ValueError:  # without a signature
        arguments = {f"argument {number}": argument for number, argument in enumerate(args)} | kwargs
    for name, argument in arguments.items():
        for path, module in jax.tree_util.tree_leaves_with_path(argument, is_leaf=_is_module):
            if _is_module(module):
                for inner, variable in nnx.to_flat_state(nnx.state(module)):
                    found[".".join([name + jax.tree_util.keystr(path), *map(str, inner)])] = variable
    return found


def _report_lost(name: str, lost: Mapping[str, Any]) -> None:
    nnx: Any = sys.modules["flax.nnx"]
    first, *others = lost
    more = f" and {len(others)} more variables" if others else ""
    text = (
        f"{name} changes {first}{more} in place, and these changes are lost\n"
        "  arguments are copies, as with jax.jit: return what changes, or give the step the state of all "
        "modules:\n  graph, state = nnx.split((model, optimizer)) before it, in it nnx.merge(graph, state, "
        "copy=True), and nnx.state((model, optimizer)) as its result"
    )
    if all(isinstance(variable, nnx.RngState) for variable in lost.values()):
        warn_user([text])
    else:
        raise SignatureError(text)


def add_note(error: Exception) -> None:
    """Adds to an error of nnx about a module of an outer function how to write it instead."""
    if type(error).__name__ == "TraceContextError" and type(error).__module__.startswith("flax"):
        error.add_note(
            "mpmd: the loss or the step changes a module that it closes over, such as its counts of random "
            "numbers\n  nnx.merge(graph, params, rest, copy=True) makes it one of its own: without "
            "copy=True, it has the variables of the states that it is made of"
        )


def _is_module(value: Any) -> bool:
    return isinstance(value, sys.modules["flax.nnx"].Pytree)


def _value(variable: Any) -> Any:
    """The content of a variable; an array is its own content."""
    ask = getattr(variable, "get_raw_value", None)
    return variable if ask is None else ask()


def _leaves(*trees: Any) -> list[Any]:
    return jax.tree.leaves(trees, is_leaf=_is_module)


def _held_by(fn: Any) -> list[Any]:
    held = [getattr(fn, "__self__", fn), *_contents(fn)]
    if isinstance(fn, functools.partial):
        held += [*_held_by(fn.func), fn.args, fn.keywords]
    return held


def _contents(fn: Any) -> Iterator[Any]:
    """The contents of the cells of a function's closure; empty cells are left out."""
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _rebuilt(fn: Any, placeholders: dict[int, Any]) -> Any:
    def instead(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: placeholders.get(id(leaf), leaf), tree, is_leaf=_is_module)

    if id(fn) in placeholders:
        return placeholders[id(fn)]
    if isinstance(fn, functools.partial):
        return functools.partial(_rebuilt(fn.func, placeholders), *instead(fn.args), **instead(fn.keywords))
    if isinstance(fn, types.MethodType):
        return types.MethodType(fn.__func__, instead(fn.__self__))
    if not isinstance(fn, types.FunctionType) or not any(map(_is_module, _leaves(*_contents(fn)))):
        return fn
    cells = tuple(_cell(cell, instead) for cell in fn.__closure__ or ())
    other = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    other.__kwdefaults__ = fn.__kwdefaults__
    return other


def _cell(cell: types.CellType, instead: Callable[[Any], Any]) -> types.CellType:
    """A cell with other modules in its content; the same one if it holds none."""
    try:
        held = cell.cell_contents
    except ValueError:  # it is still empty
        return cell
    return types.CellType(instead(held)) if any(map(_is_module, _leaves(held))) else cell
