"""The reference target: the thunks of a fragment by NumPy, each on its slices of real buffers.

The driver gives it the order, the memory and the thunks that it gives the native target; only the kernels are
the meaning of their plans instead of machine code.  A wrong live range or copy shows in its numbers.

| file | what it holds |
|---|---|
| `target.py` | NumPy as a target of the driver: thunks on buffers, devices in turns |
| `backend.py` | its fragments as executables |
"""
