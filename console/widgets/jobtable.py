"""All jobs in rows: state, progress, what is left, loss, speed, and the place of those that wait. Pure."""

from __future__ import annotations

import msgspec

from oobleckd.console.model import ENDED, View
from oobleckd.console.widgets.jobfacts import full_name, left_of
from oobleckd.console.widgets.listing import clamped, counted, matches, missing, nothing, rows
from oobleckd.draw.lines import Line, Role, Span, bar, cell, clean, clipped, length
from oobleckd.protocol.jobviews import JobView
from oobleckd.words import done, loss, ordinal, rate, seconds, short_age

DEPENDS = ("jobs", "job", "chosen", "refused", "link")
_ROLES: dict[str, Role] = {
    "running": "good", "done": "good", "failed": "bad", "recovering": "warn", "waiting": "warn",
    "queued": "note", "cancelled": "dim",
}  # fmt: skip
_WITH_LOSS, _ROOMY, _WIDE = 70, 100, 140
_BAR = 10
_TAIL = 8
_REASON = 24  # less of it says nothing
_LEFT = 12
_ORDER = {"queued": 1}  # those at work, those that wait, those that have ended


class JobTableLook(msgspec.Struct, frozen=True):
    """Which rows, and where the cursor is."""

    words: str = ""
    cursor: int = 0


def paint(view: View, now: float, width: int, height: int, look: JobTableLook | None = None) -> list[Line]:
    """A line with the columns' names, and the rows in sight."""
    look = look or JobTableLook()
    found = selected(view, look)
    if not found:
        none = f'no job has "{look.words}"' if look.words else "no job yet: `oobleckctl submit job.toml`"
        return nothing(missing(view, "jobs", none), height)
    place = places(view)
    said = counted(len(found), len(view.jobs), "jobs", look.words)
    head = clipped(((_head(width) + said, "dim"),), width)
    body = rows(
        found, look.cursor, width, max(1, height - 1),
        lambda job: _row(job, view, place.get(job.id, 0), view.clock(now), width),
    )  # fmt: skip
    return [head, *body][:height] if height > 1 else body


def selected(view: View, look: JobTableLook) -> list[JobView]:
    """The rows: those at work, the queue in its order, then those that have ended, the newest first."""
    found = [job for job in view.jobs if not look.words or matches(_words(job), look.words)]
    ended = [job for job in found if job.state in ENDED]
    return [*sorted((job for job in found if job.state not in ENDED), key=_rank), *reversed(ended)]


def _rank(job: JobView) -> int:
    return _ORDER.get(job.state, 0)


def places(view: View) -> dict[str, int]:
    """Id of a job that waits -> its place in the queue; the next one has the first."""
    return {job.id: place for place, job in enumerate((j for j in view.jobs if j.state == "queued"), 1)}


def at_cursor(view: View, look: JobTableLook) -> JobView | None:
    """The job of the cursor; None where no row is left."""
    found = selected(view, look)
    return found[clamped(look.cursor, len(found))] if found else None


def _words(job: JobView) -> str:
    return f"{job.name} {job.id} {job.state} {job.policy} {job.reason}"


def _head(width: int) -> str:
    left = (
        f"  {cell('job', _name(width))} {cell('state', 10)} {cell('progress', _BAR + 5)} "
        f"{cell('ETA', _LEFT, right=True)}"
    )
    if width >= _WITH_LOSS:
        left += f" {cell('loss', 9, right=True)}"
    if width >= _ROOMY:
        left += f" {cell('step', 17, right=True)}"
    if width >= _WIDE:
        left += f" {cell('tokens/s', 9, right=True)} {cell('nodes', 5, right=True)} "
        left += cell("age", 7, right=True)
    return f"{left}  "


def _name(width: int) -> int:
    return min(40, width - 76) if width >= _ROOMY else max(14, min(24, width - 55))


def _row(job: JobView, view: View, place: int, now: float, width: int) -> Line:
    shown = view.job is not None and view.job.id == job.id
    share = job.step / job.steps if job.steps else 0.0
    known = full_name(job)
    name_role: Role = "strong" if shown else ""
    spans: list[Span] = [
        ("▸ " if shown else "  ", "good"),
        (cell(_short(job.id if len(known) > _name(width) else known, _name(width)), _name(width)), name_role),
        (f" {cell(job.state, 10)} ", _ROLES.get(job.state, "")),
        (cell(bar(0.0, share, _BAR) if share else "", _BAR), "bar"),
        (f"{done(job.step, job.steps):>5} ", ""),
        (cell(_left(job, place), _LEFT, right=True), "dim" if place else ""),
    ]
    if width >= _WITH_LOSS:
        known_loss = loss(job.loss) if job.step and job.loss is not None else "-"
        spans.append((f" {cell(known_loss, 9, right=True)}", ""))
    if width >= _ROOMY:
        spans.append((f" {cell(f'{job.step:,}/{job.steps:,}', 17, right=True)}", ""))
    if width >= _WIDE:
        tokens = job.progress.tokens_per_s if job.progress is not None else 0.0
        spans.append((f" {cell(rate(tokens) if tokens else '-', 9, right=True)}", ""))
        spans.append((f" {cell(str(len(job.nodes)) if job.nodes else '-', 5, right=True)}", ""))
        spans.append((f" {cell(short_age(now - job.submitted_at), 7, right=True)}", "dim"))
    roomy = width - length(tuple(spans)) >= _REASON
    return (*spans, (f"  {job.reason}", "dim")) if roomy else tuple(spans)


def _short(name: str, width: int) -> str:
    """A long one without its middle: jobs differ at the end."""
    name = clean(name)
    return name if len(name) <= width else f"{name[: width - _TAIL - 1]}…{name[-_TAIL:]}"


def _left(job: JobView, place: int) -> str:
    """What is left of one at work, or how many are before one that waits."""
    if place:
        return "next" if place == 1 else f"{ordinal(place)} in line"
    left_s = left_of(job)
    return "-" if left_s < 0 else seconds(left_s)
