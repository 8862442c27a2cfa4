"""Why a recovery went the way it did: what moved, what was chosen, and what was not, with modelled costs.
Pure.
"""

from __future__ import annotations

from oobleckd.console.widgets.pipelines import node_of
from oobleckd.draw.lines import Line, Span, bar, clipped, flow, length, wrapped
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.words import count, ms, seconds, size

_COST = 12
_ROOMY = 80


def lines(incident: IncidentView, width: int, height: int) -> list[Line]:
    """Bytes and work done again, then the way taken and the others, cheapest first."""
    found = flow(_work(incident), width)
    found += [((text, ""),) for text in wrapped(f"chosen: {incident.reason or 'nothing yet'}", width, 3)]
    others = sorted(incident.rejected, key=lambda each: each.cost_s)
    max_s = max([incident.cost_s, *(each.cost_s for each in others)], default=0.0)
    if incident.cost_s or others:
        until = "  modelled seconds until the next loss is expected"
        found += [((until, "dim"),), *_way("✓ the chosen one", incident.cost_s, "", max_s, width, 1)]
    ways = [_way(f"✗ {each.what}", each.cost_s, each.why, max_s, width, height) for each in others]
    rows = _rows([len(way) for way in ways], height - len(found))
    for each, most in zip(others, rows, strict=True):
        found += _way(f"✗ {each.what}", each.cost_s, each.why, max_s, width, most)
    if not others:
        found.append((("there was no other way that a policy proposed", "dim"),))
    return [clipped(line, width) for line in found][:height]


def _work(incident: IncidentView) -> list[Line]:
    copied = size(incident.copied_bytes) if incident.copied_bytes else "nothing"
    pace = ""
    spent_s = sum(part.duration_s for part in incident.phases if part.phase == "copy")
    if incident.copied_bytes and spent_s > 0:
        pace = f" at {size(incident.copied_bytes / spent_s)}/s"
    work: list[Line] = [(("copied ", "dim"), (copied + pace, ""))]
    if incident.sources:
        sent = ", ".join(f"{node_of(each.device)} {size(each.num_bytes)}" for each in incident.sources)
        work.append((("from ", "dim"), (sent, "")))
    if incident.committed_s:
        work.append((("the step committed after ", "dim"), (ms(incident.committed_s), "")))
    if incident.step_layer_gradients:
        again = f"{incident.layer_gradients} of {count(incident.step_layer_gradients, 'layer gradient')}"
        forwards = f", {count(incident.layer_forwards, 'forward pass')}" if incident.layer_forwards else ""
        work.append((("computed again ", "dim"), (again + forwards, "")))
    return work


def _rows(wanted: list[int], room: int) -> list[int]:
    """As many rows for each as it wants; where there are too few, those that want most have fewer."""
    given = list(wanted)
    while sum(given) > room and max(given, default=1) > 1:
        given[given.index(max(given))] -= 1
    return given


def _way(name: str, cost_s: float, why: str, max_s: float, width: int, rows: int) -> list[Line]:
    """In ``rows`` lines at most: a bar, then who and why as broken as it has to be."""
    room = max(6, min(30, width // (4 if width >= _ROOMY else 6)))
    drawn = bar(0.0, cost_s / max_s, room).ljust(room) if max_s > 0 and cost_s > 0 else " " * room
    left: Line = (("  ", ""), (f"{seconds(cost_s):>{_COST}} ", "strong"), (drawn, "bar"), (" ", ""))
    free = max(1, width - length(left))
    first, *more = wrapped(f"{name}: {why}" if why else name, free, rows)
    indent: Span = (" " * length(left), "")
    below: list[Line] = [(indent, (text, "dim")) for text in more]
    return [(*left, (first[: len(name)], ""), (first[len(name) :], "dim")), *below]
