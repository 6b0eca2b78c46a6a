"""Does XLA capture our call in a CUDA graph, and what does that gain over a native loop of launches?

Method: one custom call that launches 60 small kernels, registered without and with the trait that allows
capture, the latter compiled with a least graph size of 1; XLA's own program for the same chain, with and
without graphs.  The handler counts its calls: a replayed graph does not call it.  Then the addresses change
between runs.

What the answer means: `captured` says whether XLA replays our launches; `us_per_launch` of each variant, less
the kernel's own time, is the cost of a launch; `right after addresses change` must hold, or the trait must
not be set. Without a GPU the 60 launches are recorded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu import ahead
from benchmarks.gpu.driver import load_driver
from benchmarks.gpu.experiment import COMPILED, Experiment, run_experiment
from benchmarks.gpu.frame import CallFrame
from benchmarks.gpu.handler import COMMAND_BUFFER, GpuBuffer, Handler, Launch, Scalar
from benchmarks.gpu.kernels import BLOCK, scale_add
from benchmarks.gpu.table import RecordingTable, real_table
from mpmd.compile.llvm.target import host_target

LAUNCHES, COUNT, ALPHA = 60, 1 << 14, 0.5
GRAPHS = {"xla_gpu_graph_min_graph_size": 1}
NAMED = {**GRAPHS, "xla_gpu_enable_command_buffer": "CUSTOM_CALL"}
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 20}

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "loop": (0, {}),
    "graph": (COMMAND_BUFFER, GRAPHS),
    "graph_of_custom_calls": (COMMAND_BUFFER, NAMED),
    "trait_without_graphs": (COMMAND_BUFFER, NO_GRAPHS),
}


def chain() -> list[Launch]:
    """Y -> alpha * x + y, again and again in one result: x, y; out."""
    steps = []
    for number in range(LAUNCHES):
        source = GpuBuffer(1) if number == 0 else GpuBuffer(2)
        values = (GpuBuffer(0), source, GpuBuffer(2), Scalar("i32", COUNT), Scalar("float", ALPHA))
        steps.append(Launch(0, (COUNT // (4 * BLOCK), 1, 1), BLOCK, values))
    return steps


def make_handler(name: str, traits: int) -> Handler:
    """A handler that launches the chain."""
    return Handler(host_target(), name, chain(), arguments=2, results=1, traits=traits)


def measure(run: Experiment) -> None:
    """Finds it out."""
    with run.part("recorded"):
        record(run)
    with run.part("captured"):
        if run.gpu:
            _on_gpu(run)
        else:
            _ahead(run)


def record(run: Experiment) -> None:
    """Calls a handler without a GPU."""
    handler, recorder = make_handler("chain_recorded", COMMAND_BUFFER), RecordingTable()
    handler.bind(recorder.table, [0xA0])
    frame = CallFrame([0x1000, 0x2000], [0x3000])
    traits = frame.metadata(handler)[2]
    run.check("the trait is answered", traits == COMMAND_BUFFER, str(traits), "recorded")
    launched = frame.run(handler) and len(recorder.calls) == LAUNCHES + 1
    run.check("all launches are made", launched, f"{len(recorder.calls)} calls", "recorded")


def plain(x: Any, y: Any) -> Any:
    """The same chain, each step a kernel of XLA's."""
    import jax
    import jax.numpy as jnp

    for _ in range(LAUNCHES):
        y = jax.lax.optimization_barrier(jnp.float32(ALPHA) * x + y)
    return y


def _ahead(run: Experiment) -> None:
    """XLA's CUDA platform takes the handlers and the options."""
    if why := ahead.why_not():
        run.skip("XLA compiles all variants", why)
        return
    import jax

    shape = jax.ShapeDtypeStruct((COUNT,), np.float32)
    for name, (traits, options) in VARIANTS.items():
        handler = make_handler(f"chain_ahead_{name}", traits)
        handler.register()
        compiled = ahead.compile_program(
            lambda x, y, handler=handler: handler.call(x, y, results=[shape])[0],
            shape,
            shape,
            options=options,
        )
        called = f'custom_call_target="{handler.name}"' in compiled.as_text()
        run.check(f"{name}: XLA compiles it", called, str(options), COMPILED)
    kernels = ahead.kernel_count(ahead.compile_program(plain, shape, shape))
    run.check("XLA's own chain has a kernel per step", kernels == LAUNCHES, f"{kernels} kernels", COMPILED)


def _on_gpu(run: Experiment) -> None:
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import interleaved

    driver = load_driver()
    jax.devices()
    context, table = driver.context(), real_table(driver)
    code = scale_add(driver.facts().arch)
    kernels = driver.kernels(code.image, ["scale_add"])
    x, y = jax.random.normal(jax.random.key(0), (2, COUNT), jnp.float32)
    shape = jax.ShapeDtypeStruct((COUNT,), jnp.float32)
    compiled: dict[str, Any] = {}
    handlers = {}
    for name, (traits, options) in VARIANTS.items():
        with run.part(f"compile {name}"):
            handler = handlers[name] = make_handler(f"chain_{name}", traits)
            handler.bind(table, kernels, context=context)
            handler.register()
            jitted = jax.jit(lambda x, y, handler=handler: handler.call(x, y, results=[shape])[0])
            compiled[name] = jitted.lower(x, y).compile(compiler_options=options or None)

    for name, options in (("xla", {}), ("xla_without_graphs", NO_GRAPHS)):
        with run.part(f"compile {name}"):
            compiled[name] = jax.jit(plain).lower(x, y).compile(compiler_options=options or None)
    wanted = np.asarray(jax.jit(plain)(x, y))
    for name in list(compiled):
        with run.part(f"run {name}"):
            right = bool(np.allclose(np.asarray(compiled[name](x, y)), wanted, rtol=1e-4, atol=1e-4))
            if not run.check(f"{name} is right", right):
                del compiled[name]
    for name, handler in handlers.items():
        if name in compiled:
            before = handler.calls
            for _ in range(50):
                out = compiled[name](x, y)
            jax.block_until_ready(out)
            run.figure(f"handler_calls_in_50_runs.{name}", handler.calls - before)
            run.figure(f"captured.{name}", handler.calls - before < 50)
    for name in ("graph", "graph_of_custom_calls"):
        if name in compiled:
            with run.part(f"addresses change, {name}"):
                _addresses_change(run, name, compiled[name], handlers[name])
    times = interleaved({name: (lambda f=f: f(x, y)) for name, f in compiled.items()})
    for name, found in times.items():
        run.figure(f"times.{name}", found.figures())
        run.figure(f"us_per_launch.{name}", 1e6 * found.median / LAUNCHES, "us")


def _addresses_change(run: Experiment, name: str, call: Any, handler: Handler) -> None:
    """Runs on other arrays each time, all kept alive, so that no address comes again."""
    import jax
    import jax.numpy as jnp

    kept, before, worst = [], handler.calls, 0.0
    for seed in range(10):
        x, y = jax.random.normal(jax.random.key(seed + 1), (2, COUNT), jnp.float32)
        out = call(x, y)
        worst = max(worst, float(jnp.abs(out - jax.jit(plain)(x, y)).max()))
        kept.append((x, y, out))
    run.figure(f"handler_calls_in_10_runs_with_other_addresses.{name}", handler.calls - before)
    run.check(f"{name}: right after addresses change", worst < 1e-3, f"largest difference {worst:.1e}")


if __name__ == "__main__":
    run_experiment("command_buffer", __doc__, measure)
