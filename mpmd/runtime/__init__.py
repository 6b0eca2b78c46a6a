"""Runs exported programs: one straight-line instruction stream per mesh, checked before its first step.

graph → linearize → Program → verify → decode → Executor.run.  `graph` says what is given, `program` what is
made of it, `executor` how it is run; `memory` and `trace` tell what it holds and when it ran.
"""
