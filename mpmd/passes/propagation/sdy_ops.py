"""Shardy's operations and attributes, turned into ours, and the user's shardings of arguments and results."""

from __future__ import annotations

from collections.abc import Iterable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.structure import attributes_of, constant_text, holds_complex
from mpmd.sharding import shardings
from mpmd.support import diagnostics


class ConvertSdyConstants(FunctionPass):
    """Turns `sdy.constant` back into `stablehlo.constant`.

        %c = sdy.constant dense<1.0> : tensor<4xf32>  ->  %c = stablehlo.constant dense<1.0> : tensor<4xf32>

    Shardy uses ops of its own while it propagates, so that nothing joins equal constants.

    Requires: propagation is over.  Ensures: no `sdy.constant` is left; attributes stay.
    Cost: linear in the module.
    Source: openxla/shardy MPMD, `convert_sdy_constants`.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        for op in ir.walk(f, ir.sdy.ConstantOp):
            replacement = _complex_constant(op) if holds_complex(op) else _constant(op)
            ir.replace(op, [replacement.results[0]])


def _constant(op: ir.Op) -> ir.Op:
    attributes = dict(op.attributes.items())
    constant: ir.Op = ir.create(
        "stablehlo.constant", [], [op.result.type], ir.before(op), attributes, op.location
    )
    return constant


def _complex_constant(op: ir.Op) -> ir.Op:
    """The bindings have no attributes of complex numbers, so the op is rebuilt from text."""
    kind = op.result.type
    module = ir.parse(
        f'"stablehlo.constant"() <{{value = {constant_text(op)}}}> : () -> {kind} {op.location}'
    )
    constant: ir.Op = ir.clone(module.body.operations[0], ir.before(op))
    for name, attribute in attributes_of(op):
        if not isinstance(attribute, str):
            ir.put(constant, name, attribute)
    return constant


class ConvertSdyShardingsToMpmdTypes(FunctionPass):
    """Makes shardings part of the types of values on meshes.

        main(a@m1 {sharding = S}):  f = m1["f"] in_shardings=[S], out_shardings=[T] (a) {...}
        ->  main(a@m1<S>):          f: m1<T> = m1["f"] (a) {...}

    Requires: shardings are attributes of arguments, fragments, transfers and loops.
    Ensures: no `sdy.sharding` is left but on send and recv, no in_shardings, no out_shardings; the type of
        the function follows.  Late error: a transfer between different shardings of one sdy mesh.
    Cost: linear in the module.
    Source: openxla/shardy MPMD, `convert_sdy_shardings_to_mpmd_types`.
    """

    runs_on = "distributed"

    def rewrite_function(self, f: ir.Func) -> None:
        """Arguments, then ops in order: a reader's sharding of a value replaces the producer's."""
        types = _Types()
        _convert_arguments(f, types)
        holders = _holders(f)
        for op in holders:
            if isinstance(op, ir.Fragment):
                types.give(op.inputs, shardings.read(op, "in_shardings"))
                types.give(op.results, shardings.read(op, "out_shardings"))
                ir.put(op, "in_shardings", None)
                ir.put(op, "out_shardings", None)
                continue
            of_results = shardings.read(op, shardings.ARGUMENT)
            types.give(op.results, of_results)
            if isinstance(op, ir.For):
                types.give(op.args, of_results)
        shardings.drop_inside(f)
        ir.return_types_changed(f)
        for op in holders:
            if isinstance(op, ir.Transfer):
                _check(op)


def _holders(where: ir.Op) -> list[ir.Op]:
    """The ops between fragments that have shardings, those in loops included."""
    holders: list[ir.Op] = []
    for op in ir.ops(where, (ir.Fragment, ir.Transfer, ir.For)):
        holders.append(op)
        if isinstance(op, ir.For):
            holders += _holders(op)
    return holders


def _convert_arguments(f: ir.Func, types: _Types) -> None:
    for attribute, values in (("arg_attrs", f.args), ("res_attrs", f.returned)):
        dicts = ir.attribute_dicts(f, attribute, len(values))
        per_argument = [of_value.pop(shardings.ARGUMENT, None) for of_value in dicts]
        if attribute == "arg_attrs":
            types.give(values, per_argument)
        ir.put_attribute_dicts(f, attribute, dicts)


class _Types:
    """Mesh tensor types with shardings; each is built once, as microbatches repeat them."""

    def __init__(self) -> None:
        self.made: dict[tuple[ir.Type, shardings.Sharding], ir.Type] = {}

    def give(self, values: Iterable[ir.Value], per_value: Iterable[shardings.Sharding | None]) -> None:
        for value, sharding in zip(values, per_value):
            kind = value.type
            if sharding is None or not isinstance(kind, ir.MeshTensor):
                continue
            new = self.made.get((kind, sharding))
            if new is None:
                new = ir.MeshTensor.get(kind.mesh, kind.tensor, sharding, kind.memory_kind)
                self.made[(kind, sharding)] = new
            ir.set_type(value, new)


def _check(transfer: ir.Transfer) -> None:
    source, target = transfer.tensor.type.sharding, transfer.result.type.sharding
    if source is None or target is None or shardings.mesh_of(source) != shardings.mesh_of(target):
        return
    if not shardings.is_same(source, target):
        diagnostics.late_error(
            "Transfer op has different shardings for the tensor and result, tensor sharding: "
            f"{source}, result sharding: {target}",
            transfer.location,
        )


class ReshardsToConstraints(FunctionPass):
    """Turns the reshards that Shardy's pipeline created from sharding constraints back into constraints.

        %1 = sdy.reshard %0 <@mesh, [{"x"}, {}]>  ->  %1 = sdy.sharding_constraint %0 <@mesh, [{"x"}, {}]>

    Each fragment goes through propagation once more when it is compiled, with these shardings fixed at
    its arguments and results; reshards would stop that propagation, constraints guide it.

    Requires: propagation is over.  Ensures: no `sdy.reshard` is left.  Cost: linear in the module.
    Source: ours; the dialect runs Shardy's pipeline with an option that jaxlib does not offer.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        for op in ir.walk(f, ir.sdy.ReshardOp):
            replacement = ir.create(
                "sdy.sharding_constraint", [op.input], [op.result.type], ir.before(op),
                dict(op.attributes.items()), op.location,
            )  # fmt: skip
            ir.replace(op, [replacement.results[0]])


class EnforceUserShardings(FunctionPass):
    """Enforces the user's shardings of arguments and results at the fragments.

        main(a@m1 {sharding = [{"x"}, {}]}):  f = m1["f"] in_shardings=[[{}, {"x"}]] (a) {...}
        ->                                    f = m1["f"] in_shardings=[[{"x"}, {}]] (a) {...}

    Propagation may have found another sharding for operands or results of a fragment.  The caller passes
    and expects the user's: the fragment reshards inside.

    Requires: results are neither arguments nor returned twice (uniquify-function-inputs-outputs).
    Ensures: an argument, or a result, and all fragments that produce or read it agree; transfers of arguments
        are left to extract-reshards.
        Warning: a sharding over part of an axis, which JAX cannot express, is shortened before that part.
    Cost: linear in operands.
    Source: openxla/shardy MPMD, `enforce_user_shardings`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Collects the user's shardings, then visits fragments and transfers once."""
        of_argument = _shortened(f, "arg", "arg_attrs", f.args)
        of_result = _shortened(f, "result", "res_attrs", f.returned)
        for op in ir.ops(f, (ir.Fragment, ir.Transfer)):
            results = {i: of_result[r] for i, r in enumerate(op.results) if r in of_result}
            if isinstance(op, ir.Transfer):
                shardings.update(op, shardings.ARGUMENT, list(op.results), results)
                continue
            inputs = {i: of_result[v] for i, v in enumerate(op.inputs) if v in of_result}
            inputs |= {i: of_argument[v] for i, v in enumerate(op.inputs) if v in of_argument}
            shardings.update(op, "out_shardings", list(op.results), results)
            shardings.update_operands(op, f, inputs)


def _shortened(
    f: ir.Func, word: str, attribute: str, values: list[ir.Value]
) -> dict[ir.Value, shardings.Sharding]:
    """The user's shardings of arguments or results, without parts of axes; they are written back."""
    dicts = ir.attribute_dicts(f, attribute, len(values))
    shortened: dict[ir.Value, shardings.Sharding] = {}
    warned = False
    for i, (value, of_value) in enumerate(zip(values, dicts)):
        if shardings.ARGUMENT not in of_value:
            continue
        old = of_value[shardings.ARGUMENT]
        shortened[value] = of_value[shardings.ARGUMENT] = shardings.drop_sub_axes(old)
        if shortened[value] != old and not warned:
            warned = True
            diagnostics.warning(
                f"Sub-axes sharding found for {word} {i}: {old} uses part of an axis, which JAX cannot "
                f"express; used is {shortened[value]}. Choose axes that divide the value.",
                value.location if word == "arg" else f.terminator.location,
            )
    ir.put_attribute_dicts(f, attribute, dicts)
    return shortened


class PopulateUnreducedOutSharding(FunctionPass):
    """Copies unreduced axes, which propagation leaves at constraints, to the results of fragments.

        m1["f"] (a) {...; c = sharding_constraint x <@mesh, [{}], unreduced={"x"}>; ret c}
        ->  m1["f"] out_shardings=[<@mesh, [{}], unreduced={"x"}>] (a) {...}

    The devices along such an axis hold terms of a sum that is taken later.

    Requires: propagation has run.
    Ensures: each returned constraint with unreduced axes has them in the out_sharding of its result; where
        a fragment had no out_shardings, its other results are replicated.  Cost: linear in results.
    Source: openxla/shardy MPMD, `populate_unreduced_out_sharding`.
    """

    runs_on = "distributed"

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            unreduced = {
                i: constraint
                for i, value in enumerate(fragment.returned)
                if (constraint := _constraint_of(value)) is not None and constraint.unreduced_axes
            }
            if not unreduced:
                continue
            results = list(fragment.results)
            mesh = next(iter(unreduced.values())).mesh_or_ref
            per_result = shardings.read(fragment, "out_shardings") or [
                shardings.without_axes(mesh, shardings.rank(r), is_closed=True) for r in results
            ]
            for i, constraint in unreduced.items():
                per_result[i] = shardings.with_unreduced_axes(per_result[i], constraint.unreduced_axes)
            shardings.write(fragment, "out_shardings", per_result)


def _constraint_of(value: ir.Value) -> ir.sdy.TensorShardingAttr | None:
    op = ir.producer(value)
    if isinstance(op, (ir.sdy.ShardingConstraintOp, ir.sdy.ReshardOp)):
        return ir.sdy.TensorShardingAttr(op.sharding)
    return None
