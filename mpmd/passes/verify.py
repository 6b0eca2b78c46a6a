"""Invariants of a program beyond those of the dialect's own verifier, and limits of Shardy's propagation.

The dialect accepts, and passes then misread or crash on: calls that do not fit their callee or name an
unknown one, per-value attributes of the wrong length, shardings over axes that their mesh lacks, counters of
the wrong type, stages on inferred fragments, doubled meshes and origins.  Beyond its limits Shardy would end
the process, so they are checked before it runs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from mpmd import ir
from mpmd.errors import IRError, collect
from mpmd.passes.structure import called_by, reached_from
from mpmd.sharding.shardings import axes_of, sdy_meshes


def verify(module: ir.Module) -> None:
    """Checks a module.

    Raises:
        IRError: with all violations, or with MLIR's own message.
    """
    problems = list(violations(module))
    if problems:
        raise collect(IRError, problems, "the program is invalid:")
    try:
        module.operation.verify()
    except ir.MLIRError as e:
        problems = list(_uses_of_erased_values(module))
        raise IRError(f"the program is invalid: {' '.join(problems) or e}") from None
    ir.free_erased()


def violations(module: ir.Module) -> Iterator[str]:
    """Each violation that MLIR's verifier does not find, as one sentence."""
    symbols = ir.symbol_table(module)
    meshes = sdy_meshes(module.operation)
    for f in symbols.values():
        if f.is_mpmd:
            yield from _topology_problems(f)
        if f.is_external:
            continue
        for op in ir.ops(f):
            problems: Iterator[str] = iter(())
            if isinstance(op, ir.Fragment):
                problems = itertools.chain(_fragment_problems(op), _sharding_problems(op, meshes))
            elif isinstance(op, (ir.Call, ir.FragmentCall)):
                problems = _call_problems(op, symbols)
            elif isinstance(op, ir.Transfer):
                problems = _sharding_problems(op, meshes)
            for problem in problems:
                yield f"{op.operation.name} in @{f.symbol} at {op.location}: {problem}"


def _uses_of_erased_values(module: ir.Module) -> Iterator[str]:
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
    if callee.is_external:
        yield f"it calls @{op.callee_name}, which has no body"
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


def _sharding_problems(op: ir.Fragment | ir.Transfer, meshes: dict[str, ir.sdy.MeshAttr]) -> Iterator[str]:
    """Problems of the shardings of an op's values, as attributes."""
    values = {"in_shardings": op.operands, "out_shardings": op.results, "sdy.sharding": op.results}
    for name in (name for name in values if name in op.attributes):
        shardings = ir.sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
        if len(shardings) != len(values[name]):
            yield f"its {name} has {len(shardings)} entries for {len(values[name])} values"
        for sharding in dict.fromkeys(map(str, shardings)):
            yield from (f"{name} {sharding}: {problem}" for problem in _unknown_parts(sharding, meshes))


def _unknown_parts(sharding: str, meshes: dict[str, ir.sdy.MeshAttr]) -> Iterator[str]:
    """The mesh, or the axes, of a sharding that the module does not have."""
    mesh = re.match(r"#sdy\.sharding<@(\w+)", sharding)
    if mesh is None or not meshes:  # a module without any mesh is a piece of one that has them
        return
    if mesh[1] not in meshes:
        yield f"there is no sdy mesh @{mesh[1]}"
        return
    axes = axes_of(meshes[mesh[1]])
    for axis in dict.fromkeys(re.findall(r'"([^"]*)"', sharding)):
        if axis not in axes:
            yield f'the sdy mesh @{mesh[1]} has no axis "{axis}"; it has {", ".join(axes) or "none"}'


_SHARDING = "sdy.sharding"
_PLAIN = ("sdy.constant", "sdy.return")


def propagation_problem(module: ir.Module) -> str:
    """Why shardings cannot be propagated through a module, where Shardy would end the process; or ""."""
    problem = _main_problem(module)
    if problem:
        return problem
    symbols = ir.symbol_table(module)
    called = {name: called_by(f) for name, f in symbols.items()}
    problems = [
        f"@{name} is called and has no body: shardings are propagated through calls"
        for name in dict.fromkeys(callee for callees in called.values() for callee in callees)
        if symbols[name].is_external
    ]
    problems += [
        f"@{name} calls itself: shardings are propagated through calls"
        for name in symbols
        if name in reached_from([name], called)
    ]
    problems += [p for f in symbols.values() for p in _named_computation_problems(f, symbols, called)]
    return "\n".join(problems)


def _main_problem(module: ir.Module) -> str:
    """Why the function to propagate from is ambiguous; or ""."""
    functions = ir.funcs(module)
    names = [f"@{f.symbol}" for f in functions]
    if "@main" in names or (len(functions) == 1 and functions[0].is_public):
        return ""
    what = f"none of {', '.join(names)}" if len(names) > 1 else f"not {names[0]}" if names else "not there"
    return f"shardings are propagated from the public function @main, which is {what}"


def _named_computation_problems(
    f: ir.Func, symbols: dict[str, ir.Func], called: dict[str, list[str]]
) -> list[str]:
    """Shardings inside of named computations, which Shardy cannot propagate to their arguments."""
    problems = []
    for computation in ir.walk(f, ir.NamedComputation):
        direct = called_by(computation)
        inside = [computation, *(symbols[n] for n in dict.fromkeys((*direct, *reached_from(direct, called))))]
        if any(_is_sharded(op) for where in inside for op in ir.walk(where)):
            problems.append(
                f"the named computation {computation.named} in @{f.symbol} contains a sharding, or calls "
                f"a function that does: shardings are propagated through fragments, so create some before "
                "(-mpmd-import-pipeline)"
            )
    return problems


def _is_sharded(op: ir.Op) -> bool:
    name = op.operation.name
    if name.startswith("sdy.") and name not in _PLAIN:
        return True
    if isinstance(op, ir.Func):
        return any(
            _SHARDING in str(op.attributes[a]) for a in ("arg_attrs", "res_attrs") if a in op.attributes
        )
    return _SHARDING in op.attributes
