"""What decides about numbers and is no part of a program: versions, and settings of JAX."""

from __future__ import annotations

import re

import jax
import jaxlib

from mpmd.version import __version__

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
)
"""The last two do not change numbers, but the order in which fragments are issued."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{4,}\b")


def settings_text() -> str:
    """Versions and settings of this process, one a line; equal texts give equal numbers."""
    versions = {"mpmd": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    lines = [f"{name} {version}" for name, version in versions.items()]
    lines += [f"{name} = {getattr(jax.config, name, None)}" for name in _SETTINGS]
    return "".join(f"{line}\n" for line in lines)


def without_addresses(text: str) -> str:
    """A text in which Python objects are printed without their addresses, which differ between processes."""
    return _ADDRESS.sub("0x", text)
