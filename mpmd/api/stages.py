"""The stages of a function: Traced -> Lowered -> Compiled, as in JAX, each of which prints."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax

from mpmd import ir
from mpmd.api.config import Config
from mpmd.api.lowering import Partitioned, partition
from mpmd.api.signature import Arguments, describe
from mpmd.api.timeline import measured_timeline, predicted_timeline
from mpmd.compile.compiler import compile_fragments
from mpmd.compile.executable import Executable, MemoryStats
from mpmd.compile.fragment import fragment_modules
from mpmd.errors import ConfigError, SignatureError
from mpmd.runtime.channels.placement import Placement
from mpmd.runtime.executor import Executor, RuntimeOptions
from mpmd.runtime.instructions import Run
from mpmd.runtime.memory import MeshMemory, predict_memory
from mpmd.runtime.program import Program
from mpmd.scheduling.render import render_text

DIALECTS = ("stablehlo", "mpmd", "program", "schedule")


@dataclasses.dataclass
class Traced:
    """A function traced for one signature; `names` are those that it was seen to call."""

    jax_traced: Any
    config: Config
    arguments: Arguments
    argument_paths: list[str]
    names: frozenset[str] = frozenset()

    @property
    def jaxpr(self) -> Any:
        """The function as JAX traced it."""
        return self.jax_traced.jaxpr

    @property
    def out_tree(self) -> Any:
        """The pytree of the results."""
        return jax.tree.structure(self.jax_traced.out_info)

    def lower(self) -> Lowered:
        """Partitions, schedules and linearizes.

        Raises:
            ConfigError: names do not fit the assignment, or a sharding cannot be used.
            PassError: a pass found the program wrong; holds everything that was found.
        """
        platform = next(iter(self.config.topology.values())).devices.flat[0].platform
        lowered = self.jax_traced.lower(lowering_platforms=(platform,))
        partitioned = partition(
            lowered, self.config, self.arguments, self.argument_paths, self.out_tree, self.names
        )
        return Lowered(self, lowered, partitioned)


@dataclasses.dataclass
class Lowered:
    """A function partitioned over its meshes, before its fragments are compiled."""

    traced: Traced
    jax_lowered: Any
    partitioned: Partitioned

    @property
    def config(self) -> Config:
        """What it was configured with."""
        return self.traced.config

    @property
    def program(self) -> Program:
        """The instruction streams, verified."""
        return self.partitioned.program

    @property
    def warnings(self) -> list[str]:
        """What the passes warn about."""
        return self.partitioned.warnings

    @property
    def notices(self) -> list[str]:
        """What the passes noted beside that."""
        return self.partitioned.notices

    def as_text(self, dialect: str = "mpmd") -> str:
        """The program as text.

        Args:
            dialect: `"stablehlo"` as JAX lowers it, `"mpmd"` after all passes, `"program"` for the
                instruction streams, `"schedule"` for the order of tasks on each mesh.

        Raises:
            ConfigError: another word.
        """
        if dialect == "stablehlo":
            return str(self.jax_lowered.as_text())
        if dialect == "mpmd":
            return ir.to_text(self.partitioned.module)
        if dialect == "program":
            return self.program.as_text()
        if dialect == "schedule":
            return render_text(self.schedule())
        raise ConfigError(f"there is no dialect {dialect!r}\n  there are {', '.join(map(repr, DIALECTS))}")

    @functools.cached_property
    def fragments(self) -> dict[str, Any]:
        """The distinct fragments by name, as they will be compiled."""
        return fragment_modules(self.partitioned.module)

    def schedule(self, costs: dict[str, float] | None = None) -> Any:
        """The predicted timeline; `costs` gives seconds per fragment by name, 1 for each if absent."""
        return predicted_timeline(self.program, costs or {}, list(self.config.topology))

    def compile(self, *, runtime: RuntimeOptions | None = None) -> Compiled:
        """Compiles the fragments and makes the program ready to run.

        Raises:
            CompileError: a fragment cannot be compiled; names it.
        """
        executables = compile_fragments(
            self.fragments,
            dict(self.config.topology),
            self.config.backend or self.partitioned.backend,
            self.partitioned.dump,
        )
        return Compiled(self, executables, runtime or RuntimeOptions())


class Compiled:
    """A function ready to run on its meshes."""

    def __init__(self, lowered: Lowered, executables: dict[str, Executable], runtime: RuntimeOptions) -> None:
        self.lowered, self.executables = lowered, executables
        program = lowered.program
        self._placement = Placement(dict(lowered.config.topology))
        table = {(e.fragment.mesh, name): e for name, e in executables.items()}
        self._executor = Executor(program, table, self._placement, runtime)
        self._out_tree = lowered.traced.out_tree

    @property
    def program(self) -> Program:
        """The instruction streams that it runs."""
        return self.lowered.program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step on arguments of the signature it was compiled for (without static arguments).

        Raises:
            SignatureError: they are of another one; names every leaf that differs.
        """
        expected = self.lowered.traced.arguments
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != expected.tree:
            raise SignatureError(
                f"the arguments have another structure than those compiled for\n  got      {tree}\n"
                f"  expected {expected.tree}"
            )
        problems = [
            f"{path}: got {_text(leaf)}, compiled for {_text(wanted)}"
            for path, leaf, wanted in zip(self.lowered.partitioned.argument_paths, leaves, expected.leaves)
            if describe(leaf)[:2] != describe(wanted)[:2]
        ]
        if problems:
            raise SignatureError(
                "the arguments do not fit what this was compiled for:\n  "
                + "\n  ".join(problems)
                + "\n  call the jitted function instead: it compiles for every signature"
            )
        return self.run_flat(leaves)

    def run_flat(self, leaves: list[Any]) -> Any:
        """Runs one step on flat arguments."""
        return jax.tree.unflatten(self._out_tree, self._executor.run(leaves))

    def as_text(self, what: str = "hlo") -> str:
        """Every distinct fragment after compilation; words of `Lowered.as_text` work too."""
        if what in DIALECTS:
            return self.lowered.as_text(what)
        return "\n\n".join(f"// {name}\n{e.as_text(what)}" for name, e in self.executables.items())

    def cost_analysis(self) -> dict[str, Any]:
        """`flops` and `bytes accessed` of one step over all meshes, and the same for each fragment.

        `fallbacks` is the number of distinct fragments that the backend asked for could not compile.
        """
        fragments = {name: e.cost_analysis() for name, e in self.executables.items()}
        runs = (op for stream in self.program.streams for op in stream.instructions if isinstance(op, Run))
        calls = dict(collections.Counter(op.executable for op in runs))
        total = {
            key: sum(fragments[name].get(key, 0.0) * n for name, n in calls.items())
            for key in ("flops", "bytes accessed")
        }
        total["fallbacks"] = sum(costs.get("fallbacks", 0.0) for costs in fragments.values())
        return {**total, "fragments": fragments, "calls": calls}

    def memory_analysis(self) -> dict[str, MeshMemory]:
        """For each mesh the predicted peak in bytes over its devices, and what holds it."""
        meshes = self._placement.meshes
        workspace = {
            (e.fragment.mesh, name): e.memory_analysis().temporaries * meshes[e.fragment.mesh].size
            for name, e in self.executables.items()
        }
        return {m.mesh: m for m in predict_memory(self.program, workspace)}

    def fragment_memory(self) -> dict[str, MemoryStats]:
        """What each fragment takes, by the backend's own count."""
        return {name: e.memory_analysis() for name, e in self.executables.items()}

    def timeline(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Runs one step with every fragment timed; returns its results and the measured timeline.

        The step waits more often than others do, so it takes longer than they.
        """
        leaves = jax.tree.leaves((args, kwargs))
        meshes = list(self.lowered.config.topology)
        results, timeline = measured_timeline(self._executor, self._placement, leaves, meshes)
        return jax.tree.unflatten(self._out_tree, results), timeline

    def close(self) -> None:
        """Ends the threads that run it."""
        self._executor.close()


def _text(leaf: Any) -> str:
    shape, dtype, _ = describe(leaf)
    return f"{dtype}[{','.join(map(str, shape))}]"
