"""Moving ops that have no mesh into the fragments that use them."""

from __future__ import annotations

import functools

from mpmd import ir
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import sets
from mpmd.passes.structure import mesh_order

MADE_BY = "infer_mesh_wrap_meshless_ops"


class _Growing:
    """A fragment that takes in ops: the values of its future arguments."""

    def __init__(self, fragment: ir.Fragment) -> None:
        self._value_of: dict[ir.Value, ir.Value] = {}
        self._args_of: dict[ir.Value, list[ir.Value]] = {}
        for arg, value in zip(fragment.args, fragment.inputs):
            self.add(arg, value)

    def add(self, arg: ir.Value, value: ir.Value) -> None:
        self._value_of[arg] = value
        self._args_of.setdefault(value, []).append(arg)

    def reads(self, value: ir.Value) -> bool:
        return value in self._args_of

    def forget(self, value: ir.Value) -> list[ir.Value]:
        """Removes `value` from the operands; the arguments that held it."""
        args = self._args_of.pop(value, [])
        for arg in args:
            del self._value_of[arg]
        return args

    def rebuild(self, fragment: ir.Fragment, renamed: dict[ir.Value, ir.Value]) -> None:
        """Gives the fragment the operands that it reads; its users keep their order.

        The old one is left without a body, as other tables may contain values of it.
        """
        values = [self._value_of.get(arg) for arg in fragment.args]
        ir.erase_args(fragment.body, [i for i, value in enumerate(values) if value is None])
        inputs = [renamed.get(value, value) for value in values if value is not None]
        made = ir.rebuild(fragment, inputs, [r.type for r in fragment.results])
        for old, new in zip(fragment.results, made.results):
            for user, number in reversed(ir.uses(old)):
                ir.set_operand(user, number, new)
            renamed[old] = new


class Absorber:
    """Places the ops of one block, last first, each in one of three ways.

    Fragments are rebuilt once, at the end: until then their future operands are in a side table, and
    unneeded ops are only recorded.
    """

    def __init__(self, max_clones: int) -> None:
        self._max_clones = max_clones
        self._growing: dict[ir.Fragment, _Growing] = {}
        self._reader: dict[ir.Assign, ir.Fragment] = {}
        self._kept: set[ir.Assign] = set()
        self._dead: dict[ir.Op, None] = {}
        self._renamed: dict[ir.Value, ir.Value] = {}

    def place(self, op: ir.Op) -> None:
        """Inlines, clones or wraps an op whose results only assigns use (and tokens, fragments)."""
        possible = sets.src_set(op)
        sets.clear(op, sets.USE_SET, sets.SRC_SET)
        assigns, read_by, elsewhere = self._consumers(op)
        if len(read_by) == 1 and not elsewhere:
            self._absorb(next(iter(read_by)), op, assigns, move=True)
        elif read_by and not elsewhere and self._may_clone(op, len(read_by)):
            self._dead.update(dict.fromkeys(a for a in assigns if self._is_unread(a)))
            for fragment, of_fragment in read_by.items():
                self._absorb(fragment, op, of_fragment, move=False)
            self._dead[op] = None
        else:
            self._wrap(op, self._meshes(op, assigns, possible))

    def finish(self) -> None:
        """Rebuilds the fragments that took in ops, and erases unneeded ops."""
        for fragment, growing in self._growing.items():
            growing.rebuild(fragment, self._renamed)
        for op in [*self._growing, *self._dead]:
            ir.erase(op)

    def _may_clone(self, op: ir.Op, copies: int) -> bool:
        """Whether an op may be done several times, and is cheap enough."""
        is_cheap = copies <= self._max_clones or len(op.operands) == 0 or is_trivial(op)
        return is_cheap and ir.is_duplicable(op)

    def retire(self, op: ir.Op) -> None:
        """Records that an op is not needed any more; nor are its users."""
        self._dead[op] = None

    def keep(self, a: ir.Assign) -> None:
        """Records that something will read an assign: what it assigns needs a fragment of its own."""
        self._kept.add(a)

    def assigns(self, op: ir.Op | ir.Value) -> list[ir.Assign]:
        """The assigns of a value, or of the results of an op, that are still needed."""
        return [user for user in ir.users(op) if isinstance(user, ir.Assign) and user not in self._dead]

    def _consumers(self, op: ir.Op) -> tuple[list[ir.Assign], dict[ir.Fragment, list[ir.Assign]], bool]:
        """The assigns of the op's results, which fragments read them, and whether there are other readers."""
        assigns: list[ir.Assign] = []
        found: dict[ir.Fragment, list[ir.Assign]] = {}
        elsewhere = False
        for user in ir.users(op):
            if isinstance(user, ir.Fragment):  # a token
                found.setdefault(user, [])
            elif isinstance(user, ir.Assign) and user not in self._dead:
                assigns.append(user)
                elsewhere |= user in self._kept
                for reader in self._readers(user):
                    if isinstance(reader, ir.Fragment):
                        found.setdefault(reader, []).append(user)
                    else:
                        elsewhere = True
        for result in op.results:
            for fragment in self._token_readers(result):
                found.setdefault(fragment, [])
        return assigns, found, elsewhere

    def _readers(self, a: ir.Assign) -> list[ir.Op]:
        """The reader of an assign's result; of one created for a fragment that grows, that fragment."""
        reader = self._reader.get(a)
        return ir.users(a) if reader is None else [reader]

    def _token_readers(self, value: ir.Value) -> list[ir.Fragment]:
        """Fragments that took in an op that reads a token."""
        if assigning.is_tensor(value.type):
            return []
        return [f for f, growing in self._growing.items() if growing.reads(value)]

    def _absorb(self, fragment: ir.Fragment, op: ir.Op, assigns: list[ir.Assign], move: bool) -> None:
        """Moves or copies an op to the begin of a fragment, which then reads its operands.

        `assigns` are those of the op's results that the fragment reads.
        """
        if fragment not in self._growing:
            self._growing[fragment] = _Growing(fragment)
        growing = self._growing[fragment]
        values = assigning.read_from_above(op, captured_first=True)
        inside = {v: ir.append_arg(fragment.body, like=v) for v in values}
        stands_for = {r: r for r in op.results} | {a.result: a.tensor for a in assigns}
        results = _moved(op, fragment, inside) if move else _copied(op, fragment, inside)
        for value, result in stands_for.items():
            for arg in growing.forget(value):
                ir.replace_uses(arg, results[result])
        self._dead.update(dict.fromkeys(a for a in assigns if move or self._is_unread(a)))
        where = ir.before(fragment)
        for value, arg in inside.items():
            if assigning.is_tensor(value.type):
                value = assigning.assign(value, fragment.mesh, where)
                self._reader[value.owner] = fragment
            growing.add(arg, value)

    def _is_unread(self, a: ir.Assign) -> bool:
        growing = (self._growing.get(reader) for reader in self._readers(a))
        return all(g is not None and not g.reads(a.result) for g in growing)

    def _meshes(self, op: ir.Op, assigns: list[ir.Assign], possible: sets.MeshSet | None) -> list[str]:
        """The meshes of the op's assigns, in mesh order; one of them, if it may be done only once.

        That is one where its operands are, if there is one.
        """
        direct = [user.mesh for user in ir.users(op) if isinstance(user, ir.Fragment)]
        direct += [f.mesh for r in op.results for f in self._token_readers(r)]
        meshes = mesh_order([*(a.result.type.mesh for a in assigns), *direct])
        if len(meshes) < 2 or ir.is_duplicable(op):
            return meshes
        return [(possible.best(meshes) if possible else None) or meshes[0]]

    def _wrap(self, op: ir.Op, meshes: list[str]) -> None:
        """One fragment on each mesh; users on other meshes take their operands from the only one."""
        for mesh in meshes:
            is_served = functools.partial(_is_on, mesh) if len(meshes) > 1 else _is_any
            made = assigning.wrap(op, mesh, MADE_BY, is_served)
            for old, new in zip(op.results, made.results):
                if not assigning.is_tensor(old.type):
                    self._renamed.setdefault(old, new)
        self._dead[op] = None


def is_trivial(op: ir.Op) -> bool:
    """Whether an op is done several times rather than its result passed on."""
    return len(op.operands) <= 1 and len(op.results) == 1 and not len(op.operation.regions)


def _is_any(user: ir.Op) -> bool:
    return True


def _is_on(mesh: str, user: ir.Op) -> bool:
    """Whether a user of an op is served by a fragment on a mesh."""
    if isinstance(user, ir.Assign):
        return bool(user.result.type.mesh == mesh)
    return isinstance(user, ir.Fragment) and user.mesh == mesh


def _moved(op: ir.Op, fragment: ir.Fragment, inside: dict[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Moves an op to the begin of a fragment; its results there."""
    ir.move_to_start(op, fragment.body)
    use_inside(op, inside)
    return {r: r for r in op.results}


def use_inside(op: ir.Op, inside: dict[ir.Value, ir.Value]) -> None:
    """Uses `inside[v]` for `v` in an op and in its regions."""
    for inner in ir.walk(op) if len(op.operation.regions) else [op]:
        for i, value in enumerate(list(inner.operands)):
            if value in inside:
                ir.set_operand(inner, i, inside[value])


def _copied(op: ir.Op, fragment: ir.Fragment, inside: dict[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Copies an op to the begin of a fragment; its results there."""
    copy = ir.clone_with(op, dict(inside), ir.at_start(fragment.body))
    return dict(zip(op.results, copy.results))
