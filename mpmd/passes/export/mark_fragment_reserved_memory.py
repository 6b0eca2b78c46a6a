"""mpmd-mark-fragment-reserved-memory."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.export.memory import is_donor, local_bytes, says_host, type_says_host
from mpmd.support import diagnostics


class MarkFragmentReservedMemory(FunctionPass):
    """Marks each fragment with the memory of its devices that other values occupy while it runs.

        f = m1["f"] (a) {...}          f = m1["f"] (a) <reserved_hbm_bytes = 16> {...}
        g = m1["g"] (f) {...}    ->    g = m1["g"] (f) <reserved_hbm_bytes = 32> {...}

    for arguments a and b of 16 bytes each that are not donated: b is alive while f runs, a and b while g
    runs.  Counted are one device's shards, on the fragment's mesh, in program order.  An argument that is
    to be aliased with a result of the program keeps its memory to the end.

    Requires: the order of the program, shardings and memory kinds are final; fragments and transfers only.
    Ensures: every fragment has `reserved_hbm_bytes : i64`, at least 0.  Error: any other op.
    Cost: linear.
    Source: openxla/shardy MPMD, `mark_fragment_reserved_memory`.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Traverses the program with the bytes that are live on every mesh."""
        if strangers := [op for op in ir.ops(f) if not isinstance(op, (ir.Fragment, ir.Transfer))]:
            for op in strangers:
                diagnostics.error(
                    "Expected only TransferOp, FragmentOp, FragmentCallOp and ReturnOp in the function body. "
                    f"The memory of {op.operation.name} cannot be accounted for",
                    op.location,
                )
            return
        live = _Live(f)
        for op in ir.ops(f):
            if isinstance(op, ir.Fragment):
                reserved = live.total[op.mesh] - sum(live.size[v] for v in dict.fromkeys(op.inputs))
                ir.put(op, "reserved_hbm_bytes", ir.i64(reserved))
            live.step(op)


class _Live:
    """Live values at one point of a function, in bytes of device memory.

    Attributes:
        total: bytes alive per mesh.
        size: bytes of each value that is or was alive; 0 for values in host memory.
    """

    def __init__(self, f: ir.Func) -> None:
        self.topology = f.topology
        self.total = dict.fromkeys(self.topology, 0)
        self.size: dict[ir.Value, int] = {}
        self._of_type: dict[ir.Type, int] = {}
        self.last_user = {v: op for op in [*ir.ops(f), f.terminator] for v in op.operands}
        attributes = ir.attribute_dicts(f, "arg_attrs", len(f.args))
        self.kept = {v for v, a in zip(f.args, attributes) if not is_donor(a)}
        for value, of_value in zip(f.args, attributes):
            self._begin(value, says_host(of_value), used=value in self.kept or value in self.last_user)

    def _begin(self, value: ir.Value, on_host: bool, used: bool) -> None:
        kind = value.type
        if kind not in self._of_type:
            self._of_type[kind] = 0 if type_says_host(kind) else local_bytes(value, self.topology)
        self.size[value] = self._of_type[kind] if used and not on_host else 0
        if self.size[value]:
            self.total[kind.mesh] += self.size[value]

    def step(self, op: ir.Op) -> None:
        """Advances past an op: values with their last use there are freed, its used results are added."""
        for value in dict.fromkeys(op.operands):
            if self.size[value] and self.last_user[value] == op and value not in self.kept:
                self.total[value.type.mesh] -= self.size[value]
        for value, of_value in zip(op.results, ir.attribute_dicts(op, "res_attrs", len(op.results))):
            self._begin(value, says_host(of_value), used=value in self.last_user)
