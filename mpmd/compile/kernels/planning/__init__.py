"""From HLO to kernel plans: which loop computes a group of instructions, if one loop can.

| file | what it holds |
|---|---|
| `trace.py` | the value of an instruction at a position, as nodes of a plan |
| `rules.py` | one rule per opcode: where its operands are read |
| `iteration_space.py` | iteration spaces: that of a group, and where each value lies in it |
| `groups.py` | groups of elementwise work and reductions |
| `updates.py` | dynamic-update-slice and scatter: changes in place |
| `sorting.py` | sorts of short rows |
| `dots.py` | matrix products on strided operands, with what follows them |
| `attention.py` | products, rows of what they give, and products of these |
| `collectives.py` | what each device does in a collective |
| `kernels.py` | any instruction or fusion → its kernels |
| `plan_cache.py` | plans that are made once for groups of one structure |
"""

from mpmd.compile.kernels.planning.kernels import PlannedKernel, plan_instruction
from mpmd.compile.kernels.planning.trace import NoPlan

__all__ = ["NoPlan", "PlannedKernel", "plan_instruction"]
