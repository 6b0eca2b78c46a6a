"""Shardings that users gave to arguments and results."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.sharding import shardings
from mpmd.support import diagnostics


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
    found: dict[ir.Value, shardings.Sharding] = {}
    warned = False
    for i, (value, of_value) in enumerate(zip(values, dicts)):
        if shardings.ARGUMENT not in of_value:
            continue
        old = of_value[shardings.ARGUMENT]
        found[value] = of_value[shardings.ARGUMENT] = shardings.drop_sub_axes(old)
        if found[value] != old and not warned:
            warned = True
            diagnostics.warning(
                f"Sub-axes sharding found for {word} {i}: {old} uses part of an axis, which JAX cannot "
                f"express; used is {found[value]}. Choose axes that divide the value.",
                value.location if word == "arg" else f.terminator.location,
            )
    ir.put_attribute_dicts(f, attribute, dicts)
    return found


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
            found = shardings.read(fragment, "out_shardings") or [
                shardings.without_axes(mesh, shardings.rank(r), is_closed=True) for r in results
            ]
            for i, constraint in unreduced.items():
                found[i] = shardings.with_unreduced_axes(found[i], constraint.unreduced_axes)
            shardings.write(fragment, "out_shardings", found)


def _constraint_of(value: ir.Value) -> ir.sdy.TensorShardingAttr | None:
    """The sharding constraint that defines `value`."""
    op = ir.producer(value)
    if isinstance(op, (ir.sdy.ShardingConstraintOp, ir.sdy.ReshardOp)):
        return ir.sdy.TensorShardingAttr(op.sharding)
    return None
