"""Two network namespaces with a cable between them, in place of two hosts: no latency, no loss.

Both keep the name of this machine, which stands for an address that only each itself reaches.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_ALIVE_SECONDS = "300"


class NoNamespaces(Exception):
    """This machine does not let us make network namespaces."""


def _in(pid: int, *command: str) -> None:
    entered = ["nsenter", "-t", str(pid), "-n", *command]
    done = subprocess.run(entered, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """For each host the beginning of a command that runs there; `ADDRESSES` are theirs.

    Raises:
        NoNamespaces: this machine does not allow it.
    """
    keepers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in ADDRESSES:
            keepers.append(subprocess.Popen(["unshare", "-n", "sleep", _ALIVE_SECONDS]))
        first, second = (keeper.pid for keeper in keepers)
        own = os.readlink("/proc/self/ns/net")
        until = time.monotonic() + 5
        while any(os.readlink(f"/proc/{pid}/ns/net") == own for pid in (first, second)):
            if time.monotonic() > until or any(keeper.poll() is not None for keeper in keepers):
                raise NoNamespaces("unshare -n is not permitted")
            time.sleep(0.02)
        _in(first, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "end")
        _in(first, "ip", "link", "set", "end", "netns", str(second))
        ends = zip((first, second), ("cable", "end"), ADDRESSES, strict=True)
        for pid, device, address in ends:
            _in(pid, "ip", "address", "add", f"{address}/24", "dev", device)
            _in(pid, "ip", "link", "set", device, "up")
            _in(pid, "ip", "link", "set", "lo", "up")
        enter = [["nsenter", "-t", str(pid), "-n"] for pid in (first, second)]
        yield enter[0], enter[1]
    except (FileNotFoundError, PermissionError) as error:
        raise NoNamespaces(str(error)) from error
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()
