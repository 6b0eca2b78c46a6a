"""The GPU target: fragments as launches of Triton kernels and matrix products.  Nothing needs a GPU.

| file | what it holds |
|---|---|
| `target.py` | GPUs of one kind as a target of the driver |
| `devices.py` | GPUs as data |
| `triton/` | plans as Triton source, and this as machine code |
| `pipeline.py` | the list of its passes |
| `products.py` | matrix products as descriptors |
| `launches.py` | thunks as a list of launches |
| `handler.py` | this list as LLVM IR, which XLA calls |
"""
