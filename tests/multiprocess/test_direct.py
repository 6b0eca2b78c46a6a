"""Arrays that are sent directly between processes, by the real call, on CPUs: the bits of one process."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.launching import launch, output

PROGRAM = "tests.support.direct_transfers"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "meshes", "devices"), [(2, 2, 1), (3, 3, 1), (4, 2, 2)])
def test_training_with_arrays_sent_directly_equals_one_process(processes, meshes, devices):
    """Three processes: each makes the calls of the others, too.  Four: each mesh is over two of them."""
    arguments = [str(meshes), str(devices), "3"]
    alone = json.loads(output([sys.executable, "-m", PROGRAM, "auto", *arguments]).stdout)
    for transfers in ("device_put", "auto"):
        code, found = launch(processes, PROGRAM, transfers, *arguments, seconds=200)
        assert code == 0 and [sorted(line["process"] for line in found)] == [[*range(processes)]]
        for line in found:
            assert (line["losses"], line["state"]) == (alone["losses"], alone["state"])
            assert (line["pairs"] > 0) == (transfers == "device_put")
