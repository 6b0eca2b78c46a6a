"""Running functions through the native pipeline without XLA around them, on memory that is poisoned first."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mpmd.compile.backends.jax_function import numpy_dtype, value_spec
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.driver import Compilation, prepare_fragment
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.hlo.dtypes import dtype_of
from mpmd.compile.hlo.shape import array
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.options import CompileOptions
from mpmd.compile.thunks.check import check_thunks
from mpmd.compile.thunks.emission import KernelPlans
from tests.support.assignment_check import check_assignment
from tests.support.poison import POISON, check_returned
from tests.support.poison import poison as poisoning
from tests.support.program_instance import ProgramInstance


def mlir_type(dtype: Any) -> str:
    """The MLIR element type of a NumPy dtype."""
    return value_spec(array(dtype_of(np.dtype(dtype)))).dtype


def fragment_of(function: Any, *arguments: Any, donated: tuple[int, ...] = ()) -> FragmentModule:
    """A function of arrays as a fragment on a mesh of one device."""

    def spec(value: Any) -> ValueSpec:
        return ValueSpec(tuple(value.shape), mlir_type(value.dtype), ((),) * len(value.shape))

    text = jax.jit(function).lower(*arguments).as_text()
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    leaves = jax.tree.leaves(arguments)
    return FragmentModule(
        "fragment", "mesh", text, tuple(map(spec, leaves)), tuple(map(spec, results)), donated
    )


def compiled(
    fragment: FragmentModule, *, poison: bool = True, attention: str = "auto", passes: tuple[str, ...] = ()
) -> Compilation:
    """A fragment compiled for this machine; with poison it overwrites memory as soon as it is free."""
    options = CompileOptions(attention_stitching=attention, pass_options=passes)
    with poisoning(poison):
        return prepare_fragment(fragment, NativeCpu(), options).compiled()


def check_memory(made: Compilation) -> None:
    """Both checkers: one of live ranges, and one that follows the thunks and knows nothing of live ranges."""
    assignment = made.assignment
    check_assignment(assignment, KernelPlans().may_share)
    check_thunks(made.module, made.thunks, assignment.at, assignment.allocations, assignment.results)


def run(
    fragment: FragmentModule, arguments: list[Any], made: Compilation, pool: WorkerPool | None = None
) -> list[np.ndarray]:
    """The results of one run; all memory but the arguments holds garbage before it."""
    instance = ProgramInstance(made.code, host_target(), pool)
    given = [_filled(a) for a in arguments]
    owners = {result: argument for argument, result in made.aliases.items()}
    results = []
    for number, value in enumerate(fragment.results):
        if number in owners:
            results.append(given[owners[number]])
        else:
            results.append(_poisoned(value.shape, numpy_dtype(value.dtype)))
    arena = _poisoned((max(64, made.program.arena_bytes),), np.uint8)
    arena[: len(made.program.constants)] = np.frombuffer(made.program.constants, np.uint8)
    instance([a.ctypes.data for a in (*given, *results, arena)])
    check_returned(results, arguments)
    return results


def _filled(value: Any) -> np.ndarray:
    array = np.asarray(value)
    made = aligned_empty(array.shape, array.dtype)
    made[...] = array
    return made


def _poisoned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    made = aligned_empty(shape, dtype)
    made.reshape(-1).view(np.uint8)[...] = POISON
    return made
