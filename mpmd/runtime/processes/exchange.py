"""The one way in which processes share texts: an exchange, which announces itself.

    with world.exchange("fetch 3", Alike("fetches other arrays", text)) as exchange:
        texts = exchange.gather("mine")

All processes must come to the same exchanges in the same order, do them alike, and end them alike.  If one
comes to something else, does it otherwise, or leaves by an exception of its own, all raise a PeerError.
Beside the program, versions and settings of JAX decide about numbers: `settings_text` has them.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from mpmd import jax_distributed
from mpmd.errors import MpmdError, PeerError
from mpmd.runtime.processes.store import Mail, Turns
from mpmd.version import __version__

if TYPE_CHECKING:
    from mpmd.runtime.processes.world import World


_ADDRESS = re.compile(r"\b0x[0-9a-f]{4,}\b")


def settings_text() -> str:
    """Versions and settings of this process, one a line; equal texts give equal numbers."""
    lines = [f"mpmd {__version__}", *jax_distributed.versions_and_settings()]
    return "".join(f"{line}\n" for line in lines)


def without_addresses(text: str) -> str:
    """A text in which Python objects are printed without their addresses, which differ between processes."""
    return _ADDRESS.sub("0x", text)


_SHOWN = 300
"""Characters of a line that an error shows."""


@dataclasses.dataclass(frozen=True)
class Alike:
    """What must be equal in all processes.

    Attributes:
        differs: what a process does in which it is another: `runs another program`.
        text: in lines; the first that differs is shown.
        advice: what to do then.
    """

    differs: str
    text: str
    advice: str = "every process must call it with the same arguments, in the same order"


class WorldExchange:
    """The texts of all processes at one place of the program; `World.exchange` makes it.

    Attributes:
        world: the processes.
        number: of all their exchanges.
        what: its name.
        settled: whether an exception that leaves it is raised by all processes.
    """

    def __init__(self, world: World, mail: Mail, number: int, what: str) -> None:
        self.world, self._mail, self.number, self.what = world, mail, number, what
        self._parts = itertools.count()
        self.settled = False

    def gather(self, text: str) -> list[str]:
        """The texts of all processes, by index; all must call it.

        Raises:
            PeerError: a process failed or ended meanwhile, or is in another exchange.
        """
        part = next(self._parts)
        texts = self._mail.swap(f"exchange/{self.number}/{part}", f"{self.what}\n{text}")
        announced = [text.partition("\n") for text in texts]
        for process, (what, _, _) in enumerate(announced):
            if what != announced[0][0]:
                raise self.world.differ(process, f"began {what}, where process 0 began {announced[0][0]}")
        return [text for _, _, text in announced]

    def gather_json(self, value: Any) -> list[Any]:
        """The same for values that JSON can express; compressed, because the store carries short texts."""
        return [_unpacked(text) for text in self.gather(_packed(value))]

    def compare(self, alike: Alike) -> None:
        """Raises a PeerError in all processes if something differs that must be equal."""
        hashes = self.gather(hashlib.sha256(alike.text.encode()).hexdigest())
        other = next((process for process, hashed in enumerate(hashes) if hashed != hashes[0]), None)
        if other is None:
            return
        texts = self.gather_json(alike.text if self.world.index in (0, other) else "")
        self.settled = True
        raise PeerError(_difference(other, texts[0], texts[other], alike))

    def together(self, act: Callable[[], Any], kind: type[MpmdError] = PeerError) -> list[Any]:
        """What `act` returns in every process, through JSON; fails in all if it fails in one.

        Raises:
            PeerError: a process failed meanwhile.
            MpmdError: of `kind`: `act` failed in another process; if it failed here, its exception.
        """
        cause: Exception | None = None
        try:
            outcome = {"value": act()}
            packed = _packed(outcome)
        except PeerError:
            raise
        except Exception as error:
            cause = error
            packed = _packed({"error": f"{type(error).__name__}: {error}", "own": isinstance(error, kind)})
        of_all = [_unpacked(text) for text in self.gather(packed)]
        failed = next((process for process, other in enumerate(of_all) if "error" in other), None)
        if failed is None:
            return [other["value"] for other in of_all]
        self.settled = True
        if cause is not None:
            raise cause
        host, text = self.world.hosts.get(failed, ""), of_all[failed]["error"]
        text = text.partition(": ")[2] if of_all[failed]["own"] else f"failed in {self.what}: {text}"
        raise kind(f"process {failed} (host {host!r}){':' if of_all[failed]['own'] else ''} {text}")

    def put(self, name: str, text: str) -> None:
        """Writes a text that one other process takes.

        Raises:
            PeerError: the coordinator is lost.
        """
        self._mail.put(f"exchange/{self.number}/{name}", text)

    def take(self, name: str) -> str:
        """Waits for a text that another process puts, and removes it.

        Raises:
            PeerError: a process failed or ended meanwhile.
        """
        return self._mail.take(f"exchange/{self.number}/{name}")

    def turns(self, name: str, others: Collection[int]) -> Turns:
        """Where some processes wait for each other in steps, which announce themselves."""
        return Turns(self._mail.meet, f"meeting/{self.number}/{name}", others)


def _packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _difference(other: int, ours: str, theirs: str, alike: Alike) -> str:
    pairs = itertools.zip_longest(ours.split("\n"), theirs.split("\n"), fillvalue="(it ends here)")
    number, (first, second) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return (
        f"process {other} {alike.differs} than process 0\n"
        f"  the first line that differs is line {number}\n"
        f"    process 0: {first.strip()[:_SHOWN]}\n"
        f"    process {other}: {second.strip()[:_SHOWN]}\n"
        f"  {alike.advice}"
    )
