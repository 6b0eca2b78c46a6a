"""Who runs a program, and on how many threads."""

from __future__ import annotations

import pytest

from mpmd.compile.backends.native_cpu.dispatch import is_handed_over, seconds, threads_for


def costs(flops: float = 0.0, moved: float = 0.0, transcendentals: float = 0.0) -> dict[str, float]:
    return {"flops": flops, "bytes accessed": moved, "transcendentals": transcendentals}


def test_every_kind_of_work_counts():
    one = seconds(costs(flops=1e6))
    assert seconds(costs(flops=2e6)) == pytest.approx(2 * one)
    both = seconds(costs(flops=1e6, moved=1e6, transcendentals=1e6))
    assert both == pytest.approx(one + seconds(costs(moved=1e6)) + seconds(costs(transcendentals=1e6)))
    assert seconds(costs(transcendentals=1e6)) > one


def test_small_programs_run_on_one_thread():
    assert threads_for(costs(flops=1e5), 8) == 1
    assert threads_for(costs(flops=1e9), 8) == 8
    assert threads_for(costs(flops=1e9), 0) == 1


def test_handing_over_is_for_long_programs_and_sooner_where_others_could_work():
    middle = costs(flops=2e7)
    assert is_handed_over(middle, meshes=4) and not is_handed_over(middle, meshes=1)
    for meshes in (0, 1, 4):
        assert is_handed_over(costs(flops=1e9), meshes)
        assert not is_handed_over(costs(moved=1e5), meshes)
