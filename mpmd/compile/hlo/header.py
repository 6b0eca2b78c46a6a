"""The first line of HLO text: name, schedule flag, aliasing, entry layouts, further attributes."""

from __future__ import annotations

import re

from mpmd.compile.hlo import codecs
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape, shape_at
from mpmd.compile.hlo.text import TextError, closing, read_int, split_top
from mpmd.errors import close_to

_CARRIED = (
    "alias_passthrough_params",
    "allow_spmd_sharding_propagation_to_output",
    "allow_spmd_sharding_propagation_to_parameters",
    "frontend_attributes",
)
_READ = (
    "buffer_donor",
    "entry_computation_layout",
    "input_output_alias",
    "is_scheduled",
    "num_partitions",
    "replica_count",
)


def read_header(module: HloModule, key: str, value: str) -> None:
    """Set one attribute of the header; those without a meaning here are kept as text.

    Raises:
        TextError: the value is malformed, or the key unknown; offsets count from the value's beginning.
    """
    if key == "is_scheduled":
        module.is_scheduled = value == "true"
    elif key == "input_output_alias":
        module.input_output_alias = codecs.read_io_aliases(value)
    elif key == "buffer_donor":
        module.buffer_donor = codecs.read_donors(value)
    elif key == "entry_computation_layout":
        module.parameter_layouts, module.result_layout = _program_shape(value)
    elif key in ("replica_count", "num_partitions"):
        if re.fullmatch(r"[0-9]+", value) is None or not 0 < read_int(value) < 1 << 31:
            raise TextError(f"expected a positive number of 32 bits, got {value!r}", 0)
        setattr(module, key, int(value))
    elif key in _CARRIED:
        module.header[key] = value
    else:
        near = close_to(key, (*_READ, *_CARRIED))
        raise TextError(f"a module has no attribute {key!r}{near}", -len(key) - 1)


def _program_shape(text: str) -> tuple[tuple[Shape, ...], Shape]:
    """`{(f32[2]{0}, s32[])->pred[]}` as parameter shapes and result shape."""
    body = text.strip()[1:-1]
    close = closing(body, 0)
    parameters = tuple(shape_at(part, 0)[0] for part in split_top(body[1:close]))
    arrow = body.find("->", close)
    if arrow < 0:
        raise TextError("expected `->` and the shape of the result", close + 1)
    result, _ = shape_at(body, arrow + 2 + len(body[arrow + 2 :]) - len(body[arrow + 2 :].lstrip()))
    return parameters, result


def print_header(module: HloModule) -> str:
    parts = [f"HloModule {module.name}"]
    if module.is_scheduled:
        parts.append("is_scheduled=true")
    if module.input_output_alias:
        parts.append("input_output_alias={ " + ", ".join(map(str, module.input_output_alias)) + " }")
    if module.buffer_donor:
        parts.append("buffer_donor={ " + ", ".join(map(str, module.buffer_donor)) + " }")
    parameters, result = module.entry_shapes()
    parts.append(f"entry_computation_layout={{({', '.join(map(str, parameters))})->{result}}}")
    if module.replica_count != 1:
        parts.append(f"replica_count={module.replica_count}")
    if module.num_partitions != 1:
        parts.append(f"num_partitions={module.num_partitions}")
    parts += [f"{key}={value}" for key, value in module.header.items()]
    return ", ".join(parts)
