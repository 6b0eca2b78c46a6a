"""A GPU that is none: experiments in their GPU mode, their handlers called by XLA on CPU.

Launches go through a table whose functions compute with NumPy what the kernels would.  So everything of an
experiment runs that is not a kernel: its programs, its order, its arguments, its checks and its report.
"""

from __future__ import annotations

import ctypes
import math
from unittest import mock

import ml_dtypes
import numpy as np

from benchmarks.gpu import handler
from benchmarks.gpu.driver import DeviceFacts
from benchmarks.gpu.table import ENTRIES, SIGNATURES

BF16 = np.dtype(ml_dtypes.bfloat16)
P, I, F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


def array(address, shape, dtype):
    """The array at an address."""
    dtype = np.dtype(dtype)
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


class Gpu:
    """Stands for the driver and for cuBLASLt.

    Attributes:
        shapes: of attention, by the number of positions.
        broken: errors of launches.
    """

    def __init__(self):
        self.names, self.products, self.attributes, self.broken = [], {}, {}, []
        self._callbacks = [
            ctypes.CFUNCTYPE(I, *SIGNATURES[name])(getattr(self, f"_{name}")) for name in ENTRIES
        ]
        self.table = (P * len(ENTRIES))(*[ctypes.cast(c, P).value for c in self._callbacks])

    # -- the driver's interface
    def facts(self):
        return DeviceFacts("stand-in", "sm_90", 132, 60 << 20, 227 << 10, 13000)

    def context(self):
        return 0xCC

    def kernels(self, image, names, shared=()):
        assert image and all(isinstance(size, int) for size in shared)
        self.names += names
        return list(range(len(self.names) - len(names) + 1, len(self.names) + 1))

    def kernel_facts(self, kernel):
        return {"registers": 0, "spilled_bytes": 0}

    def words(self, status):
        return f"status {status}"

    # -- the entries of the table
    def _cuCtxSetCurrent(self, context):
        return 0 if context == 0xCC else 201

    def _cuLaunchKernel(self, kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        if bx * by * bz > 1024:
            return 1
        name = self.names[kernel - 1]
        try:
            getattr(self, f"_run_{name}")(ctypes.cast(parameters, ctypes.POINTER(P)))
        except Exception as error:
            self.broken.append(f"{name}: {error!r}")
            return 700
        return 0

    def _cuMemcpyDtoDAsync_v2(self, target, source, count, stream):
        ctypes.memmove(target, source, count)
        return 0

    def _cuMemsetD32Async(self, target, word, count, stream):
        array(target, (count,), np.uint32)[:] = word
        return 0

    def _cublasLtMatmulDescSetAttribute(self, descriptor, attribute, where, size):
        value = ctypes.cast(where, ctypes.POINTER(ctypes.c_int64))[0]
        self.attributes.setdefault(descriptor, {})[attribute] = value
        return 0

    def _cublasLtMatmul(
        self, handle, descriptor, alpha, a, da, b, db, beta, c, dc, d, dd, algo, work, size, stream
    ):
        try:
            self._multiply(self.products[descriptor], self.attributes.get(descriptor, {}), b, a, d)
        except Exception as error:
            self.broken.append(f"product: {error!r}")
            return 14
        return 0

    # -- kernels
    @staticmethod
    def _values(parameters, kinds):
        return [ctypes.cast(parameters[n], ctypes.POINTER(kind))[0] for n, kind in enumerate(kinds)]

    def _attention(self, positions, heads, row, image):
        """The arrays' shape: [images, positions, heads, dim]; images are told by who set up the run."""
        return self.images, positions, heads, row // heads

    def _scores(self, q, k, factor):
        s = np.einsum("bqhd,bkhd->bhqk", q, k) * factor
        return np.where(np.tril(np.ones(s.shape[2:], bool)), s, -np.inf)

    def _wide(self, shape, *addresses):
        return [array(address, shape, BF16).astype(np.float32) for address in addresses]

    def _run_attention_forward(self, parameters):
        *at, factor, positions, heads, row, image = self._values(parameters, [P] * 5 + [F] + [I] * 4)
        shape = self._attention(positions, heads, row, image)
        q, k, v = self._wide(shape, *at[:3])
        s = self._scores(q, k, factor)
        top = s.max(-1, keepdims=True)
        e = np.exp2(s - top)
        total = e.sum(-1, keepdims=True)
        array(at[3], shape, BF16)[:] = np.einsum("bhqk,bkhd->bqhd", e / total, v).astype(BF16)
        array(at[4], (shape[0], heads, positions), np.float32)[:] = (top + np.log2(total))[..., 0]

    def _run_attention_delta(self, parameters):
        o, do, delta, positions, heads, row, image = self._values(parameters, [P] * 3 + [I] * 4)
        shape = self._attention(positions, heads, row, image)
        wide_o, wide_do = self._wide(shape, o, do)
        sums = np.einsum("bqhd,bqhd->bhq", wide_o, wide_do)
        array(delta, (shape[0], heads, positions), np.float32)[:] = sums

    def _changes(self, shape, q, k, v, do, sums, delta, factor, scale):
        rows = (shape[0], shape[2], shape[1])
        q, k, v, do = self._wide(shape, q, k, v, do)
        weights = np.exp2(self._scores(q, k, factor) - array(sums, rows, np.float32)[..., None])
        dp = np.einsum("bqhd,bkhd->bhqk", do, v)
        return weights, weights * (dp - array(delta, rows, np.float32)[..., None]) * scale, q, k, do

    def _run_attention_dk_dv(self, parameters):
        *at, factor, scale, positions, heads, row, image = self._values(
            parameters, [P] * 8 + [F] * 2 + [I] * 4
        )
        shape = self._attention(positions, heads, row, image)
        weights, change, q, _, do = self._changes(shape, *at[:6], factor, scale)
        array(at[6], shape, BF16)[:] = np.einsum("bhqk,bqhd->bkhd", change, q).astype(BF16)
        array(at[7], shape, BF16)[:] = np.einsum("bhqk,bqhd->bkhd", weights, do).astype(BF16)

    def _run_attention_dq(self, parameters):
        *at, factor, scale, positions, heads, row, image = self._values(
            parameters, [P] * 7 + [F] * 2 + [I] * 4
        )
        shape = self._attention(positions, heads, row, image)
        _, change, _, k, _ = self._changes(shape, *at[:6], factor, scale)
        array(at[6], shape, BF16)[:] = np.einsum("bhqk,bkhd->bqhd", change, k).astype(BF16)

    def _multiply(self, problem, attributes, a, b, d):
        """As the library's documents say; `a` and `b` are ours, row-major."""
        stored_a = (problem.k, problem.m) if problem.transpose_a else (problem.m, problem.k)
        stored_b = (problem.n, problem.k) if problem.transpose_b else (problem.k, problem.n)
        x, y = array(a, stored_a, BF16).astype(np.float32), array(b, stored_b, BF16).astype(np.float32)
        result = (x.T if problem.transpose_a else x) @ (y.T if problem.transpose_b else y)
        shape = (problem.m, problem.n)
        if problem.epilogue == "gelu_aux_bias":
            result = result + array(attributes[8], (problem.n,), BF16).astype(np.float32)
            array(attributes[11], shape, BF16)[:] = result.astype(BF16)
            result = result * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (result + 0.044715 * result**3)))
        elif problem.epilogue == "dgelu_bgrad":
            h = array(attributes[11], shape, BF16).astype(np.float32)
            inner = np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))
            slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * h**2)
            result = result * (0.5 * (1 + inner) + 0.5 * h * (1 - inner**2) * slope)
            array(attributes[8], (problem.n,), BF16)[:] = result.sum(0).astype(BF16)
        elif problem.epilogue == "bgrada":
            # of the library's A, which is our b, along the products' sums
            array(attributes[8], (problem.n,), BF16)[:] = (
                y.sum(1) if problem.transpose_b else y.sum(0)
            ).astype(BF16)
        array(d, shape, BF16)[:] = result.astype(BF16)


def install(monkeypatch, module):
    """Puts a stand-in where an experiment looks for a GPU; returns it."""
    gpu = Gpu()
    monkeypatch.setattr(module, "load_driver", lambda: gpu)
    monkeypatch.setattr(module, "real_table", lambda driver, library=None: gpu.table)
    ask = handler.FfiFrame.ask

    def ask_without_errors(self, *request):  # XLA on CPU has no stream
        with mock.patch.object(handler.FfiFrame, "return_if", lambda *_: None):
            return ask(self, *request)

    monkeypatch.setattr(handler.FfiFrame, "ask", ask_without_errors)
    register = handler.Handler.register
    monkeypatch.setattr(handler.Handler, "register", lambda self: register(self, "cpu"))
    return gpu
