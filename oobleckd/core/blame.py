"""Names whose bits are wrong, from what holders of the same bucket said of it. Pure; what follows is
``corruption``'s.

Three ways to tell, in this order. *Majority*: where more than half of a bucket's holders agree, the others
are wrong. *Recomputation*: where they do not (two copies), the job rolls back to a state that was agreed on
and computes the same step again, to the same bits, whoever computes them: who said something else then was
wrong. *Again and again*: who is in three disagreements that nobody could settle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from oobleckd.protocol.corruption import Fingerprints, Odd

TOO_OFTEN = 3


class Dispute(msgspec.Struct, frozen=True):
    """Holders disagreed in ``step``, and nobody could tell who was wrong."""

    step: int
    odds: tuple[Odd, ...]

    def devices(self) -> frozenset[str]:
        """All who had a part in it."""
        return frozenset(device for odd in self.odds for device in odd.said)

    def covered_by(self, truth: Fingerprints) -> bool:
        """Whether ``truth`` has all that was disagreed on."""
        return all(truth.of(odd) is not None for odd in self.odds)


def outvoted(odds: Sequence[Odd]) -> tuple[str, ...]:
    """Devices that more than half of a bucket's holders contradict with one voice, in name order."""
    named: set[str] = set()
    for odd in odds:
        said, count = Counter(odd.said.values()).most_common(1)[0]
        if 2 * count > len(odd.said):
            named |= {device for device, fingerprint in odd.said.items() if fingerprint != said}
    return tuple(sorted(named))


def refuted(dispute: Dispute, truth: Fingerprints) -> tuple[str, ...]:
    """Devices that said something else than what came out when it was computed again, in name order.

    Nobody, where all of a bucket did: a wrong gradient had gone into everybody's weights before they were
    compared.
    """
    named: set[str] = set()
    for odd in dispute.odds:
        right = truth.of(odd)
        if right in odd.said.values():
            named |= {device for device, fingerprint in odd.said.items() if fingerprint != right}
    return tuple(sorted(named))


def suspected(disputes: Sequence[Dispute]) -> tuple[str, ...]:
    """Devices in too many disputes to be trusted, in name order."""
    times = Counter(device for dispute in disputes for device in dispute.devices())
    return tuple(sorted(device for device, count in times.items() if count >= TOO_OFTEN))
