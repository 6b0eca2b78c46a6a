"""Runs exported programs: one straight-line instruction stream per mesh, checked before its first step.

graph → linearize → Program → verify_streams → decode → Executor.run.  `program/` has the input, the streams
and their checks, `run/` issues them, `channels/` moves arrays between meshes, `processes/` runs one program
in several processes, and `measure/` finds out times; `stream_memory` predicts and measures bytes.
"""
