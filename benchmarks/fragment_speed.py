"""How fast whole fragments are: our native code against XLA:CPU on the same StableHLO, threads and arrays.

`fragments.py` holds the fragments.  Both sides are called through JAX with the same arguments, one after the
other in every round, and the best round of each counts: CPU time on one thread, wall time on several.  Rounds
are short, and go on for a second at least: neighbours on the machine disturb many of them.
glibc keeps its heap, so that page faults are not measured.

    python benchmarks/fragment_speed.py [--threads=1,2] [--rounds=7] [--only=block] [--sizes=gpt2,small]

One line per fragment: milliseconds of ours and of XLA's, speed of ours over XLA's, XLA's compile time over
ours, bytes of temporaries.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, and imported by others

from benchmarks import script

KEEP_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
ROUND, ENOUGH = 5e-3, 1.0  # seconds of a round of calls, and for how long rounds go on at least
SIZES = {
    "gpt2": {"batch": 2, "tokens": 512, "width": 768, "heads": 12, "vocabulary": 8192},
    "small": {"batch": 4, "tokens": 64, "width": 128, "heads": 4, "vocabulary": 512},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="part of the names of the fragments to run")
    parser.add_argument("--sizes", default="gpt2,small")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are compared from version to version."""

    def geomean(chosen: list[dict[str, Any]]) -> float | None:
        if not chosen:
            return None
        return round(math.exp(sum(math.log(r["speed"]) for r in chosen) / len(chosen)), 3)

    def of(dtype: str, name: str = "") -> float | None:
        return geomean([r for r in rows if r["dtype"] == dtype and name in r["name"]])

    def milliseconds(side: str) -> dict[str, float]:
        blocks = [r for r in rows if r["name"] == "gpt2 block forward+backward"]
        return {r["dtype"]: round(r[side], 2) for r in blocks}

    worst = min(rows, key=lambda r: r["speed"], default=None)
    return {
        "fragments": len({r["name"] for r in rows}),
        "geomean_f32": of("f32"),
        "geomean_bf16": of("bf16"),
        "block_f32": of("f32", "block forward+backward"),
        "block_bf16": of("bf16", "block forward+backward"),
        "block_native_ms": milliseconds("native"),
        "block_xla_ms": milliseconds("xla"),
        "worst": worst and [worst["name"], worst["dtype"], worst["threads"], worst["speed"]],
        "compile": geomean([{"speed": r["compile"]} for r in rows]),
        "fallbacks": sum(r["fallback"] for r in rows),
    }


def main() -> None:
    options = arguments()
    if options.child:
        run_cases(options)
        return
    rows: list[dict[str, Any]] = []
    for threads in options.threads.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], f"--child={threads}"]
        with subprocess.Popen(
            command, env={**os.environ, **KEEP_HEAP}, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                rows.append(json.loads(line))
                print(text_of(rows[-1]), flush=True)
        if child.returncode:
            sys.exit(child.returncode)
    print(json.dumps(summary(rows)))


def text_of(row: dict[str, Any]) -> str:
    return (
        f"{row['name']:38} {row['dtype']:5} {row['threads']} threads  {row['native']:9.3f} ms  "
        f"XLA {row['xla']:9.3f} ms  {row['speed']:5.2f}x  compile {row['compile']:5.2f}x  "
        f"temporaries {row['temporaries']}/{row['xla_temporaries']}"
        + ("  FALLBACK" if row["fallback"] else "")
    )


# -- one process per number of threads
def run_cases(options: argparse.Namespace) -> None:
    threads = options.child
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax  # only now: its threads are counted by the affinity

    from examples.workloads.fragments import cases
    from mpmd.errors import CompileError

    for size in options.sizes.split(","):
        for dtype in options.dtypes.split(","):
            for name, function, arrays in cases(SIZES[size], dtype):
                label = f"{size} {name}"
                if options.only in label:
                    try:
                        row = compare(function, arrays, threads, options.rounds)
                    except CompileError as error:
                        print(f"{label}: {error}", file=sys.stderr)
                        row = {"native": 1.0, "xla": 1.0, "compile": 1.0, "temporaries": 0,
                               "xla_temporaries": 0, "fallback": 1}  # fmt: skip
                    row |= {"name": label, "dtype": dtype, "threads": threads}
                    row["speed"] = row["xla"] / row["native"]
                    print(json.dumps(row), flush=True)
    jax.clear_caches()


def as_fragment(lowered: Any, arrays: list[Any]) -> Any:
    """What JAX lowered, as a fragment of a mesh of one device."""
    import jax

    from mpmd.compile.fragment import FragmentModule, ValueSpec

    kinds = {"float32": "f32", "bfloat16": "bf16", "int32": "i32"}

    def spec(value: Any) -> ValueSpec:
        return ValueSpec(tuple(value.shape), kinds[str(value.dtype)], ((),) * len(value.shape))

    results = tuple(spec(r) for r in jax.tree.leaves(lowered.out_info))
    return FragmentModule("fragment", "mesh", lowered.as_text(), tuple(map(spec, arrays)), results)


def compare(function: Callable[..., Any], arrays: list[Any], threads: int, rounds: int) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend

    jitted = jax.jit(lambda *given: jax.tree.leaves(function(*given)))  # a list, as a fragment returns
    lowered = jitted.lower(*arrays)
    fragment = as_fragment(lowered, arrays)
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    start = time.process_time()
    native = NativeCpuBackend(threads=threads).compile(fragment, mesh)
    middle = time.process_time()
    xla = lowered.compile()
    compile_ratio = (time.process_time() - middle) / (middle - start)
    given = [jax.device_put(a) for a in arrays]
    jax.block_until_ready(jitted(*given))  # compiled once more, for the shortest call that JAX has
    clock = time.process_time if threads == 1 else time.perf_counter
    best = {"native": math.inf, "xla": math.inf}
    number, end = 0, time.perf_counter() + ENOUGH
    while number < rounds or time.perf_counter() < end:
        number += 1
        for name, run in (("native", native), ("xla", jitted)):
            repeat = max(1, min(100, int(ROUND / best[name])))
            begin = clock()
            for _ in range(repeat):
                jax.block_until_ready(run(*given))
            best[name] = min(best[name], (clock() - begin) / repeat)
    memory = xla.memory_analysis()
    return {
        "native": best["native"] * 1e3,
        "xla": best["xla"] * 1e3,
        "compile": compile_ratio,
        "temporaries": native.memory_analysis().temporaries,
        "xla_temporaries": memory.temp_size_in_bytes,
        "fallback": 0,
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
    script.run(main)
