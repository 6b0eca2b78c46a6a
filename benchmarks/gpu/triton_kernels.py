"""Triton kernels to machine code, without a GPU, and as steps of a handler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.handler import GpuBuffer, Launch, Scalar

_ALIGNED = [["tt.divisibility", 16]]
_SCRATCH = (None, None)  # every kernel of Triton's takes two more pointers; null, as none here needs scratch


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A compiled kernel.

    Attributes:
        shared: bytes of dynamic shared memory that it needs.
        threads: of a block.
        wgmma: how many matrix instructions of Hopper's are in it.
    """

    name: str
    cubin: bytes
    ptx: str
    shared: int
    threads: int
    wgmma: int
    scratch_bytes: int

    def launch(
        self, kernel: int, grid: tuple[int, int, int], parameters: tuple[GpuBuffer | Scalar, ...]
    ) -> Launch:
        """The step that launches it, as the handler's kernel number `kernel`."""
        return Launch(kernel, grid, self.threads, (*parameters, *_SCRATCH), self.shared)


def compile_triton(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, int],
    *,
    arch: str = "sm_90",
    warps: int = 4,
    stages: int = 2,
) -> TritonKernel:
    """Compiles a kernel for an architecture.

    Args:
        function: decorated with `triton.jit`.
        types: of the parameters that are not constants: `*bf16`, `*fp32`, `i32`, `fp32`.  Pointers and
        strides are
            taken to be multiples of 16.
        constants: values of the others.
        arch: such as `sm_90`.
        warps: of a block.
        stages: of software pipelining.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = types[name]
        if types[name].startswith("*") or name in ("row", "image", "positions"):
            attributes[(place,)] = _ALIGNED
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    return TritonKernel(
        name=made.metadata.name,
        cubin=made.asm["cubin"],
        ptx=made.asm["ptx"],
        shared=made.metadata.shared,
        threads=32 * made.metadata.num_warps,
        wgmma=made.asm["ptx"].count("wgmma.mma_async"),
        scratch_bytes=getattr(made.metadata, "global_scratch_size", 0) or 0,
    )
