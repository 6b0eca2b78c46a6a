"""Kernels become code without a GPU: LLVM IR always, Triton's where it is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fused_kernels import softmax
from benchmarks.gpu import handler_launch
from benchmarks.gpu.driver import GpuError
from benchmarks.gpu.experiment import Experiment
from benchmarks.gpu.kernels import find_ptxas, scale_add, to_cubin, to_ptx
from benchmarks.gpu.plan_kernels import gated_residual, make_plan, print_plan
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.errors import CompileError

ROOT = Path(__file__).resolve().parents[3]
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_llvm_becomes_ptx_with_wide_accesses(arch):
    ptx = scale_add(arch).ptx
    assert f".target {arch}" in ptx and ".visible .entry scale_add(" in ptx
    assert ptx.count("ld.global.v4") == 2 and ptx.count("st.global.v4") == 1


def test_what_llvm_refuses_is_an_error_in_words():
    with pytest.raises(GpuError, match="LLVM makes no PTX for sm_90: "):
        to_ptx("define void @broken() { ret i32 0 }", "sm_90")


@pytest.mark.skipif(find_ptxas() is None, reason="there is no ptxas here")
def test_ptx_becomes_a_cubin():
    assert scale_add().cubin[:4] == b"\x7fELF"
    with pytest.raises(GpuError, match="ptxas refuses the code: "):
        to_cubin("no ptx", "sm_90")


@pytest.mark.parametrize(("dtype", "lanes"), [("f32", 4), ("bf16", 8)])
def test_plans_of_the_cpu_backend_become_gpu_kernels(dtype, lanes):
    kernel = print_plan(make_plan("gated_residual", dtype, 1 << 16), "sm_90")
    assert kernel.lanes == lanes and kernel.blocks == (1 << 16) // (256 * lanes)
    assert kernel.ptx.count("ld.global.v4.b32") == 3 and kernel.ptx.count("st.global.v4.b32") == 1
    uneven = print_plan(gated_residual(8, 1023, dtype), "sm_90")
    assert uneven.lanes == 1 and uneven.blocks == 32 and "ld.global.v" not in uneven.ptx


def test_plans_that_are_no_loops_of_our_own_code_are_refused():
    with pytest.raises(CompileError, match="kernel softmax is not a loop over points that are apart"):
        print_plan(softmax(8, 512, "f32"), "sm_90")
    b = PlanBuilder("turn", (64,))
    b.store_dense(b.operand("y", "f32", 64), b.apply("cosine", b.load_dense(b.operand("x", "f32", 64))))
    with pytest.raises(CompileError, match="kernel turn calls cosf, of which the CPU backend has no code"):
        print_plan(b.finish(), "sm_90")


def test_the_launch_experiment_runs_without_a_gpu(tmp_path):
    run = Experiment("handler_launch", "", tmp_path / "found.json", False, 60.0)
    handler_launch.record(run)
    assert not run.failures


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_attention_kernels_compile_for_hopper():
    from benchmarks.gpu.attention import DELTA_ROWS, DQ, FORWARD, Blocks, compile_kernel

    for which, blocks in (
        ("forward", FORWARD[64][0]),
        ("delta", Blocks(DELTA_ROWS, 0, 4, 2)),
        ("dq", DQ[64][0]),
    ):
        kernel = compile_kernel(which, 64, blocks, "sm_90")
        assert kernel.cubin[:4] == b"\x7fELF" and kernel.scratch_bytes == 0
        assert (kernel.wgmma > 0) == (which != "delta")


INTERPRET = """
import numpy as np
from benchmarks.gpu import attention_kernels as a

class Name:
    def __init__(self, text): self.text = text
    def __str__(self): return self.text
    def __hash__(self): return hash(self.text)
    def __eq__(self, other): return getattr(other, "text", None) == self.text

class Tensor:
    device = "cpu"
    def __init__(self, array): self.array, self.dtype, self.shape = array, Name(array.dtype.name), array.shape
    def data_ptr(self): return self.array.ctypes.data
    def element_size(self): return self.array.itemsize
    def numel(self): return self.array.size
    def size(self): return self.array.shape
    def stride(self): return tuple(s // self.array.itemsize for s in self.array.strides)
    def storage_offset(self): return 0
    def cpu(self): return self
    def untyped_storage(self): return self
    def to(self, *_, **__): return self
    def new_empty(self, *_, **__): return self
    def set_(self, *_): return self
    def copy_(self, _): pass

def call(kernel, grid, *given, **constants):
    kernel[grid](*[Tensor(x) if isinstance(x, np.ndarray) else x for x in given], **constants)

B, P, H, D = 2, 128, 3, 32
rng = np.random.default_rng(0)
q, k, v, do = rng.standard_normal((4, B, P, H, D)).astype(np.float32)
scale, shape = D**-0.5, (P, H, H * D, P * H * D)
factor = scale * a.LOG2_E
o, dq, dk, dv = np.full((4, B, P, H, D), np.nan, np.float32)
sums, delta = np.full((2, B, H, P), np.nan, np.float32)
call(a.attention_forward, (P // 64, B * H), q, k, v, o, sums, factor, *shape, BM=64, BN=32, HD=D)
call(a.attention_delta, (P // 32, B * H), o, do, delta, *shape, BM=32, HD=D)
back = (q, k, v, do, sums, delta)
call(a.attention_dk_dv, (P // 64, B * H), *back, dk, dv, factor, scale, *shape, BM=32, BN=64, HD=D)
call(a.attention_dq, (P // 64, B * H), *back, dq, factor, scale, *shape, BM=64, BN=32, HD=D)
s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
e = np.exp(s - s.max()) * np.tril(np.ones((P, P)))
p = e / e.sum(-1, keepdims=True)
dp = np.einsum("bqhd,bkhd->bhqk", do, v)
ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
for name, found, wanted in (
    ("o", o, np.einsum("bhqk,bkhd->bqhd", p, v)),
    ("dv", dv, np.einsum("bhqk,bqhd->bkhd", p, do)),
    ("dq", dq, np.einsum("bhqk,bkhd->bqhd", ds, k)),
    ("dk", dk, np.einsum("bhqk,bqhd->bkhd", ds, q)),
):
    assert np.abs(found - wanted).max() < 1e-5, name
print("all right")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="Triton's interpreter needs NumPy < 2.4"
)
def test_attention_kernels_compute_attention():
    """In Triton's interpreter, in f32: its `tl.dot` is wrong for bf16."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "all right", done.stderr
