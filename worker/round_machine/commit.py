"""The devices' half of the commit rule: votes of a round, and the two fences that make it safe.

Pure: no torch, no socket, so that the model check can walk every interleaving of it. Owns which votes
count and when a round commits; does not own what is voted (``reduce``) nor what a commit does
(``executor``). The rule and why it is safe: docs/recovery.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from oobleckd.protocol import corruption
from oobleckd.protocol.corruption import Odd
from oobleckd.protocol.parts import Vote


class ReplicasDisagree(RuntimeError):
    """Holders of a bucket have different bits (``odds``): silent data corruption."""

    def __init__(self, odds: tuple[Odd, ...]) -> None:
        what = ", ".join(f"{odd.what} of bucket {odd.bucket}" for odd in odds)
        super().__init__(f"replicas disagree: {what}")
        self.odds = odds


@dataclass(slots=True)
class Commit:
    """Votes that ``device`` has heard in its present round.

    ``epoch`` is the one it votes under, ``answered`` the highest that it has answered a report of. While
    ``answered`` is ahead, the device neither votes nor commits. ``live`` are the devices whose votes
    it needs, itself among them.
    """

    device: str
    epoch: int = 0
    answered: int = 0
    round: int = 0
    live: frozenset[str] = frozenset()
    own: Vote | None = None
    last: Vote | None = None
    votes: dict[str, Vote] = field(default_factory=dict)
    early: dict[tuple[int, int, str], Vote] = field(default_factory=dict)

    @property
    def frozen(self) -> bool:
        """Whether a report was answered and its decision is still to come."""
        return self.answered > self.epoch

    def adopt(self, epoch: int, round_: int, live: Iterable[str]) -> None:
        """Take part in a new layout from ``round_`` on."""
        self.epoch = epoch
        self.answered = max(self.answered, epoch)
        self.live = frozenset(live)
        self.last = None
        self._begin(round_)

    def cast(self, vote: Vote) -> None:
        """The device is REDUCED. Its first vote of a round stands, whatever flags come later."""
        if self.own is None:
            self.own = vote
        if not self.frozen:
            self.votes[self.device] = self.own

    def hear(self, device: str, epoch: int, round_: int, vote: Vote) -> bool:
        """A peer's vote; False if it is fenced off."""
        # Who has answered a report commits no more by older votes, and sends none: if any device has
        # updated for a round, it had the votes of all, so every survivor is REDUCED (docs/recovery.md, "Why
        # this is safe").
        if epoch < self.answered or round_ < self.round:
            return False
        if (epoch, round_) == (self.epoch, self.round) and not self.frozen:
            self.votes[device] = vote
        else:
            self.early[epoch, round_, device] = vote
        return True

    def committed(self) -> Vote | None:
        """The union of votes, once every live device has voted and no report is open. Raises
        ReplicasDisagree.
        """
        if self.frozen or self.own is None or not self.live <= self.votes.keys():
            return None
        # Compared before the update: then a flipped weight is found while nothing that came of it is in
        # anybody's weights, and two copies are enough to find whose it was. (D-corruption-001)
        votes = {device: self.votes[device] for device in sorted(self.live)}
        if not corruption.agree(votes):
            # Nobody knows yet who is wrong, so nobody goes on: a step that committed without the odd one's
            # vote might only have to be rolled back. (D-corruption-005)
            raise ReplicasDisagree(corruption.odds(votes))
        return Vote.union(votes.values())

    def disagreements(self) -> tuple[Odd, ...]:
        """What the votes heard so far do not agree on."""
        return () if corruption.agree(self.votes) else corruption.odds(self.votes)

    def heard(self) -> Vote | None:
        """For ``Progress``: the union of what is known if this device is REDUCED."""
        if self.own is None:
            return None
        known = Vote.union([self.own, *(self.votes[device] for device in sorted(self.votes))])
        # What others made is theirs to say: a device that repeats it is no witness. (D-corruption-012)
        return msgspec.structs.replace(known, made=self.own.made)

    def advance(self, vote: Vote) -> None:
        """The present round committed with ``vote``; the next begins."""
        self.last = vote
        self._begin(self.round + 1)

    def report(self, epoch: int) -> bool:
        """A report of ``epoch``; False if one as high was answered before."""
        if epoch <= self.answered:
            return False
        self.answered = epoch
        return True

    def decide(self, epoch: int, live: Iterable[str]) -> bool:
        """A decision; False if a report of a higher epoch was answered (or this one was taken)."""
        if epoch < self.answered or epoch <= self.epoch:
            return False
        self.epoch = self.answered = epoch
        self.live = frozenset(live)
        # All survivors vote anew under the new generation; an older vote may be of a device that has not
        # heard of the loss (docs/recovery.md, "A failure", 4).
        self.votes = {}
        self._drain()
        if self.own is not None:
            self.votes[self.device] = self.own
        return True

    def _begin(self, round_: int) -> None:
        self.round = round_
        self.own = None
        self.votes = {}
        self._drain()

    def _drain(self) -> None:
        ahead = {}
        for (epoch, round_, device), vote in self.early.items():
            if (epoch, round_) == (self.epoch, self.round):
                self.votes[device] = vote
            elif epoch >= self.epoch and round_ >= self.round:
                ahead[epoch, round_, device] = vote
        self.early = ahead
