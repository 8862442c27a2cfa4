"""Bugs to be planted in the round machine: the model check finds each of them, and so do the simulated
worlds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from oobleckd.core import decide
from oobleckd.core.decide import _Case
from oobleckd.protocol.messages import Progress
from oobleckd.protocol.parts import Vote, outcome_of
from oobleckd.worker.round_machine import machine
from oobleckd.worker.round_machine.commands import Tell
from oobleckd.worker.round_machine.commit import Commit
from oobleckd.worker.round_machine.exchange import Exchange
from oobleckd.worker.round_machine.machine import Commands, Fence, RoundMachine
from oobleckd.worker.round_machine.phases import PHASES, Allowed

Plant = Callable[[pytest.MonkeyPatch], None]


def a_vote_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """What one peer says counts as the word of another one, too."""
    hear = Commit.hear

    def heard(self: Commit, device: str, epoch: int, round_: int, vote: Vote) -> bool:
        counts = hear(self, device, epoch, round_, vote)
        if device in self.votes:
            others = sorted(self.live - self.votes.keys() - {self.device})
            self.votes |= dict.fromkeys(others[:1], vote)
        return counts

    patch.setattr(Commit, "hear", heard)


def old_messages_count(patch: pytest.MonkeyPatch) -> None:
    """Sums and votes of older epochs are taken for those of the present one."""
    hear, fence = Commit.hear, RoundMachine.fence

    def heard(self: Commit, device: str, epoch: int, round_: int, vote: Vote) -> bool:
        return hear(self, device, max(epoch, self.answered), round_, vote)

    def fenced(self: RoundMachine, epoch: int, round_: int) -> Fence:
        return fence(self, max(epoch, self.epoch), round_)

    patch.setattr(Commit, "hear", heard)
    patch.setattr(RoundMachine, "fence", fenced)


def an_update_before_all_votes(patch: pytest.MonkeyPatch) -> None:
    """A round commits with the votes that are here."""

    def committed(self: Commit) -> Vote | None:
        if self.frozen or self.own is None:
            return None
        return Vote.union(self.votes[device] for device in sorted(self.live & self.votes.keys()))

    patch.setattr(Commit, "committed", committed)


def old_decisions_are_obeyed(patch: pytest.MonkeyPatch) -> None:
    """A decision counts although a report of a higher epoch was answered since."""

    def decide(self: Commit, epoch: int, live: Iterable[str]) -> bool:
        if epoch <= self.epoch:
            return False
        self.epoch, self.answered = epoch, max(epoch, self.answered)
        self.live, self.votes = frozenset(live), {}
        return True

    patch.setattr(Commit, "decide", decide)


def answered_and_still_updating(patch: pytest.MonkeyPatch) -> None:
    """Who has answered a report goes on contributing, voting and committing under the old epoch."""
    patch.setattr(Commit, "frozen", property(lambda _: False))
    patch.setitem(PHASES, "asked", Allowed(computes=True, commits=True, then=tuple(PHASES)))
    patch.setitem(PHASES, "computing", Allowed(computes=True, commits=True, then=tuple(PHASES)))
    patch.setitem(PHASES, "voted", Allowed(computes=True, commits=True, then=tuple(PHASES)))
    patch.setitem(PHASES, "early", Allowed(computes=True, commits=True, then=tuple(PHASES)))
    report = RoundMachine.report

    def reported(self: RoundMachine, *args: object) -> object:
        commands = report(self, *args)  # type: ignore[arg-type]
        self.exchange.open = True
        return commands

    patch.setattr(RoundMachine, "report", reported)


def losses_of_the_dead_count(patch: pytest.MonkeyPatch) -> None:
    """What a dead head had to say of an evaluation is taken for said."""
    report = RoundMachine.report

    def reported(self: RoundMachine, *args: Any) -> Commands:
        commands = report(self, *args)
        if not commands or not self.now.board.evaluates:
            return commands
        *before, told = commands
        assert isinstance(told, Tell)
        assert isinstance(told.message, Progress)
        head = self.layout.num_layers - 1
        done = {head: (*told.message.done.get(head, ()), *sorted(self.interrupted))}
        return (*before, Tell(msgspec.structs.replace(told.message, done=done)))

    patch.setattr(RoundMachine, "report", reported)


def evaluated_before_all_losses(patch: pytest.MonkeyPatch) -> None:
    """Who holds the head votes on an evaluation as those do who have nothing to wait for."""
    complete = Exchange.complete.fget  # type: ignore[attr-defined]
    patch.setattr(Exchange, "complete", property(lambda self: self.num_evaluated > 0 or complete(self)))


def an_evaluation_is_a_step(patch: pytest.MonkeyPatch) -> None:
    """It counts as one that was applied."""
    patch.setattr(machine, "outcome_of", lambda vote, **_: outcome_of(vote))


def an_evaluation_is_repaired_as_a_step(patch: pytest.MonkeyPatch) -> None:
    """Of its micro-batches over the dead the gradients of all layers are missing."""
    repair = _Case.repair

    def repaired(self: _Case, *args: Any) -> Any:
        none = dataclasses.replace(self.evaluation, total=0)
        return repair(msgspec.structs.replace(self, evaluation=none), *args)

    patch.setattr(_Case, "repair", repaired)


def sums_of_the_dead_count(patch: pytest.MonkeyPatch) -> None:
    """Who makes means keeps what it was sent under an earlier epoch."""
    enter = Exchange.enter

    def entered(self: Exchange, *args: Any) -> None:
        known, round_ = dict(self.heard), self.round
        enter(self, *args)
        for bucket, heard in known.items():
            if bucket in self.heard and self.round == round_ and self.sources[bucket]:
                self.heard[bucket] |= heard
                self.sources[bucket] = tuple(sorted({*self.sources[bucket], *heard}))

    patch.setattr(Exchange, "enter", entered)


def a_mean_is_donated_twice(patch: pytest.MonkeyPatch) -> None:
    """All survivors give all that they have."""

    def shares(bucket: int, inside: Mapping[str, Progress], holders: Sequence[str]) -> dict[str, int]:
        return {device: inside[device].reduced[bucket][0] for device in holders}

    patch.setattr(decide, "_shares", shares)


def a_vote_before_the_last_slice(patch: pytest.MonkeyPatch) -> None:
    """A bucket of which some means are here counts as reduced."""

    def complete(self: Exchange) -> bool:
        return all(self.here.get(bucket) for bucket in self.held)

    patch.setattr(Exchange, "complete", property(complete))


IN_SLICES: tuple[Plant, ...] = (sums_of_the_dead_count, a_mean_is_donated_twice, a_vote_before_the_last_slice)
IN_AN_EVALUATION: tuple[Plant, ...] = (
    losses_of_the_dead_count,
    evaluated_before_all_losses,
    an_evaluation_is_a_step,
    an_evaluation_is_repaired_as_a_step,
)
IN_THE_MACHINE: tuple[Plant, ...] = (
    a_vote_counts_twice,
    old_messages_count,
    an_update_before_all_votes,
    old_decisions_are_obeyed,
    answered_and_still_updating,
)
