"""What holders of the same bucket say of it, compared: bits that differ where they must not are silent data
corruption.

Owns the comparison and its words, shared by the devices (who compare votes) and the daemon (who compares
answers). Who is to blame is the core's (``core.blame``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from oobleckd.protocol.parts import Vote

What = Literal["state", "gradients"]


class Odd(msgspec.Struct, frozen=True):
    """``bucket`` is not the same for all who hold it. ``said``: device -> the fingerprint of what it has, 64
    bits.
    """

    what: What
    bucket: int
    said: dict[str, int]


class Fingerprints(msgspec.Struct, frozen=True):
    """Bucket -> fingerprint, of all that was voted on in a round that was committed: what the
    bits must be.
    """

    state: dict[int, int]
    gradients: dict[int, int]

    def of(self, what: What) -> dict[int, int]:
        """Those of ``what``."""
        return self.state if what == "state" else self.gradients


def of_norms(norms: tuple[float, ...]) -> int:
    """The fingerprint of a bucket's reduced gradients: of their norms, which every holder computes from its
    own sum.
    """
    data = msgspec.msgpack.encode(norms)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def fingerprints(vote: Vote) -> Fingerprints:
    """Of the union of a round's votes."""
    gradients = {bucket: of_norms(norms) for bucket, norms in sorted(vote.norms.items())}
    return Fingerprints(dict(sorted(vote.digests.items())), gradients)


def agree(votes: Mapping[str, Vote]) -> bool:
    """Whether the votes of a round (device -> its own) say the same of every bucket. Asked at
    every commit.
    """
    if len(votes) < 2:
        return True
    norms: dict[int, tuple[float, ...]] = {}
    digests: dict[int, int] = {}
    comparable = _comparable(votes)
    for vote in votes.values():
        if comparable:
            for bucket, values in vote.norms.items():
                if norms.setdefault(bucket, values) != values:
                    return False
        for bucket, digest in vote.digests.items():
            if digests.setdefault(bucket, digest) != digest:
                return False
    return True


def odds(votes: Mapping[str, Vote]) -> tuple[Odd, ...]:
    """What they do not agree on, and who says what of it."""
    found = _differing("state", {device: vote.digests for device, vote in votes.items()})
    if _comparable(votes):
        said = {device: {b: of_norms(n) for b, n in vote.norms.items()} for device, vote in votes.items()}
        found += _differing("gradients", said)
    return tuple(found)


def differing(digests: Mapping[str, Mapping[int, int]]) -> tuple[Odd, ...]:
    """The same of digests of state alone: device -> bucket -> digest."""
    return tuple(_differing("state", digests))


def _differing(what: What, said: Mapping[str, Mapping[int, int]]) -> list[Odd]:
    by_bucket: dict[int, dict[str, int]] = {}
    for device in sorted(said):
        for bucket, fingerprint in said[device].items():
            by_bucket.setdefault(bucket, {})[device] = fingerprint
    return [Odd(what, b, by) for b, by in sorted(by_bucket.items()) if len(set(by.values())) > 1]


def _comparable(votes: Mapping[str, Vote]) -> bool:
    """Whether norms must be equal: not where devices come to different bits, nor where a NaN or an overflow
    leaves them no meaning.
    """
    return not any(vote.nan or vote.overflow or not vote.compared for vote in votes.values())
