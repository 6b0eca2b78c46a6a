"""Processes tell each other something in one way: an exchange, which announces itself and is compared."""

from __future__ import annotations

import ast

from tests.repo.tree import nodes, tracked

STORE = ("key_value_set", "blocking_key_value_get", "key_value_delete", "key_value_dir_get")
HERE = "mpmd/runtime/processes"
ALLOWED = {
    **{key: {f"{HERE}/store.py", f"{HERE}/mail.py", f"{HERE}/world.py"} for key in STORE},
    "Mail": {f"{HERE}/world.py"},
    "WorldExchange": {f"{HERE}/world.py"},
    "Turns": {f"{HERE}/exchange.py"},
}
"""What only these files may call: the store, and what makes an exchange or a place to meet."""


def calls():
    """Every call in the package: the file, the node, and the name that is called."""
    for path, node in of_package():
        if isinstance(node, ast.Call):
            yield path.as_posix(), node, getattr(node.func, "attr", getattr(node.func, "id", ""))


def of_package():
    """Every node of the syntax trees of the package, with its file."""
    return ((path, node) for path in tracked(".py") if path.parts[0] == "mpmd" for node in nodes(path))


def test_nobody_else_reaches_the_store_or_makes_an_exchange():
    found = {name: {file for file, _, called in calls() if called == name} for name in ALLOWED}
    assert all(found[name] for name in ALLOWED), "a name is out of date"
    assert {name: files - ALLOWED[name] for name, files in found.items() if files - ALLOWED[name]} == {}


def test_an_exchange_is_left_as_it_is_begun():
    """In a `with` statement, whose end tells the others of an exception."""
    entered = set()
    for path, node in of_package():
        if isinstance(node, ast.With):
            entered |= {(path.as_posix(), id(item.context_expr)) for item in node.items}
    begun = [(file, node) for file, node, name in calls() if name == "exchange" and "/compile/" not in file]
    assert len(begun) >= 7
    assert [file for file, node in begun if (file, id(node)) not in entered] == []
