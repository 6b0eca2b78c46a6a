"""The text that kernels share: functions that they call."""

from __future__ import annotations

from mpmd.compile.backends.native_gpu.triton import conversions, operations

PRELUDE = operations.PRELUDE + conversions.PRELUDE
"""Triton source of the functions that kernels call, beside those of `libdevice`."""
