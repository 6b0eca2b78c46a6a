"""Invariants of every module between passes; all violations are reported together.

The verifier infers all shapes again, and counts both sides of every edge.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpmd.compile.hlo.collective_groups import check_collective
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import check_literal
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import OPCODES
from mpmd.compile.hlo.printer import print_instruction
from mpmd.compile.hlo.shape_inference import infer_instruction
from mpmd.compile.hlo.text import located
from mpmd.errors import HloError, collect

_LIMIT = 20


def verify(module: HloModule, layouts: bool = False) -> None:
    """Check a module.

    Args:
        module: the module.
        layouts: every array must have a layout (true after layout assignment).

    Raises:
        HloError: a rule is broken; names up to 20 violations, each with its instruction.
    """
    problems: list[str] = []
    for problem in _problems(module, layouts):
        problems.append(problem)
        if len(problems) >= _LIMIT:
            break
    if problems:
        raise collect(HloError, problems, f"module {module.name} breaks {len(problems)} rules:")


def _problems(module: HloModule, layouts: bool) -> Iterator[str]:
    if not module.has_entry:
        yield f"module {module.name} has no entry computation"
        return
    sound = True
    for computation in module.computations:
        for problem in _structure(computation):
            sound = False
            yield problem
    if not sound:
        return
    try:
        order = module.call_order()
    except HloError as error:
        yield str(error)
        return
    for computation in order:
        yield from _order(computation)
        yield from _shapes(computation, layouts)
    yield from _calls(module)
    yield from _names(module)
    yield from _interface(module)


# -- structure --------------------------------------------------------------------------------------


def _structure(computation: HloComputation) -> Iterator[str]:
    if not computation.has_root:
        yield f"computation {computation.name} has no root"
    elif computation.root not in computation:
        yield f"computation {computation.name}: its root {computation.root.name} is not in it"
    for instruction in computation:
        yield from (_at(instruction, problem) for problem in _edges(computation, instruction))


def _edges(computation: HloComputation, instruction: HloInstruction) -> Iterator[str]:
    if instruction.computation is not computation:
        yield f"it is in {computation.name}, but its computation is not set"
    if instruction.opcode not in OPCODES:
        yield f"unknown opcode {instruction.opcode!r}"
        return
    for operand in instruction.operands:
        if operand.computation is not computation:
            yield f"its operand {operand.name} is in another computation, or was removed"
        elif operand.users.get(instruction) != instruction.operands.count(operand):
            yield f"its operand {operand.name} does not count it as a user"
    for user, count in instruction.users.items():
        if user.computation is not computation:
            yield f"its user {user.name} is in another computation, was removed, or was never added"
        elif user.operands.count(instruction) != count:
            yield (
                f"it counts {user.name} as a user {count} times, which reads it "
                f"{user.operands.count(instruction)} times"
            )
    for before in instruction.control_predecessors:
        if before.computation is not computation or instruction not in before.control_successors:
            yield f"its control predecessor {before.name} does not know it"
    for after in instruction.control_successors:
        if after.computation is not computation or instruction not in after.control_predecessors:
            yield f"its control successor {after.name} does not know it"
    for callee in instruction.called:
        if callee.callers.get(instruction) != instruction.called.count(callee):
            yield f"the computation {callee.name} does not count it as a caller"


def _order(computation: HloComputation) -> Iterator[str]:
    computation.forget_order()  # an unreported change must not hide a cycle
    try:
        computation.post_order()
    except HloError as error:
        yield str(error)
        return
    if computation.module.is_scheduled:
        done: set[HloInstruction] = set()
        for instruction in computation:
            late = next(
                (o for o in (*instruction.operands, *instruction.control_predecessors) if o not in done), None
            )
            if late is not None:
                yield _at(instruction, f"the schedule runs it before {late.name}, which it needs")
            done.add(instruction)
    numbers = [p.parameter_number for p in computation.parameters]
    if numbers != list(range(len(numbers))):
        yield (
            f"computation {computation.name}: its parameters are numbered {numbers}, expected 0 to "
            f"{len(numbers) - 1}"
        )


# -- operations -------------------------------------------------------------------------------------


def _shapes(computation: HloComputation, layouts: bool) -> Iterator[str]:
    for instruction in computation:
        for problem in _operation(instruction):
            yield _at(instruction, problem)
        if layouts and not instruction.shape.has_layouts:
            yield _at(instruction, f"{instruction.shape} has no layout")


def _operation(instruction: HloInstruction) -> Iterator[str]:
    info = instruction.info
    count = len(instruction.operands)
    if count < info.least or (info.most is not None and count > info.most):
        yield (
            f"{info.name} takes {info.least if info.least == info.most else f'{info.least} or more'} "
            f"operands, got {count}"
        )
        return
    missing = [s.name for s in info.specs if s.required and s.name not in instruction.attributes]
    if missing:
        yield f"{info.name} needs the attribute {missing[0]}"
        return
    fixed = info.called and info.name not in ("conditional", "custom-call")
    if fixed and len(instruction.called) != len(info.called):
        yield (
            f"{info.name} calls {len(info.called)} computations ({', '.join(info.called)}), got "
            f"{len(instruction.called)}"
        )
        return
    try:
        inferred = infer_instruction(instruction)
    except HloError as error:
        yield str(error)
        return
    if inferred.logical is not instruction.shape.logical:
        yield f"its shape should be {inferred}, but is {instruction.shape.logical}"
        return
    wrong = ""
    if "replica_groups" in info.keyed:
        module = instruction.parent.module
        wrong = check_collective(instruction, module.replica_count, module.num_partitions)
    if info.name == "constant":
        wrong = (
            "it has no literal"
            if instruction.literal is None
            else check_literal(instruction.literal, instruction.shape)
        )
    if wrong:
        yield wrong


# -- module -----------------------------------------------------------------------------------------

_DONE = {
    "all-reduce-done": "all-reduce-start",
    "all-gather-done": "all-gather-start",
    "collective-permute-done": "collective-permute-start",
    "copy-done": "copy-start",
    "send-done": "send",
    "recv-done": "recv",
}


def _calls(module: HloModule) -> Iterator[str]:
    started: dict[HloComputation, HloInstruction] = {}
    for instruction in module.instructions():
        if instruction.opcode == "async-start" and instruction.called:
            first = started.setdefault(instruction.called[0], instruction)
            if first is not instruction:
                yield _at(instruction, f"{first.name} starts the same computation")
        expected = _DONE.get(instruction.opcode)
        if expected is not None and instruction.operands[0].opcode != expected:
            operand = instruction.operands[0]
            problem = f"{instruction.opcode} must take a {expected}, got {operand.opcode} {operand.name}"
            yield _at(instruction, problem)
        if instruction.opcode in ("async-update", "async-done"):
            operand = instruction.operands[0]
            if operand.opcode not in ("async-start", "async-update"):
                problem = (
                    f"{instruction.opcode} must take an async-start, got {operand.opcode} {operand.name}"
                )
                yield _at(instruction, problem)
            elif instruction.attributes.get("async_execution_thread") not in (None, _thread(operand)):
                yield _at(instruction, f"{operand.name} runs on the thread {_thread(operand)!r}")
    if module.entry.callers:
        caller = next(iter(module.entry.callers))
        yield _at(caller, f"it calls the entry computation {module.entry.name}")


def _thread(instruction: HloInstruction) -> object:
    while instruction.opcode == "async-update":
        instruction = instruction.operands[0]
    return instruction.attributes.get("async_execution_thread", "main")


def _names(module: HloModule) -> Iterator[str]:
    for computation in module.computations:
        seen: set[str] = set()
        for instruction in computation:
            if instruction.name in seen:
                yield f"computation {computation.name}: two instructions are named {instruction.name}"
            seen.add(instruction.name)


def _interface(module: HloModule) -> Iterator[str]:
    parameters = module.entry.parameters
    if module.parameter_layouts is not None:
        stated = [s.logical for s in module.parameter_layouts]
        if stated != [p.shape.logical for p in parameters]:
            yield (
                f"module {module.name}: its entry layouts do not fit the parameters "
                f"{module.entry.signature()}"
            )
    if (
        module.result_layout is not None
        and module.result_layout.logical is not module.entry.root.shape.logical
    ):
        yield (
            f"module {module.name}: the result's layout {module.result_layout} does not fit "
            f"{module.entry.root.shape}"
        )
    for alias in module.input_output_alias:
        try:
            output = module.entry.root.shape.subshape(alias.output_index)
            if not 0 <= alias.parameter < len(parameters):
                raise HloError(f"there is no parameter {alias.parameter}")
            source = parameters[alias.parameter].shape.subshape(alias.parameter_index)
        except HloError as error:
            yield f"module {module.name}: alias {alias} names nothing: {error}"
            continue
        if output.byte_size != source.byte_size:
            yield f"module {module.name}: alias {alias} joins {source} and {output}, which differ in size"
    for donor in module.buffer_donor:
        if not 0 <= donor.parameter < len(parameters):
            yield (
                f"module {module.name}: buffer donor {donor} names no parameter; there are {len(parameters)}"
            )


def _at(instruction: HloInstruction, problem: str) -> str:
    """The problem with its line of the text that was read, or with the instruction's print."""
    computation = instruction.computation
    inside = computation.name if computation is not None else "no computation"
    message = f"{instruction.opcode} {instruction.name} in {inside}: {problem}"
    source = computation.module.source if computation is not None else None
    if source is not None and instruction in source.places:
        return located(source.text, source.places[instruction], message, source.name)
    if instruction.opcode not in OPCODES or (
        instruction.opcode == "constant" and instruction.literal is None
    ):
        return message  # which cannot be printed
    return f"{message}\n    {print_instruction(instruction)[:300]}"
