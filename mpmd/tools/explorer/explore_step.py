"""The explorer's page for a step that JAX traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpmd.api.aot import Lowered, Traced
from mpmd.errors import MpmdError
from mpmd.tools.explorer.kernels import kernels_of
from mpmd.tools.explorer.recorder import PassRecorder


def explore(traced: Traced, path: str | Path, *, timing: bool = False) -> Lowered:
    """Lowers a traced step, and writes a page that shows the changes of every pass.

    The page is one HTML file, which needs no network; where lowering fails it shows the passes before.  After
    the last passes it shows the kernels of each fragment too, as native code for CPUs has them.

    Args:
        traced: the result of `mpmd.jit(step, config).trace(...)`.
        path: the file of the page.
        timing: also show how long each pass took; without, equal steps give equal files.

    Raises:
        MpmdError: from `traced.lower()`, or a fragment cannot be read; raised after the page is written.
    """
    recorder = PassRecorder()
    findings: list[str] = []
    kernels: dict[str, Any] = {}
    try:
        lowered = traced.lower(recorder)
        findings = [f"warning: {text}" for text in lowered.warnings] + lowered.notices
        axes = {name: dict(mesh.shape) for name, mesh in traced.config.topology.items()}
        kernels = kernels_of(lowered.fragments, axes)
        return lowered
    except MpmdError as e:
        findings = [f"error: {e}"]
        raise
    finally:
        if recorder.steps:
            page = recorder.page(str(traced.jax_traced.fun_name), findings, timing, kernels)
            Path(path).write_text(page, encoding="utf-8")
