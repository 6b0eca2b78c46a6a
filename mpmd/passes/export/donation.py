"""Where values of fragments live, and what may use their memory.

Host or device memory, the bytes that other values occupy while a fragment runs, and operands without later
uses, which a fragment may overwrite.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.export.programs import programs
from mpmd.passes.structure import mentions
from mpmd.sharding import shardings
from mpmd.support import diagnostics

MEMORY_KIND = "mhlo.memory_kind"
DONOR = "jax.buffer_donor"
ALIAS = "tf.aliasing_output"
LAYOUT = "mhlo.layout_mode"

Attributes = dict[str, ir.Attribute]


def says_host(attributes: Attributes) -> bool:
    """Whether the attributes of an operand, a result or an argument put it into host memory."""
    kind = attributes.get(MEMORY_KIND)
    return kind is not None and ir.StringAttr(kind).value == "pinned_host"


def type_says_host(kind: ir.Type) -> bool:
    """Whether the type of a value puts it into the host memory of its mesh."""
    return isinstance(kind, ir.MeshTensor) and kind.on_host


def is_donor(attributes: Attributes) -> bool:
    """Whether the memory of a function's argument may be used for anything once it is not needed."""
    donor = attributes.get(DONOR)
    return donor is not None and bool(ir.BoolAttr(donor).value)


def local_bytes(value: ir.Value, topology: ir.TopologyAttr) -> int:
    """Bytes of one device's shard of a mesh tensor; 0 for anything else, such as a token."""
    kind = value.type
    return shardings.local_bytes(kind, topology[kind.mesh]) if isinstance(kind, ir.MeshTensor) else 0


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


HOST = "pinned_host"
_FRONTEND = "mhlo.frontend_attributes"
PLACES, COMPUTE_TYPE = "annotate_device_placement", "_xla_compute_type"
_WORDS = ("memory_kind", COMPUTE_TYPE, PLACES)  # what puts a value somewhere
_SHARDING_CALLS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")


class MarkOffloadedInputOutput(FunctionPass):
    """Writes at fragments which operands and results live in host memory, and checks that all agree.

        main(a@m1 {mhlo.memory_kind = "pinned_host"}):
          f = m1["f"] (a) {d = annotate_device_placement a device; x = add d d;
                           h = annotate_device_placement x pinned_host; ret h}
        ->
          f = m1["f"] (a) <arg_attrs = [{mhlo.memory_kind = "pinned_host"}],
                           res_attrs = [{mhlo.memory_kind = "pinned_host"}]> {...}

    A result is in host memory if it was computed there or placed there, seen through ops that only change
    its form.  An operand is if the argument or the fragment result is.

    Requires: the memory kinds of arguments and results of the function are given.
    Ensures: every fragment has arg_attrs and res_attrs.  Error: users of an argument want it in different
        memories, or in another one than it is in; a result is not where the function says.
    Cost: linear in the fragments, and in the ops between each result and where it is placed.
    Source: openxla/shardy MPMD, `mark_offloaded_input_output`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Marks in program order, then checks."""
        if not mentions(ir.module_of(f), *_WORDS):
            for fragment in ir.fragments(f):
                for name, values in (("arg_attrs", fragment.inputs), ("res_attrs", fragment.results)):
                    dicts = ir.attribute_dicts(fragment, name, len(values))
                    ir.put_attribute_dicts(fragment, name, dicts, even_if_empty=True)
            return
        symbols = ir.symbol_table(ir.module_of(f))
        arguments = ir.attribute_dicts(f, "arg_attrs", len(f.args))
        trace = MemoryTrace(symbols)
        on_host = {arg for arg, of_arg in zip(f.args, arguments) if says_host(of_arg)}
        for fragment in ir.fragments(f):
            of_inputs = ir.attribute_dicts(fragment, "arg_attrs", len(fragment.inputs))
            for value, of_value in zip(fragment.inputs, of_inputs):
                if value in on_host:
                    of_value[MEMORY_KIND] = ir.StringAttr.get(HOST)
            of_results = ir.attribute_dicts(fragment, "res_attrs", len(fragment.results))
            for returned, result, of_value in zip(fragment.returned, fragment.results, of_results):
                if trace.ends_on_host(returned):
                    of_value[MEMORY_KIND] = ir.StringAttr.get(HOST)
                if says_host(of_value):
                    on_host.add(result)
            ir.put_attribute_dicts(fragment, "arg_attrs", of_inputs, even_if_empty=True)
            ir.put_attribute_dicts(fragment, "res_attrs", of_results, even_if_empty=True)
        _check(f, arguments)


class MemoryTrace:
    """Goes from a value to the op that determines its memory."""

    def __init__(self, symbols: dict[str, ir.Func]) -> None:
        self.symbols = symbols
        self._known: dict[ir.Value, ir.Op | None] = {}
        self._returned: dict[str, list[ir.Value]] = {}

    def ends_on_host(self, value: ir.Value) -> bool:
        """Whether the value was computed in host memory, or placed there."""
        op = self.decider(value)
        return op is not None and placement(op) in (None, HOST)

    def decider(self, value: ir.Value) -> ir.Op | None:
        """The op that places the value, or computes it in host memory; None if there is none."""
        way: dict[ir.Value, None] = {}
        op = self._follow(value, way)
        self._known.update(dict.fromkeys(way, op))
        return op

    def _follow(self, value: ir.Value, way: dict[ir.Value, None]) -> ir.Op | None:
        while value not in way:
            if value in self._known:
                return self._known[value]
            way[value] = None
            op = ir.producer(value)
            if op is None:
                loop = value.owner.owner.opview
                if loop.operation.name != "stablehlo.while":
                    return None
                value = loop.operands[ir.arg_index(value)]
                continue
            if placement(op) is not None or _frontend(op).get(COMPUTE_TYPE) == "host":
                return op
            origin = self._origin(op, ir.result_index(value))
            if origin is None:
                return None
            value = origin
        return None

    def _origin(self, op: ir.Op, index: int) -> ir.Value | None:
        """The operand of which result `index` is a reshaped or converted form; None if it is computed."""
        name = op.operation.name
        if name == "stablehlo.optimization_barrier":
            return op.operands[index]
        if name == "stablehlo.while":
            return ir.at_end(op.regions[1].blocks[0]).ref_operation.operands[index]
        if name == "func.call":
            name = op.callee.value
            if name not in self._returned:
                callee = self.symbols[name]
                self._returned[name] = [] if callee.is_external else callee.returned
            return self._returned[name][index] if self._returned[name] else None
        if name == "stablehlo.dynamic_update_slice":
            return op.operands[1]
        if name in ("stablehlo.reshape", "stablehlo.broadcast_in_dim"):
            return op.operands[0] if _only_adds_or_drops_ones(op) else None
        if name == "stablehlo.custom_call" and _target(op) in _SHARDING_CALLS:
            return op.operands[0]
        return None


def _only_adds_or_drops_ones(op: ir.Op) -> bool:
    old, new = op.operands[0].type.shape, op.results[0].type.shape
    return [d for d in old if d != 1] == [d for d in new if d != 1] and math.prod(old) == math.prod(new)


def _target(op: ir.Op) -> str:
    return str(ir.StringAttr(op.attributes["call_target_name"]).value)


def placement(op: ir.Op) -> str | None:
    """The memory in which the user placed the result of `op`."""
    is_call = op.operation.name == "stablehlo.custom_call"
    if not is_call or _target(op) != PLACES:
        return None
    return _frontend(op).get("_xla_buffer_placement")


def _frontend(op: ir.Op) -> dict[str, str]:
    attribute = op.attributes.get(_FRONTEND)
    if attribute is None:
        return {}
    return {name: str(value).strip('"') for name, value in ir.entries_of(attribute).items()}


def _check(f: ir.Func, arguments: list[Attributes]) -> None:
    results = ir.attribute_dicts(f, "res_attrs", len(f.returned))
    wanted: dict[ir.Value, list[ir.Attribute | None]] = {}
    for op in [*ir.ops(f), f.terminator]:
        for value, kind in zip(op.operands, _kinds_at(op, results)):
            wanted.setdefault(value, []).append(kind)
    for i, (arg, of_arg) in enumerate(zip(f.args, arguments)):
        kinds = wanted.get(arg, [])[::-1]
        others = [kind for kind in kinds if not _agree(kinds[0], kind)]
        if others:
            _mismatch(f"users of arg {i}", kinds[0], others[0], arg.location)
        elif kinds and not _agree(of_arg.get(MEMORY_KIND), kinds[0]):
            _mismatch(f"arg {i} and users", of_arg.get(MEMORY_KIND), kinds[0], arg.location)
    for i, (value, of_result) in enumerate(zip(f.returned, results)):
        kind_of_maker = _kind_where_made(value, arguments)
        if not _agree(of_result.get(MEMORY_KIND), kind_of_maker):
            reported = of_result.get(MEMORY_KIND)
            _mismatch(f"result {i} and defining op", reported, kind_of_maker, f.terminator.location)


def _kinds_at(user: ir.Op, results: list[Attributes]) -> Iterable[ir.Attribute | None]:
    """The memory kind that an op expects of each of its operands."""
    if isinstance(user, ir.Fragment):
        dicts = ir.attribute_dicts(user, "arg_attrs", len(user.inputs))
    elif user.operation.name == "func.return":
        dicts = results
    else:
        return itertools.repeat(None)
    return (of_value.get(MEMORY_KIND) for of_value in dicts)


def _kind_where_made(value: ir.Value, arguments: list[Attributes]) -> ir.Attribute | None:
    op = ir.producer(value)
    if op is None:
        return arguments[ir.arg_index(value)].get(MEMORY_KIND)
    if isinstance(op, ir.Fragment):
        return ir.attribute_dicts(op, "res_attrs", len(op.results))[ir.result_index(value)].get(MEMORY_KIND)
    return op.attributes.get(MEMORY_KIND)


def _agree(a: ir.Attribute | None, b: ir.Attribute | None) -> bool:
    """Whether two kinds are the same; nothing is the device."""
    return _word(a) == _word(b)


def _word(kind: ir.Attribute | None) -> str:
    return "device" if kind is None else str(ir.StringAttr(kind).value)


def _mismatch(between: str, a: ir.Attribute | None, b: ir.Attribute | None, location: ir.Location) -> None:
    texts = ["<<NULL ATTRIBUTE>>" if kind is None else str(kind) for kind in (a, b)]
    diagnostics.error(
        f"Memory kind mismatch between {between}: {texts[0]} vs {texts[1]}. Give the value the same memory "
        "kind everywhere, or move it with an explicit transfer or jax.device_put.",
        location,
    )


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
    Cost: linear, but for the search for a result among the results of one fragment; in the text of the module
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
            _donors_agree(spent)
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


def _donors_agree(spent: dict[ir.Fragment, list[int]]) -> None:
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
