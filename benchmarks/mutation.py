"""What share of mistakes in `mpmd/` do the fast tests notice?

    python benchmarks/mutation.py --out DIR [--count 60] [--sample 300] [--seed 0] [--cap 30]

Expressions of `mpmd/` are chosen at random, each with a mistake: another comparison, operator or constant, a
call that is left out, a result that is None.  First the fast tests run once, in a copy of the tree in which
these expressions record the tests that evaluate them.  Then each mistake is made in the copy, and the tests
that evaluate it run, the cheapest first, until one fails or they took `--cap` CPU seconds.  A result that is
in DIR already is not computed again, so that a run can be interrupted.

The last line is one JSON object: `noticed` of `mutants`, and how many ran to the end; the others count as
missed.  A line for each missed mistake says where it is; some of them change nothing, such as a bound that is
never reached.

Source: DeMillo, Lipton and Sayward, Hints on test data selection, 1978.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script

ROOT = Path(__file__).resolve().parent.parent
PROBE = "mutation_probe"
TIMEOUT_S = 240

_COMPARISONS = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Pow: ast.Mult,
}  # fmt: skip

PLUGIN = '''
"""Records which test evaluates which chosen expression, and what each test costs."""
import atexit, json, os
import pytest

FOLDER = os.environ["MUTATION_OUT"]
_hits, _costs = {}, {}
_CHOSEN = os.environ.get("MUTATION_TESTS")


def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    _hits.setdefault(number, set()).add(test)


def _cpu():
    return sum(os.times()[:4])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if _CHOSEN:
        order = {name: k for k, name in enumerate(json.load(open(_CHOSEN)))}
        items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    before = _cpu()
    if _CHOSEN and before > float(os.environ["MUTATION_CAP"]):
        item.session.shouldstop = "MUTATION CAP"
    result = yield
    _costs[item.nodeid] = _cpu() - before
    return result


@atexit.register
def _write():
    if not _CHOSEN:
        found = {"hits": {k: sorted(v) for k, v in _hits.items()}, "costs": _costs}
        with open(f"{FOLDER}/probes.{os.getpid()}.json", "w") as file:
            json.dump(found, file)
'''


def candidates(source: str) -> Iterator[dict[str, Any]]:
    """The mistakes that can be made in a file: line, kind, the bytes to replace, and by which text.

    `probe` are the bytes of the expression that is evaluated when the mistake is.
    """
    raw = source.encode()
    starts = [0]
    for line in raw.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def span(node: Any) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    for node in _inside_functions(ast.parse(source), False):
        for kind, new, probe in _mistakes(node):
            yield {
                "line": node.lineno, "kind": kind, "span": span(node), "new": new, "probe": span(probe)
            }  # fmt: skip


def _inside_functions(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    """What functions evaluate, without texts of errors, assertions and annotations."""
    for field, child in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inner = field == "body" if is_function else inside and not isinstance(node, ast.ClassDef)
        for found in child if isinstance(child, list) else [child]:
            if isinstance(found, ast.AST) and not isinstance(found, (ast.JoinedStr, ast.Raise, ast.Assert)):
                if inner:
                    yield found
                yield from _inside_functions(found, inner)


def _mistakes(node: Any) -> Iterator[tuple[str, str, ast.AST]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            changed = ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
            yield "comparison", f"({ast.unparse(changed)})", node
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and, or", f"({ast.unparse(ast.BoolOp(other, node.values))})", node
        case ast.UnaryOp(op=ast.Not()):
            yield "not", f"({ast.unparse(node.operand)})", node
        case ast.BinOp() if type(node.op) in _OPERATORS and not any(map(_is_text, (node.left, node.right))):
            changed = ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
            yield "operator", f"({ast.unparse(changed)})", node
        case ast.Constant(value=bool()):
            yield "constant", str(not node.value), node
        case ast.Constant(value=int()):
            yield "constant", str(node.value + 1), node
        case ast.Expr(value=ast.Call()):
            yield "call left out", "pass", node.value
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "returns None", "return None", value
        case ast.AugAssign() if type(node.op) in _OPERATORS:
            changed = ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
            yield "operator", ast.unparse(changed), node.value


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def chosen_mistakes(sample: int, seed: int) -> list[dict[str, Any]]:
    """Mistakes in lines of `mpmd/` that are chosen at random, at most one in a line."""
    rng = random.Random(seed)
    lines: dict[tuple[str, int], list[dict[str, Any]]] = collections.defaultdict(list)
    for path in sorted((ROOT / "mpmd").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for found in candidates(path.read_text()):
            lines[name, found["line"]].append({"file": name, **found})
    return [rng.choice(lines[key]) for key in rng.sample(sorted(lines), sample)]


class MutationRun:
    """The copy of the tree, and the results that are known."""

    def __init__(self, out: Path, cap: float) -> None:
        self.out, self.cap, self.tree = out, cap, out / "tree"
        self.plugin = out / "plugin"
        self.plugin.mkdir(parents=True, exist_ok=True)
        (self.plugin / f"{PROBE}.py").write_text(PLUGIN)

    def probe(self, sample: int, seed: int) -> None:
        """Runs the fast tests once, with chosen expressions that record who evaluates them."""
        shutil.rmtree(self.tree, ignore_errors=True)
        subprocess.run(["git", "clone", "-q", str(ROOT), str(self.tree)], check=True)
        mutants = chosen_mistakes(sample, seed)
        by_file = collections.defaultdict(list)
        for number, mutant in enumerate(mutants):
            by_file[mutant["file"]].append((mutant["probe"], number))
        for name, probes in by_file.items():
            raw = (ROOT / name).read_bytes()
            edits = [(start, f'(__import__("{PROBE}").hit({n}) or (') for (start, _), n in probes]
            edits += [(end, "))") for (_, end), _ in probes]
            for at, text in sorted(edits, key=lambda edit: edit[0], reverse=True):
                raw = raw[:at] + text.encode() + raw[at:]
            try:
                compile(raw, name, "exec")
            except SyntaxError:  # probes within each other, or in a pattern
                continue
            (self.tree / name).write_bytes(raw)
        rc = self._pytest(["-n", "2", "--dist", "worksteal", "tests"], {}).returncode
        print(f"probed: pytest returned {rc}", flush=True)
        subprocess.run(["git", "checkout", "-q", "."], cwd=self.tree, check=True)
        (self.out / "mutants.json").write_text(json.dumps(mutants))

    def known(self) -> tuple[dict[int, set[str]], dict[str, float]]:
        """The tests that evaluate each mistake, and what tests cost."""
        hits: dict[int, set[str]] = collections.defaultdict(set)
        costs: dict[str, float] = {}
        for path in self.out.glob("probes.*.json"):
            found = json.loads(path.read_text())
            costs |= found["costs"]
            for number, tests in found["hits"].items():
                hits[int(number)].update(filter(None, tests))
        return hits, costs

    def run(self, count: int) -> None:
        """Makes each mistake, and runs the tests that evaluate it."""
        mutants = json.loads((self.out / "mutants.json").read_text())
        hits, costs = self.known()
        evaluated = [n for n in range(len(mutants)) if hits.get(n, set()) & set(costs)][:count]
        results = self.out / "results.jsonl"
        known = results.read_text().splitlines() if results.exists() else []
        done = {found["number"]: found for found in map(json.loads, known)}
        for number in evaluated:
            if number not in done:
                tests = sorted(hits[number] & set(costs), key=lambda test: (costs[test], test))
                done[number] = {"number": number, **self._try(mutants[number], tests)}
                with results.open("a") as file:
                    file.write(json.dumps(done[number]) + "\n")
        report([done[number] for number in evaluated])

    def _try(self, mutant: dict[str, Any], tests: list[str]) -> dict[str, Any]:
        path = self.tree / mutant["file"]
        raw = path.read_bytes()
        start, end = mutant["span"]
        chosen = self.out / "chosen.json"
        chosen.write_text(json.dumps(tests))
        files = sorted({test.partition("::")[0] for test in tests})
        path.write_bytes(raw[:start] + mutant["new"].encode() + raw[end:])
        try:
            ran = self._pytest(["-n", "0", "-x", "--tb=line", *files], {"MUTATION_TESTS": str(chosen)})
            ended = ran.returncode not in (0, 5) and "MUTATION CAP" not in ran.stdout
            capped = "MUTATION CAP" in ran.stdout and " failed" not in ran.stdout
            text = ran.stdout[-300:]
        except subprocess.TimeoutExpired:
            ended, capped, text = True, False, "hangs"
        finally:
            path.write_bytes(raw)
        line = raw[start:end].decode()
        found = {"noticed": ended and not capped, "capped": capped, "tests": len(tests), "text": text}
        return {"where": f"{mutant['file']}:{mutant['line']}", "old": line, "new": mutant["new"], **found}

    def _pytest(self, arguments: list[str], more: dict[str, str]) -> Any:
        path = f"{self.tree}:{self.plugin}"
        environment = {**os.environ, "PYTHONPATH": path, "MUTATION_OUT": str(self.out), **more}
        environment["MUTATION_CAP"] = str(self.cap)
        command = [sys.executable, "-m", "pytest", "-p", PROBE, "-p", "no:cacheprovider", "-m", "not slow"]
        limit = {"timeout": TIMEOUT_S, "capture_output": True} if more else {"stdout": subprocess.PIPE}
        return subprocess.run([*command, *arguments], cwd=self.tree, env=environment, text=True, **limit)


def report(results: list[dict[str, Any]]) -> None:
    """Prints the missed mistakes, and the share."""
    for found in results:
        if not found["noticed"]:
            note = " (not all tests ran)" if found["capped"] else ""
            print(f"missed: {found['where']}  {found['old']}  ->  {found['new']}  [{found['tests']}]{note}")
    whole = [found for found in results if found["noticed"] or not found["capped"]]
    noticed = sum(found["noticed"] for found in results)
    print(json.dumps({"noticed": noticed, "mutants": len(results), "of_those_run_whole": len(whole)}))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=30.0)
    args = parser.parse_args()
    run = MutationRun(args.out.resolve(), args.cap)
    if not (run.out / "mutants.json").exists():
        run.probe(args.sample, args.seed)
    run.run(args.count)


if __name__ == "__main__":
    script.run(main)
