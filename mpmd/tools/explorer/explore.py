"""The explorer's page for a step that JAX traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpmd import ir
from mpmd.api.stages import Lowered, Traced
from mpmd.errors import MpmdError
from mpmd.pipeline import Step
from mpmd.support.passes import Pass
from mpmd.tools.explorer.recorder import PassRecorder, Planned


class _Observer:
    """Hands what happens in lowering to a recorder."""

    def __init__(self) -> None:
        self.recorder = PassRecorder()

    def begins(self, module: ir.Module) -> None:
        """The module as it was traced."""
        self.recorder.start(module, title="traced")

    def phase_begins(self, phase: str, steps: list[Step]) -> None:
        """The steps of a pipeline are to run."""
        self.recorder.plan(Planned(step.pass_, phase, step.why) for step in steps)

    def pass_ended(self, pass_: Pass, module: Any, changed: bool, seconds: float) -> None:
        """A pass ran."""
        self.recorder.after(pass_, module, changed, seconds)


def explore(traced: Traced, path: str | Path, *, timing: bool = False) -> Lowered:
    """Lowers a traced step, and writes a page that shows what every pass did to it.

    The page is one HTML file, which needs no network; where lowering fails it shows how far it came.

    Args:
        traced: what `mpmd.jit(step, config).trace(...)` gives.
        path: where the page goes.
        timing: also show how long each pass took; without, equal steps give equal files.

    Raises:
        MpmdError: what `traced.lower()` raises, after the page is written.
    """
    observer = _Observer()
    findings: list[str] = []
    try:
        lowered = traced.lower(observer)
        findings = [f"warning: {text}" for text in lowered.warnings] + lowered.notices
        return lowered
    except MpmdError as e:
        findings = [f"error: {e}"]
        raise
    finally:
        if observer.recorder.steps:
            page = observer.recorder.page(str(traced.jax_traced.fun_name), findings, timing)
            Path(path).write_text(page, encoding="utf-8")
