"""What a user asks the daemon to change, and what it answers: bodies and answers of the HTTP API that are
tagged, since they go to the core and into the audit log as they are.

Owns the shapes only; which address takes what is in ``daemon.openapi``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import (
    Counters,
    How,
)


class Request(msgspec.Struct, frozen=True, tag=True):
    """Base of what a user asks the daemon to do. ``who`` is filled in by the HTTP layer (audit)."""


class Submit(Request, frozen=True):
    """Queue ``job``. ``resume``: a checkpoint folder to start from, or "latest" of the job's own folder.

    ``counters``: those of that folder, filled in by the HTTP layer from its manifest.json, as the
    core reads no files; None where there is none that can be read. ``folder``: the folder that it made for
    the job's checkpoints, by its name, which is the job's id ("": none was made, and the id has the next
    number). ``inputs``: what that checkpoint was made from, by the same manifest, where ``job`` names the
    same data.
    """

    job: Job
    resume: str = ""
    who: str = ""
    counters: Counters | None = None
    folder: str = ""
    inputs: Inputs = ()


class Control(Request, frozen=True):
    """pause, resume, cancel or checkpoint a job. ``discard``: a cancel writes no checkpoint before."""

    job: str
    act: Literal["pause", "resume", "cancel", "checkpoint"]
    who: str = ""
    discard: bool = False


class Delete(Request, frozen=True):
    """A job that is over is in no list any more, and its id means nothing. Its files stay where they are."""

    job: str
    who: str = ""


class Drain(Request, frozen=True):
    """Take a node out of plans (``undo``: back in) at a step's boundary."""

    node: str
    reason: str = ""
    undo: bool = False
    who: str = ""


class Forget(Request, frozen=True):
    """A node that is gone will not come back: it is not expected any more."""

    node: str
    who: str = ""


class Kill(Request, frozen=True):
    """Failure injection on a node; see ``agentmessages.Inject``. ``device``: the device's number."""

    node: str
    how: How = "sigkill"
    at: str = ""
    round: int = -1
    seconds: float = 0.0
    times: float = 1.0
    who: str = ""
    device: int = 0


AnyRequest = Submit | Control | Delete | Drain | Forget | Kill


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Done or under way. ``id`` is the job's id for a submit; ``message`` says what happens next."""

    id: str = ""
    message: str = ""


class Denied(msgspec.Struct, frozen=True, tag=True):
    """Not done, and nothing changed. ``kind`` decides exit code and HTTP status (404, 409, 403, 422)."""

    kind: Literal["not-found", "conflict", "forbidden", "invalid"]
    problem: str
    hint: str = ""


Response = Accepted | Denied
