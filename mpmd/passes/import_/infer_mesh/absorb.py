"""Ops without a mesh, moved or copied into the fragments that use them.

Work around microbatches, such as slices of the batch and the optimizer, is in no fragment of a microbatch, so
that these stay equal: it becomes one fragment per mesh and round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from mpmd import ir
from mpmd.passes.fragments.dependencies import Dependencies
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import mesh_sets
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
        rebuilt = ir.rebuild(fragment, inputs, [r.type for r in fragment.results])
        for old, new in zip(fragment.results, rebuilt.results):
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
        possible = mesh_sets.src_set(op)
        mesh_sets.clear(op, mesh_sets.USE_SET, mesh_sets.SRC_SET)
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
        by_fragment: dict[ir.Fragment, list[ir.Assign]] = {}
        elsewhere = False
        for user in ir.users(op):
            if isinstance(user, ir.Fragment):  # a token
                by_fragment.setdefault(user, [])
            elif isinstance(user, ir.Assign) and user not in self._dead:
                assigns.append(user)
                elsewhere |= user in self._kept
                for reader in self._readers(user):
                    if isinstance(reader, ir.Fragment):
                        by_fragment.setdefault(reader, []).append(user)
                    else:
                        elsewhere = True
        for result in op.results:
            for fragment in self._token_readers(result):
                by_fragment.setdefault(fragment, [])
        return assigns, by_fragment, elsewhere

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

        `assigns` belong to the results of the op that the fragment reads.
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

    def _meshes(self, op: ir.Op, assigns: list[ir.Assign], possible: mesh_sets.MeshSet | None) -> list[str]:
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
            fragment = assigning.wrap(op, mesh, MADE_BY, is_served)
            for old, new in zip(op.results, fragment.results):
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


Group = tuple[int, str]
"""A round and a mesh."""
OnMeshes = dict[tuple[ir.Value, str], ir.Value]
"""For a value without a mesh, and a mesh, the value on that mesh."""
Signatures = Callable[[ir.Call], tuple[list[list[ir.Type]], list[list[ir.Type]]]]
"""The types on meshes of which a call takes each operand, and returns each result."""


class RoundGroups:
    """Moves pure ops of an entry function into one fragment per mesh and round.

    The *round* of an op is how often data must leave and re-enter such fragments on its way there.  An op
    goes into the first round that reads it, a trivial one into each; calls and results read it as soon as its
    operands are there.  Data only flows to later rounds, so fragments cannot form a cycle.

    Ops, and values as their producers, are numbers: their positions in the function.

    Args:
        f: an entry function without loops.
        absorber: is going to place all other ops.
        signatures: of its calls.

    Attributes:
        there: the values that fragments read and return.
    """

    def __init__(self, f: ir.Func, absorber: Absorber, signatures: Signatures) -> None:
        self._f = f
        self._absorber = absorber
        self._signatures = signatures
        self.there: OnMeshes = {}
        self._ops = ir.ops(f)
        self._source: dict[ir.Value, int] = {}
        self._reads: list[list[ir.Value]] = []
        self._readers: list[list[int]] = [[] for _ in self._ops]
        self._index()
        self._free = self._free_ops()
        self._earliest = self._earliest_rounds()
        self._rounds: dict[int, dict[str, list[int]]] = {}
        self._first_reader: dict[tuple[ir.Value, str], int] = {}
        self._assigns: dict[tuple[ir.Value, str], list[ir.Assign]] = {}
        self._members: dict[Group, list[int]] = {}
        self._is_ordered = True

    def _index(self) -> None:
        for i, op in enumerate(self._ops):
            has_region = len(op.operation.regions) and not isinstance(op, ir.Fragment)
            values = assigning.read_from_above(op) if has_region else list(dict.fromkeys(op.operands))
            self._reads.append(values)
            for source in {self._source[v] for v in values if v in self._source}:
                self._readers[source].append(i)
            self._source.update((r, i) for r in op.results)

    def _free_ops(self) -> set[int]:
        """Pure ops between tensors that are read by each other, calls and results, and not by fragments."""
        free: set[int] = set()
        for i in reversed(range(len(self._ops))):
            op, readers = self._ops[i], self._readers[i]
            if (
                readers
                and mesh_sets.is_meshless(op)
                and all(j in free or self._reads_plain(j) for j in readers)
            ):
                values = [*op.results, *self._reads[i]]
                if ir.is_movable(op) and all(assigning.is_tensor(v.type) for v in values):
                    free.add(i)
        return free

    def _reads_plain(self, i: int) -> bool:
        """Whether an op cannot take in the ops that compute its operands."""
        op = self._ops[i]
        if isinstance(op, ir.Assign):
            return not any(isinstance(self._ops[j], ir.Fragment) for j in self._readers[i])
        return isinstance(op, ir.Call)

    def _earliest_rounds(self) -> list[int]:
        """For each op the first round in which its operands are there."""
        rounds: list[int] = []
        for i, values in enumerate(self._reads):
            if i in self._free and len(values) > 1 and all(self._is_elsewhere(v, i) for v in values):
                self._free.discard(i)  # on its own, it may be moved to the mesh of its operands
            sources = (self._source[v] for v in values if v in self._source)
            # A free op that reads from outside is one round later than its source.  Data then only flows to
            # later rounds.
            enters = i in self._free
            rounds.append(max((rounds[s] + (enters and s not in self._free) for s in sources), default=0))
        return rounds

    def _is_elsewhere(self, value: ir.Value, reader: int) -> bool:
        """Whether a value comes from a call, on another mesh than its reader is needed on."""
        source = self._source.get(value)
        if source is None:
            return False
        op = self._ops[source]
        if isinstance(op, ir.Call):
            meshes = {kind.mesh for kind in self._signatures(op)[1][ir.result_index(value)]}
            return not meshes & set(mesh_sets.use_set(self._ops[reader]).names)
        return mesh_sets.is_meshless(op) and source not in self._free

    def place(self) -> None:
        """Chooses the groups of all ops, last first, then creates the fragments, first round first."""
        # Readers come first, so that `_needed` knows their rounds.
        for i in sorted(self._free, reverse=True):
            op, needed = self._ops[i], self._needed(i)
            mesh_sets.clear(op, mesh_sets.USE_SET, mesh_sets.SRC_SET)
            in_all = is_trivial(op)
            self._rounds[i] = {m: sorted(rounds)[: None if in_all else 1] for m, rounds in needed.items()}
            for mesh, rounds in self._rounds[i].items():
                for number in rounds:
                    self._members.setdefault((number, mesh), []).append(i)
        groups = sorted(self._members, key=lambda group: (group[0], self._members[group][-1]))
        inputs = {group: self._inputs(group) for group in groups}
        places = self._places(groups, inputs)
        last = {i: group for group in groups for i in self._members[group]}
        for group in groups:
            self._create(group, inputs[group], places[group], last)
        read = ((self._source.get(v, -1), places[group]) for group in groups for v in inputs[group])
        self._is_ordered = all(source < place for source, place in read if source not in self._free)

    def finish(self) -> None:
        """Puts the function into dependency order, once its calls read from the fragments."""
        if not self._is_ordered:
            ir.reorder(self._f, Dependencies(self._f).top_down())

    def _needed(self, i: int) -> dict[str, set[int]]:
        """On which meshes and in which rounds an op is read."""
        needed: dict[str, set[int]] = {}
        for j in self._readers[i]:
            op = self._ops[j]
            if j in self._free:
                for mesh, rounds in self._rounds[j].items():
                    needed.setdefault(mesh, set()).update(rounds)
                continue
            if isinstance(op, ir.Assign):
                mesh = op.result.type.mesh
                self._assigns.setdefault((op.tensor, mesh), []).append(op)
                readers = self._readers[j] if op.result.type == self._kind(op.tensor, mesh) else [j]
                self._note_reader(op.tensor, mesh, min(readers, default=len(self._ops)))
                needed.setdefault(mesh, set()).add(self._earliest[i])
                continue
            for value, kinds in zip(op.operands, self._signatures(op)[0]):
                for kind in kinds if self._source.get(value) == i else ():
                    self._note_reader(value, kind.mesh, j)
                    needed.setdefault(kind.mesh, set()).add(self._earliest[i])
        return needed

    def _note_reader(self, value: ir.Value, mesh: str, reader: int) -> None:
        first = self._first_reader.get((value, mesh), reader)
        self._first_reader[value, mesh] = min(first, reader)

    def _kind(self, value: ir.Value, mesh: str) -> ir.Type:
        return ir.MeshTensor.get(mesh, value.type)

    def _inputs(self, group: Group) -> list[ir.Value]:
        """The values that a group reads, in that order."""
        members = set(self._members[group])
        read = dict.fromkeys(v for i in reversed(self._members[group]) for v in self._reads[i])
        return [v for v in read if self._source.get(v) not in members]

    def _places(self, groups: list[Group], inputs: dict[Group, list[ir.Value]]) -> dict[Group, int]:
        """For each group the first op that reads from it: its fragment is created right before that."""
        places: dict[Group, int] = {}
        for group in reversed(groups):
            readers = (self._first_reader[r, group[1]] for r in self._results(group))
            places[group] = min(readers, default=len(self._ops))
            for value in inputs[group]:
                if self._source.get(value) in self._free:
                    self._note_reader(value, group[1], places[group])
        return places

    def _results(self, group: Group) -> list[ir.Value]:
        """The values that others read from a group: from the first that an op is in."""
        number, mesh = group
        first = (i for i in reversed(self._members[group]) if self._rounds[i][mesh][0] == number)
        return [r for i in first for r in self._ops[i].results if (r, mesh) in self._first_reader]

    def _create(self, group: Group, inputs: list[ir.Value], place: int, last: dict[int, Group]) -> None:
        """Creates a fragment: ops move into the last one that they are in, others get copies."""
        mesh, members, results = group[1], self._members[group], self._results(group)
        at_end = place == len(self._ops)
        where = ir.at_end(self._f.body) if at_end else ir.before(self._ops[place])

        ends = [self._ops[i].location for i in (members[-1], members[0])]
        fragment = ir.make_fragment(
            mesh, [self._on(v, mesh) for v in inputs], [self._kind(r, mesh) for r in results], where,
            lambda args, inside: [], inferred_by=[MADE_BY],
            location=ir.Location.fused(ends, context=ir.context()),
        )  # fmt: skip
        values, end = dict(zip(inputs, fragment.args)), fragment.terminator
        for i in reversed(members):
            # Fragments are created first round first.  An op is cloned into all groups but its last, to which
            # it moves.
            if last[i] == group:
                ir.move_before(self._ops[i], end)
                use_inside(self._ops[i], values)
            else:
                ir.clone_with(self._ops[i], values, ir.before(end))
        fragment.returned = [values.get(r, r) for r in results]
        for old, new in zip(results, fragment.results):
            self.there[old, mesh] = new
            for user in self._assigns.get((old, mesh), ()):
                _replace(user, new)

    def _on(self, value: ir.Value, mesh: str) -> ir.Value:
        """A value on a mesh; one that comes from elsewhere is assigned, once."""
        if (value, mesh) not in self.there:
            source = self._source.get(value)
            where = ir.at_start(self._f.body) if source is None else ir.after(self._ops[source])
            self.there[value, mesh] = assigning.assign(value, mesh, where)
            self._absorber.keep(self.there[value, mesh].owner)
        return self.there[value, mesh]


def _replace(user: ir.Assign, there: ir.Value) -> None:
    """Replaces an assign by the value on its mesh, unless that is in another memory."""
    if user.result.type == there.type:
        ir.replace_uses(user.result, there)
        ir.erase(user)
    else:
        ir.set_operand(user, 0, assigning.unassign(there, ir.before(user), location=user.location))
