"""mpmd-validate-no-reshards."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.export.fragment_names import is_exchange
from mpmd.support import diagnostics


class ValidateNoReshards(FunctionPass):
    """Reports programs that only change shardings, other than gathers: often they are unintended.

        %0 = mpmd.fragment_call<mesh="m1", origin=[]> @p0_inferred.main(%a) : (!m1) -> !m1_sharded
        func @p0_inferred.main(%p) { return %p }             warning, or an error with the option

    Requires: fragments are calls.  Ensures: changes nothing.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_no_reshards`.

    Attributes:
        fail_on_reshard_only_fragments: report errors, not warnings.
        ignore_copies: ignore programs whose results are sharded as their operands are.
    """

    runs_on = "distributed"
    fail_on_reshard_only_fragments: bool = False
    ignore_copies: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Checks each call."""
        calls = ir.ops(f, ir.FragmentCall)
        symbols = ir.symbol_table(ir.module_of(f)) if calls else {}
        report = diagnostics.error if self.fail_on_reshard_only_fragments else diagnostics.warning
        for call in calls:
            callee = symbols[call.callee_name]
            if not _only_returns_arguments(callee):
                continue
            if call.origins:
                diagnostics.error(
                    f"Internal error: reshard-only fragment '{call.callee_name}' is not an inferred "
                    f"fragment: it has the origins {', '.join(map(str, call.origins))}. Please report this.",
                    call.location,
                )
                continue
            if is_exchange(call.callee_name) or (self.ignore_copies and not _reshards(call, callee)):
                continue
            report(
                f"Detected reshard-only fragment '{call.callee_name}'. This usually indicates an unexpected "
                f"reshard. Operands: {_described(call.operands)}. Results: {_described(call.results, f)}",
                call.location,
            )


def _only_returns_arguments(f: ir.Func) -> bool:
    return not f.is_external and bool(f.returned) and all(ir.producer(v) is None for v in f.returned)


def _reshards(call: ir.FragmentCall, callee: ir.Func) -> bool:
    """Whether a result has another type than the operand that the callee returns for it."""
    operands = dict(zip(callee.args, call.operands))
    return any(operands[v].type != result.type for v, result in zip(callee.returned, call.results))


def _described(values: Sequence[ir.Value], f: ir.Func | None = None) -> str:
    """Sharding, shape and place of each value; of values that `f` returns, their path in the result."""
    return ", ".join(f"{_sharding(v)} {_shape(v)} {_place(v, f)}" for v in values)


def _sharding(value: ir.Value) -> str:
    sharding = value.type.sharding if isinstance(value.type, ir.MeshTensor) else None
    return "Replicated" if sharding is None else str(sharding)


def _shape(value: ir.Value) -> str:
    if isinstance(value.type, ir.MeshTensor):
        return str(value.type.tensor).removeprefix("tensor")
    return str(value.type)


def _place(value: ir.Value, f: ir.Func | None) -> str:
    for i, returned in enumerate(f.returned if f is not None else []):
        info = f.result_attribute(i, "jax.result_info") if f is not None else None
        if returned == value and info is not None:
            return f"loc({info})"
    return str(value.location)
