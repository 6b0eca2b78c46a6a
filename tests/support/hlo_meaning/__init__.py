"""Programs in NumPy, beyond what the library evaluates: slow, simple, the oracle of faster code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import Value, check_value
from mpmd.compile.hlo.module import HloModule
from mpmd.errors import HloError
from tests.support.hlo_meaning.meaning import Meaning


def evaluate(module: HloModule, arguments: Sequence[Any]) -> Any:
    """The result of a program on one device.

    Args:
        module: the program.
        arguments: a NumPy array, or nested tuple of arrays, per parameter.

    Returns:
        An array, or a nested tuple of arrays.

    Raises:
        HloError: arguments do not fit, or an operation has no meaning outside a device.
    """
    return evaluate_devices(module, [arguments])[0]


def evaluate_devices(module: HloModule, arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of a program on several devices that run it together.

    Args:
        module: the program; its replicas times partitions must be the number of devices, unless there is one.
        arguments: per device, a value per parameter.

    Raises:
        HloError: arguments do not fit; devices wait for each other in vain; an operation has no meaning here.
    """
    count = len(arguments)
    replicas, partitions = module.replica_count, module.num_partitions
    if count == 1:
        replicas = partitions = 1
    if replicas * partitions != count:
        raise HloError(
            f"module {module.name} has {replicas} replicas x {partitions} partitions, but arguments for "
            f"{count} devices"
        )
    rows = [[_as_value(a) for a in row] for row in arguments]
    for row in rows:
        check_arguments(module.entry, row)
    with np.errstate(all="ignore"):
        return Meaning(replicas, partitions).run_together(module.entry, rows, list(range(count)))


def _as_value(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(_as_value(a) for a in argument)
    return np.asarray(argument)


def check_arguments(computation: HloComputation, arguments: Sequence[Value]) -> None:
    """Arguments must fit the parameters.

    Raises:
        HloError: another number of arguments, or another shape.
    """
    parameters = computation.parameters
    if len(parameters) != len(arguments):
        raise HloError(f"{computation.name} takes {len(parameters)} arguments, got {len(arguments)}")
    for parameter, argument in zip(parameters, arguments):
        check_value(argument, parameter.shape, f"argument {parameter.parameter_number} of {computation.name}")
