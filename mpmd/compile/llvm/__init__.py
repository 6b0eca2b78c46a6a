"""LLVM IR for CPUs, of native fragments and of the handlers by which programs of any target enter JAX.

| file | what it holds |
|---|---|
| `target.py` | a CPU as data: its instruction set, registers and caches |
| `types.py`, `arithmetic.py`, `indices.py`, `squares.py` | values and operations on them |
| `builder.py`, `module.py` | functions and modules as text |
| `engine.py` | text to object files, object files to functions in this process |
| `code_pages.py` | LLVM's own code, unmapped when nothing is compiled |
"""
