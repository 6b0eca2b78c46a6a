"""The ops of a program, with their attributes as Python values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, mpmd

from mpmd.ir import query
from mpmd.ir.context import context, defer_deletion
from mpmd.ir.types import Origin, TopologyAttr, string_array, string_list
from mpmd.jax_compat import func_dialect, mpmd_dialect, register_operation
from mpmd.support.resources import memoised

NamedTensor = mpmd.NamedTensorOp
Broadcast = mpmd.BroadcastOp
Return = mpmd.ReturnOp
FuncCall = func.CallOp


def put(op: ir.OpView, name: str, attribute: ir.Attribute | None) -> None:
    """Sets an attribute of an op; None removes it."""
    if attribute is None:
        if name in op.attributes:
            query.note_edit()
            del op.attributes[name]
    elif name not in op.attributes or op.attributes[name] != attribute:
        query.note_edit()
        op.attributes[name] = attribute


def i64(value: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context()), value)


def _optional(name: str, read: Callable[[Any], Any], make: Callable[[Any], Any], doc: str) -> property:
    """An attribute that an op may have, as a Python value; None if it has none."""

    def getter(op: Any) -> Any:
        return read(op.attributes[name]) if name in op.attributes else None

    def setter(op: Any, value: Any) -> None:
        put(op, name, None if value is None else make(value))

    return property(getter, setter, doc=doc)


def _flag(name: str, doc: str) -> property:
    """Whether the op has the unit attribute `name`."""

    def setter(op: Any, value: bool) -> None:
        put(op, name, ir.UnitAttr.get(context()) if value else None)

    return property(lambda op: name in op.attributes, setter, doc=doc)


def _integer(name: str, kind: str, doc: str) -> property:
    def make(value: int) -> ir.Attribute:
        return ir.IntegerAttr.get(ir.Type.parse(kind, context()), value)

    return _optional(name, lambda attribute: int(ir.IntegerAttr(attribute).value), make, doc)


def _string(name: str, doc: str) -> property:
    def make(value: str) -> ir.Attribute:
        return ir.StringAttr.get(value, context())

    return _optional(name, lambda attribute: str(ir.StringAttr(attribute).value), make, doc)


class _HasBody:
    """An op with one block, whose terminator returns the op's results.

    The bindings' classes admit no second base, so `_extends` copies these members.
    """

    @property
    def body(self) -> ir.Block:
        return self.regions[0].blocks[0]  # type: ignore[attr-defined]

    @property
    def args(self) -> list[ir.Value]:
        return list(self.body.arguments)

    @property
    def terminator(self) -> ir.OpView:
        """The op that returns.  (Not `operations[-1]`: that traverses the whole block.)"""
        return ir.InsertionPoint.at_block_terminator(self.body).ref_operation.opview

    @property
    def returned(self) -> list[ir.Value]:
        return list(self.terminator.operands)

    @returned.setter
    def returned(self, values: Sequence[ir.Value]) -> None:
        old = self.terminator
        if list(values) == list(old.operands):
            return
        query.note_edit()
        if len(values) == len(old.operands):
            for i, value in enumerate(values):
                old.operands[i] = value
            return
        ir.Operation.create(old.name, operands=list(values), loc=old.location, ip=ir.InsertionPoint(old))
        defer_deletion(old)


def _extends(kind: Any) -> Any:
    """Makes the bindings return `kind` for ops of its base class."""
    if hasattr(kind, "region") or kind.OPERATION_NAME == "func.func":
        for name in ("body", "args", "terminator", "returned"):
            setattr(kind, name, getattr(_HasBody, name))
    dialect = func_dialect if kind.OPERATION_NAME.startswith("func.") else mpmd_dialect
    return register_operation(dialect, replace=True)(kind)


@_extends
class Func(func.FuncOp):
    """A function.  One with a topology is an *MPMD function*; a public one an *entry point*."""

    @property
    def symbol(self) -> str:
        return str(self.sym_name.value)

    @property
    def is_mpmd(self) -> bool:
        """Whether it runs on the meshes of a topology."""
        return "topology" in self.attributes

    @property
    def is_distributed(self) -> bool:
        """Whether it is an MPMD or an SPMD function."""
        return self.is_mpmd or "mesh_shape" in self.attributes

    @property
    def is_public(self) -> bool:
        """Whether it can be called from outside of the module."""
        visibility = self.attributes.get("sym_visibility")
        return visibility is None or ir.StringAttr(visibility).value == "public"

    @property
    def is_entry(self) -> bool:
        """Whether it is an MPMD function that is public."""
        return self.is_mpmd and self.is_public

    @property
    def topology(self) -> TopologyAttr:
        return TopologyAttr.of(self.attributes["topology"])

    @topology.setter
    def topology(self, topology: TopologyAttr) -> None:
        put(self, "topology", topology.attribute())

    def arg_attribute(self, index: int, name: str) -> ir.Attribute | None:
        """Attribute `name` of argument `index`; None if it has none."""
        return _nth(self.attributes.get("arg_attrs"), index).get(name)

    def result_attribute(self, index: int, name: str) -> ir.Attribute | None:
        """Attribute `name` of result `index`; None if it has none."""
        return _nth(self.attributes.get("res_attrs"), index).get(name)


@_extends
class Fragment(mpmd.FragmentOp):
    """A computation on one mesh.  `inputs[i]` is `args[i]` inside."""

    call_counter = _integer("call_counter", "ui32", "Its microbatch.")
    stage = _integer("stage_id", "i64", "Its pipeline stage; only user fragments have one.")
    split_keep_transferred = _flag("split_keep_transferred", "Whether it is the half other meshes wait for.")
    split_drop_transferred = _flag("split_drop_transferred", "Whether it is the half no mesh waits for.")
    is_remat = _flag("remat", "Whether it recomputes, or was merged with one that does.")
    mesh = _string("mesh_name", "Name of its mesh.")

    @property
    def origins(self) -> list[Origin]:
        """The named computations it holds; none if it was inferred."""
        return [Origin.of(a) for a in self.origin]

    @origins.setter
    def origins(self, origins: Sequence[Origin]) -> None:
        put(self, "origin", ir.ArrayAttr.get([o.attribute() for o in origins], context()))

    @property
    def is_user(self) -> bool:
        """Whether the user named some of it; else it was inferred."""
        return len(self.origin) > 0

    @property
    def transpose_count(self) -> int | None:
        """How often all of it was transposed; None if its origins disagree or it has none."""
        counts = {o.transpose_count for o in self.origins}
        return counts.pop() if len(counts) == 1 else None

    @property
    def is_forward(self) -> bool:
        """Whether all its origins were transposed 0 times."""
        return self.transpose_count == 0

    @property
    def is_backward(self) -> bool:
        """Whether all its origins were transposed once."""
        return self.transpose_count == 1

    @property
    def is_scheduling_unit(self) -> bool:
        """Whether it is one microbatch's forward or backward work."""
        return self.call_counter is not None and self.transpose_count in (0, 1)

    @property
    def inferred_by(self) -> list[str]:
        """The passes that created it, if it is inferred."""
        return string_list(self.attributes.get("mpmd.inferred_by"))

    @inferred_by.setter
    def inferred_by(self, names: Sequence[str]) -> None:
        put(self, "mpmd.inferred_by", string_array(names) if names else None)


@_extends
class Transfer(mpmd.TransferOp):
    """Moves a value to another mesh or memory."""

    @property
    def is_intra_mesh(self) -> bool:
        """Whether both ends have the same mesh and the same memory kind."""
        source, target = self.tensor.type, self.result.type
        return source.mesh == target.mesh and source.memory_kind == target.memory_kind


@_extends
class Call(mpmd.CallOp):
    """A call of the function that is one microbatch's work."""

    call_counter = _integer("call_counter", "ui32", "Its microbatch.")
    unroll_counter = _integer("unroll_counter", "ui32", "Its iteration in an unrolled loop.")
    callee_name = property(lambda call: str(call.callee.value), doc="Name of the function it calls.")


@_extends
class For(mpmd.ForOp):
    """A loop with a fixed number of iterations; the last block argument is the iteration's index."""

    trip_count = property(lambda loop: int(loop.iterations.value), doc="Number of iterations.")


@_extends
class NamedComputation(mpmd.NamedComputationOp):
    """A user's name for a computation."""

    @property
    def named(self) -> Origin:
        return Origin.of(self.origin)


@_extends
class Assign(mpmd.AssignOp):
    """From a plain tensor to a mesh tensor, while importing.  `reason` says why."""

    reason = _string("origin", "Why it is there: a user's name, or a word such as `user_in`.")


@_extends
class Unassign(mpmd.UnassignOp):
    """From a mesh tensor to a plain tensor, while importing.  `reason` says why."""

    reason = _string("origin", "Why it is there: a user's name, or a word such as `user_in`.")


@_extends
class Reduce(mpmd.ReduceOp):
    """May be computed by a reduction across meshes."""

    @property
    def kind(self) -> str:
        """`none`, `add`, `max`, `min`, `mul`, `or` or `and`."""
        return str(self.reduction).removeprefix("#mpmd.reduction<").rstrip(">")


@_extends
class FragmentCall(mpmd.FragmentCallOp):
    """A fragment whose body is a function of the module; its attributes are those of a fragment."""

    mesh, stage, origins = Fragment.mesh, Fragment.stage, Fragment.origins
    call_counter = Fragment.call_counter
    split_keep_transferred = Fragment.split_keep_transferred
    split_drop_transferred = Fragment.split_drop_transferred
    is_remat, callee_name = Fragment.is_remat, Call.callee_name


def attribute_dicts(op: ir.OpView, name: str, count: int) -> list[dict[str, ir.Attribute]]:
    """The dictionaries of a per-operand or per-result attribute, `count` of them."""
    attribute = op.attributes.get(name)
    if attribute is None:
        return [{} for _ in range(count)]
    return [dict(_known_entries(a)) for a in ir.ArrayAttr(attribute)]


def put_attribute_dicts(
    op: ir.OpView, name: str, dicts: Sequence[dict[str, ir.Attribute]], even_if_empty: bool = False
) -> None:
    """Sets a per-operand or per-result attribute; removes it if all its dictionaries are empty."""
    entries = [ir.DictAttr.get(d, context()) for d in dicts]
    put(op, name, ir.ArrayAttr.get(entries, context()) if even_if_empty or any(dicts) else None)


def entries_of(attribute: ir.Attribute) -> dict[str, ir.Attribute]:
    entries = ir.DictAttr(attribute)
    return {entries[i].name: entries[i].attr for i in range(len(entries))}


_known_entries = memoised(1 << 14)(entries_of)


def _nth(attribute: ir.Attribute | None, index: int) -> dict[str, ir.Attribute]:
    return {} if attribute is None else entries_of(ir.ArrayAttr(attribute)[index])
