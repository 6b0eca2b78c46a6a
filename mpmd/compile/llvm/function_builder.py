"""One LLVM function under construction: pointers and memory, calls and control flow.

Values are typed.  `arithmetic.py` adds what works on the lanes of vectors, `indices.py` what works on
positions.

An LLVM module under construction: its functions, constants and declarations, printed in a fixed order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from mpmd.compile.llvm.cpu import ELEMENT_BYTES, LINE_BYTES, CpuTarget
from mpmd.compile.llvm.llvm_arithmetic import Index, IndexArithmetic
from mpmd.compile.llvm.llvm_types import (
    Value,
    bits_of,
    constant,
    element_of,
    is_float,
    lanes_of,
    suffix,
    vector,
)

_ATTRIBUTES = (
    'attributes #0 = {{ nounwind "target-cpu"="{cpu}" "target-features"="{features}" '
    '"prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}" }}'
)


class Module:
    """Text of one LLVM module.

    Attributes:
        target: the CPU of its functions.
    """

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self._functions: dict[str, str] = {}
        self._globals: dict[str, str] = {}
        self._declarations: dict[str, str] = {}
        self._streams = False

    def declare(self, name: str, result: str, arguments: tuple[str, ...]) -> None:
        """Make an intrinsic or outside function callable; repeating a declaration is free."""
        if name not in self._functions:
            self._declarations[name] = f"declare {result} @{name}({', '.join(arguments)})"

    def add_function(self, name: str, text: str) -> None:
        """Add a finished function; every name once."""
        if name in self._functions:
            raise AssertionError(f"function @{name} is defined twice in one module")
        self._functions[name] = text
        self._declarations.pop(name, None)

    def function(self, name: str) -> str:
        return self._functions[name]

    def replace_function(self, name: str, text: str) -> None:
        assert name in self._functions, name
        self._functions[name] = text

    def defines(self, name: str) -> bool:
        """Whether a function of this name is in the module."""
        return name in self._functions

    def names(self) -> tuple[str, ...]:
        """Names of the functions that others can call, in the order in which they were added."""
        return tuple(n for n, text in self._functions.items() if not text.startswith("define internal"))

    def imports(self) -> set[str]:
        """Declared functions of this backend that other loaded code must provide."""
        return {n for n in self._declarations if n.startswith("mpmd_")}

    def add_global(self, name: str, definition: str) -> None:
        """Add `@name = definition`; the same name twice must be the same text."""
        if self._globals.setdefault(name, definition) != definition:
            raise AssertionError(f"global @{name} is defined twice with different contents")

    def streaming_hint(self) -> str:
        self._streams = True
        return "!0"

    def text(self) -> str:
        """The module as LLVM assembly; the same functions in the same order give the same text."""
        attributes = _ATTRIBUTES.format(
            cpu=self.target.cpu, features=self.target.features, bits=8 * self.target.vector_bytes
        )
        parts = [
            f'target triple = "{self.target.triple}"',
            *(f"@{name} = {definition}" for name, definition in sorted(self._globals.items())),
            *(text for _, text in sorted(self._declarations.items())),
            *self._functions.values(),
            attributes,
            *(["!0 = !{i32 1}"] if self._streams else []),
        ]
        return "\n\n".join(parts) + "\n"


_MIN_REGISTER_BITS, _MAX_ELEMENT_BITS = 128, 64
_PURE = frozenset(
    ("add", "sub", "mul", "udiv", "urem", "and", "or", "xor", "icmp", "getelementptr")
    + ("insertelement", "shufflevector", "zext", "sext", "trunc", "select")
)
"""Instructions on integers, addresses and lanes that emitters repeat again and again."""


class Loop:
    """A loop being filled in.

    Attributes:
        i: the induction variable, `i64`.
        carried: inside the loop, the values carried into this iteration; after it, the final ones.
    """

    def __init__(self, i: Value, carried: list[Value]) -> None:
        self.i = i
        self.carried = carried
        self.following: list[Value] | None = None

    def carry(self, values: Sequence[Value]) -> None:
        self.following = list(values)


class FunctionBuilder(IndexArithmetic):
    """Writes one function into a module; leaving the `with` block (or `finish`) adds it.

    Args:
        module: where the function goes.
        name: its symbol.
        arguments: (name, LLVM type) of each argument, read back as `self.arguments[name]`.
        result: LLVM type of the result.
        internal: invisible outside of the module.
        plain: LLVM translates it instruction by instruction; for what runs once per call and for loops around
            calls, where optimising takes longer than it ever saves.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        arguments: Sequence[tuple[str, str]],
        *,
        result: str = "void",
        internal: bool = False,
        plain: bool = False,
    ) -> None:
        self.module = module
        self.target = module.target
        self.name = name
        self.result = result
        self.internal = internal
        self.plain = plain
        self.arguments = {arg: Value(f"%{arg}", type_) for arg, type_ in arguments}
        self._lines: list[str] = []
        self._entry: list[str] = []
        self._narrow: dict[str, Value] = {}
        self._known: dict[str, Value] = {}
        self._block = ".entry"  # a name that no argument has
        self._count = 0

    def __enter__(self) -> FunctionBuilder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.finish()

    def finish(self) -> None:
        """End with `ret void` if nothing else ended the last block, and add the function to the module."""
        if not self._lines or not self._lines[-1].lstrip().startswith(("ret ", "unreachable", "br ")):
            self.emit("ret void")
        signature = ", ".join(value.typed for value in self.arguments.values())
        linkage = "internal " if self.internal else ""
        plain = "noinline optnone " if self.plain else ""
        head = f"define {linkage}{self.result} @{self.name}({signature}) {plain}#0 {{\n.entry:"
        body = "\n".join(self._entry + self._lines)
        self.module.add_function(self.name, f"{head}\n{body}\n}}")

    # -- instructions -------------------------------------------------------------------------------------
    def emit(self, text: str) -> None:
        """An instruction without a result."""
        self._lines.append("  " + text)

    def op(self, text: str, type_: str) -> Value:
        """An instruction with a result of the given type; what a block knows it does not compute again."""
        pure = text.partition(" ")[0] in _PURE
        known = self._known.get(text) if pure else None
        if known is not None:
            return known
        self._count += 1
        value = Value(f"%v{self._count}", type_)
        self._lines.append(f"  {value} = {text}")
        if pure:
            self._known[text] = value
        return value

    def ret(self, value: Value | None = None) -> None:
        self.emit("ret void" if value is None else f"ret {value.typed}")

    # -- memory -------------------------------------------------------------------------------------------
    def offset(self, pointer: Value, index: Index, element: str = "i8") -> Value:
        """The address of element `index` of an array that starts at `pointer`."""
        if isinstance(index, int) and index == 0:
            return pointer
        return self.op(f"getelementptr inbounds {element}, ptr {pointer}, i64 {index}", "ptr")

    def record_narrow(self, wide: Value, narrow: Value) -> Value:
        """Note that a value was widened from a narrower one without loss; returns it."""
        self._narrow[wide.text] = narrow
        return wide

    def narrow_of(self, wide: Value) -> Value | None:
        """The value that this one was widened from, if that was noted."""
        return self._narrow.get(wide.text)

    def load(self, pointer: Value, type_: str, index: Index = 0, *, align: int = 0) -> Value:
        """Load a scalar or vector whose first element is element `index` of the array at `pointer`."""
        element = element_of(type_)
        at = self.offset(pointer, index, element)
        return self.op(f"load {type_}, ptr {at}, align {align or natural_align(element)}", type_)

    def store(
        self, value: Value, pointer: Value, index: Index = 0, *, align: int = 0, streams: bool = False
    ) -> None:
        """Store a scalar or vector at element `index` of the array at `pointer`.

        With `streams` it is non-temporal; the address is then a multiple of the vector's size, up to a
        line, and `finish_streams` must follow before anybody else may read it.
        """
        element = element_of(value.type)
        at = self.offset(pointer, index, element)
        align = align or natural_align(element)
        if streams:
            align = min(LINE_BYTES, natural_align(element) * lanes_of(value.type))
        hint = f", !nontemporal {self.module.streaming_hint()}" if streams else ""
        self.emit(f"store {value.typed}, ptr {at}, align {align}{hint}")

    def finish_streams(self) -> None:
        """A fence after non-temporal stores: they are visible to all threads."""
        self.module.declare("llvm.x86.sse.sfence", "void", ())
        self.emit("call void @llvm.x86.sse.sfence()")

    def masked_load(self, pointer: Value, type_: str, mask: Value, index: Index = 0) -> Value:
        """Load the lanes where `mask` is set, zero in the others; memory of the others is not touched."""
        if lanes_of(type_) == 1:
            with self.branch_value(mask, constant(0, type_)) as branch:
                branch.value = self.load(pointer, type_, index)
            return branch.result()
        name, mask_type = f"llvm.masked.load.{suffix(type_)}.p0", vector("i1", lanes_of(type_))
        self.module.declare(name, type_, ("ptr", "i32", mask_type, type_))
        element = element_of(type_)
        at = self.offset(pointer, index, element)
        arguments = f"ptr {at}, i32 {natural_align(element)}, {mask.typed}, {constant(0, type_).typed}"
        return self.op(f"call {type_} @{name}({arguments})", type_)

    def masked_store(self, value: Value, pointer: Value, mask: Value, index: Index = 0) -> None:
        """Store the lanes where `mask` is set; memory of the others is not touched.

        LLVM joins what narrows lanes with the store, and where it knows that one lane alone is stored forgets
        to narrow it: 4 bytes of one are written.  So the narrowing is hidden from it.
        """
        if lanes_of(value.type) == 1:
            with self.when(mask):
                self.store(value, pointer, index)
            return
        type_ = value.type
        if bits_of(type_) < _MAX_ELEMENT_BITS:
            value = self.sealed(value)
        name, mask_type = f"llvm.masked.store.{suffix(type_)}.p0", vector("i1", lanes_of(type_))
        self.module.declare(name, "void", (type_, "ptr", "i32", mask_type))
        element = element_of(type_)
        at = self.offset(pointer, index, element)
        self.emit(f"call void @{name}({value.typed}, ptr {at}, i32 {natural_align(element)}, {mask.typed})")

    def stack(self, type_: str, count: int = 1, *, align: int = LINE_BYTES) -> Value:
        """Memory of the function's frame, taken once however often the code that uses it runs."""
        self._count += 1
        name = f"%v{self._count}"
        self._entry.append(f"  {name} = alloca {type_}, i64 {count}, align {align}")
        return Value(name, "ptr")

    def sealed(self, a: Value) -> Value:
        lanes = lanes_of(a.type)
        if bits_of(a.type) == 16 and is_float(a.type):  # no registers of their own
            return self.cast("bitcast", self.sealed(self.cast("bitcast", a, vector("i16", lanes))), a.type)
        whole = lanes * max(1, _MIN_REGISTER_BITS // (lanes * bits_of(a.type)))
        if whole > lanes:
            wide = self.shuffle(a, a, [lane % lanes for lane in range(whole)])
            return self.shuffle(self.sealed(wide), wide, range(lanes))
        register = "v" if self.target.is_x86 else "w"
        return self.op(f'call {a.type} asm "", "={register},0"({a.typed})', a.type)

    def prefetch(self, pointer: Value, *, write: bool = False, locality: int = 3) -> None:
        self.module.declare("llvm.prefetch.p0", "void", ("ptr", "i32", "i32", "i32"))
        self.emit(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 {int(write)}, i32 {locality}, i32 1)")

    # -- calls --------------------------------------------------------------------------------------------
    def intrinsic(self, name: str, result: str, *arguments: Value) -> Value:
        """Call an intrinsic or outside function by its full name."""
        self.module.declare(name, result, tuple(a.type for a in arguments))
        listed = ", ".join(a.typed for a in arguments)
        return self.op(f"call {result} @{name}({listed})", result)

    def call(self, name: str, *arguments: Value, result: str = "void") -> Value | None:
        """Call a function of this module or, once it is linked, of another one."""
        if not self.module.defines(name):
            self.module.declare(name, result, tuple(a.type for a in arguments))
        listed = ", ".join(a.typed for a in arguments)
        if result == "void":
            self.emit(f"call void @{name}({listed})")
            return None
        return self.op(f"call {result} @{name}({listed})", result)

    # -- control flow -------------------------------------------------------------------------------------
    def _label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name
        self._known.clear()

    def _fresh(self) -> int:
        self._count += 1
        return self._count

    @contextlib.contextmanager
    def loop(self, lo: Index, hi: Index, step: Index = 1, carried: Sequence[Value] = ()) -> Iterator[Loop]:
        """`for i in range(lo, hi, step)`; `carried` are the initial values of what goes round the loop."""
        k, before = self._fresh(), self._block
        head, body, after = f"L{k}", f"B{k}", f"X{k}"
        loop = Loop(Value(f"%i{k}", "i64"), [Value(f"%c{k}_{j}", v.type) for j, v in enumerate(carried)])
        self.emit(f"br label %{head}")
        self._label(head)
        position = len(self._lines)
        self._lines.append("")  # the phis, known once the body is written
        test = self.op(f"icmp slt i64 {loop.i}, {hi}", "i1")
        self.emit(f"br i1 {test}, label %{body}, label %{after}")
        self._label(body)
        yield loop
        advanced, last = self.op(f"add nsw i64 {loop.i}, {step}", "i64"), self._block
        self.emit(f"br label %{head}")
        phis = [f"  {loop.i} = phi i64 [ {lo}, %{before} ], [ {advanced}, %{last} ]"]
        following = loop.carried if loop.following is None else loop.following
        for name, start, value in zip(loop.carried, carried, following, strict=True):
            phis.append(f"  {name} = phi {start.type} [ {start}, %{before} ], [ {value}, %{last} ]")
        self._lines[position] = "\n".join(phis)
        self._label(after)

    @contextlib.contextmanager
    def when(self, condition: Value, *, returns: bool = False, value: Value | None = None) -> Iterator[None]:
        """Run the body only if an `i1` is set; with `returns` the function ends after it, with a value."""
        k = self._fresh()
        self.emit(f"br i1 {condition}, label %T{k}, label %E{k}")
        self._label(f"T{k}")
        yield
        if returns:
            self.ret(value)
        else:
            self.emit(f"br label %E{k}")
        self._label(f"E{k}")

    @contextlib.contextmanager
    def branch_value(self, condition: Value, otherwise: Value) -> Iterator[_Branch]:
        """Compute a value only if an `i1` is set: the body sets `.value`, `.result()` is read after it."""
        k, before = self._fresh(), self._block
        branch = _Branch()
        self.emit(f"br i1 {condition}, label %T{k}, label %E{k}")
        self._label(f"T{k}")
        yield branch
        last = self._block
        self.emit(f"br label %E{k}")
        self._label(f"E{k}")
        text = f"phi {otherwise.type} [ {otherwise}, %{before} ], [ {branch.value}, %{last} ]"
        branch.value = self.op(text, otherwise.type)

    @contextlib.contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """Repeat the body; the yielded function leaves the loop if its `i1` is set."""
        k, exits = self._fresh(), 0
        self.emit(f"br label %L{k}")
        self._label(f"L{k}")

        def leave_if(condition: Value) -> None:
            nonlocal exits
            exits += 1
            self.emit(f"br i1 {condition}, label %X{k}, label %C{k}_{exits}")
            self._label(f"C{k}_{exits}")

        yield leave_if
        self.emit(f"br label %L{k}")
        self._label(f"X{k}")

    # -- memory that threads share -------------------------------------------------------------------------
    def atomic_load(self, pointer: Value) -> Value:
        """Load an `i64`; everything the storing thread did before is visible."""
        return self.op(f"load atomic i64, ptr {pointer} acquire, align 8", "i64")

    def atomic_store(self, value: Value, pointer: Value) -> None:
        """Store an `i64` after everything done before."""
        self.emit(f"store atomic {value.typed}, ptr {pointer} release, align 8")

    def atomic_add(self, pointer: Value, value: int) -> Value:
        """Add to an `i64`; returns what was there."""
        return self.op(f"atomicrmw add ptr {pointer}, i64 {value} seq_cst, align 8", "i64")

    def atomic_exchange(self, pointer: Value, value: int) -> Value:
        """Put an `i64` in place; returns what was there."""
        return self.op(f"atomicrmw xchg ptr {pointer}, i64 {value} seq_cst, align 8", "i64")

    def pause(self) -> None:
        if self.target.is_x86:
            self.module.declare("llvm.x86.sse2.pause", "void", ())
            self.emit("call void @llvm.x86.sse2.pause()")
        else:
            self.module.declare("llvm.aarch64.hint", "void", ("i32",))
            self.emit("call void @llvm.aarch64.hint(i32 1)")


class _Branch:
    value: Value | None = None

    def result(self) -> Value:
        assert self.value is not None
        return self.value


def natural_align(element: str) -> int:
    """Alignment that any array of this element type has, in bytes."""
    return 8 if element == "ptr" else ELEMENT_BYTES[element]
