"""Kernel plans as Triton source.

| file | what it holds |
|---|---|
| `operations.py` | a cell for each operation and reduction |
| `conversions.py` | element types in memory and in registers, and conversions between them |
| `tiling.py` | the iteration space of a plan as tiles and programs |
| `emit.py` | values and stores of a tile, line by line |
| `online.py` | which reductions of rows one iteration makes, and how |
| `attention_writer.py`, `attention.py` | what attention's kernels have in common, and the kernels |
| `matrices.py`, `products.py` | products of tiles, and a product with its epilogue as one kernel |
| `triton_kernels.py` | a plan as one kernel, or two with partial sums in between |
| `choices.py` | which tiles the kernels of plans get: measured ones, else by rules |
| `compile_kernels.py`, `worker.py` | kernels to machine code, each text once; Triton's own processes |
"""
