"""Do cuBLASLt's training epilogues work from the handler, and are they faster than what XLA makes?

Method: four products of a transformer's MLP in bf16, each as one call of cuBLASLt from an FFI handler: a
plain one, one with bias and gelu that keeps gelu's input, the backward one that applies gelu's derivative and
sums the bias gradient, and a weight gradient that sums the bias gradient on the way.  Each against XLA's
program for the same mathematics, and both against f32.

What the answer means: `speed` above 1 says that our thunk beats XLA's fusion choice for that product;
`first_choice` is the time of the library's first proposal over the best of its proposals (how much measuring
them would gain). Without a GPU descriptors are made and the calls recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.gpu import ahead
from benchmarks.gpu.cublaslt import WORKSPACE, CublasLt, MatmulProblem, Product, make_records
from benchmarks.gpu.driver import load_driver
from benchmarks.gpu.experiment import COMPILED, Experiment, run_experiment
from benchmarks.gpu.handler import AUX_POINTER, BIAS_POINTER, GpuBuffer, Handler, Multiply
from benchmarks.gpu.table import RecordingTable, real_table
from examples.workloads.call_frame import CallFrame
from mpmd.compile.llvm.cpu import host_target
from mpmd.errors import CompileError

SHAPES = ((8192, 768, 3072), (8192, 2048, 8192))  # tokens, width, inner width


@dataclasses.dataclass(frozen=True)
class EpilogueCase:
    """One product.

    Attributes:
        inputs: shapes of the arguments of both programs.
        results: shapes of the results, the workspace left out.
        step: with arguments counted first, then results; the workspace is the last.
        xla: the same mathematics.
    """

    name: str
    problem: MatmulProblem
    inputs: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    step: Callable[[int], Multiply]
    xla: Callable[..., Any]


def cases(tokens: int, width: int, inner: int) -> list[EpilogueCase]:
    """The products of one MLP."""
    import jax
    import jax.numpy as jnp

    def forward(x: Any, w: Any, b: Any) -> Any:
        h = x @ w + b
        return jax.nn.gelu(h, approximate=True), h

    def backward(dy: Any, w: Any, h: Any) -> Any:
        (dh,) = jax.vjp(lambda h: jax.nn.gelu(h, approximate=True), h)[1](dy @ w.T)
        return dh, dh.sum(0)

    b0, b1, b2, b3, b4, b5 = map(GpuBuffer, range(6))
    return [
        EpilogueCase(
            "plain", MatmulProblem(tokens, inner, width),
            ((tokens, width), (width, inner)), ((tokens, inner),),
            lambda p: Multiply(p, b0, b1, b2, workspace=b3), lambda x, w: (jnp.dot(x, w),),
        ),
        EpilogueCase(
            "bias_gelu_aux", MatmulProblem(tokens, inner, width, "gelu_aux_bias"),
            ((tokens, width), (width, inner), (inner,)), ((tokens, inner), (tokens, inner)),
            lambda p: Multiply(p, b0, b1, b3, workspace=b5, bias=b2, aux=b4), forward,
        ),
        EpilogueCase(
            "dgelu_bias_gradient", MatmulProblem(tokens, inner, width, "dgelu_bgrad", transpose_b=True),
            ((tokens, width), (inner, width), (tokens, inner)), ((tokens, inner), (inner,)),
            lambda p: Multiply(p, b0, b1, b3, workspace=b5, bias=b4, aux=b2), backward,
        ),
        EpilogueCase(
            "weight_and_bias_gradient", MatmulProblem(width, inner, tokens, "bgrada", transpose_a=True),
            ((tokens, width), (tokens, inner)), ((width, inner), (inner,)),
            lambda p: Multiply(p, b0, b1, b2, workspace=b4, bias=b3), lambda x, dh: (x.T @ dh, dh.sum(0)),
        ),
    ]  # fmt: skip


def make_handler(name: str, case: EpilogueCase) -> Handler:
    """A handler with that one product."""
    arguments, results = len(case.inputs), len(case.results) + 1
    return Handler(host_target(), name, [case.step(0)], arguments=arguments, results=results)


def measure(run: Experiment) -> None:
    """Finds it out."""
    with run.part("recorded"):
        record(run)
    if not run.gpu:
        with run.part("ahead"):
            _ahead(run)
        return
    import jax

    driver = load_driver()
    jax.devices()
    context = driver.context()
    lt = CublasLt()
    lt.create()
    for number, shape in enumerate(SHAPES):
        for case in cases(*shape):
            label = f"{case.name}_{'x'.join(map(str, shape))}"
            if run.has_time(label, 8):
                with run.part(label):
                    _on_gpu(
                        run,
                        f"cublaslt_{number}_{case.name}",
                        label,
                        case,
                        lt,
                        real_table(driver, lt.library),
                        context,
                    )


def record(run: Experiment) -> None:
    """Makes all descriptors, and records the handlers' calls."""
    try:
        lt = CublasLt()
    except CompileError as error:
        run.skip("descriptors", str(error).partition("\n")[0])
        lt = None
    for number, case in enumerate(cases(*SHAPES[0])):
        products = [Product(lt, case.problem)] if lt is not None else []
        if products:
            run.check(f"{case.name}: descriptors are made", True, f"cuBLASLt {lt.version}", COMPILED)
        recorder = RecordingTable()
        handler = make_handler(f"cublaslt_recorded_{number}", case)
        handler.bind(recorder.table, (), make_records(products))
        buffers = [0x1000 * (1 + place) for place in range(len(case.inputs) + len(case.results) + 1)]
        succeeded = CallFrame(buffers[: len(case.inputs)], buffers[len(case.inputs) :]).run(handler)
        step = case.step(0)
        attributes = [(BIAS_POINTER, step.bias), (AUX_POINTER, step.aux)]
        wanted = [(which, 0x1000 * (1 + buffer.number)) for which, buffer in attributes if buffer]
        calls = recorder.calls
        found = [call.arguments[1:3] for call in calls if call.name == "cublasLtMatmulDescSetAttribute"]
        product = calls[-1].arguments
        pointers = (product[3], product[5], product[10], product[13])
        operands = tuple(0x1000 * (1 + b.number) for b in (step.b, step.a, step.d, step.workspace) if b)
        right = succeeded and found == wanted and pointers == operands
        run.check(f"{case.name}: the call is right", right, f"{len(calls)} calls", "recorded")


def _ahead(run: Experiment) -> None:
    """What XLA makes of the same mathematics, without a GPU."""
    if why := ahead.why_not():
        run.skip("XLA's programs", why)
        return
    import jax
    import jax.numpy as jnp

    for case in cases(*SHAPES[0]):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in case.inputs]
        compiled = ahead.compile_program(case.xla, *shapes)
        count = ahead.kernel_count(compiled)
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        run.check(
            f"{case.name}: XLA compiles it",
            count > 0,
            f"{count} kernels, {temporaries} temporary bytes",
            COMPILED,
        )


def _on_gpu(
    run: Experiment, name: str, label: str, case: EpilogueCase, lt: CublasLt, table: Any, context: int
) -> None:
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import interleaved, relative_error

    product = Product(lt, case.problem)
    proposals = product.propose()
    records = make_records([product])
    handler = make_handler(name, case)
    handler.bind(table, (), records, context)
    handler.register()
    keys = jax.random.split(jax.random.key(0), len(case.inputs))
    inputs = [
        jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[-1] ** -0.25)
        for key, shape in zip(keys, case.inputs)
    ]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in case.results]
    scratch = jax.ShapeDtypeStruct((WORKSPACE,), jnp.uint8)
    ours = jax.jit(lambda *a: tuple(handler.call(*a, results=[*shapes, scratch])[: len(shapes)]))
    xla = jax.jit(case.xla)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(case.xla)(*[a.astype(jnp.float32) for a in inputs])
    errors = {
        which: [round(relative_error(a, b), 6) for a, b in zip(found, exact)]
        for which, found in (("ours", ours(*inputs)), ("xla", xla(*inputs)))
    }
    run.check(f"{label} is right", all(e < 2e-2 for e in errors["ours"]), f"relative errors {errors}")
    del exact
    each = []
    for algorithm in range(proposals):
        product.write(records, 0, algorithm)
        each.append(interleaved({"": lambda: ours(*inputs)}, rounds=2, seconds=0.01)[""].median)
    best = each.index(min(each))
    product.write(records, 0, 0)
    times = interleaved({"ours": lambda: ours(*inputs), "xla": lambda: xla(*inputs)}, rounds=5, seconds=0.03)
    product.write(records, 0, best)
    times["ours_best"] = interleaved({"": lambda: ours(*inputs)}, rounds=5, seconds=0.03)[""]
    for which, found in times.items():
        run.figure(f"{label}.{which}", found.figures())
        run.figure(f"{label}.{which}_flops_per_s", case.problem.flops / found.median, "FLOP/s")
    run.figure(f"{label}.proposals_us", [round(1e6 * seconds, 2) for seconds in each])
    run.figure(f"{label}.first_choice", each[0] / each[best])
    run.figure(f"{label}.speed", times["xla"].median / times["ours"].median)
    run.figure(f"{label}.errors", errors)


if __name__ == "__main__":
    run_experiment("cublaslt_epilogues", __doc__, measure)
