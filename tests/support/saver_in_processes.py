"""Two processes train, and a `Saver` writes beside their steps; each prints one JSON line.

    mpmd-run -n 2 -m tests.support.saver_in_processes HOW FOLDER

`well`: all goes well.  `fails`: the second checkpoint cannot be written in process 1.  `killed`: process 1 is
killed while it writes the second one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import jax
import numpy as np

import mpmd
from mpmd.api.checkpoints import files
from mpmd.errors import CheckpointError
from tests.support.stacked_training import batch, init, jitted


def main(how: str, folder: str) -> None:
    key, first = jax.random.key(7), jax.process_index() == 0
    compiled = jitted(jax.process_count()).compiled(jax.eval_shape(init, key), *batch())
    state = compiled.arguments.init(init, key)
    write, found = files.write, {"process": jax.process_index(), "error": ""}

    def slow(*args):
        time.sleep(0.3)  # of some steps
        write(*args)

    def fails(*args):
        raise OSError("No space left on device")

    def killed(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    files.write = slow
    sums = []
    try:
        with mpmd.checkpoint.Saver(folder) as saver:
            for step in range(8):
                if step in (3, 6):
                    if step == 6 and how != "well" and not first:
                        saver.wait()
                        files.write = {"fails": fails, "killed": killed}[how]
                    elif step == 6:
                        saver.wait()
                    saver.save(step, state, {"how": how})
                    sums.append(total(state))
                state, _ = compiled(state, *batch())
    except CheckpointError as error:
        found["error"] = str(error)
    newest = mpmd.checkpoint.restore(folder, compiled.arguments.abstract[0])
    found |= {"steps": mpmd.checkpoint.steps(folder), "same": total(newest.state) in sums}
    print(json.dumps(found), flush=True)


def total(state) -> str:
    """A number of the values of all processes."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(mpmd.fetch(state["params"]))]
    return float(sum(leaf.sum() for leaf in leaves)).hex()


if __name__ == "__main__":
    main(*sys.argv[1:])
