"""Shardy's propagation, over fragments and transfers.

Shardy knows neither.  Fragments become named computations, and fragments with equal bodies are represented by
one of them, so that the cost does not grow with the number of microbatches.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.bodies import (
    called_bodies,
    calls_one_body,
    functions_of,
    numbered,
    put_back,
    put_back_bodies,
    share_again,
    share_bodies,
)
from mpmd.passes.cleanup.simplify_stablehlo import SimplifyStablehlo
from mpmd.passes.fragments.splitting import body_keys
from mpmd.passes.propagation.sdy_ops import (
    ConvertSdyConstants,
    PopulateUnreducedOutSharding,
    ReshardsToConstraints,
)
from mpmd.passes.structure import mentions
from mpmd.passes.verify import propagation_problem
from mpmd.sharding import shardings
from mpmd.support import diagnostics

_PIPELINE = "sdy-propagation-pipeline"
_WITHOUT_RESHARDS = (  # the passes of that pipeline, without its steps towards partitioning
    "sdy-import-pipeline",
    "sdy-user-priority-propagate",
    "func.func(sdy-sink-func-data-flow-edges)",
    "sdy-unflatten-call-graph",
    "symbol-dce",
    "func.func(sdy-constant-or-scalar-merger,sdy-sink-data-flow-edges)",
    "sdy-update-non-divisible-input-output-shardings",
    "sdy-remove-sub-axes-in-input-output-shardings",
    "sdy-close-shardings",
    "func.func(sdy-drop-sharding-rules)",
)
NUMBER = "mpmd.propagation_number"
_SHARDINGS = ("in_shardings", "out_shardings")

# How many fragments with one body go through Shardy: the first may be the begin of a chain, such as that of
# an accumulator, the second represents all others.  One is enough where nothing is sharded.  The second ones
# are of one microbatch, so that their readers are in the program, too.
REPRESENTATIVES = 2


class PropagateShardings(ModulePass):
    """Propagates shardings by Shardy, once for all microbatches.

        main(a@m1 {sharding = [{"x"}, {}]}):  f = m1["f"] (a) {...}
        ->                                    f = m1["f"] in_shardings=[..], out_shardings=[..] (a) {...}

    Microbatches are copies: fragments with the same body, on the same mesh, that read the same parameters
    and results of fragments of the same kind, are alike.  Shardy gets a program with two of each; the others
    take the shardings of the second, bodies included.  So do the passes that clean up after it inside of
    fragments: shardings of inner ops are dropped (but of send and recv), reshards become constraints again,
    sdy constants ordinary ones, and ops fold.  With `as_dialect` sharding groups stay, as Shardy then does
    not prepare partitioning, and constants fold too.  With `share` copies then call one function for their
    common body, until mpmd-lower-to-fragment-calls puts it back.
    Where no sharding is given there is nothing to propagate: with `share` each body that copies share is
    cleaned up once then.

    Requires: shardings are attributes; results of the function have values of their own.
    Ensures: what Shardy's own pipeline ensures, for each group of fragments that are alike; a value that a
        copy reads with another sharding than its producer's gets the sharding of its reader.
    Cost: linear in the module to find copies; Shardy's for the program without copies.
    Source: Shardy's `sdy-propagation-pipeline`; doing it once per kind of fragment is ours.

    Attributes:
        share: let copies call one function for their common body.
        as_dialect: run Shardy's passes without those that prepare partitioning, which drop sharding groups,
            and compute ops of constants.
    """

    reports_changes: ClassVar[bool] = False
    share: bool = False
    as_dialect: bool = False

    def rewrite(self, module: ir.Module) -> None:
        """Builds the program without copies, runs Shardy, and copies its shardings back."""
        shared = functions_of(module)
        functions = [f for f in ir.funcs(module) if f not in shared]
        if len(functions) != 1 or not functions[0].is_mpmd:
            put_back_bodies(module)
            self._propagate(module)
            return
        f = functions[0]
        is_sharded = _mentions_shardings(module)
        if self.share and not is_sharded and _has_copies(f):
            self._tidy_bodies(f)
            return
        small = ir.clone(module)
        kinds = without_copies(ir.funcs(small)[0], REPRESENTATIVES if is_sharded else 1)
        if len(set(kinds)) == len(kinds):
            put_back_bodies(module)
            self._propagate(module)
            return
        put_back_bodies(small)
        self._propagate(small)
        _take_meshes(module, small)
        f_small = ir.funcs(small)[0]
        if self.share:
            PopulateUnreducedOutSharding().run(small)
            named = [fragment for fragment in ir.fragments(f_small) if fragment.is_user]
            share_bodies(named, numbered(module))
            for body in functions_of(small):
                ir.clone(body, ir.InsertionPoint(module.body))
        _take_over(f, f_small, kinds)
        _settle(f)
        for body in shared:
            ir.erase(body)

    def _tidy_bodies(self, f: ir.Func) -> None:
        """Cleans up inside of fragments where nothing is sharded: each shared body once, and what is in none.

        Fragments that compute more than a shared body get one of their own, if they are named.
        """
        module = ir.module_of(f)
        copies: dict[Hashable, list[ir.Fragment]] = {}
        others = [fragment for fragment in ir.fragments(f) if not calls_one_body(fragment)]
        for fragment, key in zip(others, body_keys(others, _types)):
            copies.setdefault((key, fragment.is_user), []).append(fragment)
        small = _module_of(f, [group[0] for group in copies.values()])
        symbols = ir.symbol_table(small)
        for model in ir.fragments(symbols["main"]):
            put_back(model, symbols)
        self._propagate(small)
        f_small = ir.symbol_table(small)["main"]
        share_bodies([model for model in ir.fragments(f_small) if model.is_user], numbered(small))
        for body in functions_of(module):
            ir.erase(body)
        for body in functions_of(small):
            ir.clone(body, ir.InsertionPoint(module.body))
        for group, model in zip(copies.values(), ir.fragments(f_small), strict=True):
            for fragment in group:
                _take_body(fragment, model)
        share_again(f)

    def _propagate(self, module: Any) -> None:
        """Propagates and cleans up, or reports an error where Shardy would end the process."""
        fold = SimplifyStablehlo(fold_constants=self.as_dialect)
        functions = ir.funcs(module)
        if not functions or not _mentions_shardings(module):
            ir.run_mlir("cse", module)
            fold.run(module)
            return
        problem = propagation_problem(module)
        if problem:
            diagnostics.error(problem, functions[0].location)
            return
        ir.run_mlir(",".join(_WITHOUT_RESHARDS) if self.as_dialect else _PIPELINE, module)
        for f in ir.funcs(module):
            for fragment in ir.fragments(f) if f.is_mpmd else []:
                shardings.drop_inside(fragment)
        for pass_ in (ReshardsToConstraints(), ConvertSdyConstants(), fold):
            pass_.run(module)


def _mentions_shardings(module: Any) -> bool:
    """Whether there is anything for Shardy to go by: a mesh, a sharding, a constraint."""
    return mentions(module, "sdy")


def _take_meshes(module: ir.Module, source: Any) -> None:
    """Gives a module the sdy meshes of another, attributes included, where it lacks them."""
    known = {op.sym_name.value: op for op in module.body.operations if isinstance(op, ir.sdy.MeshOp)}
    for mesh in [op for op in source.body.operations if isinstance(op, ir.sdy.MeshOp)]:
        have = known.get(mesh.sym_name.value)
        if have is None:
            ir.clone(mesh, ir.at_start(module.body))
            continue
        for name, attribute in mesh.attributes.items():
            ir.put(have, name, attribute)


def _has_copies(f: ir.Func) -> bool:
    called = [(fragment.mesh, name) for fragment in ir.fragments(f) for name in called_bodies(fragment)]
    return len(set(called)) < len(called)


def _module_of(f: ir.Func, fragments: Sequence[ir.Fragment]) -> ir.Module:
    """Copies of some fragments, in a function that takes what they read, and of the shared bodies."""
    module = ir.parse("func.func public @main() {\n  return\n}")
    main = ir.funcs(module)[0]
    main.topology = f.topology
    for fragment in fragments:
        copy = ir.clone(fragment, ir.at_end(main.body))
        for i, value in enumerate(fragment.inputs):
            ir.set_operand(copy, i, ir.append_arg(main.body, like=value))
    main.returned = [result for copy in ir.fragments(main) for result in copy.results]
    ir.return_types_changed(main)
    for body in functions_of(ir.module_of(f)):
        ir.clone(body, ir.InsertionPoint(module.body))
    return module


def without_copies(f: ir.Func, representatives: int) -> list[int]:
    """Leaves out copies, and numbers the other ops; for each op the number of its representative.

    Args:
        f: the function; it gets smaller.
        representatives: how many fragments with one body stay.
    """
    kept: dict[Hashable, ir.Op] = {}
    of_body: collections.Counter[Hashable] = collections.Counter()
    fragments = ir.fragments(f)
    bodies: dict[ir.Op, Hashable] = dict(zip(fragments, body_keys(fragments, _types)))
    number_of: dict[ir.Op, int] = {}
    numbers = []
    uses = {arg: len({*ir.users(arg)}) for arg in f.args}
    for number, op in enumerate(ir.ops(f)):
        key: Hashable = number
        may_go = False
        if isinstance(op, ir.Fragment):
            body = (bodies[op], op.mesh, op.stage)
            key = (body, *(_kind_of(v, bodies, uses, f) for v in op.inputs))
            may_go = of_body[body] >= representatives
            of_body[body] += 1
        elif isinstance(op, ir.Transfer) and not op.is_intra_mesh:  # those give a result its own sharding
            key = (op.tensor, op.result.type)
            may_go = True
        if not may_go or key not in kept:
            kept[key] = op
            number_of[op] = number
            ir.put(op, NUMBER, ir.i64(number))
            numbers.append(number)
            continue
        numbers.append(number_of[kept[key]])
        bodies.pop(op, None)
        ir.replace(op, list(kept[key].results))
    return numbers


def _types(fragment: ir.Fragment) -> Hashable:
    return tuple(v.type for v in (*fragment.inputs, *fragment.results))


def _kind_of(
    value: ir.Value, bodies: dict[ir.Op, Hashable], uses: dict[ir.Value, int], f: ir.Func
) -> Hashable:
    """The key of a value; equal for values that alike fragments may read at the same position.

    A parameter, which many fragments read, is its own key; data of microbatches are alike;
    values without a name (a slice of a batch, a zero as start value) are like all of their type.
    """
    op = ir.producer(value)
    if op is None:
        if uses[value] > 1:
            return ir.arg_index(value)
        return (value.type, f.arg_attribute(ir.arg_index(value), shardings.ARGUMENT))
    if isinstance(op, ir.Transfer):
        return (value.type, _kind_of(op.tensor, bodies, uses, f))
    if isinstance(op, ir.Fragment) and op.is_user:
        return (bodies[op], op.mesh, ir.result_index(value))
    return value.type


def _take_over(f: ir.Func, small: ir.Func, kinds: Sequence[int]) -> None:
    """Gives each op of `f` the shardings, and each fragment the body, of its representative in `small`."""
    taken = {
        int(ir.IntegerAttr(op.attributes[NUMBER]).value): op
        for op in ir.ops(small)
        if NUMBER in op.attributes
    }
    symbols = ir.symbol_table(ir.module_of(f))
    for op, kind in zip(ir.ops(f), kinds, strict=True):
        model = taken.get(kind)  # Shardy drops unused ops
        if isinstance(model, ir.Fragment):
            _take_body(op, model)
        elif model is None and isinstance(op, ir.Fragment):
            put_back(op, symbols)
        elif model is not None:
            ir.put(op, shardings.ARGUMENT, model.attributes.get(shardings.ARGUMENT))
    for name, values in (("arg_attrs", f.args), ("res_attrs", f.returned)):
        dicts = ir.attribute_dicts(f, name, len(values))
        for of_value, of_small in zip(dicts, ir.attribute_dicts(small, name, len(values)), strict=True):
            of_value.pop(shardings.ARGUMENT, None)
            if shardings.ARGUMENT in of_small:
                of_value[shardings.ARGUMENT] = of_small[shardings.ARGUMENT]
        ir.put_attribute_dicts(f, name, dicts)


def _settle(f: ir.Func) -> None:
    """Changes the shardings of producers and transfers to their readers', where these differ.

    A fragment may have gone through Shardy without its readers, where these are copies of others.  Of readers
    that differ the last one decides.
    """
    holders = ir.ops(f, (ir.Fragment, ir.Transfer))
    stated = _stated(f, holders)
    wanted: dict[ir.Value, shardings.Sharding] = {}
    for fragment in ir.fragments(f):
        for value, sharding in zip(fragment.inputs, shardings.read(fragment, "in_shardings")):
            known = stated.get(value)
            if (known is None or sharding != known) and not shardings.is_same(sharding, known):
                wanted[value] = sharding
    if not wanted:
        return
    for op in reversed(holders):
        if isinstance(op, ir.Transfer) and op.result in wanted:
            if shardings.is_same(stated.get(op.tensor), stated.get(op.result)):
                wanted.setdefault(op.tensor, wanted[op.result])
    for op in holders:
        results = list(op.results)
        shardings.update(op, _of_results(op), results, _entries(results, wanted))
        if isinstance(op, ir.Fragment):
            shardings.update_operands(op, f, _entries(op.inputs, wanted))
    of_args = ir.attribute_dicts(f, "arg_attrs", len(f.args))
    for arg, of_arg in zip(f.args, of_args, strict=True):
        if arg in wanted:
            of_arg.setdefault(shardings.ARGUMENT, wanted[arg])
    ir.put_attribute_dicts(f, "arg_attrs", of_args)


def _stated(f: ir.Func, holders: Sequence[ir.Op]) -> dict[ir.Value, shardings.Sharding | None]:
    """The shardings of values at their definitions, if there are any."""
    of_args = ir.attribute_dicts(f, "arg_attrs", len(f.args))
    stated = {arg: of_arg.get(shardings.ARGUMENT) for arg, of_arg in zip(f.args, of_args, strict=True)}
    for op in holders:
        stated |= zip(op.results, shardings.read(op, _of_results(op)))
    return stated


def _entries(
    values: Iterable[ir.Value], wanted: Mapping[ir.Value, shardings.Sharding]
) -> dict[int, shardings.Sharding]:
    return {i: wanted[value] for i, value in enumerate(values) if value in wanted}


def _of_results(op: ir.Fragment | ir.Transfer) -> str:
    return "out_shardings" if isinstance(op, ir.Fragment) else shardings.ARGUMENT


def _take_body(fragment: ir.Fragment, model: ir.Fragment) -> None:
    """Replaces a fragment by a copy of `model`; its operands and attributes stay."""
    copy = ir.clone(model, ir.before(fragment))
    for i, value in enumerate(fragment.inputs):
        ir.set_operand(copy, i, value)
    own = dict(fragment.attributes.items())
    for name in dict.fromkeys((*own, *(name for name, _ in copy.attributes.items()))):
        if name not in _SHARDINGS:
            ir.put(copy, name, own.get(name))
    ir.replace(fragment, list(copy.results))
