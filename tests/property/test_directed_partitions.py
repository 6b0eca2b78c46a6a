"""One operation on arrays that are cut for devices in any way: the bits are those of the whole."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from mpmd.compile.hlo import print_module
from mpmd.compile.lowering.spmd import spmd_rules
from tests.support.directed import seeds
from tests.support.directed.partitions import FAMILIES, Partition, partition
from tests.support.meshes import evaluated, part, partitioned
from tests.support.rewrite_checks import identical

FAST, SLOW = 2, 2000
ONE = {"x": 1}


def is_local(case: Partition) -> bool:
    """Whether devices compute on their own parts alone; fails where one gets other bits."""
    uncut = [[[] for _ in spec] for spec in case.given], [[[] for _ in spec] for spec in case.wanted]
    module = partitioned(case.function, case.arguments, ONE, *uncut)
    (wanted,) = evaluated(module, case.arguments, ONE, uncut[0])
    with mock.patch.object(spmd_rules, "whole", wraps=spmd_rules.whole) as whole:
        module = partitioned(case.function, case.arguments, case.axes, case.given, case.wanted)
    found = evaluated(module, case.arguments, case.axes, case.given)
    for device, row in enumerate(found):
        for got, want, spec in zip(row, wanted, case.wanted, strict=True):
            own = part(np.asarray(want), spec, case.axes, device)
            assert identical(got, own), f"device {device}: {got}, expected {own}\n{print_module(module)}"
    return not whole.called


@pytest.mark.parametrize("family", FAMILIES)
def test_devices_together_compute_the_operation(family):
    assert sum(is_local(partition(family, seed)) for seed in seeds(FAST)) >= FAST / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_devices_together_compute_many(family):
    assert sum(is_local(partition(family, seed)) for seed in seeds(SLOW)) >= SLOW / 2
