"""Ops by their position in their block."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from mpmd import ir


def block_users(x: ir.Op) -> list[ir.Op]:
    """The ops beside `x` that use its results, in themselves or in their regions; newest use first."""
    return [op_around(user, x.operation.block) for user in ir.users(x)]


def op_around(user: ir.Op, block: ir.Block) -> ir.Op:
    """The op of a block that is an op, or contains it in its regions."""
    operation = user.operation
    while operation.block != block:
        operation = operation.parent
    return operation.opview


def in_block_order(some: Iterable[Any]) -> list[Any]:
    """Ops of one block, first one first."""
    return sorted(some, key=functools.cmp_to_key(lambda a, b: -1 if ir.comes_before(a, b) else 1))
