"""What the bodies of requests to the API may have, and how large it may be. Anything else is refused before
anybody looks at it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from oobleckd.protocol.parts import How


class SubmitBody(msgspec.Struct, forbid_unknown_fields=True):
    """Queue ``job``, a decoded job.toml; ``resume``: from a checkpoint folder, "latest" of its name, or what
    ``JOB`` or ``JOB@STEP`` names.
    """

    job: dict[str, Any]
    resume: Annotated[str, Meta(max_length=4096)] = ""


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """Why a node is kept out of plans, or let in again."""

    reason: Annotated[str, Meta(max_length=1024)] = ""


class KillBody(msgspec.Struct, forbid_unknown_fields=True):
    """A failure to inject; see ``protocol.agentmessages.Inject``."""

    how: How = "sigkill"
    at: Annotated[str, Meta(max_length=64)] = ""
    round: Annotated[int, Meta(ge=-1, lt=2**62)] = -1
    seconds: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    times: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    device: Annotated[int, Meta(ge=0, lt=2**16, description="The number of the device.")] = 0
