"""A program on its devices, as a function of flat arguments that returns the pytree of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from mpmd.api.inputs import StoredForms
from mpmd.api.processes import absent_results, record_results, with_absent
from mpmd.brief import brief
from mpmd.partition.signature import StepSignature
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.processes.part import Part
from mpmd.runtime.run.executor import Executor
from mpmd.runtime.run.interpreter import Observer
from mpmd.runtime.run.observe import FiniteCheck


class StepRunner:
    """Runs the steps of a compiled program.

    Attributes:
        executor: of the instruction streams.
        devices: of its meshes.
        signature: of the step.
    """

    __repr__ = brief

    def __init__(
        self, executor: Executor | Part, devices: MeshDevices, signature: StepSignature, results: Any
    ) -> None:
        """Takes the results of the step as a pytree of `jax.ShapeDtypeStruct`s."""
        self.executor, self.devices, self.signature = executor, devices, signature
        leaves, self._tree = jax.tree.flatten(results)
        self._arguments, self._results = StoredForms(signature.arguments.leaves), StoredForms(leaves)

    def run_flat(self, leaves: list[Any]) -> Any:
        """Runs one step; under `jax.debug_nans`, `jax.debug_infs` fragment by fragment."""
        try:
            nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
            if not nans and not infs:
                return self.run(leaves)
            check = FiniteCheck(nans=nans, infs=infs)
            with jax.debug_nans(False), jax.debug_infs(False):  # JAX's own check does not know the fragment
                return self.run(leaves, [check], one_by_one=True)
        except jax.errors.ConcretizationTypeError:  # some have no value yet
            self.signature.check_arrays(leaves)
            raise

    def run(self, leaves: list[Any], observers: Iterable[Observer] = (), *, one_by_one: bool = False) -> Any:
        """Runs one step; see `Executor.run`."""
        stored = self._arguments.stored(leaves)
        return self.results(self.executor.run(stored, observers=observers, one_by_one=one_by_one))

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat arguments of a call, as the executor takes them.

        Raises:
            SignatureError: they do not match the signature; names every leaf that differs.
        """
        return self._arguments.stored(self.signature.leaves(args, kwargs))

    def results(self, leaves: list[Any]) -> Any:
        """The results of a step from those of its executor."""
        leaves = self._results.seen(with_absent(leaves, self._absent))
        record_results(self.executor, leaves)
        return jax.tree.unflatten(self._tree, leaves)

    @functools.cached_property
    def result_shardings(self) -> Any:
        """For each result of the step its sharding on the mesh that computes it."""
        types = self.executor.program.results
        shardings = [self.devices.sharding(types[k][1]) for k in range(self._tree.num_leaves)]
        return jax.tree.unflatten(self._tree, shardings)

    @functools.cached_property
    def _absent(self) -> Mapping[int, Callable[[], jax.Array]]:
        return absent_results(self.executor.program, self.devices, self._results.weak)
