"""absl flags for every option: `--mpmd_<option>` of the pipelines, `--mpmd_<pass>_<option>` of single passes,
`--hlo_<pass>_<option>` of passes over HLO.

Import this module before `absl.app.run` (or `flags.FLAGS(argv)`); `mpmd.jit` then reads the flags when a
function is first traced.  A configuration that gives `options` does not look at flags.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from absl import flags

from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.options import USER_DEFAULTS, PipelineOptions, set_options_source
from mpmd.passes import PASSES
from mpmd.support.passes import Pass, option_text

FLAGS = flags.FLAGS
_PASSES = (*PASSES.values(), *HLO_PASSES.values())

# What a configuration or the schedule says is not for flags.
_NOT_FLAGS = frozenset(
    {
        "name_to_mesh_assignment",
        "input_assignment",
        "output_assignment",
        "constraints",
        "pass_options",
        "task_orders",
    }
)


def option_docs(kind: type[Any]) -> dict[str, str]:
    """Field -> what it is for, from the `Attributes:` of a record's docstring."""
    text = (kind.__doc__ or "").partition("Attributes:")[2]
    found: dict[str, str] = {}
    for entry in re.split(r"\n {8}(?=\w+:)", text):
        name, colon, rest = entry.strip().partition(":")
        if colon:
            found[name] = " ".join(rest.split())
    return found


def pass_flag(kind: type[Pass], field: str) -> str:
    """The flag of an option of a pass: `mpmd_...`, or `hlo_...` of one over HLO."""
    if kind.name.startswith("hlo-"):
        return f"{kind.name.replace('-', '_')}_{field}"
    return f"mpmd_{kind.name.removeprefix('mpmd-').replace('-', '_')}_{field}"


def pipeline_flag(field: str) -> str:
    """The flag of an option of the pipelines."""
    return f"mpmd_{field}"


def _define_pipeline_flags() -> None:
    docs = option_docs(PipelineOptions)
    for field in dataclasses.fields(PipelineOptions):
        if field.name in _NOT_FLAGS:
            continue
        name, default = pipeline_flag(field.name), getattr(USER_DEFAULTS, field.name)
        text = docs.get(field.name, field.name)
        if isinstance(default, bool):
            flags.DEFINE_bool(name, default, text)
        elif isinstance(default, int):
            flags.DEFINE_integer(name, default, text)
        elif isinstance(default, tuple):
            flags.DEFINE_list(name, list(default), text)
        else:
            flags.DEFINE_string(name, default, text)


def _define_pass_flags() -> None:
    """Options of single passes, None unless given: what the pipeline gives a pass stands then."""
    for kind in _PASSES:
        for field in dataclasses.fields(kind):
            text = f"Option {field.name.replace('_', '-')} of {kind.name}, over what the pipeline gives it."
            name = pass_flag(kind, field.name)
            if name not in FLAGS:
                flags.DEFINE_string(name, None, text)


def options_from_flags() -> PipelineOptions:
    """The options that the flags say; the defaults until flags are parsed.

    Raises:
        ConfigError: the value of a pass option cannot be read.
    """
    if not FLAGS.is_parsed():
        return USER_DEFAULTS
    values: dict[str, Any] = {}
    for field in dataclasses.fields(PipelineOptions):
        if field.name not in _NOT_FLAGS:
            value = FLAGS[pipeline_flag(field.name)].value
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return PipelineOptions(**values, pass_options=tuple(_pass_options()))


def _pass_options() -> list[str]:
    found = []
    for kind in _PASSES:
        given = [
            (field.name.replace("_", "-"), FLAGS[pass_flag(kind, field.name)].value)
            for field in dataclasses.fields(kind)
        ]
        text = " ".join(f"{key}={option_text(value)}" for key, value in given if value is not None)
        if text:
            found.append(f"{kind.name}{{{text}}}")
    return found


_define_pipeline_flags()
_define_pass_flags()
set_options_source(options_from_flags)
