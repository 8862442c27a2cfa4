"""What the core machine takes in and gives out. Events are past tense, commands imperative.

The shell (daemon or simulator) feeds events to ``Machine.handle(event, now)`` and performs the
commands in order; it makes every ``Record`` durable before it performs a later ``Tell`` or ``Reply``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from oobleckd.protocol.api import Change, Request, Response
from oobleckd.protocol.messages import FromWorker, ToWorker
from planner.plan import Template
from planner.policy import Proposal, Setup, Situation

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Heard:
    """The agent of ``node`` sent ``message``."""

    node: str
    message: FromWorker


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection to the agent of ``node`` closed."""

    node: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A user asked; the answer is a ``Reply`` with the same ticket."""

    ticket: int
    request: Request


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner answered ``MakePlan``; ``error`` is a sentence for the user when there is no plan."""

    ticket: int
    templates: tuple[Template, ...] = ()
    proposal: Proposal | None = None
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """``Machine.next_deadline`` has passed."""


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The checkpoint of ``WriteManifest(directory)`` is complete and durable; or never will be: ``error``."""

    directory: str
    error: str = ""


Event = Heard | LinkLost | Asked | Planned | ManifestWritten | Tick

# --------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to the agent of ``node`` (dropped silently if it is not connected).

    ``ahead``: it may leave before what was recorded is durable, as a restarted daemon would say the same.
    """

    node: str
    message: ToWorker
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the user who asked with ``ticket``."""

    ticket: int
    response: Response


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan in the process pool: ``prepare(setup)`` when ``situation`` is None, else ``adapt``."""

    ticket: int
    policy: str
    setup: Setup
    situation: Situation | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """Append ``entry`` to the journal."""

    entry: msgspec.Struct


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish to the event stream."""

    change: Change


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Complete the checkpoint in ``directory`` (rename its parts into place), then prune to ``keep``; but ``way_back`` stays,
    as it is the one that the journal knows.
    """

    directory: str
    manifest: dict[str, Any]
    keep: int
    way_back: str = ""


Command = Tell | Reply | MakePlan | Record | Announce | WriteManifest
