"""What the logger `mpmd.step` says: how long a step took to trace, partition and compile, and why again."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from mpmd.brief import bytes_text, counted, seconds_text
from mpmd.partition.signature import Arguments, describe

if TYPE_CHECKING:
    from mpmd.api.aot import Compiled, Lowered, Traced

log = logging.getLogger("mpmd.step")


def say_traced(traced: Traced, begin: float) -> None:
    """Called with the time of `time.perf_counter` at the begin, as the other functions are."""
    if log.isEnabledFor(logging.INFO):
        arrays = counted(len(traced.arguments.leaves), "argument array")
        log.info("%s: traced in %s, %s", traced.name, _since(begin), arrays)


def say_lowered(lowered: Lowered, begin: float) -> None:
    """The fragments and messages of a step, and at DEBUG the seconds of each phase."""
    if not log.isEnabledFor(logging.INFO):
        return
    figures, name = lowered.figures, lowered.name
    fragments = counted(len({(op.executable) for op in figures.runs}), "fragment")
    meshes = counted(len(lowered.config.topology), "mesh")
    messages = f"{counted(figures.messages, 'message')} ({bytes_text(figures.message_bytes)})"
    schedule = f"{lowered.config.pipeline_schedule.name}, {counted(figures.microbatches, 'microbatch')}"
    order = schedule if figures.microbatches else "no microbatches"
    log.info(
        "%s: partitioned in %s: %s on %s, %s, %s", name, _since(begin), fragments, meshes, messages, order
    )
    phases = ", ".join(f"{phase} {seconds_text(s)}" for phase, s in lowered.partitioned.seconds.items())
    log.debug("%s: phases: %s", name, phases)


def say_compiled(compiled: Compiled, begin: float) -> None:
    """The compilers of the fragments of a step."""
    if not log.isEnabledFor(logging.INFO):
        return
    backends = collections.Counter(e.backend for e in compiled.executables.values())
    by = ", ".join(f"{number} {backend}" for backend, number in sorted(backends.items()))
    fragments = counted(len(compiled.executables), "fragment")
    log.info("%s: compiled in %s: %s (%s)", compiled.lowered.name, _since(begin), fragments, by)


def say_again(name: str, arguments: Arguments, known: Collection[Compiled]) -> None:
    """Before a step is compiled for another signature: what differs from the last one."""
    if not known or not log.isEnabledFor(logging.INFO):
        return
    last = list(known)[-1].lowered.traced
    log.info("%s: compiles signature %d, as %s", name, len(known) + 1, _difference(arguments, last))


def _difference(arguments: Arguments, last: Traced) -> str:
    if arguments.statics != last.arguments.statics:
        return f"static arguments are {arguments.statics!r}"
    if arguments.tree != last.arguments.tree:
        return "the structure of its arguments differs"
    for path, new, old in zip(last.argument_paths, arguments.leaves, last.arguments.leaves, strict=True):
        if describe(new) != describe(old):
            return f"{path} is {_text(new)} and was {_text(old)}"
    return "JAX's configuration, or a sharding, differs"


def _text(leaf: object) -> str:
    shape, dtype, weak = describe(leaf)
    return f"{dtype}[{','.join(map(str, shape))}]{' (a Python number)' if weak else ''}"


def _since(begin: float) -> str:
    return seconds_text(time.perf_counter() - begin)
