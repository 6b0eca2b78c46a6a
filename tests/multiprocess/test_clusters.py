"""Processes that the launcher of a cluster starts: `jax.distributed.initialize()` finds their variables."""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.launching import output

PROGRAM = "tests.support.training_in_processes"
CODE = (
    "import jax; jax.config.update('jax_num_cpu_devices', 1)\n"
    "jax.distributed.initialize(initialization_timeout=60)\n"
    f"from {PROGRAM} import main; main()"
)


def slurm(rank: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost,other[1-2]", "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
    }  # fmt: skip


def open_mpi(rank: int, job: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job << 12}.0;tcp://127.0.0.1,10.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [slurm, open_mpi])
def test_the_variables_of_a_cluster_are_enough(cluster):
    job = random.randrange(4096)  # JAX derives the port from it

    def started(rank: int):
        variables = [f"{name}={value}" for name, value in cluster(rank, job).items()]
        return output(["env", *variables, sys.executable, "-c", CODE, "2", "2", "mlp:1f1b"])

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(started, range(2)))
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    found = [json.loads(process.stdout.splitlines()[-1]) for process in done]
    assert [line["process"] for line in found] == [0, 1]
    assert found[0]["losses"] == found[1]["losses"]
