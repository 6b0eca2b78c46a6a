"""Modules as bytes."""

import numpy as np
import pytest

from mpmd.compile.hlo import (
    HloBuilder,
    HloModule,
    array,
    deserialize,
    fingerprint,
    parse_module,
    print_module,
    serialize,
)
from mpmd.errors import HloError


@pytest.fixture
def module():
    made = HloModule("weights")
    builder = HloBuilder.create(made, "main")
    x = builder.parameter(array("f32", (40, 30)))
    values = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    values[0, 0] = np.nan
    total = builder.add("add", x, builder.constant(values))
    made.set_entry(builder.build(builder.add("multiply", total, builder.full(0.1, "f32", (40, 30)))))
    return made


def test_round_trip_keeps_every_bit(module):
    data = serialize(module)
    back = deserialize(data)
    assert fingerprint(back) == fingerprint(module)
    large = next(i for i in back.instructions() if i.opcode == "constant" and i.shape.rank)
    assert (
        large.literal.tobytes()
        == next(i for i in module.instructions() if i.opcode == "constant").literal.tobytes()
    )
    assert serialize(back) == data
    assert len(data) < len(print_module(module))


def test_scheduled_modules_keep_their_order():
    text = """HloModule m, is_scheduled=true

ENTRY e {
  b = f32[] parameter(1)
  a = f32[] parameter(0)
  ROOT s = f32[] add(a, b)
}
"""
    assert [i.name for i in deserialize(serialize(parse_module(text))).entry] == ["b", "a", "s"]


def test_damage_is_found(module):
    data = serialize(module)
    for broken in (data[:-1], data[:100], data[:200] + b"x" + data[201:]):
        with pytest.raises(HloError, match="this serialized HLO module is damaged: its digest does not fit"):
            deserialize(broken)
    with pytest.raises(HloError, match="these bytes are not a serialized HLO module"):
        deserialize(b"PK\x03\x04")
