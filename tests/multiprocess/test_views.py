"""What a step says about itself is the same in all processes, and is about all of them."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.support.launching import launch


@pytest.mark.slow
def test_timeline_costs_and_memory_are_those_of_all_processes():
    code, found = launch(2, "tests.support.views_in_processes", "2")
    assert code == 0 and [line.pop("process") for line in found] in ([0, 1], [1, 0])
    first, second = found
    assert first == second
    aligned = re.fullmatch(
        r"\w+, measured, clocks of 2 processes aligned within (\d+\.\d\d) ms", first["title"]
    )
    assert aligned and float(aligned[1]) < 50
    for mesh, calls in (("m0", 6), ("m1", 3)):
        runs = [span for span in first["spans"] if span[0] == mesh and "calls" in span[1]]
        times = sorted((start, end) for _, _, kind, start, end in runs if kind == "compute")
        assert len(times) == calls
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times))
    messages = [span for span in first["spans"] if span[2] == "transfer"]
    assert len(messages) >= 6 and all(start <= end for *_, start, end in messages)
    slept = {name: seconds for name, seconds in first["costs"].items() if "stage" in name}
    assert len(slept) == 3 and all(seconds >= 0.03 for seconds in slept.values())
    assert first["live"].keys() == first["peaks"].keys() == {"m0", "m1"}
    assert all(0 < first["live"][mesh] <= first["peaks"][mesh] for mesh in ("m0", "m1"))
