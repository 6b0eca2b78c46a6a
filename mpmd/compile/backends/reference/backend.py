"""The reference backend: a call waits for its arguments, runs the thunks of all devices, and gives arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mpmd.brief import brief
from mpmd.compile.artefact import Artefact
from mpmd.compile.backends.jax_function import named_sharding, numpy_dtype
from mpmd.compile.backends.reference.target import Reference, ReferenceProgram
from mpmd.compile.backends.target_backend import unfit_for_targets
from mpmd.compile.driver import compiled_or_kept
from mpmd.compile.executable import MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.errors import CompileError


@dataclasses.dataclass
class ReferenceExecutable:
    """A fragment that NumPy runs, on the devices of a mesh in turns."""

    fragment: FragmentModule
    mesh: Mesh
    artefact: Artefact
    backend: str = "reference"
    asynchronous: bool = False

    __repr__ = brief

    @property
    def name(self) -> str:
        return self.fragment.name

    @property
    def workspace_bytes(self) -> int:
        """Bytes of temporaries per device, while it runs."""
        return self.artefact.arena_bytes

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        """The results; donated arguments are deleted.  See `Executable`."""
        program, devices = self.artefact.code, list(self.mesh.devices.flat)
        assert isinstance(program, ReferenceProgram)
        given = [[np.empty(0, np.uint8)] * len(arrays) for _ in devices]
        for number, array in enumerate(arrays):
            for shard in array.addressable_shards:
                elements = np.ascontiguousarray(shard.data).reshape(-1)
                given[devices.index(shard.device)][number] = elements.view(np.uint8)
        outputs = program.run(given)
        results = [
            self._result(number, [own[number] for own in outputs]) for number in range(len(outputs[0]))
        ]
        for argument in self.fragment.donated:
            arrays[argument].delete()
        return results

    def _result(self, number: int, parts: Sequence[np.ndarray]) -> jax.Array:
        """A result as an array, from its bytes on each device; the array may keep that memory."""
        value = self.fragment.results[number]
        sharding, dtype = named_sharding(self.mesh, value), numpy_dtype(value.dtype)
        local = sharding.shard_shape(value.shape)
        with jax.enable_x64(True):
            shards = [
                jax.device_put(part.view(dtype).reshape(local), device)
                for part, device in zip(parts, self.mesh.devices.flat, strict=True)
            ]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)

    def as_text(self, what: str = "hlo") -> str:
        """One of its texts, as native code has them but for `"llvm"` and `"assembly"`; see `Executable`."""
        return self.fragment.text if what == "stablehlo" else self.artefact.text(what, Reference())

    def cost_analysis(self) -> dict[str, float]:
        """Our own count, and the models' seconds of native code."""
        return {**self.artefact.costs, "fallbacks": 0.0}

    def memory_analysis(self) -> MemoryStats:
        return self.artefact.memory


@dataclasses.dataclass(frozen=True)
class ReferenceBackend:
    """Runs fragments by NumPy.

    Attributes:
        options: the user's options of compilation.
    """

    options: CompileOptions = DEFAULTS
    target: Reference = dataclasses.field(default_factory=Reference)
    name: str = "reference"

    def compile(self, fragment: FragmentModule, mesh: Mesh) -> ReferenceExecutable:
        """Compiles for the devices of `mesh`; see `Backend`.

        Raises:
            CompileError: it needs something that has no plan.
        """
        unfit = self.unfit(fragment, mesh)
        if unfit:
            raise CompileError(unfit)
        artefact, _ = compiled_or_kept(fragment, self.target, self.options, axes=dict(mesh.shape))
        return ReferenceExecutable(fragment, mesh, artefact)

    def unfit(self, fragment: FragmentModule, mesh: Mesh) -> str:
        """See `TargetBackend`."""
        if self.options.kernel_overrides is not None:
            return "the reference has no kernels of LLVM that files could replace"
        return unfit_for_targets(self.name, fragment, mesh)

    def relocate(
        self, executable: ReferenceExecutable, fragment: FragmentModule, mesh: Mesh
    ) -> ReferenceExecutable:
        return ReferenceExecutable(fragment, mesh, executable.artefact)
