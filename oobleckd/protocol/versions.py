"""Which versions of the protocol this program speaks, and which one two programs speak with each other.

A newer program may speak older versions, too, so that daemon and workers are upgraded one after the other:
each end says the newest and the oldest that it speaks, and the newest that both do is spoken. Owns that rule.
A version is another one where programs of before would misunderstand, or could not read, what is said; new
fields with defaults are no new version.
"""

from __future__ import annotations

from oobleckd.protocol.messages import PROTOCOL

OLDEST = PROTOCOL
"""The oldest version that this program speaks besides ``PROTOCOL`` and those between."""


def spoken(newest: int, oldest: int) -> int | None:
    """What to speak with somebody who speaks ``oldest`` to ``newest`` (oldest 0: ``newest`` alone); None:
    there is nothing that both do.
    """
    version = min(newest, PROTOCOL)
    return version if version >= max(oldest or newest, OLDEST) else None


def words(newest: int, oldest: int) -> str:
    """Versions for a sentence, such as "7" or "6 to 7"."""
    return f"{newest}" if oldest in {0, newest} else f"{oldest} to {newest}"
