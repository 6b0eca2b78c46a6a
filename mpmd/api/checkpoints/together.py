"""Work that every process does at the same time, and that fails in all if it fails in one."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from typing import Any

from mpmd.api.checkpoints.files import FILE_ERRORS, reason
from mpmd.errors import CheckpointError
from mpmd.runtime.processes.world import world


def together(name: str, what: str, act: Callable[[], Any]) -> list[Any]:
    """What `act` returns in every process, through JSON; all must call it.

    Args:
        name: of this exchange.
        what: is done, for messages: `write a checkpoint to ...`.
        act: the work of this process.

    Raises:
        CheckpointError: it failed in some process.
        PeerError: another process failed meanwhile.
    """
    joined = world()
    found: dict[str, Any]
    cause: Exception | None = None
    try:
        found = {"value": act()}
    except CheckpointError as error:
        found, cause = {"error": str(error)}, error
    except FILE_ERRORS as error:
        found, cause = {"error": f"cannot {what}: {reason(error)}"}, error
    if joined is None:
        if isinstance(cause, CheckpointError):
            raise cause
        if cause is not None:
            raise CheckpointError(found["error"]) from cause
        return [json.loads(json.dumps(found["value"]))]
    packed = base64.b64encode(zlib.compress(json.dumps(found).encode())).decode()
    texts = joined.gather(f"checkpoint/{name}", packed)
    of_all = [json.loads(zlib.decompress(base64.b64decode(text))) for text in texts]
    for process, other in enumerate(of_all):
        if "error" in other:
            host = joined.hosts.get(process, "")
            raise CheckpointError(f"process {process} (host {host!r}): {other['error']}") from cause
    return [other["value"] for other in of_all]
