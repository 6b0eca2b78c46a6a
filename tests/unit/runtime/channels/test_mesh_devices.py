from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mpmd.errors import ProgramError, SignatureError
from mpmd.runtime.channels.mesh_devices import MeshDevices, partition_spec
from mpmd.runtime.channels.reshard import reshard_pieces
from mpmd.runtime.program.graph import BufferType


def two_meshes(first: int = 2, second: int = 2) -> MeshDevices:
    devices = jax.devices()
    return MeshDevices(
        {"a": Mesh(np.array(devices[:first]), ("x",)), "b": Mesh(np.array(devices[4 - second : 4]), ("x",))}
    )


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ('<@mesh, [{"x"}, {}]>', P("x", None)),
        ('[{}, {"x", "y"}]', P(None, ("x", "y"))),
        ('<@m1, [{"x", ?}, {?}]>', P("x", None)),
        ('<@mesh, [{"x"}, {}], replicated={"y"}>', P("x", None)),
        ("<@mesh, []>", P()),
    ],
)
def test_shardy_text_becomes_a_partition_spec(text, spec):
    assert partition_spec(text) == spec


def test_part_of_an_axis_is_refused():
    with pytest.raises(ProgramError, match=r"^sharding .* uses a part of an axis, \"x\":\(1\)2"):
        partition_spec('<@mesh, [{"x":(1)2}, {}]>')
    with pytest.raises(ProgramError, match=r"^sharding 'x' cannot be read"):
        partition_spec("x")


SPECS = {"a": ["[{}, {}]", '[{"x"}, {}]', '[{}, {"x"}]'], "b": ["[{}, {}]", '[{"x"}, {}]', '[{}, {"x"}]']}


@pytest.mark.fast_cases
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("pair", list(itertools.product(SPECS["a"], SPECS["b"])))
def test_any_sharding_moves_to_any_other(first, second, pair):
    devices = two_meshes(first, second)
    shape = (6, 12)
    source, target = (BufferType(shape, "float32", m, s) for m, s in zip("ab", pair, strict=True))
    host = np.arange(72, dtype=np.float32).reshape(shape)
    array = jax.device_put(host, devices.sharding(source))
    moved = devices.copier(source, target)(array)
    assert moved.sharding.is_equivalent_to(devices.sharding(target), 2)
    np.testing.assert_array_equal(np.asarray(moved), host)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])


def test_moving_between_memories_and_meshes():
    devices = two_meshes()
    host = np.arange(8, dtype=np.float32)
    parked = BufferType((8,), "float32", "a", '[{"x"}]', "pinned_host")
    source = jax.device_put(host, devices.sharding(parked))
    for target in (
        BufferType((8,), "float32", "a", '[{"x"}]'),
        BufferType((8,), "float32", "b", "[{}]"),
        BufferType((8,), "float32", "b", "[{}]", "pinned_host"),
    ):
        moved = devices.copier(parked, target)(source)
        assert moved.sharding.memory_kind == (target.memory_kind or "device")
        np.testing.assert_array_equal(np.asarray(moved), host)


def test_a_copy_never_shares_memory():
    devices = two_meshes(1, 1)
    kind = BufferType((4,), "float32", "a")
    array = jax.device_put(np.ones(4, np.float32), devices.sharding(kind))
    copy = devices.copier(kind, kind)(array)
    assert copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()


def test_pieces_are_disjoint_and_spread_over_replicas():
    half, other, whole = ((0, 4),), ((4, 8),), ((0, 8),)
    of_targets = reshard_pieces([half, other, half, other], [whole, whole])
    assert [[(p.source, p.box) for p in pieces] for _, pieces in of_targets.targets] == [
        [(0, half), (1, other)],
        [(2, half), (3, other)],
    ]


class TestFeeding:
    KIND = BufferType((4,), "float32", "a")

    def place(self, value, fresh=False, kind=KIND):
        return two_meshes(1, 1).placer(kind, "batch.x", fresh=fresh)(value)

    def test_host_memory_is_copied(self):
        raw = np.zeros(4 + 16, np.float32)
        host = raw[(-raw.ctypes.data % 64) // 4 :][:4]  # aligned: JAX would use the memory itself
        array = self.place(host)
        host[0] = 5
        assert float(array[0]) == 0

    def test_an_array_that_is_there_is_used_as_it_is(self):
        there = jax.device_put(np.ones(4, np.float32), jax.devices()[0])
        assert self.place(there) is there
        named = jax.device_put(there, NamedSharding(Mesh(np.array(jax.devices()[:1]), ("z",)), P()))
        assert self.place(named) is named

    def test_fresh_arrays_are_apart_from_the_users(self):
        there = jax.device_put(np.ones(4, np.float32), jax.devices()[0])
        pair = jax.device_put(
            np.ones(4, np.float32), NamedSharding(Mesh(np.array(jax.devices()[:2]), ("z",)), P())
        )
        for array in (there, pair):
            pointers = {s.data.unsafe_buffer_pointer() for s in array.addressable_shards}
            assert self.place(array, fresh=True).unsafe_buffer_pointer() not in pointers

    def test_arrays_from_elsewhere_and_numbers_are_placed(self):
        elsewhere = jax.device_put(np.ones(4, np.float32), jax.devices()[3])
        assert self.place(elsewhere).devices() == {jax.devices()[0]}
        scalar = self.place(2, kind=BufferType((), "float32", "a"))
        assert scalar.dtype == jnp.float32 and float(scalar) == 2

    @pytest.mark.parametrize(
        "value",
        [
            np.ones(3, np.float32),
            np.ones(4, np.int32),
            jax.device_put(np.ones(3, np.float32)),
            jax.device_put(np.ones(4, jnp.bfloat16)),
        ],
    )
    def test_another_shape_or_type_is_refused(self, value):
        with pytest.raises(SignatureError, match=r"^argument batch.x: got .*, compiled for f32\[4\]\n"):
            self.place(value)


def test_a_mesh_without_devices_is_named():
    with pytest.raises(ProgramError, match=r"^a buffer f32\[4\] lives on mesh 'c', which has no devices"):
        two_meshes().sharding(BufferType((4,), "float32", "c"))


def test_one_device_has_a_single_device_sharding():
    assert isinstance(two_meshes(1, 1).sharding(TestFeeding.KIND), SingleDeviceSharding)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("a", '[{"x"}, {}]', None), ("b", '[{"x"}, {}]', None)),
        (("a", '[{"x"}, {}]', None), ("b", '[{}, {"x"}]', None)),
        (("a", "[{}, {}]", None), ("b", '[{"x"}, {}]', "pinned_host")),
        (("a", '[{"x"}, {}]', None), ("a", "[{}, {}]", None)),
    ],
)
def test_moving_does_not_wait_for_the_array(source, target):
    devices = two_meshes()
    shape = (400, 400)
    kinds = [
        BufferType(shape, "float32", mesh, sharding, memory) for mesh, sharding, memory in (source, target)
    ]
    place = devices.sharding(kinds[0])
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 80, lambda i, c: c @ x / 400, x), out_shardings=place)
    x = jax.device_put(np.ones(shape, np.float32), place)
    move = devices.copier(*kinds)
    move(slow(x)).block_until_ready()  # compiled
    pending = slow(x)
    moved = move(pending)
    assert not pending.is_ready() and not moved.is_ready()
    np.testing.assert_allclose(np.asarray(moved), np.ones(shape), rtol=1e-3)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("where", ["there", "elsewhere", "two devices"])
def test_arrays_in_another_layout_are_laid_out_anew(where, fresh):
    from jax.experimental.layout import Format, Layout

    devices = two_meshes(2 if where == "two devices" else 1)
    type_ = BufferType((3, 4), "float32", "a", '[{}, {"x"}]')
    place = devices.placer(type_, "args[0]", fresh=fresh)
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    sharding = SingleDeviceSharding(jax.devices()[3]) if where == "elsewhere" else devices.sharding(type_)
    usual = jax.device_put(host, sharding)
    other = jax.device_put(host, Format(Layout((1, 0)), sharding))
    assert other.format.layout.major_to_minor == (1, 0)
    for value in (usual, other, other, usual):
        placed = place(value)
        assert placed.format.layout.major_to_minor == (0, 1)
        assert placed.sharding.is_equivalent_to(devices.sharding(type_), 2)
        np.testing.assert_array_equal(placed, host)
    if where != "elsewhere" and not fresh:
        assert place(usual) is usual
    usual.delete()
    if where != "elsewhere" and not fresh:
        assert place(usual).is_deleted()
