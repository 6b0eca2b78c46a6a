"""Import gives, op by op, what the C++ passes in jaxlib give; where jaxlib lets itself be asked.

Programs with calls are left out: those passes end the process on some of them.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from mpmd import ir
from mpmd.errors import PassError
from tests.support.named_programs import NamedProgram, imported


@pytest.fixture(scope="module")
def partitioning() -> Any:
    jax_module = pytest.importorskip("jaxlib._jax")
    sys.modules.setdefault("jax.jaxlib._jax", jax_module)
    return pytest.importorskip("jaxlib._sdy_mpmd", exc_type=ImportError)


def oracle(program: NamedProgram, partitioning: Any, options: dict[str, bool]) -> ir.Module:
    module = ir.parse(program.text)
    main = ir.symbol_table(module)["main"]
    meshes = [(name, list(axes.items())) for name, axes in program.meshes.items()]
    nowhere: list[None] = [None]
    with ir.context():
        result = partitioning.apply_mpmd_partitioning(
            module,
            "main",
            meshes,
            program.assignment,
            nowhere * len(main.args),
            nowhere * len(main.returned),
            [],
            partitioning_options=options,
            fragment_merge_rules=[],
            fragment_schedule_rules=[],
            phases=partitioning.PartitioningPhase.IMPORT,
        )
    return ir.parse(str(result.mpmd_module))


def text_of(module: ir.Module) -> str:
    return re.sub(r"^module[^{]*\{", "module {", ir.to_text(module))


def has_broadcast(program: NamedProgram) -> bool:
    """We use a transfer that a broadcast made for other uses of the value too; the C++ makes another."""
    return "mpmd.broadcast" in program.text


@pytest.mark.parametrize("seed", range(30))
def test_with_transfers(seed: int, partitioning: Any) -> None:
    program = NamedProgram(seed, meshes=2 + seed % 2, size=6 + seed % 10)
    want = oracle(program, partitioning, {"mpmd_infer_transfers": True})
    got = imported(program, infer_transfers=True)
    if has_broadcast(program):
        transfers = [len(ir.ops(ir.symbol_table(m)["main"], ir.Transfer)) for m in (got, want)]
        assert transfers[0] <= transfers[1]
    if not has_broadcast(program) or transfers[0] == transfers[1]:
        assert text_of(got) == text_of(want), program.text


@pytest.mark.parametrize("seed", range(30))
def test_without_transfers(seed: int, partitioning: Any) -> None:
    """Both fail, or both give the same program."""
    program = NamedProgram(100 + seed, meshes=2 + seed % 2, size=6 + seed % 10)
    try:
        want = text_of(oracle(program, partitioning, {}))
    except RuntimeError:
        with pytest.raises(PassError):
            imported(program)
        return
    assert text_of(imported(program)) == want, program.text
