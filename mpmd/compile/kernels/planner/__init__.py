"""From HLO to kernel plans: the loop that computes a group of instructions, if there is one.

| file | what it holds |
|---|---|
| `elements.py` | the value of an instruction at a position, as nodes of a plan |
| `index_rules.py` | one rule per opcode: the positions of its operands |
| `iteration_space.py` | iteration spaces: that of a group, and the position of each value in it |
| `groups.py` | groups of elementwise work and reductions and of updates in place |
| `sorting.py` | sorts of short rows, and comparators that give each element one place |
| `dots.py` | matrix products on strided operands, with epilogues |
| `attention.py` | products, an operation on rows, and products of its results |
| `collectives.py` | the parts of arrays that each device gets in a collective |
| `planned_kernel.py` | any instruction or fusion → its kernels |
| `plan_cache.py` | plans cached for groups of equal structure |
"""

from mpmd.compile.kernels.planner.elements import NoPlan
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel, plan_instruction

__all__ = ["NoPlan", "PlannedKernel", "plan_instruction"]
