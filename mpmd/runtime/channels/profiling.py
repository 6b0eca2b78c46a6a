"""Fragments in traces of `jax.profiler`, as xprof and TensorBoard show them.

An annotation covers the dispatch of a call, on the thread that issues its mesh.  Where the profiler records
the execution on the device too, XLA's own events show it under the name of the fragment's module.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from jax.profiler import StepTraceAnnotation, TraceAnnotation

from mpmd.runtime.program.instructions import task_text
from mpmd.runtime.run.interpreter import BoundCall, Observer, StepState


def step_annotation(name: str, number: int) -> contextlib.AbstractContextManager[Any]:
    """Covers the dispatch of a step, which tools for traces number and divide by."""
    return StepTraceAnnotation(f"mpmd {name}", step_num=number)


class DispatchAnnotations(Observer):
    """An annotation for each call: fragment, task and mesh in its name, and each of them in its metadata."""

    def __init__(self) -> None:
        self._open = threading.local()

    def calling(self, call: BoundCall, frame: StepState) -> None:
        op = call.op
        task = task_text(op)
        facts = {"stage": op.stage, "microbatch": op.microbatch, "phase": op.phase or None}
        known = {word: fact for word, fact in facts.items() if fact is not None}
        label = f"{op.executable}{f' {task}' if task else ''} on {call.mesh}"
        where = {"fragment": op.executable, "mesh": call.mesh, "step": frame.number}
        self._open.annotation = TraceAnnotation(label, **where, **known)
        self._open.annotation.__enter__()

    def ran(self, call: BoundCall, frame: StepState, issued: float) -> None:
        """Ends it; that of a call that failed ends when it is deleted, with the step."""
        self._open.annotation.__exit__(None, None, None)
        self._open.annotation = None


def dispatch_annotations() -> list[DispatchAnnotations]:
    """The observer of a step while a trace is recorded; otherwise none, and this check is the cost."""
    return [DispatchAnnotations()] if TraceAnnotation.is_enabled() else []
