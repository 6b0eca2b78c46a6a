"""mpmd-enforce-user-shardings."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.propagation import shardings
from mpmd.support import diagnostics


@dataclasses.dataclass(frozen=True)
class EnforceUserShardings(FunctionPass):
    """Lets the shardings that arguments and results of the program have hold at the fragments too.

        main(a@m1 {sharding = [{"x"}, {}]}):  f = m1["f"] in_shardings=[[{}, {"x"}]] (a) {...}
        ->                                    f = m1["f"] in_shardings=[[{"x"}, {}]] (a) {...}

    Propagation may have found another sharding for what a fragment reads or returns.  The caller hands over
    and expects the user's: the fragment reshards inside.

    Requires: results are neither arguments nor returned twice (uniquify-function-inputs-outputs).
    Ensures: an argument, or a result, and all fragments that make or read it agree; transfers of arguments
        are left to extract-reshards.
        Warning: a sharding over part of an axis, which JAX cannot express, is shortened before that part.
    Cost: linear in operands.
    Source: openxla/shardy MPMD, `enforce_user_shardings`.
    """

    name: ClassVar[str] = "mpmd-enforce-user-shardings"
    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Collects what the user wrote, then goes over fragments and transfers once."""
        of_argument = _cut(f, "arg", "arg_attrs", f.args)
        of_result = _cut(f, "result", "res_attrs", f.returned)
        for op in ir.ops(f, (ir.Fragment, ir.Transfer)):
            results = {i: of_result[r] for i, r in enumerate(op.results) if r in of_result}
            if isinstance(op, ir.Transfer):
                shardings.update(op, shardings.ARGUMENT, list(op.results), results)
                continue
            inputs = {i: of_result[v] for i, v in enumerate(op.inputs) if v in of_result}
            inputs |= {i: of_argument[v] for i, v in enumerate(op.inputs) if v in of_argument}
            shardings.update(op, "out_shardings", list(op.results), results)
            shardings.update(op, "in_shardings", list(op.inputs), inputs)


def _cut(f: ir.Func, word: str, attribute: str, values: list[ir.Value]) -> dict[ir.Value, shardings.Sharding]:
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
                f"express; taken is {found[value]}. Choose axes that divide the value.",
                value.location if word == "arg" else f.terminator.location,
            )
    ir.put_attribute_dicts(f, attribute, dicts)
    return found
