"""A number never reaches a user as Python writes it: what is shipped formats numbers, and bends the nouns
behind them, in ``oobleckd/words.py`` alone.

By the syntax tree: an f-string that formats by ``g`` or ``e``, and one that has a many behind a number that
nobody counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("oobleckd", "console", "planner", "worker")
HOME = "oobleckd/words.py"
EXEMPT = {
    "oobleckd/daemon/metrics.py": "labels of buckets, as Prometheus writes them",
    "worker/tools/docs.py": "limits in a page that is made of code",
}
NOUNS = (
    "batch cell change checkpoint chunk copy device draw error event failure fault file forward "
    "gigabyte gradient group head hour incident item job key layer line loss micro-batch minute month node "
    "op pair part pass pipeline position process record row run sample second seed sequence shard size stage "
    "step template tensor time token try update word worker"
)


def _many(noun: str) -> str:
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


_MANY = "|".join(_many(noun) for noun in NOUNS.split() if noun not in {"run", "time", "size"})
_behind = re.compile(
    rf" (?:(?:more|other|usable|live|forward|layer|weight|layer-) ?)?(?:{_MANY})\b(?![/.=_(])"
)


def test_no_number_is_formatted_by_python() -> None:
    found = [f"{place}: {what}" for place, what in _found()]
    assert not found, "word it by oobleckd.words (count, noun, seconds, size, short …):\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    ["f'{took:.3g} s'", "f'{lr:g}'", "f'{n:,.10g} tokens'", "f'{x:.2e}'", "f'needs {n} nodes'",
     "f'{found} of {wanted} layers'", "f'{n:,} micro-batches in a step'", "'%g' % x",
     "f'{n} more places, {m} steps'", "f'{name} is {job.state}'"],
)  # fmt: skip
def test_what_python_would_write_is_found(line: str) -> None:
    assert list(read(line))


@pytest.mark.parametrize(
    "line",
    ["count(n, 'node')", "f'{a} of {count(b, \"step\")}'", "f'{seconds(x)} more'", "f'{node} runs already'",
     "f'{x:.1f} ms'", "f'{name} steps.csv'", "f'{rate} tokens/s'"],
)  # fmt: skip
def test_what_is_worded_is_not(line: str) -> None:
    assert not list(read(line))


def _found() -> Iterator[tuple[str, str]]:
    for part in SHIPPED:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name == HOME or name in EXEMPT or path.is_symlink() or name.split("/")[:2] in _LINKS:
                continue
            for line, what in read(path.read_text(encoding="utf-8")):
                yield f"{name}:{line}", what


_LINKS = [["oobleckd", part] for part in SHIPPED]


def read(source: str) -> Iterator[tuple[int, str]]:
    """The lines of ``source`` that format a number by themselves, and what is wrong with each."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FormattedValue(format_spec=ast.JoinedStr(values=[*specs])) if any(
                map(_is_python, specs)
            ):
                yield node.lineno, "digits and exponents as Python has them"
            case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()) if re.search(
                r"%[-+.0-9]*[ge]", text
            ):
                yield node.lineno, "digits and exponents as Python has them"
            case ast.JoinedStr(values=values) if any(map(_is_of_state, values, values[1:])):
                yield node.lineno, "is failed: say being(state)"
            case ast.JoinedStr(values=values):
                for number, text in pairwise(values):
                    if isinstance(number, ast.FormattedValue) and not _is_cell(number) and _is_many(text):
                        yield (
                            node.lineno,
                            f"a many behind a number: {ast.unparse(number.value)}{text.value!r}",
                        )
            case _:
                pass


def _is_of_state(text: ast.expr, state: ast.expr) -> bool:
    """Whether ``state`` stands behind an "is", where "is failed" would be said."""
    behind_is = isinstance(text, ast.Constant) and re.search(r"\bis $", str(text.value)) is not None
    return behind_is and isinstance(state, ast.FormattedValue) and ast.unparse(state.value).endswith("state")


def _is_python(spec: ast.expr) -> bool:
    return isinstance(spec, ast.Constant) and re.fullmatch(r"[^a-z]*[geGEn]", str(spec.value)) is not None


def _is_cell(number: ast.FormattedValue) -> bool:
    """Whether it is padded: of a table, where the noun is the next column's."""
    return number.format_spec is not None and any(sign in ast.unparse(number.format_spec) for sign in "<>^")


def _is_many(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and _behind.match(str(node.value)) is not None
