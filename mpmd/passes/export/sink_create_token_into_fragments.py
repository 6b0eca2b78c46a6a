"""mpmd-sink-create-token-into-fragments."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import drop
from mpmd.support import diagnostics


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
            made = [i for i, r in enumerate(fragment.results) if ir.is_token(r)]
            if not tokens and not made:
                continue
            for i in reversed(tokens):
                _notice_lost_order(fragment, fragment.inputs[i])
                token = ir.create(
                    "stablehlo.create_token", [], [fragment.args[i].type], ir.at_start(fragment.body)
                )
                ir.replace_uses(fragment.args[i], token.results[0])
            if _thread_returned_tokens(fragment, tokens, made):
                drop(fragment, results=made, inputs=tokens)


def _notice_lost_order(fragment: ir.Fragment, token: ir.Value) -> None:
    maker = ir.producer(token)
    if isinstance(maker, ir.Fragment) and maker.mesh != fragment.mesh:
        diagnostics.notice(
            f'the effects on mesh "{fragment.mesh}" here were to come after those on mesh "{maker.mesh}" at '
            f"{maker.location}; nothing keeps that order between meshes",
            fragment.location,
        )


def _thread_returned_tokens(fragment: ir.Fragment, tokens: list[int], made: list[int]) -> bool:
    """Replaces uses of token results, which only a return can be here, by the tokens of the arguments."""
    for n, i in enumerate(made):
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
