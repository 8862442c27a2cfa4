"""What holders of the same bucket say of it, compared: bits that differ where they must not are silent data
corruption.

Owns the comparison and its words, shared by the devices (who compare votes) and the daemon (who compares
answers). Who is to blame is the core's (``core.blame``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from oobleckd.protocol.parts import Vote


def shard_number(bucket: int, rank: int, num_buckets: int) -> int:
    """Under which number a digest of the ``rank``-th shard of ``bucket`` is told, by a device of a stage of
    several; of the whole bucket that is its own.
    """
    return bucket + rank * num_buckets


What = Literal["state", "gradients", "means"]
"""Of a bucket: its training state; the figures of its gradients that every holder has; what those who made
the mean gradients of a slice have made of the same sums.
"""


class Odd(msgspec.Struct, frozen=True):
    """``bucket`` is not the same for all who hold it. ``said``: device -> the fingerprint of what it has, 64
    bits. ``slice``: which one, of means.
    """

    what: What
    bucket: int
    said: dict[str, int]
    slice: int = -1


class Fingerprints(msgspec.Struct, frozen=True):
    """Bucket -> fingerprint, of all that was voted on in a round that was committed: what the
    bits must be. ``means``: bucket -> slice -> fingerprint.
    """

    state: dict[int, int]
    gradients: dict[int, int]
    means: dict[int, dict[int, int]] = {}

    def of(self, odd: Odd) -> int | None:
        """The one that ``odd`` is about; None where it is not known."""
        match odd.what:
            case "state":
                return self.state.get(odd.bucket)
            case "gradients":
                return self.gradients.get(odd.bucket)
            case "means":
                return self.means.get(odd.bucket, {}).get(odd.slice)


def of_numbers(values: Sequence[float]) -> int:
    """The fingerprint of ``values``, to the bit: of a bucket's norms, or of what the means of a slice come
    to.
    """
    data = msgspec.msgpack.encode(values)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def fingerprints(vote: Vote) -> Fingerprints:
    """Of the union of a round's votes."""
    gradients = {bucket: of_numbers(norms) for bucket, norms in sorted(vote.norms.items())}
    means = {bucket: dict(sorted(made.items())) for bucket, made in sorted(vote.made.items())}
    return Fingerprints(dict(sorted(vote.digests.items())), gradients, means)


def agree(votes: Mapping[str, Vote]) -> bool:
    """Whether the votes of a round (device -> its own) say the same of every bucket. Asked at
    every commit.
    """
    if len(votes) < 2:
        return True
    norms: dict[int, tuple[float, ...]] = {}
    digests: dict[int, int] = {}
    means: dict[tuple[int, int], int] = {}
    comparable = _comparable(votes)
    for vote in votes.values():
        if comparable:
            for bucket, made in vote.made.items():
                for number, fingerprint in made.items():
                    if means.setdefault((bucket, number), fingerprint) != fingerprint:
                        return False
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
    if not _comparable(votes):
        return tuple(found)
    made = _means_that_differ(votes)
    if made:
        # Norms follow from the means: those who were given a wrong one repeat what its owner says, and are no
        # witnesses. (D-corruption-012)
        return (*found, *made)
    said = {device: {b: of_numbers(n) for b, n in vote.norms.items()} for device, vote in votes.items()}
    return (*found, *_differing("gradients", said))


def _means_that_differ(votes: Mapping[str, Vote]) -> list[Odd]:
    by_slice: dict[tuple[int, int], dict[str, int]] = {}
    for device in sorted(votes):
        for bucket, made in votes[device].made.items():
            for number, fingerprint in made.items():
                by_slice.setdefault((bucket, number), {})[device] = fingerprint
    return [
        Odd("means", bucket, by, number)
        for (bucket, number), by in sorted(by_slice.items())
        if len(set(by.values())) > 1
    ]


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
