"""Stages that hold their device for a known time without using the CPU, to measure schedules with.

`sleep(seconds, after)` is a custom call whose handler is a few lines of LLVM IR: it sleeps, or fails as a
device would if `seconds` is `OUT_OF_MEMORY` or `BROKEN`, and results in zero.  Other load on the machine
hardly disturbs it, and as many of them as there are meshes sleep at the same time on few cores.

`Stages` is a train step of such stages, to be run under `mpmd.jit`: a forward sleeps, and its backward
sleeps once for the gradient of its input and once for its weight gradient.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np

import mpmd
from mpmd.support.resources import keep_past_exit

TARGET = "mpmd_benchmark_sleep"
OUT_OF_MEMORY, BROKEN = -1.0, -2.0

# XLA_FFI_Error* handler(XLA_FFI_CallFrame*): the first call queries the version of its interface, then it
# runs.  Offsets are from xla/ffi/api/c_api.h, version 0.3; later minor versions add fields at the ends
# only.  Linux may wake a sleeper 50 us late unless prctl 29 forbids it.
_HANDLER = r"""
declare i32 @nanosleep(ptr, ptr)
declare i32 @prctl(i32, i64, i64, i64, i64)
@out.of.memory = internal constant [35 x i8] c"injected: the device has no memory\00"
@broken = internal constant [31 x i8] c"injected: the device is broken\00"

define ptr @handler(ptr %frame) {
  %extension.at = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension.at
  %asked = icmp ne ptr %extension, null
  br i1 %asked, label %version, label %call
version:
  %metadata.at = getelementptr i8, ptr %extension, i64 24
  %metadata = load ptr, ptr %metadata.at
  %major = getelementptr i8, ptr %metadata, i64 24
  %minor = getelementptr i8, ptr %metadata, i64 28
  %traits = getelementptr i8, ptr %metadata, i64 32
  store i32 0, ptr %major
  store i32 3, ptr %minor
  store i32 0, ptr %traits
  ret ptr null
call:
  %stage.at = getelementptr i8, ptr %frame, i64 32
  %stage = load i32, ptr %stage.at
  %executes = icmp eq i32 %stage, 3
  br i1 %executes, label %run, label %nothing
nothing:
  ret ptr null
run:
  %args.at = getelementptr i8, ptr %frame, i64 72
  %args = load ptr, ptr %args.at
  %first = load ptr, ptr %args
  %first.at = getelementptr i8, ptr %first, i64 24
  %data = load ptr, ptr %first.at
  %seconds = load float, ptr %data
  %rets.at = getelementptr i8, ptr %frame, i64 112
  %rets = load ptr, ptr %rets.at
  %result = load ptr, ptr %rets
  %result.at = getelementptr i8, ptr %result, i64 24
  %zero = load ptr, ptr %result.at
  store float 0.0, ptr %zero
  %fails = fcmp olt float %seconds, 0.0
  br i1 %fails, label %fail, label %sleep
sleep:
  %time = alloca [2 x i64]
  %whole = fptosi float %seconds to i64
  %back = sitofp i64 %whole to float
  %rest = fsub float %seconds, %back
  %rest.ns = fmul float %rest, 1.0e9
  %ns = fptosi float %rest.ns to i64
  store i64 %whole, ptr %time
  %ns.at = getelementptr i64, ptr %time, i64 1
  store i64 %ns, ptr %ns.at
  %exact = call i32 @prctl(i32 29, i64 1, i64 0, i64 0, i64 0)
  %ignored = call i32 @nanosleep(ptr %time, ptr null)
  ret ptr null
fail:
  %request = alloca [4 x i64]
  store i64 28, ptr %request
  %private.at = getelementptr i64, ptr %request, i64 1
  store ptr null, ptr %private.at
  %message.at = getelementptr i64, ptr %request, i64 2
  %is.broken = fcmp olt float %seconds, -1.5
  %message = select i1 %is.broken, ptr @broken, ptr @out.of.memory
  store ptr %message, ptr %message.at
  %code.at = getelementptr i64, ptr %request, i64 3
  %code = select i1 %is.broken, i32 13, i32 8
  store i32 %code, ptr %code.at
  %api.at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api.at
  %create.at = getelementptr i8, ptr %api, i64 48
  %create = load ptr, ptr %create.at
  %error = call ptr %create(ptr %request)
  ret ptr %error
}
"""


@functools.cache
def _registered() -> Any:
    """Compiles and registers the handler once; its code is kept until the process ends."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_HANDLER)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    create = ctypes.pythonapi.PyCapsule_New
    create.restype, create.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = create(engine.get_function_address("handler"), None, None)
    jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
    keep_past_exit(engine)
    return engine


def sleep(seconds: Any, after: jax.Array) -> jax.Array:
    """Zero, `seconds` after a value of `after` is known; or a failure of the device."""
    _registered()
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32))
    zero = call(jnp.asarray(seconds, jnp.float32), after.ravel()[0].astype(jnp.float32))
    # XLA counts no work for a custom call, and runs fragments with little work in the thread that calls them.
    return jax.lax.fori_loop(0, 1200, lambda i, total: total + zero, zero)


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds of a stage's forward, input gradient and weight gradient."""

    forward: float
    input_gradient: float
    weight_gradient: float


def sleeping_layer(durations: Durations) -> Any:
    """`layer(w, x) -> tanh(x @ w)` that sleeps in each direction."""

    @jax.custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x @ w + sleep(durations.forward, x)

    def backward(saved: Any, g: Any) -> Any:
        w, x = saved
        slept = sleep(durations.input_gradient, g)
        dx = g @ w.T + slept
        dw = x.T @ g + sleep(durations.weight_gradient, slept)
        return dw, dx

    product.defvjp(lambda w, x: (product(w, x), (w, x)), backward)
    return lambda w, x: jnp.tanh(product(w, x))


def sleeping_scale(durations: Durations) -> Any:
    """`layer(w, x) -> x * w` that sleeps in each direction: large arrays cost little to compute.

    The gradient of `w` is the first row's alone.
    """

    @jax.custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x * (w + sleep(durations.forward, x))

    def backward(saved: Any, g: Any) -> Any:
        w, x = saved
        slept = sleep(durations.input_gradient, g)
        dx = g * (w + slept)
        dw = x[0] * g[0] + sleep(durations.weight_gradient, slept)
        return dw, dx

    product.defvjp(lambda w, x: (product(w, x), (w, x)), backward)
    return product


@dataclasses.dataclass(frozen=True)
class Stages:
    """A pipelined train step of sleeping stages.

    Attributes:
        durations: of each stage.
        microbatches: of one step.
        meshes: how many meshes the stages are on.
        folded: stages go up the meshes and come down again, in turns; otherwise they go round.
        width: of the arrays: large enough that XLA dispatches a fragment without waiting for it.
        devices: of each mesh.
        rows: of the arrays between stages; if given, layers scale their input, in place of products.
    """

    durations: tuple[Durations, ...]
    microbatches: int
    meshes: int
    folded: bool = False
    width: int = 16
    devices: int = 1
    rows: int = 0

    def mesh_of(self, stage: int) -> int:
        """The mesh of a stage."""
        turn, place = divmod(stage, self.meshes)
        return self.meshes - 1 - place if self.folded and turn % 2 else place

    def step(self, params: Any, x: Any) -> Any:
        """One step of gradient descent."""
        loss, grads = mpmd.accumulate_gradients(self.loss, self.microbatches)(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    def loss(self, params: Any, x: Any) -> Any:
        """The loss of a microbatch, one name per stage."""
        for s, durations in enumerate(self.durations):
            layer = (sleeping_scale if self.rows else sleeping_layer)(durations)
            if self.rows and not s:
                scale = layer
                layer = lambda w, x, scale=scale: scale(w, jnp.tile(x, (self.rows, 1)))  # noqa: E731
            if s == len(self.durations) - 1:
                last = lambda w, x, layer=layer: jnp.mean(layer(w, x) ** 2)  # noqa: E731
                return mpmd.named_computation(last, name=f"stage{s}")(params[s], x)
            x = mpmd.named_computation(layer, name=f"stage{s}")(params[s], x)
        raise AssertionError("there is no stage")

    def arguments(self) -> tuple[Any, Any]:
        """Parameters and a batch."""
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 4  # noqa: E731
        of_layer = (self.width,) if self.rows else (self.width, self.width)
        params = [draw(*of_layer) for _ in self.durations]
        return params, draw((1 if self.rows else self.width) * self.microbatches, self.width)

    def ideal_1f1b_s(self) -> float:
        """Seconds of a step in which nothing costs anything but the stages, if all of them cost the same."""
        d = self.durations[0]
        each = d.forward + d.input_gradient + d.weight_gradient
        return (self.microbatches + len(self.durations) - 1) * each

    def jitted(self, schedule: Any) -> Any:
        """The step under `mpmd.jit`."""
        topology = mpmd.make_topology({f"m{m}": self.devices for m in range(self.meshes)})
        assignment = {f"stage{s}": (f"m{self.mesh_of(s)}", s) for s in range(len(self.durations))}
        config = mpmd.make_config(topology, assignment, schedule=schedule)
        return mpmd.jit(self.step, config, donate_argnums=0)
