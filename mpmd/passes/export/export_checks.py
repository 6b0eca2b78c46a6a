"""Passes that check the requirements of export, and report in the user's terms."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.export.programs import is_exchange
from mpmd.passes.structure import mesh_order
from mpmd.support import diagnostics


class ValidateNoBackwardDeps(FunctionPass):
    """Reports data that flows back to an earlier mesh in a program without a backward pass.

        a = call p0 on m1; t = transfer a to m2; b = call p1 on m2      ->  fine
        u = transfer b to m1; c = call p2 on m1 (u)                     ->  warning, or an error

    Such a pipeline stalls: the next microbatch waits for the last mesh.  If something is transposed data
    must flow back: then nothing is checked, and requesting an error is one.

    Requires: fragments are calls.  Ensures: changes nothing.  Cost: linear, with chains of transfers.
    Source: openxla/shardy MPMD, `validate_no_backward_deps`.

    Attributes:
        fail_on_backward_deps: report errors, not warnings.
    """

    runs_on = "mpmd"
    fail_on_backward_deps: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        calls = ir.ops(f, ir.FragmentCall)
        transposed = next((o for call in calls for o in call.origins if o.transpose_count), None)
        if transposed is not None:
            if self.fail_on_backward_deps:
                diagnostics.error(
                    "Expected forward-only program but found non-forward fragments.\n"
                    f"  {transposed} is transposed: data must flow back to earlier meshes.\n"
                    "  Leave fail-on-backward-deps out for programs with a backward pass.",
                    f.location,
                )
            return
        report = diagnostics.error if self.fail_on_backward_deps else diagnostics.warning
        for call in calls:
            for value in call.operands:
                source = _call_behind(value)
                if source is None or mesh_order([source.mesh, call.mesh])[-1] == call.mesh:
                    continue
                report(
                    "Detected backward dependency but expected forward-only pipeline since there are no "
                    f'transpose fragments: fragment "{source.callee_name}" mesh="{source.mesh}" produces a '
                    f'value consumed by fragment "{call.callee_name}" mesh="{call.mesh}". In a forward-only '
                    "pipeline, dependencies must go from earlier meshes to later meshes.",
                    call.location,
                )


def _call_behind(value: ir.Value) -> ir.FragmentCall | None:
    """The call that computed a value, before any transfers."""
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        op = ir.producer(op.tensor)
    return op if isinstance(op, ir.FragmentCall) else None


# Passes whose fragments cannot always be merged: users learn of these, but may keep them.
EXPECTED_MAKERS = frozenset(
    [
        "uniquify",
        "infer_mesh_wrap_meshless_ops",
        "extract_reshards",
        "infer_mesh_wrap_resultless_ops",
        "infer_mesh_convert_reduce_ops",
        "introduce_transfers",
    ]
)


class ValidateNoInferredFragments(FunctionPass):
    """Reports unnamed work that stays a program of its own; each costs a launch per call.

        m1["f"] (a) {...}               ->  fine
        m1[] by=uniquify (a) {...}      ->  warning: some passes cannot avoid it
        m1[] by=split (a) {...}         ->  error, or a warning without `fail-on-inferred-fragments`
        m1[] (a) {...}                  ->  error: its pass did not record its name

    Requires: merging is over.  Ensures: changes nothing.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_no_inferred_fragments`.

    Attributes:
        fail_on_inferred_fragments: report errors, not warnings.
    """

    runs_on = "distributed"
    fail_on_inferred_fragments: bool = True

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            if fragment.is_user:
                continue
            makers = fragment.inferred_by
            if not makers:
                diagnostics.error(
                    "Internal error: inferred fragment missing 'mpmd.inferred_by' attribute. It is on mesh "
                    f'"{fragment.mesh}" and does not say which pass made it. Please report this.',
                    fragment.location,
                )
                continue
            severe = self.fail_on_inferred_fragments and EXPECTED_MAKERS.isdisjoint(makers)
            report = diagnostics.error if severe else diagnostics.warning
            report(
                f"Inferred fragment has not been merged (inferred by {', '.join(makers)}). It stays a "
                f'program of its own on mesh "{fragment.mesh}"; name the computation, or assign what it '
                "reads and writes to the mesh that uses it.",
                fragment.location,
            )


class ValidateNoParamTransfers(FunctionPass):
    """Reports parameters that travel between meshes in every step, by the names of arguments.

        t = transfer %"params['transformer']['w']" to m2  ->  warning, or an error with the option
        t = transfer %"x" to m2                           ->  fine

    Requires: locations of arguments hold their path in the user's pytree.
    Ensures: changes nothing.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_no_param_transfers`.

    Attributes:
        fail_on_param_transfers: report errors, not warnings.
        param_pattern: part of an argument's name by which a parameter is known.
    """

    runs_on = "mpmd"
    fail_on_param_transfers: bool = False
    param_pattern: str = "params['transformer"

    def rewrite_function(self, f: ir.Func) -> None:
        report = diagnostics.error if self.fail_on_param_transfers else diagnostics.warning
        for transfer in ir.ops(f, ir.Transfer):
            source, target = transfer.tensor.type, transfer.result.type
            if transfer.is_intra_mesh:
                continue
            names = (ir.name_of(transfer.tensor.location), ir.name_of(transfer.location))
            parameters = dict.fromkeys(f'"{name}"' for name in names if name and self.param_pattern in name)
            if parameters:
                report(
                    f'Detected cross-mesh transfer of a parameter matching "{self.param_pattern}" from mesh '
                    f'"{source.mesh}" to "{target.mesh}". JAX locations: [{", ".join(parameters)}]\n'
                    f'  It is sent in every step: assign the parameter to "{target.mesh}", or its reader to '
                    f'"{source.mesh}".',
                    transfer.location,
                )


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
