"""Memory of programs that change arrays which others still read; damaged text."""

import jax
import pytest

from mpmd.compile.hlo import parse_module, print_module, verify
from mpmd.errors import HloError
from tests.support import native_fragments
from tests.support.directed import seeds
from tests.support.directed.hlotext import damaged_text, memory_case
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import compile_module, quick_code
from tests.support.random_hlo import differences


def shares_memory(made) -> bool:
    """Whether two values of a program have one place in memory."""
    places = [(s.allocation, s.offset) for s in made.assignment.slices.values() if s.size]
    return len(set(places)) < len(places)


def run_all(cases) -> None:
    """None may differ, and at least half of the programs share memory between values."""
    shared, problems = [], []
    with quick_code():
        for case, donated in cases:
            fragment, made = compile_module(case.module, donated=donated)
            shared.append(shares_memory(made))
            got = native_fragments.run(fragment, case.arguments, made)
            wanted = jax.tree.leaves(evaluate(case.module, case.arguments))
            problem = differences(got, wanted, case)
            problems += [f"{case.name}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)
    assert sum(shared) * 2 >= len(shared)


def check_text(text: str) -> bool:
    """A damaged text is refused with its place, or reads, prints and reads again; whether it is read."""
    try:
        module = parse_module(text, "damaged")
    except HloError as error:
        assert str(error).startswith("damaged:") and str(error).splitlines()[-1].strip() == "^", str(error)
        return False
    try:
        verify(module)
    except HloError:
        return True
    printed = print_module(module)
    assert print_module(parse_module(printed)) == printed
    return True


def test_values_keep_their_memory_until_the_last_reader():
    run_all(memory_case(seed) for seed in seeds(40))


def test_damaged_text_is_refused_with_its_place_or_prints_again():
    read = [check_text(damaged_text(seed)) for seed in seeds(150)]
    assert 0 < sum(read) < len(read)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_many_programs(part):
    run_all(memory_case(seed) for seed in seeds(2_000)[part * 100 : (part + 1) * 100])


@pytest.mark.slow
def test_much_damaged_text():
    for seed in seeds(20_000):
        check_text(damaged_text(seed))
