"""What a CURVE key looks like as text. Owns the look alone: a file that was cut short or changed is told by
it, at both ends of a link.
"""

from __future__ import annotations

import re

CHARS = 40
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


def why_none(key: bytes) -> str:
    """Why ``key`` is none, as the end of a sentence; "" where it is one."""
    if _KEY.fullmatch(key):
        return ""
    wrong = f"not {len(key)}" if len(key) != CHARS else "and others than these"
    return f"a key has {CHARS} characters of Z85, {wrong}"
