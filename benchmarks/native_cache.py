"""What the cache on disk saves: every fragment of `fragments.py` compiled, then taken from a cache.

Each fragment is compiled in one process, with an empty folder, and then again in other processes with the
same folder, so that nothing but the folder can help.  The second time counts all that a run pays before the
fragment can be called: reading its text, its key, the entry, loading the code, and the call inside of JAX.

    python benchmarks/native_cache.py [--sizes=small,gpt2] [--dtypes=f32] [--only=block] [--repeats=3]

One line per fragment: milliseconds of both, and as `program` where only the canonical fingerprint found it.
The last line is one JSON object with the worst and the mean of the second times, in milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import script
from fragment_speed import SIZES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="small")
    parser.add_argument("--dtypes", default="f32")
    parser.add_argument("--only", default="", help="part of the names of the fragments")
    parser.add_argument("--repeats", type=int, default=3, help="processes that find a full cache")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--renamed", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.child:
        compile_all(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        cold = in_a_process(folder)
        warm = [in_a_process(folder) for _ in range(options.repeats)]
        renamed = [in_a_process(folder, f"--renamed=given{k}") for k in range(options.repeats)]
        held = sum(path.stat().st_size for path in Path(folder).iterdir())
    best = {name: min(run[name] for run in warm) for name in cold}
    program = {name: min(run[name] for run in renamed) for name in cold}
    for name in cold:
        print(
            f"{name:44} compiled {cold[name] * 1e3:8.1f} ms  kept {best[name] * 1e3:6.1f} ms  "
            f"program {program[name] * 1e3:6.1f} ms"
        )
    print(
        json.dumps(
            {
                "worst_ms": round(max(best.values()) * 1e3, 1),
                "mean_ms": round(sum(best.values()) / len(best) * 1e3, 1),
                "worst_by_program_ms": round(max(program.values()) * 1e3, 1),
                "compile_mean_ms": round(sum(cold.values()) / len(cold) * 1e3, 1),
                "fragments": len(cold),
                "bytes": held,
            }
        )
    )


def in_a_process(folder: str, *more: str) -> dict[str, float]:
    """Seconds per fragment in a fresh process that uses the folder."""
    command = [sys.executable, __file__, *sys.argv[1:], f"--child={folder}", *more]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_all(options: argparse.Namespace) -> None:
    import jax
    import numpy as np
    from fragment_speed import as_fragment
    from jax.sharding import Mesh

    from examples.workloads.fragments import cases
    from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
    from mpmd.compile.cache import DiskCache, compiler_version
    from mpmd.compile.options import CompileOptions

    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    jax.jit(lambda x: x + 1)(np.ones(3, np.float32))  # work that JAX does once per process is not measured
    compiler_version()
    backend = NativeCpuBackend(options=CompileOptions(cache=DiskCache(Path(options.child))))
    seconds = {}
    for size in options.sizes.split(","):
        for dtype in options.dtypes.split(","):
            for name, function, arrays in cases(SIZES[size], dtype):
                label = f"{size} {name} {dtype}"
                if options.only not in label:
                    continue
                fragment: Any = as_fragment(jax.jit(function).lower(*arrays), arrays)
                if options.renamed:  # another text, the same program
                    text = fragment.text.replace("%arg", f"%{options.renamed}")
                    fragment = type(fragment)(**{**vars(fragment), "text": text})
                gc.collect()  # what tracing and earlier fragments left is not charged to this one
                start = time.perf_counter()
                backend.compile(fragment, mesh)
                seconds[label] = time.perf_counter() - start
    print(json.dumps(seconds))


if __name__ == "__main__":
    script.run(main)
