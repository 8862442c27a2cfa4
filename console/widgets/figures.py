"""What devices and cards say of themselves: columns for the table of nodes, and device by device in words and
bars. Pure.

Of a node with several devices a column says the one that is worst off. What nobody tells has no column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import nothing
from oobleckd.console.widgets.nodes import STATES
from oobleckd.draw.lines import Line, Role, Span, bar, cell, clipped, flow, length
from oobleckd.protocol.nodeviews import DeviceFigures, NodeView
from oobleckd.words import short, size

_FULL = 0.95
"""Share of a card's memory from which on it is about to run out."""
_BAR = 8
_WIDE_BAR = 24
_LEAST_LABEL, _LABEL = 6, 14
_MEMORY = 43  # what is said beside its bar


# --------------------------------------------------------------------------- columns


class FigureColumn(NamedTuple):
    """Its name, its cells, how early it has room, what it says of a node, and of which nodes it is known."""

    name: str
    width: int
    rank: int
    said: Callable[[NodeView], Iterable[Span]]
    right: bool
    known: Callable[[NodeView], bool]


def columns() -> tuple[FigureColumn, ...]:
    """All that there may be."""
    return (
        FigureColumn("memory", _BAR + 6, 3, _memory_cell, False, _any(lambda each: each.used_bytes > 0)),
        FigureColumn("busy", 4, 4, _busy_cell, True, _any(lambda each: each.utilisation >= 0)),
        FigureColumn("temp", 5, 6, _temperature_cell, True, _any(lambda each: each.temperature_c > 0)),
        FigureColumn("power", 5, 7, _power_cell, True, _any(lambda each: each.power_w > 0)),
        FigureColumn("errors", 12, 8, _errors_cell, False, _any(_tells_errors)),
        FigureColumn("clock", 11, 9, _clock_cell, True, _any(lambda each: each.clock_mhz > 0)),
        FigureColumn("RSS", 8, 12, _rss_cell, True, _any(lambda each: each.rss_bytes > 0)),
    )  # fmt: skip


def _any(known: Callable[[DeviceFigures], bool]) -> Callable[[NodeView], bool]:
    return lambda node: any(map(known, node.figures))


def _memory_cell(node: NodeView) -> Iterable[Span]:
    worst = max(node.figures, key=_share, default=None)
    if worst is None or not worst.used_bytes:
        return (("-", "dim"),)
    share = _share(worst)
    drawn, role = bar(0.0, share, _BAR) if share else "", _memory_role(worst)
    return ((cell(drawn, _BAR), role), (f" {share:>4.0%}{' ' if role == 'bar' else '!'}", ""))


def _share(each: DeviceFigures) -> float:
    """Of the memory that there is; where that is not known, of what is planned."""
    whole = each.total_bytes or each.planned_bytes
    return each.used_bytes / whole if whole else 0.0


def _memory_role(each: DeviceFigures) -> Role:
    if each.total_bytes and each.used_bytes >= _FULL * each.total_bytes:
        return "bad"
    # A process on the host holds more than what is planned of it: its interpreter, its libraries.
    return "warn" if each.card and 0 < each.planned_bytes < each.used_bytes else "bar"


def _busy_cell(node: NodeView) -> Iterable[Span]:
    known = [each.utilisation for each in node.figures if each.utilisation >= 0]
    return ((f"{min(known):.0%}" if known else "-", ""),)


def _temperature_cell(node: NodeView) -> Iterable[Span]:
    most = max((each.temperature_c for each in node.figures), default=0)
    return ((f"{most} °C" if most else "-", ""),)


def _power_cell(node: NodeView) -> Iterable[Span]:
    most = max((each.power_w for each in node.figures), default=0.0)
    return ((f"{most:.0f} W" if most else "-", ""),)


def _clock_cell(node: NodeView) -> Iterable[Span]:
    """Marked where something holds it down."""
    known = [each for each in node.figures if each.clock_mhz]
    if not known:
        return (("-", "dim"),)
    least = min(known, key=lambda each: each.clock_mhz)
    held = any(each.throttled for each in known)
    return ((f"{'! ' if held else ''}{least.clock_mhz:,} MHz", "warn" if held else ""),)


def _rss_cell(node: NodeView) -> Iterable[Span]:
    most = max((each.rss_bytes for each in node.figures), default=0)
    return ((size(most) if most else "-", ""),)


def _tells_errors(each: DeviceFigures) -> bool:
    return bool(each.xids) or each.ecc_corrected > 0 or each.ecc_uncorrected > 0


def _errors_cell(node: NodeView) -> Iterable[Span]:
    said, role = _errors(node.figures)
    return ((said, role),)


def _errors(found: Sequence[DeviceFigures]) -> Span:
    """The newest XID, else errors of memory: those that could not be corrected first."""
    xids = [xid for each in found for xid in each.xids]
    if xids:
        return (f"XID {xids[-1]}", "bad")
    wrong = sum(max(0, each.ecc_uncorrected) for each in found)
    if wrong:
        return (f"ECC {wrong:,} bad", "bad")
    corrected = sum(max(0, each.ecc_corrected) for each in found)
    return (f"ECC {corrected:,}", "dim") if corrected else ("", "")


# --------------------------------------------------------------------------- device by device


def paint(_view: View, width: int, height: int, found: Sequence[NodeView], at: int) -> list[Line]:
    """The devices of node ``at`` first, then those of the ones after it, as many as have room."""
    if not found:
        return nothing((("no node is chosen", "dim"),), height)
    lines: list[Line] = []
    names = (each.device for node in found for each in node.figures)
    label = max(_LEAST_LABEL, min(_LABEL, max(map(len, names), default=_LABEL)))
    for node in (*found[at:], *found[:at]):
        block = _node(node, label, width)
        if lines and len(lines) + len(block) > height:
            break
        lines += block
    return lines[:height]


def _node(node: NodeView, label: int, width: int) -> list[Line]:
    if not node.figures:
        sign, role = STATES[node.state]
        why = node.reason or "tells nothing of its devices"
        name: Span = (cell(node.name, label - 2), "strong")
        return [clipped(((f"{sign} ", role), name, (f" {why}", "dim")), width)]
    return [line for each in node.figures for line in _device(each, label, width)]


def _device(each: DeviceFigures, label_width: int, width: int) -> list[Line]:
    """Memory in a bar, then what else is known, in as many lines as it takes."""
    label: Span = (cell(each.device, label_width) + " ", "strong")
    rest: Span = (" " * len(label[0]), "")
    room = min(_WIDE_BAR, max(_BAR, width // 5))
    fields = [_memory(each, room), *_card(each)]
    told = flow([field for field in fields if field], max(1, width - len(label[0])))
    if not told:
        return [(label, ("tells no figures", "dim"))]
    return [(label, *told[0]), *((rest, *line) for line in told[1:])]


def _memory(each: DeviceFigures, room: int) -> Line:
    if not each.used_bytes:
        return (("RSS ", "dim"), (size(each.rss_bytes), "")) if each.rss_bytes else ()
    parts: list[Span] = [(size(each.used_bytes), "strong")]
    # As ``oobleckctl describe node`` has it: a process on the host is never "of" what is planned of it.
    if each.total_bytes:
        parts.append((f" of {size(each.total_bytes)}", "dim"))
    if each.planned_bytes:
        parts.append((f", planned {size(each.planned_bytes)}", "dim"))
    return _wide((*_memory_bar(each, room), (" ", ""), *parts), room + _MEMORY)


def _wide(field: Line, width: int) -> Line:
    """At least so many cells, so that those of several devices are below each other."""
    return (*field, (" " * max(0, width - length(field)), ""))


def _memory_bar(each: DeviceFigures, room: int) -> Line:
    """What is used of what there is; a stroke where the plan's ends, dots after it."""
    whole = each.total_bytes or max(each.planned_bytes, each.used_bytes)
    drawn = bar(0.0, each.used_bytes / whole, room).ljust(room)
    planned = min(room - 1, round(each.planned_bytes / whole * room)) if each.planned_bytes else -1
    cells = [
        ("┊", "dim") if index == planned and sign == " " else ("·", "dim") if sign == " " else (sign, "")
        for index, sign in enumerate(drawn)
    ]
    used = _memory_role(each)
    spans: list[Span] = []
    for sign, role in cells:
        looks: Role = "dim" if role else used
        if spans and spans[-1][1] == looks:
            spans[-1] = (spans[-1][0] + sign, looks)
        else:
            spans.append((sign, looks))
    return tuple(spans)


def _card(each: DeviceFigures) -> list[Line]:
    """What is known of the card."""
    fields: list[Line] = []
    if each.rss_bytes and 0 < each.used_bytes != each.rss_bytes:
        fields.append(_wide((("RSS ", "dim"), (size(each.rss_bytes), "")), 12))
    if each.utilisation >= 0:
        fields.append((("busy ", "dim"), (f"{each.utilisation:>4.0%}", "")))
    if each.power_w:
        limit = f" of {each.power_limit_w:.0f}" if each.power_limit_w else ""
        fields.append(((short(each.power_w), ""), (f"{limit} W", "dim")))
    if each.temperature_c:
        fields.append(((f"{each.temperature_c} °C", ""),))
    if each.clock_mhz:
        most = f" of {each.clock_max_mhz:,}" if each.clock_max_mhz else ""
        fields.append(((f"{each.clock_mhz:>5,}", ""), (f"{most} MHz", "dim")))
    if each.card:
        fields.append(((each.card, "dim"),))
    if each.throttled:
        fields.append(((f"! held down: {', '.join(each.throttled)}", "warn"),))
    if each.ecc_corrected >= 0 or each.ecc_uncorrected >= 0:
        fields.append(_ecc(each))
    if each.xids:
        fields.append(((f"✗ XID {', '.join(map(str, each.xids))}", "bad"),))
    return fields


def _ecc(each: DeviceFigures) -> Line:
    corrected, wrong = max(0, each.ecc_corrected), max(0, each.ecc_uncorrected)
    if not corrected and not wrong:
        return (("ECC 0", "dim"),)
    said = f"{corrected:,} corrected" + (f", {wrong:,} not" if wrong else "")
    return (("ECC ", "dim"), (said, "bad" if wrong else "" if corrected else "dim"))
