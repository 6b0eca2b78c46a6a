"""Integer scalars of a step, such as its number, on every process without a message.

The program of one process fetches only what its own meshes compute.  A scalar that depends on scalar
arguments alone is computed once more on a mesh of each process that lacks it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass

_NAMES = "add and clamp compare constant convert maximum minimum multiply negate not or select subtract xor"
_EXACT = frozenset("stablehlo." + name for name in _NAMES.split())


class CopyScalarResults(FunctionPass):
    """Computes integer scalars that a step returns, such as its number, on a mesh of every process.

        s = m1[] (n) { c = const 1; t = add n c; ret t }
        return s
        -->
        s = m1[] (n) { c = const 1; t = add n c; ret t }
        m = transfer n to m2
        k = m2[] (m) { c = const 1; t = add n c; ret t }
        return s, k {mpmd.copy_of = 0}

    Every process gets the scalars of a step, and passes them to the next one: nothing need then be sent.
    Copied are those that few ops compute from scalar arguments; of integers only, since processors may round
    other numbers in different ways, and the copies must stay equal.

    Requires: donation marked, which would let a copy consume an argument that others read.
    Ensures: a result with `mpmd.copy_of` equals the result of that number.  Cost: linear, times `max_ops`.
    Source: ours.

    Attributes:
        meshes: one of each process; results of other meshes are left alone.
        max_ops: operations that one result may take.
    """

    runs_on = "entry"
    meshes: tuple[str, ...] = ()
    max_ops: int = 8

    def rewrite_function(self, f: ir.Func) -> None:
        """One fragment for each further mesh, with all the results that it copies."""
        plans = {i: plan for i, v in enumerate(f.returned) if (plan := self._plan(v)) is not None}
        returned, numbers = f.returned, list[int]()
        attributes = ir.attribute_dicts(f, "res_attrs", len(returned))
        for mesh in self.meshes:
            wanted = {i: plan for i, plan in plans.items() if returned[i].type.mesh != mesh}
            if wanted:
                returned += _computed([returned[i] for i in wanted], list(wanted.values()), mesh, f)
                numbers += wanted
        if numbers:
            f.returned = returned
            ir.put_attribute_dicts(
                f, "res_attrs", [*attributes, *({"mpmd.copy_of": ir.i64(i)} for i in numbers)]
            )
            ir.return_types_changed(f)

    def _plan(self, result: ir.Value) -> list[ir.Op] | None:
        """The ops in a fragment that compute a result from arguments of the function, producers first."""
        fragment = ir.producer(result)
        if not isinstance(fragment, ir.Fragment) or fragment.mesh not in self.meshes:
            return None
        given = dict(zip(fragment.args, fragment.inputs))
        ops: dict[ir.Op, None] = {}
        todo = [_inside(result)]
        while todo:
            value = todo.pop()
            op = ir.producer(value)
            if not _is_integer_scalar(value.type) or (op is None and _argument(given[value]) is None):
                return None
            if op is None:
                continue
            if op.operation.name not in _EXACT or (len(ops) == self.max_ops and op not in ops):
                return None
            ops.pop(op, None)
            ops[op] = None
            todo += op.operands
        return list(reversed(ops))


def _computed(
    results: Sequence[ir.Value], plans: Sequence[Sequence[ir.Op]], mesh: str, f: ir.Func
) -> list[ir.Value]:
    """Results of fragments, computed once more on another mesh, at the end of the function."""
    where = ir.before(f.terminator)
    makers = [op for op in dict.fromkeys(map(ir.producer, results)) if isinstance(op, ir.Fragment)]
    given = {inner: outer for op in makers for inner, outer in zip(op.args, op.inputs)}
    ops = list(dict.fromkeys(op for plan in plans for op in plan))
    read = (*map(_inside, results), *(value for op in ops for value in op.operands))
    sources = {value: _argument(given[value]) for value in read if value in given}
    sent = {argument: _on(argument, mesh, where) for argument in sources.values()}

    def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
        of = dict(zip(sent, args))
        values = {value: of[source] for value, source in sources.items()}
        for op in ops:
            ir.clone_with(op, values, inside)
        return [values[_inside(result)] for result in results]

    types = [result.type.on(mesh) for result in results]
    fragment = ir.make_fragment(
        mesh, list(sent.values()), types, where, body, results[0].location, ["copy_scalar_results"]
    )
    return list(fragment.results)


def _on(argument: ir.Value, mesh: str, where: ir.InsertionPoint) -> ir.Value:
    kind = argument.type.on(mesh)
    return argument if kind == argument.type else ir.make_transfer(argument, kind, where).result


def _inside(result: ir.Value) -> ir.Value:
    """The value in a fragment that is a result of it."""
    fragment = ir.producer(result)
    assert isinstance(fragment, ir.Fragment)
    return fragment.returned[ir.result_index(result)]


def _is_integer_scalar(kind: ir.Type) -> bool:
    return (
        isinstance(kind, ir.RankedTensorType)
        and not kind.shape
        and isinstance(kind.element_type, ir.IntegerType)
    )


def _argument(value: ir.Value) -> ir.Value | None:
    """The argument of the function that a value is, through transfers; None if it is none, or on the host."""
    while isinstance(op := ir.producer(value), ir.Transfer):
        value = op.tensor
    return value if op is None and not value.type.on_host else None
