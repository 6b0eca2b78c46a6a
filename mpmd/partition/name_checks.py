"""Every name that is called is assigned and runs, and every assigned name is called, or it is reported.

`check_names` compares the assignment with the module before import, `warn_of_vanished_names` that module with
the one after import, and `warn_of_idle_meshes` the topology with the streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from mpmd import ir
from mpmd.config.config import Config, did_you_mean
from mpmd.errors import ConfigError, collect
from mpmd.passes import structure
from mpmd.passes.calls.carried_sums import SUFFIX
from mpmd.runtime.program.streams import Program, Run
from mpmd.support import diagnostics
from mpmd.support.user_code import frames_of


@dataclasses.dataclass(frozen=True)
class CalledNames:
    """Names that were called while a step was traced.

    Attributes:
        now: for these arguments.
        ever: for these or for other static arguments.
        live: those of `now` that the results of the step depend on, by its jaxpr.
    """

    now: frozenset[str] = frozenset()
    ever: frozenset[str] = frozenset()
    live: frozenset[str] = frozenset()


def check_names(module: ir.Module, config: Config, called: CalledNames) -> dict[str, Any]:
    """Every name that is used must be assigned, and every name that is assigned must be used.

    A used name may be dead code that is not in the module; if it is live, it must be in the module.

    Returns:
        The outermost named computations of the module by name; of several calls the first.

    Raises:
        ConfigError: lists all names that are not, with similar known names.
    """
    computations: dict[str, Any] = {}
    outermost: dict[str, Any] = {}
    tensors: set[str] = set()
    for f in ir.funcs(module):
        for op in ir.walk(f, (ir.NamedComputation, ir.NamedTensor)):
            if isinstance(op, ir.NamedTensor):
                tensors.add(ir.StringAttr(op.attributes["name"]).value)
                continue
            computations.setdefault(op.named.name, op)
            if not any(isinstance(outer, ir.NamedComputation) for outer in structure.around(op)):
                outermost.setdefault(op.named.name, op)
    used = {*computations, *tensors, *called.ever}
    unused = [name for name in config.assignment if name not in used]
    problems = [
        f"named computation {name!r} is not assigned to a mesh{_where(op)}"
        f"{did_you_mean(name, unused) if unused else ''}"
        for name, op in outermost.items()
        if name not in config.assignment
    ]
    problems += [
        f"{name!r} is assigned to mesh {config.assignment[name].mesh!r}, but the function never uses it"
        f"{did_you_mean(name, sorted(used)) if used else ''}"
        for name in unused
    ]
    problems += [
        f"{name!r} is assigned to mesh {place.mesh!r}, and the results depend on it, but JAX lowers the code "
        "around it to operations without names\n  name the enclosing computation instead"
        for name, place in config.assignment.items()
        if name in called.live and name not in computations and name not in tensors
    ]
    if problems:
        raise collect(ConfigError, problems, "the assignment does not fit the function:")
    dead = called.now - {*computations, *tensors}
    _warn_of_dead([name for name in config.assignment if name in dead], config)
    return outermost


def warn_of_vanished_names(module: ir.Module, before: Collection[str], config: Config) -> None:
    """Warns of assigned computations that have no fragment after import.

    Args:
        module: after import.
        before: the outermost named computations that were in the module before import.
        config: the user's.
    """
    left = {
        origin.name.removesuffix(SUFFIX)  # it may be that only the second copy of a stage runs
        for f in ir.funcs(module)
        for fragment in ir.fragments(f)
        for origin in fragment.origins
    }
    called = [name for name in config.assignment if name in before]
    _warn_of_dead([name for name in called if name.removesuffix(SUFFIX) not in left], config)


def _warn_of_dead(names: Collection[str], config: Config) -> None:
    for name in names:
        diagnostics.warning(
            f"{name!r} is assigned to mesh {config.assignment[name].mesh!r} and is called, but nothing of it "
            "runs: no result of the step depends on what it computes"
        )


def warn_of_idle_meshes(program: Program, config: Config) -> None:
    running = {
        stream.mesh for stream in program.streams if any(isinstance(op, Run) for op in stream.instructions)
    }
    for mesh in config.topology:
        if mesh not in running:
            diagnostics.warning(f"mesh {mesh!r} of the topology runs nothing in this step")


def _where(op: Any) -> str:
    frames = frames_of(op)
    return f" ({frames[0]})" if frames else ""
