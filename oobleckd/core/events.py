"""What the core machine takes in and gives out. Events are past tense, commands imperative.

The shell (daemon or simulator) feeds events to ``Machine.handle(event, now)`` and performs the commands in
order; it makes every ``Record`` durable before it performs a later ``Tell`` or ``Reply``. Structs, as one is
made for each of thousands of messages a second and a frozen dataclass takes ten times as long.
"""

from __future__ import annotations

import msgspec

from oobleckd.planner.plan import Template
from oobleckd.planner.policy import Proposal, Setup, Situation
from oobleckd.protocol.agentmessages import FiguresTold
from oobleckd.protocol.changes import Change
from oobleckd.protocol.checkpoint import Manifest
from oobleckd.protocol.messages import ToDecideBy, ToWorker
from oobleckd.protocol.requests import Request, Response

# --------------------------------------------------------------------------- events


class Heard(msgspec.Struct, frozen=True):
    """The agent of ``node`` sent ``message``."""

    node: str
    message: ToDecideBy


class FiguresHeard(msgspec.Struct, frozen=True):
    """The agent of ``node`` told of its devices, for who watches: nothing is decided by it, nor by that it
    came.
    """

    node: str
    message: FiguresTold


class LinkLost(msgspec.Struct, frozen=True):
    """The connection to the agent of ``node`` closed."""

    node: str


class Asked(msgspec.Struct, frozen=True):
    """A user asked; the answer is a ``Reply`` with the same ticket."""

    ticket: int
    request: Request


class Planned(msgspec.Struct, frozen=True):
    """The planner answered ``MakePlan``; ``error`` is a sentence for the user when there is no plan.
    ``setup``: the one that it has chosen, where it was asked to.
    """

    ticket: int
    templates: tuple[Template, ...] = ()
    proposal: Proposal | None = None
    error: str = ""
    hint: str = ""
    setup: Setup | None = None


class Tick(msgspec.Struct, frozen=True):
    """``Machine.next_deadline`` has passed."""


class ManifestWritten(msgspec.Struct, frozen=True):
    """The checkpoint of ``WriteManifest(directory)`` is complete and durable; or never will be: ``error``,
    for people. ``again``: it is not yet, and is tried again; ``errno`` then names the system's error.
    """

    directory: str
    error: str = ""
    again: bool = False
    errno: str = ""


class FolderFound(msgspec.Struct, frozen=True):
    """The job's checkpoints go into ``folder``, a name in its ``checkpoint.dir``: it has the journal's mark.
    ``why`` it is another one than before, as a sentence for people; "" where it is not.
    """

    job: str
    folder: str
    why: str = ""


class RoomSeen(msgspec.Struct, frozen=True):
    """The answer to ``LookAtRoom(job)``: what may be written there. -1: nobody knows, or there is
    no limit.
    """

    job: str
    free_bytes: int = -1
    free_files: int = -1


Decisive = Heard | LinkLost | Asked | Planned | ManifestWritten | FolderFound | RoomSeen | Tick
Event = Decisive | FiguresHeard

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
    """Plan in the process pool: ``prepare(setup)`` when ``situation`` is None, else ``adapt``. ``others``: of
    these and ``setup`` the best is to be prepared. ``num_nodes``: for so many nodes, and ``setup`` is what
    the job has (0: for those that each was made for).
    """

    ticket: int
    policy: str
    setup: Setup
    situation: Situation | None = None
    others: tuple[Setup, ...] = ()
    num_nodes: int = 0


class Record(msgspec.Struct, frozen=True):
    """Append ``entry`` to the journal."""

    entry: msgspec.Struct


class KeepState(msgspec.Struct, frozen=True):
    """Keep ``data`` with the journal: the state after all entries that were recorded before, from which a
    start goes on with those after it (``snapshot``).
    """

    data: bytes


class Announce(msgspec.Struct, frozen=True):
    """Publish to the event stream."""

    change: Change


class WriteManifest(msgspec.Struct, frozen=True):
    """Complete the checkpoint of ``job`` in ``directory`` (rename its parts into place), then prune to
    ``keep``; but ``spared`` stay: the one that the journal knows, the newest whose text is known to have been
    the right one, and those that other jobs begin from.
    """

    directory: str
    manifest: Manifest
    keep: int
    spared: tuple[str, ...] = ()
    job: str = ""


class SetAside(msgspec.Struct, frozen=True):
    """Name the damaged checkpoint in ``directory`` so that nobody takes it for one."""

    directory: str


class Discard(msgspec.Struct, frozen=True):
    """Remove the ``.partial`` folder ``directory``, or all of those in it: nobody will complete them."""

    directory: str


class LookAtRoom(msgspec.Struct, frozen=True):
    """See how much may be written in ``directory``, for the checkpoints of ``job``; answered by
    ``RoomSeen``.
    """

    job: str
    directory: str


Command = (
    Tell | Reply | MakePlan | Record | KeepState | Announce | WriteManifest | SetAside | Discard | LookAtRoom
)
