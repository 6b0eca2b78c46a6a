"""HLO text with one number replaced: it is read and has a meaning, or a diagnostic refuses it."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import HloModule, parse_module, print_module, verify
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError, MpmdError
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import fragment_of_module
from tests.support.random_hlo import FAMILIES, random_case

NUMBER = re.compile(r"(?<![\w.%\"-])-?\d+(?![\w.\"])|(?<=[_x])-?\d+(?=[_ x}])")
VALUES = (0, -1, 1, 2, 3, 7, 2**31, -(2**31) - 1, 2**63 - 1, 2**64)
SMALL = 1 << 22
"""Bytes of an array that a test computes."""

EXTRA = (
    """add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
ENTRY main {
  x = f32[4,8]{1,0} parameter(0)
  g = f32[8,8]{1,0} all-gather(x), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0},
    use_global_device_ids=true
  s = f32[4,8]{1,0} reduce-scatter(g), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0},
    use_global_device_ids=true, to_apply=add
  m = f32[4,8]{1,0} all-reduce(s), channel_id=3, replica_groups=mesh['x'=2,'y'=2] {'x'},
    use_global_device_ids=true, to_apply=add
  ROOT p = f32[4,8]{1,0} collective-permute(m), channel_id=4, source_target_pairs={{0,1},{1,0}}
}""",
)


def programs() -> list[str]:
    """One text per family of operations, and of what the families do not have."""
    made = [print_module(random_case(family, 3).module) for family in FAMILIES]
    return [*(text.split("\n", 1)[1] for text in made), *EXTRA]


def changed(seed: int, texts: list[str]) -> str:
    """A program with one number replaced, constants aside."""
    rng = np.random.default_rng([seed, 61])
    text = texts[seed % len(texts)]
    lines = text.split("\n")
    spots = [
        (n, m.span())
        for n, line in enumerate(lines)
        if "constant(" not in line
        for m in NUMBER.finditer(line)
    ]
    number, (start, end) = spots[int(rng.integers(len(spots)))]
    value = VALUES[int(rng.integers(len(VALUES)))]
    lines[number] = f"{lines[number][:start]}{value}{lines[number][end:]}"
    return "HloModule m\n" + "\n".join(lines)


def zeros(shape: Shape):
    if shape.is_tuple:
        return tuple(map(zeros, shape.elements))
    return np.zeros(shape.dims, shape.numpy_dtype)


def read(text: str) -> HloModule | None:
    """The module, None if it is refused."""
    try:
        module = parse_module(text)
        print_module(module)
        verify(module)
    except HloError:
        return None
    return module


def goes_through(text: str, native: bool) -> bool:
    """Whether a text is a program; anything but a diagnostic fails."""
    module = read(text)
    if module is None:
        return False
    steps = any(c.opcode == "while" for c in module.instructions())  # one number may make it very long
    if not steps and max(i.shape.byte_size for i in module.instructions()) < SMALL:
        with contextlib.suppress(HloError):
            evaluate(module, [zeros(p.shape) for p in module.entry.parameters])
    if native:
        with contextlib.suppress(MpmdError):
            prepare_fragment(fragment_of_module(module), NativeCpu(), module=module.clone())
    return True


def test_a_replaced_number_never_ends_in_a_traceback():
    texts = programs()
    valid = [goes_through(changed(seed, texts), native=seed % 4 == 0) for seed in range(600)]
    assert 30 < sum(valid) < 300, "the replaced numbers leave too few programs valid, or too many"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_replaced_numbers():
    texts = programs()
    for seed in range(1000, 12000):
        goes_through(changed(seed, texts), native=seed % 8 == 0)
