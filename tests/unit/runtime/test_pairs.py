"""Orders of pairs: of pipelines and of random programs, in which every process waits for every other end."""

import dataclasses
import itertools

import pytest

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.errors import ProgramError
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.order import issue_order
from mpmd.runtime.program.pairs import PairOrder, check_pairs, order_pairs
from mpmd.runtime.program.streams import Recv, Run, Send, reads
from mpmd.runtime.program.verify_streams import verify
from tests.support.pairs_in_processes import all_pairs, random_program


def ordered(program, paired=None):
    order = verify(program)
    return order, order_pairs(program, order, all_pairs(program) if paired is None else paired)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_issues_its_pairs_by_when_values_are_there(stages):
    program = linearize(one_f_one_b(stages, 5), processes={f"m{k}": (k,) for k in range(stages)})
    order, found = ordered(program)
    rank = {node: k for k, node in enumerate(issue_order(program, order))}
    sends = [rank[pair.send] for pair in found.pairs]
    assert sends == sorted(sends) and len(sends) >= 2 * 5 * (stages - 1)
    for process, nodes in found.issued.items():
        (s,) = {s for s, _ in nodes}
        ops = [program.streams[s].instructions[at] for _, at in nodes]
        assert sorted(at for _, at in nodes) == list(range(len(nodes)))
        runs = [k for k, op in enumerate(ops) if isinstance(op, Run)]
        for k, op in enumerate(ops):
            if isinstance(op, Recv):
                reader = next(r for r in range(k + 1, len(ops)) if op.buffer in reads(ops[r]))
                assert k < reader
        sent = [k for k, op in enumerate(ops) if isinstance(op, Send)]
        assert all(any(ops[k].buffer in ops[r].outputs for r in runs if r < k) for k in sent), process


def test_receives_are_posted_a_task_early_where_the_order_leaves_room():
    """The last stage of three asks for the next microbatch before it computes one."""
    program = linearize(one_f_one_b(3, 6), processes={f"m{k}": (k,) for k in range(3)})
    _, found = ordered(program)
    ops = [program.streams[s].instructions[at] for s, at in found.issued[2]]
    forward = [k for k, op in enumerate(ops) if isinstance(op, Run) and op.phase == "F"]
    early = 0
    for k, op in enumerate(ops):
        if isinstance(op, Recv):
            reader = next(r for r in range(k + 1, len(ops)) if op.buffer in reads(ops[r]))
            early += any(k < r < reader for r in range(len(ops)) if isinstance(ops[r], Run))
    assert forward and early >= 3


def test_random_programs_have_an_order_and_another_one_is_found_out():
    """Two ends that change places in one process are an error that names what waits."""
    pairs = refused = 0
    for seed in range(82):
        program = random_program(seed)
        order, found = ordered(program)
        pairs += len(found.pairs)
        some = {key for key in all_pairs(program) if hash((seed, key)) % 3}
        assert len(ordered(program, some)[1].pairs) == len(some)
        ends = {node for pair in found.pairs for node in (pair.send, pair.recv)}
        for process, nodes in found.issued.items() if seed < 40 else ():
            places = [k for k, node in enumerate(nodes) if node in ends]
            for a, b in itertools.pairwise(places):
                swapped = list(nodes)
                swapped[a], swapped[b] = swapped[b], swapped[a]
                other = PairOrder(found.pairs, {**found.issued, process: tuple(swapped)})
                with pytest.raises(ProgramError, match="no order in which all processes can exchange"):
                    check_pairs(program, order, other)
                refused += 1
    assert pairs > 200 and refused > 200


def test_a_pair_within_a_process_is_refused():
    b = GraphBuilder()
    b.output(*b.call("g", "b", [b.transfer(*b.call("f", "a", [b.input("a")]), "b")]))
    program = linearize(b.graph(), processes={"a": (0,), "b": (0,)})
    order = verify(program)
    with pytest.raises(ProgramError, match="process 0 waits at"):
        order_pairs(program, order, {(0, 0)})
    assert dataclasses.replace(order_pairs(program, order, ())).pairs == ()
