"""No pass forgets to ask what may be done to an op: each that copies, drops or moves some says why."""

from __future__ import annotations

import ast

from tests.preconditions import always, rooms, rows
from tests.repo.tree import nodes, tracked

_CHANGES = {
    "clone", "clone_with", "clone_body", "erase", "move_before", "move_after", "move_to_start", "move_body",
    "reorder",
}  # fmt: skip
_PREDICATES = "mpmd/ir/effects.py"


def _changes_ops(node: ast.AST) -> bool:
    """Whether it is a call of `ir.clone` or the like."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "ir"
        and node.func.attr in _CHANGES
    )


def test_who_copies_drops_or_moves_ops_says_why_it_may():
    known = {row.file for room in rooms() for row in rows(room)}
    known |= {rewrite.partition(":")[0] for room in rooms() for rewrite in always(room)}
    passes = [path for path in tracked(".py") if str(path).startswith("mpmd/passes/")]
    silent = [str(path) for path in passes if any(map(_changes_ops, nodes(path))) and str(path) not in known]
    assert silent == [], "give each a row in tests/preconditions, or an entry in ALWAYS with the reason"


def test_one_module_knows_which_ops_have_effects():
    words = ("has_side_effect", "custom_call_has_side_effect")
    asking = {
        str(path)
        for path in tracked(".py")
        if str(path).startswith(("mpmd/passes/", "mpmd/ir/"))
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in words
    }
    assert asking == {_PREDICATES}
