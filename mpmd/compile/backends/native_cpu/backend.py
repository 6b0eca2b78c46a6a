"""The native CPU backend: fragments through our own pipeline, each entering JAX as one custom call."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.compile.analysis.cost import CostModel
from mpmd.compile.backends.arrays import array_types, named_sharding
from mpmd.compile.backends.native_cpu.artefact import Artefact, KeptArtefacts, Texts
from mpmd.compile.backends.native_cpu.ffi import RegisteredProgram, compile_with_handler, register
from mpmd.compile.backends.native_cpu.instance import CompiledProgram
from mpmd.compile.backends.native_cpu.llvm.engine import assembly_of
from mpmd.compile.backends.native_cpu.steps import NativeProgram, native_program
from mpmd.compile.backends.native_cpu.target import CpuTarget, host_target
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.buffers.assignment import BufferAssignment, assign_buffers
from mpmd.compile.buffers.donation import pair_donations
from mpmd.compile.buffers.report import assignment_report
from mpmd.compile.dump import Dump
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.lowering import lower
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.compile.pipelines import cpu_pipeline
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.thunk import Thunk, kernels_text, listing
from mpmd.errors import CompileError
from mpmd.jax_compat import direct_call
from mpmd.support import diagnostics
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
        temporaries = self.native.arena_bytes - self.assignment.constant_bytes
        return MemoryStats(sizes["parameter"], sizes["result"], aliased, temporaries, len(self.code.code))

    def texts(self) -> dict[str, str]:
        """File name → text of everything that can be read, by the names of XLA's dumps."""
        return {
            "after_optimizations.txt": print_module(self.module),
            "buffer-assignment.txt": assignment_report(self.assignment),
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


_TEXTS = {
    "hlo": "after_optimizations.txt",
    "buffers": "buffer-assignment.txt",
    "thunks": "thunk_sequence.txt",
    "kernels": "kernels.txt",
}


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
    def asynchronous(self) -> bool:
        """False: XLA counts no work in a custom call and runs the fragment in the thread that calls it."""
        return False

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
            what: `"stablehlo"` as given, `"hlo"` optimised, `"buffers"`, `"thunks"`, `"kernels"`, `"llvm"`,
                or `"assembly"` of the CPU.

        Raises:
            CompileError: another word.
        """
        if what == "stablehlo":
            return self.fragment.text
        if what == "llvm":
            return self.made.code.llvm
        if what == "assembly":
            return assembly_of(self.made.code.llvm, self.target)
        if what not in _TEXTS:
            words = ["stablehlo", *_TEXTS, "llvm", "assembly"]
            raise CompileError(
                f"there is no text {what!r} of a native fragment\n  there are {', '.join(map(repr, words))}"
            )
        return self.made.texts[_TEXTS[what]]

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
        threads: how many threads run a fragment, at most: small ones run on one.
        target: the CPU; this one if None.
        options: what the user says about compiling.
    """

    threads: int = 1
    target: CpuTarget | None = None
    options: CompileOptions = DEFAULTS
    name: str = "native"

    def compile(self, fragment: FragmentModule, mesh: Mesh) -> NativeExecutable:
        """Compiles for the one device of `mesh`; see `Backend`.

        Raises:
            CompileError: it needs something that native code does not have.
        """
        _check(fragment, mesh)
        target = self.target or host_target()
        made, kept = compiled_or_kept(fragment, target, self.options)
        return self._load(made, target, fragment, mesh, kept)

    def relocate(
        self, executable: NativeExecutable, fragment: FragmentModule, mesh: Mesh
    ) -> NativeExecutable:
        """The same machine code with memory and threads of another mesh."""
        return self._load(executable.made, executable.target, fragment, mesh, executable.kept)

    def _load(
        self, made: Artefact, target: CpuTarget, fragment: FragmentModule, mesh: Mesh, kept: bool = False
    ) -> NativeExecutable:
        threads = self.threads if _is_large(made.costs) else 1
        registered = register(
            made.code,
            target,
            arena_bytes=made.arena_bytes,
            constants=made.constants,
            instance=fragment.mesh,
            pools=[_pool(fragment.mesh, threads)] if threads > 1 else [],
            cache=self.options.cache,
        )
        jitted = _jitted(fragment, mesh, registered, made.aliases)
        return NativeExecutable(fragment, made, target, jitted, kept)


def compiled_or_kept(
    fragment: FragmentModule, target: CpuTarget, options: CompileOptions = DEFAULTS
) -> tuple[Artefact, bool]:
    """What a fragment becomes: from the cache if it has it, and whether it is from there.

    A dump is of a compilation, so that where one is asked for the cache is not.

    Raises:
        CompileError: something in it has no native code.
    """
    if options.cache is None or options.dump is not None:
        return compile_fragment(fragment, target, options).artefact(), False
    kept = KeptArtefacts(options.cache, target, options.key)
    found = kept.of_fragment(fragment)
    if found is not None:
        return found, True
    module = lower(fragment.text)
    program = kept.program_key(fragment, module)
    found = kept.of_program(fragment, program)
    if found is not None:
        return found, True
    made = compile_fragment(fragment, target, options, module).artefact()
    kept.keep(fragment, program, made)
    return made, False


def compile_fragment(
    fragment: FragmentModule,
    target: CpuTarget,
    options: CompileOptions = DEFAULTS,
    module: HloModule | None = None,
) -> Compilation:
    """From StableHLO to machine code.

    Args:
        fragment: what to compile.
        target: for which CPU.
        options: what the user says about compiling.
        module: the fragment lowered, if that was done; the passes change it.

    Raises:
        CompileError: something in it has no native code.
    """
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    module = module or lower(fragment.text)
    clock("lowering")
    timing = Timing()
    with diagnostics.collecting() as found:
        passes = cpu_pipeline(options.attention_stitching)
        run_pipeline(module, passes, _watch(fragment, module, options.dump), timing)
    for name, spent in timing.seconds:
        seconds[name] = seconds.get(name, 0.0) + spent
    clock("passes")
    plans = KernelPlans()
    plans.plan_all(module.call_order())
    clock("kernels")
    module.input_output_alias = pair_donations(module, fragment.donated, plans.may_share)
    assignment = assign_buffers(module, plans.may_share)
    clock("buffers")
    thunks = Emitter(assignment, plans).program()
    clock("thunks")
    native = native_program(f"f{fragment.fingerprint[:16]}", thunks, assignment, target)
    code = compile_with_handler(
        native.program,
        target,
        arguments=len(fragment.arguments),
        results=len(fragment.results),
        arena=True,
    )
    clock("code")
    made = Compilation(module, assignment, thunks, native, code, seconds)
    if options.dump is not None:
        texts = {**made.texts(), "module.ll": code.llvm, "module.s": assembly_of(code.llvm, target)}
        texts["notices.txt"] = "".join(f"{d.message}\n" for d in found)
        options.dump.write_all(fragment, texts)
    return made


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


def _check(fragment: FragmentModule, mesh: Mesh) -> None:
    """Refuse what native code does not have.

    Raises:
        CompileError: it is that.
    """
    if mesh.devices.flat[0].platform != "cpu":
        raise CompileError("native code for CPUs does not run on other devices")
    if mesh.size != 1:
        raise CompileError("native fragments run on meshes of one device")
    if any(v.memory_kind for v in (*fragment.arguments, *fragment.results)):
        raise CompileError("native fragments do not name memories")
    if not fragment.results:
        raise CompileError("a fragment without results")


# Below about so many seconds of work on one thread, waking and meeting others costs more than they bring.
_WORTH_THREADS = 1e-3
_FLOPS, _BYTES = 1e11, 1e10  # per second and thread: no more than an order of magnitude is needed


def _is_large(costs: dict[str, float]) -> bool:
    """Whether a program has work for several threads."""
    return costs["flops"] / _FLOPS + costs["bytes accessed"] / _BYTES > _WORTH_THREADS


_POOLS: dict[tuple[str, int], WorkerPool] = {}
_LOCK = threading.Lock()


def _pool(mesh: str, threads: int) -> WorkerPool:
    """The threads of a mesh."""
    with _LOCK:
        if (mesh, threads) not in _POOLS:
            _POOLS[mesh, threads] = WorkerPool(threads)
        return _POOLS[mesh, threads]


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
    fragment: FragmentModule, mesh: Mesh, program: RegisteredProgram, aliases: dict[int, int]
) -> jax.stages.Compiled:
    """The custom call as a compiled function of JAX, arguments and results in the order that JAX wants."""
    results = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in array_types(mesh, fragment.results)]
    order = Order.of(aliases, fragment)
    given = [order.arguments.index(k) for k in range(len(order.arguments))]

    def run(*arrays: Any) -> Any:
        made = program(*(arrays[k] for k in given), results=results, aliases=aliases)
        token = [jax.numpy.int8(0)] if fragment.token else []
        return [*(made[k] for k in order.results), *token]

    run.__name__ = run.__qualname__ = fragment.name
    jitted = jax.jit(
        run,
        donate_argnums=tuple(range(len(aliases))),
        keep_unused=True,
        out_shardings=[
            *(named_sharding(mesh, fragment.results[k]) for k in order.results),
            *[NamedSharding(mesh, PartitionSpec())] * fragment.token,
        ],
    )
    types = array_types(mesh, fragment.arguments)
    with warnings.catch_warnings():
        # What cannot be donated is freed by the runtime; nothing is lost.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return jitted.lower(*(types[k] for k in order.arguments)).compile()
