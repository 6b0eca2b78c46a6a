"""mpmd-infer-mesh-convert-reduce-ops."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.import_.infer_mesh import mesh_sets
from mpmd.passes.import_.infer_mesh.mesh_sets import REDUCE, SRC_SET


class InferMeshConvertReduceOps(FunctionPass):
    """Turns marked reductions of values from several meshes into `mpmd.reduce`, which may cross meshes.

        s = add a b {reduce=add}; t = add s c {reduce=add}; r = reduce<none> t
        -->  t = reduce<add> a, b, c; r = reduce<none> t

    Only those that the user tagged with a reduce, through ops with one operand; or, with the option, all
    that are marked.  Reductions of one kind that feed each other become one.

    Requires: source sets.  Ensures: no marked op left that may be converted.  Cost: linear.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.

    Attributes:
        infer_cross_mesh_reductions: convert all that are marked, tagged or not.
    """

    runs_on = "any"
    infer_cross_mesh_reductions: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Finds the user's tags, then converts in program order."""
        if f.is_external:
            return
        tagged = _tagged(f)
        for body in [f, *ir.ops(f, ir.For)]:
            for op in ir.ops(body):
                if mesh_sets.is_meshless(op) and REDUCE in op.attributes:
                    if self.infer_cross_mesh_reductions or op in tagged:
                        _convert(op)


def _tagged(f: ir.Func) -> set[ir.Op]:
    """The reductions whose result the user passed to a reduce, and those that feed them."""
    found: set[ir.Op] = set()
    for tag in ir.walk(f, ir.Reduce):
        op = ir.producer(tag.operands[0]) if tag.kind == "none" else None
        while op is not None and len(op.operands) == 1 and len(op.results) == 1:
            op = ir.producer(op.operands[0])
        if op is None:
            continue
        kind = mesh_sets.reduction_of(op)
        if kind is not None:
            found |= _same_kind_above(op, kind)
        elif op.operation.name == "stablehlo.reduce":
            concat = ir.producer(op.operands[0])
            if concat is not None and mesh_sets.concat_reduce(concat) is not None:
                found.add(op)
    return found


def _same_kind_above(op: ir.Op, kind: str) -> set[ir.Op]:
    found: set[ir.Op] = set()
    todo: list[ir.Op | None] = [op]
    while todo:
        above = todo.pop()
        if above is not None and above not in found and mesh_sets.reduction_of(above) == kind:
            found.add(above)
            todo += [ir.producer(v) for v in above.operands]
    return found


def _convert(op: ir.Op) -> None:
    if op.operation.name == "stablehlo.concatenate":
        return  # removed with the reduce that reads it
    if op.operation.name == "stablehlo.reduce":
        _convert_concat_reduce(op)
        return
    operands: list[ir.Value] = []
    absorbed = []
    for value in op.operands:
        source = ir.producer(value)
        if isinstance(source, ir.Reduce) and source.reduction == op.attributes[REDUCE]:
            operands += source.operands
            if len(ir.users(source)) == 1:
                absorbed.append(source)
        else:
            operands.append(value)
    _replace_by_reduce(op, operands)
    for source in absorbed:
        ir.erase(source)


def _convert_concat_reduce(op: ir.Op) -> None:
    """Reduces the pieces of a concatenate instead, without the dim that was joined."""
    concat = ir.producer(op.operands[0])
    if concat is None or concat.operation.name != "stablehlo.concatenate":
        return
    pieces = []
    for value in concat.operands:
        piece = ir.create(
            "stablehlo.reshape", [value], [op.results[0].type], ir.before(op), location=value.location
        )
        source = ir.producer(value)
        for name, attribute in source.attributes.items() if source is not None else ():
            if "." in name:  # attributes of the analysis, not of the op
                ir.put(piece, name, attribute)
        pieces.append(piece.results[0])
    _replace_by_reduce(op, pieces)
    ir.erase(concat)


def _replace_by_reduce(op: ir.Op, operands: list[ir.Value]) -> None:
    attributes = {"reduction": op.attributes[REDUCE]}
    if SRC_SET in op.attributes:
        attributes[SRC_SET] = op.attributes[SRC_SET]
    kinds = [op.results[0].type]
    made = ir.create("mpmd.reduce", operands, kinds, ir.before(op), attributes, op.location)
    ir.replace(op, [made.result])
