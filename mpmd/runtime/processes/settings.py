"""What decides about numbers beside a program: versions, and settings of JAX."""

from __future__ import annotations

import re

from mpmd import jax_distributed
from mpmd.version import __version__

_ADDRESS = re.compile(r"\b0x[0-9a-f]{4,}\b")


def settings_text() -> str:
    """Versions and settings of this process, one a line; equal texts give equal numbers."""
    lines = [f"mpmd {__version__}", *jax_distributed.versions_and_settings()]
    return "".join(f"{line}\n" for line in lines)


def without_addresses(text: str) -> str:
    """A text in which Python objects are printed without their addresses, which differ between processes."""
    return _ADDRESS.sub("0x", text)
