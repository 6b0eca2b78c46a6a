"""Fragments that native code covers in part: native clusters and XLA's, in one function of JAX."""

from mpmd.compile.backends.mixed.backend import MixedBackend, MixedExecutable
