"""Names of programs: each part of them, and their limit."""

from __future__ import annotations

import pytest

from mpmd.ir import Origin
from mpmd.passes.export.programs import MAX_LENGTH, fragment_name, has_transposed, site_text
from mpmd.passes.fragments.fragment_info import FragmentInfo


def sites(origins: str, *counters: int | None, stage: int | None = None) -> list[FragmentInfo]:
    """Sites of `"f g'"`: names between spaces, a prime for each transposition."""
    found = tuple(Origin(o.rstrip("'"), o.count("'")) for o in origins.split())
    return [FragmentInfo(found, stage, counter) for counter in counters]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (sites("block_0 block_1 block_2", 0), "p7_block_0:2_fwd_call0"),
        (sites("block_2' block_1'", None), "p7_block_2:1_bwd"),
        (sites("block_3 block_2'", None), "p7_block_2:3_fwd_bwd"),
        (sites("head block_1 block_0", None), "p7_block_0:1..._fwd"),
        (sites("g f", None), "p7_f..._fwd"),
        (sites("block block_3", None), "p7_block_3_fwd"),
        (sites("b''", None, stage=2), "p7_stage2_transpose2"),
        (sites("", 3), "p7_inferred_call3"),
        (sites("f", 0, 1, 2), "p7_f_fwd_calls0to2"),
        (sites("f", 2, 1), "p7_f_fwd_calls2from1"),
        (sites("f", 0, 2), "p7_f_fwd"),
        (sites("f", 0) + sites("f'", 1), "p7_f_fwd"),
        (sites("g", 0) + sites("f", 1), "p7_g_fwd"),
        (sites("f", 0, None), "p7_f_fwd"),
    ],
)
def test_names(of: list[FragmentInfo], expected: str) -> None:
    assert fragment_name(7, of, transposed=True) == expected


def test_phases_are_left_out_where_nothing_is_transposed() -> None:
    of = sites("f", 1)
    assert not has_transposed(of)
    assert fragment_name(0, of, transposed=False) == "p0_f_call1"
    assert has_transposed(sites("f'", 1))


def test_long_names_are_cut() -> None:
    name = fragment_name(0, sites("x" * 500, 1), transposed=False)
    assert len(name) == MAX_LENGTH
    assert name.endswith("xx<...>")


def test_description_of_a_site() -> None:
    (site,) = sites("f g'", 3, stage=1)
    assert site_text(site, transposed=True) == "origins [f(fwd), g(bwd)], stage 1, call counter 3"
