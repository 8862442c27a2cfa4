"""Messages about what a job reads: its preparation on a node, its identity, and what becomes of it."""

from __future__ import annotations

from typing import Literal

from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.message import Message
from oobleckd.protocol.parts import (
    Counters,
    PreparePhase,
)


class Identified(Message, frozen=True):
    """What a device would read of ``job``, or does: said when it begins with it, with its ``canary`` then
    (``Ready``), and in answer to ``Identify``. ``error``: why it can read nothing.
    """

    device: str
    job: str
    inputs: Inputs
    error: str = ""
    hint: str = ""
    canary: str = ""


class InputsChecked(Message, frozen=True):
    """A device has read all bytes of what it reads, from after its round before ``counters`` on: they are
    what they were when it began.
    """

    device: str
    job: str
    counters: Counters
    inputs: Inputs


class InputsChanged(Message, frozen=True):
    """What a device has mapped was written to: it goes no further, and whatever it gave in rounds before
    ``counters`` may have come from other bytes. ``what``: which file, and how it shows.
    """

    device: str
    job: str
    counters: Counters
    what: str


class InputsMoved(Message, frozen=True):
    """Another file lies at ``path`` by now, or none: what a device has mapped is untouched, and who opens the
    path reads something else.
    """

    device: str
    job: str
    path: str
    now: Literal["other", "gone", "back"]


class Preparing(Message, frozen=True):
    """How far an agent's process is with the data of ``job``, once a second, and whenever that is asked for.

    ``done_bytes`` of ``total_bytes`` of a ``phase``, ``bytes_per_s`` of it (0: not known yet); ``source``: of
    that one of several. ``order``, here and in the two that follow: of the ``PrepareData`` that it answers.
    """

    job: str
    order: str = ""
    phase: PreparePhase = "look"
    source: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0


class PrepareDone(Message, frozen=True):
    """The data of ``job`` is prepared: a folder for each source, in order ("": it needs none)."""

    job: str
    folders: tuple[str, ...]
    order: str = ""


class PrepareFailed(Message, frozen=True):
    """The data of ``job`` is not prepared, for a reason that a user must mend. ``begun``: more was done than
    a look, so that others would fail as well; ``died``: the process ended by itself, and might not again.
    """

    job: str
    error: str
    hint: str = ""
    begun: bool = False
    died: bool = False
    order: str = ""


class Identify(Message, frozen=True):
    """Say what you would read of ``job``."""

    device: str
    job: str
    spec: Job


class PrepareData(Message, frozen=True):
    """To an agent: have the data of ``job`` prepared, by a process of its own. Who is at it, or has done it,
    says that again; who has failed under an ``order`` before begins anew.
    """

    job: str
    spec: Job
    order: str


class StopPreparing(Message, frozen=True):
    """To an agent: end what prepares the data of ``job``, and forget what came of it."""

    job: str
