"""Do small programs, loaded as users' are, give on this GPU what `jax.jit` gives?

Method: a chain of sixty launches, a donated argument, a loop whose condition is on the device, and six of the
tests' models with a step of gradient descent, all prepared, in full f32; the chain also captured as a graph,
with other addresses in each call; a kernel
that its machine code does not have.  Modules are loaded lazily, as by default.

What the answer means: a program that differs has a kernel, a product or an address that is wrong on the
device and right in Triton's interpreter. `XLA counts the executables` must hold, or programs must never
be unloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.experiment import Experiment, run_experiment
from benchmarks.gpu.pack import TravellingPack
from benchmarks.gpu.smoke_programs import MODELS, SmokeProgram, smoke_programs
from benchmarks.gpu.target import gpu_of, libraries, loaded
from mpmd.compile.backends.ffi.custom_call import is_called
from mpmd.compile.options import CompileOptions
from mpmd.errors import CompileError


def measure(run: Experiment) -> None:
    """Finds it out."""
    pack = TravellingPack(run.pack)
    known = [name for name in MODELS if name in pack.facts["programs"]]
    jax.config.update("jax_default_matmul_precision", "highest")
    for program in smoke_programs(known):
        if run.has_time(program.name, 3):
            with run.part(program.name):
                _compare(run, program, loaded(run, program.name))
            if program.name == "chain":
                with run.part("captured"):
                    _captured(run, program)
    with run.part("an error"):
        _wrong_code(run)


def _compare(run: Experiment, program: SmokeProgram, made: Any) -> None:
    """Twice: the second call has memory that the first has used."""
    run.figure(f"launches.{program.name}", len(list(made.artefact.code.program.launches())))
    wanted = [np.asarray(a) for a in jax.tree.leaves(jax.jit(program.function)(*program.arguments))]
    worst = max(_difference(made(*map(jnp.asarray, program.arguments)), wanted) for _ in range(2))
    run.figure(f"largest.{program.name}", worst)
    note = f"{worst:.1e}, allowed {program.tolerance:.0e}"
    run.check(f"{program.name} equals jax.jit", worst <= program.tolerance, note)
    if program.name == "chain":
        counted = is_called(made.program.index, libraries(run.simulated).platform)
        run.check("XLA counts the executables of a program", counted)


def _difference(found: Any, wanted: list[np.ndarray]) -> float:
    """The largest difference over the largest value of its result, or over 1; NaN is infinite."""
    worst = 0.0
    for got, want in zip(found, wanted, strict=True):
        apart = np.abs(np.asarray(got, np.float64) - want.astype(np.float64)).max(initial=0.0)
        share = float(apart / max(1.0, np.abs(want).max(initial=0.0)))
        worst = max(worst, share if share == share else float("inf"))
    return worst


def _captured(run: Experiment, program: SmokeProgram) -> None:
    """The graph with arrays at other addresses, all kept; three times with each."""
    made, kept, worst = loaded(run, program.name, CompileOptions(command_buffers=True)), [], 0.0
    x, w = program.arguments
    for seed in range(12 if run.gpu else 2):  # a program has eight graphs
        other = np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32) / 8
        arrays = jnp.asarray(other), jnp.asarray(w + 0)
        wanted = [np.asarray(a) for a in jax.jit(program.function)(*arrays)]
        for _ in range(3):
            found = made(*arrays)
            worst = max(worst, _difference(found, wanted))
            kept.append((arrays, found))
    run.check("a graph is right after addresses change", worst <= program.tolerance, f"{worst:.1e}")


def _wrong_code(run: Experiment) -> None:
    """A kernel that does not load is an error in words, and the next program runs."""
    program = smoke_programs(())[0]
    made: Any = loaded(run, program.name)
    cubin = next(iter(made.artefact.code.cubins.values()))
    driver, said = gpu_of(run).driver, ""
    driver.enter()
    with contextlib.ExitStack() as undo:
        try:
            driver.kernel(dataclasses.replace(cubin, name="nothing"), undo)
        except CompileError as error:
            said = str(error)
    run.check("code that does not load is an error", "loading kernel nothing" in said, said[:200])
    _compare(run, program, made)


if __name__ == "__main__":
    run_experiment("smoke", __doc__, measure)
