"""The GPU target: fragments as launches of Triton kernels and matrix products.

Only `loading.py` and `tuning/` need a GPU.

| file | what it holds |
|---|---|
| `target.py` | GPUs of one kind as a target of the driver |
| `devices.py` | GPUs as data |
| `triton/` | plans as Triton source, and this as machine code |
| `machine/` | what machine code says about the time of kernels |
| `pipeline.py` | the list of its passes |
| `products.py` | matrix products as descriptors |
| `launches.py` | thunks as a list of launches |
| `horizontal.py` | small launches that become one |
| `handler.py` | this list as LLVM IR, which XLA calls |
| `calls.py` | its calls through a table of functions, and their errors |
| `capture.py` | what a call issues as a CUDA graph, replayed |
| `clock.py` | the GPU's clock: a kernel that writes it, and its times as the host's |
| `stamps.py` | where that kernel is launched |
| `functions.py` | the functions of the CUDA driver and of cuBLASLt, with their types |
| `libraries.py` | where these libraries are |
| `driver.py` | the driver with one GPU: kernels, memory, errors in words |
| `cublaslt.py` | products as objects of cuBLASLt, with an algorithm |
| `gpu.py` | the GPUs that this process can use |
| `loading.py` | a program on a GPU: everything that its handler needs |
| `tuning/` | tiles that are measured, and the file that keeps them |
| `backend.py` | fragments as executables |
"""
