"""Reading XLA's HLO text.

Accepts what XLA prints, before and after optimisation, and text written by hand: with or without `%`,
layouts, operand shapes, metadata, source tables; operands and computations written in place.  Every problem
is an `HloError` with line, column and a caret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mpmd.compile.hlo import codecs
from mpmd.compile.hlo.attributes import Attribute, Verbatim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction, Literal
from mpmd.compile.hlo.literals import parse_literal
from mpmd.compile.hlo.module import HloModule, HloSource
from mpmd.compile.hlo.old_forms import STARTS, complete, scalar_starts, unstated_shape, vector_of_starts
from mpmd.compile.hlo.opcodes import CARRIED, OPCODES, Opcode, call_keys, unknown_opcode
from mpmd.compile.hlo.printer import read_header
from mpmd.compile.hlo.shape import BUFFER, TOKEN, Shape, shape_at
from mpmd.compile.hlo.text import (
    TextError,
    blank_comments,
    closing,
    located,
    placed_parts,
    unquote,
)
from mpmd.errors import HloError

_LINE = re.compile(
    r"\s*(ROOT\s+)?%?([\w.\-]+) = (\w+\[[^\]]*\](?:\{[^{}]*\})?) ([a-z][\w\-]*)\(([^()\[\]{}\"/]*)\)"
)
_HEAD = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\s*\(")
_LAST = re.compile(r"%?[\w.\-]*$")
_TRAILING = re.compile(r"\s*,[^\S\n]*(?=\n)")
_KEY = re.compile(r"\s*,\s*([\w\-]+)=\s*")
_VALUE = re.compile(
    r"(?:\{[^{}\"]*(?:\"(?:[^\"\\]|\\.)*\"[^{}\"]*)*\}|\"(?:[^\"\\]|\\.)*\"|[^\s,{}()\[\]\"]+)(?=[\s,}]|$)"
)
_NAME = re.compile(r"[\w.\-]+")
_SPACE = re.compile(r"\s*")
_MODULE = re.compile(r"HloModule\s+([^\s,]+)")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*")
_IN_PLACE = re.compile(r"\{\s*(?:ROOT\s+)?%?[\w.\-]+\s*=")
_BEGINNING = re.compile(r"(?:ENTRY\s+)?%?[\w.\-]+\s*(?:\{|\([^=]*\)\s*->)")
_TABLES = re.compile(
    r"(?:\s*(?:FileNames|FunctionNames|FileLocations|StackFrames)[ \t]*\n(?:[ \t]*\d+ [^\n]*(?:\n|$))*)+"
)
_THREAD = re.compile(r"\s*,\s*execution_thread=(\"[^\"]*\")")
_BARE = re.compile(r"[^\s,{}()\[\]\"]+")
_OF_START = frozenset({"control-predecessors", "async_execution_thread"})
_OF_BOTH = frozenset({"metadata", "sharding", "frontend_attributes", "backend_config", *CARRIED})
"""Attributes of `reduce-scatter-start` that its async-start has alone, and those that both have."""
_SUGARED = re.compile(r"(.+)-(start|update|done)$")


def parse_module(text: str, name: str = "") -> HloModule:
    """The module that HLO text denotes.

    Args:
        text: HLO text.
        name: where the text came from, shown in errors.

    Raises:
        HloError: the text is malformed; shows line, column and spot.
    """
    parser = _Parser(blank_comments(text))
    try:
        module = parser.module()
    except TextError as error:
        raise HloError(located(text, error.offset, error.message, name)) from None
    module.source = HloSource(text, name, parser.places)
    return module


class _Parser:
    """Parses one text.

    Attributes:
        text: the whole text, comments blanked.
        built: the module under construction.
        defined: its computations by the names that the text gives them.
        pending: (instruction, key, callees, offset); names are resolved once all computations are known.
        owner: the computation whose instructions are being read.
        names: its instructions so far.
        highest: the greatest number that ends a name.
        places: the offsets at which instructions begin.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.built = HloModule("unnamed")
        self.defined: dict[str, HloComputation] = {}
        self.pending: list[tuple[HloInstruction, str, list[str | HloComputation], int]] = []
        self.owner = HloComputation("", self.built)
        self.names: dict[str, HloInstruction] = {}
        self.highest = 0
        self.places: dict[HloInstruction, int] = {}

    # -- module -------------------------------------------------------------------------------------

    def module(self) -> HloModule:
        position = self.header(self.skip(0))
        tables = _TABLES.match(self.text, position)
        if tables is not None:
            self.built.tables = tables.group().strip("\n")
            position = tables.end()
        position = self.skip(position)
        last = None
        while position < len(self.text):
            last, position = self.computation(position)
            position = self.skip(position)
        if last is None:
            raise TextError("the module has no computation", len(self.text))
        if not self.built.has_entry:
            self.built.set_entry(last)
        self.built.name = self.built.name or self.built.entry.name
        self.resolve_calls()
        self.built.reserve_uids(self.highest + 1)
        return self.built

    def skip(self, position: int) -> int:
        space = _SPACE.match(self.text, position)
        return space.end() if space is not None else position

    def header(self, position: int) -> int:
        match = _MODULE.match(self.text, position)
        if match is None and _BEGINNING.match(self.text, position) is not None:
            self.built.name = ""  # that of the entry, once it is known
            return position
        if match is None:
            raise TextError("expected `HloModule name`", position)
        self.built.name = match.group(1).lstrip("%")
        position = match.end()
        while True:
            key = _KEY.match(self.text, position)
            if key is None:
                return position
            start = key.end()
            value, position = self.value(start, key.group(1))
            try:
                read_header(self.built, key.group(1), value)
            except TextError as error:
                raise TextError(error.message, start + error.offset) from None

    def resolve_calls(self) -> None:
        called: dict[HloInstruction, dict[str, list[HloComputation]]] = {}
        for instruction, key, callees, at in self.pending:
            computations = []
            for callee in callees:
                computation = self.defined.get(callee) if isinstance(callee, str) else callee
                if computation is None:
                    raise TextError(
                        f"{instruction.name} calls computation {callee!r}, which the module lacks", at
                    )
                computations.append(computation)
            called.setdefault(instruction, {})[key] = computations
        for instruction, by_key in called.items():
            instruction.set_called([c for key in _in_order(instruction, by_key) for c in by_key[key]])

    # -- computations -------------------------------------------------------------------------------

    def computation(self, position: int) -> tuple[HloComputation, int]:
        text = self.text
        match = _COMPUTATION.match(text, position)
        if match is None:
            raise TextError("expected a computation such as `name {` or `ENTRY name {`", position)
        name, start = match.group(2), position
        result, result_at = None, position
        position = match.end()
        if text.startswith("(", position):
            position = self.skip(closing(text, position) + 1)
            if not text.startswith("->", position):
                raise TextError("expected `->` and the result's shape", position)
            result_at = self.skip(position + 2)
            result, position = shape_at(text, result_at)
            position = self.skip(position)
        if not text.startswith("{", position):
            raise TextError("expected `{` and the computation's instructions", position)
        if name in self.defined:
            raise TextError(f"computation {name!r} is defined twice", start)
        computation = self.defined[name] = self.built.create_computation(name)
        if match.group(1):
            if self.built.has_entry:
                raise TextError(f"a second ENTRY; the first is {self.built.entry.name}", start)
            self.built.set_entry(computation)
        position = self.body(computation, position + 1)
        if result is not None and not result.is_compatible(computation.root.shape):
            raise TextError(
                f"computation {name} is said to give {result}, but its root {computation.root.name} is "
                f"{computation.root.shape}",
                result_at,
            )
        thread = _THREAD.match(text, position)
        if thread is not None:
            computation.execution_thread = unquote(thread.group(1))
            position = thread.end()
        return computation, position

    def body(self, computation: HloComputation, position: int) -> int:
        outer = self.owner, self.names
        self.owner, self.names = computation, {}
        root = last = None
        text = self.text
        while True:
            after = self.skip(position)
            if text.startswith("}", after):
                break
            if after >= len(text):
                raise TextError(f"computation {computation.name} is never closed by '}}'", after)
            last, is_root, position = self.instruction(after)
            if is_root:
                if root is not None:
                    raise TextError(f"computation {computation.name} has two roots", after)
                root = last
        if last is None:
            raise TextError(f"computation {computation.name} has no instructions", after)
        computation.set_root(root or last)
        self.owner, self.names = outer
        return after + 1

    def in_place(self, instruction: HloInstruction, position: int) -> HloComputation:
        """The computation that is written where its name could be, at the `{` at `position`."""
        computation = self.built.create_computation(f"{instruction.opcode}_computation")
        self.body(computation, position + 1)
        return computation

    # -- instructions -------------------------------------------------------------------------------

    def instruction(self, start: int) -> tuple[HloInstruction, bool, int]:
        shape: Shape | None
        fast = _LINE.match(self.text, start)
        if fast is not None:
            root, name, _, opcode, inside = fast.groups()
            shape, _ = shape_at(self.text, fast.start(3))
            inside_at, position = fast.start(5), fast.end()
        else:
            root, name, shape, opcode, inside_at, position = self.slow_head(start)
            inside = self.text[inside_at : position - 1]
        if name in self.names:
            raise TextError(f"instruction {name!r} is defined twice in computation {self.owner.name}", start)
        info = OPCODES.get(opcode)
        if info is None:
            if shape is None:
                raise TextError(unknown_opcode(opcode), self.text.index(opcode, start))
            return self.sugared(start, (root is not None, name, shape, opcode, inside, inside_at, position))
        texts, position = self.attribute_texts(position)
        instruction = self.built_with(info, name, shape, inside, inside_at, texts)
        self.places[instruction] = start
        return instruction, root is not None, position

    def built_with(
        self,
        info: Opcode,
        name: str,
        shape: Shape | None,
        inside: str,
        inside_at: int,
        texts: dict[str, tuple[str, int]],
    ) -> HloInstruction:
        """An instruction of stated or unstated shape, entered into its computation; named if it is not."""
        if shape is None:
            instruction = self.build_unstated(info, name, inside, inside_at, texts)
        else:
            instruction = self.build(info, name, shape, inside, inside_at, texts)
        number = 0
        while not instruction.given_name or instruction.given_name in self.names:
            instruction.name = f"{info.name}.anon" + (f".{number}" if number else "")
            number += 1
        if info.name in STARTS and vector_of_starts(instruction):
            for scalar in scalar_starts(instruction, self.names):
                self.enter(scalar)
        self.enter(instruction)
        return instruction

    def nested(self, position: int) -> HloInstruction:
        """An operand that is an instruction written in place: without attributes, as in XLA."""
        shape, opcode, inside_at, end = self.right_side(position)
        info = OPCODES.get(opcode)
        if info is None:
            raise TextError(unknown_opcode(opcode), self.text.index(opcode, position))
        instruction = self.built_with(info, "", shape, self.text[inside_at : end - 1], inside_at, {})
        self.places[instruction] = position
        return instruction

    def build_unstated(
        self, info: Opcode, name: str, inside: str, inside_at: int, texts: dict[str, tuple[str, int]]
    ) -> HloInstruction:
        """An instruction without a shape: operands and the computations that it calls determine it."""
        shown = name or info.name
        if info.name in ("constant", "parameter"):
            raise TextError(f"{info.name} {name or 'in place'} must state its shape", inside_at)
        instruction = self.build(info, name, TOKEN, inside, inside_at, texts)
        called: list[HloComputation] = []
        for callee in self.callees(instruction):
            computation = self.defined.get(callee) if isinstance(callee, str) else callee
            if computation is None or not computation.has_root:
                raise TextError(
                    f"{shown} states no shape: {callee}, which it calls, must be defined above", inside_at
                )
            called.append(computation)
        try:
            instruction.shape = unstated_shape(instruction, called)
        except HloError as error:
            raise TextError(f"{shown} states no shape: {error}", inside_at) from None
        return instruction

    def callees(self, instruction: HloInstruction) -> list[str | HloComputation]:
        """The computations that an instruction calls, or their names, in the order of the opcode's roles."""
        named = {key: names for caller, key, names, _ in self.pending if caller is instruction}
        return [name for key in _in_order(instruction, named) for name in named[key]]

    def enter(self, instruction: HloInstruction) -> None:
        self.owner.add(instruction)
        name = instruction.given_name
        self.names[name] = instruction
        suffix = name.rpartition(".")[2]
        if suffix.isdigit():
            self.highest = max(self.highest, int(suffix))

    def slow_head(self, start: int) -> tuple[str | None, str, Shape | None, str, int, int]:
        text = self.text
        head = _HEAD.match(text, start)
        if head is None:
            raise TextError("expected an instruction such as `name = f32[2] add(a, b)`", start)
        return head.group(1), head.group(2), *self.right_side(head.end())

    def right_side(self, position: int) -> tuple[Shape | None, str, int, int]:
        """Shape if stated, opcode, and the offsets after `(` and after `)`, of an instruction."""
        text, shape = self.text, None
        opcode = None if BUFFER.match(text, position) else _OPCODE.match(text, position)
        if opcode is None:
            shape, position = shape_at(text, position)
            opcode = _OPCODE.match(text, position)
        if opcode is None:
            raise TextError("expected an opcode and `(`", self.skip(position))
        close = closing(text, opcode.end() - 1)
        return shape, opcode.group(1), opcode.end(), close + 1

    def build(
        self,
        info: Opcode,
        name: str,
        shape: Shape,
        inside: str,
        inside_at: int,
        texts: dict[str, tuple[str, int]],
    ) -> HloInstruction:
        opcode = info.name
        if opcode == "constant":
            instruction = HloInstruction(
                opcode, shape, (), {}, (), self.literal(inside, shape, inside_at), name
            )
        elif opcode == "parameter":
            if re.fullmatch(r"\s*[0-9]{1,18}\s*", inside) is None:
                raise TextError(f"expected the parameter's number, got {inside!r}", inside_at)
            instruction = HloInstruction(opcode, shape, (), {"parameter_number": int(inside)}, (), None, name)
        else:
            operands = self.operands(inside, inside_at)
            if len(operands) < info.least or (info.most is not None and len(operands) > info.most):
                expected = info.least if info.least == info.most else f"{info.least} or more"
                raise TextError(f"{opcode} takes {expected} operands, got {len(operands)}", inside_at)
            instruction = HloInstruction(opcode, shape, operands, {}, (), None, name)
            complete(instruction)
        if texts or info.specs:
            self.attributes(instruction, info, texts, inside_at)
        return instruction

    def literal(self, inside: str, shape: Shape, at: int) -> Literal:
        try:
            return parse_literal(inside, shape)
        except TextError as error:
            raise TextError(error.message, at + error.offset) from None

    def operands(self, inside: str, at: int) -> list[HloInstruction]:
        names = self.names
        if not inside or inside.isspace():
            return []
        if "[" in inside or "(" in inside:
            return [self.operand(part, at + offset) for offset, part in placed_parts(inside)]
        words = _NAME.findall(inside)
        try:
            return [names[word] for word in words]
        except KeyError:
            missing = next(word for word in words if word not in names)
            offset = re.search(rf"(?<![\w.\-]){re.escape(missing)}(?![\w.\-])", inside)
            raise self.unknown(missing, at + (offset.start() if offset else 0)) from None

    def operand(self, text: str, at: int) -> HloInstruction:
        """`name`, `shape name`, or an instruction in place."""
        if text.endswith(")"):
            return self.nested(at)
        word = _LAST.search(text)
        start, name = (word.start(), word.group().lstrip("%")) if word is not None else (0, text)
        operand = self.names.get(name)
        if operand is None:
            raise self.unknown(name or text, at + start)
        if start:
            stated, end = shape_at(self.text, at)
            if self.skip(end) != at + start:
                raise TextError("expected an operand such as `f32[2] name`", at)
            if not stated.is_compatible(operand.shape):
                raise TextError(f"operand {name} is said to be {stated}, but is {operand.shape}", at)
        return operand

    @staticmethod
    def unknown(name: str, at: int) -> TextError:
        return TextError(f"no instruction {name!r} is defined above in this computation", at)

    # -- attributes ---------------------------------------------------------------------------------

    def attribute_texts(self, position: int) -> tuple[dict[str, tuple[str, int]], int]:
        texts: dict[str, tuple[str, int]] = {}
        while True:
            key = _KEY.match(self.text, position)
            if key is None:
                trailing = _TRAILING.match(self.text, position)
                return texts, trailing.end() if trailing is not None else position
            start = key.end()
            simple = _VALUE.match(self.text, start)
            if simple is not None:
                value, position = simple.group(), simple.end()
            else:
                value, position = self.value(start, key.group(1))
            if key.group(1) in texts:
                raise TextError(f"attribute {key.group(1)!r} is given twice", key.start(1))
            texts[key.group(1)] = (value, start)

    def value(self, start: int, key: str) -> tuple[str, int]:
        """The text of a value: up to a comma or space outside brackets and strings."""
        text, position = self.text, start
        if key == "literal" and not text.startswith("(", start):  # its shape, a space, its value
            position = self.skip(shape_at(text, start)[1])
        while position < len(text):
            char = text[position]
            if char in "{[(":
                position = closing(text, position) + 1
                spaced = re.compile(r"\s*(?=\{)").match(text, position)
                if key == "replica_groups" and "mesh[" in text[start:position] and spaced is not None:
                    position = spaced.end()
            elif char == '"':
                ended = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, position)
                if ended is None:
                    raise TextError("this string never ends", position)
                position = ended.end()
            else:
                bare = _BARE.match(text, position)
                if bare is None:
                    break
                position = bare.end()
        if position == start:
            raise TextError(f"attribute {key!r} has no value", start)
        return text[start:position], position

    def attributes(
        self, instruction: HloInstruction, info: Opcode, texts: dict[str, tuple[str, int]], at: int
    ) -> None:
        attributes, keyed = instruction.attributes, info.keyed
        grouped: dict[str, None] = {}
        for key, (value, start) in texts.items():
            spec = keyed.get(key)
            if spec is not None:
                if len(spec.codec.keys) > 1:
                    grouped[spec.name] = None
                    continue
                attributes[spec.name] = _read(spec.codec, (value,), start)
                if attributes[spec.name] == spec.default:
                    del attributes[spec.name]
            else:
                self.general_attribute(instruction, info, key, value, start)
        for spec in info.specs:
            if spec.name in grouped or (spec.required and len(spec.codec.keys) > 1):
                parts = tuple(texts[k][0] if k in texts else None for k in spec.codec.keys)
                attributes[spec.name] = _read(spec.codec, parts, at)
            elif spec.required and spec.name not in attributes:
                name = instruction.given_name or "in place"
                raise TextError(f"{info.name} {name} needs the attribute {spec.codec.keys[0]}=...", at)

    def general_attribute(
        self, instruction: HloInstruction, info: Opcode, key: str, value: str, start: int
    ) -> None:
        """Attributes that any opcode may have, and the computations that it calls."""
        if key == "metadata":
            instruction.metadata = value
        elif key == "sharding":
            instruction.sharding = value
        elif key == "frontend_attributes":
            instruction.frontend_attributes = value
        elif key == "backend_config":
            instruction.backend_config = value
        elif key == "control-predecessors":
            for before in self.operands(value[1:-1], start + 1):
                instruction.add_control_predecessor(before)
        elif key == "calls" and info.name in ("async-update", "async-done"):
            started = self.started(instruction)
            if started is not None and self.called(instruction, value, start) not in (
                [started.name],
                [started],
            ):
                raise TextError(f"{instruction.name} ends {value}, but {started.name} was started", start)
        elif key in call_keys(instruction):
            self.pending.append((instruction, key, self.called(instruction, value, start), start))
        elif key in CARRIED:
            instruction.attributes[key] = Verbatim(value)
        else:
            known = sorted({*info.keyed, *call_keys(instruction)})
            listed = f"; it has {', '.join(known)}" if known else ""
            raise TextError(f"{info.name} has no attribute {key!r}{listed}", start - len(key) - 1)

    def called(self, instruction: HloInstruction, value: str, start: int) -> list[str | HloComputation]:
        """The computations that a value names, as `f` or `{f, g}`, or has in place."""
        if _IN_PLACE.match(value):
            return [self.in_place(instruction, start)]
        parts = [(0, value)] if not value.startswith("{") else placed_parts(" " + value[1:-1])
        return [
            self.in_place(instruction, start + offset) if _IN_PLACE.match(part) else part.lstrip("%")
            for offset, part in parts
        ]

    # -- asynchronous operations in short form ----------------------------------------------------------

    def sugared(
        self, start: int, parts: tuple[bool, str, Shape, str, str, int, int]
    ) -> tuple[HloInstruction, bool, int]:
        """`reduce-scatter-start(...)` and the like: async-start of a computation with that operation."""
        is_root, name, shape, opcode, inside, inside_at, position = parts
        matched = _SUGARED.match(opcode)
        wrapped = OPCODES.get(matched.group(1)) if matched else None
        if matched is None or wrapped is None:
            at = self.text.index(opcode, start)
            raise TextError(unknown_opcode(opcode), at)
        texts, position = self.attribute_texts(position)
        if matched.group(2) != "start":
            info = OPCODES[f"async-{matched.group(2)}"]
            kept = {k: v for k, v in texts.items() if k not in wrapped.keyed and k not in wrapped.called}
            instruction = self.build(info, name, shape, inside, inside_at, kept)
            started = self.started(instruction)
            if started is not None and started.root.opcode != wrapped.name:
                raise TextError(f"{opcode} {name} ends an asynchronous {started.root.opcode}", start)
            self.enter(instruction)
            self.places[instruction] = start
            return instruction, is_root, position
        if not shape.is_tuple or len(shape.elements) < 2:
            raise TextError(f"{opcode} must give a tuple (operands, result, ...), got {shape}", start)
        outer_texts = {k: v for k, v in texts.items() if k in _OF_START or k in _OF_BOTH}
        instruction = self.build(OPCODES["async-start"], name, shape, inside, inside_at, outer_texts)
        body = self.built.create_computation(f"wrapped_{wrapped.name.replace('-', '_')}")
        body.execution_thread = str(instruction.attributes.get("async_execution_thread", ""))
        outer = self.owner, self.names
        self.owner, self.names = body, {}
        for i, operand in enumerate(instruction.operands):
            number: dict[str, Attribute] = {"parameter_number": i}
            self.enter(HloInstruction("parameter", operand.shape, (), number, (), None, f"param_{i}"))
        inner_texts = {k: v for k, v in texts.items() if k not in _OF_START}
        given = "0" if wrapped.name == "parameter" else ", ".join(self.names)
        inner = self.build(wrapped, f"{name}.wrapped", shape.elements[1], given, inside_at, inner_texts)
        self.enter(inner)
        body.set_root(inner)
        self.owner, self.names = outer
        self.pending.append((instruction, "calls", [body], start))
        self.enter(instruction)
        self.places[instruction] = self.places[inner] = start
        return instruction, is_root, position

    def started(self, instruction: HloInstruction) -> HloComputation | None:
        """The computation that an async-update or async-done goes on with, if it is defined above."""
        start = instruction
        while start.opcode in ("async-update", "async-done"):
            start = start.operands[0]
        for callee in self.callees(start) if start.opcode == "async-start" else ():
            return self.defined.get(callee) if isinstance(callee, str) else callee
        return None


def _in_order(instruction: HloInstruction, keys: Iterable[str]) -> list[str]:
    """Keys that name computations, in the order of the opcode's roles."""
    known = [*instruction.info.called, "true_computation", "false_computation", "to_apply", "calls"]
    return sorted(keys, key=lambda k: known.index(k) if k in known else len(known))


def _read(codec: codecs.Codec, texts: codecs.Texts, at: int) -> Attribute:
    try:
        return codec.parse(texts)
    except TextError as error:
        raise TextError(error.message, at + error.offset) from None
