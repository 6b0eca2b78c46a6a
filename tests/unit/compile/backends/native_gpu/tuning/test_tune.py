"""Tiles that are measured: on a stand-in whose clock knows what a kernel takes."""

import ctypes
import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mpmd.compile import hlo
from mpmd.compile.backends import targets
from mpmd.compile.backends.native_gpu.backend import NativeGpuBackend
from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.libraries import CudaLibraries
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.choices import MeasuredTiles, read_table, table_file
from mpmd.compile.backends.native_gpu.triton.tiling import resized, tiling_of
from mpmd.compile.backends.native_gpu.tuning.tile_candidates import tuned_kernels
from mpmd.compile.backends.native_gpu.tuning.tune import TuningTask, alike, fastest, tune
from mpmd.compile.cache import DiskCache
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.normalise import normalise
from mpmd.compile.options import CompileOptions
from mpmd.errors import CompileError
from mpmd.tools import gpu_tune
from tests.support.gpu_plans import column_sums
from tests.support.native_fragments import fragment_of
from tests.support.simulated_gpu import StandInGpu

pytestmark = pytest.mark.usefixtures("unpoisoned")
LINE = "product_ab12cd34 x192: 128x256x64 w8 s4\n"
MODULE = """HloModule layer
ENTRY main {
  x = bf16[64,64] parameter(0)
  w = bf16[64,128] parameter(1)
  y = bf16[64,128] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t = bf16[64,128] tanh(y)
}
"""


class ClockedGpu(StandInGpu):
    """Kernels compute nothing; each takes so many microseconds as `takes` says.

    Those of which `wrong` says so write a number.
    """

    def __init__(self, takes, dies_at=0, wrong=lambda kernel: False):
        super().__init__()
        self.takes, self.now, self.dies_at, self.wrong = takes, 0.0, dies_at, wrong

    def _cuLaunchKernel(self, function, *rest):
        kernel = self._get("function", function)["kernel"]
        self.now += 1e-6 * self.takes(kernel)
        self.launched.append(kernel.name)
        if self.wrong(kernel):
            (place,) = (k for k, operand in enumerate(kernel.operands) if operand in kernel.writes)
            parameter = ctypes.cast(rest[-2], ctypes.POINTER(ctypes.c_void_p))[place]
            address = ctypes.cast(parameter, ctypes.POINTER(ctypes.c_uint64))[0]
            ctypes.memset(self._memory(address, 2), 0x47, 2)
        return self._state()

    def _cuStreamSynchronize(self, stream):
        return self._state()

    def _state(self):
        return 719 if 0 < self.dies_at <= len(self.launched) else 0

    def _cuEventRecord(self, event, stream):
        self._get("event", event)[:] = [self.now]


def by_stages(kernel):
    """A product with four stages is the fastest; anything else gets slower with its warps."""
    return 50.0 if "num_stages=4" in kernel.source and kernel.warps == 4 else 80.0 + kernel.warps


def task(folder, **given):
    module = hlo.parse_module(MODULE, "input")
    return TuningTask([(gpu_tune.fragment_of(module), module)], folder, **{"seconds": 100.0, **given})


def tuned(folder, gpu, **given):
    said = []
    path = tune(task(folder, **given), said.append, gpu)
    assert not gpu.broken and not gpu.live
    return path, said


def program(tiles, text=MODULE):
    target = GpuTarget(GPUS["H200"], StandInGpu().compiler, tiles=tiles)
    module = hlo.parse_module(text, "input")
    return target, prepare_fragment(gpu_tune.fragment_of(module), target, module=module).program


def test_the_fastest_way_is_what_programs_are_made_of(tmp_path):
    path, said = tuned(tmp_path, ClockedGpu(by_stages))
    table = read_table(path)
    ((key, choice),) = table.lines
    assert choice.endswith("w4 s4") and key.startswith("product_") and "84.0 us x1" in said[1]
    (target, made), (again, same), (plain, own) = program(table), program(table), program(MeasuredTiles())
    ((name, kernel),) = made.kernels.items()
    assert "num_stages=4" in kernel.source and kernel.warps == 4 and kernel.smaller is None
    assert made.text() == same.text() and target.key() == again.key()
    assert key == f"{next(iter(own.kernels))} x{own.steps[0].grid}" and name not in own.kernels
    assert target.key() != plain.key(), "programs with other tiles are other programs"


def test_a_second_run_measures_what_is_not_in_the_table(tmp_path):
    first, gpu = ClockedGpu(by_stages), ClockedGpu(lambda kernel: 9.0)
    path, _ = tuned(tmp_path, first)
    text = path.read_text()
    _, said = tuned(tmp_path, gpu)
    assert first.launched and not gpu.launched and path.read_text() == text and "0 of them" in said[0]
    tuned(tmp_path, gpu, again=True)
    assert [choice for _, choice in read_table(path).lines] == ["own"], (
        "all are equal: there are rules for it"
    )
    assert "smaller" not in text and program(read_table(path))[1].text() == program(MeasuredTiles())[1].text()


def test_a_way_with_other_results_is_left_out(tmp_path):
    wrong = {"64x64x32 w4 s4", "64x64x64 w4 s4"}

    def of_64_columns(kernel):  # wider tiles are computed in pieces of so many
        return "num_stages=4" in kernel.source and "tl.split" not in kernel.source

    gpu = ClockedGpu(by_stages, wrong=of_64_columns)
    path, said = tuned(tmp_path, gpu)
    ((_, choice),) = read_table(path).lines
    assert choice.endswith("w4 s4") and choice not in wrong
    assert {line.strip() for line in said[2:-1]} == {
        f"{way} computes something else; please report it" for way in wrong
    }


def test_results_are_alike_if_only_their_rounding_differs():
    one = {0: np.array([1.0, 100.0, np.nan, np.inf]), 7: np.zeros(3)}
    assert alike({0: np.array([2.0, 101.0, np.nan, np.inf])}, one) and not alike({0: np.zeros(4)}, one)
    assert not alike({0: np.array([1.0, 100.0, np.nan, 3.0])}, one) and not alike({7: np.zeros(2)}, one)


def test_time_that_is_over_ends_it(tmp_path):
    path, said = tuned(tmp_path, ClockedGpu(by_stages), seconds=-1.0)
    assert "the time is over" in said[1] and not path.exists()


@pytest.mark.parametrize("points", [512, 2048, 16384])
@pytest.mark.parametrize("rows", [1, 31, 33, 1000, 4096])
def test_every_program_of_resized_sums_has_rows(rows, points):
    plan = normalise(column_sums(rows, 100))
    for programs in (1, 7, 264, 1056):
        steps = resized(tiling_of(plan, programs), points, programs).row_steps
        assert steps.side * 128 <= max(points, 128) and (steps.sharing - 1) * steps.part < rows
        assert steps.sharing * steps.part >= rows


@pytest.mark.parametrize("best, choice", [(99.0, "own"), (97.0, "fast")])
def test_a_difference_within_noise_is_none(best, choice):
    assert fastest({"own": 100.0, "fast": best, "slow": 120.0}) == choice


def test_an_error_that_ends_the_context_is_named_and_keeps_what_was_found(tmp_path):
    gpu = ClockedGpu(by_stages, dies_at=60)
    with pytest.raises(CompileError, match="running product_.* cuLaunchKernel failed"):
        tune(task(tmp_path), lambda line: None, gpu)
    assert not gpu.broken and not gpu.live and not list(tmp_path.glob("*.tiles"))
    gpu = ClockedGpu(by_stages)
    gpu.fail_at = 1 + gpu_calls(tmp_path).index("cuMemAlloc_v2")
    path, said = tuned(tmp_path, gpu)  # without memory for a kernel the next one is measured
    assert not path.exists() and "x1" not in "".join(said)


def gpu_calls(folder):
    gpu = ClockedGpu(by_stages)
    tuned(folder / "calls", gpu)
    return gpu.calls


@pytest.mark.parametrize("text", [
    "product_ab12cd34 x192: 128x256 w8 s4", "column_ab12cd34 x1: 1x2x3 w8 s4", "a line",
    "row_ab12cd34 x1: p1 g2",
    "product_ab12cd34 x192: 96x256x64 w8 s4",
    "loop_ab12cd34 x192: p1024 g264 w0",
])  # fmt: skip
def test_a_line_that_says_no_tile_is_named(text, tmp_path, caplog):
    with pytest.raises(CompileError, match=f"line 3 is not a kernel with its tile: {text!r}"):
        MeasuredTiles.parsed(f"# about\n{LINE}{text}\n")
    gpu, mesh = StandInGpu(), Mesh(np.array(jax.devices()[:1]), ("x",))
    backend = functools.partial(NativeGpuBackend.of, mesh, CompileOptions(cache=DiskCache(tmp_path)), gpu)
    path = table_file(tmp_path, backend().target.gpu, gpu.compiler)
    path.write_text(f"{LINE}")
    assert backend().target.tiles.lines == (tuple(LINE.strip().split(": ")),)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "mpmd.compile"):
        assert [backend().target.tiles.lines for _ in range(2)] == [()] * 2
    (warning,) = caplog.messages
    assert f"measured tiles are not used: {path}: line 1" in warning


class WithCompiler(CudaLibraries):
    """A machine with a compiler, and here without a driver."""

    compiler = StandInGpu().compiler


def test_a_table_that_others_may_write_is_not_used(tmp_path):
    path = tmp_path / "H200.tiles"
    path.write_text(LINE)
    path.chmod(0o666)
    with pytest.raises(CompileError, match="measured tiles are not used: others may write to"):
        read_table(path)
    path.chmod(0o600)
    path.write_bytes(b"\xff")
    with pytest.raises(CompileError, match="has bytes that are not text"):
        read_table(path)


def attended(x, w, s):
    q, k, v = (a.reshape(1, 256, 2, 64) for a in jnp.split(x, 3, -1))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)).astype(x.dtype)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(256, 128)
    return jax.nn.gelu(y @ w), x.sum(0), jax.nn.softmax(s.astype(jnp.float32)), jnp.tanh(w)


ARGUMENTS = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 384), (128, 256), (64, 128))]


def test_every_family_has_ways_that_a_table_chooses():
    """The kernels of a program with the last way of each are exactly these ways' kernels."""
    fragment = fragment_of(attended, *(np.ones(a.shape, a.dtype) for a in ARGUMENTS))
    target = GpuTarget(GPUS["H200"], StandInGpu().compiler)
    kernels = tuned_kernels(prepare_fragment(fragment, target).thunks, target.gpu)
    assert {k.key.partition("_")[0] for k in kernels} == {"product", "attention", "column", "row", "loop"}
    lines = [(k.key, k.ways[-1].choice) for k in kernels]
    tiles = MeasuredTiles.parsed(MeasuredTiles.of(lines).text())
    made = prepare_fragment(fragment, dataclasses.replace(target, tiles=tiles)).program
    named = {name for name, kernel in made.kernels.items() if not kernel.parts}
    ways = {kernel.name for k in kernels for kernel in k.ways[-1].kernels}
    assert named <= ways and len(named) >= len(kernels) - 2, "small launches are groups"


@pytest.mark.parametrize(
    "package, said", [("", "this machine has no CUDA driver"), ("Triton is missing", "Triton")]
)
def test_the_tool_says_what_is_missing(package, said, tmp_path, monkeypatch, capsys):
    gpu = StandInGpu(problem=package)
    if not package:
        monkeypatch.setattr(targets, "TUNERS", {"gpu": functools.partial(tune, libraries=WithCompiler())})
    else:
        monkeypatch.setattr(targets, "TUNERS", {"gpu": functools.partial(tune, libraries=gpu)})
    file = tmp_path / "layer.hlo"
    file.write_text(MODULE)
    arguments = [str(file), f"--mpmd_compile_cache_dir={tmp_path}/cache"]
    assert gpu_tune.main(arguments) == 1 and f"mpmd-gpu-tune: {said}" in capsys.readouterr().err
    assert gpu_tune.main([str(tmp_path), *arguments[1:]]) == 1
    assert "has no modules of fragments" in capsys.readouterr().err


def test_the_tool_reads_a_dump(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets, "TUNERS", {"gpu": functools.partial(tune, libraries=ClockedGpu(by_stages))})
    for name in ("one", "two"):
        (tmp_path / "fragments" / name).mkdir(parents=True)
        (tmp_path / "fragments" / name / "before_optimizations.txt").write_text(MODULE)
    folder = tmp_path / "cache"
    assert gpu_tune.main([str(tmp_path), f"--mpmd_compile_cache_dir={folder}"]) == 0
    said = capsys.readouterr().out
    assert "1 kernels, 1 of them to measure" in said and str(next(folder.glob("H200-*.tiles"))) in said
