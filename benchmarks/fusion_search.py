"""Groups by pairs or by patterns: what the searches of `hlo-fusion` give on the fragments of `fragments.py`.

    python benchmarks/fusion_search.py [--only=block] [--sizes=small] [--dtypes=f32] [--skip-runs]

For each fragment, greedy / beam: CPU seconds of the pass, kernels, their projected milliseconds, and measured
milliseconds, both executables called one after the other in every round, the best round of each.  The last
line is one JSON object with the geometric means of greedy over beam.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import jax
import numpy as np
import script
from fragment_speed import SIZES, as_fragment
from fragments import cases
from jax.sharding import Mesh

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.compilation import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.options import CompileOptions
from mpmd.compile.thunks.costs import fragment_costs

SEARCHES = ("greedy", "beam")


def modelled(fragment: Any, options: CompileOptions) -> dict[str, float]:
    """What the models say of a fragment compiled so, and what its fusion took."""
    start = time.process_time()
    made = prepare_fragment(fragment, NativeCpu(), options)
    compiled = time.process_time() - start
    costs = fragment_costs(made.thunks, made.module)
    pass_seconds = sum(s for name, s in made.seconds.items() if name.startswith("hlo-fusion"))
    kernels = sum(k.times for k in costs.kernels)
    return {"pass": pass_seconds, "compile": compiled, "kernels": kernels, "modelled": costs.all_seconds}


def measured(executables: list[Any], arrays: list[Any], rounds: int) -> list[float]:
    """The best CPU seconds of each executable."""
    given = [jax.device_put(a) for a in arrays]
    best = [math.inf] * len(executables)
    for _ in range(rounds):
        for number, run in enumerate(executables):
            repeat = max(1, min(100, int(0.02 / best[number])))
            begin = time.process_time()
            for _ in range(repeat):
                jax.block_until_ready(run(*given))
            best[number] = min(best[number], (time.process_time() - begin) / repeat)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--sizes", default="small")
    parser.add_argument("--dtypes", default="f32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-runs", action="store_true", help="only what the models say")
    given = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    rows = []
    for size in given.sizes.split(","):
        for dtype in given.dtypes.split(","):
            for name, function, arrays in cases(SIZES[size], dtype):
                if given.only not in f"{size} {name}":
                    continue
                fragment = as_fragment(jax.jit(function).lower(*arrays), arrays)
                ways = [CompileOptions(pass_options=(f"hlo-fusion{{search={s}}}",)) for s in SEARCHES]
                found = [modelled(fragment, way) for way in ways]
                if not given.skip_runs:
                    made = [NativeCpuBackend(options=way).compile(fragment, mesh) for way in ways]
                    for row, seconds in zip(found, measured(made, arrays, given.rounds)):
                        row["measured"] = seconds
                rows.append({"name": f"{size} {name} {dtype}", **dict(zip(SEARCHES, found))})
                print(_line(rows[-1]), flush=True)
    print(json.dumps(_summary(rows)))


def _line(row: dict[str, Any]) -> str:
    def pair(key: str, scale: float, digits: int) -> str:
        return " / ".join(f"{row[s].get(key, math.nan) * scale:.{digits}f}" for s in SEARCHES)

    return (
        f"{row['name']:36} pass {pair('pass', 1, 3)} s  kernels {pair('kernels', 1, 0)}  "
        f"modelled {pair('modelled', 1e3, 4)} ms  measured {pair('measured', 1e3, 4)} ms"
    )


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for key in ("pass", "compile", "modelled", "measured"):
        ratios = [r["greedy"][key] / r["beam"][key] for r in rows if key in r["greedy"] and r["beam"][key]]
        if ratios:
            found[key] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)
    return found


if __name__ == "__main__":
    script.run(main)
