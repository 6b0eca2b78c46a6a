"""Runs exported programs: one straight-line instruction stream per mesh, checked before its first step.

graph → linearize → Program → verify → decode → Executor.run.  `graph` is the input, `program` the streams,
`executor` issues them; `memory` predicts and measures their bytes, `trace` their times.
"""
