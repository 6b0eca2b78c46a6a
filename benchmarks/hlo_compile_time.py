"""How long does the native compiler take for large fragments, without machine code, and how does that grow?

    python benchmarks/hlo_compile_time.py [--blocks=1,2,4,8,14] [--repeats=3] [--size=small] [--dtype=f32]

Each fragment is so many transformer blocks of `fragments.py`, forward and backward: from StableHLO to thunks
with addresses, everything but LLVM.  The best of the repeats counts.  One line per fragment: instructions as
lowered, CPU seconds in all and per room.  The last line is one JSON object: `seconds` for the largest
fragment, `per_5000` scaled to 5,000 instructions, the `exponent` of the fit of seconds over instructions,
and all rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import script

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent)]

ROOMS = {
    "lowering": ("lowering",),
    "passes": ("passes",),
    "stitching": ("hlo-attention-stitching",),
    "fusion": ("hlo-fusion",),
    "planning": ("kernels",),
    "schedule": ("schedule",),
    "buffers": ("buffers",),
    "thunks": ("thunks", "steps"),
}
"""Room → the phases of a compilation that are its own; stitching and fusion are passes."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", default="1,2,4,8,14")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", default="small")
    parser.add_argument("--dtype", default="f32")
    return parser.parse_args()


def several(layer: Callable[..., Any], blocks: int, each: int, x: Any, *weights: Any) -> Any:
    """Blocks one after the other, each with its own weights."""
    for block in range(blocks):
        x = layer(x, *weights[block * each : (block + 1) * each])
    return x


def fragment_of(blocks: int, size: str, dtype: str) -> Any:
    """The fragment of so many blocks, forward and backward."""
    import jax
    from fragment_speed import SIZES, as_fragment

    from examples.workloads.fragments import block, cases, gradients

    arrays = next(a for name, _, a in cases(SIZES[size], dtype) if name == "block forward+backward")
    x, *weights, cotangent = arrays
    layer = functools.partial(block, SIZES[size]["heads"])
    given = [x, *weights * blocks]
    function = gradients(functools.partial(several, layer, blocks, len(weights)), len(given))
    return as_fragment(jax.jit(function).lower(*given, cotangent), [*given, cotangent])


def measure(blocks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    from mpmd.compile.backends.native_cpu.target import NativeCpu
    from mpmd.compile.driver import lowered, prepare_fragment

    fragment = fragment_of(blocks, options.size, options.dtype)
    best: dict[str, Any] = {}
    for _ in range(options.repeats):
        start = time.process_time()
        made = prepare_fragment(fragment, NativeCpu())
        seconds = time.process_time() - start
        if not best or seconds < best["seconds"]:
            rooms = {r: sum(made.seconds.get(p, 0.0) for p in phases) for r, phases in ROOMS.items()}
            rooms["passes"] -= rooms["stitching"] + rooms["fusion"]
            best = {"seconds": seconds, "rooms": rooms}
    instructions = sum(len(c) for c in lowered(fragment).call_order())
    return {"blocks": blocks, "instructions": instructions, "thunks": len(made.thunks), **best}


def main() -> None:
    options = arguments()
    from benchmarks.compile_time import slope

    print(
        f"{'blocks':>6} {'instructions':>12} {'thunks':>6} {'CPU s':>7} " + " ".join(f"{r:>9}" for r in ROOMS)
    )
    measure(1, options)  # work that a process does once is not measured
    rows = []
    for blocks in map(int, options.blocks.split(",")):
        row = measure(blocks, options)
        rows.append(row)
        cells = " ".join(f"{row['rooms'][room]:9.3f}" for room in ROOMS)
        print(
            f"{blocks:6} {row['instructions']:12} {row['thunks']:6} {row['seconds']:7.3f} {cells}", flush=True
        )
    last = rows[-1]
    figures = {
        "instructions": last["instructions"],
        "seconds": round(last["seconds"], 3),
        "per_5000": round(last["seconds"] * 5000 / last["instructions"], 3),
        "exponent": slope([r["instructions"] for r in rows], [r["seconds"] for r in rows]),
    }
    print(json.dumps(figures | {"rows": rows}))


if __name__ == "__main__":
    time.perf_counter = time.process_time  # rooms are timed by the compiler, here in CPU seconds
    script.run(main)
