"""The native CPU backend: fragments through our own pipeline, each entering JAX as one custom call."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.analysis.cost import CostModel
from mpmd.compile.backends.arrays import array_types, named_sharding
from mpmd.compile.backends.native_cpu.artefact import Artefact, KeptArtefacts, Texts
from mpmd.compile.backends.native_cpu.ffi import RegisteredProgram, compile_with_handler, register
from mpmd.compile.backends.native_cpu.fitting import fit
from mpmd.compile.backends.native_cpu.instance import CompiledProgram
from mpmd.compile.backends.native_cpu.llvm.engine import assembly_of
from mpmd.compile.backends.native_cpu.steps import NativeProgram, PlanCode, native_program
from mpmd.compile.backends.native_cpu.target import CpuTarget, host_target
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.buffers.assignment import BufferAssignment, assign_buffers
from mpmd.compile.buffers.donation import pair_donations
from mpmd.compile.buffers.plot import memory_plot
from mpmd.compile.buffers.report import assignment_report
from mpmd.compile.dump import Dump
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.kernels.planning.memory import remembering
from mpmd.compile.lowering import lower, lower_for_mesh
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.compile.pipelines import configured, cpu_pipeline, scheduling_pipeline, watched
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.thunk import Thunk, kernels_text, listing
from mpmd.errors import CompileError
from mpmd.jax_compat import direct_call
from mpmd.support import diagnostics
from mpmd.support.garbage import garbage_kept
from mpmd.support.passes import Pass
from mpmd.support.pipeline import Timing, Watch, run_pipeline


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Everything that compiling a fragment made, before it is loaded.

    Attributes:
        module: the optimised, scheduled HLO.
        assignment: its memory.
        thunks: its work.
        native: its steps.
        code: its machine code.
        seconds: per phase.
    """

    module: HloModule
    assignment: BufferAssignment
    thunks: tuple[Thunk, ...]
    native: NativeProgram
    code: CompiledProgram
    seconds: dict[str, float]

    @property
    def aliases(self) -> dict[int, int]:
        """Argument → the result that takes its memory."""
        found = self.module.input_output_alias
        return {a.parameter: a.output_index[0] if a.output_index else 0 for a in found}

    @functools.cached_property
    def costs(self) -> dict[str, float]:
        """Our own count of the work."""
        cost = CostModel().module(self.module)
        return {
            "flops": float(cost.flops),
            "transcendentals": float(cost.transcendentals),
            "bytes accessed": float(cost.bytes_read + cost.bytes_written),
        }

    @property
    def memory(self) -> MemoryStats:
        """From the assignment of memory."""
        allocations = self.assignment.allocations
        sizes = {kind: sum(a.size for a in allocations if a.kind == kind) for kind in ("parameter", "result")}
        aliased = sum(allocations[d].size for d in self.aliases)
        temporaries = self.assignment.arena_bytes
        return MemoryStats(sizes["parameter"], sizes["result"], aliased, temporaries, len(self.code.code))

    def texts(self) -> dict[str, str]:
        """File name → text of everything that can be read, by the names of XLA's dumps."""
        return {
            "after_optimizations.txt": print_module(self.module),
            "buffer-assignment.txt": assignment_report(self.assignment),
            "memory.svg": memory_plot(self.assignment),
            "thunk_sequence.txt": listing(self.thunks) + "\n",
            "kernels.txt": kernels_text(self.thunks),
        }

    def artefact(self) -> Artefact:
        """What outlives this process."""
        return Artefact(
            self.code,
            self.native.arena_bytes,
            self.native.constants,
            self.aliases,
            self.costs,
            self.memory,
            Texts(self.texts),
        )


@dataclasses.dataclass
class NativeExecutable:
    """A fragment as native code.

    Attributes:
        fragment: what was compiled.
        made: what was made of it.
        target: for which CPU.
        compiled: the function of JAX that holds it.
        kept: whether it was taken from the cache.
    """

    fragment: FragmentModule
    made: Artefact
    target: CpuTarget
    compiled: jax.stages.Compiled
    kept: bool = False
    backend: str = "native"

    def __post_init__(self) -> None:
        self._call = direct_call(self.compiled)
        order = Order.of(self.made.aliases, self.fragment)
        self._order = None if order.is_plain else order

    @property
    def has_token(self) -> bool:
        """Whether a token stands behind the results."""
        return self.fragment.token

    @property
    def name(self) -> str:
        """The fragment's name."""
        return self.fragment.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        """Starts it; see `Executable`."""
        if self._order is None:
            return self._call(*arrays)
        made = self._call(*(arrays[k] for k in self._order.arguments))
        return [made[k] for k in self._order.places]

    def as_text(self, what: str = "hlo") -> str:
        """One of its texts.

        Args:
            what: `"stablehlo"` as given, `"hlo"` optimised, `"buffers"`, `"memory"` (an SVG of the
                arena), `"thunks"`, `"kernels"`, `"llvm"`, `"assembly"` of the CPU, or `"clusters"`: what of
                it is native.

        Raises:
            CompileError: another word.
        """
        if what == "clusters":
            return "cluster 0: native, the whole fragment\n"
        return self.fragment.text if what == "stablehlo" else self.made.text(what, self.target)

    def cost_analysis(self) -> dict[str, float]:
        """Our own count."""
        return {**self.made.costs, "fallbacks": 0.0}

    def memory_analysis(self) -> MemoryStats:
        """From the assignment of memory."""
        return self.made.memory


@dataclasses.dataclass(frozen=True)
class NativeCpuBackend:
    """Compiles fragments for the CPU of this process.

    Attributes:
        threads: how many threads run a fragment of a mesh whose cores are not known, at most: small ones run
            on one.
        target: the CPU; this one if None.
        options: what the user says about compiling.
    """

    threads: int = 1
    target: CpuTarget | None = None
    options: CompileOptions = DEFAULTS
    name: str = "native"

    def compile(self, fragment: FragmentModule, mesh: Mesh) -> NativeExecutable:
        """Compiles for the devices of `mesh`; see `Backend`.

        Raises:
            CompileError: it needs something that native code does not have.
        """
        unfit = self.unfit(fragment, mesh)
        if unfit:
            raise CompileError(unfit)
        target = self.target or host_target()
        made, kept = compiled_or_kept(fragment, target, self.options, axes=dict(mesh.shape))
        return self._load(made, target, fragment, mesh, kept)

    def unfit(self, fragment: FragmentModule, mesh: Mesh) -> str:
        """Why native code does not do for a mesh or a border of values; "" if it does."""
        return _unfit(fragment, mesh)

    def relocate(
        self, executable: NativeExecutable, fragment: FragmentModule, mesh: Mesh
    ) -> NativeExecutable:
        """The same machine code with memory and threads of another mesh."""
        return self._load(executable.made, executable.target, fragment, mesh, executable.kept)

    def _load(
        self, made: Artefact, target: CpuTarget, fragment: FragmentModule, mesh: Mesh, kept: bool = False
    ) -> NativeExecutable:
        program = self.register(made, fragment.mesh, mesh)
        # XLA gives each device of several a thread anyhow
        large = mesh.size == 1 and is_work(made.costs)
        jitted = _jitted(fragment, mesh, program, made.aliases, large)
        return NativeExecutable(fragment, made, target, jitted, kept)

    def register(self, made: Artefact, name: str, mesh: Mesh) -> RegisteredProgram:
        """Machine code with the memory and threads of the mesh of that name, as JAX calls it.

        Raises:
            CompileError: the code does not load.
        """
        devices = [device.local_hardware_id for device in mesh.devices.flat]
        cores = self.options.cores.get(name, ())
        threads = max(1, (len(cores) or self.threads) // len(devices)) if _is_large(made.costs) else 1
        return register(
            made.code,
            self.target or host_target(),
            arena_bytes=made.arena_bytes,
            constants=made.constants,
            instance="-".join([name, str(threads), *map(str, cores)]),
            pools=_pools(name, threads, cores, len(devices)) if threads > 1 else [],
            cache=self.options.cache,
            devices=devices if len(devices) > 1 else (0,),
        )


def compiled_or_kept(
    fragment: FragmentModule,
    target: CpuTarget,
    options: CompileOptions = DEFAULTS,
    module: HloModule | None = None,
    axes: Mapping[str, int] | None = None,
) -> tuple[Artefact, bool]:
    """What a fragment becomes: from the cache if it has it, and whether it is from there.

    A dump is of a compilation, so that where one is asked for the cache is not.

    Args:
        fragment: what to compile.
        target: for which CPU.
        options: what the user says about compiling.
        module: the fragment as HLO, if its text is no StableHLO; the passes change it.
        axes: the axes of its mesh and their sizes; None for one device.

    Raises:
        CompileError: something in it has no native code.
    """
    if options.cache is None or options.dump is not None:
        return compile_fragment(fragment, target, options, module, axes=axes).artefact(), False
    reserved = f" {fragment.reserved_bytes}" if options.memory_bytes else ""
    devices = f" {tuple(axes.items())}" if axes is not None and _count(axes) > 1 else ""
    kept = KeptArtefacts(options.cache, target, options.key + reserved + devices)
    found = kept.of_fragment(fragment)
    if found is not None:
        return found, True
    module = module or lowered(fragment, axes)
    program = kept.program_key(fragment, module)
    found = kept.of_program(fragment, program)
    if found is not None:
        return found, True
    made = compile_fragment(fragment, target, options, module, axes=axes).artefact()
    kept.keep(fragment, program, made)
    return made, False


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A fragment in order and with memory, before there is machine code.

    Attributes:
        module: the optimised, scheduled HLO.
        assignment: its memory.
        thunks: its work.
        native: its steps.
        seconds: per phase.
        notices: what the passes had to say.
    """

    module: HloModule
    assignment: BufferAssignment
    thunks: tuple[Thunk, ...]
    native: NativeProgram
    seconds: dict[str, float]
    notices: tuple[str, ...]


@garbage_kept()
@remembering()
def prepare_fragment(
    fragment: FragmentModule,
    target: CpuTarget,
    options: CompileOptions = DEFAULTS,
    module: HloModule | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    poison: bool = False,
) -> Prepared:
    """From StableHLO to steps with addresses: everything but machine code.

    Args:
        fragment: what to compile.
        target: for which CPU.
        options: what the user says about compiling.
        module: the fragment lowered, if that was done; the passes change it.
        axes: the axes of its mesh and their sizes; None for one device.
        poison: overwrite memory as soon as it is free, so that wrong reads show.

    Raises:
        CompileError: something in it has no native code.
    """
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    module = module or lowered(fragment, axes)
    clock("lowering")
    timing = Timing()
    passes = configured(cpu_pipeline(_count(axes), options.attention_stitching), options)
    if options.dump is not None:
        passes = watched(passes, _inner_dump(fragment, options.dump))
    watch = _watch(fragment, module, options.dump)
    with diagnostics.collecting() as found:
        run_pipeline(module, passes, watch, timing)
    clock("passes")
    plans = KernelPlans()
    plans.plan_all(CallGraph(module).sequential())
    clock("kernels")
    module.input_output_alias = pair_donations(module, fragment.donated, plans.may_share)
    run_pipeline(module, configured(scheduling_pipeline(), options), watch, timing, first=len(passes))
    for name, spent in timing.seconds:
        seconds[name] = seconds.get(name, 0.0) + spent
    clock("schedule")
    code = PlanCode(target)

    def assign() -> BufferAssignment:
        plans.plan_all(CallGraph(module).sequential())
        return assign_buffers(module, plans.may_share, lambda i: code.scratch_bytes(plans.plan_of(i)))

    memory = options.memory_bytes
    assignment = fit(module, fragment, memory, assign) if memory else assign()
    clock("buffers")
    thunks = Emitter(assignment, plans, poison=poison).program()
    clock("thunks")
    native = native_program(f"f{fragment.fingerprint[:16]}", thunks, assignment, code)
    clock("steps")
    return Prepared(module, assignment, thunks, native, seconds, tuple(d.message for d in found))


def compile_fragment(
    fragment: FragmentModule,
    target: CpuTarget,
    options: CompileOptions = DEFAULTS,
    module: HloModule | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    poison: bool = False,
) -> Compilation:
    """From StableHLO to machine code; see `prepare_fragment`."""
    made = prepare_fragment(fragment, target, options, module, axes=axes, poison=poison)
    clock = _Clock(made.seconds)
    code = compile_with_handler(
        made.native.program,
        target,
        arguments=len(fragment.arguments),
        results=len(fragment.results),
        arena=True,
    )
    clock("code")
    compilation = Compilation(made.module, made.assignment, made.thunks, made.native, code, made.seconds)
    if options.dump is not None:
        texts = {**compilation.texts(), "module.ll": code.llvm, "module.s": assembly_of(code.llvm, target)}
        texts["notices.txt"] = "".join(f"{notice}\n" for notice in made.notices)
        options.dump.write_all(fragment, texts)
    return compilation


def lowered(fragment: FragmentModule, axes: Mapping[str, int] | None = None) -> HloModule:
    """The fragment as HLO: that of each device, if its mesh has several.

    Raises:
        CompileError: something in it has no HLO, or cannot be partitioned.
    """
    if axes is None or _count(axes) == 1:
        return lower(fragment.text)
    arguments, results = ([v.spec for v in values] for values in (fragment.arguments, fragment.results))
    return lower_for_mesh(fragment.text, axes, arguments, results)


def _count(axes: Mapping[str, int] | None) -> int:
    """How many devices a mesh of such axes has."""
    return math.prod((axes or {}).values())


def _watch(fragment: FragmentModule, module: HloModule, dump: Dump | None) -> Watch:
    """What is done around each pass: with a dump, files and checks."""
    if dump is None:
        return Watch(verify=_unchecked, text=print_module)
    dump.write(fragment, "before_optimizations.txt", print_module(module))
    return Watch(
        verify=verify,
        text=print_module,
        dump_to=dump.folder_of(fragment),
        dump_passes=dump.passes,
        suffix=".txt",
    )


def _inner_dump(fragment: FragmentModule, dump: Dump) -> Callable[[str, Pass, HloModule], None]:
    """Writes the module after each pass of a group that changed it: `027.simplification.003.hlo-cse`."""
    turns: dict[str, int] = {}

    def after(group: str, pass_: Pass, module: HloModule) -> None:
        turns[group] = turns.get(group, -1) + 1
        if re.search(dump.passes, pass_.name):
            dump.write(fragment, f"{group}.{turns[group]:03d}.{pass_.name}.txt", print_module(module))

    return after


def _unchecked(module: HloModule) -> None:
    """Passes are verified in tests and where a dump is asked for, not in every compilation."""


class _Clock:
    """Notes the seconds since it was last asked."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def _unfit(fragment: FragmentModule, mesh: Mesh) -> str:
    """Why native code runs on none of a mesh's fragments, or not on this one whatever it computes; or ""."""
    if mesh.devices.flat[0].platform != "cpu":
        return "native code for CPUs does not run on other devices"
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        return "native fragments run on the devices of one process"
    if any(v.memory_kind for v in (*fragment.arguments, *fragment.results)):
        return "native fragments do not name memories"
    if fragment.callbacks:
        return "native fragments do not call back to Python"
    return "" if fragment.results else "a fragment without results"


# Below about so many seconds of work on one thread, waking and meeting others costs more than they bring.
_WORTH_THREADS = 3e-4
_WORTH_HANDING_OVER = 2e-5
_FLOPS, _BYTES = 1e11, 1e10  # per second and thread: no more than an order of magnitude is needed


def _is_large(costs: dict[str, float]) -> bool:
    """Whether a program has work for several threads."""
    return costs["flops"] / _FLOPS + costs["bytes accessed"] / _BYTES > _WORTH_THREADS


def is_work(costs: dict[str, float]) -> bool:
    """Whether a program takes longer than it takes to hand it to another thread."""
    return costs["flops"] / _FLOPS + costs["bytes accessed"] / _BYTES > _WORTH_HANDING_OVER


_POOLS: dict[tuple[str, int, tuple[int, ...], int], WorkerPool] = {}
_LOCK = threading.Lock()


def _pools(mesh: str, threads: int, cores: tuple[int, ...], devices: int) -> list[WorkerPool]:
    """The threads of each device of a mesh; each has its share of the cores."""
    found = []
    with _LOCK:
        for device in range(devices):
            own = cores[device * threads : (device + 1) * threads]
            key = mesh, threads, own, device
            if key not in _POOLS:
                _POOLS[key] = WorkerPool(threads, own)
            found.append(_POOLS[key])
    return found


@dataclasses.dataclass(frozen=True)
class Order:
    """In which order JAX is given the arguments, and gives the results.

    JAX pairs donated arguments with results of their type in the order of both.  So that its pairs are ours,
    paired arguments and paired results come first, in the same order.

    Attributes:
        arguments: numbers of the arguments as JAX gets them.
        results: numbers of the results as JAX gives them.
        places: where each result, and the token after them if there is one, stands among these.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    places: tuple[int, ...]

    @staticmethod
    def of(aliases: dict[int, int], fragment: FragmentModule) -> Order:
        """The order for pairs of arguments and results."""
        arguments, results = list(aliases), list(aliases.values())
        arguments += [k for k in range(len(fragment.arguments)) if k not in aliases]
        paired = set(results)
        results += [k for k in range(len(fragment.results)) if k not in paired]
        places = [results.index(k) for k in range(len(results))]
        if fragment.token:
            places.append(len(results))
        return Order(tuple(arguments), tuple(results), tuple(places))

    @property
    def is_plain(self) -> bool:
        """Whether nothing changes its place."""
        return list(self.arguments) == sorted(self.arguments) and list(self.results) == sorted(self.results)


def _jitted(
    fragment: FragmentModule, mesh: Mesh, program: RegisteredProgram, aliases: dict[int, int], large: bool
) -> jax.stages.Compiled:
    """The custom call as a compiled function of JAX, arguments and results in the order that JAX wants."""
    results = [_local(t) for t in array_types(mesh, fragment.results)]
    order = Order.of(aliases, fragment)
    given = [order.arguments.index(k) for k in range(len(order.arguments))]

    def run(*arrays: Any) -> Any:
        made = program(*(arrays[k] for k in given), results=results, aliases=aliases, large=large)
        token = [jax.numpy.int8(0)] if fragment.token else []
        return [*(made[k] for k in order.results), *token]

    run.__name__ = run.__qualname__ = fragment.name
    outcome = [
        *(named_sharding(mesh, fragment.results[k]) for k in order.results),
        *[NamedSharding(mesh, PartitionSpec())] * fragment.token,
    ]
    if mesh.size > 1:
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=tuple(named_sharding(mesh, fragment.arguments[k]).spec for k in order.arguments),
            out_specs=[sharding.spec for sharding in outcome],
            check_vma=False,
        )
    jitted = jax.jit(
        run,
        donate_argnums=tuple(range(len(aliases))),
        keep_unused=True,
        out_shardings=outcome,
    )
    types = array_types(mesh, fragment.arguments)
    with warnings.catch_warnings():
        # What cannot be donated is freed by the runtime; nothing is lost.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return jitted.lower(*(types[k] for k in order.arguments)).compile()


def _local(whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What each device has of an array."""
    return jax.ShapeDtypeStruct(whole.sharding.shard_shape(whole.shape), whole.dtype)
