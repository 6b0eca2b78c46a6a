"""Compiles on a CPU everything that the first call on a GPU runs: a folder that travels.

    python benchmarks/gpu/prepare.py [--out out/gpu_pack] [--gpu H100] [--seconds 3600]
        [--stand-in MODULE:CLASS]

Programs come first: GPT-2 124M's step, the same of two layers, small ones. Then variants of the step's
kernels, as many as compile in `--seconds` and fit into 64 MiB. The last line says how many there are of
each; `pack.json` in the folder has those that did not compile. With a stand-in everything is small, for
`run.py --stand-in`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402 - the root must be importable first

from benchmarks.gpu.pack import MAX_PACK_BYTES, TravellingPack  # noqa: E402
from benchmarks.gpu.programs import SMALL, ModelSize, step_sizes, training_step  # noqa: E402
from benchmarks.gpu.smoke_programs import MODELS, smoke_programs  # noqa: E402
from benchmarks.gpu.target import fragment_of, libraries  # noqa: E402
from benchmarks.script import run  # noqa: E402
from mpmd.compile.backends.native_gpu.gpu_devices import GPUS  # noqa: E402
from mpmd.compile.backends.native_gpu.target import GpuTarget  # noqa: E402
from mpmd.compile.backends.native_gpu.tuning.tile_candidates import (  # noqa: E402
    CompiledWay,
    TileWay,
    TunedKernel,
    compiled,
    tuned_kernels,
)
from mpmd.compile.driver import Prepared, prepare_fragment  # noqa: E402
from mpmd.compile.fragment import FragmentModule  # noqa: E402
from mpmd.errors import CompileError  # noqa: E402

FEW_VARIANTS, AT_ONCE = 24, 32
"""Variants on a stand-in, and in a file."""
MAX_KERNELS, FLOPS_OF_A_BYTE = 40, 250.0
"""Kernels of which there are variants; products in the time of a byte."""


class Preparation:
    """The work on one folder.

    Attributes:
        refused: what did not compile → why.
    """

    def __init__(self, pack: TravellingPack, target: GpuTarget) -> None:
        self.pack, self.target = pack, target
        self.refused: dict[str, str] = {}
        self.programs: list[str] = []

    def program(self, name: str, fragment: FragmentModule) -> Prepared | None:
        """Compiles a program and writes it; None if it does not compile."""
        started = time.monotonic()
        try:
            made = prepare_fragment(fragment, self.target)
            size = self.pack.put_program(name, fragment, made.compiled().artefact())
        except CompileError as error:
            self.refused[name] = str(error)[:2000]
            print(f"{name}: does not compile: {str(error)[:300]}", flush=True)
            return None
        launches = len(list(made.program.launches()))
        seconds = time.monotonic() - started
        print(f"{name}: {launches} launches, {size / 1e6:.2f} MB, {seconds:.1f} s", flush=True)
        self.programs.append(name)
        return made

    def variants(self, printed: Sequence[tuple[TunedKernel, TileWay]], seconds: float) -> int:
        """Compiles variants and writes them; how many."""
        end, count = time.monotonic() + seconds, 0
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for number, some in enumerate(_batches(printed, AT_ONCE)):
                if time.monotonic() > end:
                    break
                made = [found for found in threads.map(self._compiled, some) if found is not None]
                size = self.pack.put_variants(number, made)
                if self.pack.size > MAX_PACK_BYTES:
                    self.pack.put_variants(number, [])
                    break
                count += len(made)
                print(f"{count} variants of {len(printed)}, {size / 1e6:.2f} MB more", flush=True)
        return count

    def _compiled(self, variant: tuple[TunedKernel, TileWay]) -> CompiledWay | None:
        kernel, way = variant
        try:
            made = compiled(kernel, way, self.target)
        except CompileError as error:
            self.refused[f"{kernel.key} {way.choice}"] = str(error)[:200]
            return None
        if made is None:
            self.refused[f"{kernel.key} {way.choice}"] = "it needs more shared memory than there is"
        return made


def in_turn(kernels: Sequence[TunedKernel]) -> list[tuple[TunedKernel, TileWay]]:
    """Ways of the kernels that work most: those by rules, then others in turn: a part has some of each."""

    def work(kernel: TunedKernel) -> float:
        own = kernel.ways[0].kernels[0]
        return kernel.count * (own.flops / FLOPS_OF_A_BYTE + sum(own.sizes))

    rows = []
    for kernel in sorted(kernels, key=work, reverse=True)[:MAX_KERNELS]:
        others = list(kernel.ways[1:])
        random.Random(0).shuffle(others)
        rows.append([(kernel, way) for way in (kernel.ways[0], *others)])
    return [found for each in itertools.zip_longest(*rows) for found in each if found is not None]


def _batches(
    items: Sequence[tuple[TunedKernel, TileWay]], size: int
) -> Iterator[list[tuple[TunedKernel, TileWay]]]:
    """Some at a time."""
    rest = iter(items)
    while some := list(itertools.islice(rest, size)):
        yield some


def prepare(folder: Path, gpu: str, seconds: float, *, simulated: str) -> dict[str, Any]:
    """Makes the folder; the facts about it."""
    started, pack = time.monotonic(), TravellingPack(folder)
    pack.begin()
    target = GpuTarget(GPUS[gpu], libraries(simulated).compiler)
    if why := target.compiler.problem():
        sys.exit(why)
    work = Preparation(pack, target)
    with jax.default_matmul_precision("highest"):  # of all that are compared with XLA's to the last digits
        for small in smoke_programs(MODELS[:1] if simulated else MODELS):
            work.program(
                small.name,
                fragment_of(small.name, small.function, small.arguments, range(small.donated)),
            )
    made = None
    for name, size in step_sizes(SMALL if simulated else ModelSize()).items():
        step = training_step(size)
        made = work.program(name, fragment_of(name, step.function, list(step.arguments), step.donated))
    printed = in_turn(tuned_kernels(made.thunks, target.gpu, library=True)) if made is not None else []
    count = work.variants(printed[:FEW_VARIANTS] if simulated else printed, seconds)
    facts = {
        "gpu": gpu,
        "capability": target.gpu.capability,
        "stand_in": bool(simulated),
        "programs": work.programs,
        "variants": count,
        "of_variants": len(printed),
        "refused": work.refused,
        "bytes": pack.size,
        "seconds": round(time.monotonic() - started, 1),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "triton", "llvmlite")},
    }
    pack.finish(facts)
    return facts


def main() -> None:
    """Prepares the folder; ends with 1 if a program did not compile."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_pack"), help="the folder")
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for variants")
    parser.add_argument(
        "--stand-in",
        dest="simulated",
        default="",
        help="MODULE:CLASS of a stand-in GPU",
    )
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    facts = prepare(given.out, given.gpu, given.seconds, simulated=given.simulated)
    print(json.dumps({**facts, "refused": len(facts["refused"])}))
    sys.exit(1 if any(" " not in name for name in facts["refused"]) else 0)


if __name__ == "__main__":
    run(main)
