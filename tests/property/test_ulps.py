"""The errors of elementary operations are within the bounds of docs/ulps.md."""

import pytest

from tests.support.ulps import DTYPES, PAGE, bound, errors


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.slow if d == "f64" else ()) for d in DTYPES]
)
def test_errors_are_within_bounds(dtype):
    found = {op: ours for op, (ours, _) in errors(dtype, 4000, xla=False).items()}
    assert {op: error for op, error in found.items() if error > bound(op, dtype)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_within_bounds_on_many_arguments(dtype):
    found = {op: ours for op, (ours, _) in errors(dtype, 1_000_000, xla=False).items()}
    assert {op: error for op, error in found.items() if error > bound(op, dtype)} == {}


def test_the_page_has_the_bounds():
    rows = [
        line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    (_, *head), *table = rows
    dtypes = [name.strip(" |") for name in head if name.strip(" |") != "XLA"]
    assert dtypes == list(DTYPES)
    for op, *cells in table:
        name = op.removeprefix("| ")
        for dtype, cell in zip(dtypes, cells[::2], strict=True):
            assert cell.startswith("–") or f"({bound(name, dtype):.3g})" in cell, (name, dtype)
