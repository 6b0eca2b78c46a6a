"""All processes run the same program: its fingerprint is compared before the first step."""

from __future__ import annotations

import base64
import hashlib
import itertools
import zlib

from mpmd.errors import PeerError
from mpmd.runtime.processes.world import World


def agree(world: World, text: str) -> None:
    """Compares the text of a program with those of all processes, by a hash; all must call it.

    Raises:
        PeerError: they differ; names a process, and the first line that differs.
    """
    world.begin("the compilation of a program")
    hashes = world.gather("program", hashlib.sha256(text.encode()).hexdigest())
    other = next((process for process, found in enumerate(hashes) if found != hashes[0]), None)
    if other is None:
        return
    shared = base64.b64encode(zlib.compress(text.encode())).decode() if world.index in (0, other) else ""
    texts = world.gather("text", shared)
    ours, theirs = (zlib.decompress(base64.b64decode(texts[p])).decode() for p in (0, other))
    raise PeerError(_difference(other, ours, theirs))


def _difference(other: int, ours: str, theirs: str) -> str:
    """The page for two texts that differ."""
    pairs = itertools.zip_longest(ours.splitlines(), theirs.splitlines(), fillvalue="(it ends here)")
    number, (first, second) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return (
        f"process {other} runs another program than process 0\n"
        f"  the first line that differs is line {number}\n"
        f"    process 0: {first.strip()[:300]}\n"
        f"    process {other}: {second.strip()[:300]}\n"
        "  run the same script with the same arguments, options and versions in every process"
    )
