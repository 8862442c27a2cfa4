"""The verdict: is the picture live, what runs, how far, and how much can still go wrong. Three lines.

The third line is for the one thing that matters most now: no daemon, an old picture, an open incident, a job
that waits or failed.
"""

from __future__ import annotations

from oobleckd import __version__
from oobleckd.console.model import LISTS, View
from oobleckd.console.widgets.jobfacts import left_of
from oobleckd.draw.lines import Line, Role, Span, clipped, flow, length
from oobleckd.draw.times import clock, dated, minute
from oobleckd.protocol.jobviews import JobView
from oobleckd.words import age, count, done, noun, rate, seconds, silence

HEIGHT = 3
AWAY = "daemon away"
_ROOMY = 100
NEEDS_NONE = f"{AWAY}, training does not need it"
ODD = "the daemon answers what this console cannot read"

_AWAY = frozenset({"disconnected", "lost", "left"})
_JOB_ROLES: dict[str, Role] = {
    "running": "good", "done": "good", "failed": "bad", "recovering": "warn", "waiting": "warn",
}  # fmt: skip


def paint(view: View, now: float, width: int, height: int = HEIGHT) -> list[Line]:
    """Headline, numbers, banner."""
    head, numbers = [_link(view, now), *_job_fields(view)], _number_fields(view, now, width)
    lines = flow(head, width)
    lines = [*lines, *flow(numbers, width)] if len(lines) == 1 else flow([*head, *numbers], width)
    lines[0] = _with_clock(lines[0], view, now, width)
    if height < 2 or (len(lines) >= height and not _pressing(view)):
        return lines[:height]
    lines = lines[: height - 1]
    lines += [()] * (height - 1 - len(lines))
    return [*lines, clipped(_banner(view, now), width)]


def _pressing(view: View) -> bool:
    """Whether the banner has more to say than who the daemon is; else its line is for numbers that have no
    room.
    """
    quiet = view.link == "live" and view.status is not None and view.status.version == __version__
    at_peace = (view.incident is None or not view.incident.open) and not _unknown(view)
    return not (quiet and at_peace and view.job is not None and not view.job.reason)


def _with_clock(line: Line, view: View, now: float, width: int) -> Line:
    """The time of the picture at the right edge, where there is room; the past has it on the left."""
    told = clock(view.clock(now))
    gap = width - length(line) - len(told)
    if view.link == "replay" or not view.heard_at or gap < 3:
        return line
    return (*line, (" " * gap, ""), (told, "dim"))


def frozen(now: float) -> Line:
    """The banner while the picture is held."""
    return ((" FROZEN ", "banner-warn"), (f" the picture of {clock(now)}; space lets it go on", "warn"))


def _link(view: View, now: float) -> Line:
    match view.link:
        case "live":
            return (("● live", "good"),)
        case "replay":
            return ((f"◀ PAST {dated(view.heard_at, now)}" if view.heard_at else "◀ PAST", "warn"),)
        case "stale":
            return ((f"◌ STALE {age(view.age_s(now))}", "warn"),)
        case _:
            return (("○ no daemon", "warn"),)


def _job_fields(view: View) -> list[Line]:
    job = view.job
    if job is None:
        unknown = view.refusal("jobs") != ""
        return [(("job not known" if unknown else "no job", "dim"),)] if view.heard_at else []
    return [_job_line(view, job), _progress(job), *_eta(job), can_lose(job)]


def _progress(job: JobView) -> Line:
    share = f" {done(job.step, job.steps)}" if job.steps else ""
    return (
        ("step ", "dim"),
        (f"{job.step:,}", "strong"),
        (f"/{job.steps:,}", "dim"),
        (share, ""),
        *_skipped(job),
    )


def _eta(job: JobView) -> list[Line]:
    left_s = left_of(job)
    return [(("ETA ", "dim"), (seconds(left_s), "strong"))] if left_s >= 0 and job.step < job.steps else []


def _skipped(job: JobView) -> Line:
    """How many steps made no update: in red while the last ones are such."""
    if not job.steps_skipped:
        return ()
    return ((f" ({job.steps_skipped:,} skipped)", "bad" if job.skipped_in_row else "warn"),)


def _job_line(view: View, job: JobView) -> Line:
    """Its name and state, and how many others wait for its place."""
    said: Line = (("job ", "dim"), (job.name, "strong"), (f" {job.state}", _JOB_ROLES.get(job.state, "")))
    return (*said, (f", {view.num_queued} queued", "dim")) if view.num_queued else said


def can_lose(job: JobView) -> Line:
    """How many nodes can die at once with nothing lost, of how many were asked for."""
    if job.tolerance < 0:
        return (("not deployed", "dim"),)
    if job.tolerance >= job.f:
        asked = (
            f" {noun(job.tolerance, 'node')}, {job.f} asked for"
            if job.tolerance > job.f
            else f" of {count(job.f, 'node')}"
        )
        return (("can still lose ", "dim"), (str(job.tolerance), "good"), (asked, "dim"))
    # Less than was asked for is what an operator has to see from the other end of the room.
    role: Role = "banner-warn" if job.tolerance else "banner-bad"
    return ((f" can still lose {job.tolerance} of {count(job.f, 'node')} ", role),)


def _number_fields(view: View, now: float, width: int) -> list[Line]:
    if not view.heard_at:
        return [((view.hint, "dim"),)] if view.hint else []
    here = sum(node.state not in _AWAY for node in view.nodes)
    fields: list[Line] = [((f"{here}", "strong"), (f" of {count(len(view.nodes), 'node')} here", "dim"))]
    job = view.job
    if job is not None:
        fields += _of_progress(job)
        if job.samples_per_s:
            roomy = width >= _ROOMY
            best = best_words(view, now, when=roomy)
            fields.append(((rate(job.samples_per_s), "strong"), (" samples/s", "dim"), (best, "dim")))
            fields += plan_field(view, whose=roomy)
            fields.append((("step ", "dim"), (seconds(job.step_s), "")))
        incidents = f"{count(job.incidents, 'incident')}, {count(job.steps_lost, 'step')} lost"
        fields.append(((incidents, "warn" if job.steps_lost else "dim"),))
        pipelines = f" {noun(len(view.pipelines), 'pipeline')}"
        fields.append(((f"{len(view.pipelines)}", "strong"), (pipelines, "dim")))
        fields.append((("gen ", "dim"), (str(job.generation), "")))
        fields.append((("policy ", "dim"), (job.policy, "")))
    # At the end: where there is no room for all, how many are here is there all the same.
    return [*fields, silent] if (silent := _silence(view)) else fields


def _of_progress(job: JobView) -> list[Line]:
    """Tokens a second, what is made of the hardware and of the time, and for how long already."""
    progress = job.progress
    if progress is None or not progress.tokens_per_s:
        return []
    fields: list[Line] = [((rate(progress.tokens_per_s), "strong"), (" tokens/s", "dim"))]
    if progress.mfu:
        fields.append((("MFU ", "dim"), (f"{progress.mfu:.1%}", "strong")))
    if progress.goodput:
        fields.append((("goodput ", "dim"), (f"{progress.goodput:.1%}", "")))
    if progress.elapsed_s:
        fields.append((("elapsed ", "dim"), (seconds(progress.elapsed_s), "")))
    return fields


def _silence(view: View) -> Line:
    """Of how many of those that are not here a sign of life may yet come."""
    # Who is not back since the daemon's restart was heard by no one yet, and has no such time.
    found = [n.heartbeat_age_s for n in view.nodes if n.state == "disconnected" and n.heartbeat_age_s]
    return ((silence(len(found), max(found)), "warn"),) if found else ()


def best_words(view: View, now: float, *, when: bool = True) -> str:
    """Beside what is measured now: the most that was ever measured, and ``when``."""
    best, at = view.best_rate
    if view.job is None or not best:
        return ""
    if view.job.samples_per_s >= best:
        return ", the best so far"
    return f", best {rate(best)}" + (f" at {minute(at, view.clock(now))}" if when else "")


def plan_field(view: View, *, whose: bool = True) -> list[Line]:
    """The plan as modelled beside the best one of all nodes that joined (``whose``: say so); nothing measured
    is part of it.
    """
    share, whole = view.plan_share, view.goodput.best_plan_nodes if view.goodput is not None else 0
    if not share:
        return []
    here = sum(node.state not in _AWAY for node in view.nodes)
    # Green is for a cluster that lacks nobody: with a node gone even the best plan of those left is less
    # than what there was.
    role: Role = "warn" if share < 0.95 else "good" if here >= max(whole, len(view.nodes)) else "strong"
    said = f" of the best of {count(whole, 'node')}" if whose and whole > 1 else ""
    return [(("plan ", "dim"), (f"{share:.0%}", role), (said, "dim"))]


# --------------------------------------------------------------------------- the banner

_REASON_ROLES: dict[str, Role] = {"failed": "banner-bad", "waiting": "banner-warn"}


def _banner(view: View, now: float) -> Line:
    match view.link:
        case "replay":
            return _past(view, now)
        case "stale":
            return _stale(view, now)
        case "waiting":
            return _no_daemon(view)
        case _:
            return _of_job(view, now)


def _stale(view: View, now: float) -> Line:
    """What goes on without the daemon is a step; of a job that did not run, or of one to be repaired, nothing
    is known.
    """
    trained = view.job is not None and view.job.state == "running"
    head = ODD if view.answers else NEEDS_NONE if trained else AWAY
    text = f" last word {age(view.age_s(now))} ago, at {dated(view.heard_at, now)}; trying again"
    return ((f" {head} ", "banner-warn"), (f"{text}: {view.problem}", "warn"))


def _of_job(view: View, now: float) -> Line:
    incident = view.incident
    if incident is not None and incident.open:
        phase = incident.phases[-1].phase if incident.phases else "detect"
        text = f" {phase}, {seconds(max(0.0, view.clock(now) - incident.at))} so far: {incident.cause}"
        return ((f" {incident.id} open ", "banner-bad"), (text, "bad"))
    if view.job is not None and view.job.reason:
        role = _REASON_ROLES.get(view.job.state, "banner-dim")
        return ((f" {view.job.state} ", role), (f" {view.job.reason}", ""))
    if unknown := _unknown(view):
        return unknown
    if view.job is None:
        return (("no job yet: `oobleckctl submit job.toml` hands one in", "dim"),)
    return _daemon(view)


def _unknown(view: View) -> Line:
    """The first list that the daemon did not give, or gave in words of another version."""
    found = next((pair for pair in view.refused if pair[0] in LISTS), None)
    return () if found is None else ((f" {found[0]} not known ", "banner-warn"), (f" {found[1]}", "warn"))


def _daemon(view: View) -> Line:
    if view.status is None:
        return ()
    said: Span = (f"oobleckd {view.status.version}, {view.status.endpoint}", "dim")
    if view.status.version == __version__:
        return (said,)
    return (said, (f"   ! this console is {__version__}: some of its questions may have no answer", "warn"))


def _past(view: View, now: float) -> Line:
    incident, at = view.incident, view.heard_at
    spans: list[Span] = [(f" PAST {dated(at, now, digits=1)} " if at else " PAST ", "banner-warn")]
    if view.problem:
        return (*spans, (f" {view.problem}" + (f"; {view.hint}" if view.hint else ""), "warn"))
    if view.tape is not None:
        spans.append((" playing" if view.tape.playing else " standing still", "warn"))
        spans.append((f", known from {dated(view.tape.begins, at)} to {dated(view.tape.until, at)}", "dim"))
    if incident is not None and incident.open:
        spans.append((f"   {incident.id} open: {incident.cause}", "bad"))
    return tuple(spans)


def _no_daemon(view: View) -> Line:
    if not view.problem:
        return ((" looking for the daemon ", "banner-dim"),)
    return ((" no daemon yet ", "banner-warn"), (f" {view.problem}", ""))
