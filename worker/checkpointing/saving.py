"""Decides at which boundaries a device writes its part of a checkpoint, and from which copy.

Owns what ``executor`` has to know of checkpoints between two boundaries. Who writes which bucket and what a
share is are ``snapshot``'s, writing is ``writer``'s.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from oobleckd.planner.plan import Layout
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters, Vote
from oobleckd.worker.checkpointing.snapshot import Due, due_after, take_share
from oobleckd.worker.checkpointing.writer import Writer
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.sharding.group import ShardGroup
from oobleckd.worker.state.store import Store


class CheckInputs(Protocol):
    """Has all that the device reads read once more, in the background: what led to ``counters`` has been read
    by now.
    """

    def __call__(self, counters: Counters, *, hurry: bool) -> None:
        """``hurry``: nobody trains meanwhile."""


def no_check(counters: Counters, *, hurry: bool) -> None:
    """Nobody looks."""


class Saving:
    """Of one device and job. ``begun``: the first round after the boundary of the last checkpoint.
    ``folder``: where the layout in force has it write, and ``journal`` whose mark that has ("": the job's id,
    and nobody's). ``only_evaluates``: nothing is trained, so there is no end to write.
    """

    def __init__(
        self, device: str, job_id: str, job: Job, store: Store, corpus: Corpus, writer: Writer,
        check_inputs: CheckInputs = no_check,
    ) -> None:  # fmt: skip
        self.device, self.job_id, self.job = device, job_id, job
        self.store, self.corpus, self.writer, self.check_inputs = store, corpus, writer, check_inputs
        self.due = Due()
        self.begun = 0
        self.folder = self.journal = ""
        self.only_evaluates = False

    def decide(self, vote: Vote, was: Counters, following: Counters) -> Due:
        """Whether a checkpoint begins at the boundary that ``vote`` leads to, in the round that ``was``
        begin; ``following`` begin the next one.
        """
        self.due = due_after(self.job, vote, was, following, at_end=not self.only_evaluates)
        return self.due

    def begin(
        self, layout: Layout, live: Collection[str], counters: Counters, group: ShardGroup, *, last: bool
    ) -> None:
        """Write this device's share of the state at this boundary: of a copy, where the plan has room for
        one, or where it is put together of the shards of ``group``.
        """
        # Training waits for a copy in memory, and never for the disk. With every = 0 no room is planned for
        # a copy, and the state itself is written. (D-checkpoints-001, D-checkpoints-002)
        copied = self.job.checkpoint.every != 0 and not last and not self.writer.busy
        share = take_share(
            self.device, self.job_id, self.job, self.store, layout, live, counters,
            self.corpus.digest, copied=copied, folder=self.folder, journal=self.journal,
            whole=group.whole,
        )  # fmt: skip
        self.begun = counters.round
        self.check_inputs(counters, hurry=last)
        self.writer.begin(share)
