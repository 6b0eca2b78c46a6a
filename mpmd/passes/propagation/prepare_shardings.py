"""What Shardy's propagation requires of a program: shardings that fit their meshes, and no empty ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpmd import ir
from mpmd.passes.bases import FunctionPass, ModulePass
from mpmd.passes.calls.bodies import functions_of, put_back_bodies
from mpmd.passes.cleanup.fragments import simplify
from mpmd.sharding import shardings
from mpmd.sharding.shardings import axes_of, axis_size, sdy_meshes
from mpmd.support import diagnostics
from mpmd.support.user_code import frames_of


class DropSubAxes(FunctionPass):
    """Restricts the shardings of values between fragments to whole axes.

        f = m1["f"] in_shardings=[[{"x":(1)2}, {"y"}]] (a) {...}  -->  in_shardings=[[{}, {"y"}]]

    Propagation splits an axis where a dim is split, as a batch is into microbatches.  JAX cannot
    express such shardings of arrays; inside of fragments they may stay.

    Requires: shardings are attributes of fragments and transfers.
    Ensures: none of these names part of an axis.  Cost: linear in operands and results.
    Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        for op in ir.ops(f, (ir.Fragment, ir.Transfer)):
            for name in ("in_shardings", "out_shardings", shardings.ARGUMENT):
                old = shardings.read(op, name)
                new = [shardings.drop_sub_axes(sharding) for sharding in old]
                if new != old:
                    shardings.write(op, name, new)


class ForgetEmptyComputations(FunctionPass):
    """Removes the user's names from fragments that only change shardings.

        f = m1["f"(1)] cc=0 (a) {ret a}  ->  f = m1[] by=extract_reshards (a) {ret a}

    A computation may be reduced to its arguments (the backward of an addition is, for one) and still be
    needed, if argument and result have different shardings.  Without a name it can be merged with its
    neighbours, and is reported as a reshard.

    Requires: shardings are part of types.
    Ensures: each user fragment computes something.  Cost: linear in fragments.
    Source: ours; the dialect fails with an internal error when it validates reshards.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            if fragment.is_user and not ir.ops(fragment.body):
                fragment.origins = []
                fragment.stage = None
                fragment.inferred_by = ["extract_reshards"]


class ForgetEmptyShardings(FunctionPass):
    """Gives replicated values one type.

        m1, tensor<8xf32>, sharding=<@mesh, [{}]>   -->   m1, tensor<8xf32>

    Propagation gives some replicated values a sharding, and others none.  Fragments that differ
    in nothing else must be one program, and may donate their operands to each other.

    Requires: shardings are part of types.
    Ensures: a type with a sharding has one that shards something.  Cost: linear in values.
    Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Arguments, then the results of every op, and the arguments of loops."""
        plain: dict[ir.Type, ir.Type] = {}
        _forget(f.args, plain)
        for op in ir.walk(f, (ir.Fragment, ir.Transfer, ir.For)):
            _forget(op.results, plain)
            if isinstance(op, ir.For):
                _forget(op.args, plain)
        ir.return_types_changed(f)


def _forget(values: Iterable[ir.Value], plain: dict[ir.Type, ir.Type]) -> None:
    """Gives replicated values types without shardings; `plain` caches the result for each type."""
    for value in values:
        kind = value.type
        if not isinstance(kind, ir.MeshTensor) or kind.sharding is None:
            continue
        if kind not in plain:
            same = shardings.is_same(kind.sharding, None)
            plain[kind] = ir.MeshTensor.get(kind.mesh, kind.tensor, None, kind.memory_kind) if same else kind
        if plain[kind] != kind:
            ir.set_type(value, plain[kind])


class SimplifyProgram(FunctionPass):
    """Removes from fragments forwarded, unneeded and duplicate values.

        f, g, h = m1["f"] (a, a as b) {x = add a b; ret x, x, a};  k = m1["k"] (f, g, h) {...}
        ->  f = m1["f"] (a) {x = add a a; ret x};  k = m1["k"] (f, a) {...}

    Shardings are part of types here: only values with the same sharding are the same.

    Requires: nothing.
    Ensures: in each fragment no equal operands or results, no result that is an argument of its type, no
        unused result of a pure op, no unused operand; pure fragments without results are gone.  Attributes
        per operand and result follow.
    Cost: linear, times the length of the longest chain of fragments that only pass values on.
    Source: openxla/shardy MPMD, `simplify_program`; that attributes follow is ours.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """Last first, so that unused results are found before their producer is visited.

        Where a result was replaced, readers, which were visited before, may now have duplicates.
        """
        again = True
        while again:
            again = False
            for fragment in reversed(ir.fragments(f)):
                again |= simplify(fragment)


class FitShardingsToMeshes(ModulePass):
    """Adapts shardings to the axes of each mesh, where meshes are not alike.

        sdy.mesh @mesh = <["x"=4, "y"=2]>;  topology = "m1" : <["x"=4]>, "m2" : <["y"=2]>
        main(a@m1 {sharding = <@mesh, [{"x"}, {"y"}]>}, b@m2 {sharding = <@mesh, [{"x"}, {"y"}]>})
        ->  sdy.mesh @m1 = <["x"=4]>;  sdy.mesh @m2 = <["y"=2]>
            main(a@m1 {sharding = <@m1, [{"x"}, {}]>}, b@m2 {sharding = <@m2, [{}, {"y"}]>})

    Propagation uses one mesh, which has the axes of all.  An axis of one name has the same role on every
    mesh, even if its size differs; a mesh without it does not split.  Values between fragments are split
    evenly or not at all.  Nothing happens if all meshes have the axes of the one that shardings name, in its
    order.

    Requires: shardings are attributes; the user's are enforced.
    Ensures: the shardings of each value and inside of each fragment name its own mesh.  Error: a manual
        computation over axes that have another size there.
    Cost: linear in the module.  Source: ours.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Every function on meshes; then the new meshes replace the old."""
        functions = [f for f in ir.funcs(module) if f.is_mpmd]
        if not functions:
            return
        topology = functions[0].topology
        own = {name: axes_of(mesh) for name, mesh in topology.items()}
        old = {
            name: axes_of(mesh)
            for name, mesh in sdy_meshes(module.operation).items()
            if name not in own and axes_of(mesh)
        }
        if all([*axes.items()] == [*of_old.items()] for of_old in old.values() for axes in own.values()):
            return
        if any(True for body in functions_of(module) for _ in shardings.inside(body)):
            put_back_bodies(module)  # a body that fragments of several meshes share can name one mesh only
        fitting = _Fitting(own, old, _names(module, own))
        for f in functions:
            fitting.fit_function(f)
        for name, chosen in fitting.names.items():
            attributes = {"sym_name": ir.StringAttr.get(chosen), "mesh": topology[name]}
            ir.create("sdy.mesh", [], [], ir.at_start(module.body), attributes)
        for op in list(module.body.operations):
            if isinstance(op, ir.sdy.MeshOp) and str(op.sym_name.value) in old:
                ir.erase(op)


def _names(module: ir.Module, meshes: Iterable[str]) -> dict[str, str]:
    """For each mesh a symbol: its own name, or one like it where that is taken."""
    taken = {*ir.symbol_table(module), *sdy_meshes(module.operation)}
    chosen: dict[str, str] = {}
    for mesh in meshes:
        name = mesh
        while name in taken:
            name += "_mesh"
        taken.add(name)
        chosen[mesh] = name
    return chosen


@dataclasses.dataclass
class _Fitting:
    """The axes of every mesh, those of the sdy meshes to replace, and for each mesh its own sdy mesh."""

    own: dict[str, dict[str, int]]
    old: dict[str, dict[str, int]]
    names: dict[str, str]

    def fit_function(self, f: ir.Func) -> None:
        for attribute, values in (("arg_attrs", f.args), ("res_attrs", f.returned)):
            dicts = ir.attribute_dicts(f, attribute, len(values))
            for of_value, value in zip(dicts, values, strict=True):
                if shardings.ARGUMENT in of_value:
                    of_value[shardings.ARGUMENT] = self.of_value(of_value[shardings.ARGUMENT], value)
            ir.put_attribute_dicts(f, attribute, dicts)
        for op in ir.walk(f, (ir.Fragment, ir.Transfer, ir.For)):
            if isinstance(op, ir.Fragment):
                self.fit_values(op, "in_shardings", op.inputs)
                self.fit_values(op, "out_shardings", op.results)
                self.fit_inside(op)
            else:
                self.fit_values(op, shardings.ARGUMENT, op.results)

    def fit_values(self, op: ir.Op, name: str, values: Iterable[ir.Value]) -> None:
        """A per-value attribute of an op between fragments."""
        per_value = shardings.read(op, name)
        if per_value:
            shardings.write(op, name, [self.of_value(s, v) for s, v in zip(per_value, values, strict=True)])

    def of_value(self, sharding: shardings.Sharding, value: ir.Value) -> shardings.Sharding:
        """The sharding of a value on a mesh, split evenly."""
        kind = value.type
        return self.fitted(sharding, kind.mesh, kind.shape) if isinstance(kind, ir.MeshTensor) else sharding

    def fitted(self, sharding: shardings.Sharding, mesh: str, shape: list[int] | None) -> shardings.Sharding:
        """The equivalent of a sharding on a mesh; with `shape`, each dim is split as long as that is even."""
        old = ir.sdy.TensorShardingAttr(sharding)
        axes = self.own[mesh]
        dims = []
        for i, dim in enumerate(map(ir.sdy.DimensionShardingAttr, old.dimension_shardings)):
            kept, parts = [], 1
            for axis in map(ir.sdy.AxisRefAttr, dim.axes):
                if not self.has(mesh, axis):
                    continue
                parts *= axis_size(axis, axes)
                if shape is not None and shape[i] % parts:
                    break
                kept.append(axis)
            dims.append(ir.sdy.DimensionShardingAttr.get(kept, dim.is_closed, dim.priority))
        replicated, unreduced = (
            [axis for axis in map(ir.sdy.AxisRefAttr, kept_axes) if self.has(mesh, axis)]
            for kept_axes in (old.replicated_axes, old.unreduced_axes)
        )
        return ir.sdy.TensorShardingAttr.get(self.names[mesh], dims, replicated, unreduced)

    def has(self, mesh: str, axis: ir.sdy.AxisRefAttr) -> bool:
        """Whether a mesh has an axis; part of one it has only if the whole is as long as elsewhere."""
        size = self.own[mesh].get(axis.name)
        whole = axis.sub_axis_info is None
        return size is not None and (whole or all(a.get(axis.name) == size for a in self.old.values()))

    def fit_inside(self, fragment: ir.Fragment) -> None:
        for op in ir.walk(fragment)[1:]:
            if op.operation.name == "sdy.manual_computation":
                self.check_manual(op, fragment)
        for op, name, attribute in shardings.inside(fragment):
            if ir.sdy.TensorShardingAttr.isinstance(attribute):
                ir.put(op, name, self.fitted(attribute, fragment.mesh, None))
            else:
                per_value = ir.sdy.TensorShardingPerValueAttr(attribute).shardings
                shardings.write(op, name, [self.fitted(s, fragment.mesh, None) for s in per_value])

    def check_manual(self, op: ir.Op, fragment: ir.Fragment) -> None:
        """Checks a manual computation, which was written for axes of a certain size."""
        traced = {name: size for axes in self.old.values() for name, size in axes.items()}
        axes = self.own[fragment.mesh]
        names = list(ir.sdy.ManualAxesAttr(op.attributes["manual_axes"]))
        unlike = [name for name in names if axes.get(name) != traced.get(name)]
        if unlike:
            has = ", ".join(f"{name}={axes.get(name, 'none')}" for name in unlike)
            wants = ", ".join(f"{name}={traced.get(name, 'none')}" for name in unlike)
            where = "".join(f" ({frame})" for frame in frames_of(op)[:1])
            diagnostics.error(
                f"jax.shard_map runs on mesh {fragment.mesh!r} with {has}, but was traced with {wants}{where}"
                ": meshes may differ only in axes that no shard_map maps over\n"
                "  give the axis another name on each mesh where it has another size, or do not map over it",
                op.location,
            )
