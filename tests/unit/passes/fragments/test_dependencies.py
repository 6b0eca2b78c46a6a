"""The stable order of ops: against its definition, and on cycles."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd import ir
from mpmd.passes.fragments.dependencies import Dependencies, control_edges, put_control_edges
from mpmd.passes.schedule.reorder import Precedence


def function(needs: list[list[int]]) -> ir.Module:
    """A function with one fragment per entry, which reads the fragments listed (or the argument)."""
    kind = '!mpmd.mesh_tensor<"m1", tensor<f32>>'
    lines = []
    for i, sources in enumerate(needs):
        operands = [f"%f{j}" for j in sources] or ["%a"]
        args = ", ".join(f"%p{k}: tensor<f32>" for k in range(len(operands)))
        lines.append(
            f'%f{i} = mpmd.fragment<mesh="m1", origin=["f{i}"]> ({", ".join(operands)}) ({args}) '
            f"{{ mpmd.return %p0 : tensor<f32> }} : ({', '.join([kind] * len(operands))}) -> {kind}"
        )
    return ir.parse(
        f'func.func @main(%a: {kind}) -> {kind} attributes {{topology = #mpmd.topology<<"m1" : <["x"=1]>>>}} '
        f"{{\n{chr(10).join(lines)}\nreturn %a : {kind}\n}}"
    )


def swept(count: int, needs: list[set[int]]) -> list[int]:
    """The definition: go over the ops again and again, taking those for which all is taken."""
    order: list[int] = []
    while len(order) < count:
        before = len(order)
        for i in range(count):
            if i not in order and needs[i] <= set(order):
                order.append(i)
        if len(order) == before:
            order.append(min(set(range(count)) - set(order)))
    return order


graphs = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.sets(st.integers(0, n - 1), max_size=3), min_size=n, max_size=n),
        st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=8),
    )
)


@settings(max_examples=50, deadline=None)
@given(graphs)
def test_order_is_that_of_the_definition(graph: tuple[list[set[int]], set[tuple[int, int]]]) -> None:
    drawn, extra = graph
    data = [sorted(j for j in sources if j < i) for i, sources in enumerate(drawn)]
    module = function(data)
    f = ir.funcs(module)[0]
    ops = ir.ops(f)
    edges = sorted((i, j) for i, j in extra if i != j)
    order, cycle = Dependencies(f, [(ops[i], ops[j]) for i, j in edges]).stable_order()
    needs = [{*data[i], *(a for a, b in edges if b == i)} for i in range(len(ops))]
    place = {op: i for i, op in enumerate(ops)}
    assert [place[op] for op in order] == swept(len(ops), needs)
    for op, needed in zip(cycle, [*cycle[1:], *cycle[:1]]):
        assert place[needed] in needs[place[op]]
    acyclic = [place[op] for op in order]
    in_order = all(acyclic.index(j) < acyclic.index(i) for i in range(len(ops)) for j in needs[i])
    assert in_order == (not cycle)


def test_precedence_refuses_what_contradicts_it_and_says_why() -> None:
    module = function([[], [0], [], []])
    f = ir.funcs(module)[0]
    a, b, c, d = ir.ops(f)
    precedence = Precedence(f)
    assert precedence.add(b, c) == []
    assert precedence.add(a, c) == []  # follows already
    assert precedence.add(c, d) == []
    assert precedence.add(d, a) == [a, b, c, d]
    assert precedence.edges == [(b, c), (c, d)]


def test_path_follows_data_flow() -> None:
    module = function([[], [0], [1], [0, 2]])
    f = ir.funcs(module)[0]
    a, _, _, d = ir.ops(f)
    assert Dependencies(f).path(a, d) == [a, d]
    assert Dependencies(f).path(d, a) == []


def test_control_edges_survive_text() -> None:
    module = function([[], [], []])
    f = ir.funcs(module)[0]
    a, b, c = ir.fragments(f)
    put_control_edges(f, [(c, a), (b, a)])
    again = ir.parse(ir.to_text(module))
    edges = control_edges(ir.funcs(again)[0])
    assert [(x.origins[0].name, y.origins[0].name) for x, y in edges] == [("f1", "f0"), ("f2", "f0")]
    put_control_edges(f, [])
    assert "control" not in ir.to_text(module)
