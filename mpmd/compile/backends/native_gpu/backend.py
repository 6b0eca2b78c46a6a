"""The backend for GPUs: fragments through our own pipeline, each entering JAX as one custom call.

The arena is a result of the call, which XLA allocates: memory of a GPU costs nothing to take anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd.brief import brief
from mpmd.compile.artefact import Artefact
from mpmd.compile.backends.ffi.custom_call import (
    ATTRIBUTE,
    TARGET_NAME,
    DeviceHandlers,
    LoadedPrograms,
    ProgramLoad,
)
from mpmd.compile.backends.ffi.frame import check_version
from mpmd.compile.backends.jax_function import ProgramFragment, jax_function
from mpmd.compile.backends.native_gpu.cublaslt import NoAlgorithm
from mpmd.compile.backends.native_gpu.gpu import GpuLibraries, gpu_at
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.compile.backends.native_gpu.loading import LoadedGpuProgram
from mpmd.compile.backends.native_gpu.target import GpuCode, GpuTarget
from mpmd.compile.backends.native_gpu.triton.choices import MeasuredTiles, known_table, table_file
from mpmd.compile.backends.target_backend import OtherTargetError, unfit_for_targets
from mpmd.compile.driver import compiled_or_kept
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.errors import CompileError
from mpmd.support.execution_log import TimeLog
from mpmd.support.resources import garbage_kept, once


@dataclasses.dataclass(frozen=True)
class RegisteredGpuProgram:
    """A program that XLA can call; see `LoadedProgram`.

    Attributes:
        index: which of the loaded programs it is.
        arena_bytes: of the arena that each call takes on a device, workspace included.
        kept_bytes: that it keeps on its GPUs from call to call.
        loaded: it, on each of its GPUs.
    """

    index: int
    arena_bytes: int
    kept_bytes: int
    loaded: Sequence[LoadedGpuProgram] = dataclasses.field(repr=False, compare=False)

    @property
    def key(self) -> int:
        return self.loaded[0].address

    def write_to(self, log: TimeLog | None) -> None:
        """Writes to a log, from the next call on, when it runs; to none if it is None."""
        for on_gpu in self.loaded:
            on_gpu.write_to(log, self.key)

    def __call__(
        self,
        *arguments: Any,
        results: Sequence[jax.ShapeDtypeStruct],
        aliases: Mapping[int, int] | None = None,
        large: bool = False,
        after: Any = None,
    ) -> Any:
        """The custom call, inside of traced code; on GPUs it is asynchronous, and follows its operands."""
        arena = jax.ShapeDtypeStruct((self.arena_bytes,), np.uint8)
        call = jax.ffi.ffi_call(
            TARGET_NAME, [*results, arena], input_output_aliases=dict(aliases or {}), has_side_effect=False
        )
        *arrays, _ = call(*arguments, **{ATTRIBUTE: np.int64(self.index)})
        return arrays


@dataclasses.dataclass
class GpuExecutable(ProgramFragment[RegisteredGpuProgram]):
    """A fragment as launches on GPUs of a kind; `kept` says that it was taken from the cache."""

    target: GpuTarget
    kept: bool = False
    backend: str = "native"
    asynchronous: bool = True

    __repr__ = brief

    @property
    def workspace_bytes(self) -> int:
        return self.program.arena_bytes

    def as_text(self, what: str = "hlo") -> str:
        """One of its texts.

        Args:
            what: `"stablehlo"` as given, `"hlo"` optimised, `"buffers"`, `"memory"` (an SVG of the arena),
                `"thunks"`, `"kernels"` as plans, `"costs"` of each kernel by its bytes and operations, and of
                each launch by its machine code, `"bars"` (an SVG of the first),
                `"launches"`, `"triton"`, `"ptx"`, `"llvm"` of the handler, or `"clusters"`.

        Raises:
            CompileError: another word.
        """
        if what == "clusters":
            return "cluster 0: native, the whole fragment\n"
        if what == "stablehlo":
            return self.fragment.text
        text = self.artefact.text(what, self.target)
        code = self.artefact.code
        assert isinstance(code, GpuCode)
        return f"{text}\n{self.target.machine_costs(code)}" if what == "costs" else text

    def memory_analysis(self) -> MemoryStats:
        """From the assignment of memory, with the workspace of products."""
        return dataclasses.replace(self.artefact.memory, temporaries=self.program.arena_bytes)


@dataclasses.dataclass(frozen=True)
class NativeGpuBackend:
    """Compiles fragments for the GPUs of a mesh.

    Attributes:
        options: what the user says about compiling.
        libraries: the driver and cuBLASLt.
        target: the kind of GPU.
        problem: why no fragment of the mesh can be compiled, or "".
    """

    options: CompileOptions = DEFAULTS
    libraries: GpuLibraries = dataclasses.field(default_factory=CudaLibraries)
    target: GpuTarget = dataclasses.field(default_factory=GpuTarget)
    problem: str = ""
    name: str = "native"

    @staticmethod
    def of(
        mesh: Mesh, options: CompileOptions = DEFAULTS, libraries: GpuLibraries | None = None
    ) -> NativeGpuBackend:
        """The backend for the kind of GPU that a mesh is of; with a `problem` if that cannot be used."""
        libraries = libraries or CudaLibraries()
        problem = libraries.compiler.problem()
        if problem:
            return NativeGpuBackend(options, libraries, problem=problem)
        try:
            first, *others = (gpu_at(libraries, ordinal).model for ordinal in ordinals_of(mesh))
        except CompileError as error:
            return NativeGpuBackend(options, libraries, problem=str(error).splitlines()[0])
        problem = "" if all(other == first for other in others) else "the GPUs of a mesh are of several kinds"
        tiles = MeasuredTiles()
        if options.cache is not None:
            tiles = known_table(table_file(options.cache.folder, first, libraries.compiler))
        target = GpuTarget(first, libraries.compiler, tiles=tiles)
        return NativeGpuBackend(options, libraries, target, problem)

    @garbage_kept()
    def compile(self, fragment: FragmentModule, mesh: Mesh) -> GpuExecutable:
        """Compiles for the devices of `mesh`; see `Backend`.

        Raises:
            CompileError: it needs something for which there is no code; a call of the driver failed.
        """
        unfit = self.unfit(fragment, mesh)
        if unfit:
            raise CompileError(unfit)
        artefact, kept = compiled_or_kept(fragment, self.target, self.options, axes=dict(mesh.shape))
        try:
            return self.load(artefact, fragment, mesh, kept)
        except OtherTargetError as error:
            assert isinstance(error.target, GpuTarget)
            return dataclasses.replace(self, target=error.target).compile(fragment, mesh)

    def unfit(self, fragment: FragmentModule, mesh: Mesh) -> str:
        """Why no code for GPUs runs on a mesh, or not this fragment in any case; or ""."""
        return self.problem or unfit_for_targets(self.name, fragment, mesh)

    def relocate(self, executable: GpuExecutable, fragment: FragmentModule, mesh: Mesh) -> GpuExecutable:
        """The same machine code on other GPUs of the same kind; compiled again for others."""
        if executable.target != self.target:
            return self.compile(fragment, mesh)
        return self.load(executable.artefact, fragment, mesh, executable.kept)

    def load(
        self, artefact: Artefact, fragment: FragmentModule, mesh: Mesh, kept: bool = False
    ) -> GpuExecutable:
        """Machine code as an executable of a mesh; `kept` says that it is from the cache."""
        program = self.register(artefact, fragment.mesh, mesh)
        function = jax_function(fragment, mesh, program, artefact.aliases, large=False)
        return GpuExecutable(fragment, function, artefact, program, self.target, kept)

    def may_split(self, mesh: Mesh) -> bool:
        """True: programs are parts of XLA's, and collectives are XLA's own."""
        return True

    def is_large(self, artefact: Artefact) -> bool:
        """False: no call on a GPU waits for its work."""
        return False

    def register(self, artefact: Artefact, name: str, mesh: Mesh) -> RegisteredGpuProgram:
        """Machine code on the GPUs of a mesh, as JAX calls it: each with a state of its own.

        Raises:
            CompileError: the code does not load.
            OtherTargetError: cuBLASLt lacks some of its products; they can be kernels.
        """
        check_version()
        code = artefact.code
        assert isinstance(code, GpuCode)
        ordinals = ordinals_of(mesh)

        def load() -> ProgramLoad[RegisteredGpuProgram]:
            loaded = {
                ordinal: LoadedGpuProgram(
                    code,
                    gpu_at(self.libraries, ordinal),
                    number,
                    command_buffers=self.options.command_buffers,
                )
                for number, ordinal in enumerate(ordinals)
            }

            def program(index: int) -> RegisteredGpuProgram:
                arena = max(p.arena_bytes for p in loaded.values())
                kept = sum(p.kept_bytes for p in loaded.values())
                return RegisteredGpuProgram(index, arena, kept, tuple(loaded.values()))

            handlers = {ordinal: p.handler for ordinal, p in loaded.items()}
            handler = handlers[ordinals[0]] if len(handlers) == 1 else DeviceHandlers(handlers)
            return ProgramLoad(handler, program, loaded)

        captured = ".captured" if self.options.command_buffers else ""
        gpus = "_".join(map(str, ordinals))
        instance = f"{code.fingerprint}.{gpus}{captured}.{name}"  # meshes have times of their own
        try:
            return _programs(self.libraries).named(instance, load)
        except NoAlgorithm as error:
            without = self.target.without | error.products
            raise OtherTargetError(str(error), dataclasses.replace(self.target, without=without)) from error


def ordinals_of(mesh: Mesh) -> tuple[int, ...]:
    """The numbers of the GPUs of a mesh among those that this process sees; of described ones their own."""
    numbers = ((device.local_hardware_id, device.id) for device in mesh.devices.flat)
    return tuple(own if number is None else number for number, own in numbers)


@once
def _programs(libraries: GpuLibraries) -> LoadedPrograms[RegisteredGpuProgram]:
    return LoadedPrograms(libraries.platform)
