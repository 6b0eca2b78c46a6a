"""MLIR's own passes, which jaxlib has registered: by the text of a pipeline, such as `cse,symbol-dce`."""

from __future__ import annotations

from jax.extend.mlir import ir, passmanager

from mpmd.errors import IRError
from mpmd.ir import counting
from mpmd.ir.context import context


def run_mlir(pipeline: str, module: ir.Module) -> None:
    """Runs MLIR's passes on a module.  Hold no op over this: those that it erases crash the process.

    Raises:
        IRError: a pass fails; the module may be invalid.
    """
    with context():
        manager = _manager(pipeline)
        try:
            manager.run(module.operation)
        except ir.MLIRError as e:
            raise IRError(f"{pipeline} failed: {e}") from e
    counting.note_edit()


def mlir_problem(pipeline: str) -> str:
    """Why there is no such pipeline; empty if there is."""
    try:
        with context():
            _manager(pipeline)
    except ValueError as e:
        return str(e).strip()
    return ""


def _manager(pipeline: str) -> passmanager.PassManager:
    return passmanager.PassManager.parse(f"builtin.module({pipeline})")
