"""A fault of the compiler is an error in a benchmark, as it is in tests."""

import warnings

import pytest

from benchmarks import script


def test_a_fault_of_the_compiler_ends_a_benchmark_and_a_test(pytestconfig):
    fault = (
        "fragment 'f' is compiled by xla\n  its program is wrong\n  please report this; the text is in f.txt"
    )
    with warnings.catch_warnings(action="ignore"), pytest.raises(UserWarning, match="its program is wrong"):
        script.run(lambda: warnings.warn(fault, UserWarning, stacklevel=1))
    assert f"error:{script.COMPILER_FAULT}:UserWarning" in pytestconfig.getini("filterwarnings")
