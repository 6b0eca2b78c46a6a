"""Making, merging, splitting and shrinking fragments and transfers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.ir import OpView as Op
from jax.extend.mlir.ir import Value

from mpmd.errors import IRError
from mpmd.ir import control, counting, edit
from mpmd.ir.context import context, op_text
from mpmd.ir.ops import Fragment, Func, Transfer, attribute_dicts, put, put_attribute_dicts
from mpmd.ir.query import is_pure, is_unused, module_of, ops, producer, read_by, users
from mpmd.ir.types import MeshTensor, Origin, string_array


def make_fragment(
    mesh: str,
    inputs: Sequence[Value],
    types: Sequence[ir.Type],
    where: ir.InsertionPoint,
    body: Callable[[list[Value], ir.InsertionPoint], Sequence[Value]],
    origins: Sequence[Origin] = (),
    inferred_by: Sequence[str] = (),
    location: ir.Location | None = None,
) -> Fragment:
    """A fragment whose ops are made by `body(args, insertion point)`, which gives what it returns."""
    location = location or ir.Location.unknown(context())
    attributes = {
        "mesh_name": ir.StringAttr.get(mesh, context()),
        "origin": ir.ArrayAttr.get([o.attribute() for o in origins], context()),
    }
    if inferred_by:
        attributes["mpmd.inferred_by"] = string_array(inferred_by)
    made = edit.create("mpmd.fragment", inputs, types, where, attributes, location, regions=1)
    block = made.regions[0].blocks.append(
        *(_inner_type(v.type) for v in inputs), arg_locs=[location] * len(inputs)
    )
    returned = body(list(block.arguments), ir.InsertionPoint(block))
    edit.create("mpmd.return", returned, [], ir.InsertionPoint(block), location=location)
    return made


def _inner_type(kind: ir.Type) -> ir.Type:
    return kind.tensor if isinstance(kind, MeshTensor) else kind


def make_transfer(
    value: Value, kind: ir.Type, where: ir.InsertionPoint, location: ir.Location | None = None
) -> Transfer:
    """A transfer of `value` to the mesh, memory and sharding of `kind`."""
    return edit.create("mpmd.transfer", [value], [kind], where, location=location or value.location)


def drop(fragment: Fragment, results: Collection[int] = (), inputs: Collection[int] = ()) -> Fragment:
    """The fragment without some unused results and inputs; attributes per operand or result follow."""
    if not results and not inputs:
        return fragment
    kept_results = [i for i in range(len(fragment.results)) if i not in results]
    kept_inputs = [i for i in range(len(fragment.inputs)) if i not in inputs]
    if results:
        returned = fragment.returned
        fragment.returned = [returned[i] for i in kept_results]
    edit.erase_args(fragment.body, inputs)
    old_results = [fragment.results[i] for i in kept_results]
    made = edit.rebuild(fragment, [fragment.inputs[i] for i in kept_inputs], [r.type for r in old_results])
    filter_attributes(made, kept_inputs, kept_results)
    for old, new in zip(old_results, made.results):
        edit.replace_uses(old, new)
    edit.erase(fragment)
    return made


def outline(fragment: Fragment, name: str) -> Func:
    """A function with the body of a fragment, at the end of the module; the fragment keeps no body.

    The caller gives the uses of the fragment's results to something else and erases it.
    """
    module = module_of(fragment)
    inputs = [_inner_type(v.type) for v in fragment.inputs]
    kind = ir.FunctionType.get(inputs, [v.type for v in fragment.returned], context())
    attributes = {
        "sym_name": ir.StringAttr.get(name, context()),
        "function_type": ir.TypeAttr.get(kind, context()),
    }
    end = ir.InsertionPoint(module.body)
    made: Func = edit.create("func.func", [], [], end, attributes, fragment.location, regions=1)
    old = fragment.terminator
    edit.create("func.return", fragment.returned, [], edit.before(old), location=old.location)
    edit.erase(old)
    fragment.body.append_to(made.regions[0])
    return made


def body_text(fragment: Fragment) -> str:
    """Equal for fragments whose bodies do the same: a digest of the body and of its argument types."""
    types = " ".join(str(arg.type) for arg in fragment.args)
    body = op_text(fragment).partition("\n")[2].rpartition("\n")[0]
    return hashlib.sha256(f"{types}\n{body}".encode()).hexdigest()


def take_body(fragment: Fragment, model: Fragment) -> Fragment:
    """The fragment with a copy of the body of `model`, of the same argument and result types, for its own."""
    copy = edit.clone(model, edit.before(fragment))
    made: Fragment = edit.create(
        "mpmd.fragment", list(fragment.inputs), [r.type for r in fragment.results], edit.before(fragment),
        dict(fragment.attributes.items()), fragment.location, regions=1,
    )  # fmt: skip
    copy.body.append_to(made.regions[0])
    copy.operation.erase()
    edit.replace(fragment, list(made.results))
    return made


def filter_attributes(op: Op, kept_inputs: Sequence[int], kept_results: Sequence[int]) -> None:
    """Keeps the entries at the given old positions of every attribute that has one entry per value."""
    for name, kept in (("arg_attrs", kept_inputs), ("res_attrs", kept_results)):
        if name in op.attributes:
            dicts = attribute_dicts(op, name, 0)
            put_attribute_dicts(op, name, [dicts[i] for i in kept])
    for name, kept in (("in_shardings", kept_inputs), ("out_shardings", kept_results)):
        if name in op.attributes:
            shardings = sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
            with context():
                op.attributes[name] = sdy.TensorShardingPerValueAttr.get([shardings[i] for i in kept])


def remove_dead_code(fragment: Fragment) -> Fragment | None:
    """Drops what is unused: results, then ops, then inputs.  None if nothing was left and it is erased."""
    fragment = drop(fragment, results={i for i, r in enumerate(fragment.results) if is_unused(r)})
    edit.erase_dead_ops(fragment.body)
    fragment = drop(fragment, inputs={i for i, a in enumerate(fragment.args) if is_unused(a)})
    if fragment.results or fragment.inputs or ops(fragment.body):
        return fragment
    edit.erase(fragment)
    return None


def merge(a: Fragment, b: Fragment) -> Fragment:
    """One fragment that does `a` and then `b`, standing where `b` stands.

    Operands: those of `a`, then those of `b` that are neither results of `a` nor there already.
    Results: those of `a` that have a user other than `b`, then those of `b`.  Origins and stage are
    united (`a` first), as are the control edges to others; every other attribute of both is dropped.
    The ops of `a` move into the body of `b`: merging bottom-up, `a` is the small one.  If `a` has one
    input and one result with one use, the operand list of `b` stays as it is, with the input of `a` for
    its result.

    Raises:
        IRError: they are on different meshes, or have different stages.

    Source: openxla/shardy MPMD, `MergeFragments`.
    """
    if a.mesh != b.mesh or (None not in (a.stage, b.stage) and a.stage != b.stage):
        what = f"mesh {a.mesh}, stage {a.stage} and mesh {b.mesh}, stage {b.stage}"
        raise IRError(f"cannot merge fragments of {what} at {b.location}")
    origins = list(dict.fromkeys(a.origins + b.origins))
    stage = b.stage if a.stage is None else a.stage
    body, old_args = b.body, b.args
    uses = [use for r in a.results for use in r.uses]
    if len(a.inputs) == len(a.results) == len(uses) == 1 and uses[0].owner == b:
        inputs = [a.inputs[0] if v == a.results[0] else v for v in b.inputs]
        inside = _args_in_place(a, b)
    else:
        made_by_a = set(a.results)
        inputs = list(dict.fromkeys([*a.inputs, *(v for v in b.inputs if v not in made_by_a)]))
        like = dict(zip([*b.inputs, *a.inputs], [*old_args, *a.args]))
        inside = {v: edit.append_arg(body, like[v]) for v in inputs}
        _move_body(a, body, [inside[v] for v in a.inputs])
        inside |= dict(zip(a.results, a.returned))
        for value, arg in zip(b.inputs, old_args):
            edit.replace_uses(arg, inside[value])
        edit.erase_args(body, range(len(old_args)))
    kept = [r for r in a.results if any(user != b for user in users(r))]
    results = [*kept, *b.results]
    if kept:
        b.returned = [inside[r] for r in kept] + b.returned
    attributes = {"mesh_name": b.attributes["mesh_name"], "origin": b.attributes["origin"]}
    merged = edit.create(
        "mpmd.fragment", inputs, [r.type for r in results], edit.before(b), attributes,
        ir.Location.fused([a.location, b.location], context=context()), regions=1,
    )  # fmt: skip
    body.append_to(merged.regions[0])
    merged.origins, merged.stage = origins, stage
    control.keep_control_edges([a, b], merged)
    for old, new in zip(results, merged.results, strict=True):
        edit.replace_uses(old, new)
    edit.erase(b)
    edit.erase(a)
    return merged


def _args_in_place(a: Fragment, b: Fragment) -> dict[Value, Value]:
    """Moves the body of `a` to the front of that of `b`, whose argument for `a` takes `a`'s input."""
    position = list(b.inputs).index(a.results[0])
    arg = b.args[position]
    source = a.args[0]
    if arg.type == source.type:
        first = b.body.operations[0]
        returned = a.returned[0]
        if returned == source:
            return {a.results[0]: arg}
        uses = [(use.owner, use.operand_number) for use in arg.uses]
        _move_body_before(a, first, [arg])
        for owner, number in uses:
            owner.operation.operands[number] = returned
        return {a.results[0]: returned}
    # An argument's type can be changed in place once nothing uses it any more.
    returned = a.returned[0]
    edit.replace_uses(arg, returned)
    arg.set_type(source.type)
    _move_body_before(a, b.body.operations[0], [arg])
    return {a.results[0]: returned}


def _move_body(a: Fragment, body: ir.Block, values: Sequence[Value]) -> None:
    _move_body_before(a, body.operations[0], values)


def _move_body_before(a: Fragment, first: Op, values: Sequence[Value]) -> list[Value]:
    """Moves the ops of `a` to before `first`, with `values` for its arguments; what `a` returns, there."""
    counting.note_edit()
    inner = ops(a.body)
    for arg, value in zip(a.args, values):
        edit.replace_uses(arg, value)
    for op in inner:
        op.operation.move_before(first.operation)
    return a.returned


def split(fragment: Fragment, in_first: set[Op], first_results: Sequence[int]) -> tuple[Fragment, Fragment]:
    """Two fragments for one: the ops `in_first` and some results, then the rest.

    The second half has what its results and its ops with effects need.  What it reads of the first, the
    *residuals*, becomes results of the first and operands of the second.  Ops without operands that the
    second needs and that are not `in_first` are in the second.  Both keep all operands of the original,
    and all attributes but those with one entry per operand or result.
    """
    rest = [i for i in range(len(fragment.results)) if i not in set(first_results)]
    effects = [op for op in ops(fragment.body) if op not in in_first and not is_pure(op)]
    wanted = [v for op in effects for v in read_by(op)] + [fragment.returned[i] for i in rest]
    residuals, reached = _going_up(wanted, in_first)
    in_second = reached | set(effects)
    second = edit.clone(fragment, edit.after(fragment))
    twin = dict(zip(_inner_values(fragment), _inner_values(second)))
    second_ops = {t for op, t in zip(ops(fragment.body), ops(second.body)) if op in in_second}

    def cut(
        part: Fragment, kept: Sequence[int], inputs: Sequence[Value], returned: Sequence[Value]
    ) -> Fragment:
        types = [fragment.results[i].type for i in kept]
        old = part.returned
        part.returned = [old[i] for i in kept] + list(returned)
        made: Fragment = edit.rebuild(
            part, [*part.inputs, *inputs], types + [MeshTensor.get(part.mesh, v.type) for v in returned]
        )
        for name in ("arg_attrs", "res_attrs", "in_shardings", "out_shardings"):
            put(made, name, None)
        for i, result in zip(kept, made.results):
            edit.replace_uses(fragment.results[i], result)
        return made

    first = cut(fragment, list(first_results), [], residuals)
    for v in residuals:
        edit.replace_uses(twin[v], edit.append_arg(second.body, like=v))
    cut_second = cut(second, rest, list(first.results)[len(first_results) :], [])
    edit.keep_only(first.body, in_first.__contains__)
    edit.keep_only(cut_second.body, second_ops.__contains__)
    edit.erase(second)
    edit.erase(fragment)
    return first, cut_second


def _going_up(values: Iterable[Value], boundary: set[Op]) -> tuple[list[Value], set[Op]]:
    """From `values`: the first values met that arguments or ops of `boundary` make, and the ops between.

    Depth first, last pushed first.
    """
    found: dict[Value, None] = {}
    reached: set[Op] = set()
    seen: set[Value] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        op = producer(value)
        if op is None or op in boundary:
            found[value] = None
        else:
            reached.add(op)
            todo += read_by(op)
    return list(found), reached


def _inner_values(fragment: Fragment) -> list[Value]:
    return fragment.args + [r for op in ops(fragment.body) for r in op.results]


def merge_all(group: Sequence[Fragment]) -> Fragment:
    """One fragment for several of one mesh, given in program order, standing where the last one stands.

    Operands: every value that a member reads and no member makes, once.  Results: those that something
    outside of the group uses.  Origins, stage, call counter and makers are united where members agree;
    linear in the size of the group.  The caller must see to it that the block is in order afterwards.
    """
    last = group[-1]
    members = set(group)
    made_inside = {r for f in group for r in f.results}
    inputs = list(dict.fromkeys(v for f in group for v in f.inputs if v not in made_inside))
    results = [r for f in group for r in f.results if any(user not in members for user in users(r))]
    attributes = {"mesh_name": last.attributes["mesh_name"], "origin": last.attributes["origin"]}
    location = ir.Location.fused([f.location for f in (group[0], last)], context=context())
    merged = edit.create(
        "mpmd.fragment", inputs, [r.type for r in results], edit.before(last), attributes, location, regions=1
    )
    block = merged.regions[0].blocks.append(
        *(_inner_type(v.type) for v in inputs), arg_locs=[v.location for v in inputs]
    )
    inside = dict(zip(inputs, block.arguments))
    end = edit.create("mpmd.return", [], [], ir.InsertionPoint(block), location=location)
    for f in group:
        returned = _move_body_before(f, end, [inside[v] for v in f.inputs])
        inside |= dict(zip(f.results, returned))
    merged.returned = [inside[r] for r in results]
    merged.origins = list(dict.fromkeys(o for f in group for o in f.origins))
    counters, stages = {f.call_counter for f in group}, {f.stage for f in group}
    merged.call_counter = counters.pop() if len(counters) == 1 else None
    merged.stage = stages.pop() if len(stages) == 1 else None
    control.keep_control_edges(group, merged)
    if not merged.is_user:
        merged.inferred_by = list(dict.fromkeys(name for f in group for name in f.inferred_by))
    for old, new in zip(results, merged.results, strict=True):
        edit.replace_uses(old, new)
    for f in reversed(group):
        edit.erase(f)
    return merged
