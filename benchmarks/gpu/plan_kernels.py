"""Do the kernel plans of the native backend become GPU kernels by the printer that CPUs use?

Method: plans without reductions, f32 and bf16, printed by the emitter of the CPU backend for a target with
vectors of 16 bytes, one vector a thread, through LLVM's NVPTX target to PTX and a cubin.  On a GPU a handler
launches them; they are compared with the plan's meaning in NumPy, and with XLA for time.

What the answer means: if they are right and as fast as XLA's, elementwise fusions need no second printer, and
Triton is left with reductions and attention.  `speed` is XLA's time over ours.  Without a GPU they are
compiled.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import llvmlite.binding as binding
import numpy as np

from benchmarks.fused_kernels import gelu
from benchmarks.gpu.driver import load_driver
from benchmarks.gpu.experiment import COMPILED, Experiment, run_experiment
from benchmarks.gpu.handler import GpuBuffer, Handler, Launch
from benchmarks.gpu.kernels import TRIPLE, to_cubin
from benchmarks.gpu.table import real_table
from mpmd.compile.backends.native_cpu.emit.loop import meets_itself, store_all
from mpmd.compile.backends.native_cpu.emit.nest import product, unflatten
from mpmd.compile.backends.native_cpu.emit.scope import Lanes, Scope
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.normalise import normalise
from mpmd.compile.kernels.operations import DTYPE_BYTES, NUMPY_DTYPE, OPERATIONS
from mpmd.compile.kernels.plan import KernelPlan
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.module import Module
from mpmd.compile.llvm.target import CpuTarget, host_target
from mpmd.errors import CompileError

BLOCK, VECTOR_BYTES = 256, 16
SIZE = 1 << 26
NO_CODE = "of which the CPU backend has no code of its own"


@dataclasses.dataclass(frozen=True)
class GpuPlanKernel:
    """A plan as a GPU kernel; its parameters are the operands.

    Attributes:
        lanes: points that a thread computes.
        blocks: of the grid.
    """

    plan: KernelPlan
    lanes: int
    blocks: int
    ptx: str


def gpu_target(arch: str) -> CpuTarget:
    """A GPU as far as the emitter must know it: short vectors, bf16 rounded by an instruction."""
    return CpuTarget(TRIPLE, arch, "+ptx80", VECTOR_BYTES, 64, bf16_dot=arch >= "sm_80")


def print_plan(plan: KernelPlan, arch: str) -> GpuPlanKernel:
    """The kernel of a plan without reductions.

    Raises:
        CompileError: the plan reduces, two of its points write one place, or it needs the C library.
    """
    plan = normalise(plan)
    if plan.kind != "loop" or meets_itself(plan) or not plan.size or not plan.rank:
        raise CompileError(f"kernel {plan.name} is not a loop over points that are apart")
    widest = max(DTYPE_BYTES[operand.dtype] for operand in plan.operands)
    lanes = VECTOR_BYTES // widest
    if plan.extents[-1] % lanes:
        lanes = 1
    pieces, last = plan.extents[-1] // lanes, plan.rank - 1
    threads = pieces * product(plan.extents, range(last))
    module = Module(gpu_target(arch))
    names = [f"p{number}" for number in range(len(plan.operands))]
    with FunctionBuilder(module, plan.name, [(name, "ptr") for name in names]) as f:
        block = f.intrinsic("llvm.nvvm.read.ptx.sreg.ctaid.x", "i32")
        lane = f.intrinsic("llvm.nvvm.read.ptx.sreg.tid.x", "i32")
        thread = f.index(f.iadd(f.imul(f.cast("zext", block, "i64"), BLOCK), f.cast("zext", lane, "i64")))
        with f.when(f.compare("slt", thread, f.index(threads))):
            pointers = {number: f.arguments[name] for number, name in enumerate(names)}
            outer = unflatten(f, f.idiv(thread, pieces), range(last), plan.extents)
            start = f.imul(f.irem(thread, pieces), lanes)
            scope = Scope(f, plan, pointers).inside(outer)
            store_all([scope.inside(lanes=Lanes(last, start, lanes))])
    return GpuPlanKernel(plan, lanes, -(-threads // BLOCK), _to_ptx(module, plan.name, names, arch))


def _to_ptx(module: Module, name: str, parameters: list[str], arch: str) -> str:
    """PTX of the module's one kernel: XLA's buffers are aligned, and LLVM finds out what follows from it."""
    plain = ", ".join(f"ptr %{parameter}" for parameter in parameters)
    aligned = ", ".join(f"ptr noundef align {VECTOR_BYTES} %{parameter}" for parameter in parameters)
    text = module.text().replace(
        f"define void @{name}({plain})", f"define ptx_kernel void @{name}({aligned})"
    )
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        parsed = binding.parse_assembly(text)
        parsed.verify()
        machine: Any = binding.Target.from_triple(TRIPLE).create_target_machine(
            cpu=arch, features=module.target.features, opt=3
        )
        options = binding.create_pipeline_tuning_options(speed_level=2)
        builder = binding.create_pass_builder(machine, options)
        builder.getModulePassManager().run(parsed, builder)
        ptx = str(machine.emit_assembly(parsed))
    except RuntimeError as error:
        raise CompileError(f"LLVM makes no PTX of kernel {name}: {error}") from error
    if outside := re.findall(r"\.extern \.func.*?(\w+)\s*\(?\s*\n?\(", ptx):
        raise CompileError(f"kernel {name} calls {', '.join(outside)}, {NO_CODE}")
    return ptx


def gated_residual(rows: int, width: int, dtype: str) -> KernelPlan:
    """Y = x + gate[column] * tanh(h): a broadcast and a math function."""
    b = PlanBuilder("gated_residual", (rows, width))
    x, h = (b.convert(b.load_dense(b.operand(name, dtype, rows * width)), "f32") for name in "xh")
    gate = b.convert(b.load_dense(b.operand("gate", dtype, width), (1,)), "f32")
    y = b.apply("add", x, b.apply("multiply", gate, b.apply("tanh", h)))
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(y, dtype))
    return b.finish()


def make_plan(name: str, dtype: str, size: int) -> KernelPlan:
    """One of the plans that are tried, over about `size` points; every one's last operand is its result."""
    return gelu(size, dtype) if name == "gelu" else gated_residual(size // 1024, 1024, dtype)


def measure(run: Experiment) -> None:
    """Finds it out."""
    arch = load_driver().facts().arch if run.gpu else "sm_90"
    with run.part("operations"):
        _operations(run, arch)
    for name in ("gelu", "gated_residual"):
        for dtype in ("f32", "bf16"):
            with run.part(f"{name} {dtype}"):
                kernel = print_plan(make_plan(name, dtype, SIZE), arch)
                cubin = to_cubin(kernel.ptx, arch)
                wide = kernel.ptx.count("ld.global.v") + kernel.ptx.count("ld.global.b128")
                note = f"{kernel.lanes} points a thread, {wide} wide loads"
                run.check(f"{name} {dtype} is printed", ".entry " in kernel.ptx, note, COMPILED)
                if run.gpu:
                    image = cubin if cubin is not None else kernel.ptx.encode()
                    _on_gpu(run, f"{name}_{dtype}", name, dtype, kernel, image)


def _operations(run: Experiment, arch: str) -> None:
    """Every elementwise operation in every register type that it is defined for."""
    printed, refused = 0, {}
    for name, operation in sorted(OPERATIONS.items()):
        for dtype in ("f32", "f64", "s32", "u32", "s64", "pred"):
            if dtype not in operation.dtypes or name in ("convert", "bitcast-convert"):
                continue
            b = PlanBuilder("one", (1024,))
            kinds = ["pred", dtype, dtype] if name == "select" else [dtype] * operation.arity
            given = [b.load_dense(b.operand(f"x{n}", kind, 1024)) for n, kind in enumerate(kinds)]
            result = b.apply(name, *given)
            b.store_dense(b.operand("y", b.dtype(result), 1024), result)
            try:
                print_plan(b.finish(), arch)
                printed += 1
            except CompileError as error:
                refused[f"{name} {dtype}"] = str(error)
    run.figure("operations.printed", printed)
    run.figure("operations.refused", refused)
    known = all(text.endswith(NO_CODE) for text in refused.values())
    note = f"{printed} of {printed + len(refused)}; the others call the C library"
    run.check("operations are printed", known and printed > len(refused), note, COMPILED)


def make_handler(label: str, kernel: GpuPlanKernel) -> Handler:
    """A handler that launches it: all operands but the last are arguments."""
    count = len(kernel.plan.operands)
    step = Launch(0, (kernel.blocks, 1, 1), BLOCK, tuple(map(GpuBuffer, range(count))))
    return Handler(host_target(), f"plan_{label}", [step], arguments=count - 1, results=1)


def _on_gpu(run: Experiment, label: str, name: str, dtype: str, kernel: GpuPlanKernel, image: bytes) -> None:
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import interleaved

    driver = load_driver()
    jax.devices()
    handler, operands = make_handler(label, kernel), kernel.plan.operands
    handler.bind(real_table(driver), driver.kernels(image, [kernel.plan.name]), context=driver.context())
    handler.register()
    kind = jnp.dtype(NUMPY_DTYPE[dtype])
    keys = jax.random.split(jax.random.key(0), len(operands))
    inputs = [jax.random.normal(key, (o.size,), kind) for key, o in zip(keys, operands[:-1])]
    shape = jax.ShapeDtypeStruct((operands[-1].size,), kind)
    ours = jax.jit(lambda *a: handler.call(*a, results=[shape])[0])
    out = ours(*inputs)
    checked = min(SIZE, 1 << 16)  # whole rows at the beginning, and the end of the last
    arrays = [np.array(a[:checked]) for a in inputs]
    small = make_plan(name, dtype, checked)
    wanted = np.zeros(checked, NUMPY_DTYPE[dtype])
    evaluate(small, [*arrays, wanted])
    found = np.asarray(out[:checked]).astype(np.float32)
    distance = float(np.abs(found - wanted.astype(np.float32)).max())
    limit = 1e-5 if dtype == "f32" else 4e-2
    run.check(f"{label} is right", distance < limit, f"largest difference {distance:.1e}")
    xla = jax.jit(_same(name))
    apart = float(jnp.abs(xla(*inputs).astype(jnp.float32) - out.astype(jnp.float32)).max())
    run.check(f"{label} equals XLA's everywhere", apart < 4 * limit, f"largest difference {apart:.1e}")
    times = interleaved({"ours": lambda: ours(*inputs), "xla": lambda: xla(*inputs)})
    traffic = sum(operand.bytes for operand in operands)
    for which, found_times in times.items():
        run.figure(f"{label}.{which}", found_times.figures())
        run.figure(f"{label}.{which}_bytes_per_s", traffic / found_times.median, "B/s")
    run.figure(f"{label}.speed", times["xla"].median / times["ours"].median)


def _same(name: str) -> Any:
    """The same mathematics for XLA, on flat arrays."""
    import jax.numpy as jnp

    def gelu_of(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        inner = wide * math.sqrt(2 / math.pi) * (wide * wide * 0.044715 + 1.0)
        return (wide * 0.5 * (jnp.tanh(inner) + 1.0)).astype(x.dtype)

    def gated(x: Any, h: Any, gate: Any) -> Any:
        wide = (a.astype(jnp.float32) for a in (x.reshape(-1, 1024), h.reshape(-1, 1024), gate))
        x32, h32, gate32 = wide
        return (x32 + gate32 * jnp.tanh(h32)).astype(x.dtype).reshape(-1)

    return gelu_of if name == "gelu" else gated


if __name__ == "__main__":
    run_experiment("plan_kernels", __doc__, measure)
