"""Sets of meshes with reasons: how they unite, intersect, print, and choose."""

from __future__ import annotations

import pytest

from mpmd import ir
from mpmd.passes.import_.infer_mesh.mesh_sets import MeshSet, both, read


def made(text: str) -> MeshSet:
    found = read(ir.Attribute.parse(f"#mpmd.meshes_with_origins<{text}>", ir.context()))
    assert found is not None
    return found


@pytest.mark.parametrize("text", ["", '"m1"', '"m2"["f", "user_in"], "m1"', '"m1"["a\\22b\\0A"], "*"["any"]'])
def test_attributes_print_and_parse(text: str) -> None:
    attribute = ir.Attribute.parse(f"#mpmd.meshes_with_origins<{text}>", ir.context())
    found = read(attribute)
    assert found is not None
    assert found.attribute() == attribute
    assert bool(found) == bool(text)


def test_reasons_are_read_without_escapes() -> None:
    assert made('"m1"["a\\22b\\0A"]').meshes == (("m1", ('a"b\n',)),)


def test_union_keeps_order_and_reasons() -> None:
    assert made('"m2"["f"], "m1"') | made('"m1"["g"], "m3", "m2"["f"]') == made('"m2"["f"], "m1"["g"], "m3"')


def test_intersection_joins_reasons() -> None:
    assert made('"m2"["f"], "m1"["g"]') & made('"m1"["h"], "m3"') == made('"m1"["g", "h"]')
    assert made('"m1"') & made('"m2"') == made("")


def test_any_other_stands_for_meshes_that_are_not_named() -> None:
    wide = made('"m1"["f"], "*"["any"]')
    assert wide & made('"m1"["g"], "m2"["h"]') == made('"m1"["f", "g"], "m2"["h", "any"]')
    assert made('"m2"["h"]') & wide == made('"m2"["h", "any"]')
    assert wide & wide == wide
    assert wide.covers(["m1", "m7"])
    assert not made('"m1"').covers(["m1", "m7"])


def test_an_absent_source_set_is_every_mesh() -> None:
    assert both(None, None) is None
    assert both(None, made('"m1"')) == both(made('"m1"'), None) == made('"m1"')
    assert both(made('"m1"'), made('"m2"')) == made("")


def test_the_best_mesh() -> None:
    assert made('"m2", "m10", "m3"').best() == "m10"
    assert made('"m2", "m3"').best(["m3", "m9"]) == "m3"
    assert made('"m1"["broadcast_in"], "m2"["f"]').best() == "m2"
    assert made('"m1"["broadcast_in"]').best() == "m1"
    assert made("").best(["m1"]) is None
    assert made('"m2", "*"["any"]').best(["m1"]) == "m1"
