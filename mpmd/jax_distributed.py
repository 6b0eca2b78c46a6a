"""What several processes use of JAX and jaxlib that is not public: joining, exchanging arrays, absent arrays.

As in `jax_compat`, each function tests for the names that it needs and documents its result without them.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jaxlib
from jax.core import ShapedArray
from jax.sharding import Sharding


def place_of_process() -> tuple[int, int]:
    """The index of this process among those that `jax.distributed` has joined, and their number.

    Placeholders do not count.  No devices are initialized.
    """
    from jax._src import distributed

    if _placeholders:
        return 0, 1
    state = getattr(distributed, "global_state", None)
    if getattr(state, "client", None) is None:
        return 0, 1
    return int(getattr(state, "process_id", 0)), int(getattr(state, "num_processes", 1) or 1)


_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
)
"""The last two do not change numbers, but the order in which fragments are issued."""


def versions_and_settings() -> list[str]:
    """What of JAX decides about numbers, one a line; None for settings that this version does not have."""
    settings = [f"{name} = {getattr(jax.config, name, None)}" for name in _SETTINGS]
    return [f"jax {jax.__version__}", f"jaxlib {jaxlib.__version__}", *settings]


def world_devices(platform: str) -> list[jax.Device]:
    """The devices of a platform of all processes, in the order of the processes."""
    return sorted(jax.devices(platform), key=lambda device: (device.process_index, device.id))


def coordination_client() -> Any | None:
    """The key-value store of `jax.distributed`; None if it was not initialized, or this JAX hides it."""
    from jax._src import distributed

    return getattr(getattr(distributed, "global_state", None), "client", None)


def coordinator_address() -> str:
    """Where the coordinator of `jax.distributed` listens; "" where this JAX hides it."""
    from jax._src import distributed

    state = getattr(distributed, "global_state", None)
    return str(getattr(state, "coordinator_address", None) or "")


def coordination_service(
    address: str, processes: int, heartbeat_seconds: int, *, recoverable: bool = True
) -> Any | None:
    """Starts a coordinator outside of the processes that it coordinates, which survive the end of others.

    None where this jaxlib cannot start one.  It ends when it is collected.
    """
    from jaxlib import _jax

    start = getattr(_jax, "get_distributed_runtime_service", None)
    if start is None:
        return None
    return start(
        address, processes, heartbeat_timeout=heartbeat_seconds, shutdown_timeout=5, recoverable=recoverable
    )


def join_world(address: str, processes: int, index: int, heartbeat_seconds: int) -> None:
    """`jax.distributed.initialize` for a coordinator that another process has started.

    It must come before the first use of a device.
    """
    from jax._src import distributed
    from jaxlib import _jax

    state: Any = distributed.global_state
    client = _jax.get_distributed_runtime_client(
        address,
        index,
        init_timeout=60,
        heartbeat_timeout=heartbeat_seconds,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.coordinator_address, state.process_id, state.num_processes = address, index, processes
    state.client = client


_placeholders: list[Any] = []
"""Clients in the places of processes that do not run, with their connections."""


def join_placeholders(processes: int, devices: int) -> None:
    """Makes this process the first of several that do not run, as long as it lives.

    A client of each takes part when the devices are made known, so that JAX has the devices of all processes.
    Programs over devices of others can be traced and partitioned, and are never run.  It must come before the
    first use of a device.

    Args:
        processes: how many.
        devices: CPU devices of each.
    """
    from jax._src import distributed
    from jaxlib import _jax, xla_client

    jax.config.update("jax_num_cpu_devices", devices)
    if processes == 1:
        return
    address = f"127.0.0.1:{_free_port()}"
    service: Any = coordination_service(address, processes, 3600, recoverable=False)

    def join(index: int) -> Any:
        client = _jax.get_distributed_runtime_client(
            address, index, init_timeout=60, heartbeat_timeout=3600, shutdown_on_destruction=False
        )
        client.connect()
        return client

    def placeholder(index: int) -> Any:
        return xla_client.make_cpu_client(
            distributed_client=clients[index], node_id=index, num_nodes=processes, num_devices=devices
        )

    with ThreadPoolExecutor(processes) as pool:  # each waits for the others
        clients = list(pool.map(join, range(processes)))
        state: Any = distributed.global_state
        state.coordinator_address, state.process_id, state.num_processes = address, 0, processes
        state.client = clients[0]
        others = pool.map(placeholder, range(1, processes))
        jax.devices()
        _placeholders.extend(others)
        list(pool.map(lambda client: client.shutdown(), clients))  # all are needed for none to abort
    service.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_transfer_server(client: Any, host: str) -> Any | None:
    """A server for arrays between processes that listens on two free ports of an address.

    On CPU it reads the memory of an array itself.  Otherwise a thread of the client copies the array, and so
    waits for a fragment that computes: with one thread a message takes as long as a fragment.  In turn an
    array must not be donated before it is pulled: the receiver would get the new value.

    None where this JAX has none.
    """
    try:
        from jax.experimental import transfer
    except ImportError:
        return None
    at = f"{host}:0"
    return transfer.start_transfer_server(
        client,
        at,
        [at],
        max_num_parallel_copies=8,
        transfer_size=512 << 10,
        use_raw_buffers=client.platform == "cpu",
    )


def offering(server: Any) -> Callable[[int, list[jax.Array]], None]:
    """What offers a list of arrays under a number: the call that takes no other pytrees, where JAX has it."""
    found: Callable[[int, list[jax.Array]], None] = getattr(server, "_await_pull_flat", server.await_pull)
    return found


def pull(
    connection: Any, client: Any, number: int, types: Sequence[jax.ShapeDtypeStruct]
) -> Sequence[jax.Array]:
    """The arrays offered under a number, on devices of `client`; see `offering`."""
    of_list = getattr(connection, "_pull_flat", None)
    found: Sequence[jax.Array]
    found = connection.pull(number, list(types)) if of_list is None else of_list(number, client, list(types))
    return found


def poison(connection: Any) -> None:
    """Makes all pulls of a transfer connection that are under way fail; nothing where JAX cannot do it."""
    stop = getattr(connection, "_poison_connection", None)
    if stop is not None:
        stop()


def copies_between_processes(platform: str) -> bool:
    """Whether `jax.device_put` copies arrays between devices of different processes.

    GPUs do, by NCCL.  CPUs do where the user has set the flag `jax_cross_host_transfer_socket_address`.
    """
    from jax._src import xla_bridge

    def flag(name: str) -> Any:
        return getattr(getattr(xla_bridge, name, None), "value", None)

    if flag("CROSS_HOST_TRANSFER_SOCKET_ADDRESS"):
        return True
    if flag("FORCE_DCN_CROSS_HOST_TRANSFERS"):
        return False
    client = jax.local_devices(backend=platform)[0].client
    return bool(getattr(client, "supports_cross_host_transfers", False))


def same_hlo_sharding(one: Sharding, other: Sharding, rank: int) -> bool:
    """Whether device k of both has the same part of an array of some rank; False where JAX hides it."""
    forms = [getattr(each, "_to_xla_hlo_sharding", None) for each in (one, other)]
    if forms[0] is None or forms[1] is None or len(one.device_set) != len(other.device_set):
        return False
    return bool(forms[0](rank) == forms[1](rank))


def absent_array_maker(aval: ShapedArray, sharding: Sharding) -> Callable[[], jax.Array]:
    """What makes arrays all of whose devices belong to other processes: with a type, and no data here."""
    from jax._src import array

    make: Any = getattr(array, "ArrayImpl", None)
    if make is None:
        public = jax.make_array_from_single_device_arrays
        return functools.partial(public, aval.shape, sharding, [], dtype=aval.dtype)
    return functools.partial(make, aval, sharding, [], committed=True, _skip_checks=True)


@functools.cache
def explain_absent_arrays(explain: Callable[[Any], Exception]) -> None:
    """Makes reading an array that is not whole here raise `explain(array)` instead of JAX's own error.

    JAX reads arrays by one property; where it has another name, JAX's own error stays.
    """
    from jax._src import array

    kind: Any = getattr(array, "ArrayImpl", None)
    read = getattr(getattr(kind, "_value", None), "fget", None)
    if read is None:
        return

    def value(self: Any) -> Any:
        sharding = self.sharding
        copied = sharding.is_fully_replicated and sharding.has_addressable_devices
        if not (sharding.is_fully_addressable or copied or self.is_deleted()):
            raise explain(self) from None
        return read(self)

    kind._value = property(value)
