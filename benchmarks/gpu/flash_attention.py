"""How fast is our flash attention, forward and backward, against XLA's plain attention and cuDNN's?

Method: causal self-attention in bf16, 16,384 tokens of 2,048 features in heads of 64 or 128, sequences of 512
to 4,096. Ours are Triton kernels launched by an FFI handler, with block sizes chosen by measuring; XLA's and
cuDNN's are `jax.nn.dot_product_attention`.  Forward alone, and forward with backward.  Errors against f32 on
one image.

What the answer means: the ratio to XLA is what stitching attention into one kernel would gain, the ratio to
cuDNN what a call of cuDNN would gain over it.  Without a GPU all kernels are compiled and the launches
recorded.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from benchmarks.gpu import ahead
from benchmarks.gpu.driver import load_driver
from benchmarks.gpu.experiment import COMPILED, Experiment, run_experiment
from benchmarks.gpu.handler import Handler, Launch
from benchmarks.gpu.table import RecordingTable, real_table
from examples.workloads.call_frame import CallFrame
from mpmd.compile.llvm.cpu import host_target

TOKENS, FEATURES = 16384, 2048
# head dim, positions: the most telling first
SIZES = ((64, 1024), (128, 2048), (64, 4096), (128, 512), (64, 2048), (128, 4096), (64, 512), (128, 1024))
TUNED_AT = 2048


def measure(run: Experiment) -> None:
    """Finds it out."""
    with run.part("kernels"):
        from benchmarks.gpu import attention
    arch = load_driver().facts().arch if run.gpu else "sm_90"
    book = KernelBook(arch)
    with run.part("compile"):
        book.compile_all()
        for (which, dim, blocks), kernel in book.compiled.items():
            name = f"{which} dim {dim} {blocks} compiles"
            note = f"{len(kernel.cubin)} bytes, {kernel.shared} shared, {kernel.wgmma} wgmma"
            run.check(name, kernel.cubin[:4] == b"\x7fELF" and kernel.scratch_bytes == 0, note, COMPILED)
        for label, error in book.refused.items():
            run.check(f"{label} compiles", False, error)
    with run.part("recorded"):
        record(run, book, attention.AttentionShape(2, 256, 4, 64))
    if run.gpu:
        _on_gpu(run, book)
        return
    with run.part("ahead"):
        _ahead(run, attention.AttentionShape(2, 1024, 16, 64))


@dataclasses.dataclass
class KernelBook:
    """All kernels that are tried.

    Attributes:
        compiled: by kind, head dim and blocks.
        refused: those that do not compile, and why.
        numbers: the driver's kernels.
    """

    arch: str
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    numbers: dict[Any, int] = dataclasses.field(default_factory=dict)

    def compile_all(self) -> None:
        """Compiles every kernel for every block size, several at a time."""
        from benchmarks.gpu.attention import DELTA_ROWS, DK_DV, DQ, FORWARD, Blocks, compile_kernel

        jobs = [("delta", dim, Blocks(DELTA_ROWS, 0, 4, 2)) for dim in (64, 128)]
        for which, choices in (("forward", FORWARD), ("dk_dv", DK_DV), ("dq", DQ)):
            jobs += [(which, dim, blocks) for dim in choices for blocks in choices[dim]]
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            futures = {job: pool.submit(compile_kernel, *job, self.arch) for job in jobs}
        for job, future in futures.items():
            if error := future.exception():
                self.refused[" ".join(map(str, job))] = f"{type(error).__name__}: {error}"[:500]
            else:
                self.compiled[job] = future.result()

    def choices(self, which: str, dim: int) -> list[Any]:
        """The blocks that a kernel was compiled for."""
        return [blocks for kind, of, blocks in self.compiled if kind == which and of == dim]

    def load(self, driver: Any) -> None:
        """Gives all kernels to the driver; those that it refuses are left out."""
        for job, kernel in list(self.compiled.items()):
            try:
                self.numbers[job] = driver.kernels(kernel.cubin, [kernel.name], [kernel.shared])[0]
            except RuntimeError as error:
                self.refused[" ".join(map(str, job))] = str(error)
                del self.compiled[job]


def handlers(
    book: KernelBook, shape: Any, forward: Any, dk_dv: Any, dq: Any, name: str
) -> tuple[Handler, Handler, list[Any]]:
    """The handlers of both passes, and the kernels that they number."""
    from benchmarks.gpu import attention as a

    delta = a.Blocks(a.DELTA_ROWS, 0, 4, 2)
    jobs = [
        ("forward", shape.dim, forward), ("delta", shape.dim, delta), ("dk_dv", shape.dim, dk_dv),
        ("dq", shape.dim, dq),
    ]  # fmt: skip
    kernels = [book.compiled[job] for job in jobs]
    ahead: list[Launch] = [a.forward_step(0, kernels[0], forward, shape)]
    back: list[Launch] = [
        a.delta_step(1, kernels[1], shape),
        a.dk_dv_step(2, kernels[2], dk_dv, shape),
        a.dq_step(3, kernels[3], dq, shape),
    ]
    return (
        Handler(host_target(), f"{name}_forward", ahead, arguments=3, results=2),
        Handler(host_target(), f"{name}_backward", back, arguments=6, results=4),
        jobs,
    )


def record(run: Experiment, book: KernelBook, shape: Any) -> None:
    """Calls both handlers without a GPU."""
    from benchmarks.gpu.attention import DK_DV, DQ, FORWARD

    dim = shape.dim
    forward, dk_dv, dq = FORWARD[dim][0], DK_DV[dim][0], DQ[dim][0]
    ahead, back, _ = handlers(book, shape, forward, dk_dv, dq, "attention_recorded")
    for handler, arguments, grids in (
        (ahead, 3, [(shape.positions // forward.rows, shape.batch * shape.heads, 1)]),
        (
            back, 6,
            [(shape.positions // rows, shape.batch * shape.heads, 1) for rows in (128, dk_dv.keys, dq.rows)],
        ),
    ):  # fmt: skip
        recorder = RecordingTable()
        handler.bind(recorder.table, [0xA0, 0xA1, 0xA2, 0xA3])
        buffers = [0x1000 * (1 + n) for n in range(10)]
        succeeded = CallFrame(buffers[:arguments], buffers[arguments : 5 if handler is ahead else 10]).run(
            handler
        )
        found = [call.arguments[1:4] for call in recorder.calls[1:]]
        run.check(f"{handler.name} launches", succeeded and found == grids, str(found), "recorded")


def _ahead(run: Experiment, shape: Any) -> None:
    """The baselines, compiled for a described GPU."""
    if why := ahead.why_not():
        run.skip("the baselines", why)
        return
    import jax
    import jax.numpy as jnp

    array = jax.ShapeDtypeStruct(shape.array, jnp.bfloat16)
    for which in ("xla", "cudnn"):
        with run.part(f"{which} ahead"):
            compiled = ahead.compile_program(_with_gradients(_library(which)), *[array] * 4)
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            note = f"{ahead.kernel_count(compiled)} kernels, {temporaries} temporary bytes"
            run.check(f"{which}: forward and backward compile", True, note, COMPILED)


def _on_gpu(run: Experiment, book: KernelBook) -> None:
    import jax

    from benchmarks.gpu.attention import AttentionShape

    driver = load_driver()
    jax.devices()
    context, table = driver.context(), real_table(driver)
    book.load(driver)
    for job, number in book.numbers.items():
        run.figure(f"kernels.{'_'.join(map(str, job))}", driver.kernel_facts(number))
    for label, error in book.refused.items():
        run.check(f"{label} loads", False, error)
    chosen: dict[int, tuple[Any, Any, Any]] = {}
    for dim in (64, 128):
        with run.part(f"blocks for heads of {dim}"):
            chosen[dim] = _choose(
                run, book, AttentionShape(TOKENS // TUNED_AT, TUNED_AT, FEATURES // dim, dim), table, context
            )
    for dim, positions in SIZES:
        label = f"dim{dim}_T{positions}"
        if dim in chosen and run.has_time(label, 10):
            with run.part(label):
                shape = AttentionShape(TOKENS // positions, positions, FEATURES // dim, dim)
                _compare(run, label, book, shape, chosen[dim], table, context)


def _inputs(shape: Any) -> list[Any]:
    import jax
    import jax.numpy as jnp

    return [
        jax.random.normal(key, shape.array, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)
    ]


def _functions(
    book: KernelBook, shape: Any, blocks: tuple[Any, Any, Any], name: str, table: Any, context: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Traceable functions: (q, k, v) → (o, sums) and (q, k, v, o, sums, do) → (dq, dk, dv)."""
    import jax
    import jax.numpy as jnp

    ahead, back, jobs = handlers(book, shape, *blocks, name)
    for handler in (ahead, back):
        handler.bind(table, [book.numbers[job] for job in jobs], context=context)
        handler.register()
    array = jax.ShapeDtypeStruct(shape.array, jnp.bfloat16)
    sums = jax.ShapeDtypeStruct(shape.sums, jnp.float32)
    return (
        lambda q, k, v: ahead.call(q, k, v, results=[array, sums]),
        lambda *given: back.call(*given, results=[array, array, array, sums])[:3],
    )


def _choose(run: Experiment, book: KernelBook, shape: Any, table: Any, context: int) -> tuple[Any, Any, Any]:
    """The fastest blocks of each kernel, the others as they are."""
    import jax

    from benchmarks.gpu.timing import interleaved

    q, k, v, do = _inputs(shape)
    best = [next(iter(book.choices(which, shape.dim))) for which in ("forward", "dk_dv", "dq")]
    o, sums = (None, None)
    for place, which in enumerate(("forward", "dk_dv", "dq")):
        variants = {}
        for blocks in book.choices(which, shape.dim):
            tried = (*best[:place], blocks, *best[place + 1 :])
            name = f"attention_try_{shape.dim}_{which}_{blocks}"
            ahead, back = map(jax.jit, _functions(book, shape, tried, name, table, context))
            if which == "forward":
                variants[blocks] = lambda ahead=ahead: ahead(q, k, v)
            else:
                variants[blocks] = lambda back=back, o=o, sums=sums: back(q, k, v, o, sums, do)
        times = interleaved({str(b): start for b, start in variants.items()}, rounds=3, seconds=0.02)
        for blocks in variants:
            run.figure(f"blocks.dim{shape.dim}.{which}.{blocks}_us", 1e6 * times[str(blocks)].median, "us")
        best[place] = min(variants, key=lambda blocks: times[str(blocks)].median)
        if which == "forward":
            o, sums = variants[best[0]]()
    return best[0], best[1], best[2]


def _compare(
    run: Experiment, label: str, book: KernelBook, shape: Any, blocks: Any, table: Any, context: int
) -> None:
    import jax

    from benchmarks.gpu.timing import interleaved

    inputs = _inputs(shape)
    ahead, back = _functions(book, shape, blocks, f"attention_{label}", table, context)

    def ours_both(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, sums = ahead(q, k, v)
        return o, *back(q, k, v, o, sums, do)

    forward = {"ours": jax.jit(lambda q, k, v: ahead(q, k, v)[0])}
    both = {"ours": jax.jit(ours_both)}
    for which in ("xla", "cudnn"):
        plain = _library(which)
        forward[which] = jax.jit(plain)
        both[which] = jax.jit(_with_gradients(plain))
    for which in list(both):
        with run.part(f"{label} {which} works"):
            try:
                jax.block_until_ready((forward[which](*inputs[:3]), both[which](*inputs)))
            except Exception:
                del forward[which], both[which]
                raise
    with run.part(f"{label} errors"):
        _errors(run, label, shape, inputs, both)
    flops = shape.forward_flops
    for phase, variants, arguments, work in (
        ("forward", forward, inputs[:3], flops),
        ("forward_backward", both, inputs, 3.5 * flops),
    ):
        starts = {name: (lambda f=f, a=arguments: f(*a)) for name, f in variants.items()}
        times = interleaved(starts, rounds=5, seconds=0.03)
        for name, found in times.items():
            run.figure(f"{label}.{phase}.{name}", found.figures())
            run.figure(f"{label}.{phase}.{name}_tflops", work / found.median / 1e12, "TFLOP/s")
        for other in ("xla", "cudnn"):
            if other in times and "ours" in times:
                run.figure(
                    f"{label}.{phase}.speed_against_{other}", times[other].median / times["ours"].median
                )


def _library(which: str) -> Callable[..., Any]:
    import jax

    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=which)


def _with_gradients(attention: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, pull = jax.vjp(attention, q, k, v)
        return o, *pull(do)

    return both


def _errors(run: Experiment, label: str, shape: Any, inputs: list[Any], both: dict[str, Any]) -> None:
    """Errors of the first image; attention of one image knows nothing of the others."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import relative_error

    first = [x[:1].astype(jnp.float32) for x in inputs]
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(_with_gradients(_library("xla")))(*first)
    for which, function in both.items():
        errors = {
            name: relative_error(found[:1], wanted)
            for name, found, wanted in zip(("o", "dq", "dk", "dv"), function(*inputs), exact)
        }
        run.figure(f"{label}.errors.{which}", {name: round(error, 6) for name, error in errors.items()})
        if which == "ours":
            run.check(f"{label}: ours is right", all(e < 2e-2 for e in errors.values()))


if __name__ == "__main__":
    run_experiment("flash_attention", __doc__, measure)
