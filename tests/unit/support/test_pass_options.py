"""The command line of passes."""

from __future__ import annotations

import pytest

from mpmd.errors import ConfigError
from mpmd.passes import make_pass
from mpmd.support.passes import split_options, split_outside_brackets


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", []),
        ("a=1  b-c=x,y\nd", [("a", "1"), ("b-c", "x,y"), ("d", "")]),
        ("r=F(a=[x, y], b=z) s=2", [("r", "F(a=[x, y], b=z)"), ("s", "2")]),
        ("r=[a -> b] s=2", [("r", "[a -> b]"), ("s", "2")]),
        ("p=params['transformer q=1", [("p", "params['transformer"), ("q", "1")]),
        ('n="a b" m=)', [("n", '"a b"'), ("m", ")")]),
    ],
)
def test_spaces_in_brackets_do_not_separate(text: str, pairs: list[tuple[str, str]]) -> None:
    assert split_options(text) == pairs


def test_commas_in_brackets_do_not_separate() -> None:
    parts = ["F(a,b)", "G([c,d])", "<e,f>", "->", "g"]
    assert split_outside_brackets(",".join(parts), ",") == parts


def test_options_become_fields() -> None:
    made = make_pass("mpmd-merge-inferred-fragments", "merge-any-consumer=true")
    assert str(made) == "mpmd-merge-inferred-fragments{merge-any-consumer=true}"
    with pytest.raises(ConfigError, match="has no option 'merge-everything'"):
        make_pass("mpmd-merge-inferred-fragments", "merge-everything=true")
    with pytest.raises(ConfigError, match="cannot read 'maybe' as bool"):
        make_pass("mpmd-merge-inferred-fragments", "merge-sideways=maybe")
    with pytest.raises(ConfigError, match="did you mean 'mpmd-fragment-dce'"):
        make_pass("mpmd-fragment-dcf")


def test_rules_are_read_whole() -> None:
    info = 'FragmentInfo(origins=["f","g"],mesh_name="m1")'
    rule = f"FragmentMergeRule(sources=[{info},{info}],target={info})"
    made = make_pass("mpmd-rule-based-merge", f"rules={rule},{rule} remove-control-dependencies=false")
    assert len(made.rules) == 2 and not made.remove_control_dependencies
    assert str(made.rules[0]) == rule
