"""The keys of a screen in one line, from the registry. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from oobleckd.console.keys import SCREENS, TITLES, Key, ScreenName
from oobleckd.draw.lines import Line, Span, clipped, length

_ROOMY = 130


def paint(here: ScreenName, keys: Iterable[Key], width: int) -> Line:
    """The screens by number where there is room, then as many keys as fit."""
    line: Line = ()
    if width >= _ROOMY:
        line = tuple(
            span
            for number, name in enumerate(SCREENS, 1)
            for span in _item(str(number), TITLES[name], name == here)
        )
        line = (*line, ("┊ ", "dim"))
    elif width >= 40:
        line = ((f"1..{len(SCREENS)} ", "warn"), (f"{TITLES[here]}  ", "strong"))
    for key in keys:
        item = _item(key.shown, key.label, False)
        if length(line) + length(item) > width + 1:
            break
        line = (*line, *item)
    return clipped(line, width)


def _item(key: str, label: str, here: bool) -> tuple[Span, ...]:
    if here:
        return ((f"{key} {label} ", "cursor"),)
    return ((key, "warn"), (f" {label} ", "dim"))
