"""Machine code as instructions with counts, from listings that are written here."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpmd.compile.backends.native_gpu.machine.disassembly import (
    MachineCode,
    machine_loops,
    parsed,
    source_counts,
)
from mpmd.compile.backends.native_gpu.machine.execution import RATES, profile, tensor_flops

SOURCE = """@triton.jit
def sums(p0, p1):
    pid = tl.program_id(0)
    a = 0.0
    for r0 in range(0, 96, 4):
        a += tl.load(p0 + r0)
    tl.store(p1 + pid, a)
"""
FREE = 7 << 5 | 7 << 8
"""Control bits of an instruction that sets no barrier."""


def listing(*rows):
    """The disassembler's text: `(line of the source, label, instruction, control bits)`."""
    found, address = [".text.sums:"], 0
    for line, label, text, control in rows:
        if label:
            found.append(f"{label}:")
        found.append(f'\t//## File "<kernels 12>", line {line}')
        found.append(f"        /*{address:04x}*/                   {text} ;      /* 0x00000a00ff017b82 */")
        found.append(f"                                     /* 0x{control << 41:016x} */")
        address += 16
    return "\n".join(found)


LOOP = listing(
    (2, "", "LDC R1, c[0x0][0x28]", FREE | 8),
    (6, ".L_x_0", "LDG.E.128 R8, desc[UR8][R34.64]", 2 << 5 | 7 << 8 | 1),
    (5, "", "UIADD3 UR4, UP0, UR4, 0x18, URZ", FREE | 1),
    (5, "", "UISETP.GE.U32.AND UP0, UPT, UR4, 0x48, UPT", FREE | 1),
    (5, "", "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0", FREE | 4),
    (6, "", "FADD R4, R8, R4", FREE | 1 << 13 | 4),
    (5, "", "@!P0 BRA `(.L_x_0)", FREE | 5),
    (7, "", "STG.E desc[UR8][R2.64], R4", FREE | 1),
    (7, "", "EXIT", FREE | 5),
    (0, ".L_x_9", "RET.REL.NODEC R2 `(sums)", FREE | 5),
)


def code():
    instructions, labels = parsed(LOOP)
    return MachineCode(instructions, ((labels[".L_x_0"], 6),), 40, 0)


def test_instructions_with_their_lines_widths_and_control_bits():
    found, labels = parsed(LOOP)
    assert [i.base for i in found][-2:] == ["STG", "EXIT"], "the program ends there"
    assert labels[".L_x_0"] == 1
    load, add, branch = found[1], found[5], found[6]
    assert (load.opcode, load.width, load.line, load.sets, load.stall) == ("LDG.E.128", 16, 6, (2, -1), 1)
    assert add.waits == 1 << 2 and add.stall == 4 and branch.predicate == "!P0"


def test_counts_of_a_text():
    counts = source_counts(SOURCE, 8)
    (loop,) = counts.loops
    assert (loop.first, loop.last, loop.times, loop.step) == (5, 6, 24.0, 4)
    (said,) = source_counts(SOURCE.replace("(0, 96, 4):", "(b, e, 4):  # 8.5 times"), 8).loops
    assert said.times == 8.5
    (unknown,) = source_counts(SOURCE.replace("(0, 96, 4):", "(b, e, 4):"), 8).loops
    assert unknown.times is None


def test_parts_of_a_group_are_run_by_their_share_of_the_programs():
    text = "\n".join(
        [
            "def part_a(p, program):",
            "    tl.store(p, 1)",
            "def group(p0):",
            "    pid = tl.program_id(0)",
            "    if (pid >= 4) & (pid < 10):",
            "        part_a(p0, pid - 4)",
        ]
    )
    assert source_counts(text, 12).share(2) == 0.5
    assert source_counts(text, 12).share(4) == 1.0


@pytest.mark.parametrize("step, times", [("0x4", 24.0), ("0x8", 12.0), ("0x18", 4.0)])
def test_a_loop_that_does_several_iterations_at_once(step, times):
    instructions, _ = parsed(LOOP.replace("0x18", step))
    (loop,) = machine_loops(MachineCode(instructions, ((1, 6),), 40, 0), source_counts(SOURCE, 8))
    assert loop.times == times and loop.known


def test_a_counter_may_be_in_a_register_that_something_else_is_added_to():
    text = LOOP.replace("UR4, UP0, UR4, 0x18, URZ", "UR4, UP0, UR7, 0x4, URZ")
    text = text.replace("FADD R4, R8, R4", "UIADD3 UR4, UR4, 0x18, URZ")
    (loop,) = machine_loops(MachineCode(parsed(text)[0], ((1, 6),), 40, 0), source_counts(SOURCE, 8))
    assert loop.times == 24 and loop.known


def test_a_loop_of_unknown_length_says_so():
    (loop,) = machine_loops(code(), source_counts(SOURCE.replace("96", "n"), 8))
    assert (loop.times, loop.known) == (1.0, False)


def test_what_a_program_takes_of_each_pipe():
    found = profile(code(), source_counts(SOURCE, 8), 2, RATES[90])
    warps, loops = 2, 4
    assert found.cycles["fma"] == warps * loops / 4
    assert found.cycles["issue"] == warps * (loops * 6 + 3) / 4
    assert found.widths == {4: warps * 32, 16: warps * loops * 32}
    assert found.global_bytes == warps * 32 * (16 * loops + 4)
    assert not found.matrix and not found.asynchronous


def test_a_warp_waits_for_what_it_loads_in_each_iteration():
    found = profile(code(), source_counts(SOURCE, 8), 2, RATES[90])
    latency = RATES[90].latency["LDG"]
    assert 4 * latency < found.alone < 4 * (latency + 40)
    free = parsed(LOOP.replace(f"0x{(FREE | 1 << 13 | 4) << 41:016x}", f"0x{(FREE | 4) << 41:016x}"))[0]
    other = profile(MachineCode(free, ((1, 6),), 40, 0), source_counts(SOURCE, 8), 2, RATES[90])
    assert other.alone < latency, "nothing waits for a barrier then"


@pytest.mark.parametrize(
    "opcode, flops",
    [("HGMMA.64x128x16.F32.BF16", 2 * 16 * 128 * 16), ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16), ("FADD", 0)],
)
def test_products_of_a_warp(opcode, flops):
    (found,), _ = parsed(listing((1, "", f"{opcode} R4, R8, R4", FREE | 1)))
    assert tensor_flops(found) == flops


def test_texts_of_kernels_are_read_in_many_threads():
    body = "\n".join(f"        v{k} = ((((v + {k}) * 2.0) - 1.0) / (v + 3.0))" for k in range(200))
    sources = [f"def kernel_{n}(v):\n    for k in range(0, 12, 4):\n{body}\n" for n in range(16)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda source: source_counts(source, 1), sources))
    finally:
        sys.setswitchinterval(interval)
    assert [[loop.times for loop in each.loops] for each in found] == [[3.0]] * 16
