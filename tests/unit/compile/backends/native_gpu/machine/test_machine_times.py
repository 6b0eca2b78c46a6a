"""Times by machine code: launches, products of the library, and the findings of a program."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.launches import BranchLaunch, FillLaunch, LoopLaunch
from mpmd.compile.backends.native_gpu.machine import disassembly
from mpmd.compile.backends.native_gpu.machine.disassembly import MachineCode, disassembler_problem
from mpmd.compile.backends.native_gpu.machine.execution import RATES, ProgramProfile
from mpmd.compile.backends.native_gpu.machine.launch_report import narrow_kernels, repeated_launches
from mpmd.compile.backends.native_gpu.machine.times import (
    KernelModel,
    alignment_of,
    kernel_model,
    kernel_time,
    product_time,
    rates_of,
)
from mpmd.compile.backends.native_gpu.products import ProductDescriptor, StoredMatrix
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.compile_kernels import TritonCompiler
from mpmd.compile.backends.native_gpu.triton.products import product_kernel
from mpmd.compile.backends.native_gpu.triton.triton_kernels import plan_kernels
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from mpmd.errors import CompileError
from tests.support.native_fragments import fragment_of

H100 = GPUS["H100"]
needs_disassembler = pytest.mark.skipif(bool(disassembler_problem()), reason=disassembler_problem())
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)


def model(together=2, alone=20_000.0, moved=1 << 20, **cycles):
    used = {"issue": 1000.0, **cycles}
    program = ProgramProfile(used, alone, float(moved), {16: moved / 16}, (), False, False, 0.0)
    return KernelModel(MachineCode((), (), 64, 0), program, 4, together, 0)


def priced(of, grid, moved=0.0):
    return kernel_time(of, grid, moved, H100, RATES[90])


def test_what_bounds_a_launch():
    assert priced(model(alone=10.0, moved=0, tensor=30_000.0), 1320).bound == "tensor"
    assert priced(model(moved=0), 132).bound == "latency"
    streams = priced(model(alone=10.0), 132, moved=132 << 20)
    assert streams.bound == "memory"
    assert streams.parts["memory"] == pytest.approx((132 << 20) / 3.0e12, rel=0.01)
    assert priced(model(alone=10.0, moved=0, issue=1.0), 1).bound == "start"


def test_programs_that_share_a_multiprocessor_hide_each_others_latency():
    one, two = (priced(model(together=n, moved=0), 1320).seconds for n in (1, 2))
    assert 1.9 < one / two < 2.1
    full, one_more = (priced(model(moved=0, together=1), grid).parts["latency"] for grid in (132, 133))
    assert one_more == 2 * full


def test_bytes_that_no_instruction_moves_cost_nothing():
    gather = priced(model(alone=10.0, moved=1024), 132, moved=1 << 30)
    assert gather.parts["memory"] == pytest.approx(132 * 1024 / 3.0e12, rel=0.01)


def product(n, pitch):
    a, b, d = (
        StoredMatrix("bf16", 768, False, 0),
        StoredMatrix("bf16", pitch, False, 0),
        StoredMatrix("bf16", pitch, False, 0),
    )
    return ProductDescriptor(1, 8192, n, 768, a, b, d, "f32")


def test_rows_at_odd_places_make_a_product_of_the_library_slow():
    assert [alignment_of(product(50304, p), (0, 0, 256)) for p in (50257, 50258, 50260, 50264, 50304)] == [
        2, 4, 8, 16, 16,
    ]  # fmt: skip
    assert alignment_of(product(50304, 50304), (0, 4, 0)) == 4
    odd, even = (
        product_time(product(50257, p), 0.0, alignment, H100, RATES[90])
        for p, alignment in ((50257, 2), (50304, 16))
    )
    assert odd.seconds > 2 * even.seconds
    assert even.seconds == pytest.approx(2 * 8192 * 768 * 50257 / 798e12, rel=0.3)


def test_launches_of_loops_count_as_often_as_they_run():
    place = Slice(0, 0, 4)
    fills = {name: FillLaunch(name, place, 0) for name in ("condition", "body", "inner", "branch")}
    inner = LoopLaunch("inner", (), place, (fills["inner"],))
    branches = BranchLaunch("branches", place, ((fills["branch"],), ()))
    loop = LoopLaunch("outer", (fills["condition"],), place, (fills["body"], inner, branches))

    def counted(trips):
        return {step.name: times for step, times in repeated_launches([loop], trips)}

    assert counted({}) == {"condition": 1, "body": 1, "inner": 1, "branch": 1}
    assert counted({"outer": 4, "inner": 3}) == {"condition": 5, "body": 4, "inner": 12, "branch": 4}


def test_generations_without_constants_have_no_model():
    with pytest.raises(
        CompileError, match="no model of the machine code of B200: there are some of 8.0 and 9.0"
    ):
        rates_of(GPUS["B200"])


def rows(width):
    b = PlanBuilder("rows", (64, width), row_dims=1)
    x, y = b.operand("x", "bf16", 64 * width), b.operand("y", "bf16", 64 * width)
    v = b.convert(b.load_dense(x), "f32")
    b.store_dense(y, b.convert(b.apply("multiply", v, v), "bf16"))
    return b.finish()


def of_kernel(kernel, capability=90):
    (cubin,) = TritonCompiler().compile({kernel.name: kernel}, capability).values()
    return kernel_model(kernel, cubin, RATES[capability])


@needs_disassembler
@pytest.mark.parametrize("width, narrow", [(768, False), (770, True)])
def test_a_mask_that_ends_at_an_odd_place_makes_accesses_narrow(width, narrow):
    (kernel,) = plan_kernels(rows(width), 8).kernels
    widths = of_kernel(kernel).program.widths
    assert (min(widths) <= 4) == narrow


@needs_disassembler
def test_narrow_accesses_are_found_without_a_model():
    found = {}
    for width in (768, 771):
        fragment = fragment_of(
            lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype),
            np.ones((64, width), jnp.bfloat16),
        )
        code = prepare_fragment(fragment, GpuTarget(GPUS["B200"])).compiled().code
        found[width] = [name.partition("_")[0] for name in narrow_kernels(code.program, code.cubins)]
    assert found == {768: [], 771: ["row"]}


@needs_disassembler
@pytest.mark.parametrize("capability", RATES)
@pytest.mark.parametrize("k", [256, 4096])
def test_products_that_are_counted_in_machine_code_are_those_of_the_plan(capability, k):
    views = [View("bf16", 0, k, 1, ()), View("bf16", 0, 512, 1, ()), View("bf16", 0, 512, 1, ())]
    plan = MatmulPlan("product", (), 1024, 512, k, *views)
    (kernel,) = product_kernel(plan, 1).kernels
    found = of_kernel(kernel, capability)
    assert found.program.flops * kernel.grid == kernel.flops
    assert found.program.matrix == (capability == 90) and found.program.asynchronous
    assert 1 <= found.together <= 4 and not found.code.stack


FRAGMENT = FragmentModule(
    "f",
    "m",
    """module @f {
  func.func @main(%x: tensor<64x128xf32>) -> tensor<64x128xf32> {
    %y = stablehlo.tanh %x : tensor<64x128xf32>
    return %y : tensor<64x128xf32>
  }
}""",
    (ValueSpec((64, 128), "f32", ((), ())),),
    (ValueSpec((64, 128), "f32", ((), ())),),
    (),
)


@needs_triton
def test_without_a_disassembler_there_is_no_guess(monkeypatch, tmp_path):
    target = GpuTarget(H100)
    code = prepare_fragment(FRAGMENT, target).compiled().code
    if not disassembler_problem():
        text = target.machine_costs(code)
        assert text.startswith("H100: ") and "by machine code" in text and "registers" in text
    monkeypatch.setattr(disassembly, "toolchain_folder", lambda: tmp_path)
    other = dataclasses.replace(
        code, cubins={n: dataclasses.replace(c, code=c.code + b"\0") for n, c in code.cubins.items()}
    )
    assert target.machine_costs(other).startswith(
        "no times by machine code: machine code cannot be read: there is no"
    )
