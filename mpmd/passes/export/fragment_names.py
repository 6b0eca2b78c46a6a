"""Names of exported programs: `p3_block_0:3_bwd_calls0to7` says what it is, from where, and for whom."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from mpmd import ir

MAX_LENGTH = 200
_ELLIPSIS = "<...>"


@dataclasses.dataclass(frozen=True)
class FragmentOrigin:
    """What the name of a program says of one fragment that it is made for."""

    origins: tuple[ir.Origin, ...]
    stage: int | None
    call_counter: int | None

    @staticmethod
    def of(fragment: ir.Fragment) -> FragmentOrigin:
        """The site that a fragment is."""
        return FragmentOrigin(tuple(fragment.origins), fragment.stage, fragment.call_counter)

    @property
    def counts(self) -> list[int]:
        """The transpose counts of its origins, ascending."""
        return sorted({o.transpose_count for o in self.origins})


def has_transposed(sites: Iterable[FragmentOrigin]) -> bool:
    """Whether some computation was transposed, so that names must tell forward from backward."""
    return any(count for site in sites for count in site.counts)


def fragment_name(number: int, sites: Sequence[FragmentOrigin], transposed: bool) -> str:
    """The name of program `number`, after its first site; at most 200 characters."""
    works = [[_what(site), *(map(_phase, site.counts) if transposed else ())] for site in sites]
    parts = [f"p{number}", *works[0]]
    if all(work == works[0] for work in works):
        parts += _calls([site.call_counter for site in sites])
    name = "_".join(parts)
    return name if len(name) <= MAX_LENGTH else name[: MAX_LENGTH - len(_ELLIPSIS)] + _ELLIPSIS


def site_text(site: FragmentOrigin, transposed: bool) -> str:
    """`origins [f(fwd), g(fwd)], stage 1, call counter 0`."""
    suffix = (lambda o: f"({_phase(o.transpose_count)})") if transposed else (lambda o: "")
    text = f"origins [{', '.join(o.name + suffix(o) for o in site.origins)}]"
    if site.stage is not None:
        text += f", stage {site.stage}"
    if site.call_counter is not None:
        text += f", call counter {site.call_counter}"
    return text


def _phase(count: int) -> str:
    return {0: "fwd", 1: "bwd"}.get(count, f"transpose{count}")


def _what(site: FragmentOrigin) -> str:
    """The stage; or the name that most origins have, with the counters found behind it."""
    if site.stage is not None:
        return f"stage{site.stage}"
    if not site.origins:
        return "inferred"
    split = [_name_and_counter(o.name) for o in site.origins]
    votes = collections.Counter(name for name, _ in split)
    name = min(votes, key=lambda n: (-votes[n], n))
    text = name + _counters(sorted({c for n, c in split if n == name and c is not None}), site.counts == [1])
    return text if len(votes) == 1 else text + "..."


def _name_and_counter(name: str) -> tuple[str, int | None]:
    """`block_3` is number 3 of the blocks; a name without a number behind its last underscore is itself."""
    found = re.fullmatch(r"(.*)_(\d+)", name, re.DOTALL)
    return (found[1], int(found[2])) if found else (name, None)


def _counters(found: Sequence[int], backward: bool) -> str:
    if not found:
        return ""
    first, last = (found[-1], found[0]) if backward else (found[0], found[-1])
    return f"_{first}" if first == last else f"_{first}:{last}"


def _calls(counters: Sequence[int | None]) -> list[str]:
    """Which microbatches a program is for, if that can be said in a word."""
    first, last = counters[0], counters[-1]
    if first is None or last is None:
        return []
    if len(counters) == 1:
        return [f"call{first}"]
    if list(counters) == list(range(first, last + 1)):
        return [f"calls{first}to{last}"]
    if list(counters) == list(range(first, last - 1, -1)):
        return [f"calls{first}from{last}"]
    return []
