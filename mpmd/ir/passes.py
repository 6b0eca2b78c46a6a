"""Passes over the MPMD IR: what ours derive from, and MLIR's own by name."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

from jax.extend.mlir import ir, passmanager

from mpmd.errors import ConfigError, IRError
from mpmd.ir import counting
from mpmd.ir.context import context
from mpmd.ir.ops import Func
from mpmd.ir.query import funcs
from mpmd.support.passes import Pass

_WHICH: dict[str, Callable[[Func], bool]] = {
    "any": lambda f: True,
    "distributed": lambda f: f.is_distributed,
    "mpmd": lambda f: f.is_mpmd,
    "entry": lambda f: f.is_entry,
}


@dataclasses.dataclass(frozen=True)
class ModulePass(Pass):
    """A pass that rewrites a module."""

    def run(self, module: ir.Module) -> bool:
        """Rewrites `module`; True iff that changed it."""
        before = counting.edits()
        with context(), ir.Location.unknown():
            self.rewrite(module)
        return counting.edits() != before

    @abc.abstractmethod
    def rewrite(self, module: ir.Module) -> None:
        """What the pass does."""


@dataclasses.dataclass(frozen=True)
class FunctionPass(ModulePass):
    """A pass that rewrites one function after the other: those that `runs_on` says."""

    runs_on: ClassVar[Literal["any", "distributed", "mpmd", "entry"]] = "distributed"

    def rewrite(self, module: ir.Module) -> None:
        """Rewrites the functions."""
        for f in funcs(module):
            if _WHICH[self.runs_on](f):
                self.rewrite_function(f)

    @abc.abstractmethod
    def rewrite_function(self, f: Func) -> None:
        """What the pass does to one function."""


@dataclasses.dataclass(frozen=True)
class MlirPass(Pass):
    """A pass that MLIR, StableHLO or Shardy has registered in jaxlib, by its pipeline text."""

    pipeline: str = ""
    name: ClassVar[str] = "mlir"

    def run(self, module: ir.Module) -> bool:
        """Runs it; True iff the text of the module is another one afterwards."""
        before = _quick_text(module)
        with context():
            manager = passmanager.PassManager.parse(f"builtin.module({self.pipeline})")
            try:
                manager.run(module.operation)
            except ir.MLIRError as e:
                raise IRError(f"{self.pipeline} failed: {e}") from e
        changed = _quick_text(module) != before
        if changed:
            counting.note_edit()
        return changed

    def __str__(self) -> str:
        return self.pipeline


def _quick_text(module: ir.Module) -> bytes:
    """The text of a valid module, for comparing."""
    text: bytes = module.operation.get_asm(assume_verified=True, binary=True)
    return text


def mlir_pass(name: str, options: str = "") -> MlirPass:
    """A pass of MLIR, StableHLO or Shardy by its name; `options` as in `a=1 b=2`.

    Raises:
        ConfigError: jaxlib has no such pass, or it has no such option.
    """
    text = f"{name}{{{options}}}" if options else name
    problem = ""
    with context():
        for pipeline in (text, f"func.func({text})"):
            try:
                passmanager.PassManager.parse(f"builtin.module({pipeline})")
                return MlirPass(pipeline)
            except ValueError as e:
                problem = problem or str(e)
    raise ConfigError(f"cannot make the pass {name!r} of MLIR: {problem.strip()}")
