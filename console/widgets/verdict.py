"""The verdict: is the picture live, what runs, how far, and how much can still go wrong. Three lines.

The third line is for the one thing that matters most now: no daemon, an old picture, an open incident, a job
that waits or failed.
"""

from __future__ import annotations

from console.model import View
from oobleckd.draw.lines import Line, Role, age, clipped, clock, count, flow, rate, seconds
from oobleckd.protocol.api import JobView

HEIGHT = 3
AWAY = "daemon away, training goes on"

_JOB_ROLES: dict[str, Role] = {
    "running": "good", "done": "good", "failed": "bad", "recovering": "warn", "waiting": "warn",
}  # fmt: skip


def paint(view: View, now: float, width: int, height: int = HEIGHT) -> list[Line]:
    """Headline, numbers, banner."""
    head, numbers = [_link(view, now), *_job_fields(view)], _number_fields(view)
    lines = flow(head, width)
    lines = [*lines, *flow(numbers, width)] if len(lines) == 1 else flow([*head, *numbers], width)
    lines = lines[: height - 1]
    lines += [()] * (height - 1 - len(lines))
    return [*lines, clipped(_banner(view, now), width)]


def frozen(now: float) -> Line:
    """The banner while the picture is held."""
    return ((" FROZEN ", "banner-warn"), (f" the picture of {clock(now)}; space lets it go on", "warn"))


def _link(view: View, now: float) -> Line:
    match view.link:
        case "live":
            return (("● live", "good"),)
        case "stale":
            return ((f"◌ STALE {age(view.age_s(now))}", "warn"),)
        case _:
            return (("○ no daemon", "warn"),)


def _job_fields(view: View) -> list[Line]:
    job = view.job
    if job is None:
        return [(("no job", "dim"),)] if view.heard_at else []
    return [
        (("epoch ", "dim"), (str(job.epoch), "strong")),
        (("job ", "dim"), (job.name, "strong"), (f" {job.state}", _JOB_ROLES.get(job.state, ""))),
        (("step ", "dim"), (f"{job.step:,}", "strong"), (f"/{job.steps:,}", "dim")),
        (("policy ", "dim"), (job.policy, "")),
        can_lose(job),
    ]


def can_lose(job: JobView) -> Line:
    """How many nodes can die at once with nothing lost, of how many were asked for."""
    if job.tolerance < 0:
        return (("not deployed", "dim"),)
    role: Role = "good" if job.tolerance >= job.f else "warn" if job.tolerance else "bad"
    return (("can still lose ", "dim"), (str(job.tolerance), role), (f" of {job.f} nodes", "dim"))


def _number_fields(view: View) -> list[Line]:
    if not view.heard_at:
        return [((view.hint, "dim"),)] if view.hint else []
    alive = sum(node.state not in {"lost", "left"} for node in view.nodes)
    fields: list[Line] = [
        ((f"{alive}", "strong"), (f" of {len(view.nodes)} nodes here", "dim")),
        ((f"{len(view.pipelines)}", "strong"), (" pipelines", "dim")),
    ]
    job = view.job
    if job is not None:
        if job.samples_per_s:
            fields.append(((rate(job.samples_per_s), "strong"), (" samples/s", "dim")))
            fields.append((("step ", "dim"), (seconds(job.step_s), "")))
        incidents = f"{count(job.incidents, 'incident')}, {count(job.steps_lost, 'step')} lost"
        fields.append(((incidents, "warn" if job.steps_lost else "dim"),))
    return fields


# --------------------------------------------------------------------------- the banner


def _banner(view: View, now: float) -> Line:
    if view.link == "stale":
        text = f" last word {age(view.age_s(now))} ago, at {clock(view.heard_at)}; trying again"
        return ((f" {AWAY} ", "banner-warn"), (f"{text}: {view.problem}", "warn"))
    if view.link == "waiting":
        return _no_daemon(view)
    incident = view.incident
    if incident is not None and incident.open:
        phase = incident.phases[-1].phase if incident.phases else "detect"
        text = f" {phase}, {seconds(max(0.0, now - incident.at))} so far: {incident.cause}"
        return ((f" {incident.id} open ", "banner-bad"), (text, "bad"))
    if view.job is not None and view.job.reason:
        role: Role = "banner-bad" if view.job.state == "failed" else "banner-dim"
        return ((f" {view.job.state} ", role), (f" {view.job.reason}", ""))
    if view.job is None:
        return (("no job yet: `oobleckctl submit job.toml` hands one in", "dim"),)
    return ((f"oobleckd {view.status.version}, {view.status.endpoint}", "dim"),) if view.status else ()


def _no_daemon(view: View) -> Line:
    if not view.problem:
        return ((" looking for the daemon ", "banner-dim"),)
    return ((" no daemon yet ", "banner-warn"), (f" {view.problem}", ""))
