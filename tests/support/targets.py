"""CPU targets that tests execute code for."""

from __future__ import annotations

from llvmlite import binding

from mpmd.compile.llvm.cpu import CpuTarget


def runs_here(target: CpuTarget) -> bool:
    """Whether code for a target can run on this machine."""
    if target.triple.split("-")[0] != binding.get_process_triple().split("-")[0]:
        return False
    have = dict(binding.get_host_cpu_features())
    wanted = {f[1:] for f in target.features.split(",") if f.startswith("+")}
    return all(have.get(name, False) for name in wanted)
