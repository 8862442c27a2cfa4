"""Where a device is in a round, as one table: what each phase lets it do, and which may follow.

held: it stands at the boundary before the round. computing: it computes, and contributes what is complete.
voted: all that it holds is reduced and its vote is cast; what it still computes are attempts for others.
early: besides, it has updated as if all votes were in, and begun the next round. asked: it has answered a
report, so until the decision it sends no sums, casts no vote and commits nothing (docs/recovery.md); what no
dead device had a part in it goes on computing. asked-held: the same, at a boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["held", "computing", "voted", "early", "asked", "asked-held"]


@dataclass(frozen=True, slots=True)
class Allowed:
    """``computes``: runs tasks. ``commits``: contributes, votes and commits. ``then``: the phases that may
    follow.
    """

    computes: bool
    commits: bool
    then: tuple[Phase, ...]


PHASES: dict[Phase, Allowed] = {
    "held": Allowed(computes=False, commits=False, then=("held", "computing", "voted", "asked-held")),
    "computing": Allowed(computes=True, commits=True, then=("held", "voted", "asked")),
    "voted": Allowed(computes=True, commits=True, then=("held", "computing", "early", "asked")),
    "early": Allowed(computes=True, commits=True, then=("held", "computing", "asked")),
    "asked": Allowed(
        computes=True, commits=False, then=("held", "computing", "voted", "asked", "asked-held")
    ),
    "asked-held": Allowed(computes=False, commits=False, then=("held", "computing", "voted", "asked-held")),
}
"""A new layout is adopted in any phase: "held" follows, or "asked-held" where a report of a higher epoch was
answered.
"""
