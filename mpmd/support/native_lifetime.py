"""Objects whose memory native code uses until the process ends.

At exit Python frees its modules, and what they refer to, before XLA has destroyed its clients; until then
their threads run issued calls.  An object that they use gets a reference that Python does not drop.
"""

from __future__ import annotations

import ctypes
from typing import Any


def keep_past_exit(used: Any) -> None:
    """Keeps an object alive until `release` is called, or else until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(used))


def release(used: Any) -> None:
    """Undoes one call of `keep_past_exit`: native code does not use the object any more."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(used))
