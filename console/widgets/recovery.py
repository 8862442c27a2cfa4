"""The last incident: what died, five phases on one axis, what it cost, and why the plan is what it is."""

from __future__ import annotations

from typing import get_args

from console.model import View
from oobleckd.draw.lines import Line, Role, Span, bar, clipped, count, ms, seconds, size, wrapped
from oobleckd.protocol.api import IncidentView, Phase

PHASES: tuple[Phase, ...] = get_args(Phase)
_LABEL = 13
_VALUE = 11


def paint(view: View, now: float, width: int, height: int) -> list[Line]:
    """Headline, a bar for each phase, the price, the reason."""
    incident = view.incident
    if incident is None:
        return [(("nothing has failed", "dim"),)]
    total_s = _total_s(incident, view.clock(now))
    lines = [_headline(incident, total_s, width)]
    lines += [_phase(incident, phase, total_s, width) for phase in PHASES]
    rest = height - len(lines)
    price = _price(incident)
    if rest >= 2 or not incident.reason:
        lines.append(clipped(price, width))
        rest -= 1
    lines += [((text, ""),) for text in wrapped(incident.reason, width, rest)]
    return lines[:height]


def _total_s(incident: IncidentView, now: float) -> float:
    """An open incident grows; it was ``total_s`` old when it was fetched."""
    return max(incident.total_s, now - incident.at) if incident.open else incident.total_s


def _headline(incident: IncidentView, total_s: float, width: int) -> Line:
    nodes = ", ".join(incident.nodes)
    lost = f", {count(incident.steps_lost, 'step')} lost"
    took = f"open for {seconds(total_s)}" if incident.open else f"total {ms(total_s)}{lost}"
    role: Role = "bad" if incident.open else "strong"
    head: list[Span] = [(incident.id, role), (f" {nodes} ", "")]
    tail = f" {took}"
    room = width - sum(len(text) for text, _ in head) - len(tail)
    cause = f"({incident.cause})" if room > len("()") + 3 else ""
    if len(cause) > room:
        cause = cause[: room - 2] + "…)"
    return clipped(
        (*head, (cause, "dim"), (tail, "warn" if incident.open or incident.steps_lost else "")), width
    )


def _phase(incident: IncidentView, phase: Phase, total_s: float, width: int) -> Line:
    """All times of one phase (a second loss begins with detect again), drawn where they were."""
    parts = [part for part in incident.phases if part.phase == phase]
    label: Span = (f" {phase:<{_LABEL - 1}}", "")
    if not parts:
        return (label, ("-", "dim"))
    running = incident.open and incident.phases[-1].phase == phase
    room = max(4, width - _LABEL - _VALUE)
    drawn = ""
    spent_s = 0.0
    for part in parts:
        last = running and part is parts[-1]
        stop_s = total_s if last else part.start_s + part.duration_s
        spent_s += stop_s - part.start_s
        piece = bar(part.start_s / (total_s or 1.0), stop_s / (total_s or 1.0), room)
        drawn += piece[len(drawn) :]
    return (label, (drawn, phase), (f" {ms(spent_s)}", "strong"), (" …" if running else "", "warn"))


def _price(incident: IncidentView) -> Line:
    words = []
    if incident.committed_s:
        words.append(f"the step committed after {ms(incident.committed_s)}")
    if incident.step_layer_gradients:
        words.append(
            f"{incident.layer_gradients} of {incident.step_layer_gradients} layer gradients computed again"
        )
    if incident.copied_bytes:
        words.append(f"{size(incident.copied_bytes)} copied")
    return ((", ".join(words) or "nothing computed again, nothing copied", "dim"),)
