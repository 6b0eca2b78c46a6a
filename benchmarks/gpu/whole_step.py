"""How long is GPT-2 124M's training step by our target, against XLA and PyTorch, and where is the time?

Method: the prepared step, launch by launch and as a graph; `jax.jit`, which compiles here; PyTorch
eagerly and by `torch.compile`, where it is installed (fused AdamW, its own attention, the vocabulary as
it is and padded to a multiple of 64). Steps in turn, five rounds, the state of each going on; then two
steps of ours and of XLA's in the profiler.

What the answer means: `ms.…` are the rounds; `kernels.…` has name, number and microseconds of each kernel,
those with the most time first, `busy_us` the time in which any ran, `span_us` from the first to the last.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import gzip
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.programs import SMALL, ModelSize, step_arguments, training_step
from benchmarks.gpu.target import chained, clocks, loaded
from benchmarks.gpu.torch_step import torch_step
from mpmd.compile.options import CompileOptions

ROUNDS, STEPS, NAMED = 5, 6, 100
PADDED = 64
Call = Callable[[], Any]
"""Begins a step; returns something to wait for."""


def measure(run: Experiment) -> None:
    """Finds it out."""
    size = ModelSize() if run.gpu else SMALL
    calls: dict[str, Call] = {}
    for name, captured in (("ours", False), ("graph", True)):
        with run.part(name):
            made = loaded(run, "step", CompileOptions(command_buffers=captured))
            _take(calls, name, _stepping(size, made))
    with run.part("xla"):
        step, arguments = training_step(size), step_arguments(size)
        begin = time.perf_counter()
        program = jax.jit(step.function, donate_argnums=step.donated).lower(*arguments).compile()
        run.figure("xla_compile_s", time.perf_counter() - begin, "s")
        run.figure("xla_temp_bytes", getattr(program.memory_analysis(), "temp_size_in_bytes", None))
        _take(calls, "xla", _stepping(size, lambda *given: jax.tree.leaves(program(*given))))
    with run.part("rounds of ours and xla's"):
        _rounds(run, calls, "")
    for name in ("ours", "xla"):
        if name in calls and run.has_time(f"kernels.{name}", 15 if run.gpu else 0):
            with run.part(f"kernels.{name}"):
                run.figure(f"kernels.{name}", profile(calls[name]))
    _torch(run, size, calls)
    if "torch" in calls:
        with run.part("rounds of all"):
            _rounds(run, calls, "all.")
    run.check("some program runs", bool(calls), ", ".join(calls))


def _stepping(size: ModelSize, step: Callable[..., Any]) -> Call:
    """Steps of a program of JAX; each begins with the state of the last."""
    state = [jnp.array(a) for a in step_arguments(size)]
    donated = len(training_step(size).donated)
    return chained(step, state[:donated], state[donated:])


def _take(calls: dict[str, Call], name: str, call: Call) -> None:
    """A call that has worked is compared."""
    for _ in range(2):
        _wait(call())
    calls[name] = call


def _wait(made: Any) -> None:
    """Until a step is done."""
    if hasattr(made, "item"):
        made.item()  # of PyTorch
    else:
        jax.block_until_ready(made)


def _torch(run: Experiment, size: ModelSize, calls: dict[str, Call]) -> None:
    if importlib.util.find_spec("torch") is None:
        run.skip("torch", "PyTorch is not installed")
        return
    padded = dataclasses.replace(size, vocabulary=-(-size.vocabulary // PADDED) * PADDED)
    device = "cuda" if run.gpu else "cpu"
    kinds = (("torch", size, False), ("torch_compiled", size, True), ("torch_compiled_padded", padded, True))
    for name, sized, compiled in kinds:
        if (run.gpu or not compiled) and run.has_time(name, 40 if compiled else 5):
            with run.part(name):
                begin = time.perf_counter()
                _take(calls, name, torch_step(sized, device, compiled=compiled))
                run.figure(f"{name}.first_s", time.perf_counter() - begin, "s")


def _rounds(run: Experiment, calls: dict[str, Call], prefix: str) -> None:
    """Steps in turn, and the clocks beside them."""
    found = collections.defaultdict[str, list[float]](list)
    run.figure(f"{prefix}clocks_before", clocks())
    steps = STEPS if run.gpu else 1
    for _ in range(ROUNDS if run.gpu else 1):
        for name, call in calls.items():
            begin, last = time.perf_counter(), None
            for _ in range(steps):
                last = call()
            _wait(last)
            found[name].append(round(1e3 * (time.perf_counter() - begin) / steps, 4))
    for name, times in found.items():
        run.figure(f"{prefix}ms.{name}", times, "ms")
    run.figure(f"{prefix}clocks_after", clocks())


def profile(call: Call, steps: int = 2) -> dict[str, Any]:
    """The kernels of some steps by JAX's profiler; none where there is no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        try:
            _wait([call() for _ in range(steps)][-1])
        finally:
            jax.profiler.stop_trace()
        (path,) = glob.glob(f"{folder}/**/perfetto_trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            content = json.load(file)
    events = content["traceEvents"] if isinstance(content, dict) else content
    return {"steps": steps, **kernels_in(events)}


def kernels_in(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The kernels in events of a trace: complete ones on streams of a GPU."""
    names: dict[Any, str] = {}
    spans: list[tuple[float, float, str]] = []
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            thread = event.get("tid") if event["name"] == "thread_name" else None
            names[event["pid"], thread] = str(event["args"].get("name"))
        elif event.get("ph") == "X":
            on_gpu = "GPU" in names.get((event["pid"], None), "")
            if on_gpu and "Stream" in names.get((event["pid"], event["tid"]), ""):
                spans.append((event["ts"], event["ts"] + event["dur"], event["name"]))
    rows: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    busy, end = 0.0, float("-inf")
    for begin, until, name in sorted(spans):
        rows[name][0] += 1
        rows[name][1] += until - begin
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    largest = sorted(((name[:160], n, round(us, 2)) for name, (n, us) in rows.items()), key=lambda r: -r[2])
    span = end - min(begin for begin, _, _ in spans) if spans else 0.0
    return {"kernels": len(spans), "busy_us": busy, "span_us": span, "rows": largest[:NAMED]}


if __name__ == "__main__":
    run_experiment("whole_step", __doc__, measure)
