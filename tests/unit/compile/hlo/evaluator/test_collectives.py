"""Collectives of the oracle as XLA runs them on two devices."""

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, verify
from tests.support.hlo_meaning import evaluate_devices

SUM = """sum {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
"""


def on_devices(lines, rows, kind="num_partitions"):
    text = f"HloModule m, {kind}={len(rows)}\n{SUM}\nENTRY e {{\n" + "\n".join(lines) + "\n}"
    module = parse_module(text)
    verify(module)
    return evaluate_devices(module, rows), text


TWO = [[np.arange(4, dtype=np.float32)], [np.arange(4, dtype=np.float32) * 10]]
GLOBAL = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
GROUPS = "replica_groups={{0,1}}"
SYNCHRONOUS = {
    "all-reduce": [f"ROOT r = f32[4]{{0}} all-reduce(p), {GROUPS}, to_apply=sum"],
    "all-gather": [f"ROOT r = f32[8]{{0}} all-gather(p), {GROUPS}, dimensions={{0}}"],
    "reduce-scatter": [f"ROOT r = f32[2]{{0}} reduce-scatter(p), {GROUPS}, dimensions={{0}}, to_apply=sum"],
    "all-to-all": [f"ROOT r = f32[4]{{0}} all-to-all(p), {GROUPS}, dimensions={{0}}"],
    "collective-permute": ["ROOT r = f32[4]{0} collective-permute(p), source_target_pairs={{0,1}}"],
    "replica-id": [
        "i = u32[] replica-id()",
        "f = f32[] convert(i)",
        "b = f32[4]{0} broadcast(f), dimensions={}",
        "ROOT r = f32[4]{0} add(p, b)",
    ],
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_collectives_as_xla_runs_them(name, xla):
    lines = ["p = f32[4]{0} parameter(0)", *SYNCHRONOUS[name]]
    ours, text = on_devices(lines, TWO, kind="replica_count")
    for mine, theirs in zip(ours, xla.run_devices(text, TWO)):
        np.testing.assert_array_equal(mine, theirs[0])
