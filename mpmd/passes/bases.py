"""Base classes of passes over the MPMD IR, and MLIR's own passes by name."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar, Literal

from mpmd import ir
from mpmd.errors import ConfigError, IRError
from mpmd.passes.verify import propagation_problem
from mpmd.support.passes import Pass

_WHICH: dict[str, Callable[[ir.Func], bool]] = {
    "any": lambda f: True,
    "distributed": lambda f: f.is_distributed,
    "mpmd": lambda f: f.is_mpmd,
    "entry": lambda f: f.is_entry,
}


class ModulePass(Pass):
    """A pass that rewrites a module."""

    prefix = "mpmd-"

    def run(self, module: ir.Module) -> bool:
        """Rewrites `module`; True iff that changed it."""
        before = ir.edits()
        with ir.context(), ir.Location.unknown():
            self.rewrite(module)
        return ir.edits() != before

    @abc.abstractmethod
    def rewrite(self, module: ir.Module) -> None:
        """Runs the pass."""


class FunctionPass(ModulePass):
    """A pass that rewrites one function after the other: those that `runs_on` selects."""

    runs_on: ClassVar[Literal["any", "distributed", "mpmd", "entry"]] = "distributed"

    def rewrite(self, module: ir.Module) -> None:
        for f in ir.funcs(module):
            if not f.is_external and _WHICH[self.runs_on](f):
                self.rewrite_function(f)

    @abc.abstractmethod
    def rewrite_function(self, f: ir.Func) -> None:
        """Rewrites one function."""


class MlirPass(Pass):
    """A pass that MLIR, StableHLO or Shardy has registered in jaxlib, by its pipeline text."""

    pipeline: str = ""
    name: ClassVar[str] = "mlir"
    reports_changes: ClassVar[bool] = False

    def run(self, module: ir.Module) -> bool:
        """Runs it; always True, as MLIR does not report whether it changed anything.

        Raises:
            IRError: it fails, or would end the process.
        """
        propagates = "sdy-" in self.pipeline and "propagat" in self.pipeline
        problem = propagation_problem(module) if propagates else ""
        if problem:
            raise IRError(problem)
        ir.run_mlir(self.pipeline, module)
        return True

    def __str__(self) -> str:
        return self.pipeline


def mlir_pass(name: str, options: str = "") -> MlirPass:
    """A pass of MLIR, StableHLO or Shardy by its name; `options` as in `a=1 b=2`.

    Raises:
        ConfigError: jaxlib has no such pass, or it has no such option.
    """
    text = f"{name}{{{options}}}" if options else name
    problems = []
    for pipeline in (text, f"func.func({text})"):
        problems.append(ir.mlir_problem(pipeline))
        if not problems[-1]:
            return MlirPass(pipeline)
    raise ConfigError(f"cannot build the pass {name!r} of MLIR: {problems[0]}")
