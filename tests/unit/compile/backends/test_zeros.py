"""Fragments that only make zeros are run without a program."""

import jax
import numpy as np
import pytest

import mpmd
from mpmd.compile.backends.jax_function import named_sharding
from mpmd.compile.backends.zeros import ZerosExecutable, makes_only_zeros
from mpmd.compile.compiler import compile_fragments
from mpmd.compile.fragment import FragmentModule, ValueSpec

ZEROS = """module {
  func.func public @main() -> (tensor<8x4xf32>, tensor<8x4xbf16>, tensor<0xi32>) {
    %0 = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<8x4xf32>
    %2 = stablehlo.constant dense<0.0> : tensor<8x4xbf16>
    %3 = stablehlo.constant dense<0> : tensor<0xi32>
    return %1, %2, %3 : tensor<8x4xf32>, tensor<8x4xbf16>, tensor<0xi32>
  }
}"""
ADD = """module {
  func.func public @main(%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.add %a, %b : tensor<8x4xf32>
    return %0 : tensor<8x4xf32>
  }
}"""


def _value(dtype: str, devices: int, shape: tuple[int, ...] = (8, 4)) -> ValueSpec:
    sharded = ("data",) if devices > 1 and shape[0] else ()
    return ValueSpec(shape, dtype, (sharded, ())[: len(shape)])


def _fragments(devices: int, text: str = ZEROS) -> dict[str, FragmentModule]:
    results = (_value("f32", devices), _value("bf16", devices), _value("i32", devices, (0,)))
    value = _value("f32", devices)
    return {
        "start": FragmentModule("start", "m0", text, (), results),
        "add": FragmentModule("add", "m0", ADD, (value, value), (value,), donated=(0,)),
    }


@pytest.mark.parametrize("backend", ["xla", "native"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.filterwarnings("ignore:fragment add on m0 is compiled by XLA")
def test_zeros_are_given_again_and_again_and_may_be_donated(backend: str, devices: int) -> None:
    topology = mpmd.make_topology({"m0": devices})
    made = compile_fragments(_fragments(devices), topology, backend)
    start, add = made["start"], made["add"]
    assert isinstance(start, ZerosExecutable)
    assert start.memory_analysis().results == (8 * 4 * 4 + 8 * 4 * 2) // devices
    ones = jax.device_put(np.ones((8, 4), np.float32), named_sharding(topology["m0"], _value("f32", devices)))
    for _ in range(3):
        zeros, half, empty = start()
        assert (half.dtype, empty.shape, empty.dtype) == ("bfloat16", (0,), "int32")
        assert {id(s.device) for s in zeros.addressable_shards} == set(map(id, topology["m0"].devices.flat))
        np.testing.assert_array_equal(zeros, np.zeros((8, 4)))
        (total,) = add(zeros, ones)
        if devices == 1 or jax.__version_info__ < (0, 11):  # which keeps what is not its own
            assert zeros.is_deleted()
        np.testing.assert_array_equal(total, np.ones((8, 4)))


ONES = ZEROS.replace("dense<0.0> : tensor<f32>", "dense<1.0> : tensor<f32>")
NEGATIVE = ZEROS.replace("dense<0.0> : tensor<f32>", "dense<-0.0> : tensor<f32>")
COMPUTED = ZEROS.replace("    return %1", "    %4 = stablehlo.cosine %1 : tensor<8x4xf32>\n    return %4")


@pytest.mark.parametrize("text", [ONES, NEGATIVE, COMPUTED], ids=["one", "negative", "computed"])
def test_what_is_not_zero_is_compiled(text: str) -> None:
    topology = mpmd.make_topology({"m0": 1})
    assert makes_only_zeros(_fragments(1)["start"], topology["m0"])
    assert not makes_only_zeros(_fragments(1, text)["start"], topology["m0"])
    assert not makes_only_zeros(_fragments(1)["add"], topology["m0"])
    assert compile_fragments(_fragments(1, text), topology, "xla")["start"].backend == "xla"
