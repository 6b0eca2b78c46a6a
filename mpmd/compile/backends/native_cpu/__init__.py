"""The native CPU backend: kernels and matrix products as LLVM IR, one native program per fragment.

| file or folder | what it holds |
|---|---|
| `backend.py`, `dispatch.py` | the backend; on which threads a program runs |
| `target.py` | the CPU as a target of the driver |
| `math/` | exp, log, tanh ... for vectors of any width |
| `storage.py` | dtypes in memory and in registers; those of less than a byte |
| `kernels/` | kernel plans → kernels |
| `gemm/`, `steps.py` | matrix products; which of them are thin |
| `attention/` | products, rows and products as one kernel |
| `shared.py`, `loading.py` | what a kernel is; functions that all fragments share |
| `native_program.py` | thunks → steps; steps in order, as one function |
| `threads.py` | barriers, worker threads |
| `mesh_collectives.py`, `barrier.py`, `handler.py` | programs of several devices |
| `overrides.py` | a program as machine code; kernels from files |
| `ffi.py` | registration of programs with XLA; a custom call that writes when it runs |
"""
