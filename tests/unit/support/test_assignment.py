"""Options that say where a user wants things to be."""

from __future__ import annotations

import pytest

from mpmd.errors import ConfigError
from mpmd.passes import make_pass
from mpmd.support.option_texts import Assignment, Constraint, IndexPlace, NamePlacement


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("m1", NamePlacement("m1")),
        ("m1/0", NamePlacement("m1", 0)),
        ("m1/cpu", NamePlacement("m1/cpu")),
        ("m1/cpu/3", NamePlacement("m1/cpu", 3)),
        ("m1#pinned_host", NamePlacement("m1", None, "pinned_host")),
        ("m1#pinned_host/2", NamePlacement("m1", 2, "pinned_host")),
    ],
)
def test_places_print_and_parse(text: str, place: NamePlacement) -> None:
    assert NamePlacement.parse(text) == place
    assert str(place) == text


def test_assignment_prints_and_parses() -> None:
    text = "f@m1/0,user@home@m2,t@m2#device"
    assignment = Assignment.parse(text)
    assert assignment.get("f") == NamePlacement("m1", 0)
    assert assignment.get("user@home") == NamePlacement("m2")
    assert assignment.get("g") is None
    assert str(assignment) == text
    assert Assignment.parse(str(assignment)) == assignment
    assert Assignment.of(assignment.places) == assignment


def test_the_same_name_twice() -> None:
    assert Assignment.parse("f@m1,f@m1") == Assignment.parse("f@m1")
    with pytest.raises(ConfigError, match="'f' is assigned to m1 and to m2; choose one"):
        Assignment.parse("f@m1,f@m2")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Assignment, "f", "cannot read 'f' in the assignment 'f'"),
        (Assignment, "@m1", "expected: name@mesh or name@mesh/stage"),
        (NamePlacement, "m1#moon", "unknown memory kind 'moon'"),
        (IndexPlace, "x@m1", "expected: index@mesh"),
        (Constraint, "0", "expected: input:output"),
    ],
)
def test_what_cannot_be_read(kind: type, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind.parse(text)  # type: ignore[attr-defined]


def test_options_of_passes_print_and_parse() -> None:
    made = make_pass("mpmd-map-named-ops-to-mpmd-ops", "assignment=f@m1/0,g@m2")
    assert str(made) == "mpmd-map-named-ops-to-mpmd-ops{assignment=f@m1/0,g@m2}"
    made = make_pass("mpmd-map-input-output-to-mesh", "input-assignment=0@m1,2@m2#pinned_host")
    assert str(made) == "mpmd-map-input-output-to-mesh{input-assignment=0@m1,2@m2#pinned_host}"
    made = make_pass("mpmd-enforce-input-output-equisharding", "constraints=0:1,2:0")
    assert str(made) == "mpmd-enforce-input-output-equisharding{constraints=0:1,2:0}"
