"""Finds silent data corruption, the device's half: whether what it holds and adds up is still what it was
(docs/corruption.md).

Owns in which rounds digests go into the vote, and what a device says where something is wrong. Comparing is
``protocol.corruption``'s, naming the culprit the daemon's.
"""

from __future__ import annotations

from collections.abc import Collection

from oobleckd.protocol.corruption import Fingerprints, Odd, fingerprints
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Corrupted
from oobleckd.protocol.parts import Counters, Vote
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.state.store import Store


class Check:
    """Digests of one device's state, for one job.

    ``every``: they are compared in the steps whose number it divides (0: in none). ``recheck``: the step
    whose fingerprints are told (-1: none).
    """

    def __init__(self, device: str, job_id: str, job: Job, store: Store, activity: ActivityPage) -> None:
        self.device, self.job_id, self.store, self.activity = device, job_id, store, activity
        self.every = job.fault_tolerance.check_every
        self.recheck = -1

    def compares(self, step: int) -> bool:
        """Whether ``step`` is one in which holders compare what they have, or the one to recheck."""
        # Comparing every n-th step is the job's choice: a flip that is found late may be in everybody's
        # weights by then. (D-corruption-001)
        return self.every > 0 and (step % self.every == 0 or step == self.recheck)

    def digests(self, step: int, shared: Collection[int]) -> dict[int, int]:
        """Bucket, or shard of one (``_of``) -> digest of its state, of those that are ``shared`` with
        others, if ``step`` is one in which they are compared; of all, if it is the one to recheck.
        """
        if not self.compares(step):
            return {}
        return self._of(self.store.buckets if step == self.recheck else shared)

    def of_state(self) -> dict[int, int]:
        """Bucket -> 64-bit digest of its state; none where the job has nothing compared."""
        return self._of(self.store.buckets) if self.every else {}

    def _of(self, buckets: Collection[int]) -> dict[int, int]:
        with self.activity.doing("check", units=0):
            found = self.store.digests(sorted(buckets))
        # Shards have numbers of their own behind those of buckets: holders of the same ones are compared.
        shift = self.store.rank * len(self.store.spec.buckets)
        return {bucket + shift: digest for bucket, digest in found.items()}

    def told(self, step: int, vote: Vote) -> Fingerprints | None:
        """What the bits were in a committed round of ``step``, if the daemon wants to know because somebody
        had others there before.
        """
        return fingerprints(vote) if step == self.recheck else None

    def corrupted(
        self, epoch: int, counters: Counters, odds: tuple[Odd, ...] = (), own: str = ""
    ) -> Corrupted:
        """That something is wrong in the round that ``counters`` begin: holders do not agree, or this
        device's ``own`` memory changed.
        """
        return Corrupted(self.device, self.job_id, epoch, counters, odds, own)
