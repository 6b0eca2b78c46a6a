"""Fragments with parts that XLA compiles, unsupported ones and collectives, in one function of JAX.

XLA runs the whole: native clusters are custom calls, its own clusters are inlined between them, and values
between clusters are in its memory.  On several devices this is the function of each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mpmd import jax_compat
from mpmd.brief import brief
from mpmd.compile.analysis.dataflow import Position
from mpmd.compile.artefact import Artefact
from mpmd.compile.backends.jax_function import (
    INLINE_BELOW_FLOPS,
    CompiledFragment,
    compiled_function,
    module_p,
    numpy_dtype,
    on_each_device,
    traced_call,
    value_spec,
)
from mpmd.compile.backends.mixed.clusters import Cluster, Clusters, divide
from mpmd.compile.backends.target_backend import LoadedProgram, OtherTargetError, TracedTargetBackend
from mpmd.compile.backends.xla import XlaBackend, XlaExecutable
from mpmd.compile.driver import compiled_or_kept, device_count, lowered
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.hlo import HloInstruction, HloModule, print_module
from mpmd.compile.kernels.planner.collectives import COLLECTIVES
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.compile.pipelines import configured, preparation
from mpmd.compile.target import Target
from mpmd.errors import CompileError
from mpmd.support.passes import Watch, run_pipeline


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledCluster:
    """A cluster, compiled as far as possible without a mesh.

    Attributes:
        native: its machine code; None if it is XLA's.
        stablehlo: its text if it is XLA's.
        results: its results.
        fragment: the cluster as a fragment.
        loop: condition and body if it is a loop.
    """

    native: Artefact | None
    stablehlo: str
    results: tuple[ValueSpec, ...]
    fragment: FragmentModule
    loop: tuple[MixedFragment, MixedFragment] | None = None


@dataclasses.dataclass(frozen=True)
class MixedFragment:
    """A fragment in clusters.

    Attributes:
        clusters: their order.
        parts: each cluster, compiled.
    """

    clusters: Clusters
    parts: tuple[CompiledCluster, ...]

    def every(self, path: str = "", times: int = 1) -> Iterator[tuple[str, Cluster, CompiledCluster, int]]:
        """All clusters, a loop's body after the loop: their numbers, and how often each runs."""
        for number, (cluster, part) in enumerate(zip(self.clusters.parts, self.parts, strict=True)):
            yield f"{path}{number}", cluster, part, times
            if cluster.loop is not None and part.loop is not None:
                yield from part.loop[1].every(f"{path}{number}.", times * cluster.loop.trips)

    @property
    def native_parts(self) -> list[Artefact]:
        return [part.native for _, _, part, _ in self.every() if part.native is not None]


@dataclasses.dataclass
class MixedExecutable(CompiledFragment):
    """A fragment as native code and XLA's.

    Attributes:
        mixed: its clusters.
        programs: the machine code of those that are native.
        target: its target.
    """

    mixed: MixedFragment
    programs: tuple[LoadedProgram, ...]
    target: Target
    backend: str = "native"

    __repr__ = brief

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why not all of it is native."""
        return tuple(self.mixed.clusters.reasons)

    @property
    def kept_memory(self) -> dict[int, int]:
        """Bytes that its machine code keeps."""
        return {program.key: program.kept_bytes for program in self.programs}

    @property
    def workspace_bytes(self) -> int:
        return super().memory_analysis().temporaries

    @functools.cached_property
    def asynchronous(self) -> bool:
        """Whether a call returns before the work is done; see `XlaExecutable.asynchronous`."""
        others = [cluster.module for _, cluster, _, _ in self.mixed.every() if not cluster.native]
        calls = any(i.opcode == "custom-call" for module in others for i in module.instructions())
        flops = float((self.compiled.cost_analysis() or {}).get("flops", 0.0))
        return not calls or flops >= INLINE_BELOW_FLOPS

    def as_text(self, what: str = "hlo") -> str:
        """`"stablehlo"` as given, `"clusters"`, or any text of native fragments, cluster by cluster.

        Raises:
            CompileError: another word.
        """
        if what == "stablehlo":
            return self.fragment.text
        if what == "clusters":
            return self.mixed.clusters.text()
        texts = []
        for number, cluster, part, _ in self.mixed.every():
            kind = "native" if part.native is not None else "XLA"
            if part.native is not None:
                text = part.native.text(what, self.target)
            elif what == "hlo":
                text = print_module(cluster.module)
            else:
                continue
            texts.append(f"// cluster {number}: {kind}\n{text}")
        return "\n".join(texts)

    def cost_analysis(self) -> dict[str, float]:
        """Our count of the native clusters, XLA's of the rest; fallbacks should be native."""
        total = {"flops": 0.0, "transcendentals": 0.0, "bytes accessed": 0.0}
        xla = self.compiled.cost_analysis() or {}
        native = [(part.native.costs, times) for _, _, part, times in self.mixed.every() if part.native]
        for costs, times in ((xla, 1), *native):
            for key in total:
                total[key] += times * float(costs.get(key, 0.0))
        return {**total, "fallbacks": float(self.mixed.clusters.refused)}

    def memory_analysis(self) -> MemoryStats:
        whole = super().memory_analysis()
        native = [part.memory for part in self.mixed.native_parts]
        return dataclasses.replace(
            whole,
            temporaries=whole.temporaries + sum(m.temporaries for m in native),
            code=whole.code + sum(m.code for m in native),
        )


@dataclasses.dataclass(frozen=True)
class MixedBackend:
    """Compiles supported clusters as native code, and the others by XLA.

    Attributes:
        native: how native clusters are compiled.
    """

    native: TracedTargetBackend
    name: str = "native"

    def compile(self, fragment: FragmentModule, mesh: Mesh) -> MixedExecutable | XlaExecutable:
        """Compiles for the devices of `mesh`; see `Backend`.

        Raises:
            CompileError: no part of it can be native code that is worth a call; lists all reasons.
        """
        module = prepared(fragment, self.native.options, axes=dict(mesh.shape))
        left = COLLECTIVES if mesh.size > 1 else frozenset[str]()
        clusters = divide(module, self.native.target.refuses, left)
        if not clusters.has_native:
            if left and not clusters.reasons:  # it communicates, and little else
                return XlaBackend().compile(fragment, mesh)
            raise CompileError("\n".join(clusters.reasons) or "nothing in it is worth a native program")
        if self.native.options.dump is not None:
            self.native.options.dump.write(fragment, "clusters.txt", clusters.text())
        try:
            return self._load(self._compiled(clusters, fragment), fragment, mesh)
        except OtherTargetError as error:
            native: Any = self.native
            return MixedBackend(dataclasses.replace(native, target=error.target)).compile(fragment, mesh)

    def relocate(
        self, executable: MixedExecutable, fragment: FragmentModule, mesh: Mesh
    ) -> MixedExecutable | XlaExecutable:
        """The same machine code with memory of another mesh of its target; XLA's part is compiled again."""
        if executable.target != self.native.target:
            return self.compile(fragment, mesh)
        return self._load(executable.mixed, fragment, mesh)

    def _compiled(self, clusters: Clusters, fragment: FragmentModule) -> MixedFragment:
        parts = (self._part(fragment, number, part) for number, part in enumerate(clusters.parts))
        return MixedFragment(clusters, tuple(parts))

    def _part(self, fragment: FragmentModule, number: int, cluster: Cluster) -> CompiledCluster:
        module = cluster.module
        alone = FragmentModule(
            name=f"{fragment.name}.cluster{number}",
            mesh=fragment.mesh,
            text=print_module(module),
            arguments=tuple(value_spec(p.shape) for p in module.entry.parameters),
            results=tuple(value_spec(shape) for _, shape in module.entry.root.shape.leaves()),
            donated=tuple(k for k in cluster.last_reads if _may_be_taken(fragment, cluster.inputs[k][0])),
        )
        if cluster.loop is not None:
            state = tuple(range(len(cluster.inputs)))  # XLA copies what a call must not take
            inside = dataclasses.replace(alone, donated=state)
            condition = self._compiled(cluster.loop.condition, inside)
            body = self._compiled(cluster.loop.body, inside)
            return CompiledCluster(None, "", alone.results, alone, (condition, body))
        if cluster.native:
            artefact, _ = compiled_or_kept(alone, self.native.target, self.native.options, module.clone())
            return CompiledCluster(artefact, "", alone.results, alone)
        return CompiledCluster(None, _stablehlo(alone.text), alone.results, alone)

    def _load(self, mixed: MixedFragment, fragment: FragmentModule, mesh: Mesh) -> MixedExecutable:
        programs = {
            part: self.native.register(part.native, fragment.mesh, mesh)
            for _, _, part, _ in mixed.every()
            if part.native is not None
        }
        large = any(self.native.is_large(part) for part in mixed.native_parts)
        function = _function(fragment, mesh, mixed, programs, large)
        return MixedExecutable(fragment, function, mixed, tuple(programs.values()), self.native.target)


def _may_be_taken(fragment: FragmentModule, producer: HloInstruction) -> bool:
    """Whether the memory of an array may hold others; an argument's only if it is donated."""
    return producer.opcode != "parameter" or producer.parameter_number in fragment.donated


def _stablehlo(text: str) -> str:
    """HLO text as StableHLO.

    Raises:
        CompileError: XLA does not accept it, or this jaxlib does not translate.
    """
    try:
        stablehlo = jax_compat.hlo_to_stablehlo(text)
    except (RuntimeError, ValueError) as error:
        raise CompileError(f"XLA does not take a part of it: {error}") from error
    if stablehlo is None:
        raise CompileError("this jaxlib does not translate parts of a fragment")
    return stablehlo


def _function(
    fragment: FragmentModule,
    mesh: Mesh,
    mixed: MixedFragment,
    programs: Mapping[CompiledCluster, LoadedProgram],
    large: bool,
) -> jax.stages.Compiled:
    """All clusters as a compiled function of JAX; a large one is dispatched asynchronously."""

    def run(*arrays: Any) -> list[Any]:
        return _results(mixed, arrays, programs, large)

    return compiled_function(on_each_device(run, fragment, mesh), fragment, mesh)


def _results(
    mixed: MixedFragment,
    arrays: Sequence[Any],
    programs: Mapping[CompiledCluster, LoadedProgram],
    large: bool,
) -> list[Any]:
    """The results of the clusters for arrays, in traced code.

    Each native cluster is called after the one before it: where XLA knows no order, it copies an argument
    that one cluster reads and whose memory takes a result of another.
    """
    arrays_at: dict[Position, Any] = dict(zip(mixed.clusters.arguments, arrays, strict=True))
    before: Any = None

    def at(position: Position) -> Any:
        producer, _ = position
        return jax.numpy.asarray(producer.literal) if producer.opcode == "constant" else arrays_at[position]

    for cluster, part in zip(mixed.clusters.parts, mixed.parts, strict=True):
        given = [at(position) for position in cluster.inputs]
        if part.loop is not None:
            outputs = _run_loop(part.loop, given, programs, large)
        elif part.native is None:
            outputs = module_p.bind(*given, text=part.stablehlo, results=part.results, callbacks=())
        else:
            types = [jax.ShapeDtypeStruct(r.shape, numpy_dtype(r.dtype)) for r in part.results]
            outputs = traced_call(programs[part], given, types, part.native.aliases, large, before)
            before = min(outputs, key=lambda array: array.size, default=before)
        arrays_at.update(zip(cluster.outputs, outputs, strict=True))
    return [at(position) for position in mixed.clusters.results]


def _run_loop(
    loop: tuple[MixedFragment, MixedFragment],
    state: Sequence[Any],
    programs: Mapping[CompiledCluster, LoadedProgram],
    large: bool,
) -> Sequence[Any]:
    """The state after a loop of XLA's, whose body's clusters are called in each iteration."""
    condition, body = loop

    def goes_on(state: tuple[Any, ...]) -> Any:
        (flag,) = _results(condition, state, programs, large)
        return flag

    def following(state: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_results(body, state, programs, large))

    last_state: tuple[Any, ...] = jax.lax.while_loop(goes_on, following, tuple(state))
    return last_state


def prepared(
    fragment: FragmentModule,
    options: CompileOptions = DEFAULTS,
    axes: Mapping[str, int] | None = None,
) -> HloModule:
    """The fragment as instructions that are native code, or not, each by itself.

    Collectives are of one array each: XLA combines them, and does not translate a collective of several.

    Args:
        fragment: the fragment.
        options: the compile options.
        axes: the axes of its mesh and their sizes; None for one device.
    """
    module = lowered(fragment, axes)
    passes = configured(preparation(device_count(axes), combined=False), options)
    run_pipeline(module, passes, Watch(verify=lambda _: None, text=print_module))
    return module
