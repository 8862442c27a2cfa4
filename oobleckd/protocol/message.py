"""What every message between daemon, agents and device processes is (``messages`` has the rules)."""

from __future__ import annotations

import msgspec

from oobleckd.protocol.parts import (
    repr_without_secrets,
)


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything on the wire."""

    __repr__ = repr_without_secrets
