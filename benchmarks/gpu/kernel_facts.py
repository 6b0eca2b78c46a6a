"""What ptxas made of kernels: registers, spills, shared memory; read from their machine code."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile

from mpmd.compile.backends.native_gpu.triton.cubin import Cubin


@dataclasses.dataclass(frozen=True)
class KernelFacts:
    """One kernel: registers of a thread, bytes of it that are in memory instead, shared memory."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def kernel_facts(cubin: Cubin) -> KernelFacts:
    """The facts of one kernel."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.code)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return KernelFacts(cubin.name, used["REG"], used["STACK"] + used["LOCAL"], cubin.shared_bytes)
