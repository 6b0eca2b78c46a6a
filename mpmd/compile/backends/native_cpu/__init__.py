"""The native CPU backend: kernels and matrix products as LLVM IR, one native program per fragment.

| file or folder | what it holds |
|---|---|
| `target.py` | the CPU as data |
| `llvm/` | IR as text, object files, loading |
| `math/` | exp, log, tanh ... for vectors of any width |
| `storage.py` | dtypes in memory and in registers |
| `gemm/` | matrix products |
| `emit/` | kernel plans → kernels |
| `kernel.py`, `shared.py`, `recipes.py` | what a kernel is; functions that all fragments share |
| `program.py`, `waiting.py`, `threads.py` | kernels in order, barriers, worker threads |
| `compilation.py`, `fitting.py`, `artefact.py` | the phases in order; a limit of memory; what is kept |
| `instance.py`, `ffi.py`, `jax_function.py` | a program in memory: run directly, by XLA, by JAX |
| `direct.py`, `profile.py` | single kernels on NumPy arrays, and what they take |
"""
