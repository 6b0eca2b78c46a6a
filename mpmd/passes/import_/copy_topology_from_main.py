"""mpmd-copy-topology-from-main."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass


class CopyTopologyFromMain(ModulePass):
    """Turns the callees of an MPMD function into private MPMD functions of the same meshes.

        main(a) {topology}: x = call body(a)       main(a) {topology}: x = call body(a)
        body(p): ..                           -->  private body(p) {topology}: ..

    Requires: calls name functions of the module.  Ensures: every callee has a topology.  Cost: linear.
    Source: openxla/shardy MPMD, `copy_topology_from_main`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Visits the calls of each function that has a topology."""
        symbols = ir.symbol_table(module)
        for f in [f for f in symbols.values() if f.is_mpmd and not f.is_external]:
            callees = {call.callee_name: symbols[call.callee_name] for call in ir.walk(f, ir.Call)}
            for callee in callees.values():
                ir.put(callee, "topology", f.attributes["topology"])
                ir.put(callee, "sym_visibility", ir.StringAttr.get("private"))
