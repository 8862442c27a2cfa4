"""An incident: what died, five phases on one axis beside the median of earlier ones, what it cost, why the
plan is what it is.

Its choices in full (``choices``) have a panel of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import get_args

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import missing
from oobleckd.console.widgets.pipelines import node_of
from oobleckd.draw.lines import Line, Role, Span, bar, clipped, cut, wrapped
from oobleckd.protocol.incidentviews import IncidentView, Phase
from oobleckd.words import count, ms, seconds, size

PHASES: tuple[Phase, ...] = get_args(Phase)
_LABEL = 13
_VALUE = 11
_MEDIAN = 14
_WITH_MEDIAN = 54
_MOST_ROWS = 3
# What a recovery may take before somebody should look into it. Shown, never enforced.
# Nothing in the system depends on it: it says when somebody should look. (D-console-008)
BUDGET_S = 10.0


def paint(view: View, now: float, width: int, height: int) -> list[Line]:
    """Of the newest incident: headline, a bar for each phase, the price, the reason."""
    incident = view.incident
    if incident is None:
        return [missing(view, "incidents", "nothing has failed")]
    return one(view, incident, now, width, height)


def one(
    view: View, incident: IncidentView, now: float, width: int, height: int, *, priced: bool = True
) -> list[Line]:
    """Of any incident the same. ``priced``: what it cost and why, too; else another panel says that."""
    total_s = _total_s(incident, view.clock(now))
    usual = medians(view.incidents, incident)
    lines = [_headline(incident, total_s, width)]
    if incident.open and not incident.phases:
        return [
            *lines,
            clipped((("its phases are told when it is over, or known in a moment", "dim"),), width),
        ][:height]
    bars = [clipped(_phase(incident, phase, total_s, usual.get(phase), width), width) for phase in PHASES]
    if not priced:
        tall = max(1, min(_MOST_ROWS, (height - 1) // len(PHASES)))
        return [*lines, *(row for line in bars for row in (line, *[_ground(line)] * (tall - 1)))][:height]
    lines += bars
    rest = height - len(lines)
    price = _price(incident)
    if rest >= 2 or not incident.reason:
        told = wrapped(price, width, 2 if rest >= 4 else 1)
        lines += [((text, "dim"),) for text in told]
        rest -= len(told)
    lines += [((text, ""),) for text in wrapped(incident.reason, width, rest)]
    return lines[:height]


def medians(incidents: Sequence[IncidentView], but: IncidentView) -> dict[Phase, float]:
    """Phase -> the median of its times in the incidents before ``but`` that are over, in seconds."""
    if _USUAL.incidents is not incidents or _USUAL.but is not but:
        _USUAL.incidents, _USUAL.but, _USUAL.found = incidents, but, _medians(incidents, but)
    return _USUAL.found


@dataclass(slots=True)
class _Usual:
    """The last medians, and what they are of: a list of thousands stays the same for many frames."""

    incidents: Sequence[IncidentView] = ()
    but: IncidentView | None = None
    found: dict[Phase, float] = field(default_factory=dict)


_USUAL = _Usual()


def _medians(incidents: Sequence[IncidentView], but: IncidentView) -> dict[Phase, float]:
    before = [each for each in incidents if not each.open and each.id != but.id and each.at <= but.at]
    spent = {phase: [s for each in before if (s := _spent_s(each, phase)) is not None] for phase in PHASES}
    return {phase: median(times) for phase, times in spent.items() if times}


def _spent_s(incident: IncidentView, phase: Phase) -> float | None:
    parts = [part.duration_s for part in incident.phases if part.phase == phase]
    return sum(parts) if parts else None


def _total_s(incident: IncidentView, now: float) -> float:
    """An open incident grows; it was ``total_s`` old when it was fetched."""
    return max(incident.total_s, now - incident.at) if incident.open else incident.total_s


def _ground(line: Line) -> Line:
    """The same bar in another row, without what is written beside it."""
    return tuple((text if role in PHASES else " " * len(text), role) for text, role in line[:2])


def cause_of(incident: IncidentView) -> str:
    """Why, without the name of the one node that died: it stands before it."""
    return incident.cause.removeprefix(f"{incident.nodes[0]}: " if len(incident.nodes) == 1 else "")


def _headline(incident: IncidentView, total_s: float, width: int) -> Line:
    lost = f", {count(incident.steps_lost, 'step')} lost"
    over = f" (budget {seconds(BUDGET_S)})" if width >= 100 or total_s > BUDGET_S else ""
    took = f"open for {seconds(total_s)}{over}" if incident.open else f"total {ms(total_s)}{over}{lost}"
    role: Role = "bad" if incident.open else "strong"
    tail = f" {took}"
    room = max(0, width - len(incident.id) - len(tail))
    who = _who(incident.nodes, room - len(" "))
    nodes = f" {who} "[:room] if who else ""
    head: list[Span] = [(incident.id, role), (nodes, "")]
    room -= len(nodes)
    cause = f"({cause_of(incident)})" if room > len("()") + 3 and nodes.strip() else ""
    if len(cause) > room:
        cause = cause[: room - 2] + "…)"
    return clipped(
        (
            *head,
            (cause, "dim"),
            (tail, "warn" if incident.open or incident.steps_lost or total_s > BUDGET_S else ""),
        ),
        width,
    )


def _who(nodes: Sequence[str], room: int) -> str:
    """All of them; where these have no room, their number and, in half of it, the first ones; nothing where
    that has none.
    """
    names = ", ".join(nodes)
    if len(names) <= room or len(nodes) == 1:
        return cut(names, room)
    number = count(len(nodes), "node")
    first = names[: max(0, room // 2 - len(number) - len(":  …"))].rpartition(", ")[0]
    said = f"{number}: {first} …" if first else number
    return said if len(said) <= room else ""


def _phase(incident: IncidentView, phase: Phase, total_s: float, usual_s: float | None, width: int) -> Line:
    """All times of one phase (a second loss begins with detect again), drawn where they were."""
    parts = [part for part in incident.phases if part.phase == phase]
    label: Span = (f" {phase:<{_LABEL - 1}}", "")
    if not parts:
        return (label, ("-", "dim"))
    running = incident.open and incident.phases[-1].phase == phase
    told = f"  p50 {ms(usual_s)}" if usual_s is not None and width >= _WITH_MEDIAN else ""
    room = max(4, width - _LABEL - _VALUE - (_MEDIAN if told else 0))
    drawn = ""
    spent_s = 0.0
    for part in parts:
        last = running and part is parts[-1]
        stop_s = total_s if last else part.start_s + part.duration_s
        spent_s += stop_s - part.start_s
        piece = bar(part.start_s / (total_s or 1.0), stop_s / (total_s or 1.0), room)
        drawn += piece[len(drawn) :]
    return (
        label,
        (drawn, phase),
        (f" {ms(spent_s)}", "strong"),
        (" …" if running else "", "warn"),
        (told, "dim"),
    )


def _price(incident: IncidentView) -> str:
    words = []
    if incident.committed_s:
        words.append(f"the step committed after {ms(incident.committed_s)}")
    if incident.step_layer_gradients:
        of = count(incident.step_layer_gradients, "layer gradient")
        words.append(f"{incident.layer_gradients:,} of {of} computed again")
    if incident.copied_bytes:
        nodes = ", ".join(dict.fromkeys(node_of(each.device) for each in incident.sources))
        words.append(f"{size(incident.copied_bytes)} copied" + (f" from {nodes}" if nodes else ""))
    return ", ".join(words) or "nothing computed again, nothing copied"
