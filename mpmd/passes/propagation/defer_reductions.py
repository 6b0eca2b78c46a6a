"""Reductions deferred to the end of a step: terms of the devices are added once for all microbatches.

A gradient that microbatches accumulate is a sum over devices in each of them.  If every term of the sum has a
partial form (see `sharding.partial`), the accumulators carry that form, and one fragment behind the last
microbatch takes the sum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.bodies import called_bodies, numbered, put_back, share_bodies
from mpmd.passes.fragments.editing import erase_dead_ops
from mpmd.passes.propagation.trial import (
    Layout,
    Trial,
    arguments_of_rows,
    axes_of_rows,
    is_one_mesh,
    kinds_of_work,
    mesh_of_shardings,
)
from mpmd.passes.structure import zeros
from mpmd.passes.transfers.carried import START
from mpmd.sharding import shardings
from mpmd.sharding.inside import splits_of_copy
from mpmd.sharding.partial import PartialForms, is_zero, tensor, total_of
from mpmd.sharding.shardings import Split, axes_of, axes_without, sharding_of, split_of, without
from mpmd.support import diagnostics

REDUCTION = "defer_reductions"
STARTS = "start_reductions"


class DeferReductions(FunctionPass):
    """Adds terms of the devices of a mesh, once for all microbatches.

        b0 = m1["f"(1)] cc=0 (x0, z)  { w = dot x0 x0 over rows; s = add z w;  ret s }
        b1 = m1["f"(1)] cc=1 (x1, b0) { w = dot x1 x1 over rows; s = add b0 w; ret s }
        ->
        b0 = m1["f"(1)] cc=0 (x0, z')  { w' = dot x0 x0 of each device; s' = add z' w';  ret s' }
        b1 = m1["f"(1)] cc=1 (x1, b0') { w' = dot x1 x1 of each device; s' = add b0' w'; ret s' }
        s  = m1[] by=defer_reductions (b1') { sum of b1' over the devices }

    The rows of `x0` lie over devices, so that `w` is a sum over them.  A primed value has the terms of all
    devices, in one more dim that is split over them: see `mpmd.sharding.partial`.  A chain of fragments that
    add to one accumulator carries it in this form, and the sum is taken where the chain ends.  So does a term
    that one fragment computes and another adds: the weight of two stages, or a split backward.

    Over axes of `per_microbatch` terms are added in each microbatch, if they are deferred over others: a
    value split along them is then reduced into its parts, and the accumulator has no more than these.  Not
    so what cannot be split along them, such as a loss.

    Requires: shardings are attributes; microbatches are numbered.
    Ensures: a value is deferred only if all that its fragments do with it is to add terms that have a partial
        form along the same axes.  Values change by rounding: terms of microbatches are added first, then
        those of devices.
    Notice: meshes whose axes differ, where nothing is deferred.
    Cost: one more propagation.
    Source: ours; JaxPP's users write it with `jax.P(unreduced=...)`.

    Attributes:
        per_microbatch: axes over which terms are added in each microbatch.
    """

    runs_on = "mpmd"
    per_microbatch: tuple[str, ...] = ()

    def rewrite_function(self, f: ir.Func) -> None:
        """Finds the chains, rewrites their fragments, one of each kind, and inserts the sums."""
        rows = axes_of_rows(f)
        if not rows:
            return
        if not is_one_mesh(f):
            diagnostics.notice(
                "what devices add up is reduced in each microbatch, and weights are gathered where they are "
                "used, as the meshes of the topology have different axes",
                f.location,
            )
            return
        before = ir.edits()
        kept = {i for i, arg in enumerate(f.args) if any(_is_of_microbatch(op) for op in ir.users(arg))}
        trial = Trial(f, rows, kept | arguments_of_rows(f))
        uses = {v: len(ir.uses(v)) for x in ir.fragments(f) for v in x.results}
        kinds = _kinds_of(f, trial, frozenset(self.per_microbatch))
        totals = _totals(trial.fragments, kinds, uses)
        if totals:
            _Deferring(f, kinds, totals, uses).run()
            return
        for model in _models(kinds):
            ir.erase(model)
        ir.forget_edits(before)  # of copies


def _is_of_microbatch(op: ir.Op) -> bool:
    return isinstance(op, ir.Fragment) and op.call_counter is not None


@dataclasses.dataclass(frozen=True)
class _Link:
    """A result that has a partial form if some operands have, each used for it alone.

    Attributes:
        given: the result.
        axes: along them lie its terms.
        taken: the operands.
        along: for each of these the axes of its terms: more than the result's, if it is reduced here.
        is_reduced: a term is reduced over some axes before it is added.
    """

    given: int
    axes: tuple[str, ...]
    taken: tuple[int, ...]
    along: tuple[tuple[str, ...], ...]
    is_reduced: bool


@dataclasses.dataclass(eq=False)
class _Kind:
    """Fragments of one mesh with one body and the same types."""

    model: ir.Fragment
    layout: Layout
    shares: bool
    sizes: Mapping[str, int]
    splits: Mapping[ir.Value, Split]
    per_microbatch: frozenset[str]
    known: dict[frozenset[tuple[int, tuple[str, ...]]], list[tuple[_Link, int | None]]]

    def links(self, partial: Mapping[int, tuple[str, ...]]) -> list[tuple[_Link, int | None]]:
        """Results in partial form, and the operand among those taken that is only a start, if one is.

        Args:
            partial: the operands that come in partial form, with the axes of their terms; each link may
                take some of them, and what no link takes has to be whole.
        """
        key = frozenset(partial.items())
        if key not in self.known:
            links = _links(self, partial)
            used = {i for link, start in links for i in link.taken if i != start}
            # An operand in partial form that no link takes would be read as a whole value.  It has to be
            # whole, and the links that remain possible are looked for again: with fewer operands each time,
            # so this ends.
            if used != set(partial):
                links = self.links({i: axes for i, axes in partial.items() if i in used})
            self.known[key] = links
        return self.known[key]


def _kinds_of(f: ir.Func, trial: Trial, per_microbatch: frozenset[str]) -> dict[ir.Fragment, _Kind]:
    """The kinds of the fragments that add to accumulators, and of those that give them terms."""
    symbols = ir.symbol_table(ir.module_of(f))
    groups: list[tuple[list[ir.Fragment], ir.Fragment, bool]] = []
    added = set[ir.Value]()
    for group in kinds_of_work(trial.fragments):
        if len(group) > 1:
            model = ir.clone(group[0], ir.after(group[0]))
            shares = bool(called_bodies(model))
            put_back(model, symbols)
            groups.append((group, model, shares))
            returned = model.returned
            adding = [i for i, arg in enumerate(model.args) if any(_is_used_for(arg, v) for v in returned)]
            added |= {list(fragment.inputs)[i] for fragment in group for i in adding}
    kinds: dict[ir.Fragment, _Kind] = {}
    for group, model, shares in groups:
        if added.isdisjoint(value for fragment in group for value in (*fragment.inputs, *fragment.results)):
            ir.erase(model)
            continue
        sizes, splits = axes_of(f.topology[model.mesh]), trial.splits(group[-1], model)
        kind = _Kind(model, trial.layout(group[-1]), shares, sizes, splits, per_microbatch, {})
        kinds.update(dict.fromkeys(group, kind))
    return kinds


def _models(kinds: Mapping[ir.Fragment, _Kind]) -> list[ir.Fragment]:
    """The copies of fragments that their kinds were found in."""
    return list(dict.fromkeys(kind.model for kind in kinds.values()))


def _addition(value: ir.Value) -> Iterable[tuple[ir.Value, ir.Value]]:
    """The arguments that a value adds a term to, and the terms."""
    op = ir.producer(value)
    if op is not None and op.operation.name == "stablehlo.add":
        for taken, term in (list(op.operands), list(op.operands)[::-1]):
            if ir.producer(taken) is None and taken != term:
                yield taken, term


def _links(kind: _Kind, partial: Mapping[int, tuple[str, ...]]) -> list[tuple[_Link, int | None]]:
    """The results of a body that have a partial form, given the operands that have one."""
    args, returned = kind.model.args, kind.model.returned
    of_args = {args[i]: axes for i, axes in partial.items()}
    forms = PartialForms(kind.splits, kind.sizes, of_args, kind.per_microbatch)
    links = []
    for given, value in enumerate(returned):
        if ir.producer(value) is None or len(ir.users(value)) > 1:
            continue
        form, start = forms.of(value), None
        axes, is_reduced = ((), False) if form is None else (form.axes, form.is_reduced)
        if form is None:
            # The begin of a chain: a whole start plus a term in partial form.  `_begin` puts zeros in partial
            # form in place of the start, so the start must have the type of the result.
            of_terms = ((taken, forms.of(term)) for taken, term in _addition(value))
            taken, form = next(((t, x) for t, x in of_terms if x is not None), (None, None))
            if form is None:
                continue
            start = args.index(taken)
            if kind.model.inputs[start].type != kind.model.results[given].type:
                continue
            axes = _deferred(form.axes, kind, value.type)
            if not axes:
                continue
            is_reduced = axes != form.axes
        needs = tuple(i for i, arg in enumerate(args) if arg in form.needs or i == start)
        if all(_is_used_for(args[i], value) for i in needs):
            along = tuple(axes if i == start else partial[i] for i in needs)
            links.append((_Link(given, axes, needs, along, is_reduced), start))
    return links


def _deferred(axes: tuple[str, ...], kind: _Kind, value: ir.Type) -> tuple[str, ...]:
    """The axes along which terms of a value stay apart: all, if microbatches' axes cannot split it.

    The accumulator would then be as large, and devices would exchange in each microbatch for nothing.
    """
    parts = math.prod(kind.sizes[axis] for axis in axes if axis in kind.per_microbatch)
    return axes if all(size % parts for size in value.shape) else axes_without(axes, kind.per_microbatch)


def _is_used_for(value: ir.Value, result: ir.Value) -> bool:
    """Whether all that is computed of a value is on one path to a result."""
    while value != result:
        users = ir.users(value)
        if len(users) != 1 or len(users[0].results) != 1:
            return False
        value = users[0].results[0]
    return True


@dataclasses.dataclass(eq=False)
class _Addend:
    """A fragment that gives a value in partial form; `start` is the operand that it begins to add to."""

    fragment: ir.Fragment
    link: _Link
    start: int | None

    @property
    def result(self) -> ir.Value:
        return self.fragment.results[self.link.given]

    @property
    def continued(self) -> list[ir.Value]:
        inputs = list(self.fragment.inputs)
        return [inputs[i] for i in self.link.taken if i != self.start]


@dataclasses.dataclass(eq=False)
class _Total:
    """A sum over microbatches: the last of its nodes gives it."""

    nodes: list[_Addend]

    @property
    def end(self) -> ir.Value:
        return self.nodes[-1].result

    @property
    def is_worth(self) -> bool:
        """Whether it saves reductions, and is not itself reduced in each microbatch."""
        counters = {node.fragment.call_counter for node in self.nodes}
        return len(counters) > 1 or (
            len(self.nodes) > 1 and not any(map(_is_of_microbatch, ir.users(self.end)))
        )


def _totals(
    fragments: Sequence[ir.Fragment], kinds: Mapping[ir.Fragment, _Kind], uses: Mapping[ir.Value, int]
) -> list[_Total]:
    """The sums of at least two terms that fragments pass on to each other, nothing else reading them."""
    ends: dict[ir.Value, _Total] = {}
    for fragment in fragments:
        if fragment not in kinds:
            continue
        partial = {
            i: ends[value].nodes[-1].link.axes
            for i, value in enumerate(fragment.inputs)
            # A second reader would need the whole value.
            if value in ends and uses[value] == 1
        }
        for link, start in kinds[fragment].links(partial):
            node = _Addend(fragment, link, start)
            # The sums that this node continues no longer end where they did.
            parts = [ends.pop(value) for value in node.continued]
            ends[node.result] = _Total([*(x for part in parts for x in part.nodes), node])
    return [total for total in ends.values() if total.is_worth]


class _Deferring:
    """The rewriting of one function."""

    def __init__(
        self,
        f: ir.Func,
        kinds: Mapping[ir.Fragment, _Kind],
        totals: Sequence[_Total],
        uses: Mapping[ir.Value, int],
    ) -> None:
        self.f = f
        known = [op.attributes[START] for op in ir.walk(f) if START in op.attributes]
        self.numbers = itertools.count(1 + max((int(ir.IntegerAttr(n).value) for n in known), default=-1))
        self.mesh = mesh_of_shardings(f)
        self.uses = uses
        self.kinds = kinds
        self.nodes: dict[ir.Fragment, list[_Addend]] = {}
        for total in totals:
            for node in total.nodes:
                self.nodes.setdefault(node.fragment, []).append(node)
        self.total_of = {total.nodes[-1]: total for total in totals}
        self.models: dict[tuple[ir.Fragment, tuple[_Link, ...]], ir.Fragment] = {}
        self.operands: list[ir.Fragment] = []
        self.carried: dict[ir.Value, tuple[ir.Value, shardings.Sharding]] = {}
        self.starts: dict[_Addend, ir.Value] = {}

    def run(self) -> None:
        """In the order of the program, so that each fragment takes what those before have become."""
        replaced = []
        for fragment in [x for x in ir.fragments(self.f) if x in self.nodes]:
            rebuilt = self._replacement(fragment)
            replaced.append(fragment)
            ending = [self.total_of[node] for node in self.nodes[fragment] if node in self.total_of]
            if ending:
                self._finish(fragment, rebuilt, ending)
        for model in (*self.models.values(), *self.operands, *_models(self.kinds)):
            ir.erase(model)
        for fragment in reversed(replaced):
            ir.erase(fragment)

    def _replacement(self, fragment: ir.Fragment) -> ir.Fragment:
        nodes = sorted(self.nodes[fragment], key=lambda node: node.link.given)
        copy: ir.Fragment = ir.clone(
            self._model(self.kinds[fragment], tuple(node.link for node in nodes)), ir.before(fragment)
        )
        values, taken = list(fragment.inputs), dict[int, shardings.Sharding]()
        for node in nodes:
            for i in node.link.taken:
                new = self._begin(node, copy) if i == node.start else self.carried[values[i]]
                values[i], taken[i] = new
        for i, value in enumerate(values):
            ir.set_operand(copy, i, value)
        own = dict(fragment.attributes.items())
        for name in dict.fromkeys((*own, *(name for name, _ in copy.attributes.items()))):
            ir.put(copy, name, own.get(name))
        given = {node.link.given: self._sharding(node) for node in nodes}
        shardings.update(copy, "in_shardings", values, taken)
        shardings.update(copy, "out_shardings", list(copy.results), given)
        for i, (old, new) in enumerate(zip(fragment.results, copy.results)):
            if i in given:
                self.carried[old] = new, given[i]
            else:
                ir.replace_uses(old, new)
        return copy

    def _model(self, kind: _Kind, links: tuple[_Link, ...]) -> ir.Fragment:
        """A fragment with a rewritten body, from which others are copied."""
        if (kind.model, links) not in self.models:
            self.models[kind.model, links] = self._rewritten(kind, links)
        return self.models[kind.model, links]

    def _rewritten(self, kind: _Kind, links: tuple[_Link, ...]) -> ir.Fragment:
        model: ir.Fragment = ir.clone(kind.model, ir.after(kind.model))
        args, types = model.args, [r.type for r in model.results]
        taken = {i: axes for link in links for i, axes in zip(link.taken, link.along)}
        splits = splits_of_copy(kind.splits, kind.model, model)
        of_args = {args[i]: axes for i, axes in taken.items()}
        forms = PartialForms(splits, kind.sizes, of_args, kind.per_microbatch, self.mesh)
        partial_forms = [forms.of(model.returned[link.given]) for link in links]
        operands = {i: self._partial(model.inputs[i].type, axes, model) for i, axes in taken.items()}
        for i, operand in operands.items():
            ir.set_type(args[i], operand.tensor)
        values = {link.given: form.build() for link, form in zip(links, partial_forms) if form is not None}
        assert len(values) == len(links)
        for link in links:
            types[link.given] = self._partial(types[link.given], link.axes, model)
        model.returned = [values.get(i, value) for i, value in enumerate(model.returned)]
        erase_dead_ops(model.body)
        rebuilt: ir.Fragment = ir.rebuild(model, list(model.inputs), types)
        ir.erase(model)
        if not kind.shares:
            return rebuilt
        if operands:
            self.operands.append(_zeros(rebuilt, list(operands.values())))  # of the types that its body takes
            for i, value in zip(operands, self.operands[-1].results):
                ir.set_operand(rebuilt, i, value)
        (shared,) = share_bodies([rebuilt], numbered(ir.module_of(self.f)))
        return shared

    def _partial(self, kind: ir.MeshTensor, axes: Sequence[str], fragment: ir.Fragment) -> ir.MeshTensor:
        sizes = axes_of(self.f.topology[fragment.mesh])
        shape = [math.prod(sizes[axis] for axis in axes), *kind.shape]
        return ir.MeshTensor.get(kind.mesh, tensor(shape, kind), None, kind.memory_kind)

    def _sharding(self, node: _Addend) -> shardings.Sharding:
        """The sharding of a partial form: each device has its own term.

        A value that is reduced in part is split as its reader decides.
        """
        _, results = self.kinds[node.fragment].layout
        kind, axes = results[node.link.given], node.link.axes
        others = {*axes, *self.kinds[node.fragment].per_microbatch} if node.link.is_reduced else {*axes}
        split = (axes, *without(split_of(kind.sharding, len(kind.shape)), [*others]))
        closed = sharding_of(split, self.mesh)
        return _open_but_first(closed) if node.link.is_reduced else closed

    def _begin(self, node: _Addend, before: ir.Fragment) -> tuple[ir.Value, shardings.Sharding]:
        """Zeros: in place of a start if that is zero, which is added at the end otherwise."""
        assert node.start is not None
        start = list(node.fragment.inputs)[node.start]
        kind, sharding = self._partial(start.type, node.link.axes, node.fragment), self._sharding(node)
        maker = ir.producer(start)
        position = ir.result_index(start) if isinstance(maker, ir.Fragment) else 0
        if not isinstance(maker, ir.Fragment) or not is_zero(maker.returned[position]):
            self.starts[node] = start
        elif self.uses[start] == 1:
            returned = maker.returned
            zero = zeros(kind.tensor, maker.terminator)
            returned[position] = self._apart(zero, ir.at_end(maker.body))
            maker.returned = returned
            ir.set_type(start, kind)
            shardings.update(maker, "out_shardings", list(maker.results), {position: sharding})
            return start, sharding
        zero_sums = _zeros(before, [kind])
        zero_sums.returned = [self._apart(value, ir.at_end(zero_sums.body)) for value in zero_sums.returned]
        shardings.write(zero_sums, "out_shardings", [sharding])
        return zero_sums.results[0], sharding

    def _apart(self, start: ir.Value, where: ir.InsertionPoint) -> ir.Value:
        """A start value that is not joined with others, so that the first microbatch can reuse its memory."""
        number = {START: ir.i64(next(self.numbers))}
        return ir.create(
            "stablehlo.optimization_barrier", [start], [start.type], where, number, start.location
        ).results[0]

    def _finish(self, old: ir.Fragment, new: ir.Fragment, totals: Sequence[_Total]) -> None:
        """Takes the sums that end in a fragment, right after it."""
        kinds = [total.end.type for total in totals]
        starts = [
            (k, self.starts[node])
            for k, total in enumerate(totals)
            for node in total.nodes
            if node in self.starts
        ]

        def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
            sums = [total_of(value, kind.tensor, inside) for value, kind in zip(args, kinds)]
            for (k, _), start in zip(starts, args[len(totals) :]):
                sums[k] = ir.create("stablehlo.add", [start, sums[k]], [sums[k].type], inside).result
            return sums

        inputs = [*(self.carried[total.end][0] for total in totals), *(value for _, value in starts)]
        made_sums = ir.make_fragment(
            old.mesh, inputs, kinds, ir.after(new), body, inferred_by=[REDUCTION], location=old.location
        )
        for total, value in zip(totals, made_sums.results):
            ir.replace_uses(total.end, value)


def _open_but_first(sharding: shardings.Sharding) -> shardings.Sharding:
    """The same sharding, whose dims but the first may be split further."""
    old = ir.sdy.TensorShardingAttr(sharding)
    first, *rest = map(ir.sdy.DimensionShardingAttr, old.dimension_shardings)
    dims = [first, *(ir.sdy.DimensionShardingAttr.get(dim.axes, is_closed=False) for dim in rest)]
    return ir.sdy.TensorShardingAttr.get(old.mesh_or_ref, dims)


def _zeros(before: ir.Fragment, kinds: Sequence[ir.MeshTensor]) -> ir.Fragment:
    """A fragment of zeros, right before another, on its mesh."""

    def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
        return [
            ir.create(
                "stablehlo.constant", [], [kind.tensor], inside,
                {"value": ir.Attribute.parse(f"dense<0.0> : {kind.tensor}", ir.context())},
            ).results[0]
            for kind in kinds
        ]  # fmt: skip

    return ir.make_fragment(
        before.mesh, [], kinds, ir.before(before), body, inferred_by=[STARTS], location=before.location
    )
