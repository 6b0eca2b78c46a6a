"""The native CPU backend: kernels and matrix products as LLVM IR, one native program per fragment.

| file or folder | what it holds |
|---|---|
| `backend.py`, `dispatch.py` | the backend; which thread runs a program |
| `compilation.py` | the CPU as a target of the driver |
| `math/` | exp, log, tanh ... for vectors of any width |
| `storage.py`, `narrow.py` | dtypes in memory and in registers; those of less than a byte |
| `emit/` | kernel plans → kernels |
| `gemm/`, `thin_products.py` | matrix products; which of them are thin |
| `attention/` | products, rows and products as one kernel |
| `kernel.py`, `shared.py`, `recipes.py` | what a kernel is; functions that all fragments share |
| `steps.py`, `program.py` | thunks → steps; steps in order, as one function |
| `waiting.py`, `threads.py` | barriers, worker threads |
| `peer_kernels.py`, `exchange.py`, `meeting.py`, `mesh_call.py` | programs of several devices |
| `compiled_program.py`, `overrides.py` | a program as machine code; kernels from files |
| `handler.py`, `ffi.py` | a program's handler, its registration |
| `stamp.py` | a custom call that writes when it runs |
| `memory.py` | memory of programs, at cache lines and in huge pages |
"""
