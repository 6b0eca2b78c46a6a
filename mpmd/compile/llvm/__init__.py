"""LLVM IR for CPUs, of native fragments and of the handlers by which programs of any target enter JAX.

| file | what it holds |
|---|---|
| `cpu.py` | a CPU as data: its instruction set, registers and caches |
| `llvm_types.py`, `llvm_arithmetic.py`, `squares.py` | values and operations on them |
| `function_builder.py` | functions and modules as text |
| `engine.py` | text to object files, object files to functions in this process; pages of LLVM itself |
"""
