"""What the daemon's configuration says of events, and what the daemon tells its process of sinks.

Owns the shapes and their checks. Which events there are follows from the changes of the event stream.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from oobleckd.protocol.changes import PAYLOADS, Change, JobMoved, Payload
from oobleckd.protocol.jobviews import JobState

EVENTS: tuple[str, ...] = tuple(
    sorted(
        {f"job-{state}" for state in get_args(JobState)}
        | {str(kind.__struct_config__.tag) for kind in PAYLOADS if kind is not JobMoved}
    )
)
"""What a rule may wait for: the type of a change's data, and of a job that moved the state that it is in."""


class EventRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What follows when something happens: a command, or a POST to a URL. One table ``[[daemon.on_event]]``
    each.
    """

    events: Annotated[
        tuple[str, ...], Meta(min_length=1, description="Which events, such as job-failed or node-lost.")
    ]
    command: Annotated[
        tuple[str, ...], Meta(description="Program and arguments; the event is JSON on its standard input.")
    ] = ()
    url: Annotated[str, Meta(description="http or https URL that the event is posted to as JSON.")] = ""
    body: Annotated[
        Literal["event", "text"],
        Meta(description='What is posted: the event, or its sentence as {"text": …}, as Slack takes it.'),
    ] = "event"
    timeout_s: Annotated[float, Meta(gt=0, description="Seconds for one try.")] = 30.0
    retry_s: Annotated[
        float, Meta(ge=0, description="Seconds in which a POST is tried again before it is given up.")
    ] = 3600.0


def problem_of_rule(rule: EventRule) -> tuple[str, str] | None:
    """What is wrong with a rule, and a hint."""
    for event in rule.events:
        if event not in EVENTS:
            close = difflib.get_close_matches(event, EVENTS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(EVENTS)}"
            return f"events: {event!r} is no event", hint
    if bool(rule.command) == bool(rule.url):
        return "a rule has a command or a url, one of them", 'write command = ["…"] or url = "https://…"'
    if rule.url and not rule.url.startswith(("http://", "https://")):
        return "url begins with neither http:// nor https://", "write the whole URL"
    return None


def event_of(change: Change) -> str:
    """The event that a change is, "" of one that is none."""
    match change.data:
        case JobMoved(state=state):
            return f"job-{state}"
        case Payload():
            return str(change.data.__struct_config__.tag)
        case _:
            return ""


# --------------------------------------------------------------------------- daemon -> its process


class SinkOrders(msgspec.Struct, frozen=True):
    """What the process of sinks is to do: read the API at ``socket``, write below ``folder`` with sinks of
    ``kinds``, and follow ``rules``.
    """

    socket: str
    folder: str
    kinds: tuple[str, ...]
    rules: tuple[EventRule, ...] = ()
    log_level: str = "info"
