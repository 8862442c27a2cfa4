"""What roles look like: dark, light, for colour-blind eyes, and without any colour.

The only place that knows colours. Whatever a colour says, a sign or a word says as well (``draw.lines``), so
that ``plain`` is a theme like the others. The colour-blind one uses the eight colours of Okabe and Ito
(2008), which keep apart under protanopia, deuteranopia and tritanopia.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec
from rich.style import Style
from textual.theme import Theme

from oobleckd.draw.lines import Role

ThemeName = Literal["dark", "light", "colour-blind"]
THEMES: tuple[ThemeName, ...] = get_args(ThemeName)

IN_ASCII = """
.ascii ModalScreen > Container, .ascii ModalScreen > VerticalScroll { border: ascii $accent; }
.ascii Toast { border-left: none; }
.ascii Finder #--input { border: ascii $accent; }
.ascii Finder CommandList, .ascii Finder LoadingIndicator { border: none; scrollbar-size-vertical: 0; }
.ascii Finder SearchIcon { display: none; }
"""
"""What of Textual's own frames and signs is others where the console is in ASCII."""


class Palette(msgspec.Struct, frozen=True):
    """The colours of a theme. ``ink`` is for text on the coloured ground of an op or a banner."""

    dark: bool
    ground: str
    surface: str
    panel: str
    edge: str
    text: str
    dim: str
    strong: str
    good: str
    warn: str
    bad: str
    note: str
    bar: str
    violet: str
    cyan: str
    moved: str
    ink: str


PALETTES: dict[ThemeName, Palette] = {
    "dark": Palette(
        dark=True, ground="#141a22", surface="#1a212b", panel="#2a3440", edge="#3d4957", text="#d3dae3",
        dim="#7d8896", strong="#f2f5f9", good="#4cc38a", warn="#e5b13a", bad="#ff6b6b", note="#74b3f0",
        bar="#4a86c5", violet="#9a6ddb", cyan="#5bc0d0", moved="#f08c2e", ink="#14181f",
    ),
    "light": Palette(
        dark=False, ground="#f7f8fa", surface="#eceff3", panel="#dde3ea", edge="#aab4c0", text="#26303b",
        dim="#66717e", strong="#0b1016", good="#117a46", warn="#8a5a00", bad="#b3202a", note="#1c5fa8",
        bar="#3d7fc4", violet="#6b3fb0", cyan="#0f7585", moved="#b85400", ink="#ffffff",
    ),
    "colour-blind": Palette(
        dark=True, ground="#14161a", surface="#1b1e24", panel="#2c313a", edge="#444b57", text="#dcdfe4",
        dim="#858c98", strong="#ffffff", good="#009e73", warn="#f0e442", bad="#d55e00", note="#56b4e9",
        bar="#0072b2", violet="#cc79a7", cyan="#56b4e9", moved="#e69f00", ink="#101215",
    ),
}  # fmt: skip


def _inks(palette: Palette) -> dict[str, str]:
    return {
        "": palette.text, "dim": palette.dim, "strong": f"bold {palette.strong}", "good": palette.good,
        "warn": f"bold {palette.warn}", "bad": f"bold {palette.bad}", "note": palette.note,
        "bar": palette.bar,
        "detect": palette.warn, "plan": palette.note, "reconfigure": palette.violet, "copy": palette.good,
        "resume": palette.cyan, "bubble": palette.edge,
    }  # fmt: skip


def _grounds(palette: Palette) -> dict[str, str]:
    on = {
        "banner-bad": palette.bad, "banner-warn": palette.warn, "op-F": palette.bar, "op-S": palette.cyan,
        "op-B": palette.good, "op-I": palette.good, "op-W": palette.violet, "op-U": palette.dim,
        "op-moved": palette.moved, "op-again": palette.warn,
    }  # fmt: skip
    away = "#ffffff" if palette.dark else "#000000"  # from the ink, so that what is written stays readable
    on |= {f"{role} odd": _mixed(on[role], away) for role in ("op-F", "op-B", "op-I", "op-W", "op-moved")}
    bold = {"banner-bad", "banner-warn", "op-moved", "op-again", "op-moved odd"}
    styles = {role: f"{'bold ' * (role in bold)}{palette.ink} on {ground}" for role, ground in on.items()}
    styles["banner-dim"] = f"bold {palette.text} on {palette.panel}"
    styles["cursor"] = f"bold {palette.strong} on {palette.edge}"
    return styles


def _mixed(colour: str, other: str, share: float = 0.8) -> str:
    """``share`` of a colour, the rest of another."""
    parts = [
        round(share * int(colour[at : at + 2], 16) + (1 - share) * int(other[at : at + 2], 16))
        for at in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def _pairs(palette: Palette) -> dict[str, str]:
    colours = {
        "good": palette.good,
        "warn": palette.warn,
        "bad": palette.bad,
        "note": palette.note,
        "dim": palette.edge,
    }
    return {
        role: f"{colours[ink]} on {colours[ground]}"
        for role in get_args(Role)
        for ink, stroke, ground in [role.partition("/")]
        if stroke
    }


def coloured(theme: ThemeName) -> dict[Role, Style]:
    """What every role looks like in a theme."""
    palette = PALETTES[theme]
    found = _inks(palette) | _grounds(palette) | _pairs(palette)
    return {role: Style.parse(found[role]) for role in get_args(Role)}


_REVERSED = frozenset(
    {"banner-bad", "banner-warn", "banner-dim", "cursor", "op-moved", "op-moved odd", "op-again"}
)
_UNDERLINED = frozenset({"op-W", "op-W odd", "op-U", "op-again"})


def plain() -> dict[Role, Style]:
    """What every role looks like where there are no colours."""
    bold = {role for role, style in coloured("dark").items() if style.bold}
    return {
        role: Style(
            bold=role in bold or None,
            reverse=role in _REVERSED or None,
            underline=role in _UNDERLINED or None,
        )
        for role in get_args(Role)
    }


COLOURED: dict[ThemeName, dict[Role, Style]] = {theme: coloured(theme) for theme in THEMES}
PLAIN: dict[Role, Style] = plain()


def styles(theme: str, no_color: bool) -> Mapping[Role, Style]:
    """Role -> style, for Textual's name of a theme (one that is not ours looks like the dark one)."""
    if no_color:
        return PLAIN
    return COLOURED[_NAMED.get(theme, "dark")]


def textual_name(theme: ThemeName) -> str:
    """What Textual calls a theme: its own has other ones called dark."""
    return f"oobleck-{theme}"


_NAMED: dict[str, ThemeName] = {textual_name(theme): theme for theme in THEMES}


# What styles call the colour of frames: a lighter panel is nothing on a light ground.
EDGE = "edge"


def textual_theme(theme: ThemeName) -> Theme:
    """Frames, grounds and inputs in the same colours."""
    palette = PALETTES[theme]
    return Theme(
        name=textual_name(theme), primary=palette.bar, accent=palette.warn, warning=palette.warn,
        error=palette.bad, success=palette.good, foreground=palette.text, background=palette.ground,
        surface=palette.surface, panel=palette.panel, dark=palette.dark, variables={EDGE: palette.edge},
    )  # fmt: skip
