"""Branches over names whose index is known: the selected one replaces the conditional.

An unrolled loop that selects a stage by its counter has such conditionals.  Names in a branch that stays
cannot be placed, since a mesh would have to know whether it runs; that is an error.
"""

from __future__ import annotations

from mpmd import ir
from mpmd.passes import structure
from mpmd.passes.bases import ModulePass
from mpmd.passes.constant_evaluation import ConstantEvaluator
from mpmd.support import diagnostics
from mpmd.support.user_code import frames_of


class FoldConstantBranches(ModulePass):
    """Replaces conditionals over names whose index is known by the selected branch.

        i = const 1
        y = case i { ret a } { x = comp "f" (a) {..}; ret x }  -->  y = comp "f" (a) {..}

    The index of a branch is often the counter of an unrolled loop, or an entry of a table at it.  Meshes are
    assigned before the program runs; so names in a branch that may be taken or not have none.

    Requires: loops over names are unrolled.  Ensures: no name is in a branch, but for branches within
        named computations, which are unchanged.
    Error: a name is in a branch whose index is not known.
    Cost: linear in conditionals and in the ops that compute their indices.
    Source: ours; StableHLO's canonicalization folds no `case`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Folds outer conditionals before those in their branches, until no other can be folded."""
        while foldable := _foldable(module):
            for op, index in foldable:
                _fold(op, index)
        reported: set[tuple[str, str]] = set()
        for conditional in _choices_between_names(module):
            for op in ir.walk(conditional, (ir.NamedComputation, ir.NamedTensor)):
                _report_if_in_branch(op, reported)


def _foldable(module: ir.Module) -> list[tuple[ir.Op, int]]:
    """Conditionals over names with the number of the branch they take, none within another one of these."""
    choices = _choices_between_names(module)
    evaluator = ConstantEvaluator(module) if choices else None
    foldable: dict[ir.Op, int] = {}
    for op in choices:
        index = evaluator.integer(op.operands[0]) if evaluator is not None else None
        if index is not None and not any(outer in foldable for outer in structure.around(op)):
            foldable[op] = _branch(op, index)
    return list(foldable.items())


def _choices_between_names(module: ir.Module) -> list[ir.Op]:
    conditionals = ir.walk(module, (ir.stablehlo.CaseOp, ir.stablehlo.IfOp))
    return [op for op in conditionals if _chooses_between_names(op)]


def _chooses_between_names(conditional: ir.Op) -> bool:
    if not ir.walk(conditional, (ir.NamedComputation, ir.NamedTensor)):
        return False
    return not any(isinstance(outer, ir.NamedComputation) for outer in structure.around(conditional))


def _branch(op: ir.Op, index: int) -> int:
    """The region that runs: the last one for an index out of range; of `if` the first one if it is true."""
    count = len(op.operation.regions)
    if op.operation.name == "stablehlo.if":
        return 0 if index else 1
    return index if 0 <= index < count else count - 1


def _fold(op: ir.Op, index: int) -> None:
    """Puts the ops of one branch before the conditional, and its results in the place of those."""
    _, results = ir.clone_body(op.operation.regions[index].blocks[0], {}, ir.before(op))
    ir.replace(op, results)


def _report_if_in_branch(op: ir.Op, reported: set[tuple[str, str]]) -> None:
    """Reports a name whose innermost conditional, outside of named computations, was not folded.

    Forward and backward pass have a conditional each: a name is reported once for a line.
    """
    around = structure.around(op)
    conditional = next(filter(structure.is_conditional, around), None)
    if conditional is None or any(isinstance(outer, ir.NamedComputation) for outer in around):
        return
    inside = around[around.index(conditional) - 1] if conditional is not around[0] else op
    is_computation = isinstance(op, ir.NamedComputation)
    name = op.named.name if is_computation else ir.StringAttr(op.attributes["name"]).value
    where = "".join(f", {frame}" for frame in frames_of(op)[:1])
    if (name, where) not in reported:
        reported.add((name, where))
        what = f"named {'computation' if is_computation else 'tensor'} {name!r}"
        diagnostics.error(_message(what, where, *_described(conditional, inside)), op.location)


def _message(what: str, where: str, kind: str, branch: str) -> str:
    return (
        f"{what} is in {branch} of a {kind} whose {'condition' if kind == 'lax.cond' else 'index'} is not a "
        f"constant{where}\n"
        "  meshes are assigned before the step runs, so what runs on a mesh cannot depend on values\n"
        "  put the whole conditional into one named computation; or compute both values and select one with "
        "jnp.where;\n"
        "  or let Python or integer constants select: a Python if, a static argument, the counter of a scan"
    )


def _described(conditional: ir.Op, inside: ir.Op) -> tuple[str, str]:
    """The user's name of a conditional, and the branch that contains an op."""
    structure = conditional.operation.regions
    number = next(i for i, region in enumerate(structure) if inside.operation.block.region == region)
    if conditional.operation.name == "stablehlo.if":
        return "lax.cond", f"the {'false' if number else 'true'} branch"
    source = ir.producer(conditional.operands[0])
    is_converted = source is not None and source.operation.name == "stablehlo.convert"
    given = source.operands[0] if source is not None and is_converted else None
    if given is not None and str(given.type.element_type) == "i1" and len(structure) == 2:
        return "lax.cond", f"the {'true' if number else 'false'} branch"
    return "lax.switch", f"branch {number} of {len(structure)} (counted from 0)"
