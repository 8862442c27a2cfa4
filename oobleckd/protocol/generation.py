"""The number that grows with each loss and each new plan, under the two names that it has in the API.

It is ``epoch`` in the core, in messages and in the journal, and ``generation`` wherever somebody reads it: to
everybody who trains an epoch is a pass over the data.
"""

from __future__ import annotations

import msgspec


class Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what has an ``epoch``: ``generation`` is always the same number."""

    generation: int = 0

    def __post_init__(self) -> None:
        epoch: int = getattr(self, "epoch", 0)
        msgspec.structs.force_setattr(self, "generation", epoch)
