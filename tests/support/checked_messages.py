"""Trains in several processes, and prints a digest of every message, taken at both of its ends.

    python -m tests.support.checked_messages MESHES STEPS MODEL:SCHEDULE ...

A buffer that is overwritten while it is sent, or that is read when it is freed, gives two digests for one
message.  Random pauses before offers and requests change the order of events from run to run.
"""

from __future__ import annotations

import hashlib
import json
import random
import time

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.runtime.channels.links import Links
from mpmd.runtime.channels.reshard import assembling
from tests.support import training_in_processes

_MAX_PAUSE = 0.004
sent: dict[int, list[str]] = {}
waiting: list[tuple[int, list[jax.Array]]] = []


def digests(arrays) -> list[str]:
    return [hashlib.sha256(np.array(array).tobytes()).hexdigest()[:16] for array in arrays]


def check_messages() -> None:
    """Makes all messages of this process leave a digest in `sent`, or a copy in `waiting`."""
    offer, pull = Links.offer, Links.pull
    chance = random.Random()

    def checked_offer(self, number, arrays):
        time.sleep(chance.random() * _MAX_PAUSE)
        sent[number] = digests(arrays)
        offer(self, number, arrays)

    def checked_pull(self, process, number, types):
        arrays = pull(self, process, number, types)
        with assembling():  # the message may depend on fragments that are issued after the copy
            waiting.append((number, [jnp.copy(array) for array in arrays]))  # the step may consume them
        time.sleep(chance.random() * _MAX_PAUSE / 4)
        return arrays

    Links.offer, Links.pull = checked_offer, checked_pull


def main() -> None:
    check_messages()
    training_in_processes.main()
    received = {number: digests(arrays) for number, arrays in waiting}
    found = {"process": jax.process_index(), "sent": sent, "received": received}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
