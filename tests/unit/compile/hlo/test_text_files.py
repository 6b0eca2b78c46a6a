"""The `.hlo` files of the text tests print as they are written, and XLA reads them."""

import pytest

from mpmd.compile.hlo import parse_module, print_module, verify
from tests.support.xla_hlo import ROOT

FILES = sorted((ROOT / "tests" / "text" / "hlo").glob("*.hlo"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_canonical(path, xla):
    text = path.read_text()
    module = parse_module(text, path.name)
    verify(module)
    assert print_module(module) == "".join(
        line for line in text.splitlines(True) if not line.startswith("//")
    )
    assert xla.parse(text)


def test_there_are_files():
    assert len(FILES) >= 5
