"""Kernels from files take the place of generated ones; what does not fit is an error that says why."""

import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.cache import DiskCache
from mpmd.compile.driver import compiled_or_kept, prepare_fragment
from mpmd.compile.options import CompileOptions
from mpmd.errors import CompileError
from tests.support.native_fragments import fragment_of, run
from tests.support.native_functions import Floats

pytestmark = pytest.mark.usefixtures("unpoisoned")  # kernels have the numbers that they have for users

floats = Floats()

X = floats(4, 64)
FRAGMENT = fragment_of(lambda x: x + 1, X)


def compiled(folder):
    return prepare_fragment(FRAGMENT, NativeCpu(), CompileOptions(kernel_overrides=folder)).compiled()


@pytest.fixture
def kernel(tmp_path):
    """The folder of the fragment, and the text of its kernel as a dump shows it."""
    folder = tmp_path / FRAGMENT.name
    folder.mkdir()
    text = compiled(None).code.llvm
    start = text.index("define void @kernel0(")
    return folder / "kernel0.ll", text[start : text.index("\n}", start) + 3]


def test_a_changed_kernel_runs(tmp_path, kernel):
    path, text = kernel
    assert "fadd" in text
    path.write_text(text.replace("fadd", "fsub"))
    made = compiled(tmp_path)
    assert "fsub" in made.code.llvm
    np.testing.assert_array_equal(run(FRAGMENT, [X], made)[0], X - 1)
    np.testing.assert_array_equal(run(FRAGMENT, [X], compiled(None))[0], X + 1)


def test_what_it_calls_may_be_declared(tmp_path, kernel):
    path, text = kernel
    body = text.rindex("ret void")
    call = "call void @llvm.donothing()\n  "
    path.write_text(f"declare void @llvm.donothing()\n\n{text[:body]}{call}{text[body:]}")
    made = compiled(tmp_path)
    assert made.code.llvm.count("@llvm.donothing()") == 2
    np.testing.assert_array_equal(run(FRAGMENT, [X], made)[0], X + 1)


def test_another_signature_is_refused_with_both(tmp_path, kernel):
    path, text = kernel
    path.write_text(text.replace("i64 %", "i32 %", 1))
    with pytest.raises(CompileError, match=r"(?s)kernel0.ll: expected void @kernel0\(.*i64.*got .*i32"):
        compiled(tmp_path)


def test_all_kernels_that_do_not_fit_are_named(tmp_path, kernel):
    path, text = kernel
    for name in ("kernel7", "product3"):
        path.with_name(f"{name}.ll").write_text(text.replace("@kernel0(", f"@{name}("))
    with pytest.raises(CompileError, match=r"(?s)no kernel 'kernel7'; it has kernel0.*no kernel 'product3'"):
        compiled(tmp_path)


@pytest.mark.parametrize("content", ["", "; nothing\n", None])
def test_a_file_must_define_the_kernel_of_its_name(tmp_path, kernel, content):
    path, text = kernel
    path.write_text(text.replace("@kernel0", "@other") if content is None else content)
    with pytest.raises(CompileError, match=r"(?s)defines (nothing|@other).*the kernel @kernel0"):
        compiled(tmp_path)


def test_what_llvm_refuses_is_an_error(tmp_path, kernel):
    path, text = kernel
    path.write_text(text.replace("fadd", "fmagic"))
    with pytest.raises(CompileError, match="LLVM refused"):
        compiled(tmp_path)


def test_kernels_from_files_are_not_cached(tmp_path, kernel):
    path, text = kernel
    cache = DiskCache(tmp_path / "cache")
    compiled_or_kept(FRAGMENT, NativeCpu(), CompileOptions(cache=cache))
    path.write_text(text.replace("fadd", "fsub"))
    changed = CompileOptions(cache=cache, kernel_overrides=tmp_path)
    made, kept = compiled_or_kept(FRAGMENT, NativeCpu(), changed)
    assert not kept and "fsub" in made.code.llvm
    made, kept = compiled_or_kept(FRAGMENT, NativeCpu(), CompileOptions(cache=cache))
    assert kept and "fsub" not in made.code.llvm
