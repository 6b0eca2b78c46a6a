"""What the stages of a step print: meshes, schedule, fragments, messages, memory, arguments."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mpmd.brief import bytes_text, card, counted, few
from mpmd.runtime.program.figures import ProgramFigures

if TYPE_CHECKING:
    from mpmd.api.aot import Compiled, Lowered, Traced


def traced_card(traced: Traced) -> str:
    """A traced step in a few lines."""
    places = traced.config.assignment
    names = few(f"{name} on {places[name]}" if name in places else name for name in sorted(traced.names))
    stages = "" if traced.stages is None else f"{traced.stages.selector}"
    rows = [
        ("meshes", meshes_text(traced.config.topology)),
        ("schedule", traced.config.pipeline_schedule.name),
        ("names", names),
        ("stages", stages),
        *_arguments(traced),
        ("warnings", _number(traced.warnings)),
    ]
    return card(f"Traced {traced.name!r}", rows)


def lowered_card(lowered: Lowered) -> str:
    """A partitioned step in a few lines."""
    figures = lowered.figures
    fragments = f"{len({op.executable for op in figures.runs})}, called {len(figures.runs):,} times in a step"
    rows = [
        *_program(lowered, figures),
        ("fragments", fragments),
        *_messages(figures),
        ("memory", f"{_memory(figures)}, without the scratch of fragments"),
        *_arguments(lowered.traced),
        ("warnings", _number(lowered.warnings)),
    ]
    return card(f"Lowered {lowered.name!r}", rows)


def compiled_card(compiled: Compiled) -> str:
    """A step that is ready to run, in a few lines."""
    lowered, figures = compiled.lowered, compiled.figures
    backends = collections.Counter(e.backend for e in compiled.executables.values())
    by = ", ".join(f"{count} {backend}" for backend, count in sorted(backends.items()))
    distinct, here = len({op.executable for op in figures.runs}), len(compiled.executables)
    which = f"{distinct} ({by})" if distinct == here else f"{distinct}, {here} of them in this process ({by})"
    rows = [
        *_program(lowered, figures),
        ("fragments", f"{which}, called {len(figures.runs):,} times in a step"),
        *_messages(figures),
        ("memory", f"{_memory(figures)}, with the scratch of fragments"),
        *_arguments(lowered.traced),
        ("warnings", _number([*lowered.warnings, *filter(None, [compiled.fallbacks.text])])),
    ]
    return card(f"Compiled {lowered.name!r}", rows)


def meshes_text(topology: Mapping[str, Any]) -> str:
    """Meshes with their axes: `m0 and m1 (data=2)`; those that are alike share theirs."""
    alike: dict[str, list[str]] = {}
    for name, mesh in topology.items():
        axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        alike.setdefault(axes, []).append(name)
    return "; ".join(f"{few(names)} ({axes})" for axes, names in alike.items())


def _program(lowered: Lowered, figures: ProgramFigures) -> Iterable[tuple[str, str]]:
    yield "meshes", meshes_text(lowered.config.topology)
    if not figures.microbatches:
        yield "schedule", "none, as there are no microbatches"
        return
    tasks = f"{counted(figures.stages, 'stage')}, {counted(figures.microbatches, 'microbatch')}"
    bubble = f"bubble {figures.bubble:.1%} if a backward takes two forwards"
    yield "schedule", f"{lowered.config.pipeline_schedule.name}, {tasks}; {bubble}"


def _messages(figures: ProgramFigures) -> Iterable[tuple[str, str]]:
    yield "messages", f"{figures.messages:,} in a step, {bytes_text(figures.message_bytes)}"


def _memory(figures: ProgramFigures) -> str:
    mesh, size = max(figures.peak_bytes.items(), key=lambda of: of[1], default=("", 0))
    return f"at most {bytes_text(size)} on {mesh}" if mesh else "none"


def _arguments(traced: Traced) -> Iterable[tuple[str, str]]:
    leaves = traced.arguments.leaves
    donated = len(traced.arguments.donated)
    more = f", {donated:,} donated" if donated else ""
    yield "arguments", f"{_arrays(leaves)}{more}"
    yield "results", _arrays(jax.tree.leaves(traced.out_info))


def _arrays(leaves: Sequence[Any]) -> str:
    total = sum(int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize for leaf in leaves)
    return f"{counted(len(leaves), 'array')}, {bytes_text(total)}"


def _number(warnings: Sequence[str]) -> str:
    return f"{len(warnings)}: {warnings[0].splitlines()[0]}" if warnings else ""
