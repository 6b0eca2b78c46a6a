"""Ops moved for the runtime: what can wait behind what others wait for, and tokens into fragments."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import drop, in_block_order, moving
from mpmd.support import diagnostics


class DelayInferredFragments(FunctionPass):
    """Moves each inferred fragment to right before its first user.

    Import leaves inferred fragments at any position.  Run as late as possible they delay no user
    fragment, and their results have the shortest live ranges.

        i = m1[] (a) {...}                 g = m1["g"] (b) {...}
        g = m1["g"] (b) {...}      ->      i = m1[] (a) {...}
        f = m1["f"] (i) {...}              f = m1["f"] (i) {...}

    Requires: the order of user fragments is final.
    Ensures: each inferred fragment with users is right before the first of them, or before other
        inferred fragments that are; unused ones stay.
    Cost: linear in uses.
    Source: openxla/shardy MPMD, `delay_inferred_fragments`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Last first, so that a chain of inferred fragments moves as a whole."""
        for fragment in reversed(ir.fragments(f)):
            if not fragment.is_user and not ir.is_unused(fragment):
                ir.move_before(fragment, in_block_order(ir.users(fragment))[0])


class DelayTransfersFromCpu(FunctionPass):
    """Moves each transfer out of host memory to right before its first user.

    Host memory is plentiful and device memory is not: a value that is loaded late occupies the device for a
    shorter time.

        t = transfer h to m1               f = m1["f"] (a) {...}
        f = m1["f"] (a) {...}      ->      t = transfer h to m1
        g = m1["g"] (t) {...}              g = m1["g"] (t) {...}

    Requires: the order of fragments is final.
    Ensures: each transfer with users whose operand is on a mesh that ends in `/cpu`, or in the host
        memory of its mesh, is right before the first of them; unused ones stay.
    Cost: linear in uses.
    Source: openxla/shardy MPMD, `delay_transfers_from_cpu`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """In program order."""
        with moving(f):
            for transfer in ir.ops(f, ir.Transfer):
                source = transfer.tensor.type
                on_host = source.mesh.endswith("/cpu") or source.on_host
                if on_host and not ir.is_unused(transfer):
                    ir.move_before(transfer, in_block_order(ir.users(transfer))[0])


class SinkCreateTokenIntoFragments(FunctionPass):
    """Creates tokens in each fragment that needs them, so that none crosses between fragments.

        f, t = m1[] (a) {...; ret x, t}            f = m1[] (a) {...; ret x}
        g = m1[] (f, t) {... uses t}         ->    g = m1[] (f) {u = create_token; ... uses u}

    Programs pass each other arrays only.  On one mesh effects stay in order, as a mesh runs its programs in
    the order of the text, which is final here; between meshes that order is lost, with a remark.

    Requires: the order of the program is final.
    Ensures: no fragment has token operands or results; a token that the function returns is its argument.
        Error: a returned token does not come from an argument.
    Cost: linear.
    Source: openxla/shardy MPMD, `sink_create_token_into_fragments`.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Last first, so that nothing uses a token result any more when it is dropped."""
        for fragment in reversed(ir.fragments(f)):
            tokens = [i for i, v in enumerate(fragment.inputs) if ir.is_token(v)]
            token_results = [i for i, r in enumerate(fragment.results) if ir.is_token(r)]
            if not tokens and not token_results:
                continue
            for i in reversed(tokens):
                _notice_lost_order(fragment, fragment.inputs[i])
                token = ir.create(
                    "stablehlo.create_token", [], [fragment.args[i].type], ir.at_start(fragment.body)
                )
                ir.replace_uses(fragment.args[i], token.results[0])
            if _thread_returned_tokens(fragment, tokens, token_results):
                drop(fragment, results=token_results, inputs=tokens)


def _notice_lost_order(fragment: ir.Fragment, token: ir.Value) -> None:
    maker = ir.producer(token)
    if isinstance(maker, ir.Fragment) and maker.mesh != fragment.mesh:
        diagnostics.notice(
            f'the effects on mesh "{fragment.mesh}" here were to come after those on mesh "{maker.mesh}" at '
            f"{maker.location}; nothing keeps that order between meshes",
            fragment.location,
        )


def _thread_returned_tokens(fragment: ir.Fragment, tokens: list[int], token_results: list[int]) -> bool:
    """Replaces uses of token results, which only a return can be here, by the tokens of the arguments."""
    for n, i in enumerate(token_results):
        result = fragment.results[i]
        if ir.is_unused(result):
            continue
        if not tokens:
            diagnostics.error(
                "the function returns a token that a fragment creates; tokens of ordered effects "
                "must come in as arguments",
                fragment.location,
            )
            return False
        ir.replace_uses(result, fragment.inputs[tokens[min(n, len(tokens) - 1)]])
    return True
