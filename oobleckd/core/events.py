"""What the core machine takes in and gives out. Events are past tense, commands imperative.

The shell (daemon or simulator) feeds events to ``Machine.handle(event, now)`` and performs the
commands in order; it makes every ``Record`` durable before it performs a later ``Tell`` or ``Reply``. Structs, as one is made for each of
thousands of messages a second and a frozen dataclass takes ten times as long.
"""

from __future__ import annotations

from typing import Any

import msgspec

from oobleckd.protocol.api import Change, Request, Response
from oobleckd.protocol.messages import FromWorker, ToWorker
from planner.plan import Template
from planner.policy import Proposal, Setup, Situation

# --------------------------------------------------------------------------- events


class Heard(msgspec.Struct, frozen=True):
    """The agent of ``node`` sent ``message``."""

    node: str
    message: FromWorker


class LinkLost(msgspec.Struct, frozen=True):
    """The connection to the agent of ``node`` closed."""

    node: str


class Asked(msgspec.Struct, frozen=True):
    """A user asked; the answer is a ``Reply`` with the same ticket."""

    ticket: int
    request: Request


class Planned(msgspec.Struct, frozen=True):
    """The planner answered ``MakePlan``; ``error`` is a sentence for the user when there is no plan."""

    ticket: int
    templates: tuple[Template, ...] = ()
    proposal: Proposal | None = None
    error: str = ""
    hint: str = ""


class Tick(msgspec.Struct, frozen=True):
    """``Machine.next_deadline`` has passed."""


class ManifestWritten(msgspec.Struct, frozen=True):
    """The checkpoint of ``WriteManifest(directory)`` is complete and durable; or never will be: ``error``."""

    directory: str
    error: str = ""


Event = Heard | LinkLost | Asked | Planned | ManifestWritten | Tick

# --------------------------------------------------------------------------- commands


class Tell(msgspec.Struct, frozen=True):
    """Send ``message`` to the agent of ``node`` (dropped silently if it is not connected).

    ``ahead``: it may leave before what was recorded is durable, as a restarted daemon would say the same.
    """

    node: str
    message: ToWorker
    ahead: bool = False


class Reply(msgspec.Struct, frozen=True):
    """Answer the user who asked with ``ticket``."""

    ticket: int
    response: Response


class MakePlan(msgspec.Struct, frozen=True):
    """Plan in the process pool: ``prepare(setup)`` when ``situation`` is None, else ``adapt``."""

    ticket: int
    policy: str
    setup: Setup
    situation: Situation | None = None


class Record(msgspec.Struct, frozen=True):
    """Append ``entry`` to the journal."""

    entry: msgspec.Struct


class Announce(msgspec.Struct, frozen=True):
    """Publish to the event stream."""

    change: Change


class WriteManifest(msgspec.Struct, frozen=True):
    """Complete the checkpoint in ``directory`` (rename its parts into place), then prune to ``keep``; but ``way_back`` stays,
    as it is the one that the journal knows, and ``checked``, the newest whose text is known to have been the right one.
    """

    directory: str
    manifest: dict[str, Any]
    keep: int
    way_back: str = ""
    checked: str = ""


class SetAside(msgspec.Struct, frozen=True):
    """Name the damaged checkpoint in ``directory`` so that nobody takes it for one."""

    directory: str


Command = Tell | Reply | MakePlan | Record | Announce | WriteManifest | SetAside
