"""What each specialised mechanism of the CPU code generator is worth: fragments with and without it.

A switch turns one mechanism off by replacing the function that decides about it.  Each fragment is compiled
as it is and once per switch.  Where the LLVM IR is the same, the mechanism has no part in the fragment, and
nothing is measured.  Else both programs run in turns on the same arrays in one process, on one thread, in
many short rounds: other load disturbs both alike, and what counts is the geometric mean of two figures, the
median of the ratios of neighbouring rounds and the ratio of the fastest rounds.

    python benchmarks/ablation.py [--switches="prefetch|rows"] [--only=block] [--sizes=gpt2,small,large]
                                  [--dtypes=f32,bf16] [--list]

One line per switch and fragment: time without the mechanism over time with it.  The last line is one JSON
object: per switch the geometric mean over the fragments of `fragments.py`, the one that it helps most, and
the one of the large ones, which do not decide.  `docs/decisions/ablation.md` has the results.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, and imported by tests

from benchmarks import script
from benchmarks.fragment_speed import KEEP_HEAP, SIZES, as_fragment

NATIVE = "mpmd.compile.backends.native_cpu"
ROUND = 2e-3
"""Seconds of one round of calls."""
MIN_ROUNDS, MIN_SECONDS = 11, 0.6
"""Rounds of each program, and seconds that both take together."""


@dataclasses.dataclass(frozen=True)
class Off:
    """A function that is replaced.

    Attributes:
        place: module below the native backend and attribute, `emit.kernels:strided_dim`.
        value: what is in its place.
    """

    place: str
    value: Any

    def patch(self) -> Any:
        """The replacement as a context manager."""
        module, path = self.place.split(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(f".{module}", NATIVE)
        for part in owners:
            owner = getattr(owner, part)
        return mock.patch.object(owner, name, self.value)


def returns(value: Any) -> Callable[..., Any]:
    """A function that ignores its arguments."""
    return lambda *_, **__: value


def gives(value: Any) -> property:
    """A property with the same value everywhere."""
    return property(lambda self: value)


SWITCHES: dict[str, Sequence[Off]] = {
    # -- prefetching
    "prefetch: all": [Off("..llvm.function_builder:FunctionBuilder.prefetch", returns(None))],
    "prefetch: operands of products": [
        Off("gemm.operands:Operands._fetch_strip", returns(None)),
        Off("gemm.operands:Operands._fetch_rows", returns(None)),
        Off("gemm.micro_kernel:Fetching.line", lambda self, state: state),
    ],
    # -- rows and sums over rows
    "scratch rows": [Off("kernels.row:_worth_keeping", returns(False))],
    "column strips": [Off("kernels.plan_kernels:_sums_in_strips", returns(False))],
    # -- loops
    "non-temporal stores": [Off("kernels.plan_kernels:streamed_operands", returns(frozenset()))],
    "several vectors at once": [
        Off(f"kernels.{m}:vectors_at_once", returns(1)) for m in ("loop", "row", "scatter")
    ],
    # -- transposes
    "transposes": [Off("kernels.plan_kernels:strided_dim", returns(None))],
    "transposes: rows of tiles from registers": [Off("kernels.tiles:TileKernel._in_registers", gives(False))],
    "transposes: rows of tiles from the stack": [Off("kernels.tiles:TileKernel._in_registers", gives(True))],
    "transposes: tiles in a row": [Off("kernels.tiles:TileKernel._in_a_row", gives(1))],
    # -- sorting
    "selection of first elements": [Off("kernels.plan_kernels:_MIN_SELECTED", 1 << 40)],
    # -- products
    "thin products": [
        Off("gemm.gemm_kernel:thin_form", returns(None)),
        Off("steps:as_reduction", returns(None)),
    ],
    "thin products as reductions": [Off("steps:as_reduction", returns(None))],
    "thin products by dots": [Off("gemm.gemm_kernel:thin_form", returns(None))],
    "packing of several strips": [Off("gemm.packing:Pack.many_strips", returns(False))],
    "products in parts of rows": [Off("gemm.tiling:_part_rows", returns(0))],
    "factors read in place": [
        Off("gemm.tiling:_may_read_a", returns(False)),
        Off("gemm.tiling:_may_read_b", returns(False)),
    ],
    "packing of A that collides": [Off("gemm.tiling:_collide", returns(False))],
}


def large_cases(dtype: str) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Arrays beyond the last cache: not among the fragments that decide, but what some mechanisms are for."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from examples.workloads.fragments import norm

    kind = {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return np.asarray(rng.standard_normal(shape, np.float32), kind)

    x, scale, shift = normal(16384, 1024), normal(1024), normal(1024)
    table, tokens = normal(32768, 768), rng.integers(0, 32768, 4096).astype(np.int32)
    square, rows = normal(4096, 4608), normal(4096, 768)

    def grad_norm(x: Any, scale: Any, shift: Any, g: Any) -> Any:
        return jax.vjp(norm, x, scale, shift)[1](g)

    return [
        ("norm", norm, [x, scale, shift]),
        ("norm backward", grad_norm, [x, scale, shift, x]),
        ("sums over rows", lambda x: x.sum(0), [x]),
        ("square sum", lambda x: (x.astype(jnp.float32) ** 2).sum(), [x]),
        ("softmax", jax.nn.softmax, [x]),
        ("residual", lambda x, y: x + y, [x, x[::-1].copy()]),
        ("transpose", lambda x: x.T, [square]),
        ("gather", lambda e, i: e[i], [table, tokens]),
        ("scatter", lambda e, i, g: e.at[i].add(g), [table, tokens, rows]),
        ("top-k", lambda x: jax.lax.top_k(x, 40), [normal(16, 32768)]),
        ("vector product", lambda a, b: a @ b, [square, normal(4608)]),
        ("vector product transposed", lambda a, b: b @ a, [square, normal(4096)]),
        ("heads", lambda x: x.reshape(4, 1024, 12, 64).transpose(0, 2, 1, 3), [rows]),
    ]


@contextlib.contextmanager
def without(switch: str) -> Iterator[None]:
    """Compiles meanwhile without a mechanism; functions that programs share are compiled anew."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(Off("shared:_LOADED", {}).patch())
        for off in SWITCHES[switch] if switch else ():
            stack.enter_context(off.patch())
        yield


def code_of(fragment: Any, switch: str) -> str:
    """The LLVM IR of a fragment without a mechanism, with the functions that it shares with others."""
    from mpmd.compile.backends.native_cpu.target import NativeCpu
    from mpmd.compile.driver import prepare_fragment
    from mpmd.compile.llvm.cpu import host_target
    from mpmd.compile.llvm.function_builder import Module

    with without(switch):
        module = Module(host_target())
        for shared in prepare_fragment(fragment, NativeCpu()).program.threaded.emit(module):
            shared.emit(module)
        return module.text()


def compiled(fragment: Any, switch: str) -> Any:
    """The executable without a mechanism, with memory of its own."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend

    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    named = dataclasses.replace(fragment, mesh="".join(c if c.isalnum() else "_" for c in switch) or "mesh")
    with without(switch):
        return NativeCpuBackend().compile(named, mesh)


def ratio(base: Callable[[], Any], other: Callable[[], Any]) -> float:
    """Time of the other over time of the base: the median over pairs of rounds."""
    base(), other()
    start = time.perf_counter()
    base()
    repeat = max(1, min(200, int(ROUND / (time.perf_counter() - start))))

    def spent(run: Callable[[], Any]) -> float:
        begin = time.process_time()
        for _ in range(repeat):
            run()
        return time.process_time() - begin

    found: list[tuple[float, float]] = []
    end = time.perf_counter() + MIN_SECONDS
    while len(found) < MIN_ROUNDS or time.perf_counter() < end:
        first, second = (base, other) if len(found) % 2 else (other, base)
        times = {first: spent(first)}
        times[second] = spent(second)
        found.append((times[base], times[other]))
    medians = statistics.median(o / b for b, o in found)
    minima = min(o for _, o in found) / min(b for b, _ in found)
    return math.sqrt(medians * minima)


def measure(
    name: str, function: Callable[..., Any], arrays: list[Any], switches: list[str], timed: bool
) -> dict[str, float]:
    """Per switch that changes the code of a fragment: time without the mechanism over time with it."""
    import jax

    from mpmd.errors import CompileError

    jitted = jax.jit(lambda *given: jax.tree.leaves(function(*given)), keep_unused=True)
    fragment = as_fragment(jitted.lower(*arrays), arrays)
    given = [jax.device_put(a) for a in arrays]
    text = code_of(fragment, "")
    base = compiled(fragment, "") if timed else None

    def call(program: Any) -> Any:
        return jax.block_until_ready(program(*given))

    found = {}
    for switch in switches:
        try:
            if code_of(fragment, switch) == text:
                continue
            if not timed:
                found[switch] = math.nan
                print(json.dumps([switch, name]), flush=True)
                continue
            other = compiled(fragment, switch)
        except (CompileError, AssertionError) as error:
            print(f"{switch}: {name}: {error!r}", file=sys.stderr)
            continue
        found[switch] = ratio(functools.partial(call, base), functools.partial(call, other))
        print(json.dumps([switch, name, round(found[switch], 3)]), flush=True)
    return found


def summary(found: dict[str, dict[str, float]], switches: list[str]) -> dict[str, Any]:
    """Per switch the geometric mean over the fragments that decide, and the largest ratios."""
    rows = {}
    deciding = [name for name in found if not name.startswith("large")]
    for switch in switches:
        ratios = {name: found[name].get(switch, 1.0) for name in found}
        logs = [math.log(ratios[name]) for name in deciding]
        most = max(deciding, key=lambda name: ratios[name], default="")
        large = max((n for n in ratios if n not in deciding), key=lambda name: ratios[name], default="")
        rows[switch] = {
            "geomean": round(math.exp(sum(logs) / max(1, len(logs))), 4),
            "changed": sum(switch in found[name] for name in deciding),
            "most": [most, round(ratios.get(most, 1.0), 3)],
            "large": [large, round(ratios.get(large, 1.0), 3)],
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--switches", default="", help="part of the names of the switches")
    parser.add_argument("--only", default="", help="part of the names of the fragments")
    parser.add_argument("--sizes", default="gpt2,small")
    parser.add_argument(
        "--list", action="store_true", help="only report which fragments a mechanism is part of"
    )
    parser.add_argument("--dtypes", default="f32,bf16")
    options = parser.parse_args()
    if any(name not in os.environ for name in KEEP_HEAP):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_HEAP})
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    from examples.workloads.fragments import cases

    switches = [s for s in SWITCHES if any(part in s for part in options.switches.split("|"))]
    found: dict[str, dict[str, float]] = {}
    for size in options.sizes.split(","):
        for dtype in options.dtypes.split(","):
            chosen = large_cases(dtype) if size == "large" else cases(SIZES[size], dtype)
            for name, function, arrays in chosen:
                label = f"{size} {name} {dtype}"
                if any(part in label for part in options.only.split("|")):
                    found[label] = measure(label, function, arrays, switches, not options.list)
                    print(json.dumps([label, "done"]), flush=True)
    if not options.list:
        print(json.dumps(summary(found, switches)))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    script.run(main)
