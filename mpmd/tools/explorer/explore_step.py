"""The kernels inside of a fragment as native code has them: what each costs, reads and writes.

The explorer's page for a step that JAX traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpmd.api.aot import Lowered, Traced
from mpmd.compile.backends.targets import DESCRIBED
from mpmd.compile.buffers.assignment import BufferAssignment, Slice
from mpmd.compile.driver import Prepared, prepare_fragment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.thunks.program_costs import fragment_costs
from mpmd.compile.thunks.thunk import Thunk
from mpmd.errors import CompileError, HloError, MpmdError
from mpmd.tools.explorer.recorder import PassRecorder

DEVICE = "cpu"
"""The device for which kernels are planned and priced: a description, so that pages are reproducible."""
MAX_KERNELS = 1500


@dataclasses.dataclass(frozen=True)
class KernelNode:
    """A kernel, a loop or a conditional.

    Attributes:
        name: of the instruction that it computes.
        line: its kind and sizes, in short.
        limit: `compute` or `memory`: what most of its time is bound by.
        seconds: projected, of all runs in one call of the fragment.
        flops, nbytes: of these runs.
        reads, writes: the buffers, each with its bytes.
        sources: numbers of the kernels that wrote what it reads.
    """

    name: str
    line: str
    limit: str
    seconds: float
    flops: float
    nbytes: float
    reads: tuple[tuple[str, int], ...]
    writes: tuple[tuple[str, int], ...]
    sources: tuple[int, ...]


def kernels_of(fragments: Mapping[str, FragmentModule], axes: Mapping[str, Any]) -> dict[str, Any]:
    """The kernels of each fragment as JSON, by name; a text for one that native code does not have.

    Args:
        fragments: by name; equal ones are planned once.
        axes: by mesh, the axes and their sizes.
    """
    found: dict[Any, Any] = {}
    for fragment in fragments.values():
        key = fragment.fingerprint, tuple(axes[fragment.mesh].items())
        if key not in found:
            found[key] = _kernels(fragment, axes[fragment.mesh])
    return {name: found[f.fingerprint, tuple(axes[f.mesh].items())] for name, f in fragments.items()}


def _kernels(fragment: FragmentModule, axes: Mapping[str, int]) -> Any:
    try:
        prepared = prepare_fragment(fragment, DESCRIBED[DEVICE](), axes=axes)
    except (CompileError, HloError) as error:
        return f"XLA compiles this fragment: {str(error).splitlines()[0]}"
    nodes = kernel_graph(prepared)
    if len(nodes) > MAX_KERNELS:
        return f"{len(nodes):,} kernels are too many to draw"
    return [dataclasses.astuple(node) for node in nodes]


def kernel_graph(prepared: Prepared) -> list[KernelNode]:
    """The kernels of a fragment in the order in which they run; a loop is one node."""
    device, nodes = prepared.target.device, list[KernelNode]()
    names, writers = _BufferNames(prepared.assignment), list[tuple[Slice, int]]()
    for number, thunk in enumerate(prepared.thunks):
        priced = fragment_costs([thunk], prepared.module, device).kernels
        limits = {
            limit: sum(k.seconds for k in priced if k.limit == limit) for limit in ("compute", "memory")
        }
        reads = list(dict.fromkeys(s for s in thunk.reads if s.size))
        sources = {writer for place in reads for writer in _last_writers(place, writers)}
        nodes.append(
            KernelNode(
                thunk.name,
                _short(thunk),
                max(limits, key=lambda limit: limits[limit]),
                sum(limits.values()),
                sum(k.flops for k in priced),
                sum(k.bytes for k in priced),
                tuple((names.of(place, writers, nodes), place.size) for place in reads),
                tuple((names.of(place, (), nodes), place.size) for place in dict.fromkeys(thunk.writes)),
                tuple(sorted(sources)),
            )
        )
        writers += [(place, number) for place in thunk.writes if place.size]
    return nodes


def _short(thunk: Thunk) -> str:
    """The line of its listing without arrays: `kernel loop 64x64`."""
    words = thunk.line().partition(" (")[0].split()
    return " ".join(word for word in words if word != thunk.name)


def _last_writers(place: Slice, writers: list[tuple[Slice, int]]) -> set[int]:
    """The latest writer of each part of a slice, as far as whole earlier writes are hidden by later ones."""
    found: set[int] = set()
    for other, number in reversed(writers):
        if other.overlaps(place):
            found.add(number)
            if other.offset <= place.offset and place.offset + place.size <= other.offset + other.size:
                break
    return found


@dataclasses.dataclass(frozen=True)
class _BufferNames:
    """Names of slices: of arguments, results and constants, or where they are in the arena."""

    assignment: BufferAssignment

    def of(self, place: Slice, writers: Any, nodes: list[KernelNode]) -> str:
        allocation = self.assignment.allocations[place.allocation]
        if allocation.kind in ("parameter", "result"):
            name = f"{'argument' if allocation.kind == 'parameter' else 'result'} {allocation.index}"
        elif allocation.kind == "constant":
            name = "constant"
        else:
            name = f"arena at {place.offset:,}"
        written = sorted(_last_writers(place, list(writers)))
        return f"{name}, written by {', '.join(nodes[n].name for n in written)}" if written else name


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
