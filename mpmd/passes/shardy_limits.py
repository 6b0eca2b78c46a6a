"""Limits of Shardy's propagation that would end the process, checked before it runs."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.structure import called_by, reached_from

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
    """Whether an op has a sharding."""
    name = op.operation.name
    if name.startswith("sdy.") and name not in _PLAIN:
        return True
    if isinstance(op, ir.Func):
        return any(
            _SHARDING in str(op.attributes[a]) for a in ("arg_attrs", "res_attrs") if a in op.attributes
        )
    return _SHARDING in op.attributes
