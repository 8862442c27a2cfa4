"""What is wrong with a TOML file, in words: which line, what stands there, and what should. Pure.

Owns the translation of tomllib's errors, which name a position and a rule of the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_LAST = 60  # characters of a line, in a sentence
Words = Callable[[re.Match[str], str], str]

_TABLE: tuple[tuple[str, Words], ...] = (
    (r"Cannot overwrite a value", lambda _, key: f"the key {key} is there twice"),
    (r"Cannot declare \((.+?),?\) twice", lambda it, _: f"the table [{_dotted(it[1])}] is there twice"),
    (r"Cannot redefine namespace \((.+?),?\)", lambda it, _: f"{_dotted(it[1])} is there twice"),
    (r"Cannot mutate immutable namespace \((.+?),?\)",
     lambda it, _: f"{_dotted(it[1])} is written as {{…}} already, and nothing is added to that"),
    (r"Duplicate inline table key '(.+)'", lambda it, _: f"the key {it[1]} is there twice"),
    (r"Invalid value", lambda _, key: f"the value of {key} is none: text stands in quotes"),
    (r"Invalid initial character for a key part", lambda *_: "a key is missing"),
    (r"Expected '=' after a key in a key/value pair", lambda *_: "a key has no = behind it"),
    (r"Expected newline or end of document after a statement",
     lambda *_: "something stands behind the value"),
    (r"Invalid statement", lambda *_: "this is neither KEY = VALUE nor [TABLE]"),
    (r"Unterminated string|Expected [\"']+|(?:Found invalid|Illegal) character '\\n'",
     lambda *_: "the text has no quotes at its end"),
    (r"Unclosed array", lambda *_: "the list has no ] at its end"),
    (r"Unclosed inline table", lambda *_: "the table has no } at its end"),
    (r"Expected '(\]\]?)' at the end of .*", lambda it, _: f"the table's name has no {it[1]} behind it"),
    (r"Unescaped '\\' in a string", lambda *_: r"a \ is written twice in quotes, or the text stands in ''"),
    (r"(?:Found invalid|Illegal) character (.+)", lambda it, _: f"the character {it[1]} cannot stand there"),
    (r"Invalid (?:hex|unicode|escape).*|.*[Ee]scaped.*", lambda *_: r"what follows the \ is no character"),
    (r"Invalid date or datetime", lambda *_: "this is no date"),
)  # fmt: skip


def problem_of(error: Exception, source: str) -> str:
    """What ``error``, which tomllib raised of ``source``, says."""
    said = str(error)
    found = _AT.search(said)
    rule = _AT.sub("", said)
    lines = source.splitlines() or [""]
    number = int(found[1]) if found and found[1] else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    if line.startswith("[") and rule.startswith("Cannot overwrite a value"):
        name = f"{line.partition(']')[0]}]"
        return f"is no TOML: line {number}: the table {name} is there twice, or is a key's name, too"
    key = line.partition("=")[0].strip() or "the key"
    for pattern, words in _TABLE:
        if it := re.fullmatch(pattern, rule):
            return f"is no TOML: line {number}: {words(it, key)}{_shown(line)}"
    return f"is no TOML: line {number} cannot be read{_shown(line)}"


def _dotted(names: str) -> str:
    """``'a', 'b'`` as TOML writes it: ``a.b``."""
    return ".".join(re.findall(r"'([^']*)'", names)) or names


def _shown(line: str) -> str:
    return f": {line[:_LAST]}{'…' if len(line) > _LAST else ''}" if line else ""
