"""Text that others wrote, for a terminal, a log or a page: what these would obey is shown as an escape.

Owns which characters those are: control characters (C0, C1, line breaks among them), format characters
(bidirectional marks, zero width) and whatever else is drawn as nothing, line and paragraph separators, and
surrogates, which are no text at all. They are written as Python writes them, so that everybody can still read
what was said. What is escaped already stays as it is.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_UNSEEN = (
    "\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"
)
_of_others = re.compile(f"[{_UNSEEN}]")
_of_ours = re.compile(f"(?:\x1b\\[[0-9;]*m|\n|\t)|([{_UNSEEN}])")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_in_json = re.compile(rb"\\[^\"\\/]|[^\x20-\x7e]")


def visible(text: str) -> str:
    """``text`` of others in one line that nothing obeys."""
    # Names, reasons and paths are ASCII nearly always, and then this is all that they cost.
    if text.isascii() and text.isprintable():
        return text
    return _of_others.sub(_escaped, text)


def of_ours(text: str) -> str:
    """Text that was put together from ours, with line breaks and colours, and perhaps from what others wrote:
    those two stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return _of_ours.sub(lambda found: _escaped(found) if found[1] else found[0], text)


def shown_json(data: bytes) -> bytes:
    """JSON that means the same, and in which nothing stands as it is that a terminal would obey."""
    if data.isascii() and b"\x7f" not in data:
        return data
    return _of_others.sub(_json_escaped, data.decode()).encode()


def all_visible(value: T) -> T:
    """``value``, a struct or what is made of such, with all its texts ``visible``; itself where they are."""
    return cast("T", _seen(value))


def json_visible(data: bytes) -> bytes:
    """JSON with all its texts ``visible``."""
    if _in_json.search(data) is None:
        return data
    return msgspec.json.encode(_seen(msgspec.json.decode(data)))


def _seen(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, msgspec.Struct):
        changed = {
            name: new
            for name in value.__struct_fields__
            if (new := _seen(old := getattr(value, name))) is not old
        }
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple | list):
        seen = [_seen(each) for each in value]
        same = all(one is other for one, other in zip(seen, value, strict=True))
        return value if same else type(value)(seen)
    if isinstance(value, dict):
        pairs = {_seen(key): _seen(each) for key, each in value.items()}
        same = all(key in pairs and pairs[key] is each for key, each in value.items())
        return value if same else pairs
    return value


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    if char in _SHORT:
        return _SHORT[char]
    number = ord(char)
    return (
        f"\\x{number:02x}" if number < 2**8 else f"\\u{number:04x}" if number < 2**16 else f"\\U{number:08x}"
    )


def _json_escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
