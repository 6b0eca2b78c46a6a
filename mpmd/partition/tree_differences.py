"""The first node in which two pytrees differ, by its path: as text, their definitions may look alike."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path, tree_structure


def first_difference(got: Any, expected: Any, *, prefix: bool = False) -> tuple[tuple[Any, ...], str, str]:
    """The path of the first node that differs, and its two descriptions.

    Args:
        got: the structure of a pytree.
        expected: the structure of another one, of which it may be a prefix.
        prefix: whether a leaf of `got` may be a whole subtree of `expected`.

    Returns:
        The path, and what `got` and `expected` have there; the two are equal texts where nothing differs.
    """
    ours, theirs = (jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in (got, expected))
    return _difference((), ours, theirs, prefix) or ((), "", "")


def _difference(
    path: tuple[Any, ...], got: Any, expected: Any, prefix: bool
) -> tuple[tuple[Any, ...], str, str] | None:
    if _is_leaf(got) and (prefix or _is_leaf(expected)):
        return None
    ours, theirs = _children(got), _children(expected)
    differ = type(got) is not type(expected) or list(ours) != list(theirs)
    if differ or _is_leaf(got) or _is_leaf(expected):
        return path, *_apart(got, expected, ours, theirs)
    if tree_structure(got, is_leaf=_below(got)) != tree_structure(expected, is_leaf=_below(expected)):
        return path, *_fixed_parts(got, expected)
    for key, child in ours.items():
        found = _difference((*path, key), child, theirs[key], prefix)
        if found is not None:
            return found
    return None


def _is_leaf(node: Any) -> bool:
    return isinstance(node, int)  # what both trees were made of


def _below(node: Any) -> Callable[[Any], bool]:
    return lambda value: value is not node


def _children(node: Any) -> dict[Any, Any]:
    """Key in a path → child."""
    return {path[0]: child for path, child in tree_leaves_with_path(node, is_leaf=_below(node)) if path}


def _apart(got: Any, expected: Any, ours: dict[Any, Any], theirs: dict[Any, Any]) -> tuple[str, str]:
    """Descriptions of nodes of two kinds, or with other children."""
    if type(got) is not type(expected) or isinstance(got, (list, tuple)):
        return _kind(got, ours), _kind(expected, theirs)
    more, fewer = [k for k in ours if k not in theirs], [k for k in theirs if k not in ours]
    if not more and not fewer:
        return _kind(got, ours), _kind(expected, theirs)
    name = type(got).__name__
    return f"a {name} {_with(more, fewer)}", f"a {name} {_with(fewer, more)}"


def _with(more: list[Any], fewer: list[Any]) -> str:
    return f"with {_few(more)}" if more else f"without {_few(fewer)}"


def _few(keys: list[Any]) -> str:
    return ", ".join(keystr((key,)) for key in keys[:4]) + (f" and {len(keys) - 4} more" if keys[4:] else "")


def _kind(node: Any, children: dict[Any, Any]) -> str:
    if _is_leaf(node):
        return "an array"
    if node is None:
        return "None"
    if isinstance(node, (list, tuple)):
        return f"a {type(node).__name__} of {len(children)}"
    return f"a {type(node).__name__} with {_few(list(children)) or 'nothing'}"


def _fixed_parts(got: Any, expected: Any) -> tuple[str, str]:
    """Descriptions of nodes that differ in static fields: text of these, from where it differs."""
    ours, theirs = (
        str(tree_structure(node, is_leaf=_below(node)).node_data()[1]) for node in (got, expected)
    )
    at = next((k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    begin = max(0, at - 20)
    name = type(got).__name__
    texts = [f"{'...' if begin else ''}{text[begin : begin + 80]}" for text in (ours, theirs)]
    if texts[0] == texts[1]:
        texts = [reprlib.repr(text) + ", equal as text" for text in texts]
    return f"a {name} with {texts[0]}", f"a {name} with {texts[1]}"
