"""The GPU target: fragments as launches of Triton kernels and matrix products.

Only `loading.py` and `tuning/` need a GPU.

| file | what it holds |
|---|---|
| `target.py` | GPUs of one kind as a target of the driver; the list of its passes |
| `gpu_devices.py` | GPUs as data |
| `triton/` | plans as Triton source, and this as machine code |
| `machine/` | what machine code says about the time of kernels |
| `products.py` | matrix products as descriptors |
| `launches.py` | thunks as a list of launches |
| `horizontal.py` | small launches that become one |
| `handler.py` | this list as LLVM IR, which XLA calls |
| `calls.py` | its calls through a table of functions, their errors, and CUDA graphs of them |
| `clock.py` | the GPU's clock: the kernel that writes it, where it is launched, its times as the host's |
| `libraries.py` | the CUDA driver and cuBLASLt: where they are, their functions and types |
| `cuda_driver.py` | the driver with one GPU: kernels, memory, errors in words |
| `cublaslt.py` | products as objects of cuBLASLt, with an algorithm |
| `gpu.py` | the GPUs that this process can use |
| `loading.py` | a program on a GPU: everything that its handler needs |
| `tuning/` | tiles that are measured, and the file that keeps them |
| `backend.py` | fragments as executables |
"""
