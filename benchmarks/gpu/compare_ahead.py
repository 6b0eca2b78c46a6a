"""How do our programs for a GPU compare with XLA's, on a machine without one?

    python benchmarks/gpu/compare_ahead.py [--only step block] [--no_code] [--xla record|read] [--keep]

Both compilers are given the same programs for a described H200.  Ours go through the GPU target, machine
code included; XLA's figures are read from `benchmarks/results/`, which `--xla record` writes where JAX's CUDA
plugin is installed.  Launches and bytes are counted by one rule, and times follow one model: see
`query.py`.  `--launches` lists our launches by kind and size, and by their machine code.

The last line is JSON.  `devices` has for each GPU what the machine code of our kernels says: `predicted_ms`,
`limit_ms` at the limits of memory and of products, and kernels with faults: accesses of two bytes to global
memory, values of threads in memory, room for one program a multiprocessor.  There is no model of a B200, and
no time.  A loop counts as often as it runs there, and once where programs are compared with XLA's, whose
machine code is not in its record.  `--keep` writes this part to `benchmarks/results/gpu_ahead.json`.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402 - the root must be importable first

from benchmarks.gpu import ahead  # noqa: E402
from benchmarks.gpu.counting import CountedLaunch, own_launches, totals, xla_launches  # noqa: E402
from benchmarks.gpu.llama import LlamaSize  # noqa: E402
from benchmarks.gpu.programs import ComparedProgram, ModelSize, programs  # noqa: E402
from benchmarks.gpu.target import fragment_of  # noqa: E402
from benchmarks.script import run  # noqa: E402
from mpmd.compile.backends.native_gpu.gpu_devices import GPUS  # noqa: E402
from mpmd.compile.backends.native_gpu.machine.launch_report import (  # noqa: E402
    launch_work,
    narrow_kernels,
    program_times,
    repeated_launches,
)
from mpmd.compile.backends.native_gpu.target import GpuCode, GpuTarget  # noqa: E402
from mpmd.compile.cache import DiskCache  # noqa: E402
from mpmd.compile.driver import compiled_or_kept, prepare_fragment  # noqa: E402
from mpmd.compile.fragment import FragmentModule  # noqa: E402
from mpmd.compile.options import CompileOptions  # noqa: E402
from mpmd.compile.thunks.program_costs import trip_counts  # noqa: E402
from mpmd.cost.device import H200  # noqa: E402
from mpmd.errors import CompileError  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "xla_h200_ahead.json"
COMPARED = {"launches": "launches", "bytes": "bytes", "temp": "temp_bytes", "modelled": "modelled_ms"}
"""Ratio to XLA's → the figure."""
KEPT = ROOT / "benchmarks" / "results" / "gpu_ahead.json"
DEVICES = ("A100", "H100", "H200", "B200")
"""GPUs whose machine code is looked at."""


def own_figures(program: ComparedProgram, *, code: bool, listed: bool) -> dict[str, Any]:
    """The figures of our program, and those that its machine code gives for each of `DEVICES`."""
    target = GpuTarget()
    fragment = fragment_of(program.name, program.function, list(program.arguments), program.donated)
    started = time.perf_counter()
    made = prepare_fragment(fragment, target)
    prepared = time.perf_counter() - started
    launches = own_launches(made.program)
    if listed:
        print(listing(launches), flush=True)
    figures = {
        **totals(launches, target.device),
        "temp_bytes": made.program.arena_bytes,
        "kernels": len(made.program.kernels),
        "prepare_s": round(prepared, 2),
    }
    if code:
        made.compiled()
        figures["compile_s"] = round(time.perf_counter() - started, 2)
        with tempfile.TemporaryDirectory() as folder:
            options = CompileOptions(cache=DiskCache(Path(folder) / "kept"))
            compiled_or_kept(fragment, target, options)
            started = time.perf_counter()
            _, found = compiled_or_kept(fragment, target, options)
            figures["cached_compile_s"] = round(time.perf_counter() - started, 3)
            assert found, "the artefact was not kept"
        figures["devices"] = {name: machine_figures(fragment, name, listed=listed) for name in DEVICES}
    return figures


def machine_figures(fragment: FragmentModule, name: str, *, listed: bool) -> dict[str, Any]:
    """The figures of a program by its machine code for a GPU; without a disassembler those that need none."""
    target = GpuTarget(GPUS[name])
    made = prepare_fragment(fragment, target)
    code = made.compiled().code
    assert isinstance(code, GpuCode)
    trips = trip_counts(made.module)
    launches = [
        (launch_work(s, code.program), times) for s, times in repeated_launches(code.program.steps, trips)
    ]
    found: dict[str, Any] = {
        "launches": sum(times for _, times in launches),
        "bytes": sum(times * work.bytes for work, times in launches),
        "arena_bytes": made.program.arena_bytes,
        "spilling_kernels": [name for name, cubin in code.cubins.items() if cubin.stack_bytes],
    }
    try:
        found["two_byte_kernels"] = narrow_kernels(code.program, code.cubins)
        times = program_times(code.program, code.cubins, target.gpu, trips)
    except CompileError as error:
        return {**found, "why_not": str(error)}
    if listed:
        print(times.text(), flush=True)
    return {
        "predicted_ms": round(1e3 * times.seconds, 3),
        "limit_ms": round(1e3 * times.limit, 3),
        **found,
        "lonely_kernels": times.lonely,
    }


def xla_figures(program: ComparedProgram) -> dict[str, float]:
    """The figures of XLA's program; the plugin must be there."""
    started = time.perf_counter()
    made = ahead.compile_program(program.function, *program.arguments, donated=program.donated)
    seconds = time.perf_counter() - started
    return {
        **totals(xla_launches(made.as_text()), H200),
        "temp_bytes": made.memory_analysis().temp_size_in_bytes,
        "compile_s": round(seconds, 2),
    }


def listing(launches: Sequence[CountedLaunch]) -> str:
    """Launches by kind and by what they are called, those that move most first."""
    sizes: collections.Counter[tuple[str, int, str]] = collections.Counter()
    for launch in launches:
        sizes[launch.kind, launch.bytes, launch.name.partition("[")[0].rstrip("0123456789.")] += 1
    rows = sorted(sizes.items(), key=lambda row: -row[0][1] * row[1])
    return "\n".join(
        f"  {bytes_ * n / 1e6:10.2f} MB {n:4} x {kind:10} {name}" for (kind, bytes_, name), n in rows
    )


def against(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Our figures over XLA's, if there are any; temporaries of a program without any count as one byte."""
    return {
        f"{name}_over_xla": round(ours[figure] / (theirs[figure] or 1), 4)
        for name, figure in COMPARED.items()
        if theirs
    }


def geomeans(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Geometric means of what there are ratios of; where neither program has temporaries there is none."""
    found = {}
    for name in COMPARED:
        ratios = [row[f"{name}_over_xla"] for row in rows if row.get(f"{name}_over_xla", 0.0) > 0]
        if ratios:
            found[f"{name}_over_xla"] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)
    return found


def keep(name: str, devices: dict[str, Any]) -> None:
    """Writes the figures of a program by its machine code beside the others' figures."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"programs": {}}
    kept["triton"] = importlib.metadata.version("triton")
    kept["programs"][name] = devices
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def versions() -> dict[str, str]:
    """Versions of what made XLA's programs."""
    names = ("jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Prints a line for each program, then the JSON."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", nargs="*", help="names of programs; all by default")
    parser.add_argument("--no_code", action="store_true", help="stop before machine code")
    parser.add_argument("--launches", action="store_true", help="list our launches")
    parser.add_argument("--keep", action="store_true", help="write what machine code says to a file")
    parser.add_argument("--xla", choices=("read", "record"), default="read", help="compile XLA's, or read")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    chosen = [p for p in programs(ModelSize(), LlamaSize()) if not given.only or p.name in given.only]
    recorded: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"programs": {}}
    if given.xla == "record":
        if why := ahead.why_not():
            sys.exit(f"XLA's programs cannot be compiled here: {why}")
        recorded["versions"] = versions()
        for program in chosen:
            recorded["programs"][program.name] = xla_figures(program)
            print(f"{program.name}: xla {recorded['programs'][program.name]}", flush=True)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        return
    table: dict[str, Any] = {}
    for program in chosen:
        theirs = recorded["programs"].get(program.name, {})
        ours = own_figures(program, code=not given.no_code, listed=given.launches)
        table[program.name] = {**ours, **against(ours, theirs), "xla": theirs}
        print(f"{program.name}: {table[program.name]}", flush=True)
        if given.keep:
            keep(program.name, ours["devices"])
    print(json.dumps({"xla": recorded["versions"], "programs": table, **geomeans(list(table.values()))}))


if __name__ == "__main__":
    run(main)
