"""A program whose memory is wrong is not run: XLA compiles it, and the user is asked for a report."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import mpmd
from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.cache import DiskCache
from mpmd.compile.compiler import FallbackBackend
from mpmd.compile.lowering.lower import RULES
from mpmd.compile.options import CompileOptions, Dump
from mpmd.compile.thunks.emission import Emitter
from mpmd.errors import HloError, MiscompiledError
from tests.support.native_fragments import compiled, fragment_of

MESH = Mesh(np.array(jax.devices()[:1]), ("d",))
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def function(x):
    return jnp.sort(jnp.tanh(x @ x).sum(0)) @ x


@pytest.fixture
def broken(monkeypatch):
    """The compiler emits thunks in the wrong order."""
    program = Emitter.program
    monkeypatch.setattr(Emitter, "program", lambda self: program(self)[::-1])


def by_native(**options):
    backend = FallbackBackend(NativeCpuBackend(options=CompileOptions(**options)))
    return backend.compile(fragment_of(function, X), MESH)


def test_the_user_is_asked_for_a_report_and_gets_the_right_numbers(broken, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stage = mpmd.named_computation(function, name="stage")
    config = mpmd.make_config(mpmd.make_topology({"m0": 1}), {"stage": "m0"}, backend="native")
    with pytest.warns(
        UserWarning, match="compiled by XLA as a whole:\n  a check found a mistake in the nat"
    ) as said:
        result = mpmd.jit(stage, config)(X)
    assert len(said) == 1
    np.testing.assert_allclose(result, jax.jit(function)(X), rtol=1e-5, atol=1e-5)
    (file,) = tmp_path.glob("mpmd-*-miscompiled.txt")
    assert f"please report this; the text of the program is in {file}" in str(said[0].message)
    text = file.read_text()
    titles = ["what is wrong", "versions", "fragment", "thunks", "buffers", "HLO", "StableHLO"]
    assert re.findall("^==== (.*)$", text, re.MULTILINE) == titles
    assert "should hold" in text and "HloModule" in text and "func.func public @main" in text


@pytest.mark.parametrize(
    "failure", [HloError("dot has no attribute 'x'"), RecursionError("too deep")], ids=["hlo", "depth"]
)
def test_a_failure_of_the_compiler_is_reported_and_xla_compiles(monkeypatch, tmp_path, failure):
    def fails(emitter):
        raise failure

    monkeypatch.setattr(Emitter, "program", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = by_native()
    (file,) = tmp_path.glob("mpmd-*-miscompiled.txt")
    assert made.reasons == (
        "the native compiler failed on it; the results of XLA are right",
        f"please report this; the text of the program is in {file}",
    )
    assert f"{type(failure).__name__}: {failure}" in file.read_text()


def test_a_rule_that_makes_another_shape_is_a_failure_of_the_compiler(monkeypatch, tmp_path):
    """Not an operation for which there is no code, which is nothing to report."""
    monkeypatch.setitem(RULES, "stablehlo.reduce", lambda site: site.operands[0])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = by_native()
    assert made.reasons[0] == "the native compiler failed on it; the results of XLA are right"
    (file,) = tmp_path.glob("mpmd-*-miscompiled.txt")
    assert re.search(r"lowering stablehlo.reduce\(f32\[8,8\].* went wrong: it became", file.read_text())


def test_with_a_dump_the_report_is_in_it(broken, tmp_path):
    made = by_native(dump=Dump(tmp_path))
    assert made.backend == "xla" and made.cost_analysis()["fallbacks"] == 1
    assert made.reasons[1].endswith(f"is in {tmp_path / 'fragment' / 'miscompiled.txt'}")
    assert "should hold" in (tmp_path / "fragment" / "miscompiled.txt").read_text()


def test_a_report_that_cannot_be_written_is_no_error(broken, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert "(it could not be written: " in by_native().reasons[1]


def test_the_cache_holds_only_programs_that_were_checked(broken, monkeypatch, tmp_path):
    assert by_native(cache=DiskCache(tmp_path)).backend == "xla"
    assert not list(tmp_path.glob("*.kept"))
    monkeypatch.undo()
    made = by_native(cache=DiskCache(tmp_path))
    assert made.backend == "native" and not made.kept
    assert by_native(cache=DiskCache(tmp_path)).kept


def test_a_part_of_a_fragment_that_is_wrong_leaves_all_of_it_to_xla(broken):
    def spectrum(x):
        return jnp.linalg.eigvalsh(jnp.tanh(x @ x)) @ jnp.sort(jnp.tanh(x @ x).sum(0) * x)

    made = FallbackBackend(NativeCpuBackend()).compile(fragment_of(spectrum, X), MESH)
    assert made.backend == "xla" and made.reasons[0].startswith("a check found a mistake")


def test_a_check_that_fails_itself_refuses_the_program(monkeypatch):
    def check(*_, **__):
        raise KeyError("surprise")

    monkeypatch.setattr("mpmd.compile.thunks.check.check_thunks", check)
    with pytest.raises(
        MiscompiledError, match="^fragment fragment on mesh: the native compiler gave its v"
    ) as caught:
        compiled(fragment_of(function, X))
    assert "KeyError: 'surprise'" in caught.value.report
