"""How programs of any target enter JAX: XLA's FFI, its frame, and the one custom call of all programs.

Handlers run on the host, whatever device they launch work on: their code is the CPU's.

| file | what it holds |
|---|---|
| `frame.py` | the frame of a call, as a handler reads it; the version of the interface |
| `custom_call.py` | the custom call, and the table of the programs that it enters |
| `loaded.py` | the programs in memory, and when they are unloaded |
| `timing.py` | entries of the log of executions |
"""
