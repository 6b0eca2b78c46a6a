"""Groups of fusion: what stands between them is told as by a search through the whole graph."""

import random

import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.passes.fusion.grouping import Grouping


def random_module(rng, count):
    """A graph of additions, each of two earlier values."""
    lines = ["x0 = f32[8] parameter(0)", "x1 = f32[8] parameter(1)"]
    for k in range(2, count):
        lines.append(f"x{k} = f32[8] add(x{rng.randrange(k)}, x{rng.randrange(max(0, k - 4), k)})")
    lines.append("ROOT r = (f32[8]) tuple(x" + str(count - 1) + ")")
    return parse_module("HloModule m\n\nENTRY e {\n  " + "\n  ".join(lines) + "\n}\n")


def circles(grouping, a, b):
    """Whether a way leads from one of two groups to the other, or back to itself, through a third node."""
    seen, waiting = set(), [n for g in (a, b) for n in nodes_after(grouping, g) if n not in (a, b)]
    while waiting:
        node = waiting.pop()
        if node in (a, b):
            return True
        if node not in seen:
            seen.add(node)
            waiting += nodes_after(grouping, node)
    return False


def nodes_after(grouping, node):
    members = getattr(node, "members", [node])
    users = {grouping.group_of.get(u, u) for m in members for u in grouping.readers(m)}
    return [u for u in users if u is not node]


@pytest.mark.parametrize("seed", range(12))
def test_circles_are_those_that_a_search_through_everything_finds(seed):
    rng = random.Random(seed)
    grouping = Grouping(random_module(rng, 40).entry)
    joined = refused = 0
    for _ in range(150):
        groups = grouping.groups()
        if len(groups) < 3:
            break
        a, b = rng.sample(groups, 2)
        wanted = circles(grouping, a, b)
        assert grouping.would_create_cycle(a, b) == wanted
        if wanted:
            refused += 1
        elif rng.random() < 0.5:
            if rng.random() < 0.3:  # somebody asks about others in between
                c, d = rng.sample(groups, 2)
                grouping.would_create_cycle(c, d)
            grouping.join(a, b)
            joined += 1
    assert joined and refused


def test_groups_may_join_in_any_order_if_they_are_no_circle_together():
    module = parse_module(
        "HloModule m\n\nENTRY e {\n  x = f32[8] parameter(0)\n  a = f32[8] negate(x)\n  m = f32[8] abs(a)\n"
        "  b = f32[8] add(a, m)\n  c = f32[8] sine(b)\n  d = f32[8] add(m, c)\n"
        "  ROOT t = (f32[8], f32[8]) tuple(c, d)\n}\n"
    )
    grouping = Grouping(module.entry)
    a, m, b, c, d = (grouping.group_of[i] for i in grouping.order if i in grouping.group_of)
    assert grouping.would_create_cycle(a, b), "through m"
    together = grouping.join(grouping.join(a, b), m)  # a and b alone would have been a circle
    assert grouping.would_create_cycle(together, d), "through c"
    assert not grouping.would_create_cycle(together, c)
    assert not grouping.would_create_cycle(grouping.join(together, c), d)
