"""Fragments of which native code covers a part: clusters of it, and of XLA's, in one function of JAX."""

from mpmd.compile.backends.mixed.backend import MixedBackend, MixedExecutable
