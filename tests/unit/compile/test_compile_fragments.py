"""Fragments that differ only in their mesh are compiled once."""

import jax
import numpy as np
import pytest

import mpmd
from mpmd.compile.backends.jax_function import named_sharding
from mpmd.compile.backends.xla import XlaBackend
from mpmd.compile.compiler import alike, compile_fragments
from mpmd.compile.fragment import FragmentModule, ValueSpec
from mpmd.runtime.run.clients import made_devices

ADD = """module {
  func.func public @main(%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.add %a, %b : tensor<8x4xf32>
    return %0 : tensor<8x4xf32>
  }
}"""


def _fragment(name: str, mesh: str, devices: int, text: str = ADD) -> FragmentModule:
    value = ValueSpec((8, 4), "f32", (("data",) if devices > 1 else (), ()))
    return FragmentModule(name, mesh, text, (value, value), (value,), donated=(0,))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the fragments that XLA is asked to compile."""
    names: list[str] = []
    compile_it = XlaBackend.compile

    def counted(backend: XlaBackend, fragment: FragmentModule, mesh: jax.sharding.Mesh):
        names.append(fragment.name)
        return compile_it(backend, fragment, mesh)

    monkeypatch.setattr(XlaBackend, "compile", counted)
    return names


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("made", [True, False])
def test_each_mesh_runs_the_shared_program_on_its_devices(
    devices: int, made: bool, compilations: list[str]
) -> None:
    counts = {"m0": devices, "m1": devices}
    topology = mpmd.make_topology(made_devices(counts) if made else counts)
    fragments = {name: _fragment(name, mesh, devices) for name, mesh in (("f", "m0"), ("g", "m1"))}
    executables = compile_fragments(fragments, topology, "xla")
    has_clients = topology["m0"].devices.flat[0].client is not topology["m1"].devices.flat[0].client
    assert has_clients == made
    assert compilations == ["f"]
    _check_sums(executables, fragments, topology)


@pytest.mark.parametrize("devices", [1, 2])
def test_meshes_of_the_same_devices_run_the_same_program(devices: int, compilations: list[str]) -> None:
    shared = jax.devices()[:devices]
    with pytest.warns(UserWarning, match="share"):
        topology = mpmd.make_topology({"m0": shared, "m1": shared})
    fragments = {name: _fragment(name, mesh, devices) for name, mesh in (("f", "m0"), ("g", "m1"))}
    executables = compile_fragments(fragments, topology, "xla")
    assert compilations == ["f"]
    assert executables["f"].compiled is executables["g"].compiled
    assert executables["g"].fragment.mesh == "m1"
    _check_sums(executables, fragments, topology)


def _check_sums(executables, fragments, topology) -> None:
    for name, executable in executables.items():
        mesh = topology[fragments[name].mesh]
        left, right = (
            jax.device_put(np.full((8, 4), x, np.float32), named_sharding(mesh, spec))
            for x, spec in zip((1, 2), fragments[name].arguments, strict=True)
        )
        (result,) = executable(left, right)
        np.testing.assert_array_equal(result, np.full((8, 4), 3, np.float32))
        on = {id(shard.device) for shard in result.addressable_shards}
        assert on == {id(device) for device in mesh.devices.flat}
        assert left.is_deleted() and not right.is_deleted()
        assert executable.name == name
        assert executable.memory_analysis().aliased == 128 // mesh.devices.size


def test_what_differs_is_not_shared(compilations: list[str]) -> None:
    topology = mpmd.make_topology({"m0": 1, "m1": 1, "m2": 2})
    fragments = {
        "f": _fragment("f", "m0", 1),
        "other_text": _fragment("other_text", "m1", 1, ADD.replace("stablehlo.add", "stablehlo.multiply")),
        "other_mesh": _fragment("other_mesh", "m2", 2),
    }
    assert alike(fragments, topology) == [["f"], ["other_text"], ["other_mesh"]]
    compile_fragments(fragments, topology, "xla")
    assert sorted(compilations) == ["f", "other_mesh", "other_text"]
