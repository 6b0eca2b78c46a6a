"""The native CPU backend: fragments through our own pipeline, each entering JAX as one custom call."""

from __future__ import annotations

import dataclasses
import threading

from jax.sharding import Mesh

from mpmd.brief import brief
from mpmd.compile.artefact import Artefact
from mpmd.compile.backends.jax_function import ProgramFragment, jax_function
from mpmd.compile.backends.native_cpu.dispatch import is_dispatched, threads_for
from mpmd.compile.backends.native_cpu.ffi import RegisteredProgram, register
from mpmd.compile.backends.native_cpu.loading import CompiledProgram
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.backends.target_backend import unfit_for_targets
from mpmd.compile.driver import compiled_or_kept
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.errors import CompileError


@dataclasses.dataclass
class NativeExecutable(ProgramFragment[RegisteredProgram]):
    """A fragment as native code; `kept` says that it was taken from the cache."""

    kept: bool = False
    backend: str = "native"

    __repr__ = brief

    @property
    def workspace_bytes(self) -> int:
        """None but those that are kept."""
        return 0

    def as_text(self, what: str = "hlo") -> str:
        """One of its texts.

        Args:
            what: `"stablehlo"` as given, `"hlo"` optimised, `"buffers"`, `"memory"` (an SVG of the
                arena), `"thunks"`, `"kernels"`, `"costs"` of each kernel, `"bars"` (an SVG of these),
                `"llvm"`, `"assembly"` of the CPU, or `"clusters"`: what of it is native.

        Raises:
            CompileError: another word.
        """
        if what == "clusters":
            return "cluster 0: native, the whole fragment\n"
        return self.fragment.text if what == "stablehlo" else self.artefact.text(what, NativeCpu())

    def memory_analysis(self) -> MemoryStats:
        return self.artefact.memory


@dataclasses.dataclass(frozen=True)
class NativeCpuBackend:
    """Compiles fragments for the CPU of this process.

    Attributes:
        threads: how many threads run a fragment of a mesh whose cores are not known, at most: small ones run
            on one.
        options: what the user says about compiling.
        target: the CPU.
    """

    threads: int = 1
    options: CompileOptions = DEFAULTS
    target: NativeCpu = dataclasses.field(default_factory=NativeCpu)
    name: str = "native"

    def compile(self, fragment: FragmentModule, mesh: Mesh) -> NativeExecutable:
        """Compiles for the devices of `mesh`; see `Backend`.

        Raises:
            CompileError: it needs something that native code does not have.
        """
        unfit = self.unfit(fragment, mesh)
        if unfit:
            raise CompileError(unfit)
        artefact, kept = compiled_or_kept(fragment, self.target, self.options, axes=dict(mesh.shape))
        return self.load(artefact, fragment, mesh, kept)

    @staticmethod
    def unfit(fragment: FragmentModule, mesh: Mesh) -> str:
        """Why native code runs on none of a mesh's fragments, or not on this one in any case; or ""."""
        if mesh.devices.flat[0].platform != "cpu":
            return "native code for CPUs does not run on other devices"
        return unfit_for_targets("native", fragment, mesh)

    def relocate(
        self, executable: NativeExecutable, fragment: FragmentModule, mesh: Mesh
    ) -> NativeExecutable:
        """The same machine code with memory and threads of another mesh."""
        return self.load(executable.artefact, fragment, mesh, executable.kept)

    def load(
        self, artefact: Artefact, fragment: FragmentModule, mesh: Mesh, kept: bool = False
    ) -> NativeExecutable:
        """Machine code as an executable of a mesh; `kept` says that it is from the cache."""
        program = self.register(artefact, fragment.mesh, mesh)
        # XLA gives each device of several a thread in any case
        large = mesh.size == 1 and self.is_large(artefact)
        function = jax_function(fragment, mesh, program, artefact.aliases, large)
        return NativeExecutable(fragment, function, artefact, program, kept)

    def may_split(self, mesh: Mesh) -> bool:
        """On one device alone: programs of several wait for each other."""
        return mesh.size == 1

    def is_large(self, artefact: Artefact) -> bool:
        """Whether a program on one device is dispatched asynchronously."""
        return is_dispatched(artefact.costs, len(self.options.cores))

    def register(self, artefact: Artefact, name: str, mesh: Mesh) -> RegisteredProgram:
        """Machine code with the memory and threads of the mesh of that name, as JAX calls it.

        Raises:
            CompileError: the code does not load.
        """
        assert isinstance(artefact.code, CompiledProgram)
        devices = [device.id for device in mesh.devices.flat]
        cores = self.options.cores.get(name, ())
        threads = threads_for(artefact.costs, (len(cores) or self.threads) // len(devices))
        return register(
            artefact.code,
            self.target.cpu,
            arena_bytes=artefact.arena_bytes,
            constants=artefact.constants,
            instance="-".join([name, str(threads), *map(str, cores)]),
            pools=_pools(name, threads, cores, len(devices)) if threads > 1 else [],
            cache=self.options.cache,
            devices=devices if len(devices) > 1 else (0,),
        )


_POOLS: dict[tuple[str, int, tuple[int, ...], int], WorkerPool] = {}
_LOCK = threading.Lock()


def _pools(mesh: str, threads: int, cores: tuple[int, ...], devices: int) -> list[WorkerPool]:
    """The threads of each device of a mesh; each has its share of the cores."""
    pools = []
    with _LOCK:
        for device in range(devices):
            own = cores[device * threads : (device + 1) * threads]
            key = mesh, threads, own, device
            if key not in _POOLS:
                _POOLS[key] = WorkerPool(threads, own)
            pools.append(_POOLS[key])
    return pools
