"""What fragments are on a GPU, without one: launches, kernels, registers, spills, temporaries, modelled time.

    python -m benchmarks.gpu.launch_table --gpu H200 --only "block forward+backward" --capabilities 80 90 100

Fragments of GPT-2 124M's size in bf16 go through the GPU target; each distinct kernel is compiled for each
capability by Triton and its ptxas.  A line per kernel with `--kernels`; the last line is JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import time

from benchmarks.fragments import cases
from benchmarks.gpu.kernel_facts import KernelFacts, kernel_facts
from benchmarks.gpu.target import fragment_of
from benchmarks.script import run
from mpmd.compile.backends.native_gpu.devices import GPUS
from mpmd.compile.backends.native_gpu.launches import KernelLaunch, ProductLaunch
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.compiler import TritonCompiler
from mpmd.compile.compilation import Prepared
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.thunks.costs import fragment_costs

SIZE = {"batch": 8, "tokens": 1024, "width": 768, "heads": 12, "vocabulary": 50257}


def figures(made: Prepared, facts: list[KernelFacts]) -> dict[str, float]:
    """The figures of one program."""
    steps = list(made.program.launches())
    kinds = collections.Counter(type(step).__name__ for step in steps)
    costs = fragment_costs(made.thunks, made.module, made.target.device)
    return {
        "launches": len(steps),
        "products": kinds[ProductLaunch.__name__],
        "kernels": len(made.program.kernels),
        "kernel_launches": kinds[KernelLaunch.__name__],
        "cubins": len(facts),
        "spilling_kernels": sum(fact.spilled_bytes > 0 for fact in facts),
        "max_registers": max((fact.registers for fact in facts), default=0),
        "temp_bytes": made.program.arena_bytes,
        "modelled_ms": round(1e3 * sum(kernel.seconds for kernel in costs.kernels), 3),
        "prepare_s": round(sum(made.seconds.values()), 2),
    }


def main() -> None:
    """Prints the table."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--gpu", choices=GPUS, default="H200", help="what kernels are priced for")
    parser.add_argument("--only", nargs="*", help="names of fragments; all by default")
    parser.add_argument("--capabilities", nargs="*", type=int, default=[], help="compile for these: 80 90")
    parser.add_argument("--kernels", action="store_true", help="a line for each kernel")
    for name, number in SIZE.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    given = parser.parse_args()
    size = {name: getattr(given, name) for name in SIZE}
    table = {}
    for name, function, arguments in cases(size, "bf16"):
        if given.only and name not in given.only:
            continue
        made = prepare_fragment(fragment_of(name, function, arguments), GpuTarget(GPUS[given.gpu]))
        facts = []
        started = time.perf_counter()
        for capability in given.capabilities:
            facts += map(kernel_facts, TritonCompiler().compile(made.program.kernels, capability).values())
        compile_s = time.perf_counter() - started
        for fact in facts if given.kernels else ():
            print(f"{name}: {fact}", flush=True)
        table[name] = {**figures(made, facts), "compile_s": round(compile_s, 2)}
        print(f"{name}: {table[name]}", flush=True)
    print(json.dumps({"gpu": given.gpu, "size": size, "fragments": table}))


if __name__ == "__main__":
    run(main)
