"""Times of GPUs: the kernel that writes them, their translation, and timelines of steps on stand-in GPUs."""

import dataclasses
import importlib.util
import itertools
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import mpmd
from mpmd.compile.backends import targets
from mpmd.compile.backends.native_gpu.backend import NativeGpuBackend
from mpmd.compile.backends.native_gpu.clock import (
    PAIRED,
    PTX,
    ClockReading,
    GpuLog,
    GpuStamps,
    clock_at,
    host_seconds,
)
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.options import CompileOptions
from mpmd.errors import CompileError
from mpmd.estimate.program_timeline import recorder_of
from tests.support.gpu_launches import CalledProgram
from tests.support.native_fragments import fragment_of
from tests.support.observed_steps import executor_of
from tests.support.simulated_gpu import STREAM, StandInGpu

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.usefixtures("unpoisoned", "every_digit")


def mesh(device=0):
    return Mesh(np.array(jax.devices()[device : device + 1]), ("x",))


def products(x, w):
    return jnp.dot(jnp.dot(x, w).T, w)


def compiled(gpu, device=0, **options):
    backend = NativeGpuBackend.of(mesh(device), CompileOptions(**options), gpu)
    return backend.compile(fragment_of(products, X, X), mesh(device))


@pytest.mark.skipif(not HAS_TRITON, reason="Triton's package has ptxas: make test-gpu")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_the_kernel_is_ptx_for_every_gpu(tmp_path, architecture):
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if "100" in architecture else "ptxas")
    (tmp_path / "k.ptx").write_text(PTX)
    made = subprocess.run(
        [ptxas, "-v", f"-arch={architecture}", tmp_path / "k.ptx", "-o", tmp_path / "k.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "0 bytes stack frame" in made.stderr


def test_a_clock_is_read_between_two_readings_of_the_host():
    """Each GPU begins somewhere, and one runs faster by a thousandth."""
    gpu = StandInGpu(count=2)
    clocks = {n: clock_at(gpu, n) for n in range(2)}
    before = {n: clock.read() for n, clock in clocks.items()}
    time.sleep(0.02)
    after = {n: clock.read() for n, clock in clocks.items()}
    for n, clock in clocks.items():
        begin = time.perf_counter()
        reading = clock.read()
        end = time.perf_counter()
        assert begin <= reading.host_ns * 1e-9 <= end and reading.error_ns < 5e6
        found = host_seconds(before[n], after[n], reading.gpu_ns)
        slack = 1e-9 * (before[n].error_ns + after[n].error_ns + reading.error_ns) * 3 + 1e-6
        assert abs(found - reading.host_ns * 1e-9) < slack
    assert host_seconds(ClockReading(100, 5, 1), ClockReading(100, 5, 1), 8) == pytest.approx(103e-9)
    assert host_seconds(ClockReading(0, 0, 9), ClockReading(1005, 1000, 9), 500) == pytest.approx(
        500e-9
    )  # within the error
    assert host_seconds(ClockReading(0, 0, 1), ClockReading(2000, 1000, 1), 500) == pytest.approx(1000e-9)
    log = GpuLog(clocks, 1)
    del log
    assert gpu.live["host"] == 2, "what is left is released where there is time to wait"
    for clock in clocks.values():
        clock.read()
    assert not gpu.broken and not gpu.live["host"] and not gpu.live["memory"]


def test_a_program_writes_only_while_it_is_recorded():
    gpu = StandInGpu()
    made, x = compiled(gpu, command_buffers=False), jnp.asarray(X)
    made(x, x)[0].block_until_ready()
    gpu.calls.clear()
    made(x, x)[0].block_until_ready()
    plain = list(gpu.calls)
    assert plain == ["cuCtxSetCurrent", "cublasLtMatmul", "cublasLtMatmul"] and not gpu.stamps
    log = GpuLog({0: clock_at(gpu, 0)}, 6)
    gpu.stamps.clear()
    made.timer.write_to(log)
    begin = time.perf_counter()
    for _ in range(3):
        made(x, x)[0].block_until_ready()
    end = time.perf_counter()
    made.timer.write_to(None)
    gpu.calls.clear()
    made(x, x)[0].block_until_ready()
    assert gpu.calls == plain and gpu.stamps == [STREAM] * 6
    found = log.entries()
    assert [(e.key, e.device) for e in found] == [(made.timer.key, 0)] * 3
    times = [t for e in found for t in (e.begin_s, e.end_s)]
    assert times == sorted(times) and begin - log.error_s <= times[0] and times[-1] <= end + log.error_s
    assert not gpu.broken


def test_a_graph_is_recorded_too_and_those_that_are_not_stay():
    """The stamps are in a graph of their own, whose mark is the same in the next recording."""
    program = prepare_fragment(fragment_of(products, X, X), GpuTarget()).program
    called = CalledProgram(program, command_buffers=True)
    gpu, loaded = called.gpu, called.loaded
    gpu.pause = 0.001
    given = [X.reshape(-1).view(np.uint8)] * 2

    def calls(count):
        gpu.calls.clear()
        for _ in range(count):
            called.call(given)
        return list(gpu.calls)

    assert calls(3)[-2:] == ["cuCtxSetCurrent", "cuGraphLaunch"]
    for replayed in (3, 4):
        log = GpuLog({0: clock_at(gpu, 0)}, 20)
        loaded.write_to(log, loaded.address)
        assert calls(4).count("cuGraphLaunch") == replayed
        loaded.write_to(None, loaded.address)
        found = log.entries()
        assert [e.key for e in found] == [loaded.address] * 4
        times = [t for e in found for t in (e.begin_s, e.end_s)]
        assert times == sorted(times)
        assert all(e.end_s - e.begin_s > 2 * gpu.pause for e in found), "of two products"
        assert calls(2) == ["cuCtxSetCurrent", "cuGraphLaunch"] * 2
    assert not gpu.broken


def test_equal_programs_of_two_meshes_on_one_gpu_have_times_of_their_own():
    gpu, x = StandInGpu(), jnp.asarray(X)
    backend, fragment = NativeGpuBackend.of(mesh(), libraries=gpu), fragment_of(products, X, X)
    made = [backend.compile(dataclasses.replace(fragment, mesh=name), mesh()) for name in ("m0", "m1")]
    logs = [GpuLog({0: clock_at(gpu, 0)}, 4) for _ in made]
    for executable, log in zip(made, logs):
        executable.timer.write_to(log)
    for executable in (*made, made[1]):
        executable(x, x)[0].block_until_ready()
    for executable in made:
        executable.timer.write_to(None)
    assert [[e.key for e in log.entries()] for log in logs] == [
        [made[0].timer.key],
        [made[1].timer.key] * 2,
    ]
    assert made[0].timer.key != made[1].timer.key and not gpu.broken


def test_a_full_log_takes_no_more_and_a_call_that_fails_leaves_no_time():
    gpu = StandInGpu()
    made, x = compiled(gpu), jnp.asarray(X)
    log = GpuLog({0: clock_at(gpu, 0)}, 3)
    made.timer.write_to(log)
    for _ in range(3):
        made(x, x)[0].block_until_ready()
    assert len(log.entries()) == 1  # two times, and one whose end is missing
    made.timer.write_to(None)
    assert max(made.timer.key, 2**48) < PAIRED and not gpu.broken


def trained(backend, gpus=2):
    def step(w, x):
        def loss(w, x):
            h = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="one")(w[0], x)
            return mpmd.named_computation(lambda w, h: ((h @ w) ** 2).mean(), name="two")(w[1], h)

        value, gradients = mpmd.accumulate_gradients(loss, num_microbatches=3)(w, x)
        return [a - 0.1 * g for a, g in zip(w, gradients)], value

    topology = mpmd.make_topology({f"m{k}": [jax.devices()[k % gpus]] for k in range(2)})
    config = mpmd.make_config(topology, {"one": "m0", "two": "m1"}, schedule="1f1b", backend=backend)
    w, x = [X * 0.1, X.T * 0.1], np.tile(X, (3, 1))
    return mpmd.jit(step, config).lower(w, x).compile(), w, x


NATIVE = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: make test-gpu")


@pytest.mark.parametrize(
    ("backend", "gpus"),
    [("xla", 2), pytest.param("native", 2, marks=NATIVE), pytest.param("native", 1, marks=NATIVE)],
)
@pytest.mark.filterwarnings("ignore:meshes m0, m1 share:UserWarning")
def test_a_step_has_a_timeline_and_costs(monkeypatch, backend, gpus):
    """Around XLA's fragments stamps are started, on any GPU; native ones write their times themselves."""
    gpu = StandInGpu("NVIDIA GeForce RTX 9090" if backend == "xla" else "NVIDIA H200", count=gpus)
    monkeypatch.setitem(targets.NATIVE, "cpu", lambda m, options: NativeGpuBackend.of(m, options, gpu))
    monkeypatch.setitem(targets.STAMPS, "cpu", lambda: GpuStamps(gpu))
    step, w, x = trained(backend, gpus)
    wanted, _ = jax.block_until_ready(step(w, x))
    assert not gpu.stamps
    begin = time.perf_counter()
    (found, _), timeline = step.timeline(w, x)
    assert timeline.makespan_s <= time.perf_counter() - begin
    assert gpu.stamps and not gpu.broken
    for got, want in zip(found, wanted):
        np.testing.assert_array_equal(got, want)
    assert "clocks of the devices known within" in timeline.title
    for name in ("m0", "m1"):
        runs = list(timeline.compute(name))
        stream = next(s for s in step.program.streams if s.mesh == name)
        wanted_runs = [op.executable for op in stream.instructions if hasattr(op, "executable")]
        assert [span.name for span in sorted(runs, key=lambda s: s.start_s)] == wanted_runs
        assert all(span.start_s <= span.end_s for span in runs)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(runs))
    assert len(timeline.transfers) == 6
    forward = {str(s.task): s for mesh in ("m0", "m1") for s in timeline.compute(mesh) if s.task}
    assert all(forward[f"F{k}"].end_s <= forward[f"B{k}"].end_s for k in range(3) if f"F{k}" in forward)
    executor, devices = executor_of(step)
    recorder = recorder_of(executor, devices)
    with recorder:
        executor.run(jax.tree.leaves((w, x)), observers=[recorder])
    # of the other three messages, which their readers consume, the host sees no arrival
    assert len(recorder.times.arrivals) == 3 and not recorder.unseen
    _, costs = step.costs(w, x)
    assert set(costs.fragments) == {name for _, name in step.program.executables}
    assert all(seconds >= 0 for seconds in costs.fragments.values())
    gpu.stamps.clear()
    jax.block_until_ready(step(w, x))
    assert not gpu.stamps, "a step that nobody records issues nothing for it"
    step.close()


def test_without_the_kernel_the_host_watches_and_the_title_says_so(monkeypatch):
    monkeypatch.setitem(targets.STAMPS, "cpu", lambda: GpuStamps(StandInGpu(count=0)))
    step, w, x = trained("xla")
    _, timeline = step.timeline(w, x)
    assert "times of the host, late by about 0.1 ms" in timeline.title
    assert "finding GPU 0: cuDeviceGet failed" in timeline.title
    step.close()


def test_every_call_for_times_fails_once():
    """The error names the call and what it was for, and nothing is left."""
    gpu = StandInGpu()
    log = GpuLog({0: clock_at(gpu, 0)}, 2)
    calls = list(gpu.calls)
    del log
    for number, name in enumerate(calls, 1):
        if any(each.endswith(("Free_v2", "FreeHost")) for each in calls[number - 1 : number + 1]):
            continue  # what releases something is not looked at, nor is the context for it
        gpu = StandInGpu()
        gpu.fail_at = number
        with pytest.raises(CompileError, match=f"{name} failed: CU"):
            GpuLog({0: clock_at(gpu, 0)}, 2)
        gpu.fail_at = 0
        clock_at(gpu, 0).driver.release()
        assert not gpu.live["host"] and not gpu.live["memory"] and not gpu.broken, name
