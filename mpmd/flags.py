"""absl flags for every option: `--mpmd_<option>` of the pipelines, `--mpmd_<pass>_<option>` of single passes,
`--hlo_<pass>_<option>` of passes over HLO.

Import this module before `absl.app.run` (or `flags.FLAGS(argv)`); `mpmd.jit` then reads the flags when a
function is first traced.  A configuration that gives `options` does not look at flags.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from absl import flags

from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.options import USER_DEFAULTS, PipelineOptions, set_options_source
from mpmd.passes import PASSES
from mpmd.support.passes import Pass, option_text

FLAGS = flags.FLAGS
_PASSES = (*PASSES.values(), *HLO_PASSES.values())

# Fields that the configuration or the schedule set have no flags.
_NOT_FLAGS = frozenset(
    {
        "name_to_mesh_assignment",
        "mirrored_names",
        "input_assignment",
        "output_assignment",
        "copy_scalar_results",
        "constraints",
        "pass_options",
        "task_orders",
    }
)


def option_docs(kind: type[Any]) -> dict[str, str]:
    """Field -> its description, from the `Attributes:` of a record's docstring and those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n {4}(?=\w+:)", f"\n{text}"):
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


def flagged_options(group: type[Any] = PipelineOptions) -> list[str]:
    """The options of the pipelines, or of a group of them, that have a flag, in order."""
    return [f.name for f in dataclasses.fields(group) if f.name not in _NOT_FLAGS]


def _define_pipeline_flags() -> None:
    docs = option_docs(PipelineOptions)
    for field in flagged_options():
        name, default, text = pipeline_flag(field), getattr(USER_DEFAULTS, field), docs.get(field, field)
        if isinstance(default, bool):
            flags.DEFINE_bool(name, default, text)
        elif isinstance(default, int):
            flags.DEFINE_integer(name, default, text)
        elif isinstance(default, tuple):
            flags.DEFINE_list(name, list(default), text)
        else:
            flags.DEFINE_string(name, default, text)


def _define_pass_flags() -> None:
    """Options of single passes, None unless given: then the pipeline's value is used."""
    for kind in _PASSES:
        docs = option_docs(kind)
        for field in dataclasses.fields(kind):
            text = f"Overrides the pipeline's value for {kind.name}: {docs.get(field.name, field.name)}"
            flags.DEFINE_string(pass_flag(kind, field.name), None, text)


def options_from_flags() -> PipelineOptions:
    """The options that the flags say; the defaults until flags are parsed.

    Raises:
        ConfigError: the value of a pass option cannot be read.
    """
    if not FLAGS.is_parsed():
        return USER_DEFAULTS
    values: dict[str, Any] = {}
    for field in flagged_options():
        value = FLAGS[pipeline_flag(field)].value
        values[field] = tuple(value) if isinstance(value, list) else value
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
