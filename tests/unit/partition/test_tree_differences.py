"""The first node that differs, by its path."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import pytest
from jax.tree_util import keystr

from mpmd.partition.tree_differences import first_difference

Pair = collections.namedtuple("Pair", "a b")
OtherPair = collections.namedtuple("OtherPair", "a c")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["activation"])
@dataclasses.dataclass(frozen=True)
class DenseLayer:
    w: Any
    activation: Any


class Unprinted:
    """Each is equal to itself alone, and all print alike."""

    def __repr__(self) -> str:
        return "Unprinted()"


def difference(got, expected, **more):
    path, *texts = first_difference(jax.tree.structure(got), jax.tree.structure(expected), **more)
    return keystr(path), *texts


LONG = {f"layer_{i}": [1, 2] for i in range(100)}


@pytest.mark.parametrize(
    ("got", "expected", "found"),
    [
        ([1, 2], (1, 2), ("", "a list of 2", "a tuple of 2")),
        ([1, 2], [1, 2, 3], ("", "a list of 2", "a list of 3")),
        (LONG, LONG | {"layer_98": (1, 2)}, ("['layer_98']", "a list of 2", "a tuple of 2")),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, ("", "a dict with ['b']", "a dict with ['c']")),
        ({"a": {}}, {"a": {"w": 1}}, ("['a']", "a dict without ['w']", "a dict with ['w']")),
        ({"a": {"w": None}}, {"a": {"w": 1}}, ("['a']['w']", "None", "an array")),
        ({"a": [1]}, {"a": 1}, ("['a']", "a list of 1", "an array")),
        (Pair(1, 2), OtherPair(1, 2), ("", "a Pair of 2", "a OtherPair of 2")),
        ([{"w": 1}], [DenseLayer(1, "relu")], ("[0]", "a dict with ['w']", "a DenseLayer with .w")),
        (
            [DenseLayer(1, 30 * "x" + "relu")],
            [DenseLayer(1, 30 * "x" + "gelu")],
            ("[0]", f"a DenseLayer with ...{20 * 'x'}relu',)", f"a DenseLayer with ...{20 * 'x'}gelu',)"),
        ),
        (
            DenseLayer(1, Unprinted()),
            DenseLayer(1, Unprinted()),
            ("", *["a DenseLayer with '(Unprinted(),)', equal as text"] * 2),
        ),
        (LONG, LONG, ("", "", "")),
    ],
)
def test_the_first_node_that_differs(got, expected, found):
    assert difference(got, expected) == found


def test_a_leaf_of_a_prefix_is_any_subtree():
    assert difference({"a": 1, "b": [1, 2]}, {"a": {"w": 1}, "b": [{}, 2]}, prefix=True) == ("", "", "")
    found = difference({"a": 1, "b": [1]}, {"a": {"w": 1}, "b": [1, 2]}, prefix=True)
    assert found == ("['b']", "a list of 1", "a list of 2")
    assert difference([1, (2, 3)], [1, 2], prefix=True) == ("[1]", "a tuple of 2", "an array")
