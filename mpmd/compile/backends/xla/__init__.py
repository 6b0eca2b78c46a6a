"""Compiles a fragment with XLA: any platform, and the baseline of all measurements."""

from mpmd.compile.backends.xla.backend import XlaBackend, XlaExecutable
