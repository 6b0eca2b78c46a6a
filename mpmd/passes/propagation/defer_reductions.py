"""mpmd-defer-reductions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.shared_bodies import calls_one_body, numbered, put_back, share_bodies
from mpmd.passes.constants import zeros
from mpmd.passes.fragments.dead_ops import erase_dead_ops
from mpmd.passes.propagation import shardings
from mpmd.passes.propagation.trial import (
    Layout,
    arguments_of_rows,
    axes_of_rows,
    is_one_mesh,
    kinds_of_work,
    layouts,
)
from mpmd.passes.transfers.uniquify_carried_values import START
from mpmd.sharding.inside import split_of, splits_inside
from mpmd.sharding.partial import PartialForms, is_zero, tensor, total_of
from mpmd.sharding.shards import axes_of
from mpmd.sharding.sums import sharding_of, without
from mpmd.support import diagnostics

_MODEL = "mpmd.model_number"
NAME = "defer_reductions"
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
    add to one accumulator carries it in this form, and the sum is taken where the chain ends.

    Requires: shardings are attributes; microbatches are numbered.
    Ensures: a value is deferred only if all that its fragments do with it is to add terms that have a partial
        form along the same axes.  Values change by rounding: terms of microbatches are added first, then
        those of devices.
    Notice: meshes whose axes differ, where nothing is deferred.
    Cost: one more propagation, and for each distinct body that adds to an accumulator one inside of it.
    Source: ours; JaxPP's users write it with `jax.P(unreduced=...)`.
    """

    runs_on = "mpmd"

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
        found = layouts(ir.module_of(f), f, rows, kept | arguments_of_rows(f))
        uses = {v: len(ir.uses(v)) for x in ir.fragments(f) for v in x.results}
        kinds = _kinds_of(f, found)
        chains = _chains(list(found), kinds, uses)
        if chains:
            _Deferring(f, kinds, chains, uses).run()
        for model in dict.fromkeys(kind.model for kind in kinds.values()):
            ir.erase(model)
        if not chains:
            ir.forget_edits(before)  # of copies


def _is_of_microbatch(op: ir.Op) -> bool:
    return isinstance(op, ir.Fragment) and op.call_counter is not None


@dataclasses.dataclass(frozen=True)
class _Link:
    """An accumulator of a fragment: operand `taken` plus a term is result `given`."""

    taken: int
    given: int
    axes: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class _Kind:
    """Fragments of one mesh with one body and the same types, and what they accumulate."""

    links: dict[int, _Link]
    model: ir.Fragment
    layout: Layout
    shares: bool


def _kinds_of(f: ir.Func, layout: Mapping[ir.Fragment, Layout]) -> dict[ir.Fragment, _Kind]:
    """The kind of each fragment that has accumulators with partial terms."""
    found: dict[ir.Fragment, _Kind] = {}
    symbols = ir.symbol_table(ir.module_of(f))
    for group in kinds_of_work(layout):
        if len(group) < 2:
            continue
        model = ir.clone(group[0], ir.after(group[0]))
        shares = calls_one_body(model)
        put_back(model, symbols)
        of_group = layout[group[-1]]
        links = {link.given: link for link in _links(model, of_group, axes_of(f.topology[model.mesh]))}
        if links:
            found.update(dict.fromkeys(group, _Kind(links, model, of_group, shares)))
        else:
            ir.erase(model)
    return found


def _accumulations(fragment: ir.Fragment) -> Iterable[tuple[int, int, ir.Op, ir.Value]]:
    """The operands that a fragment only adds a term to, and returns: operand, result, op and term."""
    returned = fragment.returned
    position = {arg: i for i, arg in enumerate(fragment.args)}
    for given, value in enumerate(returned):
        op = ir.producer(value)
        if op is None or op.operation.name != "stablehlo.add" or len(ir.users(value)) > 1:
            continue
        for taken, term in (list(op.operands), list(op.operands)[::-1]):
            if taken in position and len(ir.users(taken)) == 1 and taken != term:
                yield position[taken], given, op, term
                break


def _links(model: ir.Fragment, layout: Layout, sizes: Mapping[str, int]) -> list[_Link]:
    """The accumulators of a fragment whose terms have a partial form."""
    accumulations = list(_accumulations(model))
    if not accumulations:
        return []
    forms = PartialForms(splits_inside(model, *layout), sizes)
    found = []
    for taken, given, _, term in accumulations:
        form = forms.of(term)
        if form is not None and model.inputs[taken].type == model.results[given].type:
            found.append(_Link(taken, given, form.axes))
    return found


@dataclasses.dataclass(eq=False)
class _Total:
    """A sum over microbatches: each fragment takes it from the one before, and adds a term."""

    links: list[tuple[ir.Fragment, _Link]]

    @property
    def start(self) -> ir.Value:
        fragment, link = self.links[0]
        return fragment.inputs[link.taken]

    @property
    def end(self) -> ir.Value:
        fragment, link = self.links[-1]
        return fragment.results[link.given]


def _chains(
    fragments: Sequence[ir.Fragment], kinds: Mapping[ir.Fragment, _Kind], uses: Mapping[ir.Value, int]
) -> list[_Total]:
    """The chains of at least two accumulators."""
    ends: dict[ir.Value, _Total] = {}
    found: list[_Total] = []
    for fragment in fragments:
        if fragment not in kinds:
            continue
        inputs = list(fragment.inputs)
        for link in kinds[fragment].links.values():
            value = inputs[link.taken]
            chain = ends.get(value)
            if chain is None or chain.links[-1][1].axes != link.axes or uses[value] != 1:
                chain = _Total([])
                found.append(chain)
            chain.links.append((fragment, link))
            ends[fragment.results[link.given]] = chain
    return [chain for chain in found if len(chain.links) > 1]


class _Deferring:
    """The rewriting of one function."""

    def __init__(
        self,
        f: ir.Func,
        kinds: Mapping[ir.Fragment, _Kind],
        chains: Sequence[_Total],
        uses: Mapping[ir.Value, int],
    ) -> None:
        self.f = f
        known = [op.attributes[START] for op in ir.walk(f) if START in op.attributes]
        self.numbers = itertools.count(1 + max((int(ir.IntegerAttr(n).value) for n in known), default=-1))
        self.uses = uses
        self.kinds = kinds
        self.of_fragment: dict[ir.Fragment, dict[_Link, _Total]] = {}
        for chain in chains:
            for fragment, link in chain.links:
                self.of_fragment.setdefault(fragment, {})[link] = chain
        self.models: dict[tuple[ir.Fragment, tuple[_Link, ...]], ir.Fragment] = {}
        self.operands: list[ir.Fragment] = []
        self.carried: dict[_Total, ir.Value] = {}
        self.starts: dict[_Total, ir.Value] = {}

    def run(self) -> None:
        """In the order of the program, so that each fragment takes what those before have become."""
        replaced = []
        for fragment in [x for x in ir.fragments(self.f) if x in self.of_fragment]:
            made = self._replacement(fragment)
            replaced.append(fragment)
            ending = [c for c in self.of_fragment[fragment].values() if c.links[-1][0] == fragment]
            if ending:
                self._finish(fragment, made, ending)
        for fragment in reversed(replaced):
            ir.erase(fragment)
        for model in (*self.models.values(), *self.operands):
            ir.erase(model)

    def _replacement(self, fragment: ir.Fragment) -> ir.Fragment:
        """The fragment with accumulators in partial form."""
        chains = self.of_fragment[fragment]
        model = self._model(self.kinds[fragment], tuple(chains))
        made: ir.Fragment = ir.clone(model, ir.before(fragment))
        values = list(fragment.inputs)
        for link, chain in chains.items():
            if chain.links[0][0] == fragment:
                self.carried[chain] = self._begin(chain, made)
            values[link.taken] = self.carried[chain]
        for i, value in enumerate(values):
            ir.set_operand(made, i, value)
        own = dict(fragment.attributes.items())
        for name in dict.fromkeys((*own, *(name for name, _ in made.attributes.items()))):
            ir.put(made, name, own.get(name))
        of_links = {link: self._sharding(fragment, link) for link in chains}
        shardings.update(made, "in_shardings", values, {x.taken: s for x, s in of_links.items()})
        results = list(made.results)
        shardings.update(made, "out_shardings", results, {x.given: s for x, s in of_links.items()})
        carried = {link.given for link in chains}
        for i, (old, new) in enumerate(zip(fragment.results, made.results)):
            if i not in carried:
                ir.replace_uses(old, new)
        for link, chain in chains.items():
            self.carried[chain] = made.results[link.given]
        return made

    def _model(self, kind: _Kind, links: tuple[_Link, ...]) -> ir.Fragment:
        """A fragment with a rewritten body, from which others are copied."""
        if (kind.model, links) not in self.models:
            self.models[kind.model, links] = self._rewritten(kind, links)
        return self.models[kind.model, links]

    def _rewritten(self, kind: _Kind, links: tuple[_Link, ...]) -> ir.Fragment:
        model: ir.Fragment = ir.clone(kind.model, ir.after(kind.model))
        forms = PartialForms(splits_inside(model, *kind.layout), self._sizes(model))
        found = {given: (op, term) for _, given, op, term in _accumulations(model)}
        types = [r.type for r in model.results]
        wanted = [(link, found[link.given][0], forms.of(found[link.given][1])) for link in links]
        sums: dict[int, ir.Value] = {}
        for link, op, form in wanted:
            assert form is not None
            value, total = form.build(), model.args[link.taken]
            ir.set_type(total, value.type)
            sums[link.given] = ir.create(
                "stablehlo.add", [total, value], [value.type], ir.before(op), location=op.location
            ).result
            types[link.given] = self._partial(types[link.given], link, model)
        model.returned = [sums.get(i, value) for i, value in enumerate(model.returned)]
        erase_dead_ops(model.body)
        made: ir.Fragment = ir.rebuild(model, list(model.inputs), types)
        ir.erase(model)
        if not kind.shares:
            return made
        operands = [types[link.given] for link in links]
        self.operands.append(_zeros(made, operands))  # of the types that its body takes now
        for link, value in zip(links, self.operands[-1].results):
            ir.set_operand(made, link.taken, value)
        ir.put(made, _MODEL, ir.i64(len(self.models)))
        share_bodies([made], numbered(ir.module_of(self.f)))
        return next(
            x for x in ir.fragments(self.f) if _MODEL in x.attributes and x not in self.models.values()
        )

    def _sizes(self, fragment: ir.Fragment) -> dict[str, int]:
        return axes_of(self.f.topology[fragment.mesh])

    def _partial(self, kind: ir.MeshTensor, link: _Link, fragment: ir.Fragment) -> ir.MeshTensor:
        count = math.prod(self._sizes(fragment)[axis] for axis in link.axes)
        return ir.MeshTensor.get(kind.mesh, tensor([count, *kind.shape], kind), None, kind.memory_kind)

    def _sharding(self, fragment: ir.Fragment, link: _Link) -> shardings.Sharding:
        """That of a partial form: each device has its own term."""
        operands, results = self.kinds[fragment].layout
        known = next(kind.sharding for kind in (*operands, *results) if kind.sharding is not None)
        kind = results[link.given]
        split = (link.axes, *without(split_of(kind.sharding, len(kind.shape)), link.axes))
        return sharding_of(split, str(ir.sdy.TensorShardingAttr(known).mesh_or_ref))

    def _begin(self, chain: _Total, before: ir.Fragment) -> ir.Value:
        """Zeros: in place of the chain's start if that is zero, which is added at the end otherwise."""
        fragment, link = chain.links[0]
        start = chain.start
        kind = self._partial(start.type, link, fragment)
        maker = ir.producer(start)
        if isinstance(maker, ir.Fragment):
            position = ir.result_index(start)
            returned = maker.returned
            if is_zero(returned[position]):
                if self.uses[start] == 1:
                    zero = zeros(kind.tensor, maker.terminator)
                    returned[position] = self._apart(zero, ir.at_end(maker.body))
                    maker.returned = returned
                    ir.set_type(start, kind)
                    entries = {position: self._sharding(fragment, link)}
                    shardings.update(maker, "out_shardings", list(maker.results), entries)
                    return start
            else:
                self.starts[chain] = start
        else:
            self.starts[chain] = start
        made = _zeros(before, [kind])
        made.returned = [self._apart(value, ir.at_end(made.body)) for value in made.returned]
        shardings.write(made, "out_shardings", [self._sharding(fragment, link)])
        return made.results[0]

    def _apart(self, start: ir.Value, where: ir.InsertionPoint) -> ir.Value:
        """A start value that is not joined with others, so that the first microbatch can reuse its memory."""
        number = {START: ir.i64(next(self.numbers))}
        return ir.create(
            "stablehlo.optimization_barrier", [start], [start.type], where, number, start.location
        ).results[0]

    def _finish(self, old: ir.Fragment, made: ir.Fragment, chains: Sequence[_Total]) -> None:
        """Takes the sums of the chains that end in a fragment, right after it."""
        kinds = [chain.end.type for chain in chains]
        starts = {k: self.starts[chain] for k, chain in enumerate(chains) if chain in self.starts}

        def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
            totals = [total_of(value, kind.tensor, inside) for value, kind in zip(args, kinds)]
            for position, k in enumerate(starts):
                operands = [args[len(chains) + position], totals[k]]
                totals[k] = ir.create("stablehlo.add", operands, [totals[k].type], inside).result
            return totals

        inputs = [*(self.carried[chain] for chain in chains), *starts.values()]
        total = ir.make_fragment(
            old.mesh, inputs, kinds, ir.after(made), body, inferred_by=[NAME], location=old.location
        )
        for chain, value in zip(chains, total.results):
            ir.replace_uses(chain.end, value)


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
