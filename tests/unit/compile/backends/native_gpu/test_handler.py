"""The handler of a launch program: its calls, in order, with their arguments; errors that name the call."""

import ctypes
import gc
import importlib.util
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.workloads.call_frame import CallFrame
from mpmd.compile.backends.native_gpu.calls import ENTRIES, ROWS, STATE
from mpmd.compile.backends.native_gpu.libraries import prototype
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.driver import prepare_fragment
from tests.support.gpu_launches import CalledProgram
from tests.support.native_fragments import fragment_of
from tests.support.poison import poison
from tests.support.simulated_gpu import STREAM, StandInGpu

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
pytestmark = pytest.mark.usefixtures("every_digit")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)


def program_of(function, *arguments):
    with poison(False):
        return prepare_fragment(fragment_of(function, *arguments), GpuTarget()).program


def as_bytes(*arrays):
    return [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]


def products(x, w):
    return (x @ w) @ w


def test_calls_are_those_of_the_list():
    made = CalledProgram(program_of(products, X, X))
    (got,) = made.call(as_bytes(X, X))
    np.testing.assert_allclose(got.view(np.float32).reshape(8, 8), products(X, X), rtol=1e-5)
    assert made.gpu.calls == ["cuCtxSetCurrent", "cublasLtMatmul", "cublasLtMatmul"]


WORDS = {
    "cuCtxSetCurrent": r"the call: CUDA_ERROR_LAUNCH_FAILED \(status 719\)",
    "cublasLtMatmul": r"dot\.\d+: CUBLAS_STATUS_EXECUTION_FAILED \(status 13\)",
}


@pytest.mark.parametrize(("number", "entry"), list(enumerate(WORDS, 1)))
def test_a_call_that_fails_is_named_and_ends_the_program(number, entry):
    program = program_of(products, X, X)
    made = CalledProgram(program)
    made.gpu.fail_at = number
    with pytest.raises(RuntimeError, match=f"^GPU program {program.name}: {entry} failed in {WORDS[entry]}$"):
        made.call(as_bytes(X, X))
    assert len(made.gpu.calls) == number and made.loaded.state[STATE.index("failed_status")] in (719, 13)
    (got,) = made.call(as_bytes(X, X))  # the next one works
    np.testing.assert_allclose(got.view(np.float32).reshape(8, 8), products(X, X), rtol=1e-5)


def layer(x, w, bias, residual):
    return residual + (x @ w + bias)


LAYER = [
    X.astype(jnp.bfloat16),
    (X + 1).astype(jnp.bfloat16),
    X[0].astype(jnp.bfloat16),
    X.astype(jnp.bfloat16),
]


def check_layer(made, *arguments):
    """One call that adds a matrix and a vector, which are rounded once."""
    made.gpu.calls.clear()
    (got,) = made.call(as_bytes(*arguments))
    wanted = layer(*(a.astype(np.float32) for a in arguments))
    np.testing.assert_allclose(got.view(jnp.bfloat16).astype(np.float32).reshape(8, 8), wanted, rtol=4e-3)
    return made.gpu.calls


@pytest.mark.parametrize("command_buffers", [False, True])
def test_a_product_adds_the_vector_of_its_call(command_buffers):
    made = CalledProgram(program_of(layer, *LAYER), command_buffers=command_buffers)
    assert check_layer(made, *LAYER)[-2:] == ["cublasLtMatmulDescSetAttribute", "cublasLtMatmul"]
    for times in (2, 3, 4):
        made.move()  # the vector is elsewhere
        check_layer(made, *(a * times for a in LAYER))


@pytest.mark.parametrize(("number", "entry"), [(2, "cublasLtMatmulDescSetAttribute"), (3, "cublasLtMatmul")])
def test_a_product_that_fails_does_not_keep_others_from_theirs(number, entry):
    made = CalledProgram(program_of(layer, *LAYER))
    made.gpu.fail_at = number
    with pytest.raises(RuntimeError, match=f"{entry} failed in "):
        made.call(as_bytes(*LAYER))
    assert made.gpu.calls[-1] == entry
    made.gpu.fail_at = 0
    check_layer(made, *LAYER)


def test_a_product_s_vector_is_its_own_until_it_was_called():
    """Another thread's call of the program waits."""
    made = CalledProgram(program_of(layer, *LAYER))
    lock = STATE.index("multiplying")
    made.loaded.state[lock] = 1
    thread = threading.Thread(target=check_layer, args=(made, *LAYER))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and made.gpu.calls == ["cuCtxSetCurrent"]
    made.loaded.state[lock] = 0
    thread.join()
    assert made.gpu.calls[-1] == "cublasLtMatmul" and made.loaded.state[lock] == 0


def test_a_call_with_other_buffers_is_refused():
    made = CalledProgram(program_of(products, X, X))
    for arguments, results, field in (([0], [0, 0], "arg_count"), ([0, 0], [0], "ret_count")):
        frame = CallFrame(arguments, results)
        assert not frame.run(made) and f"the call has another {field} than 2" in frame.errors[0]
    assert made.gpu.calls == []
    assert CallFrame([], []).metadata(made) == (0, 3, 0)


def control(x, n):
    x = jax.lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.tanh(c[0] @ c[0]), c[1] + 1), (x, 0))[0]
    return jax.lax.switch(n, [jnp.sin, jnp.cos, jnp.tanh], x)


@needs_triton
@pytest.mark.parametrize("n", [0, 1, 2, 5, -3])
def test_loops_and_branches_read_what_is_on_the_device(n):
    made = CalledProgram(program_of(control, X, np.int32(n)))
    (got,) = made.call(as_bytes(X, np.int32(n)))
    np.testing.assert_allclose(got.view(np.float32).reshape(8, 8), control(X, n), rtol=1e-5, atol=1e-6)
    calls = made.gpu.calls
    assert calls.count("cuStreamSynchronize") == calls.count("cuMemcpyDtoHAsync_v2") >= max(n, 0) + 2


def scanned(ws, x):
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), y @ y), x, ws)


@needs_triton
@pytest.mark.parametrize("layers", [0, 1, 5])
def test_a_loop_that_counts_is_counted_by_the_host_and_captured(layers):
    """Nothing waits for a flag, and from the third call on all iterations are one graph."""
    ws = np.stack([X.T + k for k in range(layers)]) if layers else np.zeros((0, 8, 8), np.float32)
    program = program_of(scanned, ws, X)
    assert program.is_capturable and ("repeat 5 times" in program.text()) == (layers == 5)
    made = CalledProgram(program, command_buffers=True)
    for _ in range(3):
        made.gpu.calls.clear()
        results = made.call(as_bytes(ws, X))
        for got, wanted in zip(results, jax.tree.leaves(scanned(ws, X)), strict=True):
            np.testing.assert_allclose(
                got.view(np.float32).reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-6
            )
    assert made.gpu.calls == ["cuCtxSetCurrent", "cuGraphLaunch"]


@needs_triton
def test_a_long_loop_is_issued_rather_than_captured():
    program = program_of(lambda x: jax.lax.fori_loop(0, 20000, lambda _, y: jnp.tanh(y @ y), x), X)
    assert "repeat 20000 times" in program.text() and not program.is_capturable


@needs_triton
def test_every_call_fails_once():
    """Each error names its call, and the call after it is as if there had been none."""
    made = CalledProgram(program_of(control, X, np.int32(2)))
    made.call(as_bytes(X, np.int32(2)))
    whole = list(made.gpu.calls)
    assert {"cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cublasLtMatmul"} <= set(whole)
    assert set(whole) <= set(ENTRIES)
    for number, entry in enumerate(whole, 1):
        made.gpu.calls.clear()
        made.gpu.fail_at = number
        with pytest.raises(RuntimeError, match=f"{entry} failed in "):
            made.call(as_bytes(X, np.int32(2)))
    made.gpu.fail_at = 0
    (got,) = made.call(as_bytes(X, np.int32(2)))
    np.testing.assert_allclose(got.view(np.float32).reshape(8, 8), control(X, 2), rtol=1e-5, atol=1e-6)


CAPTURED = [
    "cuStreamBeginCapture_v2",
    "cuCtxSetCurrent",
    "cublasLtMatmul",
    "cublasLtMatmul",
    "cuStreamEndCapture",
]
CAPTURED += ["cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphLaunch"]
ISSUED = ["cuCtxSetCurrent", "cuCtxSetCurrent", "cublasLtMatmul", "cublasLtMatmul"]


def check(made, x):
    made.gpu.calls.clear()
    (got,) = made.call(as_bytes(x, X))
    np.testing.assert_allclose(got.view(np.float32).reshape(8, 8), products(x, X), rtol=1e-5, atol=1e-6)
    return list(made.gpu.calls)


def test_a_call_is_captured_when_its_addresses_come_again():
    made = CalledProgram(program_of(products, X, X), command_buffers=True)
    assert check(made, X) == ISSUED
    assert check(made, X + 1) == ["cuCtxSetCurrent", *CAPTURED]
    for change in (2, 3):
        assert check(made, X + change) == ["cuCtxSetCurrent", "cuGraphLaunch"]
    kept = []
    for number in range(ROWS + 1):  # other addresses: the oldest graph makes room
        made.move()
        kept.append(made.kept)
        made_room = ["cuGraphExecDestroy"] * (number >= ROWS - 1)
        assert check(made, X - number) == [ISSUED[0], *made_room, *ISSUED[1:]]
        if number in (0, ROWS):
            assert check(made, X) == ["cuCtxSetCurrent", *CAPTURED]
    assert made.gpu.live["executable graph"] == 1 and not made.gpu.live["graph"]
    made.gpu.calls.clear()
    del made.loaded, made.function
    gc.collect()
    assert not made.gpu.calls  # any thread may collect garbage, and releasing waits for the whole GPU
    made.opened.driver.release()
    assert not made.gpu.live


def test_every_call_of_a_capture_fails_once():
    program = program_of(products, X, X)
    for number, entry in enumerate(["cuCtxSetCurrent", *CAPTURED], 1):
        made = CalledProgram(program, command_buffers=True)
        check(made, X)
        if entry == "cuGraphDestroy":
            continue
        made.gpu.calls.clear()
        made.gpu.fail_at = number
        with pytest.raises(RuntimeError, match=f"{entry} failed in "):
            made.call(as_bytes(X, X))
        made.gpu.fail_at = 0
        assert not made.gpu.live["graph"] and made.gpu.live["executable graph"] <= 1
        wanted = [
            "cuCtxSetCurrent",
            *([] if made.gpu.live["executable graph"] else CAPTURED[:-1]),
            "cuGraphLaunch",
        ]
        assert check(made, X) == wanted


@needs_triton
def test_programs_that_wait_for_a_flag_are_not_captured():
    made = CalledProgram(program_of(control, X, np.int32(2)), command_buffers=True)
    for _ in range(3):
        made.call(as_bytes(X, np.int32(2)))
    assert not [name for name in made.gpu.calls if "Graph" in name or "Capture" in name]


def test_what_others_enqueue_while_a_call_is_captured_is_not_captured():
    """XLA's own work on its stream, from another thread, between two launches of a capture."""
    made = CalledProgram(program_of(products, X, X), command_buffers=True)
    check(made, X)
    target, multiply, done = np.zeros(4, np.uint32), made.gpu._cublasLtMatmul, []

    def others(*given):
        def fill():
            made.opened.driver.enter()
            done.append(made.opened.driver.function("cuMemsetD32Async")(target.ctypes.data, 7, 4, STREAM))

        thread = threading.Thread(target=fill)
        made.gpu.buffers.append(target)
        thread.start()
        thread.join()
        made.gpu.buffers.pop()
        return multiply(*given)

    made.gpu._cublasLtMatmul = others
    captured = StandInGpu.entry_of(made.gpu, "cublasLtMatmul")
    prototyped = prototype("cublasLtMatmul")(captured)
    table = (ctypes.c_uint64 * len(ENTRIES)).from_address(made.loaded.state[STATE.index("table")])
    table[ENTRIES.index("cublasLtMatmul")] = ctypes.cast(prototyped, ctypes.c_void_p).value
    assert check(made, X + 1)[-1] == "cuGraphLaunch" and not made.gpu.broken
    assert done == [0, 0] and (target == 7).all()
    target[:] = 0
    check(made, X + 2)  # the graph has nothing of it
    assert not target.any()
