"""mpmd-mark-aliasing-and-donation."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.export.memory import ALIAS, DONOR, LAYOUT, Attributes, is_donor, says_host, type_says_host
from mpmd.passes.export.programs import programs


class MarkAliasingAndDonation(FunctionPass):
    """Lets fragments overwrite operands without later uses.

    An operand whose value is used here for the last time is *aliased* with a result of its type, which
    then takes over its memory, or else *donated*: the memory is free as soon as the fragment runs.

        main(a@m1 {jax.buffer_donor = true}, b@m1):
          f, g = m1["f"] (a, b) {...}
          h = m1["h"] (f, g) {...}
        ->
          f, g = m1["f"] (a, b) <arg_attrs = [{jax.buffer_donor = true}, {}]> {...}
          h = m1["h"] (f, g) <arg_attrs = [{tf.aliasing_output = 0}, {jax.buffer_donor = true}]> {...}

    Not for operands in host memory, for values that some transfer reads (the copy could be under way), and
    for arguments of the function that the user did not donate.

    With `keep_microbatches_equal` fragments that can be one program donate the same operands, those that each
    of them may, and an argument of the function is aliased with a result of its type as any other value is.

    Requires: the order of the program and the memory kinds are final.
    Ensures: at most one operand per result is aliased; types, layouts and memories of both agree.
    Cost: linear, but for the search for a result among those of one fragment; in the text of the module
        with `keep_microbatches_equal`.
    Source: openxla/shardy MPMD, `mark_aliasing_and_donation`; `keep_microbatches_equal` is ours.

    Attributes:
        keep_microbatches_equal: let fragments that can be one program donate the same operands.
    """

    runs_on = "mpmd"
    keep_microbatches_equal: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits every last use."""
        spent = _spent_operands(f)
        arguments = dict(zip(f.args, ir.attribute_dicts(f, "arg_attrs", len(f.args))))
        if self.keep_microbatches_equal:
            _agree(spent)
            arguments = {}
        for fragment, operands in spent.items():
            inputs = list(fragment.inputs)
            dicts = ir.attribute_dicts(fragment, "arg_attrs", len(inputs))
            free = _Results(fragment)
            for i in operands:
                value = inputs[i]
                if value in arguments:
                    mark = _mark_of_argument(arguments[value], value, dicts[i], free, f)
                else:
                    mark = _mark(free.take_first(value, dicts[i]))
                dicts[i] |= mark
            ir.put_attribute_dicts(fragment, "arg_attrs", dicts, "arg_attrs" in fragment.attributes)


def _spent_operands(f: ir.Func) -> dict[ir.Fragment, list[int]]:
    """For each fragment the operands whose memory it may reuse."""
    last = _last_uses(f)
    in_host_memory = functools.cache(type_says_host)
    transferred = {t.tensor for t in ir.ops(f, ir.Transfer)}
    attributes = ir.attribute_dicts(f, "arg_attrs", len(f.args))
    kept = {v for v, a in zip(f.args, attributes) if not is_donor(a) and ALIAS not in a}
    spent: dict[ir.Fragment, list[int]] = {}
    for place, fragment in enumerate(ir.ops(f)):
        if not isinstance(fragment, ir.Fragment):
            continue
        inputs = list(fragment.inputs)
        dicts = ir.attribute_dicts(fragment, "arg_attrs", len(inputs))
        spent[fragment] = [
            i
            for i, value in enumerate(inputs)
            if last[value] == (place, i)
            and not (says_host(dicts[i]) or in_host_memory(value.type))
            and value not in transferred
            and value not in kept
        ]
    return spent


def _agree(spent: dict[ir.Fragment, list[int]]) -> None:
    """Limits fragments that can be one program to the operands that all of them may donate."""
    for group in programs(spent):
        common = set(spent[group[0]]).intersection(*(spent[fragment] for fragment in group))
        for fragment in group:
            spent[fragment] = sorted(common)


def _last_uses(f: ir.Func) -> dict[ir.Value, tuple[int, int]]:
    """The position of the last op that uses each value, and of the last of its operands that does."""
    last: dict[ir.Value, tuple[int, int]] = {}
    for place, op in enumerate([*ir.ops(f), f.terminator]):
        for i, value in enumerate(op.operands):
            last[value] = (place, i)
    return last


class _Results:
    """The results of a fragment that are not aliased with an operand yet."""

    def __init__(self, fragment: ir.Fragment) -> None:
        self.fragment = fragment
        self.results = list(fragment.results)
        self.attributes = ir.attribute_dicts(fragment, "res_attrs", len(self.results))
        self.free: dict[Hashable, list[int]] = {}
        for i, result in enumerate(self.results):
            if not says_host(self.attributes[i]) and not type_says_host(result.type):
                self.free.setdefault(self._key(result, self.attributes[i]), []).append(i)

    @staticmethod
    def _key(value: ir.Value, attributes: Attributes) -> Hashable:
        """Equal for an operand and a result that can share memory."""
        return value.type, attributes.get(LAYOUT)

    def take_first(self, value: ir.Value, attributes: Attributes) -> int | None:
        """Position of the first free result that `value` fits; it is not free any more."""
        fitting = self.free.get(self._key(value, attributes))
        return fitting.pop(0) if fitting else None

    def take(self, index: int, value: ir.Value, attributes: Attributes) -> int | None:
        """`index`, if that result is free and `value` fits; it is not free any more."""
        fitting = self.free.get(self._key(value, attributes), [])
        if index not in fitting:
            return None
        fitting.remove(index)
        return index


def _mark_of_argument(
    requested: Attributes, value: ir.Value, attributes: Attributes, free: _Results, f: ir.Func
) -> Attributes:
    """The mark of an argument that the user donated: with the result that the user meant, if possible."""
    if ALIAS not in requested:
        return _mark(None)
    returned, wanted = f.returned, int(ir.IntegerAttr(requested[ALIAS]).value)
    target = None
    if wanted < len(returned):
        position = _result_behind(returned[wanted], free)
        target = None if position is None else free.take(position, value, attributes)
    return _mark(free.take_first(value, attributes) if target is None else target)


def _result_behind(value: ir.Value, free: _Results) -> int | None:
    """The position of `value` among the fragment's results, through ops with one operand."""
    while (op := ir.producer(value)) is not None:
        if op == free.fragment:
            return ir.result_index(value)
        if len(op.operands) != 1:
            return None
        value = op.operands[0]
    return None


def _mark(result: int | None) -> Attributes:
    if result is None:
        return {DONOR: ir.BoolAttr.get(True)}
    return {ALIAS: ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)}
