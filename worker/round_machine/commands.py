"""What a ``RoundMachine`` asks of whoever runs it, in the order in which it is to be done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from oobleckd.protocol.corruption import Odd
from oobleckd.protocol.messages import ToDecideBy
from oobleckd.protocol.parts import Counters, Outcome, SkipCause, Vote
from oobleckd.worker.round_machine.copies import SumCopy
from oobleckd.worker.round_machine.tasks import Board, Kind, Task


@dataclass(frozen=True, slots=True)
class RoundSpec:
    """A round to be run. ``tag`` names it in the keys of data, ``board`` has its tasks and its ledger."""

    counters: Counters
    tag: int
    board: Board


@dataclass(frozen=True, slots=True)
class RunTask:
    """Run ``task`` to its end, or until its micro-batch is frozen. ``early``: of the round that was begun
    before the present one is committed.
    """

    kind: Kind
    task: Task
    early: bool = False


@dataclass(frozen=True, slots=True)
class Contribute:
    """Send this device's sums of ``bucket``, and take in those of slices that it makes means of. ``shares``:
    to whom, and of which slices.
    """

    bucket: int
    shares: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Give:
    """Send the means of ``slices`` of ``bucket``, which are here, to ``peers``."""

    bucket: int
    slices: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CastVote:
    """All is reduced: say what this device knows of the round to ``RoundMachine.cast``."""


@dataclass(frozen=True, slots=True)
class SendVote:
    """Send ``vote`` to ``peers``."""

    peers: tuple[str, ...]
    epoch: int
    round: int
    vote: Vote


@dataclass(frozen=True, slots=True)
class UpdateEarly:
    """Keep the state, update as if all votes were in and let the round through, and begin ``following``."""

    following: RoundSpec


@dataclass(frozen=True, slots=True)
class RollBack:
    """Be in the state before the early update. What was taken for the round that was begun is kept."""


@dataclass(frozen=True, slots=True)
class CommitRound:
    """The round of ``was`` is committed under ``epoch`` with ``vote``: update, unless that was done
    ``early``. ``taken_back``: it was, in vain. ``hold``: the device stops at the boundary. ``cause``: why it
    is skipped.
    """

    was: Counters
    epoch: int
    vote: Vote
    outcome: Outcome
    early: bool
    taken_back: bool
    hold: bool
    cause: SkipCause = ""


@dataclass(frozen=True, slots=True)
class BeginRound:
    """The next round is ``spec``. ``begun``: it is the one that was begun early."""

    spec: RoundSpec
    begun: bool


@dataclass(frozen=True, slots=True)
class EnterExchange:
    """Sums are exchanged under a new epoch, or of a new round: what came before is nobody's."""


@dataclass(frozen=True, slots=True)
class InheritSums:
    """The copy of the sums of ``device``, which is dead, counts as this device's own: ``what`` it has."""

    device: str
    what: SumCopy


@dataclass(frozen=True, slots=True)
class ForgetSums:
    """The shard group has lost a device: what was added up here in this round counts for nothing."""


@dataclass(frozen=True, slots=True)
class TakeUp:
    """New attempts of micro-batches that were ``frozen`` are on the board. ``resumed``: task -> the one of
    the attempt before that it goes on with. ``repairs``: there are any.
    """

    frozen: Collection[int]
    resumed: Mapping[Task, Task]
    repairs: bool


@dataclass(frozen=True, slots=True)
class Distrust:
    """Tell that holders have different bits (``odds``)."""

    odds: tuple[Odd, ...]


@dataclass(frozen=True, slots=True)
class WriteLast:
    """Write the job's last checkpoint: the dead may have had a bucket of it to write."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Say that the device stands at the boundary before the present round."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to the daemon."""

    message: ToDecideBy


Command = (
    RunTask
    | Contribute
    | Give
    | CastVote
    | SendVote
    | UpdateEarly
    | RollBack
    | CommitRound
    | BeginRound
    | EnterExchange
    | InheritSums
    | ForgetSums
    | TakeUp
    | Distrust
    | WriteLast
    | Hold
    | Tell
)
