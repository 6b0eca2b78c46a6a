"""MLIR's own passes, which jaxlib has registered: by the text of a pipeline, such as `cse,symbol-dce`."""

from __future__ import annotations

from jax.extend.mlir import ir, passmanager

from mpmd.errors import IRError
from mpmd.ir import query
from mpmd.ir.context import context
from mpmd.ir.kept import defer_contents_deletion


def run_mlir(pipeline: str, module: ir.Module) -> None:
    """Runs MLIR's passes on a module.  Ops taken from it before belong to the program as it was then.

    (An op that a pass erased could not be distinguished from others, and using it would crash the process.)

    Raises:
        IRError: a pass fails; the module stays as it was.
    """
    with context():
        result = module.operation.clone()
    run_mlir_alone(pipeline, result)
    defer_contents_deletion(module)
    for op in list(result.opview.body.operations):
        module.body.append(op)
    for name, attribute in result.attributes.items():
        module.operation.attributes[name] = attribute
    query.note_edit()


def run_mlir_alone(pipeline: str, module: ir.Module | ir.Operation) -> None:
    """Runs MLIR's passes on a module whose ops have no Python objects.

    Raises:
        IRError: a pass fails; the module is then unusable.
    """
    with context():
        try:
            _manager(pipeline).run(module.operation)
        except ir.MLIRError as e:
            raise IRError(f"{pipeline} failed: {e}") from e


def mlir_problem(pipeline: str) -> str:
    """Why there is no such pipeline; empty if there is one."""
    try:
        with context():
            _manager(pipeline)
    except ValueError as e:
        return str(e).strip()
    return ""


def _manager(pipeline: str) -> passmanager.PassManager:
    return passmanager.PassManager.parse(f"builtin.module({pipeline})")
