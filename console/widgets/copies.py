"""How many live copies each layer has, and who holds those that have few. Pure."""

from __future__ import annotations

import math
from collections import Counter

from oobleckd.console.model import ENDED, View
from oobleckd.draw.lines import Line, Role, Span, clipped
from oobleckd.protocol.watch import LayerView
from oobleckd.words import being, layers

DEPENDS = ("layers", "job", "refused")


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """A digit for each layer, how many layers have how many copies, and the layers at risk with their
    holders.
    """
    if not view.layers:
        return [clipped(((_why_none(view), "dim"),), width)][:height]
    f = view.job.f if view.job is not None else 0
    lines = [clipped(_counted(view, f), width), *_strip(view.layers, f, width, max(1, height // 2))]
    few = sorted(view.layers, key=lambda layer: (layer.copies, layer.layer))
    for layer in few[: max(0, height - len(lines))]:
        holders = ", ".join(layer.devices) or "nobody"
        text = f" layer {layer.layer:<4} {layer.copies} live: {holders}"
        lines.append(clipped(((text, _role(layer.copies, f)),), width))
    return lines[:height]


def _why_none(view: View) -> str:
    if problem := view.refusal("layers"):
        return f"not known: {problem}"
    if view.job is None:
        return "no job: nobody holds layers"
    return (
        f"nobody holds layers: {view.job.id} {being(view.job.state)}"
        if view.job.state in ENDED
        else "not known yet"
    )


def _counted(view: View, f: int) -> Line:
    found = Counter(layer.copies for layer in view.layers)
    spans: list[Span] = [(f"layers {layers(view.layers[0].layer, view.layers[-1].layer + 1)}: ", "dim")]
    spans += [(f"{found[copies]} with {copies}  ", _role(copies, f)) for copies in sorted(found)]
    return tuple(spans)


def _strip(found: tuple[LayerView, ...], f: int, width: int, max_rows: int) -> list[Line]:
    """Where not all have a cell, one stands for several and shows the fewest."""
    per_cell = math.ceil(len(found) / (max(1, width) * max_rows))
    fewest = [
        min(layer.copies for layer in found[first : first + per_cell])
        for first in range(0, len(found), per_cell)
    ]
    return [_digits(fewest[first : first + width], f) for first in range(0, len(fewest), max(1, width))]


def _digits(numbers: list[int], f: int) -> Line:
    return tuple((str(number) if number < 10 else "+", _role(number, f)) for number in numbers)


def _role(copies: int, f: int) -> Role:
    """More than ``f`` copies outlive ``f`` losses; the last one outlives none."""
    return "bad" if copies <= 1 else "good" if copies > f else "warn"
