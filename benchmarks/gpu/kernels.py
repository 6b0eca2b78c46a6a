"""Kernels written as LLVM IR, and the way from LLVM IR to PTX to a cubin.

llvmlite has LLVM's NVPTX target.  `ptxas`, which turns PTX into a cubin, comes with Triton, with NVIDIA's
wheels or with CUDA; without any the driver of the GPU compiles the PTX when it is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import llvmlite.binding as binding

from benchmarks.gpu.driver import GpuError

TRIPLE = "nvptx64-nvidia-cuda"
_PTX_VERSION = {"sm_70": "60", "sm_75": "63", "sm_80": "70", "sm_86": "71", "sm_89": "78", "sm_90": "80"}
BLOCK = 256

# out = alpha * x + y; f32, four elements a thread, n a multiple of 4
_SCALE_ADD = """
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()

define {convention} void @scale_add(
    ptr addrspace(1) %x, ptr addrspace(1) %y, ptr addrspace(1) %out, i32 %n, float %alpha) {{
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %first = mul i32 %block, {block}
  %number = add i32 %first, %thread
  %start = shl i32 %number, 2
  %inside = icmp slt i32 %start, %n
  br i1 %inside, label %body, label %done
body:
  %at = zext i32 %start to i64
  %px = getelementptr float, ptr addrspace(1) %x, i64 %at
  %py = getelementptr float, ptr addrspace(1) %y, i64 %at
  %po = getelementptr float, ptr addrspace(1) %out, i64 %at
  %vx = load <4 x float>, ptr addrspace(1) %px, align 16
  %vy = load <4 x float>, ptr addrspace(1) %py, align 16
  %one = insertelement <4 x float> poison, float %alpha, i32 0
  %four = shufflevector <4 x float> %one, <4 x float> poison, <4 x i32> zeroinitializer
  %scaled = fmul <4 x float> %vx, %four
  %sum = fadd <4 x float> %scaled, %vy
  store <4 x float> %sum, ptr addrspace(1) %po, align 16
  br label %done
done:
  ret void
}}
"""


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel's code.

    Attributes:
        ptx: always there.
        cubin: None where there is no `ptxas`.
    """

    name: str
    arch: str
    ptx: str
    cubin: bytes | None

    @property
    def image(self) -> bytes:
        """What the driver is given."""
        return self.cubin if self.cubin is not None else self.ptx.encode()


def scale_add(arch: str = "sm_90") -> CompiledKernel:
    """`out[i] = alpha * x[i] + y[i]`, parameters x, y, out, n: i32, alpha: f32; blocks of `BLOCK` threads."""
    ptx = to_ptx(_SCALE_ADD.format(convention="ptx_kernel", block=BLOCK), arch)
    return CompiledKernel("scale_add", arch, ptx, to_cubin(ptx, arch))


def to_ptx(text: str, arch: str) -> str:
    """PTX of LLVM assembly.

    Raises:
        GpuError: this llvmlite cannot do it.
    """
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        module = binding.parse_assembly(f'target triple = "{TRIPLE}"\n{text}')
        module.verify()
        machine: Any = binding.Target.from_triple(TRIPLE).create_target_machine(
            cpu=arch, features=f"+ptx{_PTX_VERSION.get(arch, '80')}", opt=3
        )
        return str(machine.emit_assembly(module))
    except RuntimeError as error:
        raise GpuError(f"LLVM makes no PTX for {arch}: {error}") from error


def to_cubin(ptx: str, arch: str) -> bytes | None:
    """Machine code of PTX, or None where there is no `ptxas`.

    Raises:
        GpuError: `ptxas` refuses it.
    """
    tool = find_ptxas()
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(tool), f"-arch={arch}", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise GpuError(f"{tool} refuses the code: {(done.stderr or done.stdout).strip()}")
        return cubin.read_bytes()


def find_ptxas() -> Path | None:
    """The `ptxas` of Triton, of NVIDIA's wheels, of the PATH or of CUDA, in this order: oldest first."""
    places = []
    if (triton := importlib.util.find_spec("triton")) and triton.submodule_search_locations:
        places.append(Path(triton.submodule_search_locations[0], "backends/nvidia/bin/ptxas"))
    if (nvidia := importlib.util.find_spec("nvidia")) and nvidia.submodule_search_locations:
        for place in nvidia.submodule_search_locations:
            places += [Path(place, "cu13/bin/ptxas"), Path(place, "cuda_nvcc/bin/ptxas")]
    if found := shutil.which("ptxas"):
        places.append(Path(found))
    places.append(Path("/usr/local/cuda/bin/ptxas"))
    return next((place for place in places if place.is_file()), None)
