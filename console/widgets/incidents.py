"""All incidents in rows, the newest on top. Pure."""

from __future__ import annotations

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import clamped, counted, matches, missing, nothing, rows
from oobleckd.console.widgets.recovery import cause_of
from oobleckd.draw.lines import Line, Role, clipped
from oobleckd.draw.times import dated
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.words import CELLS, seconds

DEPENDS = ("incidents", "refused")


class IncidentsLook(msgspec.Struct, frozen=True):
    """Which rows, and where the cursor is."""

    words: str = ""
    cursor: int = 0


def paint(view: View, now: float, width: int, height: int, look: IncidentsLook | None = None) -> list[Line]:
    """A line with the columns' names, and the rows in sight."""
    look = look or IncidentsLook()
    found = selected(view, look)
    if not found:
        said = f'no incident has "{look.words}"' if look.words else "nothing has failed"
        return nothing(missing(view, "incidents", said), height)
    said = counted(len(found), len(view.incidents), "incidents", look.words)
    today = view.clock(now)
    wide = max(len(dated(each.at, today)) for each in (found[0], found[-1]))  # those of other days have dates
    names = (
        f"  {'incident':<9} {'at':<{wide}}  {'step':>9}  {'total':>{CELLS}}  {'steps lost':>10}  "
        "nodes and cause  "
    )
    head: Line = ((names + said, "dim"),)
    body = rows(
        found,
        look.cursor,
        width,
        max(1, height - 1),
        lambda each: _row(each, f"{dated(each.at, today):<{wide}}"),
    )
    return [clipped(head, width), *body][:height] if height > 1 else body


def selected(view: View, look: IncidentsLook) -> list[IncidentView]:
    """The rows, the newest first."""
    return [each for each in reversed(view.incidents) if matches(_words(each), look.words)]


def at_cursor(view: View, look: IncidentsLook) -> IncidentView | None:
    """The incident of the cursor; None where no row is left."""
    found = selected(view, look)
    return found[clamped(look.cursor, len(found))] if found else None


def _words(incident: IncidentView) -> str:
    return " ".join((incident.id, incident.cause, incident.reason, *incident.nodes))


def _row(incident: IncidentView, at: str) -> Line:
    role: Role = "bad" if incident.open else "warn" if incident.steps_lost else ""
    sign = "✗" if incident.open else "!" if incident.steps_lost else "✓"
    took = "open" if incident.open else seconds(incident.total_s)
    text = (
        f" {incident.id:<9} {at}  {incident.step:>9,}  {took:>{CELLS}}  {incident.steps_lost:>10,}  "
        f"{', '.join(incident.nodes)} "
    )
    return ((sign, role or "good"), (text, role), (f"({cause_of(incident)})", "dim"))
