"""Compiles a fragment with XLA: any platform, and the baseline that everything is measured against."""

from mpmd.compile.backends.xla.backend import XlaBackend, XlaExecutable
