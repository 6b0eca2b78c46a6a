"""GPUs of one kind as a target of the driver: thunks become launches, plans Triton kernels, these cubins.

The passes of GPUs before kernels are planned: one list, each entry with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

from mpmd.compile.backends.native_gpu.gpu_devices import GPUS, GpuModel
from mpmd.compile.backends.native_gpu.handler import emit_handler
from mpmd.compile.backends.native_gpu.horizontal import side_by_side, small_bytes
from mpmd.compile.backends.native_gpu.launches import LaunchProgram, launch_program, with_smaller_tiles
from mpmd.compile.backends.native_gpu.machine.launch_report import program_times
from mpmd.compile.backends.native_gpu.products import (
    ProductDescriptor,
    dense_sums,
    in_one_kernel,
    stored_sums,
)
from mpmd.compile.backends.native_gpu.triton import attention
from mpmd.compile.backends.native_gpu.triton.choices import KernelChoices, MeasuredTiles
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin, KernelCompiler, TritonCompiler
from mpmd.compile.backends.native_gpu.triton.operations import PRELUDE
from mpmd.compile.backends.native_gpu.triton.triton_kernels import ALIGNMENT, refusal
from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.buffers.offsets import DeviceMemory
from mpmd.compile.cache import DiskCache
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.planner.attention import PlannedAttention
from mpmd.compile.kernels.planner.collectives import CollectivePlan
from mpmd.compile.kernels.planner.dots import DotPlan
from mpmd.compile.kernels.planner.groups import GroupPlan, UpdatePlan
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.llvm.engine import object_of
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes.expand.float_jitter import FloatJitter
from mpmd.compile.passes.expand.indexing import ScatterWidener
from mpmd.compile.passes.expand.products import DotAlgorithmRewriter, DotPadding
from mpmd.compile.passes.fusion.attention_stitching import AttentionStitching
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.compile.passes.fusion.keep_rounding import KeepRounding
from mpmd.compile.passes.fusion.sort_prefix import SortPrefix
from mpmd.compile.passes.layout.copy_insertion import CopyInsertion
from mpmd.compile.passes.simplify.one_per_row_rewriter import OnePerRowRewriter
from mpmd.compile.passes.simplify.redundancy import Cse, Dce
from mpmd.compile.pipelines import preparation, scheduling_pipeline
from mpmd.compile.schedule.side_by_side import SideBySide
from mpmd.compile.thunks.thunk import Thunk
from mpmd.cost.device import Device
from mpmd.errors import CompileError
from mpmd.support.passes import Pass


def gpu_pipeline(devices: int, options: CompileOptions, device: Device) -> list[Pass]:
    """The passes.  All arrays are row-major: kernels and products read any order.

    Args:
        devices: how many run the program together.
        options: the compile options.
        device: what kernels are priced for, and whose limits they keep.
    """
    wrong = [FloatJitter(options.float_jitter)] if options.float_jitter else []
    return [
        *wrong,  # before anything else: afterwards operations are no longer those that were written
        *preparation(devices, unit_dims=False),  # each instruction by itself; after it they are kernels
        DotAlgorithmRewriter(),  # before attention and products are planned, by the types of their factors
        OnePerRowRewriter(),  # after gathers have one form: the rows of a loss need not be arrays then
        ScatterWidener(),  # after that has taken the scatters of labels
        DotPadding(device),  # after the rows of a loss are elementwise: they become longer with the product
        Cse(),  # the loss and its gradient compare with the same labels
        Dce(),  # what only made indices
        CopyInsertion(),  # before fusion, so that copies are fused into what computes their value
        KeepRounding(),  # simplification takes its conversions away, kernels hide discrete values
        SortPrefix(device.limits.sort_prefix),  # before fusion, which takes the slices to what reads them
        AttentionStitching(options.attention_stitching, device),  # before products are taken one by one
        Fusion(device=device, narrow_products=True),  # last change of what computes
    ]


@dataclasses.dataclass(frozen=True)
class GpuCode:
    """A launch program, its handler, and the machine code of its kernels.

    Attributes:
        program: the launches.
        cubins: by the name of the kernel.
        handler: what XLA calls, as an object file of the host.
        listing: the LLVM assembly that it was compiled from, compressed.
    """

    program: LaunchProgram
    cubins: Mapping[str, Cubin]
    handler: bytes
    listing: bytes

    @property
    def size(self) -> int:
        """Bytes of machine code on the GPU."""
        return sum(len(cubin.code) for cubin in self.cubins.values())

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.handler + self.program.text().encode() + self.program.constants)
        for cubin in self.cubins.values():
            digest.update(cubin.code)
        return digest.hexdigest()[:16]

    def to_bytes(self) -> bytes:
        """See `Code`."""
        return pickle.dumps((self.program, dict(self.cubins), self.handler, self.listing))


def gpu_code(program: LaunchProgram, cubins: Mapping[str, Cubin]) -> GpuCode:
    """A program with its kernels' code and a handler for this host."""
    host = host_target()
    text = emit_handler(program, host).text()
    return GpuCode(program, cubins, object_of(text, host), zlib.compress(text.encode(), 1))


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """GPUs of one kind; see `Target`.  Nothing here needs one.

    Attributes:
        gpu: which.
        compiler: compiles kernels.
        without: products for which the matrix library has no algorithm: they are kernels.
        tiles: of kernels that were measured on this kind of GPU; the others follow rules.
    """

    gpu: GpuModel = dataclasses.field(default_factory=lambda: GPUS["H200"])
    compiler: KernelCompiler = dataclasses.field(default_factory=TritonCompiler)
    without: frozenset[ProductDescriptor] = frozenset()
    tiles: MeasuredTiles = dataclasses.field(default_factory=MeasuredTiles)

    code_texts: ClassVar[Mapping[str, str]] = {
        "launches": "launches.txt",
        "triton": "kernels.py",
        "ptx": "kernels.ptx",
        "llvm": "handler.ll",
    }
    memory: ClassVar[DeviceMemory] = DeviceMemory(ALIGNMENT)

    @property
    def device(self) -> Device:
        return self.gpu.device

    @functools.cached_property
    def choices(self) -> KernelChoices:
        return KernelChoices(self.gpu.programs, self.tiles)

    def key(self) -> str:
        """The kind of GPU, its tiles, what its kernels call, and the CPU of the handler."""
        which = f"{self.gpu} {sorted(map(str, self.without))} {self.tiles.version}"
        return f"gpu {which} {self.compiler.key()} {PRELUDE} {host_target().key()}"

    def passes(self, devices: int, options: CompileOptions) -> list[Pass]:
        """The list of `pipeline.py`; see `Target`."""
        return gpu_pipeline(devices, options, self.device)

    def schedule(self, devices: int) -> list[Pass]:
        """The passes that order instructions."""
        return [*scheduling_pipeline(), SideBySide(small_bytes(self.device))]  # changes an order that exists

    def refuses(self, instruction: HloInstruction, planned: PlannedKernel | None) -> str:
        """Collectives, and plans without a kernel; see `Target`."""
        if isinstance(planned, GroupPlan | UpdatePlan):
            return refusal(planned.plan)
        if isinstance(planned, PlannedAttention):
            return attention.refusal(planned.plan)
        if isinstance(planned, DotPlan):
            return refusal(planned.plan.epilogue) if planned.plan.epilogue is not None else ""
        return "collectives are XLA's" if isinstance(planned, CollectivePlan) else ""

    def scratch_bytes(self, planned: PlannedKernel | None) -> int:
        """Partial sums, and the sums of a product whose epilogue is a kernel of its own; see `Target`."""
        if isinstance(planned, GroupPlan | UpdatePlan):
            return self.choices.of_plan(planned.plan).scratch_bytes
        if isinstance(planned, PlannedAttention):
            return self.choices.of_attention(planned.plan).scratch_bytes
        if isinstance(planned, DotPlan) and stored_sums(planned.plan, self.without) is None:
            if in_one_kernel(planned.plan, self.without):
                return 0
            assert planned.plan.epilogue is not None
            size = planned.plan.epilogue.operands[planned.plan.sums].size
            return int(size * DTYPE_BYTES[dense_sums(planned.plan).dtype])
        return 0

    def program(self, name: str, thunks: Sequence[Thunk], assignment: BufferAssignment) -> LaunchProgram:
        """Thunks as launches; see `Target`."""
        launches = launch_program(name, thunks, assignment, self.choices, self.without)
        return side_by_side(launches, small_bytes(self.device))

    def compile(self, program: LaunchProgram, fragment: FragmentModule, options: CompileOptions) -> GpuCode:
        """The kernels as machine code; see `Target`.

        Raises:
            CompileError: Triton is not installed, or a kernel does not compile or needs too much memory.
        """
        if options.kernel_overrides is not None:
            raise CompileError("GPUs have no kernels of LLVM that files could replace")
        program, cubins = self._with_code(program, options.cache)
        for name, cubin in cubins.items():
            if cubin.shared_bytes > self.gpu.shared_bytes:
                raise CompileError(f"kernel {name} needs {cubin.shared_bytes} bytes of shared memory")
        return gpu_code(program, cubins)

    def _with_code(
        self, program: LaunchProgram, cache: DiskCache | None
    ) -> tuple[LaunchProgram, dict[str, Cubin]]:
        """The program with the largest tiles that need neither stack nor more memory than there is."""
        cubins: dict[str, Cubin] = {}
        while True:
            missing = {name: kernel for name, kernel in program.kernels.items() if name not in cubins}
            cubins |= self.compiler.compile(missing, self.gpu.capability, cache)
            smaller = [name for name, k in program.kernels.items() if k.smaller is not None]
            large = {name for name in smaller if not self.fits(cubins[name])}
            if not large:
                return program, {name: cubins[name] for name in program.kernels}
            program = with_smaller_tiles(program, large)

    def fits(self, cubin: Cubin) -> bool:
        """Whether code needs no stack, and no more memory than there is."""
        return not cubin.stack_bytes and cubin.shared_bytes <= self.gpu.shared_bytes

    def code_from_bytes(self, data: bytes) -> GpuCode:
        """What `GpuCode.to_bytes` wrote; see `Target`."""
        try:
            return GpuCode(*pickle.loads(data))
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError) as error:
            raise ValueError(f"no program: {error}") from error

    def code_text(self, code: GpuCode, what: str) -> str:
        """The launches, the kernels' source or PTX, or the handler."""
        if what == "llvm":
            return zlib.decompress(code.listing).decode()
        if what == "ptx":
            return "\n".join(cubin.ptx for cubin in code.cubins.values())
        return code.program.text() if what == "launches" else code.program.triton()

    def machine_costs(self, code: GpuCode) -> str:
        """What the machine code says about the time of each launch; or why it says nothing here."""
        try:
            return program_times(code.program, code.cubins, self.gpu).text()
        except CompileError as error:
            return f"no times by machine code: {error}\n"
