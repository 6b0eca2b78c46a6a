"""What tensor cores make of f32 where a product may be inexact."""

import numpy as np


def tf32(values: np.ndarray) -> np.ndarray:
    """The 11 digits of f32 that are multiplied."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)
