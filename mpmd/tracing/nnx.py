"""Named computations in flax nnx: modules are objects whose arrays change while they are called.

A nested jit can change neither the closure of its function, for which nnx raises, nor its arguments: a
module that is an argument would lose its new statistics and counts of random numbers without an error.
Here its arrays are arguments, and changed arrays are results.  Flax is not imported.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax


def has_modules(fn: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function is an nnx module, closes over one, or gets one as an argument."""
    return "flax.nnx" in sys.modules and any(map(_is_module, _leaves(_held_by(fn), args, kwargs)))


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
    found = filter(_is_module, _leaves(_held_by(fn), args, kwargs))
    modules = tuple({id(module): module for module in found}.values())
    definition, state = nnx.split(modules)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_module)

    def pure(state: Any, arrays: list[Any]) -> tuple[Any, Any]:
        inside = nnx.merge(definition, state)
        placeholders = {id(module): other for module, other in zip(modules, inside, strict=True)}
        before = {path: _value(variable) for path, variable in nnx.to_flat_state(nnx.state(inside))}
        rest = iter(arrays)
        given = [placeholders[id(leaf)] if _is_module(leaf) else next(rest) for leaf in leaves]
        positional, keywords = jax.tree.unflatten(tree, given)
        made = _rebuilt(fn, placeholders)(*positional, **keywords)
        after = nnx.to_flat_state(nnx.state(inside))
        changed = [(p, v) for p, v in after if p not in before or _value(v) is not before[p]]
        return made, nnx.from_flat_state(changed)

    made, changed = carried(pure)(state, [leaf for leaf in leaves if not _is_module(leaf)])
    nnx.update(modules, changed)
    return made


def _is_module(found: Any) -> bool:
    return isinstance(found, sys.modules["flax.nnx"].Pytree)


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
