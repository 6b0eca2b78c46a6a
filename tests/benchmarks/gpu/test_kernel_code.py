"""Attention kernels become code without a GPU, where Triton is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
HAS_TRITON = importlib.util.find_spec("triton") is not None


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
