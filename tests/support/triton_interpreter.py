"""Kernels of the GPU target on NumPy arrays, by Triton's interpreter: on CPU, without torch.

The text that runs is the text that is compiled.  Replaced is what the interpreter lacks or has wrong:
functions of `libdevice`, rounding to bf16, products of bf16 and of tf32, atomics on values that are
broadcast, and reductions, which it computes element by element, some without NaN.

A load or store outside of the arrays that a kernel is given is an error.
"""

from __future__ import annotations

import functools
import linecache
import threading
import types
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special

from mpmd.compile.backends.native_gpu.triton.operations import PRELUDE
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PlanKernels, PrintedKernel, plan_kernels
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.operations import NARROW
from tests.support.launch_memory import Extent, LaunchMemory
from tests.support.tf32 import tf32

triton = pytest.importorskip("triton", reason="kernels are run by Triton's interpreter: pip install triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

_BF16 = np.dtype(ml_dtypes.bfloat16)
_TF32 = interpreter._ir.INPUT_PRECISION.TF32
_LIBDEVICE = {
    **{name: getattr(np, name) for name in ("cbrt", "cos", "expm1", "fmod", "log1p")},
    **{name: getattr(np, name) for name in ("rint", "sin", "tan", "tanh")},
    "atan2": np.arctan2,
    "erf": scipy.special.erf,
    "pow": np.power,
    "round": lambda x: _round(x),
    "popc": lambda x: np.bitwise_count(x.view(f"u{x.itemsize}")).astype(np.int32),
    "clz": lambda x: _leading_zeros(x.view(f"u{x.itemsize}")),
}
_REDUCE = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
_POISON = 0xFF
_ONE_AT_A_TIME = threading.Lock()
"""The interpreter replaces functions of Triton while it runs."""


class _Launch:
    """What runs now: the memory of its arguments, and the number of its first program."""

    memory = LaunchMemory((), ())
    first = 0


def _round(x: np.ndarray) -> np.ndarray:
    """To the nearest integer, halves away from zero."""
    size = np.abs(x)
    return np.copysign(np.trunc(size + np.where(size % 1 == 0, 0, 0.5)), x).astype(x.dtype)


def _leading_zeros(bits: np.ndarray) -> np.ndarray:
    zeros = np.full(bits.shape, 8 * bits.itemsize, np.int32)
    for k in range(8 * bits.itemsize):
        zeros = np.where(bits >> bits.dtype.type(k) != 0, 8 * bits.itemsize - 1 - k, zeros)
    return zeros.astype(np.int32)


def _numpy_dtype(kind: Any) -> Any:
    """NumPy's name of one of Triton's types."""
    names = {"int1": "bool", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    return np.dtype(names.get(kind.name, kind.name))


class _DType:
    """Prints, hashes and compares like torch's dtype of that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return getattr(other, "name", None) == self.name


class _Tensor:
    """An address with as much of torch's protocol as the interpreter uses."""

    device, shape = "cpu", (1,)

    def __init__(self, address: int, pointer: str) -> None:
        name = pointer[1:].replace("bf", "bfloat").replace("fp", "float")
        self.address = address
        self.dtype = _DType(name.replace("u", "uint") if name[0] == "u" else name.replace("i", "int", 1))

    def data_ptr(self) -> int:
        return self.address

    def _itself(self, *arguments: object, **named: object) -> Any:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = _itself

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return (1,)


def _extern(function: Any) -> Any:
    """A function of NumPy as one of `libdevice`."""

    def call(*arguments: Any) -> Any:
        arrays = np.broadcast_arrays(*(a.handle.data for a in arguments))
        with np.errstate(all="ignore"):
            made = np.asarray(function(*arrays))
        kind = tl.int32 if made.dtype == np.int32 else arguments[0].dtype
        handle = interpreter.TensorHandle(made, kind.scalar)
        return tl.core.tensor(handle, tl.block_type(kind.scalar, list(made.shape)))

    return call


def _reduce(self: Any, given: Any) -> Any:
    (tile,) = given
    step = _REDUCE[self.combine_fn.fn.__name__]
    with np.errstate(all="ignore"):
        values = tile.handle.data
        data = step.reduce(values, axis=self.axis, keepdims=self.keep_dims, dtype=values.dtype)
    return [self.to_tensor(data, tile.dtype)]


def _cast(self: Any, source: Any, target: Any) -> Any:
    """Between bf16, which is held as its bits, and other types: rounded to the nearest."""
    kind, data = target.scalar, source.data
    if source.dtype.scalar == tl.bfloat16:
        data = data.view(_BF16).astype(np.float32)
    with np.errstate(all="ignore"):
        if kind == tl.bfloat16:
            data = data.astype(np.float32).astype(_BF16).view(np.uint16)
        else:
            data = data.astype(_numpy_dtype(kind))
    return interpreter.TensorHandle(data, kind)


def _dot(self: Any, a: Any, b: Any, start: Any, precision: Any, *rest: Any) -> Any:
    """A product, exact to f64 and rounded once; bf16 is held as its bits."""
    left, right = (x.data.view(_BF16) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
    if left.dtype == right.dtype == np.float32 and precision == _TF32:
        left, right = tf32(np.ascontiguousarray(left)), tf32(np.ascontiguousarray(right))
    left, right = left.astype(np.float64), right.astype(np.float64)
    made = (np.matmul(left, right) + start.data).astype(start.data.dtype)
    return interpreter.TensorHandle(made, start.dtype.scalar)


def _atomic(original: Any) -> Any:
    """Atomics of values that are dense, and of bf16 and f16, one after the other."""

    def atomic(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        pointers, values, masks = (
            np.ascontiguousarray(a) for a in np.broadcast_arrays(pointer.data, value.data, mask.data)
        )
        if value.dtype.scalar in (tl.bfloat16, tl.float16):
            kind = _BF16 if value.dtype.scalar == tl.bfloat16 else np.float16
            real, there = _Launch.memory.translated(pointers, masks, 2, "an atomic operation")
            for address, number in zip(real[there], values.view(kind)[there]):
                place = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint16 * 1).from_address(int(address)))
                place.view(kind)[0] += number
            return value
        real, there = _Launch.memory.translated(pointers, masks, values.itemsize, "an atomic operation")
        handles = [interpreter.TensorHandle(a, h.dtype) for a, h in ((real, pointer), (values, value))]
        return original(self, operation, *handles, interpreter.TensorHandle(there, tl.int1), *rest)

    return atomic


def _loading(original: Any) -> Any:
    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        real, there = _Launch.memory.translated(pointers.data, mask.data, size, "a load")
        if other is not None:
            other = interpreter.TensorHandle(np.broadcast_to(other.data, real.shape).copy(), other.dtype)
        real, there = interpreter.TensorHandle(real, pointers.dtype), interpreter.TensorHandle(there, tl.int1)
        return original(self, real, there, other, *rest)

    return load


def _storing(original: Any) -> Any:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        real, there = _Launch.memory.translated(pointers.data, mask.data, size, "a store")
        values = np.broadcast_to(value.data, real.shape).copy()
        real, there = interpreter.TensorHandle(real, pointers.dtype), interpreter.TensorHandle(there, tl.int1)
        return original(self, real, interpreter.TensorHandle(values, value.dtype), there, *rest)

    return store


def _numbered(original: Any) -> Any:
    def program(self: Any, axis: int) -> Any:
        made = original(self, axis)
        return interpreter.TensorHandle(made.data + np.int32(_Launch.first), made.dtype)

    return program


@functools.cache
def _patched() -> None:
    builder = interpreter.InterpreterBuilder
    interpreter.ReduceOps.apply_impl = _reduce
    for name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, _cast)
    builder.create_dot = _dot
    builder.create_atomic_rmw = _atomic(builder.create_atomic_rmw)
    builder.create_masked_load = _loading(builder.create_masked_load)
    builder.create_masked_store = _storing(builder.create_masked_store)
    builder.create_get_program_id = _numbered(builder.create_get_program_id)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _defined(text: str, scope: dict[str, Any]) -> dict[str, Any]:
    """The functions of a text, interpreted."""
    name = f"<triton {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    jit = types.SimpleNamespace(jit=interpreter.InterpretedFunction)
    scope = {**scope, "triton": jit, "tl": tl, "__name__": "kernels"}
    exec(compile(text, name, "exec"), scope)
    return scope


@functools.cache
def _prelude() -> dict[str, Any]:
    _patched()
    library = types.SimpleNamespace(**{name: _extern(f) for name, f in _LIBDEVICE.items()})
    return _defined(PRELUDE, {"libdevice": library})


@functools.cache
def _function(source: str, name: str) -> Any:
    return _defined(source, _prelude())[name]


def run_kernel(kernel: PrintedKernel, arrays: Sequence[Extent], grid: int = 0, first: int = 0) -> None:
    """Runs a kernel.

    Args:
        kernel: the kernel.
        arrays: its arguments.
        grid: how many programs run; by default all.
        first: the number of the first of them.

    Raises:
        OutOfBounds: it reads or writes something else.
    """
    names = [f"argument {n} of {kernel.name}, {p}," for n, p in enumerate(kernel.pointers)]
    with np.errstate(all="ignore"), _ONE_AT_A_TIME:
        _Launch.memory, _Launch.first = LaunchMemory(arrays, names), first
        pairs = enumerate(zip(kernel.pointers, arrays, strict=True))
        tensors = [_Tensor(_Launch.memory.pointer(n), pointer) for n, (pointer, _) in pairs]
        _function(kernel.source, kernel.name).run(*tensors, grid=(grid or kernel.grid,), warmup=False)


def run_plan(plan: KernelPlan, arrays: Sequence[np.ndarray], programs: int = 8) -> PlanKernels:
    """Runs the kernels of a plan; results are written into their arrays.

    Args:
        plan: the plan.
        arrays: of each operand.
        programs: how many keep the device busy.
    """
    made = plan_kernels(plan, programs)
    scratch = np.full(made.scratch_bytes, _POISON, np.uint8)
    ends = [*made.scratch[1:], made.scratch_bytes]
    memory = [Extent(a.ctypes.data, o.bytes) for a, o in zip(arrays, plan.operands, strict=True)]
    memory += [Extent.of(scratch[at:end]) for at, end in zip(made.scratch, ends)]
    for kernel in made.kernels:
        run_kernel(kernel, [memory[k] for k in kernel.operands])
    return made


def differences(plan: KernelPlan, found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> list[str]:
    """The results of a plan that differ: integers exactly, floats by what their type holds."""
    return [
        f"{plan.operands[k].name} {plan.operands[k].dtype} of\n{plan.text()}"
        for k in plan.results
        if not _equal(found[k], wanted[k], plan.operands[k].dtype)
    ]


def _equal(found: np.ndarray, wanted: np.ndarray, dtype: str) -> bool:
    if found.dtype.kind in "biu":
        return np.array_equal(found, wanted)
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    if dtype in NARROW:
        return np.array_equal(a, b, equal_nan=True)
    loose = {"bf16": 2e-2, "f16": 4e-3}.get(dtype, 3e-5)
    scale = np.nanmax(np.abs(np.where(np.isfinite(b), b, 0)), initial=1)
    return bool(np.allclose(a, b, rtol=loose, atol=loose * scale * 0.1, equal_nan=True))
