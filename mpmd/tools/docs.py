"""Writes docs/passes.md, docs/hlo_passes.md and docs/flags.md from the docstrings and fields of the passes.

python -m mpmd.tools.docs            writes them
python -m mpmd.tools.docs --check    exits 1 if one is not current
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from mpmd import passes
from mpmd.compile import passes as hlo_passes
from mpmd.compile.passes.hlo_pass import Fixpoint
from mpmd.compile.pipelines import GROUPS
from mpmd.flags import flagged_options, option_docs, pass_flag, pipeline_flag
from mpmd.options import USER_DEFAULTS, PipelineOptions
from mpmd.partition import pipeline
from mpmd.support.passes import Pass, option_text

ROOT = Path(__file__).resolve().parent.parent.parent
_CONTRACT = re.compile(
    r"(?:^|(?<=  ))(Requires|Ensures|Cost|Source|Error|Late error|Warning|Remark):\s", re.MULTILINE
)
_IN_A_SCRIPT = """\
A script with `absl.app.run(main)` needs the import alone. In any other, whatever reads its own options:

```py
import sys

from absl import flags

import mpmd.flags

arguments = flags.FLAGS(sys.argv, known_only=True)  # the rest is left to the script, such as to argparse
```

A flag has the name of the option in `mpmd.options.PipelineOptions`, which `make_config(options=...)` takes:
`--mpmd_backend=xla` is `dataclasses.replace(USER_DEFAULTS, backend="xla")`.

"""
MADE = "<!-- made by `make docs`: change the docstrings instead -->\n\n"


def pages() -> dict[Path, str]:
    return {
        ROOT / "docs" / "passes.md": passes_page(),
        ROOT / "docs" / "hlo_passes.md": hlo_passes_page(),
        ROOT / "docs" / "flags.md": flags_page(),
    }


def passes_page() -> str:
    parts = [
        MADE,
        "# Passes\n\nThe docstring of each pass; then the order in which they run.\n"
        "[Before and after](pass-examples.md) shows what `mpmd-opt` prints for each.\n",
    ]
    parts += _families(passes.FAMILIES)
    parts.append(
        "\n## Pipelines\n\nWith every optional step; `mpmd.jit` skips those that its options disable.\n"
    )
    for name, make in pipeline.PIPELINES.items():
        parts.append(f"\n### {name}\n\n| pass | reason for its position |\n|---|---|\n")
        parts += [f"| `{step.pass_}` | {step.why} |\n" for step in make(_everything())]
    return "".join(parts)


def hlo_passes_page() -> str:
    parts = [
        MADE,
        "# Passes over HLO\n\nThe docstring of each pass; then the groups that run.\n"
        "`mpmd-hlo-opt FILE -PASS='OPTION=VALUE' -GROUP` runs them on HLO text;\n"
        "[before and after](pass-examples-hlo.md) shows what it prints for each.\n",
    ]
    parts += _families(hlo_passes.FAMILIES)
    parts.append("\n## Groups\n")
    for name, make in GROUPS.items():
        first = (make.__doc__ or "").partition("\n")[0]
        parts.append(f"\n### {name}\n\n{first}\n\n")
        for pass_ in make():
            parts.append(f"* `{pass_}`\n")
            if isinstance(pass_, Fixpoint):
                parts += [f"  * `{inner}`\n" for inner in pass_.passes]
    return "".join(parts)


def _families(families: Iterable[ModuleType]) -> list[str]:
    """The entries of all passes, under the name of their family."""
    parts: list[str] = []
    for family in families:
        if family.PASSES:
            parts.append(f"\n## {family.__name__.rpartition('.')[2].rstrip('_')}\n")
            parts += [_pass_entry(kind) for kind in family.PASSES]
    return parts


def _pass_entry(kind: type[Pass]) -> str:
    first, _, rest = inspect.cleandoc(kind.__doc__ or "").partition("\n")
    text = f"\n### {kind.name}\n\n{first}\n"
    parts = [part for part in re.split(r"\n{2,}", rest.strip("\n")) if not part.startswith("Attributes:")]
    text += "".join(f"\n{_paragraph(part)}\n" for part in parts if part.strip())
    fields, docs = dataclasses.fields(kind), option_docs(kind)
    if fields:
        text += "\n| option | default | meaning |\n|---|---|---|\n"
        for f in fields:
            meaning = _cell(docs.get(f.name, ""))
            text += f"| `{f.name.replace('_', '-')}` | {_shown(f.default)} | {meaning} |\n"
    return text


def _paragraph(text: str) -> str:
    """A paragraph of a docstring: an example as code, its contract as a list, anything else as it is."""
    if text.startswith("    ") or "->" in text:
        return f"```text\n{textwrap.dedent(text)}\n```"
    if not _CONTRACT.match(text):
        return _escaped(text)
    _, *parts = _CONTRACT.split(text)
    entries = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join(f"* **{word}:** {_escaped(' '.join(said.split()))}" for word, said in entries)


def _escaped(text: str) -> str:
    """Text in which Markdown finds nothing to format outside of backquotes."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([<*\[])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _everything() -> PipelineOptions:
    """Options that enable every optional step, but for those that need a value of the user's."""
    on = {
        f.name: True
        for f in dataclasses.fields(PipelineOptions)
        if f.default is False and not f.name.startswith(("fail_on", "merge_after", "verbose", "verify_each"))
    }
    return PipelineOptions(**on, pipeline_schedule="1F1B")  # type: ignore[arg-type]


def flags_page() -> str:
    parts = [
        MADE,
        "# Flags\n\nRead when a function is first traced; `import mpmd.flags` defines them. "
        "A configuration with `options` ignores them; the environment is not read.\n\n",
        _IN_A_SCRIPT,
        "## Pipelines\n",
    ]
    for group in reversed(PipelineOptions.__bases__):
        title, docs = (group.__doc__ or "").partition("\n")[0].rstrip("."), option_docs(group)
        parts.append(f"\n### {title}\n\n| flag | default | meaning |\n|---|---|---|\n")
        for field in flagged_options(group):
            shown = _shown(getattr(USER_DEFAULTS, field))
            parts.append(f"| `--{pipeline_flag(field)}` | {shown} | {_cell(docs[field])} |\n")
    parts.append(
        "\n## Single passes\n\nThey override the pipeline's value; unset by default.\n\n"
        "| flag | option of | meaning |\n|---|---|---|\n"
    )
    for kind in (*passes.PASSES.values(), *hlo_passes.PASSES.values()):
        docs = option_docs(kind)
        for f in dataclasses.fields(kind):
            meaning = _cell(docs.get(f.name, ""))
            parts.append(f"| `--{pass_flag(kind, f.name)}` | `{kind.name}` | {meaning} |\n")
    return "".join(parts)


def _shown(value: object) -> str:
    return f"`{option_text(value)}`" if option_text(value) else "none"


def _cell(text: str) -> str:
    """A text in a table, whose cells end at bars, even those in code."""
    return text.replace("|", "\\|")


def stale() -> list[Path]:
    return [p for p, text in pages().items() if not p.exists() or p.read_text() != text]


def main() -> int:
    """Writes or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not current")
    if parser.parse_args().check:
        for path in stale():
            print(f"{path.relative_to(ROOT)} is not current; run `make docs`", file=sys.stderr)
        return 1 if stale() else 0
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
