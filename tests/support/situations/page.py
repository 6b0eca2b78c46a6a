"""The page of all situations, written from their table."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

from tests.support.situations import FAMILIES, Situation, situations

PAGE = Path(__file__).resolve().parents[3] / "docs" / "third-party.md"

_HEAD = """<!-- made by `python -m tests.support.situations --page` from tests/support/situations -->

# Tried with other people's programs

Models, optimizers and habits of training loops, as public repositories, bug reports and feature requests have
them. Each was written down small, with at most five lines for mpmd: a topology, `mpmd.jit` with a
configuration, the stages, and `accumulate_gradients` or `staged` around the loss; no model changes. Several
steps run on two meshes and under `jax.jit`, and all results and the whole new state are compared: trees,
shapes, dtypes and values, up to the rounding of sums in another order.

{total} situations: {equal} are equal, {refused} are refused, with the words of the error in the table. The
tests run the situations and compare this page with their table.

```sh
python -m tests.support.situations                 # runs all of them, and prints what differs at most
python -m tests.support.situations selective_scan  # or some
```

A source is `owner/repository` with the number of an issue or a pull request, or with a path. What it has
in hundreds of lines is here in tens; nothing of its text is copied. To enter another one, write a function
with a docstring and a source in `tests/support/situations/`. Models that libraries ship, from Gemma to keras,
are in `tests/third_party`, and run where the library is installed.
"""

_TITLES = {
    "optimizers": "Optimizers",
    "losses": "Losses",
    "habits": "Habits of training loops",
    "generative": "Generative and self-supervised models",
    "agents": "Reinforcement learning",
    "sequences": "Recurrences, graphs, dtypes",
}


def page() -> str:
    """Its text."""
    found = situations()
    refused = sum(bool(one.refused) for one in found)
    parts = [_HEAD.format(total=len(found), equal=len(found) - refused, refused=refused)]
    for family in FAMILIES:
        rows = [_row(one) for one in found if one.family == family]
        parts.append(
            f"\n## {_TITLES[family]}\n\n| situation | source | stages | result |\n|---|---|---|---|\n"
        )
        parts += rows
    return "".join(parts)


def _row(one: Situation) -> str:
    result = f"refused: *{one.refused}*" if one.refused else "equal"
    cells = (one.title, f"`{one.source}`", f"`{_stages(one)}`", result)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _stages(one: Situation) -> str:
    """What the function says of its stages."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one.build)))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("mpmd.by_parameters", "mpmd.split"):
            return ast.unparse(node).removeprefix("mpmd.")
    return '"auto"'
