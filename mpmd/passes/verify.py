"""What must hold of a program, beyond what the dialect's own verifier checks.

The dialect accepts, and passes then misread or crash on: calls that do not fit their callee or name an
unknown one, per-value attributes of the wrong length, counters of the wrong type, stages on inferred
fragments, doubled meshes and origins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpmd import ir
from mpmd.errors import IRError, collect


def verify(module: ir.Module) -> None:
    """Checks a module.

    Raises:
        IRError: with every violation of ours, or with MLIR's own message.
    """
    problems = list(violations(module))
    if problems:
        raise collect(IRError, problems, "the program is invalid:")
    try:
        module.operation.verify()
    except ir.MLIRError as e:
        problems = list(_uses_of_what_was_erased(module))
        raise IRError(f"the program is invalid: {' '.join(problems) or e}") from None
    ir.free_erased()


def violations(module: ir.Module) -> Iterator[str]:
    """Each violation that MLIR's verifier does not find, as one sentence."""
    symbols = {f.symbol: f for f in ir.funcs(module)}
    for f in symbols.values():
        if f.is_mpmd:
            yield from _topology_problems(f)
        if f.is_external:
            continue
        for op in ir.ops(f):
            if isinstance(op, (ir.Call, ir.FragmentCall, ir.Fragment)):
                found = _fragment_problems(op) if isinstance(op, ir.Fragment) else _call_problems(op, symbols)
                for problem in found:
                    yield f"{op.operation.name} in @{f.symbol} at {op.location}: {problem}"


def _uses_of_what_was_erased(module: ir.Module) -> Iterator[str]:
    for op in ir.walk(module):
        for i, value in enumerate(op.operands):
            made_by = ir.producer(value) or value.owner.owner.opview
            if ir.module_of(made_by) != module.operation:
                yield f"operand {i} of {op.operation.name} at {op.location} was erased."


def _topology_problems(f: ir.Func) -> Iterator[str]:
    names = re.findall(r'<"([^"]*)" : <', str(f.attributes["topology"]))
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield f'@{f.symbol}: two meshes of its topology are called "{name}"'
    for i, arg in enumerate(f.args if not f.is_external else []):
        if isinstance(arg.type, ir.MeshTensor) and arg.type.mesh not in names:
            yield f'@{f.symbol}: argument {i} is on mesh "{arg.type.mesh}", which its topology lacks'


def _call_problems(op: ir.Call | ir.FragmentCall, symbols: dict[str, ir.Func]) -> Iterator[str]:
    callee = symbols.get(op.callee_name)
    if callee is None:
        yield f"it calls @{op.callee_name}, which the module does not have"
        return
    given, wanted = len(op.operands), len(callee.args)
    if given != wanted:
        yield f"it has {given} operands, @{op.callee_name} has {wanted} arguments"
    given, wanted = len(op.results), len(callee.returned)
    if given != wanted:
        yield f"it has {given} results, @{op.callee_name} returns {wanted}"


def _fragment_problems(op: ir.Fragment) -> Iterator[str]:
    if "stage_id" in op.attributes:
        if not op.is_user:
            yield "an inferred fragment has a stage"
        elif op.stage < 0:
            yield f"its stage {op.stage} is negative"
    if "call_counter" in op.attributes and str(op.attributes["call_counter"].type) != "ui32":
        yield f"its call_counter is a {op.attributes['call_counter'].type}, not a ui32"
    origins = op.origins
    for origin in dict.fromkeys(o for o in origins if origins.count(o) > 1):
        yield f"it has the origin {origin} twice"
    counts = {"arg_attrs": len(op.inputs), "res_attrs": len(op.results)}
    for name, count in counts.items():
        if name in op.attributes and len(ir.ArrayAttr(op.attributes[name])) != count:
            yield f"its {name} has {len(ir.ArrayAttr(op.attributes[name]))} entries for {count} values"
    counts = {"in_shardings": len(op.inputs), "out_shardings": len(op.results)}
    for name, count in counts.items():
        if name in op.attributes:
            have = len(ir.sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings)
            if have != count:
                yield f"its {name} has {have} entries for {count} values"
