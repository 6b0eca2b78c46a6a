"""Measured costs: each kernel once, kept on disk, for fusion and products; nothing unless it is asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu import tuning
from mpmd.compile.backends.native_cpu.compilation import NativeCpu
from mpmd.compile.backends.native_cpu.direct import DirectKernel, aligned_empty
from mpmd.compile.backends.native_cpu.gemm.kernel import GemmKernel
from mpmd.compile.backends.native_cpu.gemm.problem import row_major
from mpmd.compile.backends.native_cpu.gemm.tiling import choose_tiling, tilings
from mpmd.compile.backends.native_cpu.target import host_target, named_target
from mpmd.compile.backends.native_cpu.tuning import Tuning, costs_path, tuning_for
from mpmd.compile.cache import DiskCache
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.cost.profiled import ProfiledCosts
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes.fusion.fusion import Fusion
from mpmd.errors import CompileError, ConfigError
from mpmd.tools.hlo_opt import main
from tests.support.native_fragments import fragment_of, run
from tests.support.native_functions import Floats

floats = Floats()

SOFTMAX = """HloModule softmax

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  x = f32[16,64]{1,0} parameter(0)
  zero = f32[] constant(0)
  e = f32[16,64]{1,0} exponential(x)
  s = f32[16]{0} reduce(e, zero), dimensions={1}, to_apply=add
  sb = f32[16,64]{1,0} broadcast(s), dimensions={0}
  ROOT q = f32[16,64]{1,0} divide(e, sb)
}
"""


@pytest.fixture
def timed(monkeypatch):
    """Pretends to time: what was asked for, and an answer that is always the same."""
    asked = []

    def best_seconds(run):
        run()
        asked.append(run)
        return 1e-5

    for module in (tuning, tuning.profile_plan.__globals__):
        if isinstance(module, dict):
            monkeypatch.setitem(module, "best_seconds", best_seconds)
        else:
            monkeypatch.setattr(module, "best_seconds", best_seconds)
    monkeypatch.setattr(tuning, "_COSTS", {})
    return asked


def function(x, w, b):
    return jax.nn.softmax(jnp.tanh(x @ w + b))


ARGUMENTS = [floats(32, 48), floats(48, 64), floats(64)]


def test_kernels_are_timed_once_and_kept_beside_the_cache(tmp_path, timed):
    fragment = fragment_of(function, *ARGUMENTS)
    options = CompileOptions(cache=DiskCache(tmp_path), kernel_costs="measured")
    made = prepare_fragment(fragment, NativeCpu(), options)
    path = costs_path(tmp_path, host_target())
    first = len(timed)
    assert first > 2 and len(path.read_text().splitlines()) == first
    np.testing.assert_allclose(run(fragment, ARGUMENTS, made.compiled())[0], function(*ARGUMENTS), rtol=1e-5)
    tuning._COSTS.clear()  # as another process
    prepare_fragment(fragment, NativeCpu(), options)
    assert len(timed) == first


def test_nothing_is_timed_unless_asked(tmp_path, timed):
    options = CompileOptions(cache=DiskCache(tmp_path))
    prepare_fragment(fragment_of(function, *ARGUMENTS), NativeCpu(), options)
    assert not timed and not costs_path(tmp_path, host_target()).exists()
    assert tuning_for(host_target(), options) is None
    assert options.key != dataclasses.replace(options, kernel_costs="measured").key


def test_fusion_follows_what_was_measured(monkeypatch, tmp_path):
    """Kernels that do little are said to be quick, others slow: nothing joins."""
    monkeypatch.setattr(tuning, "_COSTS", {})
    monkeypatch.setattr(
        tuning, "profile_plan", lambda plan, target, device, costs, work: 1e-6 if len(plan.nodes) < 4 else 1.0
    )
    fragment = fragment_of(lambda x: jax.nn.softmax(x), floats(16, 64))
    apart = prepare_fragment(fragment, NativeCpu(), CompileOptions(kernel_costs="measured"))
    together = prepare_fragment(fragment, NativeCpu())
    assert len(together.thunks) == 1 < len(apart.thunks)
    assert any("together they take 1000000.0 us" in notice for notice in apart.notices)


def test_a_product_takes_its_fastest_tiling(monkeypatch):
    monkeypatch.setattr(tuning, "_COSTS", {})
    gemm = row_major(256, 512, 768)
    usual, *others = tilings(gemm, host_target())
    assert usual == choose_tiling(gemm, host_target()) and others
    quick = others[-1]
    seconds = {usual: 1.0, **dict.fromkeys(others, 2.0), quick: 0.5}
    monkeypatch.setattr(Tuning, "_product_seconds", lambda self, plan, gemm, tiling: seconds[tiling])
    fragment = fragment_of(lambda a, b: a @ b, floats(256, 768), floats(768, 512))

    def tiling_of(options):
        made = prepare_fragment(fragment, NativeCpu(), options)
        return made.program.threaded.kernels()[0].tiling

    assert tiling_of(CompileOptions(kernel_costs="measured")) == quick
    assert tiling_of(CompileOptions()) == usual
    seconds[quick] = 0.99  # as good as equal
    assert tiling_of(CompileOptions(kernel_costs="measured")) == usual


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("transpose_a,transpose_b", [(False, False), (True, False), (False, True)])
def test_every_tiling_gives_the_product(dtype, transpose_a, transpose_b):
    gemm = row_major(45, 70, 2600, dtype, out_dtype="f32", transpose_a=transpose_a, transpose_b=transpose_b)
    rng = np.random.default_rng(0)
    found = tilings(gemm, host_target())
    assert len(found) > 1
    numpy_dtype = np.float32 if dtype == "f32" else jnp.bfloat16
    a = aligned_empty((2600, 45) if transpose_a else (45, 2600), numpy_dtype)
    b = aligned_empty((70, 2600) if transpose_b else (2600, 70), numpy_dtype)
    a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    left, right = (x.astype(np.float64) for x in (a, b))
    wanted = (left.T if transpose_a else left) @ (right.T if transpose_b else right)
    for tiling in found:
        c = aligned_empty((45, 70), np.float32)
        c[:] = np.nan
        DirectKernel(GemmKernel("product", gemm, tiling), host_target())(a, b, c)
        np.testing.assert_allclose(c, wanted, rtol=1e-3, atol=5e-3)


def test_kernels_for_another_machine_are_not_timed():
    elsewhere = dataclasses.replace(
        named_target("avx2"), triple="aarch64-unknown-linux-gnu", cpu="neoverse-n1"
    )
    with pytest.raises(CompileError, match="cannot be measured on this machine"):
        Tuning(elsewhere)


def test_a_pass_alone_says_that_nobody_measures():
    assert Fusion(costs="measured").costs == "measured"
    with pytest.raises(ConfigError, match="nobody measures kernels here"):
        Fusion(costs="measured").run(parse_module(SOFTMAX, "text"))


def test_the_tool_measures_and_the_file_serves_as_costs(tmp_path, timed, capsys):
    source, costs = tmp_path / "softmax.hlo", tmp_path / "costs.jsonl"
    source.write_text(SOFTMAX)
    assert main([str(source), "-hlo-fusion=costs=measured", f"-measure={costs}"]) == 0
    first = capsys.readouterr().out
    assert timed and len(costs.read_text().splitlines()) == len(timed)
    assert ProfiledCosts(costs).unreadable == 0
    assert main([str(source), f"-hlo-fusion=costs={costs}"]) == 0
    assert capsys.readouterr().out == first
    assert main([str(source), "-hlo-fusion=costs=measured"]) == 1
    assert "-measure=FILE" in capsys.readouterr().err


def test_real_times(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_COSTS", {})
    fragment = fragment_of(lambda x: jnp.tanh(x).sum(-1), floats(8, 16))
    options = CompileOptions(cache=DiskCache(tmp_path), kernel_costs="measured")
    prepare_fragment(fragment, NativeCpu(), options)
    costs = ProfiledCosts(costs_path(tmp_path, host_target()))
    assert costs.unreadable == 0 and costs._seconds and all(s > 0 for s in costs._seconds.values())
