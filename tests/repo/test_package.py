"""What is installed: the public names, their types, and the distributions that are uploaded."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import mpmd
from tests.repo.tree import ROOT, text, tracked

SAMPLES = "tests/support/typing/user_step.py", "tests/support/typing/wrong_calls.py"
EXPECTED = {
    (path, number)
    for path in SAMPLES
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
    if line.endswith("# error")
}
CHECKERS = {
    "pyright": ["pyright", "--pythonpath", sys.executable],
    "mypy": ["mypy", "--follow-imports=silent", "--config-file=", "--cache-dir=/dev/null"],
}


def test_public_names_are_all_there_is():
    assert dir(mpmd) == sorted(mpmd.__all__)
    missing = [name for name in mpmd.__all__ if not hasattr(mpmd, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'pmap'"):
        mpmd.pmap  # noqa: B018


def test_the_version_is_that_of_the_distribution_and_of_the_newest_changes():
    release, development = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev\d+)?", mpmd.__version__).groups()
    newest = re.search(r"^## (\S+) \((\S+)\)$", text(Path("CHANGELOG.md")), re.MULTILINE)
    assert newest[1] == release and (newest[2] == "unreleased") == bool(development)


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_find_the_wrong_calls_and_no_others(checker):
    command = [sys.executable, "-m", *CHECKERS[checker], *SAMPLES]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280).stdout
    found = {
        (path, int(number))
        for path in SAMPLES
        for number in re.findall(rf"{re.escape(path)}:(\d+)\S* (?:- )?error", printed)
    }
    assert EXPECTED
    assert found == EXPECTED, printed


@pytest.mark.slow
def test_distributions_are_complete_and_can_be_uploaded(tmp_path):
    tree, made = tmp_path / "tree", tmp_path / "made"
    for path in tracked():  # a copy, because building writes beside the sources
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tree / path)
    subprocess.run([sys.executable, "-m", "build", tree, "-o", made], check=True, capture_output=True)
    files = sorted(made.iterdir())
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    wheel, source = files
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
        metadata = opened.read(next(n for n in inside if n.endswith("METADATA"))).decode()
    ours = {str(p) for p in tracked(".py") if p.parts[0] == "mpmd"}
    pages = {str(p) for p in tracked(".html", ".css", ".js") if p.parts[0] == "mpmd"}
    assert ours | pages | {"mpmd/py.typed"} <= inside
    assert f"Version: {mpmd.__version__}" in metadata
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata) == []
    assert len(re.findall(r"!\[[^]]*\]\(https?://\S*/raw/", metadata)) == metadata.count("![") > 0
    with tarfile.open(source) as opened_source:
        assert any(n.endswith("mpmd/py.typed") for n in opened_source.getnames())


def test_the_development_tools_are_locked():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {
        re.split(r"[>=<~]", entry)[0] for entry in (*extras["test"], *extras["docs"], *extras["coverage"])
    } - {"dm-haiku"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert wanted == {line.partition("==")[0].lower() for line in lines if not line.startswith("#")}
    assert all(re.fullmatch(r"#.*|[\w-]+==[\d.]+", line) for line in lines)


def public_functions() -> dict[str, object]:
    """What users call by a name of `mpmd`: functions, classes, and methods that a public class defines."""
    found = {}
    for name, value in ((name, getattr(mpmd, name)) for name in mpmd.__all__):
        if callable(value) and getattr(value, "__module__", "").startswith("mpmd."):
            found[name] = value
        if isinstance(value, type):
            members = {f"{name}.{n}": m for n, m in vars(value).items() if not n.startswith("_")}
            found |= {n: m for n, m in members.items() if callable(m) or isinstance(m, property)}
    return found


def test_what_users_call_is_documented():
    assert len(public_functions()) > 60
    assert [name for name, value in public_functions().items() if not value.__doc__] == []
