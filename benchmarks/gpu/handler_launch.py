"""Can a handler written in LLVM IR launch a kernel on XLA's stream, in order with XLA's own work?

Method: `out = alpha * x + y` as a kernel from LLVM IR (NVPTX), its launch in an XLA FFI handler from LLVM IR,
called from jitted programs: alone, between XLA's operations, in place on a donated argument, with PTX that
the driver compiles, and with a launch that must fail.  Then its time against XLA's own kernel, small (what
the boundary costs) and large (whether the kernel reaches the memory's speed).

What the answer means: if all holds, a fragment can be one custom call on GPU as it is on CPU.  `boundary_us`
is the time of a program that is one small call, less that of XLA's own.  Without a GPU the kernel is compiled
and the handler is called with a table that records.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from benchmarks.gpu import ahead
from benchmarks.gpu.driver import load_driver
from benchmarks.gpu.experiment import COMPILED, Experiment, run_experiment
from benchmarks.gpu.frame import CallFrame
from benchmarks.gpu.handler import GpuBuffer, Handler, Launch, Scalar
from benchmarks.gpu.kernels import BLOCK, CompiledKernel, scale_add
from benchmarks.gpu.table import RecordingTable, real_table
from mpmd.compile.llvm.target import host_target

ALPHA = 2.5
SMALL, CHECKED, LARGE = 1 << 10, 1 << 20, 1 << 27
SHRINK = 0.3  # with it a step of the chain shrinks differences of rounding


def launch(count: int, *, kernel: int = 0, threads: int = BLOCK) -> Launch:
    """The launch of `scale_add` over `count` elements: buffers x, y, out."""
    blocks = -(-count // (4 * BLOCK))
    values = (GpuBuffer(0), GpuBuffer(1), GpuBuffer(2), Scalar("i32", count), Scalar("float", ALPHA))
    return Launch(kernel, (blocks, 1, 1), threads, values)


def make_handler(name: str, count: int, threads: int = BLOCK) -> Handler:
    """A handler with one launch."""
    return Handler(host_target(), name, [launch(count, threads=threads)], arguments=2, results=1)


def measure(run: Experiment) -> None:
    """Finds it out."""
    arch = load_driver().facts().arch if run.gpu else "sm_90"
    code = None
    with run.part("compile"):
        code = scale_add(arch)
        run.check("LLVM IR becomes PTX", ".entry scale_add" in code.ptx, arch, COMPILED)
        if code.cubin is None:
            run.skip("PTX becomes a cubin", "no ptxas: the driver compiles the PTX")
        else:
            run.check(
                "PTX becomes a cubin", code.cubin[:4] == b"\x7fELF", f"{len(code.cubin)} bytes", COMPILED
            )
    with run.part("recorded"):
        record(run)
    if not run.gpu:
        with run.part("ahead"):
            _ahead(run)
    elif code is not None:
        _on_gpu(run, code)


def record(run: Experiment) -> None:
    """Calls the handler without XLA or a GPU, with a table that records."""
    handler = make_handler("launch_recorded", 1000)
    pointer = ctypes.c_void_p
    recorder = RecordingTable({0xA0: [pointer, pointer, pointer, ctypes.c_int, ctypes.c_float]})
    handler.bind(recorder.table, [0xA0], context=0xCC)
    frame = CallFrame([0x1000, 0x2000], [0x3000], stream=0x77)
    answered = frame.metadata(handler)
    run.check("the handler answers with its API version", answered[:2] == (0, 3), str(answered), "recorded")
    succeeded = frame.run(handler)
    names = [call.name for call in recorder.calls]
    run.check(
        "it launches once", succeeded and names == ["cuCtxSetCurrent", "cuLaunchKernel"], "", "recorded"
    )
    called = recorder.calls[-1]
    shape = called.arguments[:8] + called.arguments[8:9]
    right = shape == (0xA0, 1, 1, 1, BLOCK, 1, 1, 0, 0x77)
    run.check("grid, block and stream are right", right, str(shape), "recorded")
    values = called.parameters == (0x1000, 0x2000, 0x3000, 1000, ALPHA)
    run.check("the parameters are the buffers", values, str(called.parameters), "recorded")
    broken = RecordingTable(fail_at=2, status=701)
    handler.bind(broken.table, [0xA0], context=0xCC)
    failed = not frame.run(handler) and handler.failure == (0, 701)
    run.check("a launch that fails is an error", failed, "; ".join(frame.errors), "recorded")


def _ahead(run: Experiment) -> None:
    """XLA's CUDA platform takes the handler, and compiles a program that calls it."""
    if why := ahead.why_not():
        run.skip("XLA compiles a program with the call", why)
        return
    import jax

    handler = make_handler("launch_ahead", 1 << 10)
    handler.register()
    shape = jax.ShapeDtypeStruct((1 << 10,), np.float32)
    compiled = ahead.compile_program(_call(handler, 1 << 10), shape, shape)
    called = compiled.as_text().count('custom_call_target="launch_ahead"')
    run.check("XLA compiles a program with the call", called == 1, "for a described H200", COMPILED)


def _on_gpu(run: Experiment, code: CompiledKernel) -> None:
    import jax

    driver = load_driver()
    jax.devices()  # XLA makes the context first, and this process shares it
    table = real_table(driver)
    context = driver.context()
    with run.part("correct"):
        handler = make_handler("launch_correct", CHECKED)
        handler.bind(table, driver.kernels(code.image, ["scale_add"]), context=context)
        handler.register()
        _correct(run, handler, CHECKED)
    with run.part("ptx by the driver"):
        handler = make_handler("launch_ptx", 1 << 16)
        handler.bind(table, driver.kernels(code.ptx.encode(), ["scale_add"]), context=context)
        handler.register()
        _equal(run, "the driver compiles PTX", handler, 1 << 16)
    with run.part("failing launch"):
        _failing(run, table, driver.kernels(code.image, ["scale_add"]), context)
    for count in (SMALL, LARGE):
        with run.part(f"time of {count} elements"):
            kernels = driver.kernels(code.image, ["scale_add"])
            _times(run, table, kernels, context, count)


def _arrays(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(seed).standard_normal((2, count), np.float32)
    return x, y


def _call(handler: Handler, count: int, **options: Any) -> Any:
    import jax

    shape = jax.ShapeDtypeStruct((count,), np.float32)
    return lambda x, y: handler.call(x, y, results=[shape], **options)[0]


def _equal(run: Experiment, name: str, handler: Handler, count: int) -> None:
    import jax

    x, y = _arrays(count)
    out = np.asarray(jax.jit(_call(handler, count))(x, y))
    wanted = np.float32(ALPHA) * x + y
    run.check(name, bool(np.allclose(out, wanted, rtol=1e-6, atol=1e-6)), f"{handler.calls} calls")


def _correct(run: Experiment, handler: Handler, count: int) -> None:
    import jax
    import jax.numpy as jnp

    _equal(run, "a program of one call", handler, count)
    call = _call(handler, count)

    @jax.jit
    def between(x: Any, y: Any) -> Any:
        for _ in range(20):
            x = jnp.sin(call(SHRINK * jnp.cos(x), y))
        return x

    @jax.jit
    def plain(x: Any, y: Any) -> Any:
        for _ in range(20):
            x = jnp.sin(jnp.float32(ALPHA) * (SHRINK * jnp.cos(x)) + y)
        return x

    worst = 0.0
    for seed in range(5):
        x, y = _arrays(count, seed)
        worst = max(worst, float(jnp.abs(between(x, y) - plain(x, y)).max()))
    run.check("calls are in order with XLA's work", worst < 1e-3, f"largest difference {worst:.1e}")
    in_place = jax.jit(_call(handler, count, aliases={0: 0}), donate_argnums=0)
    x, y = map(jnp.asarray, _arrays(count))
    wanted = np.asarray(jnp.float32(ALPHA) * x + y)
    pointer = x.unsafe_buffer_pointer()
    out = in_place(x, y)
    same = out.unsafe_buffer_pointer() == pointer and bool(
        np.allclose(np.asarray(out), wanted, rtol=1e-6, atol=1e-6)
    )
    run.check("a donated argument is updated in place", same)


def _failing(run: Experiment, table: Any, kernels: list[int], context: int) -> None:
    import jax

    handler = make_handler("launch_failing", 1 << 10, threads=4096)  # more than a block may have
    handler.bind(table, kernels, context=context)
    handler.register()
    x, y = _arrays(1 << 10)
    try:
        jax.block_until_ready(jax.jit(_call(handler, 1 << 10))(x, y))
        run.check("a launch that fails raises", False, "it returned")
    except jax.errors.JaxRuntimeError as error:
        words = load_driver().words(handler.failure[1])
        run.check("a launch that fails raises", "cuLaunchKernel" in str(error), f"{error}; {words}")
    after = make_handler("launch_after", 1 << 10)
    after.bind(table, kernels, context=context)
    after.register()
    _equal(run, "the next call works", after, 1 << 10)


def _times(run: Experiment, table: Any, kernels: list[int], context: int, count: int) -> None:
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import interleaved

    handler = make_handler(f"launch_timed_{count}", count)
    handler.bind(table, kernels, context=context)
    handler.register()
    x, y = jax.random.normal(jax.random.key(1), (2, count), jnp.float32)
    ours, xla = jax.jit(_call(handler, count)), jax.jit(lambda x, y: jnp.float32(ALPHA) * x + y)
    times = interleaved({"handler": lambda: ours(x, y), "xla": lambda: xla(x, y)})
    for name, found in times.items():
        run.figure(f"{count}.{name}", found.figures())
        run.figure(f"{count}.{name}_bytes_per_s", 12.0 * count / found.median, "B/s")
    if count == SMALL:
        run.figure("boundary_us", 1e6 * (times["handler"].median - times["xla"].median), "us")


if __name__ == "__main__":
    run_experiment("handler_launch", __doc__, measure)
