"""How programs of any target enter JAX: XLA's FFI, its frame, and the one custom call of all programs.

Handlers run on the host, whatever device they launch work on: their code is the CPU's.

| file | what it holds |
|---|---|
| `frame.py` | the frame of a call, as a handler reads it, and the entries of the log of executions |
| `custom_call.py` | the custom call, its table of programs, and when they are unloaded |
"""
